"""Verdicts on earlier models, kept as a small file, and shown beside those on today's.

The documentation's `results.json` is the form of both: a list of verdicts, each with id, model, task and by (the
ranking; earlier rules had one, the paper's).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.report import MARKS, in_order
from experiments.lab.study import RANKINGS
from icl_lens.errors import InputError
from icl_lens.files import write_text

FILE = "old-models.json"
"""In the folder of the documentation's pages of results, which leaves it there."""
KEPT = ("id", "model", "task", "by", "outcome", "effect", "low", "high", "unit")

Row = Mapping[str, Any]


def read_verdicts(path: Path) -> list[Row]:
    """The verdicts of a `results.json`, or of what `keep_verdicts` made of one; raises InputError for another file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("it is no list")
        kept: list[Row] = [{name: row.get(name) if name == "by" else row[name] for name in KEPT} for row in rows]
        if not all(row["outcome"] in MARKS and row["by"] in (None, *RANKINGS) for row in kept):
            raise ValueError("it holds other outcomes or rankings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as verdicts ({type(error).__name__}: {error}); give the results.json that "
            "python -m experiments docs writes"
        ) from error
    return kept


def keep_verdicts(results: Path, out: Path) -> None:
    """Writes a `results.json` without its reasons, one line for each verdict."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in read_verdicts(results))
    write_text(out, f"[\n{lines}\n]\n")


def old_beside_new(old: Sequence[Row], new: Sequence[Row], *, order: Sequence[str]) -> list[str]:
    """A Markdown table: claims by models, of each the old verdict, then the new one by either ranking.

    A verdict that is not the old one by the same ranking is bold; one that is not about heads located by rank is the
    same for both. Of an old file without rankings, the one there is is the paper's.
    """
    models = list(dict.fromkeys(str(row["model"]) for row in [*new, *old]))
    ids = in_order((str(row["id"]) for row in [*new, *old]), order)
    at = {which: {_place(row): row for row in rows} for which, rows in (("old", old), ("new", new))}
    places = list(dict.fromkeys((str(row["id"]), str(row["task"])) for row in [*new, *old]))
    heads = [f"{model}, old | new, by increase | by contrast" for model in models]
    lines = ["| experiment | task | " + " | ".join(heads) + " |", "|---|---|" + "---|---|---|" * len(models)]
    for name in ids:
        for task in (task for one, task in places if one == name):
            cells = []
            for model in models:
                before = at["old"].get((name, model, task, "increase"))
                cells.append(_shown(before))
                for ranking in RANKINGS:
                    now = at["new"].get((name, model, task, ranking))
                    only = at["new"].get((name, model, task, "increase"))
                    same = now is None and only is not None and only["by"] is not None
                    cells.append("same" if same else _shown(now, at["old"].get((name, model, task, ranking))))
            lines.append(f"| {name} | {task} | " + " | ".join(cells) + " |")
    return lines


def _place(row: Row) -> tuple[str, str, str, str]:
    return row["id"], row["model"], row["task"], row["by"] or "increase"


def _shown(row: Row | None, before: Row | None = None) -> str:
    """Mark, outcome and effect with its interval; bold where it is not the verdict before."""
    if row is None:
        return "–"
    said = f"{MARKS[row['outcome']]} {row['outcome']}"
    if before is not None and before["outcome"] != row["outcome"]:
        said = f"**{said}**"
    if row["low"] is None or row["effect"] is None:
        return said
    return f"{said}<br>{row['effect']:.3g} [{row['low']:.3g}, {row['high']:.3g}] {row['unit']}"


def changes(old: Sequence[Row], new: Sequence[Row]) -> str:
    """How many verdicts on the same claim, model, task and ranking are the same, and how many are others."""
    before, now = ({_place(row): row["outcome"] for row in rows} for rows in (old, new))
    both = [place for place in now if place in before]
    same = sum(before[place] == now[place] for place in both)
    return (
        f"Of {len(both)} verdicts on the same claim, name, task and ranking, {same} are the same and "
        f"{len(both) - same} are others; {len(now) - len(both)} have no old one."
    )
