"""A page about a circuit; templates/circuit.html.j2 draws it."""

import base64
from collections.abc import Sequence

from matplotlib.figure import Figure

from icl_lens.locate.circuit import Circuit
from icl_lens.report import plots
from icl_lens.report.circuit import (
    CURVE_COLUMNS,
    EDGE_COLUMNS,
    GROUP_COLUMNS,
    curve_rows,
    edge_rows,
    group_rows,
    notes,
)
from icl_lens.report.html.parts import Table
from icl_lens.report.html.templating import render_page
from icl_lens.report.notebook_figure import transparent_png


def circuit_page(
    found: Circuit, *, model: str, text: str = "", chosen: str = "", behavior: str = "", command: str = ""
) -> str:
    """Return a self-contained page: what the edges carry in words, as a graph, as a curve, and in tables.

    `text` is the first prompt; `chosen` says how the heads were chosen, `behavior` what the model does on the task
    (`il.task_check`), and `command` reproduces the page.
    """
    curve, graph = curve_rows(found), plots.circuit(found)
    return render_page(
        "circuit.html.j2",
        title=f"{model}: circuit of {len(found.receivers)} heads",
        model=model,
        found=found,
        text=text,
        chosen=chosen,
        behavior=behavior,
        command=command,
        sentences=found.sentences(),
        graph=_image(graph),
        graph_width=round(125 * graph.get_figwidth()),  # names are about as large as the page's text
        curve_figure=_image(plots.circuit_curve(found)) if curve else "",
        edges=_table(EDGE_COLUMNS, edge_rows(found)),
        curve=_table(CURVE_COLUMNS, curve, numbers=0),
        groups=_table(GROUP_COLUMNS, group_rows(found)),
        notes=notes(found),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 1) -> Table:
    """Return a table whose columns from `numbers` on hold numbers."""
    names = [name.replace("-\n", "").replace("\n", " ") for name in columns]
    return Table([*names[:numbers], *(f"#{name}" for name in names[numbers:])], rows, "located")


def _image(figure: Figure) -> str:
    return f"data:image/png;base64,{base64.b64encode(transparent_png(figure)).decode('ascii')}"
