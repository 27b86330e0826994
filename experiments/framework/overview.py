"""Write the page "What we found": three findings, one figure, and the paper's claims, from stored cells."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import rc_context

from experiments.framework import claims
from experiments.framework.finding import Finding, Row
from experiments.framework.models import QWEN, SMOLLM2
from experiments.framework.pages import Stored, groups, save_figure
from experiments.framework.plotting import STYLE
from experiments.framework.sentences import TITLES, number

Numbered = Sequence[tuple[Finding, Sequence[Stored]]]

SHOWN = {SMOLLM2: "animal-country, A/B", QWEN: "sentiment-number, foo/bar"}
"""The task of each real model in the text and figure."""
ON_SENTENCES = "TREC, A/B"

MODELS = (
    "SmolLM2 is SmolLM2-135M-Instruct (30 layers of 9 heads), Qwen is Qwen2.5-Coder-0.5B-Instruct (24 of 14), both "
    "with quantized weights. Prompts show labeled texts in balanced random order: copying a label is right half of the "
    "time. Heads are chosen on some prompts and measured on others with other queries. Brackets are 95% intervals over "
    "queries."
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
    n_real = sum(row.applies for cell in groups(every)[0] for row in cell.rows)
    parts = [
        "# What we found",
        MODELS,
        *(f"{i}. {sentence}" for i, sentence in enumerate(filter(None, map(_join, _findings(numbered))), start=1)),
        "![Exchanges of queries, keys and values in both models](figures/overview.svg)",
        "*What the answer's log-odds lose when the heads that the scan finds take their query, keys or values from "
        "another prompt (dots, 95%), and when random heads of the same layers do (circles).*",
        "## The paper's claims",
        claims.table(every),
        f"Ranges are over tasks. The pages make {n_real:,} comparisons on the real models; by chance alone, about "
        f"{round(n_real * 0.025)} of them would be above their control.",
        "[Ground truth](ground-truth.md) has the same on models whose circuit is known. "
        "`python -m experiments run --all --model …` computes it on your model.",
        "```{toctree}\n:hidden:\n\n" + "\n".join([*(finding.id for finding, _ in numbered), "ground-truth"]) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


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
    cell = _shown(cells, model)
    names = ("query", "keys", "values", "query+keys", "query+values", "keys+values", "keys: labels", "values: texts")
    if cell is None or not (rows := _numbers(cell, *names)):
        return ""
    query, keys, values, *rest = (number(row.quantity) for row in rows)
    random = number(max(abs(row.control) for row in rows))
    pairs, idle = rest[:3], rest[3:]
    said = ""
    if flips := _numbers(cell, "predicted: query", "predicted: keys", "predicted: values"):
        shares = [f"{100 * row.quantity:.0f}" for row in flips]
        said = f"the other label in {shares[0]}, {shares[1]} and {shares[2]}% of the prompts"
    if model == QWEN:
        return (
            f"In Qwen ({cell.task}, {rows[0].n_heads} heads): {query}, {keys} and {values} nats"
            f"{said and f', {said}'}; pairs {', '.join(pairs)}; idle {' and '.join(idle)}; random at most {random}."
        )
    return (
        f"In {TITLES[model]} ({cell.task}), exchanging the query, the keys or the values of {rows[0].n_heads} heads "
        f"costs the answer {query}, {keys} and {values} nats of log-odds{said and f', and gives {said}'}; two "
        f"exchanges cancel ({', '.join(pairs)}), and exchanges that two towers call idle cost {' and '.join(idle)}. "
        f"Random heads: at most {random}."
    )


def _own_text(cells: Sequence[Stored], model: str) -> str:
    cell = _shown(cells, model)
    if cell is None or not (rows := _numbers(cell, "keys: own text", "keys: other texts")):
        return ""
    own, others = (
        f"{number(row.quantity)} [{number(row.control + row.low)}, {number(row.control + row.high)}]" for row in rows
    )
    if model == QWEN:
        return f"In Qwen: {own} and {others}."
    return (
        f"In {TITLES[model]}, keys from prompts in which only that label's own text changes class cost {own} nats, "
        f"keys from prompts in which only the other texts change {others}."
    )


def _on_sentences(cells: Sequence[Stored]) -> str:
    """Return the exchanges on the paper's sentences."""
    for cell in cells:
        names = ("query", "keys", "values", "keys: own text", "keys: other texts")
        if cell.task == ON_SENTENCES and (rows := _numbers(cell, *names)):
            query, keys, values, own, others = (number(row.quantity) for row in rows)
            random = number(max(abs(row.control) for row in rows))
            return (
                f"On sentences ({cell.task}, {TITLES[cell.model]}), they cost {query}, {keys} and {values} nats; own "
                f"text {own}, other texts {others}; random at most {random}."
            )
    return ""


def _written(cells: Sequence[Stored], model: str) -> str:
    cell = _shown(cells, model)
    if cell is None:
        return ""
    said = []
    for reader, words in (
        ("query", "queries"),
        ("keys at the labels", "label keys"),
        ("values at the labels", "values"),
    ):
        rows = _numbers(cell, *(f"{third} third → {reader}" for third in ("first", "middle", "last")))
        if rows is None:
            return ""
        said.append(f"{words} {' / '.join(number(row.quantity) for row in rows)}")
    return (
        f"In {TITLES[model]}, what the first / middle / last third of the layers writes for these heads' reading is "
        f"worth, in nats: {'; '.join(said)}."
    )
