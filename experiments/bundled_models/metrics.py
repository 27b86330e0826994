"""What a model on words in pieces answers, and what its heads add and attend to: the figures of cards and tables."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.bundled_models.episodes import ALWAYS_HELD_OUT, Episode, Vocabulary, draw_sides, make_episode
from icl_lens import (
    Demonstration,
    Prompt,
    PromptBatch,
    attention_to_labels,
    capture,
    head_log_prob_increase,
    last_log_probs,
    tokenize,
)

ORDER, REORDER, IMBALANCED = (0, 0, 1, 1, 1), (1, 1, 0, 0, 1), (0, 0, 1, 1)
CHUNK = 100
TEXTS = {1: "single words", 8: "texts of 1 to 8 words"}


def encode(model: Any, episodes: Sequence[Episode]) -> PromptBatch:
    """The episodes' prompts as the package tokenizes them."""
    prompts = [
        Prompt(
            [Demonstration(" ".join(item.text), episode.labels[item.shown_class]) for item in episode.items[:-1]],
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

    def episodes(self, words: Vocabulary, sides: Sequence[int], n: int, *, longest: int = 1) -> list[Episode]:
        """`n` prompts, the same ones every time."""
        rng = random.Random(f"card {self.pair} {self.labels} {sides} {longest}")
        return [make_episode(rng, words, self.pair, sides, longest=longest, labels=self.labels) for _ in range(n)]


def word_tasks() -> list[Task]:
    """Both word tasks, each category as the input's, each label as the true one: 8."""
    pairs = [pair for first, second in ALWAYS_HELD_OUT for pair in ((second, first), (first, second))]
    return [Task(pair, labels) for pair in pairs for labels in (("bar", "foo"), ("foo", "bar"))]


def mixed_episodes(
    words: Vocabulary, pairs: Sequence[tuple[str, str]], sides: Sequence[int] | None, n: int, *, longest: int = 1
) -> list[Episode]:
    """Prompts over many pairs with drawn labels; `sides=None` draws them as in training, see `shown_episodes`."""
    rng = random.Random(f"card mixed {len(pairs)} {sides} {longest}")
    episodes = []
    for _ in range(n):
        drawn = sides or _drawn_sides(rng, rng.randint(2, 16))
        pair = rng.sample(rng.choice(pairs), 2)
        if sides is None:
            episodes.append(make_episode(rng, words, pair, drawn, longest=longest, strays=0.15, mislabeled=0.15))
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
    words: Vocabulary, pairs: Sequence[tuple[str, str]], n_shown: int, n: int, *, longest: int
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


def ranked_heads(values: Float[Tensor, "layer head"]) -> list[tuple[int, int]]:
    """(layer, head), the largest value first."""
    return [divmod(int(index), values.shape[1]) for index in values.flatten().argsort(descending=True)]


def markdown(header: str, rows: Sequence[str]) -> str:
    """A Markdown table; cells are separated by ` | ` and the first column is left-aligned."""
    width = header.count("|")
    return "\n".join([f"| {header} |", "| --- |" + " ---: |" * width, *(f"| {row} |" for row in rows)])
