"""The rows and columns of a csv file of results, as a page shows them; `results_table` is the directive."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

Lines = list[list[str]]
CHANGE = re.compile(r"\b(lost|gained|kept)\b")
"""In names of measures that are differences of shares."""
BLOCK = re.compile(r"^```\{results-table\} (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def number(value: float, unit: str) -> str:
    """Return a number as pages show it: one decimal for percent and points, otherwise two; empty for
    NaN.
    """
    if value != value:
        return ""
    text = f"{value:.{1 if unit in ('%', 'points') else 2}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def table(path: Path, options: Mapping[str, str]) -> Lines:
    """Return the header and the lines of the table that the directive's options describe."""
    rows = pd.read_csv(
        path, keep_default_na=False, na_values={name: [""] for name in ("quantity", "control", "low", "high")}
    )
    if "rows" in options:
        rows = rows.query(options["rows"], engine="python")
    if rows.empty:
        raise ValueError(f"{path} has no rows with {options.get('rows')!r}")
    if "lines" in options:
        return verdicts(rows, split(options["lines"]), options["across"])
    if "across" in options:
        return across(rows, options["across"], options.get("after"))
    columns = split(options["columns"])
    lines = [split(options.get("names", options["columns"]))]
    for row in rows.to_dict("records"):
        lines.append([cell(row, column) for column in columns])
    return lines


def cell(row: Mapping[str, Any], column: str) -> str:
    """Return one cell; "difference" has its interval in brackets."""
    unit = str(row.get("unit", ""))
    if column != "difference":
        value = row[column]
        return number(float(value), unit) if column in ("quantity", "control", "low", "high") else str(value)
    low, high = number(row["low"], unit), number(row["high"], unit)
    return f"{number(row['quantity'] - row['control'], unit)} [{low}, {high}]" if low else ""


def across(rows: pd.DataFrame, names: str, after: str | None = None) -> Lines:
    """Return one line per measure, and one column per value of the columns `names`; in each cell, the text of the
    column `after` follows."""
    groups = list(rows.groupby(split(names), sort=False))
    lines = [["", *(", ".join(map(str, values)) for values, _ in groups)]]
    for measure in rows["measure"].unique():
        line = [measure]
        for _, group in groups:
            of_measure = group[group["measure"] == measure].to_dict("records")
            texts = []
            for row in of_measure:
                text = f"{cell(row, 'quantity')} ({cell(row, 'control')})"
                texts.append(f"{text} {row[after]}" if after else text)
            line.append(", ".join(texts))
        lines.append(line)
    return lines


def verdicts(rows: pd.DataFrame, names: list[str], across: str) -> Lines:
    """Return one line per claim, with the columns `names`, and one column per value of `across`: whether the claim
    holds, the quantity, and its control."""
    rows = rows[rows["claim"] != ""]
    values = list(dict.fromkeys(rows[across]))
    lines = [[*names, *values]]
    for of_line, group in rows.groupby(names, sort=False):
        by_value = {row[across]: row for row in group.to_dict("records")}
        texts = [verdict(by_value[value]) if value in by_value else "not measured" for value in values]
        lines.append([*map(str, of_line), *texts])
    return lines


def verdict(row: Mapping[str, Any]) -> str:
    """Return whether a claim holds, the quantity, and its control in parentheses."""
    if row["holds"] == "not measured":
        return "not measured"
    unit = f" {row['unit']}"
    if row["unit"] == "%":
        unit = " points" if CHANGE.search(row["measure"]) else "%"
    return f"{row['holds']}: {cell(row, 'quantity')}{unit} ({cell(row, 'control')})"


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split("|" if "|" in text else ",")]


def tables(page: Path) -> list[Lines]:
    """Return the tables that a page inserts."""
    found = []
    for file, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        options = dict(re.findall(r"^:(\w+): (.*)$", block, re.MULTILINE))
        found.append(table(page.parent / file, options))
    return found
