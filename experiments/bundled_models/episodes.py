"""The synthetic world that the bundled models are trained on.

It has lists of related words, texts followed by their category's name, and classification episodes. Everything is a
function of its random generator, so step n of a run has the same data however often the run was interrupted.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

BUNDLED = Path(__file__).resolve().parent.parent.parent / "icl_lens" / "bundled"
SPECIAL = ("<unk>", "<pad>", ":")
ALWAYS_HELD_OUT = (("sentiment", "number"), ("animal", "country"))
"""The categories of the two word tasks."""
NEAR = (
    ("animal", "insect"),
    ("country", "city"),
    ("fruit", "vegetable", "food", "drink", "cooking", "taste"),
    ("tree", "flower"),
    ("building", "room", "furniture"),
    ("tool", "kitchenware", "weapon"),
    ("metal", "material", "texture"),
    ("job", "family", "religion"),
    ("school", "science", "computer"),
    ("weather", "landform", "space"),
    ("number", "size", "shape", "timespan", "calendar", "money"),
    ("sentiment", "trait", "speech"),
    ("sport", "movement", "vehicle", "instrument"),
    ("crime", "disease", "bodypart", "clothing", "color"),
)
"""Groups of similar categories. Lists mix the words of a group, and episodes contrast its categories more often."""

LABEL_WEIGHT, ASIDE_WEIGHT, OTHER_WEIGHT = 1.0, 0.5, 0.1
"""Loss weights of labels shown before (also of names in `named_sequence`), of names in episodes, and of other words."""


@dataclass(frozen=True)
class Vocabulary:
    """The closed vocabulary: categories of content words, label words and fillers."""

    categories: dict[str, tuple[str, ...]]
    labels: tuple[str, ...]
    fillers: tuple[str, ...]

    @property
    def all_words(self) -> tuple[str, ...]:
        """Every word once, specials first; without the categories' names."""
        content = itertools.chain.from_iterable(self.categories.values())
        return tuple(dict.fromkeys([*SPECIAL, *self.fillers, *self.labels, *content]))

    @cached_property
    def names(self) -> dict[str, str]:
        """Each category's own name as a word; capitals keep them apart from content words ("School", "school")."""
        return {category: category.capitalize() for category in self.categories}

    @cached_property
    def categories_of(self) -> dict[str, tuple[str, ...]]:
        """The categories of each content word: one, or two if it is ambiguous."""
        found: dict[str, tuple[str, ...]] = {}
        for name, group in self.categories.items():
            for word in group:
                found[word] = (*found.get(word, ()), name)
        return found

    @cached_property
    def near(self) -> dict[str, tuple[str, ...]]:
        """The other categories of each category's group in `NEAR`."""
        return {name: tuple(other for other in group if other != name) for group in NEAR for name in group}


def load_words() -> Vocabulary:
    """Read the bundled word list."""
    raw = json.loads((BUNDLED / "words.json").read_text(encoding="utf-8"))
    categories = {name: tuple(words) for name, words in raw["categories"].items()}
    return Vocabulary(categories, tuple(raw["labels"]), tuple(raw["fillers"]))


def held_out_pairs(words: Vocabulary) -> frozenset[frozenset[str]]:
    """Category pairs that no training episode contains: those of the word tasks and a random tenth of all."""
    pairs = list(itertools.combinations(sorted(words.categories), 2))
    drawn = random.Random(0).sample(pairs, round(0.1 * len(pairs)))
    return frozenset(frozenset(pair) for pair in [*ALWAYS_HELD_OUT, *drawn])


def seen_pairs(words: Vocabulary, held_out: frozenset[frozenset[str]]) -> list[tuple[str, str]]:
    """The category pairs that training episodes are drawn from."""
    pairs = itertools.combinations(sorted(words.categories), 2)
    return [pair for pair in pairs if frozenset(pair) not in held_out]


@dataclass(frozen=True)
class Item:
    """A text, the index of its category (`side`) and that of the category whose label it is shown with.

    The two differ in mislabeled demonstrations. Indices are into the episode's categories.
    """

    text: tuple[str, ...]
    side: int
    shown_class: int


@dataclass(frozen=True)
class Episode:
    """Texts with labels, the query last; `weights[i]` is the loss weight of predicting the word `tokens[i]`."""

    tokens: tuple[str, ...]
    weights: tuple[float, ...]
    items: tuple[Item, ...]
    labels: tuple[str, ...]
    categories: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The label of the query."""
        return self.tokens[-1]

    @property
    def query_category(self) -> str:
        return self.categories[self.items[-1].side]


@dataclass(frozen=True)
class Difficulty:
    """What the episodes of a batch are like; ranges are inclusive."""

    classes: tuple[int, int] = (2, 2)
    demonstrations: tuple[int, int] = (4, 4)
    longest: int = 1
    """Maximum number of words per text; lengths from 1 to it are equally likely."""
    strays: float = 0.0
    """Probability that a filler is replaced by a content word of another category."""
    mislabeled: float = 0.0
    """Probability that a demonstration has another class's label; `draw_episode` uses it in half of its episodes."""
    uneven: bool = False
    """Whether the shares of classes are drawn per episode, see `draw_sides`; otherwise they are equal."""
    stay: float = 0.0
    """Probability that an item's class is copied from the item before instead of drawn."""
    near: float = 0.0
    """Probability that the categories are drawn from one group of `NEAR`."""
    repeats: float = 0.0
    """Probability that an item repeats the text of an earlier item of its class, if there is one."""
    asides: float = 0.0
    """Probability that a demonstration has its category's name instead of its label ("love : Sentiment").

    With the same probability, it has the name after its label ("love : foo Sentiment").
    """


PLAIN = Difficulty()


def _text(
    rng: random.Random, words: Vocabulary, pool: list[str], difficulty: Difficulty, others: Sequence[str], n_later: int
) -> tuple[str, ...]:
    """Draw a text: about half of its words, at least one, removed from `pool`, the rest fillers or strays, shuffled.

    The pool keeps a word for each of the `n_later` texts that will be drawn from it.
    """
    length = rng.randint(1, difficulty.longest)
    n_content = max(1, sum(rng.random() < 0.5 for _ in range(length)))
    n_content = min(n_content, max(1, min(len(pool) // 4, len(pool) - n_later)))
    content = [pool.pop() for _ in range(n_content)]
    n_strays = sum(rng.random() < difficulty.strays for _ in range(length - len(content)))
    stray = [rng.choice(words.categories[rng.choice(others)]) for _ in range(n_strays)]
    text = content + stray + [rng.choice(words.fillers) for _ in range(length - len(content) - n_strays)]
    rng.shuffle(text)
    return tuple(text)


def make_episode(
    rng: random.Random,
    words: Vocabulary,
    categories: Sequence[str],
    sides: Sequence[int],
    difficulty: Difficulty = PLAIN,
    *,
    labels: Sequence[str] | None = None,
    held_out: frozenset[frozenset[str]] = frozenset(),
) -> Episode:
    """Build one episode; item i is of category `categories[sides[i]]`.

    No two texts share a word of these categories, but a text can be shown again (`repeats`). Strays are of categories
    that are in no `held_out` pair with these. `labels[side]` is the label of a class; labels are drawn if not given. A
    label's loss weight is `LABEL_WEIGHT` if it has been shown before and `OTHER_WEIGHT` if not, since it then cannot be
    predicted. A category's name (`asides`) has `ASIDE_WEIGHT`. Predicting names makes colons and labels represent the
    category of the text before them. Without names, the model only learns which labels occur, and training stays at
    chance for long.
    """
    pools: list[list[str]] = [[] for _ in categories]
    side_of = {name: side for side, name in enumerate(categories)}
    for word in dict.fromkeys(itertools.chain.from_iterable(words.categories[name] for name in categories)):
        possible = [side_of[name] for name in words.categories_of[word] if name in side_of]
        pools[possible[0] if len(possible) == 1 else rng.choice(possible)].append(word)
    for pool in pools:
        rng.shuffle(pool)
    labels = tuple(labels or rng.sample(words.labels, len(categories)))
    others = [
        name
        for name in words.categories
        if name not in side_of and not any(frozenset((name, own)) in held_out for own in categories)
    ]
    items: list[Item] = []
    for i, side in enumerate(sides):
        shown_side = side
        if i < len(sides) - 1 and rng.random() < difficulty.mislabeled:
            shown_side = rng.choice([other for other in range(len(categories)) if other != side])
        earlier = [item.text for item in items if item.side == side] if rng.random() < difficulty.repeats else []
        n_later = sum(other == side for other in sides[i + 1 :])
        text = rng.choice(earlier) if earlier else _text(rng, words, pools[side], difficulty, others, n_later)
        items.append(Item(text, side, shown_side))
    tokens: list[str] = []
    weights: list[float] = []
    shown: set[int] = set()
    for i, item in enumerate(items):
        tokens += [*item.text, ":"]
        weights += [OTHER_WEIGHT] * (len(item.text) + 1)
        draw = rng.random() if i < len(items) - 1 else 1.0
        if draw >= difficulty.asides:
            tokens.append(labels[item.shown_class])
            weights.append(LABEL_WEIGHT if item.shown_class in shown else OTHER_WEIGHT)
            shown.add(item.shown_class)
        if draw < 2 * difficulty.asides:
            tokens.append(words.names[categories[item.side]])
            weights.append(ASIDE_WEIGHT)
    return Episode(tuple(tokens), tuple(weights), tuple(items), labels, tuple(categories))


def balanced_episode(
    rng: random.Random, words: Vocabulary, pairs: Sequence[tuple[str, ...]], n_shown: int, *, longest: int
) -> Episode:
    """Draw an episode of one of the pairs with `n_shown` correctly labeled demonstrations, half per class, shuffled."""
    sides = [0, 1] * (n_shown // 2)
    rng.shuffle(sides)
    pair = rng.sample(rng.choice(pairs), 2)
    return make_episode(rng, words, pair, [*sides, rng.randrange(2)], Difficulty(longest=longest))


def draw_categories(
    rng: random.Random, words: Vocabulary, n: int, held_out: frozenset[frozenset[str]], *, near: bool = False
) -> tuple[str, ...]:
    """Draw `n` categories, no two of which are a held-out pair; with `near`, as many as possible from one group."""
    while True:
        names = rng.sample(sorted(words.categories), len(words.categories))
        if near:
            group = {names[0], *words.near.get(names[0], ())}
            names.sort(key=lambda name: name not in group)
        chosen: list[str] = []
        for name in names:
            if all(frozenset((name, other)) not in held_out for other in chosen):
                chosen.append(name)
            if len(chosen) == n:
                rng.shuffle(chosen)
                return tuple(chosen)


def draw_sides(rng: random.Random, n: int, n_classes: int = 2, *, uneven: bool = True, stay: float = 0.25) -> list[int]:
    """Draw the classes of `n` items; with probability `stay`, an item has the class of the item before.

    Classes have equal shares or, if `uneven`, shares drawn from Dirichlet(2). Uneven shares reward an unsure model for
    predicting the majority label, and `stay` for predicting the last one.
    """
    shares = [rng.gammavariate(2.0, 1.0) if uneven else 1.0 for _ in range(n_classes)]
    sides = rng.choices(range(n_classes), shares)
    while len(sides) < n:
        sides += sides[-1:] if rng.random() < stay else rng.choices(range(n_classes), shares)
    return sides


def draw_episode(
    rng: random.Random, words: Vocabulary, difficulty: Difficulty, held_out: frozenset[frozenset[str]], n_items: int
) -> Episode:
    """Draw an episode of `n_items` items; with probability ½, none of its demonstrations is mislabeled.

    No two of its categories are a held-out pair.
    """
    n_classes = rng.randint(*difficulty.classes)
    categories = draw_categories(rng, words, n_classes, held_out, near=rng.random() < difficulty.near)
    sides = draw_sides(rng, n_items, n_classes, uneven=difficulty.uneven, stay=difficulty.stay)
    if rng.random() >= 0.5:
        difficulty = replace(difficulty, mislabeled=0.0)
    return make_episode(rng, words, categories, sides, difficulty, held_out=held_out)


def list_sequence(rng: random.Random, words: Vocabulary, n: int) -> list[str]:
    """Draw `n` different words of one category, or with probability ¼ of one group."""
    name = rng.choice(sorted(words.categories))
    pool = list(words.categories[name])
    if rng.random() < 0.25:
        pool += itertools.chain.from_iterable(words.categories[other] for other in words.near.get(name, ()))
    return rng.sample(sorted(set(pool)), n)


def named_sequence(rng: random.Random, words: Vocabulary, n: int, *, longest: int = 1) -> tuple[list[str], list[float]]:
    """Draw `n` texts of any categories, each with its category's name ("love : Sentiment"), and the loss weights.

    From these, the models learn the categories of words before episodes ask them to compare texts.
    """
    tokens: list[str] = []
    weights: list[float] = []
    for _ in range(n):
        name = rng.choice(sorted(words.categories))
        pool = rng.sample(words.categories[name], len(words.categories[name]))
        text = _text(rng, words, pool, Difficulty(longest=longest), (), 0)
        tokens += [*text, ":", words.names[name]]
        weights += [OTHER_WEIGHT] * (len(text) + 1) + [LABEL_WEIGHT]
    return tokens, weights
