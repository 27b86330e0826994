"""Write the page "What we found": three findings, one figure, and the paper's claims, from stored cells."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib import rc_context

from experiments.framework import claims
from experiments.framework.finding import Finding, Row
from experiments.framework.models import QWEN, SMOLLM2
from experiments.framework.pages import Stored, groups, save_figure
from experiments.framework.plotting import STYLE
from experiments.framework.sentences import TITLES, number
from icl_lens.locate.edge_space import THIRDS

Numbered = Sequence[tuple[Finding, Sequence[Stored]]]

SHOWN = {SMOLLM2: "animal-country, A/B", QWEN: "sentiment-number, foo/bar"}
"""The task of each real model in the text and figure."""
FIRST = next(iter(SHOWN))
NOTHING_WRITTEN = "no third of the layers writes more of what these heads compare or carry than for random heads"
ON_SENTENCES = "TREC, A/B"

MODELS = (
    "SmolLM2 is SmolLM2-135M-Instruct, Qwen is Qwen2.5-Coder-0.5B-Instruct, both quantized. Prompts are in balanced "
    "random order, where copying a label is right half of the time. Heads are chosen on some prompts and measured on "
    "{n} with other queries; brackets are 95% intervals over queries."
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
    n_real = sum(row.applies for cell in real for row in cell.rows)
    main = [row for cell in real for row in cell.all_rows(cell.finding.main.name)]
    parts = [
        "# What we found",
        MODELS.format(n=" or ".join(map(str, sorted({row.n_prompts for row in main if row.n_prompts})))),
        *(f"{i}. {sentence}" for i, sentence in enumerate(filter(None, map(_join, _findings(numbered))), start=1)),
        "![Exchanges of queries, keys and values in both models](figures/overview.svg)",
        "*Log-odds lost by exchanges in 12 heads (dots, 95%) and in random heads (circles).*",
        "## The paper's claims",
        "A claim holds on a task if the interval of the difference from the control lies on the claimed side of zero."
        + _single_task(real),
        claims.table(every),
        f"Ranges are over tasks. Of {n_real:,} comparisons on these models, about {round(n_real * 0.025)} would be "
        "above their control by chance. [Ground truth](ground-truth.md): models whose circuit is known.",
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
    return f" One task is {task} in {TITLES[model]}."


def _join(sentences: Sequence[str]) -> str:
    return " ".join(filter(None, sentences))


def _findings(numbered: Numbered) -> list[list[str]]:
    """Return the sentences of each of the three findings; none where a cell is missing."""
    of = {finding.id: cells for finding, cells in numbered}
    towers, circuit = of.get("two-towers", []), of.get("circuit", [])
    return [
        [*(_exchanges(towers, model) for model in SHOWN), _on_sentences(towers)],
        [_own_text(towers, model) for model in SHOWN],
        [_written(circuit, model) for model in SHOWN],
    ]


def _shown(cells: Sequence[Stored], model: str) -> Stored | None:
    return next((cell for cell in cells if (cell.model, cell.task) == (model, SHOWN[model])), None)


def _numbers(cell: Stored, *measures: str) -> list[Row] | None:
    rows = [cell.row(name) for name in measures]
    return [row for row in rows if row] if all(row is not None and row.applies for row in rows) else None


def _exchanges(cells: Sequence[Stored], model: str) -> str:
    """Return what exchanges cost in a model: in full for the first one, in short for the others."""
    cell = _shown(cells, model)
    if cell is None or (costs := _costs(cell)) is None:
        return ""
    if model != FIRST:
        return f"The same in {TITLES[model]} ({cell.task}): {_in_short(costs)}."
    return (
        f"In {TITLES[model]} ({cell.task}), exchanging the query, the keys or the values of {costs.n_heads} heads with "
        f"those of another prompt costs the answer {costs.lost} nats of log-odds: the other label in {costs.flips}% of "
        f"prompts. Two at once (query and keys, query and values, keys and values) should cancel: {costs.pairs}. "
        f"Labels for keys and texts for values should not matter: {costs.idle}. All this in random heads of the same "
        f"layers: {costs.random}."
    )


def _on_sentences(cells: Sequence[Stored]) -> str:
    """Return what exchanges cost on the paper's sentences."""
    for cell in cells:
        if cell.task == ON_SENTENCES and (costs := _costs(cell)):
            return f"On sentences ({cell.task}, {TITLES[cell.model]}): {_in_short(costs)}."
    return ""


class _Costs(NamedTuple):
    """Numbers of a model on a task, as text."""

    n_heads: int
    lost: str
    """By single exchanges: the query, the keys, the values."""
    flips: str
    """Percentages of prompts whose label becomes the other one."""
    pairs: str
    idle: str
    random: str
    """The range of the controls."""


def _costs(cell: Stored) -> _Costs | None:
    names = ("query", "keys", "values", "query+keys", "query+values", "keys+values", "keys: labels", "values: texts")
    rows, flips = _numbers(cell, *names), _numbers(cell, *(f"predicted: {name}" for name in names[:3]))
    if not rows or not flips:
        return None
    lost = [number(row.quantity) for row in rows]
    return _Costs(
        rows[0].n_heads,
        ", ".join(lost[:3]),
        ", ".join(f"{100 * row.quantity:.0f}" for row in flips),
        ", ".join(lost[3:6]),
        ", ".join(lost[6:]),
        _range(rows),
    )


def _in_short(costs: _Costs) -> str:
    return f"{costs.lost} ({costs.flips}%); {costs.pairs}; {costs.idle}; random {costs.random}"


def _range(rows: Sequence[Row]) -> str:
    """Return the range of the rows' controls."""
    controls = [row.control for row in rows]
    return f"{number(min(controls))} … {number(max(controls))}"


def _own_text(cells: Sequence[Stored], model: str) -> str:
    """Return what keys cost if only their own demonstration's text changes class, or only the other texts."""
    said = []
    for cell in cells:
        shown = cell.model == model and cell.task in (SHOWN[model], ON_SENTENCES)
        if shown and (rows := _numbers(cell, "keys: own text", "keys: other texts")):
            own, others = (
                f"{number(row.quantity)} [{number(row.control + row.low)}, {number(row.control + row.high)}]"
                for row in rows
            )
            said.append((own, others, f" ({cell.task})"))
    if not said:
        return ""
    if model != FIRST:
        return f"In {TITLES[model]}: {'; '.join(f'{own} and {others}{where}' for own, others, where in said)}."
    own, others, _ = said[0]
    return (
        f"In {TITLES[model]}, exchanging keys at labels costs {own} nats if only the text of the same demonstration "
        f"changed class, and {others} if only the other texts did."
    )


def _written(cells: Sequence[Stored], model: str) -> str:
    """Return which layers write what is compared and carried, if any third of them is above its control."""
    cell = _shown(cells, model)
    if cell is None:
        return ""
    of_role: dict[str, list[Row]] = {}
    said = []
    for reader, words, role in (
        ("query", "queries", "compared"),
        ("keys at the labels", "keys at labels", "compared"),
        ("values at the labels", "values at labels", "carried"),
    ):
        rows = _numbers(cell, *(f"{third} third → {reader}" for third in THIRDS))
        if rows is None:
            return ""
        said.append(f"{words} {' / '.join(number(row.quantity) for row in rows)}")
        of_role.setdefault(role, []).extend(rows)
    thirds = {role: _largest(rows) for role, rows in of_role.items()}
    most = [f"the {third} third of the layers writes most of what is {role}" for role, third in thirds.items() if third]
    most[1:] = [one.replace(" of the layers writes", "") for one in most[1:]]
    every = [row for rows in of_role.values() for row in rows]
    lead = f"In {TITLES[model]}, {', '.join(most) or NOTHING_WRITTEN}"
    numbers = f"{'; '.join(said)}; random heads {_range(every)}."
    if model != FIRST:
        return f"{lead}: {numbers}"
    return (
        f"{lead}. Removing what the first / middle / last third wrote, as {every[0].n_heads} heads read it, costs, in "
        f"nats: {numbers}"
    )


def _largest(rows: Sequence[Row]) -> str:
    """Return the third with the largest sum over readers, "" if it is above its control in none of them."""
    by_third = [rows[i :: len(THIRDS)] for i in range(len(THIRDS))]
    place = max(range(len(THIRDS)), key=lambda i: sum(row.quantity for row in by_third[i]))
    return THIRDS[place] if any(row.outcome == "above" for row in by_third[place]) else ""
