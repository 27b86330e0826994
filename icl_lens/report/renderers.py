"""The renderers of results: which page, notebook output, terminal output and figures each has.

`icl_lens/__init__.py` registers this module, of which results call `page`, `notebook`, `terminal`
and `figures`. Results are drawn from their views, but for those below.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import RenderableType

from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.model_comparison import ModelComparison
from icl_lens.analyses.trace_result import Trace
from icl_lens.analyses.two_towers_result import TwoTowers
from icl_lens.measures.circuit import Circuit
from icl_lens.report import explanation_terminal
from icl_lens.report.html import atlas_page, explanation_page, view_page
from icl_lens.report.html.elements import PageCell, PageTable
from icl_lens.report.html.templating import render_notebook, render_page, render_small_table
from icl_lens.report.view_terminal import ViewInTerminal
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.view import Section, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PAGE_ROWS = 200
"""Rows of a table on a page; results for every prompt have many thousands."""
HEIGHT = 720
"""Pixels of a page in a notebook."""

Contents = tuple[str, dict[str, Any]]
"""A page's template, and what it shows."""

PAGES: dict[type[Displayed], Callable[[Any], Contents]] = {
    Explanation: explanation_page.page,
    HeadAtlas: atlas_page.page,
}
TERMINALS: dict[type[Displayed], Callable[[Any], RenderableType]] = {
    Explanation: explanation_terminal.terminal,
}


def page(result: Displayed, **about: Any) -> str:
    """Return a self-contained page; `about` adds what the result does not know (`view_about`)."""
    if type(result) in PAGES:
        template, contents = PAGES[type(result)](result)
        if "model" in about:
            contents["title"] = f"{about['model']}: {contents['title']}"
        return render_page(template, **contents | about)
    view = result.to_view()
    if view.sentences:
        return render_page(view_page.TEMPLATE, **_page_contents(result, view_about(view, **about)))
    return render_page(view_page.TEMPLATE, **_table_contents(result, view))


def notebook(result: Displayed) -> str:
    """Return the HTML that a notebook shows: a page in a frame or, of a view without sentences, a
    small table.
    """
    if type(result) in PAGES:
        template, contents = PAGES[type(result)](result)
        return render_notebook(template, height=HEIGHT, **contents)
    view = result.to_view()
    if view.sentences:
        return render_notebook(view_page.TEMPLATE, height=HEIGHT, **_page_contents(result, view))
    return render_small_table(view.title, view.sections[0])


def terminal(result: Displayed) -> RenderableType:
    """Return what a command prints."""
    if type(result) in TERMINALS:
        return TERMINALS[type(result)](result)
    return ViewInTerminal(result.to_view())


def view_about(
    view: View,
    *,
    model: str = "",
    chosen: str = "",
    behavior: str = "",
    text: str = "",
    command: str = "",
) -> View:
    """Return a view with what the command that made a result knows.

    These are the model's name, how its heads were chosen, what the model does on the task, the
    first prompt, and the command.
    """
    sections = list(view.sections)
    if text:
        sections.append(Section("First prompt", quote=(text,)))
    if command:
        explanation = "The command that reproduces this page."
        sections.append(Section("Configuration", explanation, code=command))
    return replace(
        view,
        about=" · ".join(filter(None, (view.about, model))),
        sentences=tuple(filter(None, (*view.sentences, chosen, behavior))),
        sections=tuple(sections),
    )


def figures(result: Displayed) -> "dict[str, Figure]":
    """Return matplotlib figures by name."""
    from icl_lens.report import plots  # imports matplotlib

    if isinstance(result, Explanation):
        return plots.explanation_figures(result)
    if isinstance(result, TwoTowers):
        return {"exchanges": plots.exchanges(result.to_frame())}
    if isinstance(result, Trace):
        return {"map": plots.trace(result.to_frame())}
    if isinstance(result, ModelComparison) and result.same_heads:
        names = (f"A: {result.models[0]}", f"B: {result.models[1]}")
        label = f"mean {result.by} (nats)"
        return {"heads": plots.head_scatter(result.to_frame(), names=names, label=label)}
    if isinstance(result, Circuit):
        curve = {"curve": plots.circuit_curve(result)} if result.is_defined else {}
        return {"graph": plots.circuit(result), **curve}
    return {}


def _page_contents(result: Displayed, view: View) -> dict[str, Any]:
    needs_figures = any(section.figure for section in view.sections)
    # New figures: drawing one again may change it, and the same result gives the same page.
    return view_page.contents(view, figures(result) if needs_figures else {})


def _table_contents(result: Displayed, view: View) -> dict[str, Any]:
    """Return the page of a view without sentences: its table and, if that is not all, more rows."""
    # Titles of printed tables begin with the class: "HeadEffects over 24 prompts", "Agreement(…)".
    summary = view.title.removeprefix(type(result).__name__).strip(",: ")
    if summary.startswith("(") and summary.endswith(")"):
        summary = summary[1:-1]
    sentences = (summary,) if summary else ()
    view = replace(view, title=result.name_in_words(), sentences=sentences)
    contents = _page_contents(result, view)
    if not view.sections[0].n_more:
        return contents
    frame = result.to_frame()
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index()
    first_rows = frame.head(MAX_PAGE_ROWS)
    contents["all_rows"] = _frame_table(first_rows)
    if len(first_rows) < len(frame):
        contents["n_rows"] = f"{len(first_rows):,} of {len(frame):,} rows; to_frame() has all"
    return contents


def _frame_table(frame: pd.DataFrame) -> PageTable:
    """Return a table of numbers and texts for a page."""
    names: list[PageCell] = []
    for name in frame:
        is_number = pd.api.types.is_numeric_dtype(frame[name])
        names.append(f"#{name}" if is_number else str(name))
    texts = frame.map(lambda value: signed(value) if isinstance(value, float) else str(value))
    rows: list[list[PageCell]] = [list(row) for row in texts.itertuples(index=False)]
    return PageTable(names, rows, "located")
