"""A circuit in words and numbers: its terminal tables, figures and page."""

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.locate.circuit import MEAN_PROMPTS, Circuit
from icl_lens.report.html.parts import text_table
from icl_lens.report.terminal import full_table
from icl_lens.result.number_format import signed
from icl_lens.result.tables import format_share, selected_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_SHOWN = 12
"""Number of edges that the terminal shows."""
EDGE_COLUMNS = ("edge", "log-odds\ndrop, nats", "95%\ninterval", "kept-only\ndrop, nats", "selected")
CURVE_COLUMNS = ("edges kept", "% of\nedges", "faith-\nfulness", "95%\ninterval", "random:\nmean (range)")
GROUP_COLUMNS = ("edges", "log-odds\ndrop, nats", "95%\ninterval", "random\nheads, nats", "difference,\n95% interval")


def edge_rows(found: Circuit) -> list[list[str]]:
    """Return the cells of `EDGE_COLUMNS` for each edge."""
    return [
        [
            row["edge"],
            signed(row["effect"]),
            _nats(row["low"], row["high"]),
            signed(row["needed"]),
            format_share(row["selected"]),
        ]
        for row in found.edges.to_dict("records")
    ]


def curve_rows(found: Circuit) -> list[list[str]]:
    """Return the cells of `CURVE_COLUMNS` for each number of kept edges; none if faithfulness is not defined."""
    if not found.is_defined:
        return []
    return [
        [
            f"{row['kept']:,}",
            f"{100 * row['share']:.2g}%" if row["share"] < 1 else "100%",
            _share(row["faithfulness"]),
            _ends(row["low"], row["high"], _share),
            f"{_share(row['random'])} ({_share(row['random_low'])} … {_share(row['random_high'])})",
        ]
        for row in found.curve.to_dict("records")
    ]


def group_rows(found: Circuit) -> list[list[str]]:
    """Return the cells of `GROUP_COLUMNS` for each group of edges."""
    return [
        [
            row["group"],
            signed(row["effect"]),
            _nats(row["low"], row["high"]),
            signed(row["control"]),
            _nats(row["difference_low"], row["difference_high"]),
        ]
        for row in found.groups.to_dict("records")
    ]


def notes(found: Circuit) -> list[str]:
    """Return notes that explain the tables' terms and numbers."""
    n_edges, n_mean = len(found.edges), min(found.n_located, MEAN_PROMPTS)
    lines = [
        "An edge, such as F0 → L4H1.k (label), is what a writer wrote to tokens of one role, as read by a head's "
        "query (q), keys (k) or values (v). F0 is the FFN of layer 0, L4H1 head 1 of layer 4. Labels are taken "
        "together, whether they equal the answer or not.",
        "Removing an edge replaces what the writer wrote by its mean over tokens of the same role in "
        f"{n_mean} prompts. Edges are ranked on {found.n_located} prompts and tested on {found.n_prompts} others with "
        f"{found.n_queries} queries, which the 95% intervals resample. The largest first-order effect of the other "
        f"{found.n_edges - n_edges:,} edges is {found.score('largest estimate left out')[0]:.3f} nats.",
        "Log-odds drop: the drop in the answer's log-odds against the other labels when the edge is removed. "
        f"Kept-only drop: the same in a model that keeps only the {n_edges} edges. "
        f"{selected_note(n_edges, found.n_edges, 'edge').capitalize()}, on the prompts that rank edges.",
        "Groups: edges from a third of the layers; embeddings are in the first third. Random heads: the drop "
        "when the same group is removed from random heads of the same layers.",
    ]
    if found.is_defined:
        lines.insert(
            3,
            "Faithfulness: the log-odds with only the first edges kept, on a scale from no edge (0%) to all (100%). "
            f"Random: {found.n_random} rankings with the same number of edges for each part, role and writer's layer.",
        )
    return lines


def terminal(found: Circuit) -> Group:
    """Return what `icl-lens circuit` prints."""
    edges = edge_rows(found)
    tables = {EDGE_COLUMNS: edges[:N_SHOWN], CURVE_COLUMNS: curve_rows(found), GROUP_COLUMNS: group_rows(found)}
    shown: list[RenderableType] = [Text(sentence, "bold") for sentence in found.sentences()]
    for columns, rows in tables.items():
        if rows:
            shown.append(full_table(columns, rows, left=() if columns is CURVE_COLUMNS else (0,)))
    more = [f"{len(edges) - N_SHOWN} more edges: --html, --json and --out have all."] if len(edges) > N_SHOWN else []
    return Group(*shown, Text(" ".join([*more, *notes(found)]), "dim"))


def page(found: Circuit) -> tuple[str, dict[str, Any]]:
    """Return the page: what the edges carry in words, as a graph, as a curve, and in tables."""
    from icl_lens.report import plots  # imports matplotlib

    curve, graph = curve_rows(found), plots.circuit(found)
    return "circuit.html.j2", {
        "title": f"circuit of {found.readers_in_words}",
        "found": found,
        "sentences": found.sentences(),
        "graph": _image(graph),
        "graph_width": round(125 * graph.get_figwidth()),  # names are about as large as the page's text
        "curve_figure": _image(plots.circuit_curve(found)) if curve else "",
        "edges": text_table(EDGE_COLUMNS, edge_rows(found)),
        "curve": text_table(CURVE_COLUMNS, curve, numbers=0),
        "groups": text_table(GROUP_COLUMNS, group_rows(found)),
        "notes": notes(found),
        **dict.fromkeys(("model", "text", "chosen", "behavior", "command"), ""),
    }


def _image(figure: "Figure") -> str:
    from icl_lens.report.notebook_figure import transparent_png

    return f"data:image/png;base64,{base64.b64encode(transparent_png(figure)).decode('ascii')}"


def _share(value: float) -> str:
    return f"{round(100 * value)}%".replace("-", "−") if value == value else "–"


def _nats(low: float, high: float) -> str:
    return _ends(low, high, signed)


def _ends(low: float, high: float, shown: Callable[[float], str]) -> str:
    return "–" if low != low else f"{shown(low)} … {shown(high)}"
