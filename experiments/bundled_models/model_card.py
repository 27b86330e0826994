"""A bundled model's card, with measured numbers: `python -m experiments.bundled_models card FOLDER`.

The card's text is in card.md.j2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.bundled_models.curriculum import LEVELS
from experiments.bundled_models.episodes import Vocabulary, held_out_pairs, load_words, seen_pairs
from experiments.bundled_models.head_locations import (
    HeadLocations,
    locations_markdown,
    measure_locations,
    training_record,
)
from experiments.bundled_models.metrics import (
    IMBALANCED,
    ORDER,
    REORDER,
    TEXTS,
    Task,
    accuracy_cells,
    answers,
    mixed_episodes,
    shown_episodes,
    word_tasks,
)
from experiments.framework import markdown
from icl_lens import load_model

Pairs = Sequence[tuple[str, str]]
LAYOUTS = {"order": ORDER, "reorder": REORDER, "imbalanced": IMBALANCED}
SEEN_TASKS = [Task(("fruit", "instrument"), labels) for labels in (("bar", "foo"), ("foo", "bar"))]
THREE_OF_FOUR = tuple(tuple(int(place != odd) for place in range(4)) for odd in range(4))
"""The odd demonstration alternates over all positions, so the last one is of the majority no more often than any."""
BIAS_DEMONSTRATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "majority: 3 of 4 are of class 1": THREE_OF_FOUR,
    "recency: class 1 last of 4": ((0, 0, 1, 1),),
    "recency: class 1 last of 2": ((0, 1),),
    "recency: class 1 last of 8": ((0, 0, 0, 0, 1, 1, 1, 1),),
}
N_PER_CLASS = 700
"""Prompts of each class for a bias: the standard error over both lengths of texts is then about one point."""


def accuracy_table(first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table with accuracies between labels and over the vocabulary for each column."""
    prefixes = [f"{column}: " if column else "" for column in columns]
    names = [prefix + kind for prefix in prefixes for kind in ("labels", "vocabulary")]
    return markdown.table([first, *names], [[name, *cells] for name, cells in rows])


def task_table(model: Any, words: Vocabulary, n: int) -> str:
    """Return accuracy by task, label and layout."""
    rows = []
    for task in [*word_tasks(), *SEEN_TASKS]:
        name = f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]}"
        found = (accuracy_cells(model, task.episodes(words, sides, n)) for sides in LAYOUTS.values())
        rows.append((name, [cell for cells in found for cell in cells]))
    return accuracy_table("input", list(LAYOUTS), rows)


def pair_table(model: Any, words: Vocabulary, unseen: Pairs, seen: Pairs, n: int) -> str:
    """Return accuracy on pairs that training never contrasts, and on the others, of single words and of texts."""
    rows = []
    layouts = {**LAYOUTS, "as in training": None}
    for longest, what in TEXTS.items():
        for name, pairs, shown in (
            ("never seen together", unseen, layouts),
            ("seen together", seen, ("order", "as in training")),
        ):
            for layout in shown:
                episodes = mixed_episodes(words, pairs, layouts[layout], n, longest=longest)
                rows.append((f"{what}, categories {name}, {layout}", accuracy_cells(model, episodes)))
    for task in word_tasks()[::2]:
        cells = accuracy_cells(model, task.episodes(words, ORDER, n, longest=8))
        rows.append((f"texts, {task.pair[1]} against {task.pair[0]}, order", cells))
    return accuracy_table("prompts", [""], rows)


def shown_table(model: Any, words: Vocabulary, unseen: Pairs, n: int) -> str:
    """Return accuracy on pairs never seen together with 2 to 16 demonstrations, half of each class, in any order."""
    rows = []
    for n_shown in (2, 4, 8, 12, 16):
        sets = [shown_episodes(words, unseen, n_shown, n, longest=longest) for longest in TEXTS]
        rows.append((str(n_shown), [cell for episodes in sets for cell in accuracy_cells(model, episodes)]))
    return accuracy_table("demonstrations", list(TEXTS.values()), rows)


@dataclass(frozen=True)
class Bias:
    """Accuracy on the class that demonstrations favor and on the other, and the share of answers of that class (%)."""

    what: str
    favored: float
    other: float
    predicted: float
    n: int
    """Prompts of each class."""

    @property
    def points(self) -> float:
        """How much more often a query is answered correctly if its class is the favored one."""
        return self.favored - self.other

    @property
    def error(self) -> float:
        """One standard error of `points`."""
        shares = (self.favored / 100, self.other / 100)
        return 100 * (sum(share * (1 - share) for share in shares) / self.n) ** 0.5


def biases(model: Any, words: Vocabulary, unseen: Pairs, n: int) -> list[Bias]:
    """Return majority and recency biases on single words, on texts, and on both."""
    found = []
    for name, orders in BIAS_DEMONSTRATIONS.items():
        parts = []
        for longest in TEXTS:
            for shown in orders:
                for query in (1, 0):
                    episodes = mixed_episodes(words, unseen, (*shown, query), -(-n // len(orders)), longest=longest)
                    parts.append(answers(model, episodes).assign(longest=longest, query=query))
        every: Any = pd.concat(parts)
        for what, some in (*((text, every[every["longest"] == i]) for i, text in TEXTS.items()), ("all", every)):
            favored, other = (some[some["query"] == query]["label"] for query in (1, 0))
            shares = (100 * float(hits.mean()) for hits in (favored, other, some["class_1"]))
            found.append(Bias(f"{name}, {what}", *shares, n=len(favored)))
    return found


def bias_table(model: Any, words: Vocabulary, unseen: Pairs, n: int) -> str:
    """Return answers to balanced queries after unequal (majority) or ordered (recency) demonstrations."""
    columns = ["demonstrations", "accuracy on class 1", "accuracy on class 0", "bias", "answers of class 1"]
    rows = []
    for bias in biases(model, words, unseen, n):
        points = f"{bias.points:+.1f} ± {bias.error:.1f}"
        rows.append([bias.what, f"{bias.favored:.1f}", f"{bias.other:.1f}", points, f"{bias.predicted:.1f}"])
    return markdown.table(columns, rows)


def history_table(history: Sequence[dict[str, Any]]) -> str:
    """Return at most twelve validations, evenly spaced, the last among them."""
    spacing = max(1, -(-len(history) // 12))
    columns = ["step", "level", "held-out pairs, words", "held-out pairs, texts", "seen pairs, texts"]
    names = ("step", "level", "words", "texts", "texts of seen pairs")
    rows = [[str(entry[name]) for name in names] for entry in history[::-1][::spacing][::-1]]
    return markdown.table(columns, rows, align="r")


def write_card(
    folder: Path,
    *,
    name: str | None = None,
    other_seeds: Sequence[HeadLocations] = (),
    n_prompts: int = 150,
    n_per_class: int = N_PER_CLASS,
    n_located: int = 320,
) -> HeadLocations:
    """Measure the model in `folder` and write its README.md there; return its head locations.

    Accuracies are measured on `n_prompts` prompts per row, biases on `n_per_class` per class, and head locations on
    `n_located`. `name` defaults to the folder's. The tables of head locations include `other_seeds` of the same
    architecture. Raise InputError if the folder lacks the model or its training record.
    """
    run, words = training_record(folder), load_words()
    model = load_model(str(folder))
    original: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    own = measure_locations(model, run, words, n=n_located)
    others = [other for other in other_seeds if other.arch == own.arch and other.seed != own.seed]
    locations = sorted([own, *others], key=lambda one: one.seed)
    held_out = held_out_pairs(words)
    unseen = sorted((first, second) for first, second in map(sorted, held_out))
    seen, config = seen_pairs(words, held_out), original.config
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    card = environment.get_template("card.md.j2").render(
        name=name or folder.name,
        model_class=type(original).__name__,
        n_parameters=f"{sum(parameter.numel() for parameter in original.parameters()):,}",
        config=config,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        dtype=stored_dtype(folder),
        pieces=" and ".join(f'"{piece}"' for piece in tokenizer.tokenize("love")),
        words=words,
        n_words=f"{len(words.categories_of):,}",
        smallest_category=min(map(len, words.categories.values())),
        n_pairs=len(seen) + len(held_out),
        n_held_out=len(held_out),
        levels=", ".join(f"{level.until:.0%}" for level in LEVELS[:-1]),
        run=run,
        history=history_table(run["history"]),
        n_prompts=f"{n_prompts:,}",
        n_per_class=f"{n_per_class:,}",
        tasks=task_table(model, words, n_prompts),
        pairs=pair_table(model, words, unseen, seen, n_prompts),
        shown=shown_table(model, words, unseen, n_prompts),
        seeds=", ".join(str(one.seed) for one in locations) if others else "",
        where=locations_markdown(locations),
        biases=bias_table(model, words, unseen, n_per_class),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return own


def stored_dtype(folder: Path) -> str:
    """Return what a folder's weights are stored in, such as "float16"."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {str(file.get_tensor(key).dtype).removeprefix("torch.") for key in file.keys()}  # noqa: SIM118
    return " and ".join(sorted(found))
