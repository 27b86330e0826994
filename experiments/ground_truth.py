"""The scripts on models whose circuit is known: do they see two towers where these are planted, and
nowhere else?

1. Small transformers are written by hand (`tests/support/planted`): two circuits with two towers,
   and other ways to answer or not.
2. Every script runs on each of them, with three seeds. As many heads are located as were planted to
   write labels.
3. `EXPECTED` says in which models each measure must be above its control, and where another outcome
   was explained after it had been seen. `ground-truth.csv` has every seed, `ground-truth-means.csv`
   the means of all seeds.
4. `ground-truth-heads.csv` says how many planted heads each method of `location.py` finds.

    python experiments/ground_truth.py -n 60 --out results

docs/results/ground-truth.md shows the tables; `publish.py collect` puts them there.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from planted import Kind, Planted, build

import icl_lens as il

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
FINDING = ("two-tower", "comparer", "copier")
"""Roles of heads that find the answer in these settings, or write what was found."""
THIRD = "lost without first third → "
BY_METHOD = "log-odds lost without heads by "
NO_INTERVAL = "no interval"
"""The outcome of a measure whose script gives none, as of two tasks only."""


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
        of_question = [row for row in EXPECTED if row.question == question]
        try:
            table = import_module(question.replace("-", "_")).main(options)
        except il.InputError as error:  # e.g. of a model that does not do the task
            for row in of_question:
                about = {"question": question, "measure": row.measure, "at": row.at}
                yield {"setting": setting, "seed": seed, **about, "note": str(error)}
            continue
        for row in of_question:
            yield {"setting": setting, "seed": seed, **outcome(table, row, setting)}
        if question == "location" and setting in TOWERS:
            yield from selected_heads(table, planted, setting, seed)


def selected_heads(
    table: pd.DataFrame, planted: Planted, setting: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the roles of the heads that each method of location.py selects."""
    role_of = {head: role for role, heads in planted.heads.items() for head in heads}
    of_methods = table.query("measure.str.startswith(@BY_METHOD)", engine="python")
    for row in of_methods.to_dict("records"):
        roles = [role_of.get(il.Head.parse(name), "noise") for name in row["note"].split()]
        about = {"setting": setting, "seed": seed, "question": "location"}
        yield about | {
            "measure": "planted heads by " + row["measure"].removeprefix(BY_METHOD),
            "at": row["at"],
            "quantity": sum(role in FINDING for role in roles),
            "unit": "heads",
            "note": " ".join(roles),
        }


def outcome(table: pd.DataFrame, expected: Expected, setting: str) -> dict[str, Any]:
    """Return a measure's numbers, and whether its interval is above zero, as predicted or not."""
    rows = table.query(
        "measure == @measure and ranking != 'increase'", local_dict={"measure": expected.measure}
    )
    if expected.at:
        rows = rows.query("at == @at", local_dict={"at": expected.at})
    about = {"question": expected.question, "measure": expected.measure, "at": expected.at}
    if rows.empty or bool(rows["quantity"].isna().iloc[0]):
        return about | {"note": "not measured: the script says why"}
    row = rows.iloc[0]
    numbers = {name: row[name] for name in ("quantity", "control", "low", "high", "unit")}
    if pd.isna(row["low"]):
        return about | numbers | {"outcome": NO_INTERVAL}
    is_above = bool(row["low"] > 0)
    return about | numbers | {"above": is_above, "outcome": prediction(expected, setting, is_above)}


def prediction(expected: Expected, setting: str, is_above: bool) -> str:
    """Return how a measure that is above its control, or not, compares with the prediction."""
    if is_above == (setting in expected.above):
        return "as predicted"
    if setting in expected.explained:
        return "explained afterwards"
    return "not as predicted"


# Tables of all seeds


def means_of_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per measure and setting: means over the seeds, and in how many the measure is
    above its control.

    The majority of the seeds with an interval decides whether it is as predicted; other outcomes
    have a mark.
    """
    rows = []
    for expected in EXPECTED:
        of_measure = table.query(
            "question == @question and measure == @measure and at == @at",
            local_dict=expected._asdict(),
        )
        measured = of_measure.dropna(subset="quantity")
        for setting, seeds in measured.groupby("setting", sort=False):
            with_interval = [bool(above) for above in seeds["above"] if not pd.isna(above)]
            n_above = sum(with_interval)
            above, comparison = NO_INTERVAL, NO_INTERVAL
            if with_interval:
                is_above = n_above > len(with_interval) / 2
                comparison = prediction(expected, str(setting), is_above)
                mark = "" if comparison == "as predicted" else " ⚠"
                above = f"{n_above}/{len(with_interval)}{mark}"
            rows.append(
                {
                    "question": expected.question,
                    "measure": f"{expected.question}: {expected.measure}"
                    + (f", {expected.at}" if expected.at else ""),
                    "setting": setting,
                    "quantity": seeds["quantity"].mean(),
                    "control": seeds["control"].mean(),
                    "unit": seeds["unit"].iloc[0],
                    "above": above,
                    "outcome": comparison,
                }
            )
    return pd.DataFrame(rows)


def heads_by_method(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method of location.py: how many of the heads that it selects, in all seeds,
    were planted to find the answer, and what the others are.
    """
    rows = []
    heads = table.query("unit == 'heads'")
    for measure, of_method in heads.groupby("measure", sort=False):
        row = {"method": str(measure).removeprefix("planted heads by ")}
        row["passes"] = of_method["at"].iloc[0]
        for setting, seeds in of_method.groupby("setting", sort=False):
            roles = Counter(" ".join(seeds["note"]).split())
            n_finding = sum(roles[role] for role in FINDING)
            other_roles = []
            for role, count in sorted(roles.items()):
                if role not in FINDING:
                    plural = "s" if count > 1 and role != "noise" else ""
                    other_roles.append(f"{count} {role}{plural}")
            row[str(setting)] = ", ".join([f"{n_finding} of {roles.total()}", *other_roles])
        rows.append(row)
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Run the scripts on planted models, and write the tables."""
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
            means, heads = means_of_seeds(table), heads_by_method(table)
            for name, part in (("", table), ("-means", means), ("-heads", heads)):
                part.to_csv(
                    options.out / f"ground-truth{name}.csv",
                    index=False,
                    float_format="%.6g",
                    lineterminator="\n",
                )
    print(means["outcome"].value_counts().to_string())
    return table


if __name__ == "__main__":
    main()
