"""Studies of tiny random models on two classes of words they know, and what else tests of findings share."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import icl_lens as il
from experiments.framework.study import Study
from experiments.framework.tasks import Task
from experiments.ground_truth import WRITING, task_of
from experiments.planted import Kind, build

CATEGORIES = {
    "sentiment": "love like hate happy sad good bad yes".split(),
    "number": "eight two one nine three red blue no".split(),
}


def tiny_study(model: Any, folder: Path, n: int = 12) -> Study:
    """Return a study whose word list is written to the folder."""
    path = folder / "words.json"
    path.write_text(json.dumps({"categories": CATEGORIES}), encoding="utf-8")
    return Study(model, Task("tiny", "sentiment-number", path=str(path)), n)


def planted_study(kind: Kind, folder: Path) -> Study:
    """Return a study of a planted model; it locates as many heads as write labels, or four if none does."""
    planted = build(kind, folder, seed=0)
    n_heads = sum(len(planted.heads[role]) for role in WRITING) or 4
    return Study(il.load_model(str(planted.folder), device="cpu"), task_of(planted), 40, n_heads=n_heads)


def log_odds(model: Any, batch: il.PromptBatch, row: int, hooks: Any = (), answer: int | None = None) -> float:
    """The answer's log-odds after one prompt, from the model's own logits."""
    tokens = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks), return_type="logits")[0, -1]
    answer = int(batch.answer[row]) if answer is None else answer
    own, other = (logits[batch.label_tokens[label]] for label in (answer, 1 - answer))
    return float(own - other)


def labels_of(prompt: il.Prompt) -> list[str]:
    """The labels of a prompt's demonstrations, in their order."""
    return [demonstration.label for demonstration in prompt.demonstrations]


def rank_by_chance(monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    """Make every study rank heads at random, with the heads that it would locate last."""
    located = {head for ranking in ("contrast", "increase") for head in study.ranked_by(ranking).located}

    def ranked_heads(self: Study) -> list[il.Head]:
        others = [head for head in self.view.heads() if head not in located]
        random.Random(0).shuffle(others)
        return [*others, *sorted(located)]

    monkeypatch.setattr(Study, "ranked_heads", ranked_heads)
