"""Views of results: which page, notebook output, terminal output and figures each has.

`result.base` imports this module when a view is asked for. Every result has the views of its table; those below have
more. A page is drawn by a template, of which `html.templating` makes a document or inline output.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from icl_lens.analyses.comparison import Comparison
from icl_lens.analyses.explanation import Explanation
from icl_lens.analyses.model_comparison import ModelComparison
from icl_lens.analyses.two_towers_result import TwoTowers
from icl_lens.locate.circuit import Circuit
from icl_lens.locate.mean_score_parts import MeanScoreParts
from icl_lens.measures.controlled_ablation import ControlledAblation
from icl_lens.report import (
    ablation,
    circuit,
    comparison,
    explanation_terminal,
    mean_score_parts,
    model_comparison,
    two_towers,
)
from icl_lens.report.html import page as explanation_page
from icl_lens.report.html.parts import Cell, Table
from icl_lens.report.html.templating import render_notebook, render_page
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.tables import html_table, is_number_column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PAGE_ROWS = 200
"""Rows of a table on a page; results for every prompt have many thousands."""

Contents = tuple[str, dict[str, Any]]
"""A page's template, and what it shows."""

PAGES: dict[type[Displayed], Callable[[Any], Contents]] = {
    Explanation: explanation_page.page,
    Comparison: comparison.page,
    ModelComparison: model_comparison.page,
    TwoTowers: two_towers.page,
    ControlledAblation: ablation.page,
    Circuit: circuit.page,
}
INLINE_PAGES = (Explanation, Comparison, ModelComparison, TwoTowers)
"""Results that notebooks show as their page, in a frame; others are small tables without scripts."""
TERMINALS: dict[type[Displayed], Callable[[Any], RenderableType]] = {
    Explanation: explanation_terminal.terminal,
    Comparison: comparison.terminal,
    ModelComparison: model_comparison.terminal,
    TwoTowers: two_towers.Terminal,
    ControlledAblation: ablation.terminal,
    MeanScoreParts: mean_score_parts.terminal,
    Circuit: circuit.terminal,
}


def page(found: Displayed, **about: Any) -> str:
    """Return a self-contained page; `about` adds what the result does not know, such as the command that made it."""
    template, contents = PAGES.get(type(found), _table_page)(found)
    if "model" in about:
        contents["title"] = f"{about['model']}: {contents['title']}"
    return render_page(template, **contents | about)


def notebook(found: Displayed) -> str:
    """Return the HTML that a notebook shows."""
    if type(found) in INLINE_PAGES:
        template, contents = PAGES[type(found)](found)
        return render_notebook(template, height=720, **contents)
    title, columns, total = found._shown()
    return html_table(title, columns, total=total)


def terminal(found: Displayed) -> RenderableType:
    """Return what a command prints: by default, what `print` shows."""
    return TERMINALS[type(found)](found) if type(found) in TERMINALS else Text(repr(found))


def figures(found: Displayed) -> "dict[str, Figure]":
    """Return matplotlib figures by name."""
    from icl_lens.report import plots  # imports matplotlib

    if isinstance(found, Explanation):
        return plots.explanation_figures(found)
    if isinstance(found, TwoTowers):
        return {"exchanges": plots.exchanges(found.to_frame())}
    if isinstance(found, ModelComparison):
        names = (f"A: {found.models[0]}", f"B: {found.models[1]}")
        return {"heads": plots.head_scatter(found.to_frame(), names=names, label=f"mean {found.by} (nats)")}
    if isinstance(found, Circuit):
        curve = {"curve": plots.circuit_curve(found)} if found.is_defined else {}
        return {"graph": plots.circuit(found), **curve}
    return {}


def _table_page(found: Displayed) -> Contents:
    """Return the page of a result without one of its own: what `print` shows and, if that is not all, more rows."""
    kind = type(found).__name__
    title, columns, total = found._shown()
    heading = re.sub("(?<!^)([A-Z])", lambda word: f" {word[1].lower()}", kind)
    # Titles of printed tables begin with the class: "TopHeads over 24 prompts", "Agreement(…)".
    summary = title.removeprefix(kind).strip(",: ")
    summary = summary[1:-1] if summary.startswith("(") and summary.endswith(")") else summary
    shown = pd.DataFrame({name: list(map(str, cells)) for name, cells in columns.items()})
    numbers = [name for name, cells in columns.items() if is_number_column(cells)]
    contents: dict[str, Any] = {"title": heading, "summary": summary, "shown": _table(shown, numbers), "rest": None}
    if total > len(shown):
        frame = found.to_frame()
        frame = frame if isinstance(frame.index, pd.RangeIndex) else frame.reset_index()
        numbers = [name for name in frame if pd.api.types.is_numeric_dtype(frame[name])]
        more = frame.head(MAX_PAGE_ROWS)
        contents["rest"] = _table(
            more.map(lambda value: signed(value) if isinstance(value, float) else str(value)), numbers
        )
        contents["n_rest"] = (
            f"{len(more):,} of {len(frame):,} rows; to_frame() has all" if len(more) < len(frame) else ""
        )
    return "table.html.j2", contents


def _table(frame: pd.DataFrame, numbers: Sequence[Any]) -> Table:
    names = [f"#{name}" if name in numbers else str(name) for name in frame]
    rows: list[list[Cell]] = [list(row) for row in frame.itertuples(index=False)]
    return Table(names, rows, "located")
