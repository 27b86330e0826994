"""Find the writers that contribute most to one head's attention in one prompt, and to what it adds
to the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.foundation.ranking_scores import DirectScore
from icl_lens.models.head import Head
from icl_lens.reading.activations import Activations
from icl_lens.reading.attention_score_parts import attention_score_parts
from icl_lens.reading.value_parts import value_parts
from icl_lens.result.number_format import signed

Writer = tuple[str, float]
Side = Literal["query", "key", "value"]
SIDES: dict[Side, str] = {
    "query": "at the last token",
    "key": "at the keys",
    "value": "in the values",
}
"""Side -> where its writers write."""
WRITER_NAMES = "L1H5 is head 5 of layer 1, F1 the FFN of layer 1"

# Writers kept per side, pairs of them, and writers whose contributions are decoded in words.
N_WRITERS, N_PAIRS, N_DECODED = 6, 8, 3


@dataclass(frozen=True)
class AttentionReasons:
    """Why a head attends to the positions `more` rather than `less`, and what its values at `more`
    carry, by writer.

    `query` and `key` are the writers with the largest parts of the score difference, at the last
    position and at the keys; `pairs` are the largest parts of (query writer, key writer) pairs
    among them. `value` holds the writers with the largest parts of what the head adds to the answer
    from `more` (if these are labels, from all their tokens), nats; it is empty if the readout is
    not affine.
    """

    more: tuple[int, ...]
    less: tuple[int, ...]
    score_difference: float
    query: tuple[Writer, ...]
    key: tuple[Writer, ...]
    pairs: tuple[tuple[str, str, float], ...]
    n_writers: int
    """Number of all writers of the layer's input."""
    value: tuple[Writer, ...] = ()
    value_total: float = 0.0
    """What the head adds to the answer from `more`, summed over all writers, nats."""
    value_is_exact: bool = True
    """Whether value parts are exact (one token to compare with) or first-order."""
    query_words: tuple[tuple[str, ...], ...] = ()
    """Top words of what each of the first writers of `query` adds to the query vector."""
    key_words: tuple[tuple[str, ...], ...] = ()
    """Top words of what each of the first writers of `key` wrote at `more` minus at `less`, on
    average.
    """
    value_words: tuple[tuple[str, ...], ...] = ()
    """Top words of what each of the first writers of `value` adds to the values at `more`, on
    average.
    """
    query_standouts: tuple[float, ...] = ()
    """Standout of the vector of each entry of `query_words`, in standard deviations
    (`Readout.describe`).
    """
    key_standouts: tuple[float, ...] = ()
    value_standouts: tuple[float, ...] = ()

    def side(self, side: Side) -> tuple[Writer, ...]:
        """Return the strongest writers of a side."""
        return {"query": self.query, "key": self.key, "value": self.value}[side]

    def words(self, side: Side) -> dict[str, tuple[tuple[str, ...], float]]:
        """Return the top words and the standout of the first writers of a side."""
        names = [name for name, _ in self.side(side)]
        descriptions = zip(
            getattr(self, f"{side}_words"), getattr(self, f"{side}_standouts"), strict=True
        )
        return dict(zip(names, descriptions, strict=False))

    @property
    def because(self) -> str:
        """The strongest writers behind the score difference, in words."""
        return because(self.query, self.key, above=self.score_difference >= 0)


def attention_reasons(
    acts: Activations,
    head: Head,
    more: Sequence[int],
    less: Sequence[int],
    targets: Int[Tensor, " 1"],
    against: Int[Tensor, "1 other"] | None,
    *,
    read: Sequence[int] | None = None,
) -> tuple[AttentionReasons, dict[Side, Float[Tensor, "n d_model"]]]:
    """Return the writers that contribute most to one head's attention, and their vectors by side.

    The activations must be those of one prompt; `targets` and `against` define the answer. `read`
    are the positions whose values count for the answer: all tokens of the labels in `more`, by
    default only `more`.

    Vectors, to be decoded in words, are what the first `N_DECODED` writers of each side contribute.
    A query writer's vector is its part mapped to the space of the keys' inputs, as in `last_query`;
    a key writer's is the mean of what it wrote at `more` minus that at `less`; a value writer's is
    its mean part of the values at `more`, through W_O. "value" is missing if the readout is not
    affine.

    Raise InputError for invalid token ids, activations without writers at these positions, and an
    unsupported family.
    """
    parts = attention_score_parts(acts, head, keys=[*more, *less])
    is_more = torch.arange(len(more) + len(less), device=parts.positions.device)[None] < len(more)
    contrast, writers = parts.contrast(is_more), parts.writers
    query, key = (_strongest(side[0], writers) for side in (contrast.query_side, contrast.key_side))
    all_pairs = contrast.pairs[0]
    pairs = []
    for (query_writer, _), (key_writer, _) in product(query, key):
        value = float(all_pairs[writers.index(query_writer), writers.index(key_writer)])
        pairs.append((query_writer, key_writer, value))
    pairs.sort(key=lambda pair: -abs(pair[2]))
    why = AttentionReasons(
        more=tuple(more),
        less=tuple(less),
        score_difference=float(contrast.value),
        query=query,
        key=key,
        pairs=tuple(pairs[:N_PAIRS]),
        n_writers=len(writers),
    )
    key_vectors = [
        parts.vectors(name, "key")[0].split([len(more), len(less)]) for name, _ in key[:N_DECODED]
    ]
    vectors: dict[Side, Tensor] = {
        "query": torch.stack([parts.vectors(name, "query")[0, 0] for name, _ in query[:N_DECODED]]),
        "key": torch.stack([at_more.mean(0) - at_less.mean(0) for at_more, at_less in key_vectors]),
    }
    if acts.readout.is_affine:
        read = more if read is None else read
        by: DirectScore = "increase" if against is None else "contrast"
        values = value_parts(acts, head, targets, by=by, against=against, keys=list(read))
        total, at_more = values.parts[0].sum(0), [list(read).index(position) for position in more]
        value = _strongest(total, values.writers)
        why = replace(
            why, value=value, value_total=float(total.sum()), value_is_exact=values.is_exact
        )
        vectors["value"] = torch.stack(
            [values.vectors(name)[0, at_more].mean(0) for name, _ in value[:N_DECODED]]
        )
    return why, vectors


def because(query: Sequence[Writer], key: Sequence[Writer], *, above: bool) -> str:
    """Name the strongest writers at the last token and at the keys behind a positive or negative
    score difference.
    """
    query_words, key_words = (writers_in_words(side, above) for side in (query, key))
    return f"{query_words} at the last token (query); {key_words} at the keys"


SMALLEST_NAMED = 0.005
"""Smaller values are written as 0.00 and not named."""


def writers_in_words(writers: Sequence[Writer], above: bool) -> str:
    """Name up to two of the strongest writers of one sign (`above`: positive), and the strongest of
    the other sign.

    A second writer is named if it is over a quarter as strong as the first, one of the other sign
    if over half. If no writer of the one sign is large enough to be named, they are called small.
    """
    writers = [writer for writer in writers if abs(writer[1]) >= SMALLEST_NAMED]
    pro = sorted((writer for writer in writers if (writer[1] >= 0) == above), key=_negative_size)
    against = sorted(
        (writer for writer in writers if (writer[1] >= 0) != above), key=_negative_size
    )
    text, largest = "many small writers", 0.0
    if pro:
        _, largest = pro[0]
        named = [
            f"{writer_in_words(name)} ({signed(value, 2)})"
            for name, value in pro[:2]
            if abs(value) > abs(largest) / 4
        ]
        text = " and ".join(named)
    if against:
        name, value = against[0]
        if abs(value) > abs(largest) / 2:
            text += f", against {writer_in_words(name)} ({signed(value, 2)})"
    return text


def _negative_size(writer: Writer) -> float:
    """Return what writers are sorted by, so that the largest comes first."""
    _, value = writer
    return -abs(value)


def writer_in_words(name: str) -> str:
    """Return "FFN 20" for "F20", and words for embeddings and biases; heads keep their names."""
    words = {
        "embed": "the token's embedding",
        "pos_embed": "the position embedding",
        "bias": "biases",
    }
    return words.get(name, f"FFN {name[1:]}" if name.startswith("F") else name)


def _strongest(values: Float[Tensor, " writer"], writers: tuple[str, ...]) -> tuple[Writer, ...]:
    """Return up to `N_WRITERS` writers with the largest absolute values."""
    order = values.abs().argsort(descending=True)[:N_WRITERS].tolist()
    return tuple((writers[i], float(values[i])) for i in order)
