"""Synthetic classification episodes over the bundled word list: what the bundled models are trained on.

Everything is a function of its random generator, so step n of a run has the same data however often
the run was broken off.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUNDLED = Path(__file__).resolve().parents[2] / "icl_lens" / "bundled"
SPECIAL = ("<unk>", "<pad>", ":")
ALWAYS_HELD_OUT = (("sentiment", "number"), ("animal", "country"))

LABEL_WEIGHT = 1.0
OTHER_WEIGHT = 0.1
ASIDE_WEIGHT = 0.5


@dataclass(frozen=True)
class Words:
    """The closed vocabulary: categories of content words, label words and fillers."""

    categories: dict[str, tuple[str, ...]]
    labels: tuple[str, ...]
    fillers: tuple[str, ...]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every token once, specials first; a token's id is its place here."""
        content = itertools.chain.from_iterable(self.categories.values())
        return tuple(dict.fromkeys([*SPECIAL, *self.fillers, *self.labels, *content]))


def load_words(path: Path = BUNDLED / "words.json") -> Words:
    """Read the word list from `path`."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    categories = {name: tuple(words) for name, words in raw["categories"].items()}
    return Words(categories, tuple(raw["labels"]), tuple(raw["fillers"]))


def held_out_pairs(words: Words, *, seed: int = 0, share: float = 0.1) -> frozenset[frozenset[str]]:
    """Category pairs that no training episode contains: the word tasks and `share` of all pairs by `seed`."""
    pairs = list(itertools.combinations(sorted(words.categories), 2))
    drawn = random.Random(seed).sample(pairs, round(share * len(pairs)))
    return frozenset(frozenset(pair) for pair in [*ALWAYS_HELD_OUT, *drawn])


def seen_pairs(words: Words, held_out: frozenset[frozenset[str]]) -> list[tuple[str, str]]:
    """The category pairs that training episodes are drawn from."""
    pairs = itertools.combinations(sorted(words.categories), 2)
    return [pair for pair in pairs if frozenset(pair) not in held_out]


@dataclass(frozen=True)
class Item:
    """A text and its class: an index into the episode's categories and labels."""

    text: tuple[str, ...]
    side: int


@dataclass(frozen=True)
class Episode:
    """Texts with labels, the query last; `weights[i]` is the loss weight of predicting `tokens[i]`."""

    tokens: tuple[str, ...]
    weights: tuple[float, ...]
    items: tuple[Item, ...]
    labels: tuple[str, ...]
    categories: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The episode up to the last colon, as a prompt."""
        return " ".join(self.tokens[:-1])

    @property
    def answer(self) -> str:
        """The label of the query."""
        return self.tokens[-1]


def _text(rng: random.Random, pool: list[str], fillers: Sequence[str], longest: int) -> tuple[str, ...]:
    """1 to `longest` words in any order: at least one removed from `pool`, about half of them fillers."""
    length = rng.randint(1, longest)
    n_content = max(1, sum(rng.random() < 0.5 for _ in range(length)))
    content = [pool.pop() for _ in range(min(n_content, max(1, len(pool) // 4)))]
    text = content + [rng.choice(fillers) for _ in range(length - len(content))]
    rng.shuffle(text)
    return tuple(text)


def make_episode(
    rng: random.Random,
    words: Words,
    categories: Sequence[str],
    sides: Sequence[int],
    *,
    longest: int = 1,
    labels: Sequence[str] | None = None,
    asides: float = 0.0,
) -> Episode:
    """Build one episode; item i is of category `categories[sides[i]]`, and no content word occurs twice.

    `labels[side]` is the label of a class; drawn when not given. A label's loss weight is `LABEL_WEIGHT` once
    its class has been shown and `OTHER_WEIGHT` before, when nothing could tell it. Each demonstration has, with
    probability `asides` each, another word of its category in place of the label ("w : w2") or after it
    ("w : label w2"), with `ASIDE_WEIGHT`: plain language modelling that needs a colon to know the word before it, and
    a label the word two before it. Without it both only gather the labels there are, and stay at chance for long.
    """
    owners: dict[str, list[int]] = {}
    for side, name in enumerate(categories):
        for word in words.categories[name]:
            owners.setdefault(word, []).append(side)
    pools: list[list[str]] = [[] for _ in categories]
    for word, sides_of_word in owners.items():
        pools[rng.choice(sides_of_word)].append(word)
    for pool in pools:
        rng.shuffle(pool)
    labels = tuple(labels or rng.sample(words.labels, len(categories)))
    items = tuple(Item(_text(rng, pools[side], words.fillers, longest), side) for side in sides)
    tokens: list[str] = []
    weights: list[float] = []
    shown: set[int] = set()
    for i, item in enumerate(items):
        tokens += [*item.text, ":"]
        weights += [OTHER_WEIGHT] * (len(item.text) + 1)
        kind = rng.random() if i < len(items) - 1 else 1.0
        if kind >= asides:
            tokens.append(labels[item.side])
            weights.append(LABEL_WEIGHT if item.side in shown else OTHER_WEIGHT)
            shown.add(item.side)
        if kind < 2 * asides:
            tokens.append(pools[item.side].pop())
            weights.append(ASIDE_WEIGHT)
    return Episode(tuple(tokens), tuple(weights), items, labels, tuple(categories))


def draw_categories(rng: random.Random, words: Words, n: int, held_out: frozenset[frozenset[str]]) -> tuple[str, ...]:
    """`n` categories no two of which are a held-out pair."""
    while True:
        chosen: list[str] = []
        for name in rng.sample(sorted(words.categories), len(words.categories)):
            if all(frozenset((name, other)) not in held_out for other in chosen):
                chosen.append(name)
            if len(chosen) == n:
                return tuple(chosen)


def draw_sides(rng: random.Random, n: int, *, stay: float = 0.1) -> list[int]:
    """Classes of `n` items: a share of class 1 per episode (Beta(4, 4), often unequal), some copied.

    Both tilt an unsure model: to the class shown more often (majority) and to the one shown last (recency).
    """
    share = rng.betavariate(4, 4)
    sides = [int(rng.random() < share)]
    while len(sides) < n:
        sides.append(sides[-1] if rng.random() < stay else int(rng.random() < share))
    return sides


def list_sequence(rng: random.Random, words: Words, n: int) -> list[str]:
    """`n` different words of one category: language modelling on these lets its embeddings cluster."""
    return rng.sample(words.categories[rng.choice(sorted(words.categories))], n)
