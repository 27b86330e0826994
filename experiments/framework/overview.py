"""Write the page "What we found": three findings, one figure, and the paper's claims, from stored cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context

from experiments.framework import claims, markdown
from experiments.framework.finding import Finding, Row
from experiments.framework.models import QWEN, SMOLLM2
from experiments.framework.pages import Stored, groups, save_figure
from experiments.framework.plotting import STYLE
from experiments.framework.sentences import TITLES, extent, number
from icl_lens.locate.edge_space import THIRDS

Numbered = Sequence[tuple[Finding, Sequence[Stored]]]

SHOWN = {SMOLLM2: "animal-country, A/B", QWEN: "sentiment-number, foo/bar"}
"""The task of each real model in the text and figure."""
NOTHING_WRITTEN = "no third of the layers writes more of what these heads compare or carry than for random heads"
ON_SENTENCES = "TREC, A/B"

MODELS = (
    "SmolLM2 is SmolLM2-135M-Instruct, Qwen is Qwen2.5-Coder-0.5B-Instruct, both quantized. Prompts are in balanced "
    "random order: copying a label is right half the time. Heads are measured on {n} prompts with other queries "
    "than those that chose them. Intervals are 95%, over queries."
)


def save(numbered: Numbered, path: Path) -> None:
    """Draw the exchanges in both real models."""
    for finding, cells in numbered:
        if finding.id == "two-towers" and (shown := [one for name in SHOWN for one in [_shown(cells, name)] if one]):
            with rc_context(STYLE):
                save_figure(finding.draw(pd.concat([cell.details for cell in shown], ignore_index=True)), path)


def text(numbered: Numbered) -> str:
    """Return the page in Markdown."""
    every = [cell for _, cells in numbered for cell in cells]
    real = groups(every)[0]
    rows = [row for cell in real for row in cell.rows if row.applies]
    n_real, n_above = len(rows), sum(row.outcome == "above" for row in rows)
    towers = _tower_cells([cell for cell in every if cell.finding.id == "two-towers"])
    main = [row for cell in real for row in cell.all_rows(cell.finding.main.name)]
    counts = [str(n) for n in sorted({row.n_prompts for row in main if row.n_prompts})]
    parts = [
        "# What we found",
        MODELS.format(n=" or ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:])))),
        *(f"{i}. {sentence}" for i, sentence in enumerate(_findings(numbered), start=1)),
        *(_exchange_table(towers) if towers else ()),
        "![Exchanges of queries, keys and values in both models](figures/overview.svg)",
        "*The same: 12 heads (dots), random heads (circles).*",
        "## The paper's claims",
        "A direction holds if the difference's interval is on the claimed side of zero." + _single_task(real),
        claims.table(every),
        f"Ranges are over tasks. {n_above:,} of {n_real:,} comparisons are above their control; by chance, about "
        f"{round(n_real * 0.025)}. [Ground truth](ground-truth.md): models whose circuit is known.",
        "```{toctree}\n:hidden:\n\n" + "\n".join([*(finding.id for finding, _ in numbered), "ground-truth"]) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _single_task(cells: Sequence[Stored]) -> str:
    """Return which task the claims that are measured on one task belong to, if it is the same one for all."""
    tasks = {cell.finding.id: {(one.model, one.task) for one in cells if one.finding is cell.finding} for cell in cells}
    single = set().union(*(some for some in tasks.values() if len(some) == 1))
    if len(single) != 1:
        return ""
    ((model, task),) = single
    return f" “Of 1”: {task} in {TITLES[model]}."


def _findings(numbered: Numbered) -> list[str]:
    """Return the sentences of the findings; none where a cell is missing."""
    of = {finding.id: cells for finding, cells in numbered}
    towers = _tower_cells(of.get("two-towers", []))
    exchanged = (_exchanges(towers), _own_text(towers)) if towers else ()
    return [*exchanged, *filter(None, (_written(of.get("circuit", [])), _moved(of.get("text-to-label", []))))]


def _shown(cells: Sequence[Stored], model: str) -> Stored | None:
    return next((cell for cell in cells if (cell.model, cell.task) == (model, SHOWN[model])), None)


def _numbers(cell: Stored, *measures: str) -> list[Row] | None:
    rows = [cell.row(name) for name in measures]
    return [row for row in rows if row] if all(row is not None and row.applies for row in rows) else None


SINGLE, PAIRS = ("query", "keys", "values"), ("query+keys", "query+values", "keys+values")
EXCHANGED = {
    "query": "query",
    "keys": "keys",
    "values": "values",
    "keys: own text": "keys, only own text",
    **{pair: pair.replace("+", " and ") for pair in PAIRS},
    "keys: other texts": "keys, only other texts",
    "keys: labels": "keys, labels exchanged",
    "values: texts": "values, texts exchanged",
}
"""The exchanges of the table, first those that should give the other label, and their names there."""
N_TURNING = 4
DONORS = (
    "Log-odds lost, nats (±: the interval's wider side). Donors: for queries, another class; for keys, exchanged "
    "texts; for values, exchanged labels."
)
PERCENT: dict[str, Any] = {"scale": 100.0, "digits": 0}


def _tower_cells(cells: Sequence[Stored]) -> list[Stored]:
    """Return the cells of the text and figure, and those on sentences, that have every exchange."""
    names = (*EXCHANGED, *(f"predicted: {name}" for name in SINGLE))
    shown = [cell for model in SHOWN for cell in cells if cell is _shown(cells, model)]
    shown += [cell for cell in cells if cell.model in SHOWN and cell.task == ON_SENTENCES]
    return [cell for cell in shown if _numbers(cell, *names)]


def _rows(cells: Sequence[Stored], *names: str) -> list[Row]:
    return [row for cell in cells for name in names if (row := cell.row(name))]


def _exchanges(cells: Sequence[Stored]) -> str:
    """Return how often single exchanges give the other label, and what pairs and random heads cost."""
    flips = _rows(cells, *(f"predicted: {name}" for name in SINGLE))
    return (
        f"Exchanging the query, keys or values of {flips[0].n_heads} heads with another prompt's gives the other label "
        f"in {extent([row.quantity for row in flips], **PERCENT)}% of prompts (intact model: "
        f"{extent([row.control for row in flips], **PERCENT)}%). Single exchanges cost "
        f"{extent([row.quantity for row in _rows(cells, *SINGLE)])} nats; pairs, which should cancel, "
        f"{extent([row.quantity for row in _rows(cells, *PAIRS)])}."
    )


def _own_text(cells: Sequence[Stored]) -> str:
    """Return what keys cost if only their own demonstration's text changes class, or only the other texts."""
    own, others = (_rows(cells, name) for name in ("keys: own text", "keys: other texts"))
    text = (
        f"Exchanging keys costs {extent([row.quantity for row in own])} nats if only the text of their own "
        f"demonstration changed class, {extent([row.quantity for row in others])} if only the other texts did"
    )
    is_own = all(a.control + a.low > b.control + b.high for a, b in zip(own, others, strict=True))
    return text + (": each key stands mainly for its own demonstration." if is_own else ".")


def _exchange_table(cells: Sequence[Stored]) -> list[str]:
    """Return a table of what every exchange costs, with intervals and the range of the controls."""
    lines: list[list[str]] = []
    for name, shown in EXCHANGED.items():
        rows = _rows(cells, name)
        ends = [max(row.control + row.high - row.quantity, row.quantity - row.control - row.low) for row in rows]
        numbers = [f"{number(row.quantity)}±{number(end)}" for row, end in zip(rows, ends, strict=True)]
        lines.append([shown, "yes" if len(lines) < N_TURNING else "no", *numbers])
    controls = [extent([row.control for row in _rows([cell], *EXCHANGED)]) for cell in cells]
    lines.append(["random heads, any row", "no", *controls])
    titles = [f"{TITLES[cell.model]}, {cell.task}" for cell in cells]
    table = markdown.table(["exchanged", "should turn the answer", *titles], lines, align="ll")
    return [DONORS, table]


READERS = {"query": "queries", "keys at the labels": "keys", "values at the labels": "values"}
"""What the heads read: its name in the stored rows, and in the text."""


def _moved(cells: Sequence[Stored]) -> str:
    """Return which heads write to the keys, and from which tokens they take it."""
    measured = [cell for cell in cells if _numbers(cell, "movers", "texts", "between")]
    shown = [cell for model in SHOWN for cell in measured if cell.model == model]
    if not shown:
        return ""
    movers, texts, between = (_rows(shown, name) for name in ("movers", "texts", "between"))
    everything = extent([row.quantity for row in _rows(shown, "all")])
    first = shown[0].details
    names = first[(first["hop"] == "movers") & (first["head"] != "")]["head"]
    lost, control = (extent([getattr(row, field) for row in movers]) for field in ("quantity", "control"))
    return (
        f"Without what {movers[0].n_heads} heads (in {TITLES[shown[0].model]}: {', '.join(names)}) write at labels to "
        f"the keys of the two heads that compare most, the answer loses {lost} nats (random heads: {control}), and "
        f"{everything} without all that is written there. Their values carry "
        f"{extent([row.quantity for row in between])} nats from the separators around texts, and "
        f"{extent([row.quantity for row in texts])} from texts themselves ([text-to-label](text-to-label.md))."
    )


def _written(cells: Sequence[Stored]) -> str:
    """Return which layers write what is compared and carried, in each model."""
    shown = [cell for model in SHOWN if (cell := _shown(cells, model))]
    by_reader = {cell.model: found for cell in shown if (found := _thirds(cell))}
    if not by_reader:
        return ""
    leads = {model: _lead(found) for model, found in by_reader.items()}
    agree = len(set(leads.values())) == 1
    parts = []
    for model, found in by_reader.items():
        values = [f"{words} {', '.join(number(row.quantity) for row in rows)}" for words, rows in found.items()]
        lead = "" if agree else f"; {leads[model]}"
        parts.append(f"{TITLES[model]}: {'; '.join(values)}{lead}.")
    random = extent([row.control for found in by_reader.values() for rows in found.values() for row in rows])
    n_heads = next(iter(by_reader[next(iter(by_reader))].values()))[0].n_heads
    lead = f"{next(iter(leads.values()))}. ".capitalize() if agree else ""
    return (
        f"{lead}Removing the first, middle or last third of the layers from what {n_heads} heads read costs, in nats: "
        f"{' '.join(parts)} Random heads: {random}."
    )


def _thirds(cell: Stored) -> dict[str, list[Row]] | None:
    """Return what each third of the layers writes, by what heads read; None if a row is missing."""
    found = {
        words: _numbers(cell, *(f"{third} third → {reader}" for third in THIRDS)) for reader, words in READERS.items()
    }
    complete = {words: rows for words, rows in found.items() if rows is not None}
    return complete if len(complete) == len(READERS) else None


def _lead(found: dict[str, list[Row]]) -> str:
    """Return which thirds write most of what heads compare and carry, if they are above their control."""
    queries, keys, values = found.values()
    thirds = {"compare": _largest([*queries, *keys]), "carry": _largest(values)}
    most = [f"most of what heads {role} is written in the {third} third" for role, third in thirds.items() if third]
    shorter = [one.replace("what heads", "what they").replace(" is written in", " in") for one in most[1:]]
    return ", ".join([*most[:1], *shorter]) or NOTHING_WRITTEN


def _largest(rows: Sequence[Row]) -> str:
    """Return the third with the largest sum over readers, "" if it is above its control in none of them."""
    by_third = [rows[i :: len(THIRDS)] for i in range(len(THIRDS))]
    place = max(range(len(THIRDS)), key=lambda i: sum(row.quantity for row in by_third[i]))
    return THIRDS[place] if any(row.outcome == "above" for row in by_third[place]) else ""
