"""Find the writers that contribute most to one head's attention in one prompt, and to what it adds to the answer."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.attribution.score_parts import attention_score_parts
from icl_lens.attribution.value_parts import value_parts
from icl_lens.errors import InputError
from icl_lens.models.head import Head

Writer = tuple[str, float]


@dataclass(frozen=True)
class AttentionReasons:
    """Why a head attends to the positions `more` rather than `less`, and what its values at `more` carry, by writer.

    `query` and `key` are the writers with the largest parts of the score difference, at the last position and at the
    keys; `pairs` are the parts of (query writer, key writer) pairs among them. `value` holds the writers with the
    largest parts of what the head adds to the answer from `more`, nats; it is empty if the readout is not affine.
    """

    more: tuple[int, ...]
    less: tuple[int, ...]
    score_difference: float
    query: tuple[Writer, ...]
    key: tuple[Writer, ...]
    pairs: tuple[tuple[str, str, float], ...]
    n_writers: int
    value: tuple[Writer, ...] = ()
    value_total: float = 0.0
    value_is_exact: bool = True
    """Whether value parts are exact (one token to compare with) or first-order."""


def attention_reasons(
    acts: Activations,
    head: Head,
    more: Sequence[int],
    less: Sequence[int],
    targets: Int[Tensor, " 1"],
    against: Int[Tensor, "1 other"] | None,
    *,
    n_writers: int = 6,
    n_pairs: int = 8,
) -> AttentionReasons:
    """Return the writers that contribute most to one head's attention; the activations must be those of one prompt.

    Raise InputError if the activations hold no writers at these positions, and for an unsupported family.
    """
    parts = attention_score_parts(acts, head, keys=[*more, *less])
    is_more = torch.arange(len(more) + len(less), device=parts.positions.device)[None] < len(more)
    contrast, writers = parts.contrast(is_more), parts.writers
    query, key = (_strongest(side[0], writers, n_writers) for side in (contrast.query_side, contrast.key_side))
    pairs = [
        (of_query, of_key, float(contrast.pairs[0, writers.index(of_query), writers.index(of_key)]))
        for of_query, _ in query
        for of_key, _ in key
    ]
    pairs.sort(key=lambda pair: -abs(pair[2]))
    from_values: dict[str, object] = {}
    with suppress(InputError):  # raised for models with a logit soft-cap
        values = value_parts(acts, head, targets, against=against, keys=list(more))
        total = values.parts[0].sum(0)
        from_values = {
            "value": _strongest(total, values.writers, n_writers),
            "value_total": float(total.sum()),
            "value_is_exact": values.is_exact,
        }
    return AttentionReasons(
        more=tuple(more),
        less=tuple(less),
        score_difference=float(contrast.value),
        query=query,
        key=key,
        pairs=tuple(pairs[:n_pairs]),
        n_writers=len(writers),
        **from_values,  # pyright: ignore[reportArgumentType]
    )


def attention_sentence(
    head: str,
    more: str,
    less: str,
    difference: float,
    query: Sequence[Writer],
    key: Sequence[Writer],
    *,
    interval: str = "",
) -> str:
    """Return, in words, by how much a head's scores of two groups of keys differ and which writers that comes from.

    `query` and `key` are the strongest writers at the last token and at the keys, strongest first.

    Example:
        >>> from icl_lens.attribution.reasons import attention_sentence, writers_in_words
        >>> attention_sentence("L9H1", "foo", "bar", 2.2, [("F7", 1.5)], [("embed", 0.5)])[:60]
        'L9H1 scores foo above bar by 2.20: at the last token mainly b'
        >>> writers_in_words([("L1H2", -0.4), ("F0", 0.5)], above=True)
        'FFN 0 (+0.50), against L1H2 (-0.40)'
    """
    above = difference >= 0
    query_words, key_words = (writers_in_words(side, above) for side in (query, key))
    return (
        f"{head} scores {more} {'above' if above else 'below'} {less} by {abs(difference):.2f}{interval}: at the last "
        f"token mainly because of {query_words}, at the keys because of {key_words}."
    )


def writers_in_words(writers: Sequence[Writer], above: bool) -> str:
    """Name the two strongest writers with parts of one sign, and one with the other that has half their strength."""
    pro = [(name, value) for name, value in writers if (value >= 0) == above]
    against = [(name, value) for name, value in writers if (value >= 0) != above]
    pro, against = (sorted(side, key=lambda one: -abs(one[1])) for side in (pro, against))
    if not pro:
        return "many small parts"
    named = " and ".join(
        f"{writer_in_words(name)} ({value:+.2f})" for name, value in pro[:2] if abs(value) > abs(pro[0][1]) / 4
    )
    for name, value in against[:1]:
        named += f", against {writer_in_words(name)} ({value:+.2f})" if abs(value) > abs(pro[0][1]) / 2 else ""
    return named


def writer_in_words(name: str) -> str:
    """Return "FFN 20" for "F20"; heads keep their names."""
    words = {"embed": "the token's embedding", "pos_embed": "the position embedding", "bias": "biases"}
    return words.get(name, f"FFN {name[1:]}" if name.startswith("F") else name)


def _strongest(values: Float[Tensor, " writer"], writers: tuple[str, ...], n: int) -> tuple[Writer, ...]:
    order = values.abs().argsort(descending=True)[:n].tolist()
    return tuple((writers[i], float(values[i])) for i in order)
