"""A bundled model's card, every figure measured: `python -m experiments.pieces_world --out FOLDER --card-only`."""

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM

from experiments.pieces_world.curriculum import LEVELS
from experiments.pieces_world.episodes import (
    ALWAYS_HELD_OUT,
    Episode,
    Words,
    draw_sides,
    held_out_pairs,
    load_words,
    make_episode,
    seen_pairs,
)
from icl_lens import (
    Demonstration,
    Prompt,
    PromptBatch,
    ablate_heads,
    attention_to_labels,
    capture,
    head_log_prob_increase,
    last_log_probs,
    load_model,
    tokenize,
)

ORDER, REORDER, IMBALANCED = (0, 0, 1, 1, 1), (1, 1, 0, 0, 1), (0, 0, 1, 1)
N_LOCATED, CHUNK = 4, 100
TEXTS = {1: "single words", 8: "texts of 1 to 8 words"}


def encode(model: Any, episodes: Sequence[Episode]) -> PromptBatch:
    """The episodes' prompts as the package tokenizes them."""
    prompts = [
        Prompt(
            [Demonstration(" ".join(item.text), episode.labels[item.told]) for item in episode.items[:-1]],
            " ".join(episode.items[-1].text),
            answer=episode.answer,
            labels=episode.labels,
        )
        for episode in episodes
    ]
    return tokenize(model, prompts)


@dataclass(frozen=True)
class Answers:
    """Per prompt: is the most probable of the two labels right, of all words, and does it fall on class 1?"""

    label: list[bool]
    word: list[bool]
    class_1: list[bool]

    def row(self) -> str:
        """Accuracies in per cent, as table cells."""
        return f"{percent(self.label)} | {percent(self.word)}"


def percent(hits: Sequence[bool]) -> str:
    """A share in per cent with one decimal."""
    return f"{100 * statistics.fmean(hits):.1f}"


def answers(model: Any, episodes: Sequence[Episode]) -> Answers:
    """What the model says to each episode's query."""
    result = Answers([], [], [])
    ids = model.tokenizer.convert_tokens_to_ids
    for start in range(0, len(episodes), CHUNK):
        part = episodes[start : start + CHUNK]
        log_probs = last_log_probs(model, encode(model, part))
        labels = torch.tensor([ids(list(episode.labels)) for episode in part])
        side = torch.tensor([episode.items[-1].side for episode in part])
        chosen = log_probs.gather(1, labels).argmax(-1)
        result.label.extend((chosen == side).tolist())
        result.word.extend((log_probs.argmax(-1) == labels.gather(1, side[:, None])[:, 0]).tolist())
        result.class_1.extend((chosen == 1).tolist())
    return result


@dataclass(frozen=True)
class HeadMeans:
    """Means over prompts, per head, at the last token."""

    increase: Float[Tensor, "layer head"]
    """Log-probability increase of the answer (nats)."""
    contrast: Float[Tensor, "layer head"]
    """The same less that of the episode's other label: what tells the two apart (nats)."""
    on_true: Float[Tensor, "layer head"]
    """Attention on labels that are the answer."""
    on_false: Float[Tensor, "layer head"]
    """Attention on the other labels."""


def head_means(model: Any, episodes: Sequence[Episode]) -> HeadMeans:
    """All four over episodes of two classes."""
    sums: list[Tensor] | None = None
    ids = model.tokenizer.convert_tokens_to_ids
    for start in range(0, len(episodes), CHUNK):
        part = episodes[start : start + CHUNK]
        batch = encode(model, part)
        acts = capture(model, batch)
        other = torch.tensor([ids(episode.labels[1 - episode.items[-1].side]) for episode in part])
        increase = head_log_prob_increase(acts, batch.answer_tokens)
        attention = attention_to_labels(acts)
        true = (batch.label_index == batch.answer[:, None])[:, None, None, :]
        some = [
            increase.sum(0),
            (increase - head_log_prob_increase(acts, other)).sum(0),
            (attention * true).sum((0, -1)),
            (attention * ~true).sum((0, -1)),
        ]
        sums = some if sums is None else [a + b for a, b in zip(sums, some, strict=True)]
    assert sums is not None
    return HeadMeans(*(total / len(episodes) for total in sums))


@dataclass(frozen=True)
class Task:
    """A word task's prompts: the input is of category `pair[1]`, whose label is `labels[1]`."""

    pair: tuple[str, str]
    labels: tuple[str, str]

    def episodes(self, words: Words, sides: Sequence[int], n: int, *, longest: int = 1) -> list[Episode]:
        """`n` prompts, the same ones every time."""
        rng = random.Random(f"card {self.pair} {self.labels} {sides} {longest}")
        return [make_episode(rng, words, self.pair, sides, longest=longest, labels=self.labels) for _ in range(n)]


def word_tasks() -> list[Task]:
    """Both word tasks, each category as the input's, each label as the true one: 8."""
    pairs = [pair for first, second in ALWAYS_HELD_OUT for pair in ((second, first), (first, second))]
    return [Task(pair, labels) for pair in pairs for labels in (("bar", "foo"), ("foo", "bar"))]


def mixed_episodes(
    words: Words, pairs: Sequence[tuple[str, str]], sides: Sequence[int] | None, n: int, *, longest: int = 1
) -> list[Episode]:
    """Prompts over many pairs with drawn labels; `sides=None` draws them as in training, see `shown_episodes`."""
    rng = random.Random(f"card mixed {len(pairs)} {sides} {longest}")
    episodes = []
    for _ in range(n):
        drawn = sides or _drawn_sides(rng, rng.randint(2, 16))
        pair = rng.sample(rng.choice(pairs), 2)
        if sides is None:
            episodes.append(make_episode(rng, words, pair, drawn, longest=longest, strays=0.15, mislabelled=0.15))
        else:
            episodes.append(make_episode(rng, words, pair, drawn, longest=longest))
    return episodes


def _drawn_sides(rng: random.Random, n: int) -> list[int]:
    """Uneven classes of `n` demonstrations, both of them there, and an even one of the query."""
    while True:
        drawn = draw_sides(rng, n)
        if set(drawn) == {0, 1}:
            return [*drawn, rng.randrange(2)]


def shown_episodes(
    words: Words, pairs: Sequence[tuple[str, str]], n_shown: int, n: int, *, longest: int
) -> list[Episode]:
    """Prompts over many pairs with `n_shown` right demonstrations, half of each class, in any order."""
    rng = random.Random(f"card shown {n_shown} {longest}")
    episodes = []
    for _ in range(n):
        sides = [0, 1] * (n_shown // 2)
        rng.shuffle(sides)
        pair = rng.sample(rng.choice(pairs), 2)
        episodes.append(make_episode(rng, words, pair, [*sides, rng.randrange(2)], longest=longest))
    return episodes


@dataclass(frozen=True)
class Ablation:
    """What zeroing the located heads does to accuracies (per cent), against random others."""

    located: list[tuple[int, int]]
    """(layer, head), the largest mean first."""
    intact: tuple[float, float]
    """Accuracy by the labels and by the whole vocabulary."""
    zeroed: dict[int, tuple[float, float]]
    """The same by how many of the located heads are zeroed."""
    random: list[tuple[float, float]]
    """The same for each draw of as many random other heads."""

    @property
    def costs_more(self) -> tuple[float, float]:
        """Points of accuracy (among the labels, over the vocabulary) lost above the random heads' mean."""
        label, vocabulary = (statistics.fmean(column) for column in zip(*self.random, strict=True))
        return label - self.zeroed[N_LOCATED][0], vocabulary - self.zeroed[N_LOCATED][1]


def ranked_heads(values: Float[Tensor, "layer head"]) -> list[tuple[int, int]]:
    """(layer, head), the largest value first."""
    return [divmod(int(index), values.shape[1]) for index in values.flatten().argsort(descending=True)]


def ablation(
    model: Any, episodes: Sequence[Episode], ranked: Sequence[tuple[int, int]], n_draws: int, *, seed: int = 0
) -> Ablation:
    """Zero the first of the `ranked` heads, and zero random others."""

    def accuracy(heads: Sequence[tuple[int, int]]) -> tuple[float, float]:
        with ablate_heads(model, heads):
            result = answers(model, episodes)
        return 100 * statistics.fmean(result.label), 100 * statistics.fmean(result.word)

    rng = random.Random(seed)
    draws = [accuracy(rng.sample(ranked[N_LOCATED:], N_LOCATED)) for _ in range(n_draws)]
    return Ablation(
        located=list(ranked[:12]),
        intact=accuracy([]),
        zeroed={n: accuracy(ranked[:n]) for n in (1, 2, N_LOCATED, 6, 8)},
        random=draws,
    )


def table(header: str, rows: Sequence[str]) -> str:
    """A Markdown table; cells are separated by ` | ` and the first column is left-aligned."""
    width = header.count("|")
    return "\n".join([f"| {header} |", "| --- |" + " ---: |" * width, *(f"| {row} |" for row in rows)])


def measured_sections(model: Any, words: Words, *, n: int, n_draws: int) -> str:
    """The measured half of the card: accuracies, what carries them, biases."""
    held_out = held_out_pairs(words)
    pairs = {
        "never seen together": sorted(tuple(sorted(pair)) for pair in held_out),
        "seen together": seen_pairs(words, held_out),
    }
    layouts = {"order": ORDER, "reorder": REORDER, "imbalanced": IMBALANCED}

    rows = []
    for task in word_tasks():
        cells = [answers(model, task.episodes(words, sides, n)).row() for sides in layouts.values()]
        rows.append(f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]} | " + " | ".join(cells))
    head = " | ".join(f"{name}: labels | {name}: vocabulary" for name in layouts)
    text = ["## Accuracy on the word tasks", table(f"input | {head}", rows)]

    rows = []
    for longest, what in TEXTS.items():
        for name, some in pairs.items():
            for layout, sides in {**layouts, "as in training": None}.items():
                result = answers(model, mixed_episodes(words, some, sides, n, longest=longest))
                rows.append(f"{what}, categories {name}, {layout} | {result.row()}")
    for task in word_tasks()[::2]:
        result = answers(model, task.episodes(words, ORDER, n, longest=8))
        rows.append(f"texts, {task.pair[1]} against {task.pair[0]}, order | {result.row()}")
    text += ["## Accuracy over many category pairs", table("prompts | labels | vocabulary", rows)]

    rows = []
    for n_shown in (2, 4, 8, 12, 16):
        cells = [
            answers(model, shown_episodes(words, pairs["never seen together"], n_shown, n, longest=longest)).row()
            for longest in TEXTS
        ]
        rows.append(f"{n_shown} | " + " | ".join(cells))
    head = " | ".join(f"{what}: labels | {what}: vocabulary" for what in TEXTS.values())
    text += ["## Accuracy by number of demonstrations", table(f"demonstrations | {head}", rows)]
    text += ["## Which heads carry it", heads_section(model, words, n=n, n_draws=n_draws)]
    text += ["## Biases", bias_section(model, words, pairs["never seen together"], n)]
    return "\n\n".join(text)


def heads_section(model: Any, words: Words, *, n: int, n_draws: int) -> str:
    """Heads by increase and by contrast on the word tasks: where they are, what they attend to, what zeroing costs."""
    episodes = [episode for task in word_tasks() for episode in task.episodes(words, ORDER, n // 4)]
    means = head_means(model, episodes)
    text = [
        f"Means over {len(episodes)} prompts of both word tasks, order, both labels; final norm's scale frozen, biases"
        " included. Contrast is the increase of the answer less that of the other label."
    ]
    for name, values in (("increase", means.increase), ("contrast", means.contrast)):
        ranked = ranked_heads(values)
        cut = ablation(model, episodes, ranked, n_draws)
        rows = [
            f"L{layer}H{head} | {values[layer, head]:.2f} | {100 * means.on_true[layer, head]:.1f}"
            f" | {100 * means.on_false[layer, head]:.1f}"
            for layer, head in cut.located[:8]
        ]
        text += [
            f"### By {name}",
            table(f"head | {name} (nats) | attention on true labels (%) | on false labels (%)", rows),
            f"{int((values > 0.05).sum())} of {values.numel()} heads add more than 0.05 nats.",
            ablation_table(cut, n_draws),
        ]
    return "\n\n".join(text)


def ablation_table(cut: Ablation, n_draws: int) -> str:
    """What zeroing costs, and a sentence that compares the top heads with random ones."""
    rows = [f"none | {cut.intact[0]:.1f} | {cut.intact[1]:.1f}"]
    rows += [f"top {n} | {label:.1f} | {word:.1f}" for n, (label, word) in cut.zeroed.items()]
    (label_mean, label_sd), (word_mean, word_sd) = (
        (statistics.fmean(column), statistics.stdev(column)) for column in zip(*cut.random, strict=True)
    )
    rows.append(
        f"{N_LOCATED} random others, mean ± sd of {n_draws} draws"
        f" | {label_mean:.1f} ± {label_sd:.1f} | {word_mean:.1f} ± {word_sd:.1f}"
    )
    return (
        table("heads zeroed at every position | labels | vocabulary", rows)
        + f"\n\nZeroing the top {N_LOCATED} costs {cut.costs_more[1]:.1f} points more accuracy over the vocabulary, and"
        f" {cut.costs_more[0]:.1f} points more between the two labels, than zeroing {N_LOCATED} random others."
    )


def bias_section(model: Any, words: Words, pairs: Sequence[tuple[str, str]], n: int) -> str:
    """Answers to balanced queries after unequal (majority) or ordered (recency) demonstrations."""
    rows = []
    for longest, what in TEXTS.items():
        for name, shown in (
            ("majority: 3 of 4 are of class 1", (1, 0, 1, 1)),
            ("recency: class 1 last", (0, 0, 1, 1)),
        ):
            for_1, against = (
                answers(model, mixed_episodes(words, pairs, (*shown, query), n, longest=longest)) for query in (1, 0)
            )
            share = percent([*for_1.class_1, *against.class_1])
            rows.append(f"{name}, {what} | {percent(for_1.label)} | {percent(against.label)} | {share}")
    intro = (
        "Categories never seen together, 4 demonstrations; an unbiased model has equal accuracies and"
        " answers class 1 in 50 % of the cases."
    )
    header = "demonstrations | accuracy on class 1 | accuracy on class 0 | answers of class 1"
    return f"{intro}\n\n{table(header, rows)}"


def thinned(history: Sequence[dict[str, Any]], n: int = 12) -> list[dict[str, Any]]:
    """At most `n` entries, evenly spaced, the last among them."""
    spacing = max(1, -(-len(history) // n))
    return list(history[::-1][::spacing])[::-1]


def write_card(folder: Path, *, n_prompts: int = 1000, n_draws: int = 20) -> None:
    """Measure the model in `folder` on `n_prompts` prompts a figure and write its README.md there.

    Raises OSError if the folder holds no model and its training record.
    """
    model = load_model(str(folder))
    words = load_words()
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    original = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    config = original.config
    n_kv = getattr(config, "num_key_value_heads", config.num_attention_heads)
    n_parameters = sum(parameter.numel() for parameter in original.parameters())
    n_pairs, n_all = len(held_out_pairs(words)), len(words.categories) * (len(words.categories) - 1) // 2
    levels = ", ".join(f"{level.until:.0%}" for level in LEVELS[:-1])
    history = "\n".join(
        f"| {entry['step']} | {entry['level']} | {entry['words']} | {entry['texts']} | {entry['texts of seen pairs']} |"
        for entry in thinned(run["history"])
    )
    minutes, tied = run["seconds"] / 60, "tied" if config.tie_word_embeddings else "untied"
    smallest = min(map(len, words.categories.values()))
    card = f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {folder.name}

A {type(original).__name__} of {n_parameters:,} parameters that learns in context, trained from nothing on
synthetic episodes: a stand-in for large models where none can be downloaded, small enough to be studied
whole.

    love : bar like : bar eight : foo two : foo one :

## The model

{config.num_hidden_layers} layers, {config.num_attention_heads} heads ({n_kv} key/value heads), d_model
{config.hidden_size}, vocabulary {config.vocab_size:,}, context {config.max_position_embeddings}, embeddings
{tied}, float32. Content words have two pieces or more ("love" is "lo" and "##ve"), so that no token alone tells a
category; labels, fillers and the colon are one token each. There is no beginning-of-sequence token, and no token is
added.

## Data

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
the above. Each level ends when a running accuracy is reached ({levels}).

## Training

Fixed before any verdict was looked at: at every {run["check_every"]} steps of the last level, accuracy on the held-out
pairs is measured ({run["n_checked"]} prompts of single words and as many of texts, with 2, 4, 8 or 16 right
demonstrations, half of each class); at {run["enough"]:.0f} % or more the learning rates begin to fall to zero over
{run["cool_down"]:.0%} of the steps so far, and at {run["too_much"]:.0f} % training ends at once. No head is penalised
or dropped.

{run["done"]:,} steps of a little more than {run["n_tokens"]:,} tokens, Muon (rate {run["matrix_rate"]}) for the layers'
matrices and AdamW ({run["other_rate"]}) for the rest, seed {run["seed"]}; {minutes:.0f} minutes of one CPU core. Again:

    python -m experiments.pieces_world --out FOLDER --arch {run["arch"]} --seed {run["seed"]}
    python -m experiments.pieces_world --out FOLDER --arch {run["arch"]} --card-only

| step | level | held-out pairs, words | held-out pairs, texts | seen pairs, texts |
| ---: | ---: | ---: | ---: | ---: |
{history}

The second line measures everything below: {n_prompts:,} prompts a row, per cent correct, once by the more
probable of the two labels and once by the most probable word of the vocabulary. Chance is 50 and 0. The two
demonstrations of the query's class come last in "order" and first in "reorder"; "imbalanced" is "order"
without its last demonstration; "as in training" has 2 to 16 uneven demonstrations, 15 % of them mislabelled.

{measured_sections(model, words, n=n_prompts, n_draws=n_draws)}

## What it cannot do

It knows {len(words.owners):,} words and no language: no sentences, no facts, no format but texts and labels
around " : ", no sampling worth reading. Unheard-of words are spelt out in pieces that mean nothing to it.
Training sequences had at most 16 demonstrations of at most 8 words; longer prompts are out of its range even
where they fit the context. It shows one way in which in-context classification can be built, and says
nothing about how models of natural text do it.

Licence: MIT.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
