"""Exact log-probability increases of all layers, heads, (head, position) pairs and neurons.

`I(u | x) = log p(w | x + u) − log p(w | x)`, in nats, at each prompt's last position, for the token
w in `targets`. Increases are not additive: the increases of several parts need not sum to the
increase of the parts' sum.

With `against`, all functions return contrasts, the increases of log p(w) − log Σ p(w'_i), in which
the softmax's normalizer cancels. With one other token, a frozen norm and no soft-cap, the contrast
is linear: `C(u) = u · g` with one `g` for all layers, so parts add up. Otherwise the contrast is
evaluated before and after adding u, like increases, but only on the columns of W_U for these
tokens.

Source: the paper's appendix E; docs/howto/numbers.md. `icl_lens.reading.search` finds only the
largest increases, at a fraction of the cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product, starmap

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_integers
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import PART_BYTES
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.reading.activations import Activations
from icl_lens.reading.decompose import head_outputs, neuron_values, subhead_values
from icl_lens.reading.head_parts import head_values, padding, scaled_pattern, scaled_z
from icl_lens.reading.scored_tokens import (
    Against,
    CheckedAgainst,
    check_activations,
    check_scoring,
    select_rows,
)
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import long_frame, plural_prompts
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class LayerIncreases(Result):
    """Log-probability increase of each layer's attention and FFN, nats.

    Example:
        >>> attn, ffn = il.layer_log_prob_increase(acts)
        >>> ffn.shape
        torch.Size([1, 8])
    """

    attn: Float[Tensor, "batch layer"]
    ffn: Float[Tensor, "batch layer"]

    def __iter__(self) -> Iterator[Tensor]:
        """Allow unpacking: `attn, ffn = il.layer_log_prob_increase(…)`."""
        return iter((self.attn, self.ffn))

    def to_frame(self) -> pd.DataFrame:
        """Return prompt, layer, component ("attn" | "ffn") and value (nats): one row for each."""
        frame = long_frame(
            torch.stack([self.attn, self.ffn], dim=2), ("prompt", "layer", "component")
        )
        frame["component"] = ["attn", "ffn"] * self.attn.numel()
        return frame

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        attn, ffn = self.attn.float().mean(0).tolist(), self.ffn.float().mean(0).tolist()
        columns = {
            "layer": list(range(len(attn))),
            "attention": map(signed, attn),
            "FFN": map(signed, ffn),
        }
        title = (
            "LayerIncreases, nats: "
            f"{'mean over ' * (len(self.attn) > 1)}{plural_prompts(len(self.attn))}"
        )
        return table_view(
            title, {name: list(column) for name, column in columns.items()}, len(attn)
        )


def linear_direction(
    readout: Readout, targets: Int[Tensor, " batch"], against: CheckedAgainst
) -> Float[Tensor, "batch d_model"] | None:
    """Return `g` with contrast = u · g for every part of every layer, or None if the contrast is
    not linear.

    It is linear with one other token per prompt and logits affine in the part: frozen norm, no
    soft-cap.
    """
    if against is None or against.shape[1] != 1 or not readout.is_affine:
        return None
    return readout.contrast_direction(targets, against[:, 0])


def layer_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> LayerIncreases:
    """Return what each layer's attention and FFN add to the log-probability of the target, nats.

    `targets` defaults to the answers. Attention is relative to the layer input x, the FFN to x +
    attention (to x for parallel layers, whose FFN reads the same input). With `against`, what they
    add to log p(target) − log Σ p(against). With one other token, attention and FFNs of all layers
    sum to the model's final contrast minus that of the embedding, in parallel layers too. Raise
    InputError for invalid targets or against.

    Example:
        >>> increases = il.layer_log_prob_increase(acts)
        >>> increases.attn.shape
        torch.Size([1, 8])
        >>> il.layer_log_prob_increase(acts, against=batch.other_label_tokens).ffn.shape
        torch.Size([1, 8])
    """
    targets, against_ids, readout = check_scoring(acts, targets, against, final_norm, bias)
    if (g := linear_direction(readout, targets, against_ids)) is not None:
        return LayerIncreases(
            *((out.to(g.dtype) * g[:, None]).sum(-1) for out in (acts.attn_out, acts.mlp_out))
        )
    x = acts.resid_pre.to(readout.dtype)
    mid = x + acts.attn_out.to(readout.dtype)
    after = (x if acts.view.parallel else mid) + acts.mlp_out.to(readout.dtype)
    log_probs = readout.token_log_probs(
        torch.cat([x, mid, after], dim=1), targets, against=against_ids
    )
    before_attn, after_attn, after_ffn = log_probs.chunk(3, dim=1)
    return LayerIncreases(
        attn=after_attn - before_attn,
        ffn=after_ffn - (before_attn if acts.view.parallel else after_attn),
    )


def head_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch layer head"]:
    """Return what each head adds to the log-probability of the target, nats, relative to its
    layer's input.

    With `against`, what it adds to log p(target) − log Σ p(against): how well it discriminates the
    target from these tokens. With one other token, the values of a layer's heads and of b_O sum to
    that of its attention. Raise InputError for invalid targets or against.

    Example:
        >>> il.head_log_prob_increase(acts).shape
        torch.Size([1, 8, 6])
        >>> il.head_log_prob_increase(acts, against=batch.other_label_tokens).shape
        torch.Size([1, 8, 6])
    """
    targets, against_ids, readout = check_scoring(acts, targets, against, final_norm, bias)
    return every_head_increase(
        acts.view, readout, acts.resid_pre, scaled_z(acts), targets, against_ids
    )


def every_head_increase(
    view: ModelView,
    readout: Readout,
    x: Float[Tensor, "batch layer d_model"],
    z: Float[Tensor, "batch layer head d_head"],
    targets: Int[Tensor, " batch"],
    against: CheckedAgainst = None,
) -> Float[Tensor, "batch layer head"]:
    """Return `head_log_prob_increase` computed from layer inputs `x` and `scaled_z`.

    For fewer than `min_prompts_to_fold` prompts, each head output is multiplied by W_U, which takes
    d_model · d_vocab operations per prompt and head. For more, each head's product W_O·W_U is
    computed once, with d_head · d_model · d_vocab operations, and multiplied by z, with d_head ·
    d_vocab operations per prompt. This requires affine logits, and contrasts do not need it,
    because they read only a few columns of W_U.
    """
    if (g := linear_direction(readout, targets, against)) is not None:
        return project_heads(view, z, g[:, None].expand(-1, view.n_layers, -1))
    x, z = x.to(readout.dtype), z.to(readout.dtype)
    n, n_layers, n_heads, _ = z.shape
    out = x.new_empty((n, n_layers, n_heads))
    if (
        against is not None
        or not readout.is_affine
        or n < min_prompts_to_fold(view.d_head, view.d_model)
    ):
        step = max(1, PART_BYTES // (n_layers * (1 + n_heads) * view.d_model * x.element_size()))
        for rows in (slice(start, start + step) for start in range(0, n, step)):
            # Each layer's input, followed by this input plus each head: one product with W_U for
            # all layers.
            y = x[rows, :, None].repeat(1, 1, 1 + n_heads, 1)
            for layer in range(n_layers):
                y[:, layer, 1:] += head_outputs(z[rows, layer], view.W_O(layer))
            sub_readout, against_of_rows = readout.select_prompts(rows), select_rows(against, rows)
            log_probs = sub_readout.token_log_probs(
                y.flatten(1, 2), targets[rows], against=against_of_rows
            )
            log_probs = log_probs.unflatten(1, (n_layers, -1))
            out[rows] = log_probs[..., 1:] - log_probs[..., :1]
        return out
    for layer in range(n_layers):
        W_O = view.W_O(layer).to(readout.dtype)
        for rows, _ in readout.pieces(n, 1):
            sub_readout = readout.select_prompts(rows)
            logits = sub_readout.logits(x[rows, layer])
            base = _log_prob(logits, targets[rows])
            scale = sub_readout.scale if readout.normalize else torch.ones_like(sub_readout.scale)
            for head in range(n_heads):
                after = torch.addmm(
                    logits,
                    z[rows, layer, head] * scale[:, None],
                    readout.vocabulary_scores(W_O[head]),
                )
                out[rows, layer, head] = _log_prob(after, targets[rows]) - base
    return out


def listed_head_increase(
    acts: Activations,
    heads: Sequence[Head],
    targets: Int[Tensor, " batch"],
    against: CheckedAgainst,
    readout: Readout,
) -> Float[Tensor, "batch head"]:
    """Return `head_log_prob_increase` of a few heads."""
    increases = []
    for layer, index in heads:
        added = head_outputs(
            scaled_z(acts)[:, layer, index : index + 1].to(readout.dtype),
            acts.view.W_O(layer)[index : index + 1],
        )
        layer_input = acts.resid_pre[:, layer, None].to(readout.dtype)
        before_and_after = torch.cat([layer_input, layer_input + added], dim=1)
        log_probs = readout.token_log_probs(before_and_after, targets, against=against)
        increases.append(log_probs[:, 1] - log_probs[:, 0])
    return torch.stack(increases, dim=1)


def project_heads(
    view: ModelView,
    z: Float[Tensor, "batch layer head d_head"],
    g: Float[Tensor, "batch layer d_model"],
) -> Float[Tensor, "batch layer head"]:
    """Return the dot product of each head's output with `g`, from `scaled_z`, without
    computing outputs.
    """
    by_layer = [
        (z[:, layer].to(g.dtype) * through_W_O(view, g[:, layer], layer)).sum(-1)
        for layer in range(view.n_layers)
    ]
    return torch.stack(by_layer, dim=1)


def through_W_O(
    view: ModelView, g: Float[Tensor, "batch d_model"], layer: int
) -> Float[Tensor, "batch head d_head"]:
    """Return `W_O g` for each head: its dot product with z is that of the head's output with
    `g`.
    """
    return einsum(
        g, view.W_O(layer).to(g.dtype), "batch d_model, head d_head d_model -> batch head d_head"
    )


def project_subheads(
    acts: Activations, g: Float[Tensor, "batch d_model"], layer: int
) -> Float[Tensor, "batch head pos"]:
    """Return the dot product with `g` of what each head moves from each position; undefined at
    padding.
    """
    directions = through_W_O(acts.view, g, layer).unflatten(1, (acts.view.n_kv_heads, -1))
    equation = "batch key kv d_head, batch kv group d_head -> batch kv group key"
    by_value = einsum(acts.values.of_layer(layer).to(g.dtype), directions, equation).flatten(1, 2)
    return scaled_pattern(acts, layer) * by_value


def min_prompts_to_fold(d_head: int, d_model: int) -> int:
    """Return the number of prompts from which W_O·W_U saves time: n · d_model > d_head · (d_model +
    n).

    It is 68 in GPT-2 large.
    """
    return d_head * d_model // max(1, d_model - d_head) + 1


def _log_prob(
    logits: Float[Tensor, "batch d_vocab"], targets: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    return logits.gather(-1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)


def subhead_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    layers: Sequence[int] | None = None,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch layer head pos"]:
    """Return what each head adds to the log-probability of the target through each position, nats;
    zero at padding.

    All (layer, head, position) parts are evaluated; `il.top_subheads` finds the largest at a
    fraction of the cost. `layers` selects the layers of the result and their order. With `against`,
    what is added to log p(target) − log Σ p(against); with one other token, the values of all
    positions sum to that of the head. Raise InputError for invalid targets, against or layers.

    Example:
        >>> il.subhead_log_prob_increase(acts, layers=[2, 3]).shape
        torch.Size([1, 2, 6, 19])
        >>> other_labels = batch.other_label_tokens
        >>> il.subhead_log_prob_increase(acts, layers=[2, 3], against=other_labels).shape
        torch.Size([1, 2, 6, 19])
    """
    check_activations(acts)
    if layers is None:
        layers = range(acts.view.n_layers)
    layers = [_check_layer(acts, layer) for layer in layers]
    heads = list(starmap(Head, product(layers, range(acts.view.n_heads))))
    increases = head_position_increases(
        acts, targets, heads, against=against, final_norm=final_norm, bias=bias
    )
    return increases.unflatten(1, (len(layers), acts.view.n_heads))


def head_position_increases(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None,
    heads: Sequence[Head],
    *,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch head pos"]:
    """Return `subhead_log_prob_increase` of some heads, nats, which share products with W_U."""
    targets, against_ids, readout = check_scoring(acts, targets, against, final_norm, bias)
    is_padding = padding(acts)[:, None]
    if not heads:
        return readout.scale.new_zeros(len(is_padding), 0, is_padding.shape[-1])
    if (g := linear_direction(readout, targets, against_ids)) is not None:
        layers = {head.layer for head in heads}
        by_layer = {layer: project_subheads(acts, g, layer) for layer in layers}
        projected = torch.stack([by_layer[layer][:, head] for layer, head in heads], dim=1)
        return projected.masked_fill(is_padding, 0.0)
    pieces, width = [], is_padding.shape[-1]
    # Up to a layer's heads at a time: larger products do not fit in a processor's cache.
    step = PART_BYTES // (len(is_padding) * width * acts.view.d_model * readout.dtype.itemsize)
    step = max(1, min(step, acts.view.n_heads))
    for piece in (heads[start : start + step] for start in range(0, len(heads), step)):
        # For each layer, its input, followed by this input plus each part: one product with W_U for
        # all of them.
        inputs = []
        for layer, of_layer in groupby(piece, key=lambda head: head.layer):
            index = [head for _, head in of_layer]
            pattern, values = (
                scaled_pattern(acts, layer)[:, index],
                head_values(acts, layer)[:, :, index],
            )
            x = acts.resid_pre[:, layer, None].to(readout.dtype)
            parts = subhead_values(pattern, values, acts.view.W_O(layer)[index]).flatten(1, 2)
            inputs += [x, parts.add_(x)]
        log_probs = readout.token_log_probs(torch.cat(inputs, dim=1), targets, against=against_ids)
        before_and_after = log_probs.split([y.shape[1] for y in inputs], dim=1)
        for before, after in zip(before_and_after[::2], before_and_after[1::2], strict=True):
            pieces.append((after - before).unflatten(1, (-1, width)))
    return torch.cat(pieces, dim=1).masked_fill(is_padding, 0.0)


def neuron_log_prob_increase(
    acts: Activations,
    layer: int,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch neuron"]:
    """Return what each neuron of one FFN adds to the log-probability of the target, nats, relative
    to the FFN's input.

    With `against`, what it adds to log p(target) − log Σ p(against); with one other token, the
    values of neurons and b_out sum to that of the FFN. Raise InputError for invalid token ids, an
    unknown layer, or an FFN whose neurons are not exposed.

    Example:
        >>> il.neuron_log_prob_increase(acts, 2).shape
        torch.Size([1, 384])
        >>> il.neuron_log_prob_increase(acts, 2, against=batch.other_label_tokens).shape
        torch.Size([1, 384])
    """
    targets, against_ids, readout = check_scoring(acts, targets, against, final_norm, bias)
    layer = _check_layer(acts, layer)
    if acts.mlp_post is None:
        raise InputError(
            f"{acts.view.name} must have neurons of the same number in every layer, got none that "
            "can be separated (a mixture of experts, or FFNs of several widths); use layer and "
            "head increases instead"
        )
    post = acts.mlp_post[:, layer].to(readout.dtype)
    if acts.mlp_scale is not None:
        post = post * acts.mlp_scale[:, layer, None]
    W_out = acts.view.W_out(layer)
    if (g := linear_direction(readout, targets, against_ids)) is not None:
        return post * (g @ W_out.to(g.dtype).T)
    x = acts.resid_pre[:, layer].to(readout.dtype)
    if not acts.view.parallel:
        x = x + acts.attn_out[:, layer].to(readout.dtype)
    base = readout.token_log_probs(x[:, None], targets, against=against_ids)
    n, d_mlp = post.shape
    step = max(1, PART_BYTES // (n * acts.view.d_model * x.element_size()))
    pieces = []
    for start in range(0, d_mlp, step):
        neurons = slice(start, start + step)
        y = x[:, None] + neuron_values(post[:, neurons], W_out[neurons])
        pieces.append(readout.token_log_probs(y, targets, against=against_ids) - base)
    return torch.cat(pieces, dim=1)


def _check_layer(acts: Activations, layer: int) -> int:
    check_integers(layer=layer)
    if not 0 <= layer < acts.view.n_layers:
        raise InputError(
            f"layer must be between 0 and {acts.view.n_layers - 1} for {acts.view.name}, got "
            f"{layer!r}"
        )
    return layer
