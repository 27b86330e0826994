"""Numbers of model cards and tables: what a bundled model answers, and what its heads add and attend to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from experiments.bundled_models.episodes import (
    ALWAYS_HELD_OUT,
    Difficulty,
    Episode,
    Vocabulary,
    balanced_episode,
    draw_sides,
    make_episode,
)
from icl_lens import (
    Demonstration,
    Prompt,
    PromptBatch,
    capture,
    head_log_prob_increase,
    tokenize,
)
from icl_lens.activations.passes import last_log_probs
from icl_lens.metrics import is_correct

ORDER, REORDER, IMBALANCED = (0, 0, 1, 1, 1), (1, 1, 0, 0, 1), (0, 0, 1, 1)
CHUNK = 100
TEXTS = {1: "single words", 8: "texts of 1 to 8 words"}


def encode(model: Any, episodes: Sequence[Episode]) -> PromptBatch:
    """Return the episodes' prompts as the package tokenizes them."""
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


def answers(model: Any, episodes: Sequence[Episode]) -> pd.DataFrame:
    """Return whether answers are correct: the most probable of the prompt's labels, and the most probable word.

    Columns label and word, one row per prompt; class_1 is whether that label is the one of class 1.
    """
    found, ids = [], model.tokenizer.convert_tokens_to_ids
    for start in range(0, len(episodes), CHUNK):
        part = episodes[start : start + CHUNK]
        log_probs = last_log_probs(model, encode(model, part))
        labels = torch.tensor([ids(list(episode.labels)) for episode in part])
        side = torch.tensor([episode.items[-1].side for episode in part])
        chosen, right = log_probs.gather(1, labels).argmax(-1), labels.gather(1, side[:, None])[:, 0]
        found.append(torch.stack([chosen == side, log_probs.argmax(-1) == right, chosen == 1], dim=1))
    return pd.DataFrame(torch.cat(found).numpy(), columns=["label", "word", "class_1"])


def accuracy_cells(model: Any, episodes: Sequence[Episode]) -> list[str]:
    """Return the accuracies between the labels and over all words in percent, as table cells."""
    return [f"{100 * share:.1f}" for share in answers(model, episodes)[["label", "word"]].mean()]


def head_values(
    model: Any, episodes: Sequence[Episode]
) -> tuple[list[bool], dict[str, Float[Tensor, "row layer head"]]]:
    """Return whether prompts are answered correctly, and each head's numbers at the last token.

    increase: of the answer's log-probability (nats). contrast: that minus the increase of the episode's other label.
    on_true, on_false: attention to labels that are the answer, and on the others.
    """
    correct: list[bool] = []
    found: dict[str, list[Tensor]] = {"increase": [], "contrast": [], "on_true": [], "on_false": []}
    for start in range(0, len(episodes), CHUNK):
        batch = encode(model, episodes[start : start + CHUNK])
        acts = capture(model, batch)
        increase, attention = head_log_prob_increase(acts, batch.answer_tokens), acts.attention_to_labels()
        true = (batch.label_index == batch.answer[:, None])[:, None, None, :]
        found["increase"].append(increase)
        found["contrast"].append(increase - head_log_prob_increase(acts, batch.other_label_tokens[:, 0]))
        found["on_true"].append((attention * true).sum(-1))
        found["on_false"].append((attention * ~true).sum(-1))
        correct += is_correct(acts.label_log_probs, batch.answer).tolist()
    return correct, {name: torch.cat(values) for name, values in found.items()}


@dataclass(frozen=True)
class Task:
    """A word task's prompts: the query is of category `pair[1]`, whose label is `labels[1]`."""

    pair: tuple[str, str]
    labels: tuple[str, str]

    def episodes(self, words: Vocabulary, sides: Sequence[int], n: int, *, longest: int = 1) -> list[Episode]:
        """Return `n` prompts, the same ones every time."""
        rng, how = random.Random(f"card {self.pair} {self.labels} {sides} {longest}"), Difficulty(longest=longest)
        return [make_episode(rng, words, self.pair, sides, how, labels=self.labels) for _ in range(n)]


def word_tasks() -> list[Task]:
    """Return the 8 variants of the word tasks: each category as the query's, each label as the true one."""
    pairs = [pair for first, second in ALWAYS_HELD_OUT for pair in ((second, first), (first, second))]
    return [Task(pair, labels) for pair in pairs for labels in (("bar", "foo"), ("foo", "bar"))]


def mixed_episodes(
    words: Vocabulary, pairs: Sequence[tuple[str, str]], sides: Sequence[int] | None, n: int, *, longest: int = 1
) -> list[Episode]:
    """Return prompts over many pairs with drawn labels; `sides=None` draws them as in training."""
    rng = random.Random(f"card mixed {len(pairs)} {sides} {longest}")
    how = Difficulty(longest=longest) if sides else Difficulty(longest=longest, strays=0.15, mislabeled=0.15)
    episodes = []
    for _ in range(n):
        drawn = sides or _drawn_sides(rng, rng.randint(2, 16))
        episodes.append(make_episode(rng, words, rng.sample(rng.choice(pairs), 2), drawn, how))
    return episodes


def _drawn_sides(rng: random.Random, n: int) -> list[int]:
    """Draw the classes of `n` demonstrations, with uneven shares but both present, and the query's, evenly."""
    while True:
        drawn = draw_sides(rng, n)
        if set(drawn) == {0, 1}:
            return [*drawn, rng.randrange(2)]


def shown_episodes(
    words: Vocabulary, pairs: Sequence[tuple[str, str]], n_shown: int, n: int, *, longest: int
) -> list[Episode]:
    """Return prompts over many pairs with `n_shown` correctly labeled demonstrations, half per class, shuffled."""
    rng = random.Random(f"card shown {n_shown} {longest}")
    return [balanced_episode(rng, words, pairs, n_shown, longest=longest) for _ in range(n)]
