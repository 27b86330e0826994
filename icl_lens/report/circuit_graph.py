"""A circuit as a graph: senders by role of the token and layer, on the left of the heads that read them."""

import io
from collections import Counter, defaultdict
from typing import Any

import networkx as nx
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from icl_lens.attribution.writer_groups import layer_of
from icl_lens.errors import InputError
from icl_lens.interventions.receiver import PARTS
from icl_lens.locate.circuit import Circuit
from icl_lens.report.notebook_figure import PAGE, NotebookFigure
from icl_lens.report.palette import BLUE, GRAY, ORANGE

# Columns from left to right, by role.
TITLES = {
    "text": "demonstrations'\ntexts",
    "label": "labels",
    "other": "other\ntokens",
    "query": "query",
    "last": "last\ntoken",
}
# Nodes of one role and layer next to each other, before a second line begins; the same for heads that are read into.
PER_LINE, HEADS_PER_LINE = 3, 6
LINE, AROUND = 0.42, 1.15
"""Heights of a line of nodes, and of the titles and the legend, inches."""
NARROWEST, MARGIN = 0.42, 0.6
"""Smallest width of a node, and the width of the layers' names, inches."""
THINNEST, THICKEST = 0.8, 4.0
BENDS = (0.0, 0.05, -0.05, 0.1, -0.1, 0.15, -0.15, 0.2, -0.2)
"""Curvatures of an edge, from the preferred one."""
HALF_SIZES = {2: (0.5, 0.22), 3: (0.16, 0.13)}
"""Half the width and height of a component's name and of a part's, by the length of its node."""

Node = tuple[str, str]
"""A component and the role of the tokens it writes to; a head that is read into writes to the last token."""


def circuit(circuit: Circuit, *, n: int = 30, width: float = PAGE) -> Figure:
    """Draw the first `n` edges of `il.locate_circuit`, layers upward, senders by the role of the tokens they write to.

    Each head that is read into is at the last token, above its query (q), keys (k) and values (v). The width of an edge
    is the size of its effect; removing a blue one lowers the answer's log-odds, removing an orange one raises them;
    dashed edges have a 95% interval that includes 0. Layers without a node are omitted. The figure is wider than
    `width` if names need it. Raise InputError if `n` is below 1.
    """
    if n < 1:
        raise InputError(f"n must be at least 1, got {n}")
    edges = circuit.edges.head(n).to_dict("records")
    graph = nx.DiGraph()
    for row in edges:
        reader: Node = (row["receiver"], "last")
        port = (*reader, row["part"])
        graph.add_edge((row["sender"], row["role"]), port, **row)
    readers = sorted({node[:2] for node in graph if len(node) == 3}, key=lambda node: (-layer_of(node[0]), node))
    place, layers, columns, size = _places(graph, readers)
    for reader in readers:
        for number, part in enumerate(PARTS):
            x, y = place[reader]
            place[*reader, part] = (x + 0.42 * (number - 1), y - 0.38 - 0.11 * number)  # edges come from the left

    width = max(width, MARGIN + NARROWEST * size[0])
    figure = NotebookFigure(figsize=(width, AROUND + LINE * size[1]), dpi=200, layout="constrained")
    ax = figure.subplots()
    reach = max(abs(row["effect"]) for row in edges) or 1.0
    _draw_edges(graph, place, ax, reach, ((width - MARGIN) / size[0], LINE))
    _draw_nodes(graph, place, readers, ax)
    for left, right, role in columns:
        ax.text((left + right) / 2, size[1] + 0.2, TITLES[role], ha="center", va="bottom", fontsize=7)
        if left:
            ax.axvline(left, color=GRAY, linewidth=0.4, alpha=0.5)
    names = ["embed-\ndings" if layer < 0 else f"layer {layer}" for layer in layers]
    ax.set_yticks(list(layers.values()), names, fontsize=7)
    ax.set_xlim(0, size[0])
    ax.set_ylim(0, size[1] + 1)
    ax.tick_params(left=False, labelleft=True)
    ax.spines[:].set_visible(False)
    figure.legend(handles=_legend(reach), loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


def _places(
    graph: nx.DiGraph, readers: list[Node]
) -> tuple[dict[Any, tuple[float, float]], dict[int, float], list[tuple[float, float, str]], tuple[float, float]]:
    """Return the place of each node, the height of each layer, the ends of each column, and the size of all.

    A node is one unit wide and a line of nodes one unit high.
    """
    senders: list[Node] = [node for node in graph if len(node) == 2 and node not in readers]
    cells: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for node in sorted(senders):
        cells[node[1], layer_of(node[0])].append(node)
    lines = Counter[int]()
    for (_, layer), nodes in cells.items():
        lines[layer] = max(lines[layer], -(-len(nodes) // PER_LINE))
    # Heads of one layer are next to each other; those of the highest layer are on the left, where edges from the left
    # reach them above the others.
    slots = {reader: number % HEADS_PER_LINE for number, reader in enumerate(readers)}
    line_of = {}
    used = Counter[tuple[int, int]]()
    for reader, slot in slots.items():
        layer = layer_of(reader[0])
        line_of[reader] = used[layer, slot]
        used[layer, slot] += 1
        lines[layer] = max(lines[layer], used[layer, slot])
    bottom, layers, height = {}, {}, 0.0
    for layer in sorted(lines):
        bottom[layer] = height + (0.65 if any(layer_of(name) == layer for name, _ in readers) else 0.0)  # q, k, v
        layers[layer] = bottom[layer] + 0.65 * (lines[layer] - 1) + 0.5
        height = bottom[layer] + 1.3 * (lines[layer] - 1) + 1.1
    place: dict[Any, tuple[float, float]] = {}
    columns: list[tuple[float, float, str]] = []
    left = 0.0
    for role in TITLES:
        found = {layer: nodes for (of, layer), nodes in cells.items() if of == role}
        if not found and role != "last":
            continue
        wide = max([min(PER_LINE, len(nodes)) for nodes in found.values()], default=0) + 0.3
        if role != "last":
            wide = max(wide, 0.3 + 0.12 * max(map(len, TITLES[role].split("\n"))))
        for layer, nodes in found.items():
            for number, node in enumerate(nodes):
                line, at = divmod(number, PER_LINE)
                in_line = min(PER_LINE, len(nodes) - line * PER_LINE)
                place[node] = (left + wide / 2 + at - (in_line - 1) / 2, bottom[layer] + 1.3 * line + 0.5)
        right = left + wide
        if role == "last":
            for reader, slot in slots.items():
                place[reader] = (right + 1.4 * slot + 0.8, bottom[layer_of(reader[0])] + 1.3 * line_of[reader] + 0.5)
            right += 1.4 * min(len(readers), HEADS_PER_LINE) + 0.2
        columns.append((left, right, role))
        left = right
    return place, layers, columns, (left, height - 0.1)


def _draw_edges(
    graph: nx.DiGraph, place: dict[Any, tuple[float, float]], ax: Axes, reach: float, unit: tuple[float, float]
) -> None:
    """Draw edges from the top of the sender, the strongest first; `unit` is the size of a place's unit, inches."""
    start = {node: (x, y + 0.12 * (len(node) == 2)) for node, (x, y) in place.items()}
    for sender, port, row in sorted(graph.edges(data=True), key=lambda edge: -abs(edge[2]["effect"])):
        uncertain = row["low"] <= 0 <= row["high"]
        others = [(*xy, *HALF_SIZES[len(node)]) for node, xy in place.items() if node not in (sender, port)]
        bend = min(BENDS, key=lambda bend: _n_crossed(start[sender], place[port], bend, others, unit))
        nx.draw_networkx_edges(
            graph,
            start,
            edgelist=[(sender, port)],
            ax=ax,
            width=THINNEST + (THICKEST - THINNEST) * abs(row["effect"]) / reach,
            edge_color=BLUE if row["effect"] >= 0 else ORANGE,
            style="dashed" if uncertain else "solid",
            alpha=0.65 if uncertain else 0.8,
            arrows=True,
            arrowstyle="-",
            connectionstyle=f"arc3,rad={bend}",
            node_size=0,
        )


def _n_crossed(
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float,
    nodes: list[tuple[float, float, float, float]],
    unit: tuple[float, float],
) -> int:
    """Return how many points of an edge, bent as by "arc3" of matplotlib, nodes cover or lie outside of its layers."""
    a, b = np.array(start) * unit, np.array(end) * unit
    middle = (a + b) / 2 + bend * np.array([b[1] - a[1], a[0] - b[0]])
    t = np.linspace(0, 1, 40)[:, None]
    points = ((1 - t) ** 2 * a + 2 * t * (1 - t) * middle + t**2 * b) / unit
    places, half_sizes = np.split(np.array(nodes), 2, axis=1)
    covered = (np.abs(points[:, None] - places) < half_sizes).all(-1).any(-1)
    low, high = sorted((start[1], end[1]))
    return int((covered | (points[:, 1] < low - 0.02) | (points[:, 1] > high + 0.02)).sum())


def _draw_nodes(graph: nx.DiGraph, place: dict[Any, tuple[float, float]], readers: list[Node], ax: Axes) -> None:
    box = {"facecolor": GRAY, "edgecolor": "none"}
    names = {node: node[0].replace("_", " ") for node in place if len(node) == 2}
    ports = {node: node[2] for node in place if len(node) == 3}
    for labels, fontsize, weight, shape in (
        ({node: name for node, name in names.items() if node not in readers}, 6.5, 400, "round,pad=0.25"),
        ({node: names[node] for node in readers}, 6.5, 700, "square,pad=0.3"),
        (ports, 5.5, 400, "circle,pad=0.12"),
    ):
        nx.draw_networkx_labels(
            graph,
            place,
            labels,
            ax=ax,
            font_size=fontsize,
            font_weight=weight,
            font_color="white",
            bbox=box | {"boxstyle": shape},
            clip_on=False,
        )


def _legend(reach: float) -> list[Line2D]:
    def line(label: str, color: str = BLUE, width: float = 1.5, **style: Any) -> Line2D:
        return Line2D([], [], color=color, linewidth=width, label=label, **style)

    return [
        line("removing it lowers the answer's log-odds"),
        line("removing it raises them", ORANGE),
        line("95% interval includes 0", linestyle="dashed", alpha=0.65),
        line(f"change of {reach:.2g} nats", width=THICKEST),
        line("q, k, v: read in the query, keys, values", linestyle="none"),
        line("F0: FFN of layer 0; L1H2: head 2 of layer 1", linestyle="none"),
    ]


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG, the same bytes for the same figure."""
    written = io.BytesIO()
    with rc_context({"svg.hashsalt": "icl_lens"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
