"""What the scripts of this folder share: prompts of a claim, and rankings of heads.

Each script measures one claim of a paper: what its authors say, the quantity that they measure, a
control that could refute it, and the interval of the difference. The claim holds on a model and
task if the interval of the first row is above zero.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import icl_lens as il

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Scores, Study, Table, from_command_line
from shared_tasks import natural_labels

__all__ = [
    "Scores",
    "Study",
    "Table",
    "add_lost",
    "first_heads",
    "from_command_line",
    "heads_by_induction",
    "named_classes",
    "relabeled",
    "with_random_labels",
]


def named_classes(study: Study) -> Study:
    """Return the study with the names of the classes as labels."""
    return study.changed(labels=natural_labels(study))


def relabeled(prompt: il.Prompt, labels: Sequence[str]) -> il.Prompt:
    """Return the prompt with other labels at its demonstrations; the answer stays."""
    texts = [demonstration.text for demonstration in prompt.demonstrations]
    demonstrations = list(zip(texts, labels, strict=True))
    return il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels)


def with_random_labels(prompts: Sequence[il.Prompt], seed: int) -> list[il.Prompt]:
    """Return the prompts, each with its demonstrations' labels in random order.

    Every label is shown as often as before, so what is lost is the pairing of texts and labels.
    """
    rng = random.Random(seed)
    shuffled = []
    for prompt in prompts:
        labels = [demonstration.label for demonstration in prompt.demonstrations]
        rng.shuffle(labels)
        shuffled.append(relabeled(prompt, labels))
    return shuffled


def first_heads(scores: torch.Tensor, k: int) -> list[il.Head]:
    """Return the k heads with the largest scores [layer head], largest first."""
    order = scores.double().flatten().argsort(descending=True, stable=True)[:k]
    return [il.Head.from_index(index, scores.shape[1]) for index in order.tolist()]


def heads_by_induction(study: Study, k: int) -> list[il.Head]:
    """Return the k heads that attend most, on repeated random tokens, to the token that came next
    before.
    """
    n_tokens = min(24, (study.model.cfg.n_ctx - 2) // 2)
    scores = il.repeated_token_scores(study.model, n_tokens=n_tokens, seed=study.seed)
    return first_heads(scores.induction, k)


def add_lost(
    table: Table, what: str, scores: Scores, place: int, places_of_random: slice, **about: str
) -> None:
    """Add accuracy and log-odds lost with a set of edits, beside those lost with random heads.

    Set 0 of `scores` is the intact model.
    """
    measures: tuple[tuple[str, str, np.ndarray], ...] = (
        ("accuracy lost", "%", scores.correct),
        ("log-odds lost", "nats", scores.log_odds),
    )
    for measure, unit, values in measures:
        lost = values[:, :1] - values
        table.add(
            f"{measure}, {what}",
            lost[:, place],
            lost[:, places_of_random],
            unit=unit,
            versus="random heads of the same layers",
            **about,
        )
