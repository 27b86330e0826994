"""A task of made-up words for tiny models, and studies on it."""

import json
from pathlib import Path
from typing import Any

from families import VOCAB_SIZE

from experiments.framework.study import Study
from experiments.framework.tasks import Task


def tiny_study(model: Any, folder: Path, n: int = 12, demonstrations: int = 2) -> Study:
    """A study of a tiny model on two classes of fillers, each one token."""
    words = [f"w{i}" for i in range(29, VOCAB_SIZE)]
    path = folder / "words.json"
    path.write_text(json.dumps({"categories": {"even": words[::2], "odd": words[1::2]}}))
    return Study(model, Task("tiny", "even-odd", path=str(path), demonstrations=demonstrations), n)


def labels_of(prompt: Any) -> list[str]:
    """The labels of a prompt's demonstrations, in their order."""
    return [demonstration.label for demonstration in prompt.demonstrations]
