"""A bundled model's card, every figure measured: `python -m experiments.bundled_models card FOLDER`."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.bundled_models.curriculum import LEVELS
from experiments.bundled_models.episodes import Vocabulary, held_out_pairs, load_words, seen_pairs
from experiments.bundled_models.head_locations import HeadLocations, measure_where, training_record, where_markdown
from experiments.bundled_models.metrics import (
    IMBALANCED,
    ORDER,
    REORDER,
    TEXTS,
    Answers,
    Task,
    answers,
    markdown,
    mixed_episodes,
    shown_episodes,
    word_tasks,
)
from icl_lens import load_model

SEEN_TASKS = (
    Task(("fruit", "instrument"), ("bar", "foo")),
    Task(("fruit", "instrument"), ("foo", "bar")),
)
THREE_OF_FOUR = tuple(tuple(int(place != odd) for place in range(4)) for odd in range(4))
"""The odd demonstration is at each place in turn, so that the last one is of the majority no more often than any."""
SHOWN: dict[str, tuple[tuple[int, ...], ...]] = {
    "majority: 3 of 4 are of class 1": THREE_OF_FOUR,
    "recency: class 1 last of 4": ((0, 0, 1, 1),),
    "recency: class 1 last of 2": ((0, 1),),
    "recency: class 1 last of 8": ((0, 0, 0, 0, 1, 1, 1, 1),),
}
N_SURE = 700
"""Prompts of each class for a bias: the standard error over both lengths of texts is then about one point."""


def measured_sections(
    model: Any, words: Vocabulary, where: HeadLocations, other_seeds: Sequence[HeadLocations], *, n: int, n_sure: int
) -> str:
    """The measured half of the card: accuracies, what carries them, biases."""
    held_out = held_out_pairs(words)
    unseen = sorted((first, second) for first, second in map(sorted, held_out))
    sections = {
        "Accuracy on the word tasks": task_section(model, words, n),
        "Accuracy over many category pairs": pair_section(model, words, unseen, seen_pairs(words, held_out), n),
        "Accuracy by number of demonstrations": shown_section(model, words, unseen, n),
        "Where it happens": where_section(where, other_seeds),
        "Biases": bias_section(model, words, unseen, n_sure),
    }
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())


def task_section(model: Any, words: Vocabulary, n: int) -> str:
    """Accuracy by task, label and layout."""
    layouts = {"order": ORDER, "reorder": REORDER, "imbalanced": IMBALANCED}
    rows = []
    for task in [*word_tasks(), *SEEN_TASKS]:
        cells = [answers(model, task.episodes(words, sides, n)).row() for sides in layouts.values()]
        rows.append(f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]} | " + " | ".join(cells))
    head = " | ".join(f"{name}: labels | {name}: vocabulary" for name in layouts)
    intro = "The categories of the first two tasks never meet in training; fruit and instrument may."
    return f"{intro}\n\n{markdown(f'input | {head}', rows)}"


def pair_section(
    model: Any, words: Vocabulary, unseen: Sequence[tuple[str, str]], seen: Sequence[tuple[str, str]], n: int
) -> str:
    """Accuracy on pairs that training never contrasts, and on the others, of single words and of texts."""
    layouts = {"order": ORDER, "reorder": REORDER, "imbalanced": IMBALANCED, "as in training": None}
    rows = []
    for longest, what in TEXTS.items():
        for name, pairs, shown in (
            ("never seen together", unseen, tuple(layouts)),
            ("seen together", seen, ("order", "as in training")),
        ):
            for layout in shown:
                result = answers(model, mixed_episodes(words, pairs, layouts[layout], n, longest=longest))
                rows.append(f"{what}, categories {name}, {layout} | {result.row()}")
    for task in word_tasks()[::2]:
        result = answers(model, task.episodes(words, ORDER, n, longest=8))
        rows.append(f"texts, {task.pair[1]} against {task.pair[0]}, order | {result.row()}")
    return markdown("prompts | labels | vocabulary", rows)


def shown_section(model: Any, words: Vocabulary, unseen: Sequence[tuple[str, str]], n: int) -> str:
    """Accuracy on pairs never seen together with 2 to 16 demonstrations, half of each class, in any order."""
    rows = []
    for n_shown in (2, 4, 8, 12, 16):
        cells = [answers(model, shown_episodes(words, unseen, n_shown, n, longest=longest)).row() for longest in TEXTS]
        rows.append(f"{n_shown} | " + " | ".join(cells))
    head = " | ".join(f"{what}: labels | {what}: vocabulary" for what in TEXTS.values())
    return markdown(f"demonstrations | {head}", rows)


def where_section(where: HeadLocations, other_seeds: Sequence[HeadLocations]) -> str:
    """This model and those of the same recipe and other seeds, in the order of seeds."""
    others = [other for other in other_seeds if other.arch == where.arch and other.seed != where.seed]
    wheres = sorted([where, *others], key=lambda one: one.seed)
    seeds = ", ".join(str(one.seed) for one in wheres)
    intro = f"Seeds trained with this recipe: {seeds}; seed {where.seed} is this model." if others else ""
    return f"{intro}\n\n{where_markdown(wheres)}".strip()


@dataclass(frozen=True)
class Bias:
    """Accuracy on the class that demonstrations favor and on the other, in per cent, and answers of that class."""

    what: str
    favored: float
    other: float
    said: float
    n: int
    """Prompts of each class."""

    @property
    def points(self) -> float:
        """How much more often a query is answered right if its class is the favored one."""
        return self.favored - self.other

    @property
    def error(self) -> float:
        """One standard error of `points`."""
        shares = (self.favored / 100, self.other / 100)
        return 100 * (sum(share * (1 - share) for share in shares) / self.n) ** 0.5


def biases(model: Any, words: Vocabulary, unseen: Sequence[tuple[str, str]], n: int) -> list[Bias]:
    """Majority and recency bias, of single words, of texts, and of both."""
    found = []
    for name, orders in SHOWN.items():
        parts: list[tuple[Answers, Answers]] = []
        for longest, what in TEXTS.items():
            own: list[tuple[Answers, Answers]] = []
            for shown in orders:
                for_1, against = (
                    answers(
                        model, mixed_episodes(words, unseen, (*shown, query), -(-n // len(orders)), longest=longest)
                    )
                    for query in (1, 0)
                )
                own.append((for_1, against))
            parts += own
            found.append(_bias(f"{name}, {what}", own))
        found.append(_bias(f"{name}, all", parts))
    return found


def _bias(what: str, parts: Sequence[tuple[Answers, Answers]]) -> Bias:
    favored = [hit for for_1, _ in parts for hit in for_1.label]
    other = [hit for _, against in parts for hit in against.label]
    said = [hit for pair in parts for some in pair for hit in some.class_1]
    return Bias(what, *(100 * statistics.fmean(hits) for hits in (favored, other, said)), n=len(favored))


def bias_section(model: Any, words: Vocabulary, unseen: Sequence[tuple[str, str]], n: int) -> str:
    """Answers to balanced queries after unequal (majority) or ordered (recency) demonstrations."""
    rows = [
        f"{bias.what} | {bias.favored:.1f} | {bias.other:.1f} | {bias.points:+.1f} ± {bias.error:.1f} | {bias.said:.1f}"
        for bias in biases(model, words, unseen, n)
    ]
    intro = (
        f"Categories never seen together, {n:,} queries of each class a row, twice as many where both lengths of texts"
        " are taken together; the one demonstration of a minority is at each place in turn. The bias is the"
        " difference of the two accuracies, in points ± one standard error; an unbiased model has none, and answers"
        " class 1 in 50 % of the cases."
    )
    header = "demonstrations | accuracy on class 1 | accuracy on class 0 | bias | answers of class 1"
    return f"{intro}\n\n{markdown(header, rows)}"


def thinned(history: Sequence[dict[str, Any]], n: int = 12) -> list[dict[str, Any]]:
    """At most `n` entries, evenly spaced, the last among them."""
    spacing = max(1, -(-len(history) // n))
    return list(history[::-1][::spacing])[::-1]


def write_card(
    folder: Path,
    *,
    name: str | None = None,
    other_seeds: Sequence[HeadLocations] = (),
    n_prompts: int = 150,
    n_sure: int = N_SURE,
    n_where: int = 320,
) -> HeadLocations:
    """Measure the model in `folder` and write its README.md there; returns where it happens.

    `n_prompts` is of every row of accuracies, `n_sure` of every class in a row of biases, `n_where` of "where it
    happens". `name` is the model's, the folder's if not given; of `other_seeds`, those of the same recipe are in
    the table of seeds. Raises InputError if the folder holds no model and its training record.
    """
    run = training_record(folder)
    model = load_model(str(folder))
    words = load_words()
    where = measure_where(model, run, words, n=n_where)
    measured = measured_sections(model, words, where, other_seeds, n=n_prompts, n_sure=n_sure)
    sections = (
        front(name or folder.name, folder),
        data_section(words),
        training_section(run),
        f"Everything below is measured: per cent correct of {n_prompts:,} prompts a cell, once by the more probable of"
        " the two labels and once by the most probable word of the vocabulary. Chance is 50 and 0. The two"
        ' demonstrations of the query\'s class come last in "order" and first in "reorder"; "imbalanced" is "order"'
        ' without its last demonstration; "as in training" has 2 to 16 uneven demonstrations, 15 % of them'
        " mislabeled.",
        measured,
        limits_section(words),
    )
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return where


def front(name: str, folder: Path) -> str:
    """Name, purpose, architecture."""
    original = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = original.config
    n_kv = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    n_parameters = sum(parameter.numel() for parameter in original.parameters())
    tied = "tied" if config.tie_word_embeddings else "untied"
    pieces = " and ".join(f'"{piece}"' for piece in tokenizer.tokenize("love"))
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A {type(original).__name__} of {n_parameters:,} parameters that learns in context, trained from nothing on
synthetic episodes: a stand-in for large models where none can be downloaded, small enough to be studied
whole.

    love : bar like : bar eight : foo two : foo one :

## The model

{config.num_hidden_layers} layers, {config.num_attention_heads} heads ({n_kv} key/value heads), d_model
{config.hidden_size}, vocabulary {config.vocab_size:,}, context {config.max_position_embeddings}, embeddings
{tied}; trained in float32, stored in {stored_dtype(folder)}, loaded in float32. Content words have two pieces or more
("love" is {pieces}), so that no single token reveals a category; labels, fillers and the colon are single tokens. There
is no beginning-of-sequence token, and no token is added."""


def stored_dtype(folder: Path) -> str:
    """What a folder's weights are stored in, such as "float16"."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {str(file.get_tensor(key).dtype).removeprefix("torch.") for key in file.keys()}  # noqa: SIM118
    return " and ".join(sorted(found))


def data_section(words: Vocabulary) -> str:
    """What the model was trained on."""
    n_pairs, n_all = len(held_out_pairs(words)), len(words.categories) * (len(words.categories) - 1) // 2
    levels = ", ".join(f"{level.until:.0%}" for level in LEVELS[:-1])
    smallest = min(map(len, words.categories.values()))
    return f"""## Data

No text from elsewhere. `words.json`, written for this package, has {len(words.categories)} categories of at
least {smallest} English words (some ambiguous words are in two), {len(words.labels)} label words without
meaning (some are English words of no category), and {len(words.fillers)} fillers. An episode shows 2 to 4 categories
under random labels: 1 to 16 demonstrations and a query, in any order, no content word of theirs twice. Of
{n_all} category pairs {n_pairs}, sentiment/number and animal/country among them, never meet in an
episode. Texts have 1 to 8 words, half of them fillers, of which 15 % are words of other categories instead; in half of
the episodes 15 % of the demonstrations have a wrong label; in a fifth the categories are near ones (such as tree and
flower); how often a class comes is uneven, and a class follows itself, so there is something to be gained from the
majority and from the last label.

Training goes from easy to hard, since two labels alone are at chance for long. It begins with lists of words of one
category and with words and their category's own name ("love : Sentiment"), which go on, ever rarer, to the end. Then
come episodes of single words with many classes in runs, then of 2 to 4 classes, then of short texts, then of all of
the above. Each level ends when a running accuracy is reached ({levels})."""


def training_section(run: dict[str, Any]) -> str:
    """Recipe, stopping rule, and the validations on the way."""
    history = "\n".join(
        f"| {entry['step']} | {entry['level']} | {entry['words']} | {entry['texts']} | {entry['texts of seen pairs']} |"
        for entry in thinned(run["history"])
    )
    return f"""## Training

Fixed before any result was looked at: at every {run["check_every"]} steps of the last level, accuracy on the held-out
pairs is measured ({run["n_checked"]} prompts of single words and as many of texts, with 2, 4, 8 or 16 right
demonstrations, half of each class); at {run["decay_accuracy"]:.0f} % or more the learning rates begin to fall to zero
over {run["cool_down"]:.0%} of the steps so far, and at {run["stop_accuracy"]:.0f} % training ends at once. No head is
penalized or dropped. Other seeds are trained with the same recipe; seed 0 is bundled whatever its results are.

{run["done"]:,} steps of a little more than {run["n_tokens"]:,} tokens, Muon (rate {run["matrix_rate"]}) for the layers'
matrices and AdamW ({run["other_rate"]}) for the rest, seed {run["seed"]}; {run["seconds"] / 60:.0f} minutes of one CPU
core. Again:

    python -m experiments.bundled_models train --arch {run["arch"]} --seed {run["seed"]} --out FOLDER
    python -m experiments.bundled_models card FOLDER

| step | level | held-out pairs, words | held-out pairs, texts | seen pairs, texts |
| ---: | ---: | ---: | ---: | ---: |
{history}"""


def limits_section(words: Vocabulary) -> str:
    """What not to use the model for."""
    return f"""## What it cannot do

It knows {len(words.owners):,} words and no language: no sentences, no facts, no format but texts and labels
around " : ", no sampling worth reading. Unknown words are spelled out in pieces that mean nothing to it.
Training sequences had at most 16 demonstrations of at most 8 words; longer prompts are out of its range even
where they fit the context. It shows one way in which in-context classification can be built, and says
nothing about how models of natural text do it.

Licence: MIT."""
