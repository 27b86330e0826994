"""A bundled model's card, every figure measured: `python -m experiments.icl_mini --card-only`."""

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

from experiments.icl_mini.episodes import (
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
    capture,
    head_log_prob_increase,
    last_log_probs,
    load_model,
    tokenize,
)

ORDER, REORDER, IMBALANCED = (0, 0, 1, 1, 1), (1, 1, 0, 0, 1), (0, 0, 1, 1)
N_LOCATED, CHUNK = 4, 100


def encode(model: Any, episodes: Sequence[Episode]) -> PromptBatch:
    """The episodes' prompts as the package tokenizes them."""
    prompts = [
        Prompt(
            [Demonstration(" ".join(item.text), episode.labels[item.side]) for item in episode.items[:-1]],
            " ".join(episode.items[-1].text),
            answer=episode.answer,
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
        chunk = episodes[start : start + CHUNK]
        log_probs = last_log_probs(model, encode(model, chunk))
        labels = torch.tensor([ids(list(episode.labels)) for episode in chunk])
        side = torch.tensor([episode.items[-1].side for episode in chunk])
        chosen = log_probs.gather(1, labels).argmax(-1)
        result.label.extend((chosen == side).tolist())
        result.word.extend((log_probs.argmax(-1) == labels.gather(1, side[:, None])[:, 0]).tolist())
        result.class_1.extend((chosen == 1).tolist())
    return result


def head_increases(model: Any, episodes: Sequence[Episode]) -> Float[Tensor, "layer n_heads"]:
    """Mean log-probability increase (nats) of the answer that each head adds to its layer's input."""
    total = torch.zeros(())
    for start in range(0, len(episodes), CHUNK):
        batch = encode(model, episodes[start : start + CHUNK])
        acts = capture(model, batch)
        total = total + head_log_prob_increase(acts, batch.answer_tokens).sum(0)
    return total / len(episodes)


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
    """Prompts over many pairs with drawn labels; `sides=None` draws 2 to 8 demonstrations as in training."""
    rng = random.Random(f"card mixed {len(pairs)} {sides} {longest}")
    episodes = []
    for _ in range(n):
        first, second = rng.sample(rng.choice(pairs), 2)
        drawn = sides or draw_sides(rng, rng.randint(2, 8) + 1)
        while sides is None and drawn[-1] not in drawn[:-1]:
            drawn = draw_sides(rng, rng.randint(2, 8) + 1)
        episodes.append(make_episode(rng, words, (first, second), drawn, longest=longest))
    return episodes


@dataclass(frozen=True)
class ZeroedHeads:
    """What zeroing the located heads does to accuracies (per cent), against random others."""

    located: list[tuple[tuple[int, int], float]]
    """(layer, head) and mean increase in nats, largest first."""
    intact: tuple[float, float]
    """Accuracy by the labels and by the whole vocabulary."""
    zeroed: dict[int, tuple[float, float]]
    """The same by how many of the located heads are zeroed."""
    random: list[tuple[float, float]]
    """The same for each draw of as many random other heads."""
    share_positive: int
    """How many heads add more than 0.05 nats on average."""

    @property
    def costs_more(self) -> tuple[float, float]:
        """Points of accuracy (among the labels, over the vocabulary) lost above the random heads' mean."""
        label, vocabulary = (statistics.fmean(column) for column in zip(*self.random, strict=True))
        return label - self.zeroed[N_LOCATED][0], vocabulary - self.zeroed[N_LOCATED][1]


def ablation(model: Any, episodes: Sequence[Episode], n_draws: int, *, seed: int = 0) -> ZeroedHeads:
    """Locate the heads with the largest mean increase over `episodes`, zero them, and zero random others."""
    increases = head_increases(model, episodes)
    n_heads = increases.shape[1]
    ranked = [divmod(int(index), n_heads) for index in increases.flatten().argsort(descending=True)]

    def accuracy(heads: Sequence[tuple[int, int]]) -> tuple[float, float]:
        with ablate_heads(model, heads):
            result = answers(model, episodes)
        return 100 * statistics.fmean(result.label), 100 * statistics.fmean(result.word)

    rng = random.Random(seed)
    draws = [accuracy(rng.sample(ranked[N_LOCATED:], N_LOCATED)) for _ in range(n_draws)]
    return ZeroedHeads(
        located=[(head, float(increases[head])) for head in ranked[:12]],
        intact=accuracy([]),
        zeroed={n: accuracy(ranked[:n]) for n in (1, 2, N_LOCATED, 6, 8)},
        random=draws,
        share_positive=int((increases > 0.05).sum()),
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
    for longest, texts in ((1, "single words"), (6, "texts of 1 to 6 words")):
        for name, of_kind in pairs.items():
            for layout, sides in {**layouts, "as in training": None}.items():
                result = answers(model, mixed_episodes(words, of_kind, sides, n, longest=longest))
                rows.append(f"{texts}, categories {name}, {layout} | {result.row()}")
    for task in word_tasks()[::2]:
        result = answers(model, task.episodes(words, ORDER, n, longest=6))
        rows.append(f"texts, {task.pair[1]} against {task.pair[0]}, order | {result.row()}")
    text += ["## Accuracy over many category pairs", table("prompts | labels | vocabulary", rows)]

    episodes = [episode for task in word_tasks() for episode in task.episodes(words, ORDER, n // 4)]
    cut = ablation(model, episodes, n_draws)
    label_mean = statistics.fmean(label for label, _ in cut.random)
    word_mean = statistics.fmean(word for _, word in cut.random)
    label_sd = statistics.stdev(label for label, _ in cut.random)
    word_sd = statistics.stdev(word for _, word in cut.random)
    rows = [f"none | {cut.intact[0]:.1f} | {cut.intact[1]:.1f}"]
    rows += [f"top {n} | {label:.1f} | {word:.1f}" for n, (label, word) in cut.zeroed.items()]
    rows.append(
        f"{N_LOCATED} random others, mean ± sd of {n_draws} draws"
        f" | {label_mean:.1f} ± {label_sd:.1f} | {word_mean:.1f} ± {word_sd:.1f}"
    )
    located = ", ".join(f"L{layer}H{head} {value:.2f}" for (layer, head), value in cut.located)
    total = model.cfg.n_layers * model.cfg.n_heads
    text += [
        "## Which heads carry it",
        f"Heads by mean log-probability increase of the answer (nats; final norm's scale frozen, biases"
        f" included) over {len(episodes)} prompts of both word tasks: {located}."
        f" {cut.share_positive} of {total} heads add more than 0.05 nats.",
        table("heads zeroed at every position | labels | vocabulary", rows),
        f"Zeroing the top {N_LOCATED} costs {cut.costs_more[1]:.1f} points more accuracy over the vocabulary, and"
        f" {cut.costs_more[0]:.1f} points more between the two labels, than zeroing {N_LOCATED} random others.",
        "## Biases",
        bias_section(model, words, pairs["never seen together"], n),
    ]
    return "\n\n".join(text)


def bias_section(model: Any, words: Words, pairs: Sequence[tuple[str, str]], n: int) -> str:
    """Answers to balanced queries after unequal (majority) or ordered (recency) demonstrations."""
    rows = []
    for longest, texts in ((1, "single words"), (6, "texts")):
        for name, shown in (
            ("majority: 3 of 4 are of class 1", (1, 0, 1, 1)),
            ("recency: class 1 last", (0, 0, 1, 1)),
        ):
            for_1, against = (
                answers(model, mixed_episodes(words, pairs, (*shown, query), n, longest=longest)) for query in (1, 0)
            )
            share = percent([*for_1.class_1, *against.class_1])
            rows.append(f"{name}, {texts} | {percent(for_1.label)} | {percent(against.label)} | {share}")
    intro = (
        "Categories never seen together, 4 demonstrations; an unbiased model has equal accuracies and"
        " answers class 1 in 50 % of the cases."
    )
    header = "demonstrations | accuracy on class 1 | accuracy on class 0 | answers of class 1"
    return f"{intro}\n\n{table(header, rows)}"


def write_card(folder: Path, *, n_prompts: int = 1000, n_draws: int = 20) -> None:
    """Measure the model in `folder` on `n_prompts` prompts for each figure and write its README.md there.

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
{tied}, float32. Tokens are whole words separated by blanks; there is no beginning-of-sequence token, and no
token is added.

## Data

No text from elsewhere. `words.json`, written for this package, has {len(words.categories)} categories of at
least {smallest} English words (some ambiguous words are in two), {len(words.labels)} label words without
meaning (some are English words of no category), and {len(words.fillers)} fillers. An episode shows categories
under random labels, demonstrations and a query, in any order and number per class, no content word twice. Of
{n_all} category pairs {n_pairs}, sentiment/number and animal/country among them, never meet in a training
sequence.

Training goes from easy to hard, since two labels alone are at chance for long. First come lists of words of one
category (plain language modelling: its embeddings cluster). Then come episodes of single words and 2 to 5
evenly drawn classes, in which half of the demonstrations have another word of their category in place of the
label ("w : w2") or after it ("w : label w2"). Last come two classes with 2 to 8 demonstrations and no such
words; every second step has texts of 1 to 6 words, about half of them fillers; how often a class comes is
uneven within an episode and a class tends to follow itself, so there is something to be gained from the
majority and from the last label. In the last part each head is dropped with probability {run["head_dropout"]},
so that several learn the same job.

The {run["concentrate"]} steps after these make heads costly: the loss has {run["head_cost"]} times the sum
of all heads' sizes (root mean square norm of what a head writes) added to it. What a whole layer had come
to share, fewer heads do afterwards. This was done so that a handful of located heads can be tried and
removed; it shapes which heads there are to be found, and FFNs take over part of the work: do not read
this model's division of labour as evidence about models trained otherwise.

## Training

{run["done"]:,} steps of up to {run["batch"]} episodes, AdamW, peak learning rate {run["learning_rate"]},
cosine decay, seed {run["seed"]}; {minutes:.0f} minutes on one CPU core. Again:

    python -m experiments.icl_mini --arch {run["arch"]} --steps {run["steps"]} --seed {run["seed"]}
    python -m experiments.icl_mini --arch {run["arch"]} --card-only

The second line measures everything below: {n_prompts:,} prompts per row, per cent correct, once by the more
probable of the two labels and once by the most probable word of the vocabulary. Chance is 50 and 0. The two
demonstrations of the query's class come last in "order" and first in "reorder"; "imbalanced" is "order"
without its last demonstration.

{measured_sections(model, words, n=n_prompts, n_draws=n_draws)}

## What it cannot do

It knows {config.vocab_size:,} words and no language: no sentences, no facts, no format but texts and labels
around " : ", no sampling worth reading. Unknown words become `<unk>` and make an answer meaningless.
Training sequences had at most 8 demonstrations of at most 6 words; longer prompts are out of its range even
where they fit the context. It shows one way in which in-context classification can be built, and says
nothing about how models of natural text do it.

Licence: MIT.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
