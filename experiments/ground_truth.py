"""The scripts on models whose circuit is known: do they see two towers where these are planted, and
nowhere else?

1. Small transformers are written by hand (`tests/support/planted`): two circuits with two towers,
   and other ways to answer or not.
2. Every script runs on each of them, with three seeds. As many heads are located as were planted to
   write labels.
3. `EXPECTED` says in which models each measure must be above its control, and where another outcome
   was explained after it had been seen. The table says what was found.

    python experiments/ground_truth.py -n 60 --out results

docs/results/ground-truth.md shows the table.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from planted import Kind, build

SEEDS = (0, 1, 2)
NAMES = "lookup, names"
SETTINGS: dict[str, tuple[Kind, str]] = {
    "two-tower": ("two-tower", "bar,foo"),
    "compare-copy": ("compare-copy", "bar,foo"),
    "last-label": ("last-label", "bar,foo"),
    "majority": ("majority", "bar,foo"),
    "lookup": ("lookup", "bar,foo"),
    NAMES: ("lookup", "animal,country"),
    "untrained": ("untrained", "bar,foo"),
}
"""Setting -> the kind of model, and the labels that it is measured with; the page says how each one
answers."""
TOWERS = ("two-tower", "compare-copy")
"""Settings whose circuit has two towers."""
WRITING = ("two-tower", "copier", "last-label", "majority")
"""Roles of heads that write labels into the answer."""
THIRD = "lost without first third → "


class Expected(NamedTuple):
    """A row of a script's table, and the settings in which it must be above its control."""

    question: str
    measure: str
    above: Sequence[str]
    explained: Sequence[str] = ()
    """Settings in which another outcome was explained after results had been seen; the page says
    how."""
    at: str = ""


EXPECTED = (
    Expected("behavior", "accuracy", (*TOWERS, NAMES), at="random order"),
    Expected("behavior", "accuracy", TOWERS, at="labels exchanged"),
    Expected("two-towers", "keys", ("two-tower",), ("compare-copy", "lookup")),
    Expected("two-towers", "keys: own text", ("two-tower",), ("compare-copy", "lookup")),
    Expected("two-towers", "keys: labels", (), ("compare-copy", "lookup")),
    Expected("ablation", "log-odds lost, heads zeroed", TOWERS, (NAMES,)),
    Expected("circuit", "CPR", TOWERS, (NAMES,)),
    Expected("circuit", f"{THIRD}query", ("two-tower",), ("compare-copy", "lookup", NAMES)),
    Expected("circuit", f"{THIRD}keys at the labels", TOWERS, ("lookup", NAMES)),
    Expected("circuit", f"{THIRD}values at the labels", TOWERS, (NAMES,)),
    Expected("location", "log-odds lost without heads by increase", TOWERS),
    Expected("location", "share of the deeper half, heads", TOWERS, (NAMES, *TOWERS)),
    Expected("values", "mean reciprocal rank of the label", TOWERS, ("last-label", "majority")),
    Expected("label-attention", "share of the attention to labels", TOWERS),
    Expected("label-attention", "share of the attention to labels, beside other heads", TOWERS),
    Expected("shared-heads", "heads in common with other classification tasks", TOWERS),
    Expected("text-to-label", "movers → keys", TOWERS, (NAMES,)),
    Expected("text-to-label", "texts → movers", TOWERS, (NAMES,)),
    Expected(
        "majority-bias",
        "log-odds, favored − unfavored prompts",
        ("majority",),
        (*TOWERS, "untrained"),
    ),
    Expected("recency-bias", "log-odds, favored − unfavored prompts", ("last-label",)),
)
QUESTIONS = tuple(dict.fromkeys(row.question for row in EXPECTED))


def measured(
    setting: str, seed: int, questions: Sequence[str], n: int, out: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row for each measure of `EXPECTED` on a planted model, with what was predicted."""
    kind, labels = SETTINGS[setting]
    planted = build(kind, out / "planted-models" / f"{kind}-{seed}", seed=seed)
    n_heads = sum(len(planted.heads[role]) for role in WRITING) or 4
    options = [
        "--model",
        str(planted.folder),
        "--path",
        str(planted.words),
        "--labels",
        labels,
        "-n",
        str(n),
    ]
    options += [
        "--heads",
        str(n_heads),
        "--name",
        f"planted {setting}",
        "--task-name",
        f"seed {seed}",
        "--out",
        str(out),
    ]
    for question in questions:
        if question == "two-towers" and setting == NAMES:
            continue  # labels that name the classes cannot change places
        table = import_module(question.replace("-", "_")).main(options)
        for expected in (row for row in EXPECTED if row.question == question):
            yield {"setting": setting, "seed": seed, **outcome(table, expected, setting)}


def outcome(table: pd.DataFrame, expected: Expected, setting: str) -> dict[str, Any]:
    """Return a measure's numbers, and whether its interval is above zero as predicted."""
    rows = table.query(
        "measure == @measure and ranking != 'increase'", local_dict={"measure": expected.measure}
    )
    if expected.at:
        rows = rows.query("at == @at", local_dict={"at": expected.at})
    about = {"question": expected.question, "measure": expected.measure, "at": expected.at}
    if rows.empty:
        return about | {
            "note": "not measured: the script says why",
            "as_predicted": setting not in expected.above,
        }
    row = rows.iloc[0]
    is_above = bool(row["low"] > 0)
    numbers = {name: row[name] for name in ("quantity", "control", "low", "high", "unit")}
    as_predicted = is_above == (setting in expected.above) or setting in expected.explained
    return about | numbers | {"above": is_above, "as_predicted": as_predicted}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Run the scripts on planted models, and write one table."""
    parser = argparse.ArgumentParser(description="The scripts on models whose circuit is known.")
    parser.add_argument("-n", type=int, default=60, help="prompts of each half")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--questions", nargs="*", default=list(QUESTIONS), choices=list(QUESTIONS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of models, runs and the table"
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for setting in options.settings:
        for seed in options.seeds:
            rows += measured(setting, seed, options.questions, options.n, options.out)
            table = pd.DataFrame(rows)
            table.to_csv(
                options.out / "ground-truth.csv",
                index=False,
                float_format="%.6g",
                lineterminator="\n",
            )
    return table


if __name__ == "__main__":
    main()
