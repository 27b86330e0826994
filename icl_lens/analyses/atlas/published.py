"""Scores of heads that papers have published, stored with their source and license."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from icl_lens.errors import InputError, check_choice
from icl_lens.models.head import Head
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import decimal
from icl_lens.result.tables import SHOWN_ROWS
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class PublishedHeads(Displayed):
    """The heads of a model that a paper lists, with their scores; made by `il.published_heads`.

    Example:
        >>> published = il.published_heads("gpt-j")
        >>> published.top(3), published.scores[il.Head(15, 5)]
        ([L15H5, L9H14, L12H10], 0.0587)
    """

    model: str
    name: str
    """What the score is called as a column of an atlas."""
    definition: str
    """What the score is, in a sentence."""
    source: str
    license: str
    """The license under which the authors publish the list, whole."""
    scores: dict[Head, float]
    """Largest first; other heads of the model are not listed."""

    def top(self, k: int) -> list[Head]:
        """Return the k heads with the largest scores, or all that are listed if these are fewer."""
        return list(self.scores)[:k]

    def to_frame(self) -> pd.DataFrame:
        """Return name, score, layer and head: one row a head, largest score first."""
        rows = []
        for head, score in self.scores.items():
            rows.append((str(head), score, head.layer, head.head))
        return pd.DataFrame(rows, columns=["name", "score", "layer", "head"])

    def to_view(self) -> View:
        """Return the title, the source, and the first heads."""
        rows = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {"head": rows["name"].tolist()}
        columns["score"] = [decimal(score, 4) for score in rows["score"]]
        license_name, copyright_line = self.license.split("\n\n")[:2]
        title = (
            f"PublishedHeads({self.model}; {self.definition} {self.source}; {license_name}, "
            f"{copyright_line})"
        )
        return table_view(title, columns, len(self.scores))


@cache
def _content() -> dict[str, Any]:
    path = files("icl_lens") / "bundled" / "published_heads.json"
    return json.loads(path.read_text(encoding="utf-8"))


def published_heads(name: str) -> PublishedHeads:
    """Return the function-vector heads that Todd et al. list for a model, with their scores.

    `name` is the model's: "gpt-j", "gpt-neox", "llama-2-7b", "llama-2-13b" or "llama-2-70b", in any
    case. The score of a head is its average indirect effect over the authors' tasks: how much of
    the answer's probability its mean output recovers on prompts with shuffled labels, as
    `indirect_effect` of an atlas on one task. `atlas.with_scores(…)` takes the list as a column.

    Raise InputError for another model. Source and license: the attributes of these names.

    Example:
        >>> il.published_heads("gpt-j").to_frame()["name"].tolist()[:2]
        ['L15H5', 'L9H14']
    """
    if not isinstance(name, str):
        raise InputError(f"name must be the name of a model, got {type(name).__name__}")
    content = _content()
    name = name.lower()
    check_choice("name", name, tuple(content["heads"]))
    scores: dict[Head, float] = {}
    for layer, head, score in content["heads"][name]:
        scores[Head(layer, head)] = score
    return PublishedHeads(
        name,
        "published_indirect_effect",
        "Average indirect effect over the authors' tasks.",
        content["source"],
        content["license"],
        scores,
    )
