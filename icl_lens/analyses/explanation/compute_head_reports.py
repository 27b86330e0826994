"""Compute an explanation's reports of its heads: where they attend and why, and what their vectors
say in words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.analyses.explanation.compute_reports import Attempts, ScoredPrompt
from icl_lens.analyses.explanation.reports import (
    HeadReport,
)
from icl_lens.foundation.ranking_scores import Score
from icl_lens.models.head import Head
from icl_lens.models.readout import Readout
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import head_position_increases
from icl_lens.reading.reasons import SIDES, AttentionReasons, Side, attention_reasons
from icl_lens.reading.similarity import similarity_in

N_DESCRIBED_POSITIONS = 5
"""In plain text: positions that are described for each head."""
N_WORDS = 10
"""Top words of each value, key and query."""


@dataclass(frozen=True)
class VectorGroup:
    """Vectors of a head that are described in words, and the tokens whose ranks are reported."""

    vectors: Float[Tensor, "n d_model"]
    tokens: tuple[int, ...] = ()
    """One token per vector; none if ranks are not reported."""


@dataclass(frozen=True)
class Description:
    """What vectors of a head say in words; each tuple has one entry per vector."""

    words: tuple[tuple[str, ...], ...]
    standouts: tuple[float, ...]
    """How far each vector stands out from random directions, in standard deviations."""
    ranks: tuple[int, ...]
    """The rank of each vector's token; -1 without one."""


VectorKind = Literal["query", "values", "keys"] | tuple[Literal["writers"], Side]
"""The vectors of a head that are described: its own, and what the strongest writers contribute."""


@dataclass(frozen=True)
class WriterReadings:
    """What reports read of `acts.writers`, by located head."""

    similarities: list[tuple[tuple[float, ...], ...]]
    """Each head's `label_similarity`; empty for plain text, or if it is left out."""
    reasons: list[tuple[AttentionReasons | None, dict[Side, Float[Tensor, "_ d_model"]]]]
    """Why each head attends where it does, and what its strongest writers contribute."""

    @classmethod
    def of(cls, scored: ScoredPrompt, heads: list[Head], attempts: Attempts) -> "WriterReadings":
        """Read the writers, after which the rest of an explanation needs them no more."""
        return cls(_similarities(scored, heads, attempts), _reasons(scored, heads, attempts))


def head_reports(
    scored: ScoredPrompt,
    heads: list[Head],
    scores: Mapping[Score, Float[Tensor, "layer head"]],
    ablated: Float[Tensor, "located label"],
    readings: WriterReadings,
    attempts: Attempts,
) -> Iterator[HeadReport]:
    """Yield a report per located head; results shared by the heads are computed once.

    `attempts` records the sections that the model's family does not support.
    """
    acts, n_tokens = scored.acts, scored.n_tokens
    by_position = _by_position(scored, heads)
    contrast_by_position = _by_position(scored, heads, scored.against) if scored.others else {}
    similarities, reasons = readings.similarities, readings.reasons
    positions = {head: _described_positions(scored, head) for head in heads}
    groups: dict[tuple[Head, VectorKind], VectorGroup] = {}
    for head, (_, of_writers) in zip(heads, reasons, strict=True):
        for kind, group in _vectors(scored, head, positions[head], of_writers, attempts).items():
            groups[head, kind] = group
    descriptions = _descriptions(acts.readout, groups)
    for index, head in enumerate(heads):
        query = descriptions[head, "query"]
        values, keys = descriptions[head, "values"], descriptions[head, "keys"]
        why, _ = reasons[index]
        if why is not None:
            decoded: dict[str, Any] = {}
            for side in SIDES:
                description = descriptions[head, ("writers", side)]
                decoded[f"{side}_words"] = description.words
                decoded[f"{side}_standouts"] = description.standouts
            why = replace(why, **decoded)
        contrasts = contrast_by_position[head].tolist() if scored.others else ()
        yield HeadReport(
            head=head,
            **{by: float(scores_of_heads[head]) for by, scores_of_heads in scores.items()},
            attention=tuple(acts.pattern[0, head.layer, head.head, :n_tokens].tolist()),
            position_increases=tuple(by_position[head].tolist()),
            value_words=values.words,
            value_ranks=values.ranks,
            key_words=keys.words,
            query_words=query.words[0] if query.words else (),
            value_standouts=values.standouts,
            key_standouts=keys.standouts,
            query_standout=query.standouts[0] if query.standouts else None,
            ablated=tuple(ablated[index].tolist()),
            position_contrasts=tuple(contrasts),
            positions=tuple(positions[head]),
            similarity=similarities[index],
            why=why,
        )


def _by_position(
    scored: ScoredPrompt, heads: list[Head], against: Int[Tensor, "1 other"] | None = None
) -> dict[Head, Float[Tensor, " pos"]]:
    """Return these heads' increase, or contrast with `against`, of every position, nats."""
    increases = head_position_increases(
        scored.acts, scored.targets, heads, against=against, **scored.readout_options
    )
    return dict(zip(heads, increases[0, ..., : scored.n_tokens], strict=True))


def _described_positions(scored: ScoredPrompt, head: Head) -> list[int]:
    """Return the positions that a head attends to most in text, in order; none with labels."""
    if not scored.scores_tokens:
        return []
    attention = scored.acts.pattern[0, head.layer, head.head, : scored.n_tokens].float()
    n_positions = min(N_DESCRIBED_POSITIONS, scored.n_tokens)
    return attention.topk(n_positions).indices.sort().values.tolist()


def _vectors(
    scored: ScoredPrompt,
    head: Head,
    positions: list[int],
    of_writers: Mapping[Side, Float[Tensor, "n d_model"]],
    attempts: Attempts,
) -> dict[VectorKind, VectorGroup]:
    """Return the vectors of a head that are described, at labels or, in text, at `positions`."""
    acts, batch = scored.acts, scored.acts.batch
    if scored.scores_tokens:
        v = acts.values.of_layer(head.layer)[0, positions, acts.view.kv_head(head.head)].to(
            acts.readout.dtype
        )
        values = v @ acts.view.W_O(head.layer)[head.head].to(v.dtype)
        keys = v.new_empty(0, acts.view.d_model)
        tokens = batch.tokens[0, positions].tolist()
    else:
        values, keys = acts.label_values(head)[0], acts.label_keys(head)[0]
        tokens = batch.label_tokens[batch.label_index[0]].tolist()
    query = values[:0]
    with attempts.at("top words of queries"):
        query = acts.last_query(head)
    groups: dict[VectorKind, VectorGroup] = {
        "query": VectorGroup(query),
        "values": VectorGroup(values, tuple(tokens)),
        "keys": VectorGroup(keys),
    }
    for side in SIDES:
        groups["writers", side] = VectorGroup(of_writers.get(side, keys[:0]))
    return groups


def _descriptions(
    readout: Readout, groups: Mapping[tuple[Head, VectorKind], VectorGroup]
) -> dict[tuple[Head, VectorKind], Description]:
    """Describe groups of vectors, all of them by one product with the unembedding."""
    tokens: list[int] = []
    for group in groups.values():
        tokens += group.tokens or [-1] * len(group.vectors)
    vectors = torch.cat([group.vectors for group in groups.values()])
    described = readout.describe(vectors, torch.tensor(tokens), k=N_WORDS, keep="words")
    words = [tuple(words_of_vector) for words_of_vector in described.tokens]
    standouts, ranks = described.standouts.tolist(), described.ranks.tolist()
    descriptions = {}
    start = 0
    for key, group in groups.items():
        rows = slice(start, start + len(group.vectors))
        descriptions[key] = Description(
            tuple(words[rows]), tuple(standouts[rows]), tuple(ranks[rows])
        )
        start += len(group.vectors)
    return descriptions


def _similarities(
    scored: ScoredPrompt, heads: list[Head], attempts: Attempts
) -> list[tuple[tuple[float, ...], ...]]:
    """Return each head's `label_similarity`.

    Empty for plain text, or if it is left out.
    """
    if not scored.scores_tokens:
        with attempts.at("attention scores without positions"):
            similarities = similarity_in(scored.acts, heads)[0].tolist()
            return [tuple(map(tuple, queries)) for queries in similarities]
    return [()] * len(heads)


def _reasons(
    scored: ScoredPrompt, heads: list[Head], attempts: Attempts
) -> list[tuple[AttentionReasons | None, dict[Side, Float[Tensor, "n d_model"]]]]:
    """Return why each head attends where it does, and what its strongest writers contribute.

    The target's labels are compared with the other labels and, in plain text, a head's most
    attended token with the next. A head whose scores cannot be split has None.
    """
    batch, acts = scored.acts.batch, scored.acts
    more_and_less: list[list[list[int]]] = []
    if scored.scores_tokens:
        for head in heads:
            attention = acts.pattern[0, head.layer, head.head, : scored.n_tokens].float()
            strongest = attention.topk(min(2, scored.n_tokens)).indices.tolist()
            more_and_less.append([[position] for position in strongest])
        positions = sorted({position for (position,) in chain.from_iterable(more_and_less)})
        acts = capture(scored.model, batch, writers=positions, check=False)
        read = None
    else:
        of_target = batch.label_index[0] == scored.target
        more = batch.label_positions[0, of_target].tolist()
        less = batch.label_positions[0, ~of_target].tolist()
        more_and_less += [[more, less]] * len(heads)
        positions = batch.all_label_positions[0, of_target].flatten().tolist()
        read = [position for position in positions if position >= 0]
    reasons: list[tuple[AttentionReasons | None, dict[Side, Tensor]]] = []
    for head, compared in zip(heads, more_and_less, strict=True):
        reasons.append((None, {}))
        with attempts.at("why heads attend where they do"):
            if len(compared) == 2 and all(compared):
                more, less = compared
                reasons[-1] = attention_reasons(
                    acts, head, more, less, scored.targets, scored.against, read=read
                )
    return reasons
