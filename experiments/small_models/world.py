"""The synthetic world that the bundled models are trained on.

It has lists of related words, texts followed by their category's name, and classification episodes.
Everything is a function of its random generator, so step n of a run always has the same data.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

BUNDLED = Path(__file__).resolve().parents[2] / "icl_lens" / "bundled"
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
"""Groups of similar categories. Lists mix the words of a group; episodes contrast its categories
more often."""

LABEL_WEIGHT = 1.0
"""Loss weight of labels that the episode has shown before, and of names in `named_sequence`."""
NAME_WEIGHT = 0.5
"""Loss weight of categories' names in episodes."""
WORD_WEIGHT = 0.1
"""Loss weight of all other words."""


@dataclass(frozen=True)
class Vocabulary:
    """The closed vocabulary: categories of content words, label words and fillers."""

    categories: dict[str, tuple[str, ...]]
    labels: tuple[str, ...]
    fillers: tuple[str, ...]

    @cached_property
    def names(self) -> dict[str, str]:
        """Each category's name as a word; capitals tell it from content words ("School")."""
        return {category: category.capitalize() for category in self.categories}

    @cached_property
    def categories_of(self) -> dict[str, tuple[str, ...]]:
        """The categories of each content word: one, or two if it is ambiguous."""
        categories_of_word: dict[str, tuple[str, ...]] = {}
        for category, words in self.categories.items():
            for word in words:
                categories_of_word[word] = (*categories_of_word.get(word, ()), category)
        return categories_of_word

    @cached_property
    def near(self) -> dict[str, tuple[str, ...]]:
        """The categories that share a group of `NEAR` with each category."""
        neighbors = {}
        for group in NEAR:
            for category in group:
                neighbors[category] = tuple(name for name in group if name != category)
        return neighbors


def load_words() -> Vocabulary:
    """Read the bundled word list."""
    raw = json.loads((BUNDLED / "words.json").read_text(encoding="utf-8"))
    categories = {name: tuple(words) for name, words in raw["categories"].items()}
    return Vocabulary(categories, tuple(raw["labels"]), tuple(raw["fillers"]))


def held_out_pairs(words: Vocabulary) -> frozenset[frozenset[str]]:
    """Return pairs that no training episode contains: the word tasks' and a random tenth."""
    pairs = list(itertools.combinations(sorted(words.categories), 2))
    drawn = random.Random(0).sample(pairs, round(0.1 * len(pairs)))
    return frozenset(frozenset(pair) for pair in [*ALWAYS_HELD_OUT, *drawn])


def seen_pairs(words: Vocabulary, held_out: frozenset[frozenset[str]]) -> list[tuple[str, str]]:
    """Return the category pairs that training episodes are drawn from."""
    pairs = itertools.combinations(sorted(words.categories), 2)
    return [pair for pair in pairs if frozenset(pair) not in held_out]


@dataclass(frozen=True)
class Item:
    """A text, its class, and the class whose label it has; the two differ if it is mislabeled.

    A class is an index into the episode's categories.
    """

    text: tuple[str, ...]
    text_class: int
    label_class: int


@dataclass(frozen=True)
class Episode:
    """Texts with labels, the query last.

    `weights[i]` is the loss weight of predicting the word `tokens[i]`.
    """

    tokens: tuple[str, ...]
    weights: tuple[float, ...]
    items: tuple[Item, ...]
    labels: tuple[str, ...]


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
    """Probability that a demonstration has another class's label, in half of the episodes."""
    uneven: bool = False
    """Whether the shares of classes are drawn per episode; otherwise they are equal."""
    stay: float = 0.0
    """Probability that an item's class is copied from the item before instead of drawn."""
    near: float = 0.0
    """Probability that the categories are drawn from one group of `NEAR`."""
    repeats: float = 0.0
    """Probability that an item repeats the text of an earlier item of its class."""
    names: float = 0.0
    """Probability that a demonstration has its category's name instead of its label
    ("love : Sentiment"). As probable is the name after the label ("love : foo Sentiment")."""


PLAIN = Difficulty()


def _text(
    rng: random.Random,
    words: Vocabulary,
    pool: list[str],
    difficulty: Difficulty,
    stray_categories: Sequence[str],
    n_later: int,
) -> tuple[str, ...]:
    """Draw a text: half of its words, at least one, from `pool`, the rest fillers or strays.

    The pool keeps a word for each of the `n_later` texts that will be drawn from it.
    """
    length = rng.randint(1, difficulty.longest)
    n_content = max(1, sum(rng.random() < 0.5 for _ in range(length)))
    n_content = min(n_content, max(1, min(len(pool) // 4, len(pool) - n_later)))
    content = [pool.pop() for _ in range(n_content)]
    n_strays = sum(rng.random() < difficulty.strays for _ in range(length - n_content))
    strays = []
    for _ in range(n_strays):
        strays.append(rng.choice(words.categories[rng.choice(stray_categories)]))
    n_fillers = length - n_content - n_strays
    text = content + strays + [rng.choice(words.fillers) for _ in range(n_fillers)]
    rng.shuffle(text)
    return tuple(text)


def _word_pools(
    rng: random.Random, words: Vocabulary, categories: Sequence[str]
) -> list[list[str]]:
    """Return the shuffled words of each category; a word of two of them is in one pool only."""
    pools: list[list[str]] = [[] for _ in categories]
    class_of = {category: index for index, category in enumerate(categories)}
    all_words = itertools.chain.from_iterable(words.categories[name] for name in categories)
    for word in dict.fromkeys(all_words):
        classes = [class_of[name] for name in words.categories_of[word] if name in class_of]
        word_class = classes[0] if len(classes) == 1 else rng.choice(classes)
        pools[word_class].append(word)
    for pool in pools:
        rng.shuffle(pool)
    return pools


def _stray_categories(
    words: Vocabulary, categories: Sequence[str], held_out: frozenset[frozenset[str]]
) -> list[str]:
    """Return the categories that are in no held-out pair with those of an episode."""
    strays = []
    for name in words.categories:
        pairs = [frozenset((name, category)) for category in categories]
        if name not in categories and not held_out.intersection(pairs):
            strays.append(name)
    return strays


def make_episode(
    rng: random.Random,
    words: Vocabulary,
    categories: Sequence[str],
    classes: Sequence[int],
    difficulty: Difficulty = PLAIN,
    *,
    labels: Sequence[str] | None = None,
    held_out: frozenset[frozenset[str]] = frozenset(),
) -> Episode:
    """Build one episode; item i is of category `categories[classes[i]]`.

    No two texts share a word of these categories, but a text can be repeated (`repeats`). Strays
    are of categories that are in no `held_out` pair with these. `labels[c]` is the label of class
    c; labels are drawn if None. The first time that a label occurs it cannot be predicted, so its
    loss weight is `WORD_WEIGHT`.

    Predicting names makes colons and labels represent the category of the text before them. Without
    names, the model only learns which labels occur, and training stays at chance for long.
    """
    pools = _word_pools(rng, words, categories)
    labels = tuple(labels or rng.sample(words.labels, len(categories)))
    stray_categories = _stray_categories(words, categories, held_out)
    n_items = len(classes)
    items: list[Item] = []
    for i, text_class in enumerate(classes):
        label_class = text_class
        if i < n_items - 1 and rng.random() < difficulty.mislabeled:
            label_class = rng.choice([c for c in range(len(categories)) if c != text_class])
        earlier_texts = []
        if rng.random() < difficulty.repeats:
            earlier_texts = [item.text for item in items if item.text_class == text_class]
        if earlier_texts:
            text = rng.choice(earlier_texts)
        else:
            n_later = sum(later_class == text_class for later_class in classes[i + 1 :])
            text = _text(rng, words, pools[text_class], difficulty, stray_categories, n_later)
        items.append(Item(text, text_class, label_class))
    tokens: list[str] = []
    weights: list[float] = []
    classes_before: set[int] = set()
    for i, item in enumerate(items):
        tokens += [*item.text, ":"]
        weights += [WORD_WEIGHT] * (len(item.text) + 1)
        draw = rng.random() if i < n_items - 1 else 1.0
        if draw >= difficulty.names:
            is_known = item.label_class in classes_before
            tokens.append(labels[item.label_class])
            weights.append(LABEL_WEIGHT if is_known else WORD_WEIGHT)
            classes_before.add(item.label_class)
        if draw < 2 * difficulty.names:
            tokens.append(words.names[categories[item.text_class]])
            weights.append(NAME_WEIGHT)
    return Episode(tuple(tokens), tuple(weights), tuple(items), labels)


def balanced_episode(
    rng: random.Random,
    words: Vocabulary,
    pairs: Sequence[tuple[str, ...]],
    n_demonstrations: int,
    *,
    longest: int,
) -> Episode:
    """Draw an episode of one of the pairs: right labels, half per class, in random order."""
    classes = [0, 1] * (n_demonstrations // 2)
    rng.shuffle(classes)
    pair = rng.sample(rng.choice(pairs), 2)
    query_class = rng.randrange(2)
    return make_episode(rng, words, pair, [*classes, query_class], Difficulty(longest=longest))


def draw_categories(
    rng: random.Random,
    words: Vocabulary,
    n: int,
    held_out: frozenset[frozenset[str]],
    *,
    near: bool = False,
) -> tuple[str, ...]:
    """Draw `n` categories, no two of them a held-out pair; `near`: from one group if possible."""
    while True:
        names = rng.sample(sorted(words.categories), len(words.categories))
        if near:
            group = {names[0], *words.near.get(names[0], ())}
            names.sort(key=lambda name: name not in group)
        drawn: list[str] = []
        for name in names:
            if not held_out.intersection(frozenset((name, category)) for category in drawn):
                drawn.append(name)
            if len(drawn) == n:
                rng.shuffle(drawn)
                return tuple(drawn)


def draw_classes(
    rng: random.Random, n: int, n_classes: int = 2, *, uneven: bool = True, stay: float = 0.25
) -> list[int]:
    """Draw the classes of `n` items; with probability `stay`, an item has the class before it.

    Classes have equal shares or, if `uneven`, shares drawn from Dirichlet(2). Uneven shares reward
    an unsure model for predicting the majority label, and `stay` for predicting the last one.
    """
    shares = [rng.gammavariate(2.0, 1.0) if uneven else 1.0 for _ in range(n_classes)]
    classes = rng.choices(range(n_classes), shares)
    while len(classes) < n:
        if rng.random() < stay:
            classes.append(classes[-1])
        else:
            classes += rng.choices(range(n_classes), shares)
    return classes


def draw_episode(
    rng: random.Random,
    words: Vocabulary,
    difficulty: Difficulty,
    held_out: frozenset[frozenset[str]],
    n_items: int,
) -> Episode:
    """Draw an episode of `n_items` items, without held-out pairs; half have no wrong labels."""
    n_classes = rng.randint(*difficulty.classes)
    is_near = rng.random() < difficulty.near
    categories = draw_categories(rng, words, n_classes, held_out, near=is_near)
    classes = draw_classes(rng, n_items, n_classes, uneven=difficulty.uneven, stay=difficulty.stay)
    if rng.random() >= 0.5:
        difficulty = replace(difficulty, mislabeled=0.0)
    return make_episode(rng, words, categories, classes, difficulty, held_out=held_out)


def list_sequence(rng: random.Random, words: Vocabulary, n: int) -> list[str]:
    """Draw `n` different words of one category, or with probability ¼ of one group."""
    name = rng.choice(sorted(words.categories))
    pool = list(words.categories[name])
    if rng.random() < 0.25:
        for neighbor in words.near.get(name, ()):
            pool += words.categories[neighbor]
    return rng.sample(sorted(set(pool)), n)


def named_sequence(
    rng: random.Random, words: Vocabulary, n: int, *, longest: int = 1
) -> tuple[list[str], list[float]]:
    """Draw `n` texts, each with its category's name ("love : Sentiment"), and the loss weights.

    From these, the models learn the categories of words before episodes ask them to compare texts.
    """
    tokens: list[str] = []
    weights: list[float] = []
    for _ in range(n):
        name = rng.choice(sorted(words.categories))
        pool = rng.sample(words.categories[name], len(words.categories[name]))
        text = _text(rng, words, pool, Difficulty(longest=longest), (), 0)
        tokens += [*text, ":", words.names[name]]
        weights += [WORD_WEIGHT] * (len(text) + 1) + [LABEL_WEIGHT]
    return tokens, weights
