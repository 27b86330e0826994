"""Scores of heads that others have stored: csv and JSON files, which join an atlas as columns.

Files may hold

- a table with the columns layer, head (or head_idx) and one or more of scores (csv);
- a list of rows `[layer, head, score]`, as the lists of function-vector heads with their average
  indirect effects (Todd et al.), or of objects with layer, head or head_idx, and score, as the
  copying scores of Feucht et al. (JSON);
- an object from heads to scores, or to lists of scores whose mean is taken: names such as "L22H0"
  or "22-0", as in Retrieval_Head's files (Wu et al.), or the same under "scores", beside "meta", as
  in those of LOCOS (JSON);
- an object from names of scores to any of these, as the attention scores of Feucht et al. (JSON).
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.files import parse_json
from icl_lens.models.head import Head

HeadNumbers = dict[Head, float]
Rows = Sequence[tuple[int, int, float]]
"""Rows of layer, head and score."""
GivenScores = Mapping[str, Float[Tensor, "layer head"] | Rows]

REMEDY = "pass a csv file with the columns layer, head and score, or a JSON list or object of these"
_HEAD_NAME = re.compile(r"L?(\d+)(?:H|-|\.|_|, ?)(\d+)")


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
        if path.suffix.lower() == ".csv":
            scores = _of_table(text)
        else:
            scores = _of_json(parse_json(text), path.stem)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{str(path)!r} has no scores of heads ({reason}); {REMEDY}") from error
    scores = {name: numbers for name, numbers in scores.items() if numbers}
    if not scores:
        raise InputError(f"{str(path)!r} has no scores of heads; {REMEDY}")
    return scores


def given_scores(scores: GivenScores) -> dict[str, HeadNumbers]:
    """Return scores that are tensors [layer head] or rows of layer, head and score; raise InputError
    for others.
    """
    numbers: dict[str, HeadNumbers] = {}
    for name, values in scores.items():
        if isinstance(values, Tensor):
            if values.ndim != 2:
                raise InputError(
                    f"{name} must have the axes layer and head, got the shape "
                    f"{tuple(values.shape)}; take the mean over prompts first"
                )
            heads, by_head = values.shape[1], values.double().flatten().tolist()
            values = [(*divmod(place, heads), score) for place, score in enumerate(by_head)]
        try:
            numbers[name] = _of_list(values)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise InputError(
                f"{name} must be a tensor [layer head] or rows of layer, head and score, got "
                f"{short_repr(values)}"
            ) from error
    return numbers


def _of_table(text: str) -> dict[str, HeadNumbers]:
    """Return the columns of numbers of a csv table with the columns layer and head."""
    scores: dict[str, HeadNumbers] = {}
    for row in csv.DictReader(text.splitlines()):
        head = _head_of(row)
        for name, cell in row.items():
            if name in ("layer", "head", "head_idx", "name", "kinds") or cell in ("", None):
                continue
            number = float(cell)
            if math.isfinite(number):
                scores.setdefault(name, {})[head] = number
    return scores


def _of_json(content: Any, name: str) -> dict[str, HeadNumbers]:
    """Return the scores of a JSON list or object by name; scores without a name get `name`."""
    if not isinstance(content, Mapping):
        return {name: _of_list(content)}
    if isinstance(content.get("scores"), Mapping):
        content = content["scores"]
    if all(_HEAD_NAME.fullmatch(key) for key in content):
        return {name: _of_heads(content)}
    scores: dict[str, HeadNumbers] = {}
    for key, values in content.items():
        scores |= _of_json(values, key)
    return scores


def _of_heads(content: Mapping[str, Any]) -> HeadNumbers:
    """Return the numbers of an object from names of heads to a score or a list of scores."""
    numbers: HeadNumbers = {}
    for name, score in content.items():
        match = _HEAD_NAME.fullmatch(name)
        assert match is not None
        if score == []:
            continue
        head = Head(int(match[1]), int(match[2]))
        numbers[head] = fmean(score) if isinstance(score, list) else float(score)
    return numbers


def _of_list(content: Any) -> HeadNumbers:
    """Return the numbers of rows of layer, head and score, or of objects with these."""
    numbers: HeadNumbers = {}
    for row in content:
        if isinstance(row, Mapping):
            numbers[_head_of(row)] = float(row["score"])
        else:
            layer, head, score = row[:3]
            numbers[Head(int(layer), int(head))] = float(score)
    return numbers


def _head_of(row: Mapping[str, Any]) -> Head:
    """Return the head of a row with the entries layer, and head or head_idx."""
    return Head(int(row["layer"]), int(row["head"] if "head" in row else row["head_idx"]))
