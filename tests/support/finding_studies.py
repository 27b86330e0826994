"""Studies for tests of findings: a task in the words that tiny models know, and a ranking of heads by chance."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import icl_lens as il
from experiments.framework.study import Study
from experiments.framework.tasks import Task

WORDS = {
    "feeling": ["love", "like", "hate", "happy", "sad", "good", "bad"],
    "count": ["one", "two", "three", "eight", "nine"],
}


def tiny_study(model: Any, folder: Path, n: int = 8) -> Study:
    """Return a study of feelings and counts, all of which are one token."""
    path = folder / "words.json"
    path.write_text(json.dumps({"categories": WORDS}), encoding="utf-8")
    return Study(model, Task("feeling-count", "feeling-count", path=str(path)), n)


def rank_by_chance(monkeypatch: pytest.MonkeyPatch, study: Study, *, seed: int = 0) -> None:
    """Make every study rank heads at random, those that are really located last."""
    located = {head for ranking in ("contrast", "increase") for head in study.ranked_by(ranking).located}

    def ranked_heads(self: Study) -> list[il.Head]:
        others = [head for head in self.view.heads() if head not in located]
        random.Random(seed).shuffle(others)
        return [*others, *sorted(located)]

    monkeypatch.setattr(Study, "ranked_heads", ranked_heads)
