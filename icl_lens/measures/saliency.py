"""Saliency of attention edges for the answer's loss, and its flow from texts to labels to the last
position.

The saliency of the edge from query i to key j in a layer is the sum over heads of |A ⊙ ∂loss/∂A| at
(i, j). A head's z at i is z_i = Σ_j A_ij v_j, so ∂loss/∂A_ij = ∂loss/∂z_i · v_j: gradients of z
suffice, even for families that ignore edits of the pattern. Source: Wang et al., "Label words are
anchors", arXiv 2305.14160. Like their formula, this sums absolute values over heads; their released
code takes the absolute value of the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.edits.gradients import prompts_at_once, z_gradients
from icl_lens.edits.recomputed_patterns import LayerValues, recording_hooks
from icl_lens.errors import InputError
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_demonstrations
from icl_lens.result.base import Result
from icl_lens.result.tables import long_frame, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps

# Tolerance between pattern times values and z, relative to the largest |z|, by dtype of the model.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}

Reduction = Callable[[Float[Tensor, "batch query key"]], Float[Tensor, "batch ..."]]


@dataclass(frozen=True, repr=False)
class SaliencyFlow(Result):
    """Mean saliency of the attention edges of each kind, by layer, in nats (loss units,
    non-negative).

    An edge is a query position i and an earlier key position j; information flows from j to i. The
    first three kinds are the published ones: w is any position, p a token of a demonstration's
    label, and q the last position. Edges between tokens of one label are in `rest`. The last two
    are parts of `rest` and baselines for the first two, with another token in place of the label.

    Example:
        >>> flow = il.saliency_flow(model, batch)
        >>> flow.text_to_label.shape == (1, model.cfg.n_layers)
        True
        >>> bool((flow.share("label_to_last", "other_to_last") <= 1).all())
        True
    """

    text_to_label: Float[Tensor, "batch layer"]
    """S_wp: i a token of a label, j any position before the label."""
    label_to_last: Float[Tensor, "batch layer"]
    """S_pq: i the last position, j a token of a label."""
    rest: Float[Tensor, "batch layer"]
    """S_ww: all other edges."""
    text_to_other: Float[Tensor, "batch layer"]
    """i a token of the demonstrations that is not in a label, j any position before it."""
    other_to_last: Float[Tensor, "batch layer"]
    """i the last position, j any position that is not in a label."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing
    edits it.
    """

    def share(self, kind: str, versus: str) -> Float[Tensor, "batch layer"]:
        """Return one kind's share (0–1) of the sum of two kinds; ½ if both are equally salient, NaN
        if both are 0.
        """
        saliency = getattr(self, kind)
        return saliency / (saliency + getattr(self, versus))

    def to_frame(self) -> pd.DataFrame:
        """Return prompt, layer, text_to_label, label_to_last, rest, text_to_other and other_to_last
        (nats).
        """
        frame = long_frame(self.text_to_label, ("prompt", "layer"), value="text_to_label")
        for name in KINDS[1:]:
            frame[name] = getattr(self, name).detach().float().cpu().flatten().numpy()
        return frame

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        columns: dict[str, list[Any]] = {
            "layer": [str(layer) for layer in range(self.rest.shape[1])]
        }
        for name in KINDS[:3]:
            means = getattr(self, name).float().mean(0).tolist()
            columns[name.replace("_", " ")] = [f"{mean:.2e}" for mean in means]
        n, n_layers = self.rest.shape
        over = f"mean over {plural_prompts(n)}" if n > 1 else plural_prompts(n)
        title = f"SaliencyFlow, nats per edge: {over}{edits_suffix(self.edits)}"
        return table_view(title, columns, n_layers)


KINDS = ("text_to_label", "label_to_last", "rest", "text_to_other", "other_to_last")


def attention_saliency(
    model: Any, batch: PromptBatch, *, progress: bool | None = None
) -> Float[Tensor, "batch layer query key"]:
    """Return the saliency of each attention edge for each prompt's loss: `abs(A · ∂loss/∂A)`,
    summed over heads, nats.

    The loss is the cross-entropy of the answer among the prompt's labels or, for prompts without
    demonstrations, of the target over the vocabulary. One forward and one backward pass. The result
    takes layer · pos² numbers per prompt; `saliency_flow` returns one number per layer and kind of
    edge.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    Raise InputError for prompts with neither answer nor target, and for models whose z is not
    pattern times values. Source: Wang et al., arXiv 2305.14160, equation 1.

    Example:
        >>> saliency = il.attention_saliency(model, batch)
        >>> saliency.shape[2:], bool((saliency >= 0).all()), float(saliency[0, -1, :-1].max())
        (torch.Size([19, 19]), True, 0.0)
    """
    check_batch(batch)
    width = batch.tokens.shape[1]

    def padded(saliency: Tensor) -> Tensor:
        n_missing = width - saliency.shape[-1]
        return torch.nn.functional.pad(saliency, (0, n_missing, 0, n_missing))

    with progress_switch(progress):
        return _by_layer(ModelView.of(model), batch, lambda piece: padded)


def saliency_flow(model: Any, batch: PromptBatch, *, progress: bool | None = None) -> SaliencyFlow:
    """Return the mean saliency of edges text → label (S_wp), label → last position (S_pq) and all
    others (S_ww).

    See `attention_saliency` for saliency, loss and `progress`, `SaliencyFlow` for the kinds of
    edges. Raise InputError for prompts without demonstrations or answer. Source: Wang et al., arXiv
    2305.14160, section 2.

    Example:
        >>> flow = il.saliency_flow(model, batch)
        >>> bool((flow.label_to_last > 0).all()), float(flow.text_to_label[0, -1])
        (True, 0.0)
    """
    check_batch(batch)
    require_demonstrations(
        batch, "flow through labels", "use attention_saliency, which needs no labels"
    )

    def means_of(piece: PromptBatch) -> Reduction:
        kinds = edge_kinds(piece)

        def means(saliency: Tensor) -> Float[Tensor, "batch kind"]:
            columns = []
            for name in KINDS:
                edges = kinds[name].to(saliency)
                columns.append((saliency * edges).sum((1, 2)) / edges.sum((1, 2)))
            return torch.stack(columns, dim=-1)

        return means

    view = ModelView.of(model)
    with progress_switch(progress):
        means_by_kind = _by_layer(view, batch, means_of)
    return SaliencyFlow(*means_by_kind.unbind(-1), edits=active_edits(view))


def edge_kinds(batch: PromptBatch) -> dict[str, Bool[Tensor, "batch query key"]]:
    """Return the edges of each kind in `SaliencyFlow`: from real tokens to earlier real tokens."""
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    real = batch.attention_mask.bool()
    earlier = (position[:, None] > position) & real[:, :, None] & real[:, None, :]
    start, end = batch.label_ranges[..., None].unbind(2)
    in_label = (start <= position) & (position < end)  # [batch demo pos]
    is_label, demonstration = in_label.any(1), in_label.int().argmax(1)
    in_same_label = (
        is_label[:, :, None]
        & is_label[:, None, :]
        & (demonstration[:, :, None] == demonstration[:, None])
    )
    is_last = position == batch.last[:, None]
    in_demonstrations = position < batch.query_range[:, :1]
    to_label = earlier & is_label[:, :, None] & ~in_same_label
    to_last = earlier & is_last[:, :, None]
    label_to_last = to_last & is_label[:, None, :]
    return {
        "text_to_label": to_label,
        "label_to_last": label_to_last,
        "rest": earlier & ~to_label & ~label_to_last,
        "text_to_other": earlier & (in_demonstrations & ~is_label)[:, :, None],
        "other_to_last": to_last & ~is_label[:, None, :],
    }


def _by_layer(
    view: ModelView,
    batch: PromptBatch,
    reduction_of: Callable[[PromptBatch], Reduction],
) -> Tensor:
    """Reduce each layer's saliency of a few prompts at a time; return [batch layer ...].

    `reduction_of` maps these prompts to what reduces their saliency. To bound memory, prompts are
    processed a few at a time, and each layer when the backward pass reaches it; what is left of it
    is written where it is returned, because that may be the largest tensor.
    """
    check_batch(batch)
    if bool((batch.answer_tokens < 0).any()):
        row = int((batch.answer_tokens < 0).nonzero()[0])
        raise InputError(
            f"batch must have an answer or target for every prompt, got none for prompt {row}"
        )
    by_layer: list[Tensor] = []  # [batch layer ...], once its shape is known

    def write(rows: Tensor, layer: int, reduced: Tensor) -> None:
        if not by_layer:
            shape = (len(batch), view.n_layers, *reduced.shape[1:])
            by_layer.append(reduced.new_zeros(shape))
        by_layer[0][rows, layer] = reduced

    with steps("saliency", len(batch)) as advance:
        for rows in torch.arange(len(batch)).split(prompts_at_once(view, batch)):
            prompts = batch[rows]
            _read_saliency(view, prompts, reduction_of(prompts), partial(write, rows))
            advance(len(rows))
    return by_layer[0]


def _read_saliency(
    view: ModelView,
    batch: PromptBatch,
    reduction: Reduction,
    write: Callable[[int, Float[Tensor, "batch ..."]], None],
) -> None:
    """Call `write` with each layer and the reduction of its saliency [batch query key]."""
    values = [LayerValues(view, layer) for layer in range(view.n_layers)]
    all_heads = list(range(view.n_heads))
    hooks = []
    for layer_values in values:
        hooks += recording_hooks(layer_values, "v", "pattern")

    def read(layer: int, z: Tensor, gradient: Tensor) -> None:
        dtype = torch.promote_types(z.dtype, torch.float32)
        v = values[layer].heads("v", all_heads).to(dtype)
        pattern = values[layer].seen["pattern"].to(dtype)
        _check(view, layer, pattern, v, z, batch)
        edge_gradient = einsum(
            gradient.to(dtype),
            v,
            "batch query head d_head, batch key head d_head -> batch head query key",
        )
        # In place: such a matrix of a long prompt takes most of the memory.
        saliency = edge_gradient.mul_(pattern).abs_().sum(1)
        write(layer, reduction(saliency.to(view.unembed_device)))

    z_gradients(view, batch, partial(_answer_loss, batch), read, hooks, values)


def _answer_loss(
    batch: PromptBatch, log_probs: Float[Tensor, "batch d_vocab"]
) -> Float[Tensor, "batch 1"]:
    """Return −log p of each prompt's answer, nats: among its labels or, without labels, among all
    tokens.
    """
    # Clones, because tensors of inference mode cannot be saved for backward.
    device = log_probs.device
    rows = torch.arange(len(batch), device=device)
    answer = log_probs[rows, batch.answer_tokens.clone().to(device)]
    if not batch.labels:
        return -answer[:, None]
    is_choice = batch.label_mask.clone().to(device)
    labels = log_probs[:, batch.label_tokens.clone().to(device)]
    of_any_label = labels.masked_fill(~is_choice, -torch.inf).logsumexp(-1)
    return (of_any_label - answer)[:, None]


def _check(
    view: ModelView, layer: int, pattern: Tensor, v: Tensor, z: Tensor, batch: PromptBatch
) -> None:
    """Raise InputError if a layer's z is not its pattern times its values."""
    mixed = einsum(
        pattern, v, "batch head query key, batch key head d_head -> batch query head d_head"
    )
    real = batch.attention_mask.to(z.device, mixed.dtype)[:, :, None, None]
    relative_error = float(
        ((mixed - z.to(mixed.dtype)) * real).abs().max() / z.abs().max().clamp(min=1e-30)
    )
    if not relative_error <= TOLERANCE.get(z.dtype, 1e-3):
        raise InputError(
            f"{view.architecture} is not supported by saliency: z of layer {layer} is not pattern "
            f"times values (relative error {relative_error:.1e}); remove any active edits"
        )
