"""Log-probability increases of layers, heads, (head, position) pairs and neurons: exact, every part.

`I(u | x) = log p(w | x + u) − log p(w | x)`, in nats, at each prompt's last position, for the token in
`targets`. Increases are not additive: those of the parts need not sum to that of the whole.
Source: the paper's appendix E; docs/howto/numbers.md. To find only the largest, see
`icl_lens.attribution.search`, which needs a fraction of the work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.decompose import head_outputs, neuron_values, subhead_values
from icl_lens.errors import InputError
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView

# [batch, part, d_model] vectors are made and read out in pieces of about this size.
PART_BYTES = 192 * 2**20


@dataclass(frozen=True)
class LayerIncreases:
    """Log-probability increase of each layer's attention and FFN, nats.

    Example:
        >>> attn, ffn = il.layer_log_prob_increase(acts, targets)
        >>> ffn.shape
        torch.Size([1, 6])
    """

    attn: Float[Tensor, "batch layer"]
    ffn: Float[Tensor, "batch layer"]

    def __iter__(self) -> Iterator[Tensor]:
        """`attn, ffn = …`"""
        return iter((self.attn, self.ffn))


def check_targets(acts: Activations, targets: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """`targets` on the readout's device; raises InputError if they are no token ids of this batch and vocabulary."""
    return target_tokens(acts.view, targets, len(acts.batch))


def target_tokens(view: ModelView, targets: Int[Tensor, " batch"], n: int) -> Int[Tensor, " batch"]:
    """`check_targets` for `n` prompts of which there are no activations yet."""
    targets = torch.as_tensor(targets, device=view.home)
    d_vocab = view.model.W_U.shape[1]
    if targets.shape != (n,) or targets.is_floating_point():
        raise InputError(
            f"targets must be one token id per prompt, shape ({n},); got {tuple(targets.shape)} {targets.dtype}"
        )
    if bool(((targets < 0) | (targets >= d_vocab)).any()):
        raise InputError(
            f"targets must lie in 0–{d_vocab - 1}; -1 means a prompt without an answer: give prompts an answer, "
            "or score another token (for instance the predicted label's)"
        )
    return targets


def layer_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> LayerIncreases:
    """What each layer's attention and FFN add to the log-probability of the target, nats.

    Attention relative to the layer input x; FFN relative to x + attention (to x for parallel blocks, whose FFN
    reads the same input). Raises InputError for bad targets.

    Example:
        >>> increases = il.layer_log_prob_increase(acts, targets)
        >>> increases.attn.shape
        torch.Size([1, 6])
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    x = acts.resid_pre.to(readout.dtype)
    mid = x + acts.attn_out.to(readout.dtype)
    after = (x if acts.view.parallel else mid) + acts.mlp_out.to(readout.dtype)
    before_attn, after_attn, after_ffn = (readout.token_log_probs(part, targets) for part in (x, mid, after))
    return LayerIncreases(
        attn=after_attn - before_attn, ffn=after_ffn - (before_attn if acts.view.parallel else after_attn)
    )


def head_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch layer head"]:
    """What each head adds to the log-probability of the target, nats, relative to its layer's input.

    Raises InputError for bad targets.

    Example:
        >>> il.head_log_prob_increase(acts, targets).shape
        torch.Size([1, 6, 8])
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    return every_head_increase(acts.view, readout, acts.resid_pre, acts.head_inputs, targets)


def every_head_increase(
    view: ModelView,
    readout: Readout,
    x: Float[Tensor, "batch layer d_model"],
    z: Float[Tensor, "batch layer head d_head"],
    targets: Int[Tensor, " batch"],
) -> Float[Tensor, "batch layer head"]:
    """`head_log_prob_increase` from what it reads: layer inputs and `Activations.head_inputs`.

    Up to `fold_from` prompts, head vectors go through W_U. From there on a head's W_O·W_U is multiplied out once and
    its z goes through that: the product costs d_head · d_model · d_vocab, and each prompt d_head · d_vocab instead of
    d_model · d_vocab. Own norm and logit soft-cap cannot be folded.
    """
    x, z = x.to(readout.dtype), z.to(readout.dtype)
    n, n_layers, n_heads, _ = z.shape
    out = x.new_empty((n, n_layers, n_heads))
    fold = readout.is_affine and n >= fold_from(view.d_head, view.d_model)
    for layer in range(n_layers):
        W_O = view.W_O(layer).to(readout.dtype)
        if not fold:
            base = readout.token_log_probs(x[:, layer, None], targets)[:, 0]
            out[:, layer] = _increase(readout, x[:, layer], base, head_outputs(z[:, layer], W_O), targets)
            continue
        for rows, _ in readout.pieces(n, 1):
            part = readout.rows(rows)
            logits = part.logits(x[rows, layer])
            base = _log_prob(logits, targets[rows])
            scale = part.scale if readout.normalize else torch.ones_like(part.scale)
            for head in range(n_heads):
                after = torch.addmm(logits, z[rows, layer, head] * scale[:, None], readout.vocabulary_scores(W_O[head]))
                out[rows, layer, head] = _log_prob(after, targets[rows]) - base
    return out


def fold_from(d_head: int, d_model: int) -> int:
    """Number of prompts from which W_O·W_U pays: n · d_model > d_head · (d_model + n); 68 in GPT-2 large."""
    return d_head * d_model // max(1, d_model - d_head) + 1


def _log_prob(logits: Float[Tensor, "batch d_vocab"], targets: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    return logits.gather(-1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)


def subhead_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    layers: Sequence[int] | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch layer head pos"]:
    """What each head moves from each position adds to the log-probability of the target, nats.

    Exhaustive: every (layer, head, position). `layers` narrows the layer axis to those layers, in that order.
    Zero at padding. `icl_lens.top_subheads` finds the largest ones at a fraction of the cost.
    Raises InputError for bad targets or layers.

    Example:
        >>> il.subhead_log_prob_increase(acts, targets, layers=[2, 3]).shape
        torch.Size([1, 2, 8, 14])
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    chosen = [_check_layer(acts, layer) for layer in (range(acts.view.n_layers) if layers is None else layers)]
    width = acts.pattern.shape[-1]
    n = len(acts.batch)
    out = acts.readout.scale.new_zeros((n, len(chosen), acts.view.n_heads, width))
    if not chosen:
        return out
    x = acts.resid_pre[:, chosen].to(readout.dtype)
    base = readout.token_log_probs(x, targets)
    part = acts.view.n_heads * width * acts.view.d_model * x.element_size()
    step = max(1, PART_BYTES // part)
    for i, layer in enumerate(chosen):
        pattern, values, W_O = acts.head_pattern(layer), acts.head_values(layer), acts.view.W_O(layer)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            u = subhead_values(pattern[rows], values[rows], W_O)
            increase = _increase(readout.rows(rows), x[rows, i], base[rows, i], u.flatten(1, 2), targets[rows])
            out[rows, i] = increase.unflatten(1, (acts.view.n_heads, width))
    keys = torch.arange(width, device=out.device)
    return out.masked_fill((keys > acts.batch.last.to(out.device)[:, None])[:, None, None], 0.0)


def neuron_log_prob_increase(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    layer: int,
    *,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch neuron"]:
    """What each neuron of one FFN adds to the log-probability of the target, nats, relative to the FFN's input.

    Raises InputError for bad targets, a layer that does not exist, or an FFN without single neurons.

    Example:
        >>> il.neuron_log_prob_increase(acts, targets, layer=2).shape
        torch.Size([1, 512])
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    layer = _check_layer(acts, layer)
    if acts.mlp_post is None:
        raise InputError(f"{acts.view.name} shows no FFN coefficients (mlp.hook_post): neurons cannot be told apart")
    x = acts.resid_pre[:, layer].to(readout.dtype)
    if not acts.view.parallel:
        x = x + acts.attn_out[:, layer].to(readout.dtype)
    base = readout.token_log_probs(x[:, None], targets)[:, 0]
    post = acts.mlp_post[:, layer].to(readout.dtype)
    if acts.mlp_scale is not None:
        post = post * acts.mlp_scale[:, layer, None]
    W_out = acts.view.W_out(layer)
    n, d_mlp = post.shape
    step = max(1, PART_BYTES // (n * acts.view.d_model * x.element_size()))
    pieces = [
        _increase(readout, x, base, neuron_values(post[:, i : i + step], W_out[i : i + step]), targets)
        for i in range(0, d_mlp, step)
    ]
    return torch.cat(pieces, dim=1)


def _increase(
    readout: Readout,
    x: Float[Tensor, "batch d_model"],
    base: Float[Tensor, " batch"],
    u: Float[Tensor, "batch part d_model"],
    targets: Int[Tensor, " batch"],
) -> Float[Tensor, "batch part"]:
    return readout.token_log_probs(x[:, None] + u, targets) - base[:, None]


def _check_layer(acts: Activations, layer: int) -> int:
    if not 0 <= layer < acts.view.n_layers:
        raise InputError(f"layer {layer} does not exist: {acts.view.name} has layers 0–{acts.view.n_layers - 1}")
    return layer
