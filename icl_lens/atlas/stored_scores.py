"""Scores of heads that others have stored: csv and JSON files, which join an atlas as columns.

Files may hold

- a table with the columns layer, head and one or more of scores (csv);
- a list of rows `[layer, head, score]` or of objects with layer, head and score (JSON), such as
  lists of function-vector heads with their average indirect effects;
- an object from heads to scores, or to lists of scores whose mean is taken (JSON): names such as
  "L22H0" or "22-0", as in Retrieval_Head's files.
"""

import csv
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from icl_lens.errors import InputError
from icl_lens.models.head import Head

HeadNumbers = dict[Head, float]

REMEDY = "pass a csv file with the columns layer, head and score, or a JSON list or object of these"


def read_scores(path: str | Path) -> dict[str, HeadNumbers]:
    """Return the scores of a file by name; a file without names has one, called like the file.

    Raise InputError for a file that cannot be read or has no heads with numbers.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}; {REMEDY}") from error
    try:
        is_table = path.suffix.lower() == ".csv"
        scores = _of_table(text) if is_table else {path.stem: _of_json(json.loads(text))}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{str(path)!r} has no scores of heads ({reason}); {REMEDY}") from error
    scores = {name: numbers for name, numbers in scores.items() if numbers}
    if not scores:
        raise InputError(f"{str(path)!r} has no scores of heads; {REMEDY}")
    return scores


def _of_table(text: str) -> dict[str, HeadNumbers]:
    """Return the columns of numbers of a csv table with the columns layer and head."""
    scores: dict[str, HeadNumbers] = {}
    for row in csv.DictReader(text.splitlines()):
        head = Head(int(row["layer"]), int(row["head"]))
        for name, cell in row.items():
            if name in ("layer", "head", "name", "kinds") or cell in ("", None):
                continue
            number = float(cell)
            if math.isfinite(number):
                scores.setdefault(name, {})[head] = number
    return scores


def _of_json(content: Any) -> HeadNumbers:
    """Return the numbers of a JSON list or object."""
    numbers: HeadNumbers = {}
    if isinstance(content, Mapping):
        for name, score in content.items():
            layer, head = map(int, re.findall(r"\d+", name))
            numbers[Head(layer, head)] = fmean(score) if isinstance(score, list) else float(score)
        return numbers
    for row in content:
        if isinstance(row, Mapping):
            numbers[Head(int(row["layer"]), int(row["head"]))] = float(row["score"])
        else:
            layer, head, score = row[:3]
            numbers[Head(int(layer), int(head))] = float(score)
    return numbers
