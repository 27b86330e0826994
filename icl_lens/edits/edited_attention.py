"""Apply the edits of a layer's attention, in passes over whole prompts and over rows of one token."""

from collections.abc import Sequence
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import Attention, EditAtLayers, LayerEdits, Stage
from icl_lens.edits.recomputed_patterns import LayerValues, recompute_pattern, score_inputs
from icl_lens.models.attention_scores import attention_scoring


def edited_attention(
    values: LayerValues,
    edits: LayerEdits,
    last: Int[Tensor, " row"],
    prompts: Sequence[Int[Tensor, " row"]],
) -> tuple[list[int], Float[Tensor, "row head query key"], Float[Tensor, "row key head d_head"]]:
    """Return the heads whose attention is edited, with their edited patterns and values.

    `last` is the index of each row's last query, `prompts` has the index of each row's prompt for
    each edit. A pattern is recomputed from queries and keys if an edit changes its scores or if the
    model's own was not recorded.
    """
    edited_heads = sorted(set(chain.from_iterable(heads for _, _, heads in edits)))
    n_before = sum(stage < Stage.pattern for stage, _, _ in edits)
    recorded = values.seen.get("pattern")
    inputs = None
    if n_before or recorded is None:
        position_share = any(stage == Stage.scores for stage, _, _ in edits)
        inputs = score_inputs(values, edited_heads, position_share=position_share)
    v = values.heads("v", edited_heads)
    weight = torch.ones(len(v), len(edited_heads), values.seen["q"].shape[1], device=v.device)
    has_sink = attention_scoring(values.view, values.layer).sinks is not None
    attention = Attention(
        edited_heads, inputs, v, weight, last, last, values.queries, has_sink=has_sink
    )
    edits_and_prompts = list(zip(edits, prompts, strict=True))
    _write_attention(attention, edits_and_prompts[:n_before], values.layer)
    attention.pattern = _pattern(values, attention, recorded)
    _write_attention(attention, edits_and_prompts[n_before:], values.layer)
    return edited_heads, attention.pattern, attention.v


def _write_attention(
    attention: Attention,
    edits: Sequence[tuple[tuple[Stage, EditAtLayers, list[int]], Int[Tensor, " row"]]],
    layer: int,
) -> None:
    """Let edits write, and record the heads whose pattern must be recomputed."""
    for (stage, edit, heads), prompt in edits:
        attention.prompt = prompt
        if stage < Stage.pattern:
            attention.rescored.update(attention.indices_of(heads))
        edit.edit.write_attention(attention, heads, layer)


def _pattern(
    values: LayerValues, attention: Attention, recorded: Tensor | None
) -> Float[Tensor, "row head query key"]:
    """Return the edited heads' pattern after the inputs and scores stages: the recorded one where
    no edit has changed the scores.
    """
    heads = attention.edited_heads
    if recorded is not None and (attention.inputs is None or not attention.rescored):
        return recorded[:, heads].clone()
    assert attention.inputs is not None
    pattern = recompute_pattern(values, attention.inputs, heads, attention.weight)
    if recorded is not None:
        unchanged = [index for index in range(len(heads)) if index not in attention.rescored]
        pattern[:, unchanged] = recorded[:, [heads[index] for index in unchanged]].to(pattern)
    return pattern
