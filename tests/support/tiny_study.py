"""A study of a tiny random model on two classes of words that its tokenizer knows."""

import json
from pathlib import Path
from typing import Any

import torch

from experiments.framework.study import Study
from experiments.framework.tasks import Task

CATEGORIES = {
    "sentiment": "love like hate happy sad good bad yes".split(),
    "number": "eight two one nine three red blue no".split(),
}


def tiny_study(model: Any, folder: Path, n: int = 12) -> Study:
    """Return a study whose word list is written to the folder."""
    path = folder / "words.json"
    path.write_text(json.dumps({"categories": CATEGORIES}), encoding="utf-8")
    return Study(model, Task("tiny", "sentiment-number", path=str(path)), n)


def log_odds(model, batch, row, hooks=(), answer=None):
    """The answer's log-odds after one prompt, from the model's own logits."""
    tokens = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks), return_type="logits")[0, -1]
    answer = int(batch.answer[row]) if answer is None else answer
    own, other = (logits[batch.label_tokens[label]] for label in (answer, 1 - answer))
    return float(own - other)
