"""The sections of an explanation, in the order in which everything shows them.

1. `SECTIONS` is the list. The page, the terminal, Markdown and `to_frame` walk it.
2. A section that says what it shows as a `view` is drawn by all of them without more code.
3. `report/html/explanation_page.py` and `report/explanation_terminal.py` name the sections that they
   draw in ways of their own.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from icl_lens.analyses.explanation import tables
from icl_lens.analyses.explanation.reports import ExplanationReports
from icl_lens.analyses.explanation.sentences import (
    contrast_name,
    demonstrations_note,
    exchange_note,
    lost_name,
    lost_note,
    scores_note,
)
from icl_lens.analyses.explanation.tables import TableName, TableRow
from icl_lens.foundation.ranking_scores import Score
from icl_lens.result.number_format import mean_and_range, percent
from icl_lens.result.view import Cell, Column, Label, Section

TableRows = Callable[[ExplanationReports], Iterable[TableRow]]


def probabilities(reports: ExplanationReports) -> Section:
    """Return the labels' probabilities, and those without the located and without random heads."""
    ablation = reports.ablation
    columns = (
        Column("token" if reports.is_plain_text else "label", is_number=False),
        Column("probability"),
        Column(f"without {', '.join(map(str, ablation.heads))}"),
        Column(f"without {len(ablation.heads)} random heads"),
    )
    rows = []
    for place, label in enumerate(reports.labels):
        random_probabilities = [math.exp(log_probs[place]) for log_probs in ablation.random]
        row = (
            Label(label, place),
            percent(math.exp(reports.scores.log_probs[place])),
            percent(math.exp(ablation.located[place])),
            mean_and_range(random_probabilities),
        )
        rows.append(row)
    return Section("Probabilities", columns=columns, rows=tuple(rows))


class HeadColumn(NamedTuple):
    """A number of each located head."""

    score: Score | None
    """None for a number that is no score: the page has it last, and without a bar."""
    name: str
    values: tuple[float, ...]
    """Nats, in the order of the located heads."""
    is_loss: bool = False
    """Whether it is what the answer loses without the head."""


def head_columns(reports: ExplanationReports) -> list[HeadColumn]:
    """Return the located heads' scores and, unless their effect says it, what the answer loses
    without each.

    The page, the terminal and Markdown draw these columns.
    """
    columns = []
    scores = list(reports.heads[0].scores)
    for by in scores:
        name = contrast_name(reports) if by == "contrast" else by
        values = tuple(report.scores[by] for report in reports.heads)
        columns.append(HeadColumn(by, name, values))
    if "effect" not in scores:
        losses = tuple(reports.lost(report.ablated) for report in reports.heads)
        columns.append(HeadColumn(None, lost_name(reports), losses, is_loss=True))
    return columns


def head_notes(reports: ExplanationReports) -> list[str]:
    """Return what `head_columns` are."""
    columns = head_columns(reports)
    notes = [scores_note(reports)]
    if any(column.is_loss for column in columns):
        notes.append(lost_note(reports))
    if any(column.score == "exchange" for column in columns):
        notes.append(exchange_note(reports))
    return notes


def located_heads(reports: ExplanationReports) -> Section:
    """Return the located heads' scores, and what the answer loses without each."""
    numbers = head_columns(reports)
    columns = [Column("head", is_number=False)]
    columns += [Column(f"{column.name}, nats") for column in numbers]
    rows = []
    for place, report in enumerate(reports.heads):
        rows.append((str(report.head), *(column.values[place] for column in numbers)))
    return Section(
        f"Heads by {reports.settings.by}",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(note.rstrip(".") + "." for note in head_notes(reports)),
    )


def demonstrations(reports: ExplanationReports) -> Section | None:
    """Return what the explained label loses without each demonstration; None if it is not known."""
    if reports.demonstrations is None:
        return None
    columns = (
        Column("demonstration", is_number=False),
        Column("label", is_number=False),
        Column("hidden, nats", has_bars=True),
        Column("keys"),
        Column("values"),
    )
    rows = []
    for lost in tables.shown_demonstrations(reports):
        label: Cell = ""
        if lost["label"]:
            index = reports.input.demonstration_labels[lost["place"] - 1]
            label = Label(lost["label"], index)
        rows.append((lost["text"], label, lost["hidden"], lost["keys"], lost["values"]))
    loses = f"log p of {reports.target} loses"
    if reports.scores.compared_with:
        loses = f"the log-odds of {reports.target} lose"
    return Section(
        explanation=f"What {loses} without each demonstration; blue ones help.",
        columns=columns,
        rows=tuple(rows),
        notes=(demonstrations_note(reports),),
    )


def largest_parts(reports: ExplanationReports) -> Section:
    """Return the (head, position) parts with the largest contrast, or increase if heads are ranked
    by it.
    """
    columns = [
        Column("head", is_number=False),
        Column("position"),
        Column("token", is_number=False),
        Column("increase, nats", has_bars=True),
    ]
    if all(part.contrast is not None for part in reports.subheads.largest):
        columns.append(Column(f"{contrast_name(reports)}, nats"))
    rows = []
    for part in reports.subheads.largest:
        token = Label(part.token, reports.input.label_at.get(part.position, -1))
        row: list[Cell] = [str(part.head), str(part.position), token, part.increase]
        if part.contrast is not None:
            row.append(part.contrast)
        rows.append(tuple(row))
    parts = reports.subheads
    note = f"Exact: all {parts.n_parts} parts were evaluated."
    if parts.certified:
        note = f"Exact and certified: {parts.n_exact} of {parts.n_parts} parts were evaluated."
    return Section(
        explanation=f"The (head, position) pairs with the largest {tables.part_score(reports)}. "
        "The parts of a head need not sum to its increase.",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=(note,),
    )


def no_view(reports: ExplanationReports) -> None:
    """Return nothing: the section is drawn by the page and the terminal only."""


@dataclass(frozen=True)
class ExplanationSection:
    """A section of explanations, and what each way of showing them takes from it."""

    name: str
    """Its anchor on the page, and its name where the page or the terminal draw it themselves."""
    title: str
    text_title: str = ""
    """The title for plain text, if it is another."""
    view: Callable[[ExplanationReports], Section | None] = no_view
    """What it shows, as data; None if it has nothing to show."""
    tables: Mapping[TableName, TableRows] = field(default_factory=dict)
    """Its tables of `to_frame`."""

    def title_of(self, reports: ExplanationReports) -> str:
        """Return the title for a prompt or for plain text."""
        return self.text_title if reports.is_plain_text and self.text_title else self.title


SECTIONS = (
    ExplanationSection("prompt", "Prompt"),
    ExplanationSection(
        "answer", "Answer", "Next token", view=probabilities, tables={"labels": tables.labels}
    ),
    ExplanationSection("layers", "Layers", tables={"layers": tables.layers}),
    ExplanationSection(
        "located",
        "Located heads",
        view=located_heads,
        tables={"words": tables.words, "why": tables.why},
    ),
    ExplanationSection(
        "heads",
        "All heads",
        tables={"heads": tables.heads, "similarity": tables.similarity},
    ),
    ExplanationSection(
        "demonstrations",
        "Demonstrations",
        view=demonstrations,
        tables={"demonstrations": tables.demonstrations},
    ),
    ExplanationSection("removal", "Ablating the located heads"),
    ExplanationSection(
        "parts", "Largest parts", view=largest_parts, tables={"subheads": tables.subheads}
    ),
    ExplanationSection("configuration", "Configuration"),
)


def views(reports: ExplanationReports) -> list[Section]:
    """Return what the sections show as data, in order, each with its title."""
    sections = []
    for section in SECTIONS:
        view = section.view(reports)
        if view is not None:
            sections.append(replace(view, title=view.title or section.title_of(reports)))
    return sections


def table(name: TableName) -> TableRows:
    """Return the function that makes a table of `to_frame`."""
    for section in SECTIONS:
        if name in section.tables:
            return section.tables[name]
    raise AssertionError(f"no section has the table {name!r}")
