"""The attention of heads whose queries are turned against their keys.

A turn is a random rotation of a head's own dimensions: of all of them or, in heads with rotary
positions, of each pair that rotates together, since other rotations would not commute with the
positions. It keeps the lengths of all vectors and the head's dependence on positions, and loses
what queries and keys have in common.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.recomputed_patterns import (
    LayerValues,
    ScoreInputs,
    recompute_pattern,
    recording_hooks,
    rotation,
    score_inputs,
)
from icl_lens.errors import InputError
from icl_lens.models.attention_scores import AttentionScoring, attention_scoring, rotate
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.repeated_tokens import attention_statistics
from icl_lens.runs.progress import steps

N_TURNED_SEQUENCES = 10
"""Sequences on which turned heads are measured; means over fewer vary more, so that fewer heads
stand out.
"""
MAX_ERROR = 0.02
"""How much recomputed attention may differ from the model's own."""


@torch.no_grad()
def turned_attention(
    view: ModelView, batch: PromptBatch, n_tokens: int, n_turns: int, seed: int
) -> tuple[Float[Tensor, "turn layer head score"], Float[Tensor, "layer head distance"]]:
    """Return the scores of `attention_statistics` of turned heads, and the attention of the heads
    themselves by the number of tokens back (`attention_by_distance`), means over sequences.

    `batch` are sequences of one length that end in `n_tokens` tokens shown for the second time.
    Raise InputError for a model whose attention cannot be recomputed.
    """
    n_positions = batch.tokens.shape[1]
    queries = torch.arange(n_positions - n_tokens, n_positions)
    turned_sums: list[Tensor] = []
    distance_sums: list[Tensor] = []
    with steps("turned heads", len(batch)) as advance:
        for sequences in batch.split(rows_at_once(view, n_positions)):
            values = [LayerValues(view, layer) for layer in range(view.n_layers)]
            hooks = []
            for layer_values in values:
                hooks += recording_hooks(layer_values)
            last_logits(view.model, sequences, hooks)
            turned_of_layers, distances_of_layers = [], []
            for layer_values in values:
                generator = torch.Generator().manual_seed(seed + layer_values.layer)
                turned = _turned(layer_values, queries, n_tokens, n_turns, generator)
                turned_of_layers.append(turned)
                pattern = layer_values.seen["pattern"][:, :, queries].double().cpu()
                distances_of_layers.append(attention_by_distance(pattern, queries))
            turned_sums.append(torch.stack(turned_of_layers, dim=1) * len(sequences))
            distance_sums.append(torch.stack(distances_of_layers) * len(sequences))
            advance(len(sequences))
    n_sequences = len(batch)
    return (
        torch.stack(turned_sums).sum(0) / n_sequences,
        torch.stack(distance_sums).sum(0) / n_sequences,
    )


def attention_by_distance(
    attention: Float[Tensor, "sequence head query key"], queries: Int[Tensor, " query"]
) -> Float[Tensor, "head distance"]:
    """Return mean attention by the number of tokens back, from 0, without the first token."""
    n_keys = attention.shape[-1]
    keys = queries[:, None] - torch.arange(n_keys)  # [query distance]
    index = keys.clamp(min=0).expand_as(attention)
    by_distance = attention.gather(-1, index) * (keys > 0)
    return by_distance.mean((0, 2))


def _turned(
    values: LayerValues,
    queries: Int[Tensor, " query"],
    n_tokens: int,
    n_turns: int,
    generator: torch.Generator,
) -> Float[Tensor, "turn head score"]:
    """Return the scores of a layer's turned heads."""
    view, heads = values.view, list(range(values.view.n_heads))
    values.key_mask = torch.ones(values.seen["q"].shape[:2], dtype=torch.bool)
    inputs = score_inputs(values, heads, position_share=False)
    scoring = attention_scoring(view, values.layer)
    n_rows, n_positions = inputs.q.shape[:2]
    weight = torch.ones(n_rows, len(heads), n_positions).to(inputs.q)
    recomputed = recompute_pattern(values, inputs, heads, weight)
    own_pattern = values.seen["pattern"]
    error = float((recomputed - own_pattern).abs().max())
    if error > MAX_ERROR:
        raise InputError(
            f"the attention of {view.architecture} differs by {error:.2f} from what its queries "
            "and keys give"
        )
    n_rotary = 0
    if scoring.position == "rotary":
        cos, _ = rotation(values, values.key_mask)
        is_half = scoring.rotates_whole_heads and 2 * cos.shape[-1] == view.d_head
        n_rotary = cos.shape[-1] * (2 if is_half else 1)
    values.queries = queries.expand(n_rows, -1)
    by_turn = []
    for _ in range(n_turns):
        turned_queries = turn(inputs.q[:, queries], n_rotary, scoring, generator)
        turned_inputs = ScoreInputs(turned_queries, inputs.k, None, None)
        pattern = recompute_pattern(values, turned_inputs, heads, weight[:, :, queries])
        attention = pattern.double().cpu()
        by_turn.append(attention_statistics(attention, queries, n_tokens).mean(0))
    return torch.stack(by_turn)


def turn(
    q: Float[Tensor, "batch pos head d_head"],
    n_rotary: int,
    scoring: AttentionScoring,
    generator: torch.Generator,
) -> Float[Tensor, "batch pos head d_head"]:
    """Return queries turned at random, those of each head by another rotation: the first `n_rotary`
    dimensions pair by pair.
    """
    n_rows, n_positions, n_heads, d_head = q.shape
    by_head = q.flatten(0, 1).transpose(0, 1)  # [head row d_head]
    if n_rotary:
        angles = 2 * math.pi * torch.rand(n_heads, n_rotary // 2, generator=generator)
        if scoring.pairs == "adjacent":
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat([angles, angles], dim=-1)
        angles = angles[None].to(q)
        # `rotate` has one angle for each place, so heads take the place of positions here.
        by_head = rotate(by_head[None], angles.cos(), angles.sin(), scoring)[0]
    turned, unrotated = by_head.split([n_rotary, d_head - n_rotary], dim=-1)
    if unrotated.shape[-1]:
        rotations = [random_rotation(unrotated.shape[-1], generator) for _ in range(n_heads)]
        unrotated = unrotated @ torch.stack(rotations).to(q)
    turned = torch.cat([turned, unrotated], dim=-1)
    return turned.transpose(0, 1).unflatten(0, (n_rows, n_positions))


def random_rotation(n: int, generator: torch.Generator) -> Float[Tensor, "n n"]:
    """Return a random orthogonal matrix, float64; all directions are equally likely."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()
