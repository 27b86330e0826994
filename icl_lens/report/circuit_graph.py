"""Draw a circuit as a graph: layers upward, writers in one column per token role, readers on the
right.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from icl_lens.edits.edit import PARTS
from icl_lens.errors import check_at_least
from icl_lens.measures.circuit import Circuit
from icl_lens.models.head import is_ffn_name
from icl_lens.reading.writer_groups import layer_of
from icl_lens.report.notebook_figure import PAGE, NotebookFigure
from icl_lens.report.palette import BLUE, GRAY, ORANGE

# Titles of the columns from left to right, by role.
TITLES = {
    "text": "demonstrations'\ntexts",
    "label": "labels",
    "other": "other\ntokens",
    "query": "query",
    "last": "last\ntoken",
}
# Maximum number of writers of one role and layer, and of readers, side by side; further ones begin a new line.
WRITERS_PER_LINE, READERS_PER_LINE = 3, 6
# In inches: height of a line of nodes, height of titles and legend, minimum width of a node, width of layer names.
LINE_HEIGHT, FRAME_HEIGHT, MIN_NODE_WIDTH, LAYER_NAME_WIDTH = 0.42, 1.15, 0.42, 0.6
MIN_LINE_WIDTH, MAX_LINE_WIDTH = 0.8, 4.0
CURVATURES = (0.0, 0.05, -0.05, 0.1, -0.1, 0.15, -0.15, 0.2, -0.2)
"""Curvatures that an edge may have, the preferred one first."""
# In units of the drawing, where a node is one unit wide and a line of nodes one unit high:
HALF_SIZES = {2: (0.5, 0.22), 3: (0.16, 0.13)}
"""Half the width and height of a `Node` (a tuple of length 2) and of a `Port` (3)."""
PORTS_HEIGHT, NODE_HEIGHT, LINE_STEP, LAYER_HEIGHT = 0.65, 0.5, 1.3, 1.1
"""Height of a reader's ports, height of a node's center above its ports, and heights of further
lines and layers.
"""
READER_STEP = 1.4

Node = tuple[str, str]
"""A component, and the role of the tokens to which it writes."""
Port = tuple[str, str, str]
"""A head's query ("q"), keys ("k") or values ("v"), or what an FFN reads ("mlp_in"): its node and
the part.
"""


def circuit(circuit: Circuit, *, n: int = 30, width: float = PAGE) -> Figure:
    """Draw the first `n` edges of `il.locate_circuit` from writers on the left to readers on the
    right.

    Layers go upward, and writers are in the column of the role of the tokens to which they write.
    Each reader is in the last column, that of the tokens at which it acts: a head above its query
    (q), keys (k) and values (v), an FFN above its input (in). The width of an edge is the size of
    its effect. Removing a blue edge lowers the answer's log-odds, removing an orange one raises
    them, and the effect of a dashed one has a 95% interval that includes 0. Layers without a node
    are omitted. The figure is wider than
    `width` if names need it. Raise InputError if `n` is below 1.
    """
    check_at_least(1, n=n)
    edges = circuit.edges.head(n).to_dict("records")
    graph = nx.DiGraph()
    for row in edges:
        graph.add_edge(
            (row["writer"], row["role"]), (row["reader"], circuit.reader_at, row["part"]), **row
        )
    readers = sorted(
        {node[:2] for node in graph if len(node) == 3}, key=lambda node: (-layer_of(node[0]), node)
    )
    place, layers, columns, size = _place_nodes(graph, readers, circuit.reader_at)
    for reader in readers:
        x, y = place[reader]
        if is_ffn_name(reader[0]):
            place[*reader, "mlp_in"] = (x, y - 0.49)
            continue
        for number, part in enumerate(
            PARTS
        ):  # each lower than the one on its left, because edges come from the left
            place[*reader, part] = (x + 0.42 * (number - 1), y - 0.38 - 0.11 * number)

    width = max(width, LAYER_NAME_WIDTH + MIN_NODE_WIDTH * size[0])
    figure = NotebookFigure(
        figsize=(width, FRAME_HEIGHT + LINE_HEIGHT * size[1]), dpi=200, layout="constrained"
    )
    ax = figure.subplots()
    largest = max(abs(row["effect"]) for row in edges) or 1.0
    _draw_edges(graph, place, ax, largest, ((width - LAYER_NAME_WIDTH) / size[0], LINE_HEIGHT))
    _draw_nodes(graph, place, readers, ax)
    for left, right, role in columns:
        ax.text(
            (left + right) / 2, size[1] + 0.2, TITLES[role], ha="center", va="bottom", fontsize=7
        )
        if left:
            ax.axvline(left, color=GRAY, linewidth=0.4, alpha=0.5)
    names = ["embed-\ndings" if layer < 0 else f"layer {layer}" for layer in layers]
    ax.set_yticks(list(layers.values()), names, fontsize=7)
    ax.set_xlim(0, size[0])
    ax.set_ylim(0, size[1] + 1)
    ax.tick_params(left=False, labelleft=True)
    ax.spines[:].set_visible(False)
    figure.legend(
        handles=_legend(graph, largest),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=7,
    )
    return figure


def _place_nodes(
    graph: nx.DiGraph, readers: list[Node], reader_at: str
) -> tuple[
    dict[Node | Port, tuple[float, float]],
    dict[int, float],
    list[tuple[float, float, str]],
    tuple[float, float],
]:
    """Return where everything is, with (0, 0) at the bottom left.

    That is: the center of each node; the height at which each layer's name is; the left end, right
    end and role of each column; and the width and height of the drawing.
    """
    cells = _writers_by_role(graph, readers)
    n_lines = Counter[int]()  # by layer
    for by_layer in cells.values():
        for layer, nodes in by_layer.items():
            n_lines[layer] = max(n_lines[layer], -(-len(nodes) // WRITERS_PER_LINE))
    # Readers of the highest layer come first, so they are on the left, and edges pass above the
    # lower ones.
    slot_of = {reader: number % READERS_PER_LINE for number, reader in enumerate(readers)}
    line_of: dict[Node, int] = {}
    n_used = Counter[tuple[int, int]]()  # lines by layer and slot
    for reader, slot in slot_of.items():
        layer = layer_of(reader[0])
        line_of[reader] = n_used[layer, slot]
        n_used[layer, slot] += 1
        n_lines[layer] = max(n_lines[layer], n_used[layer, slot])
    bottom, name_heights, height = _layer_heights(n_lines, {layer_of(name) for name, _ in readers})

    place: dict[Node | Port, tuple[float, float]] = {}
    columns: list[tuple[float, float, str]] = []
    left = 0.0
    for role, title in sorted(
        TITLES.items(), key=lambda role_and_title: role_and_title[0] == reader_at
    ):
        by_layer = cells[role]
        if not by_layer and role != reader_at:
            continue
        most_nodes = max(map(len, by_layer.values()), default=0)
        width = min(WRITERS_PER_LINE, most_nodes) + 0.3
        if role != reader_at:
            width = max(width, 0.3 + 0.12 * max(map(len, title.split("\n"))))
        place |= _place_writers(by_layer, left + width / 2, bottom)
        right = left + width
        if role == reader_at:
            for reader, slot in slot_of.items():
                y = bottom[layer_of(reader[0])] + LINE_STEP * line_of[reader] + NODE_HEIGHT
                place[reader] = (right + READER_STEP * slot + 0.8, y)
            right += READER_STEP * min(len(readers), READERS_PER_LINE) + 0.2
        columns.append((left, right, role))
        left = right
    return place, name_heights, columns, (left, height - 0.1)


def _writers_by_role(
    graph: nx.DiGraph, readers: list[Node]
) -> defaultdict[str, defaultdict[int, list[Node]]]:
    """Return the writers by role and layer."""
    cells: defaultdict[str, defaultdict[int, list[Node]]]
    cells = defaultdict(lambda: defaultdict(list))
    for node in sorted(node for node in graph if len(node) == 2 and node not in readers):
        cells[node[1]][layer_of(node[0])].append(node)
    return cells


def _layer_heights(
    n_lines: Counter[int], reader_layers: set[int]
) -> tuple[dict[int, float], dict[int, float], float]:
    """Return where each layer's first line and its name are, and the height of all."""
    bottom: dict[int, float] = {}
    name_heights: dict[int, float] = {}
    height = 0.0
    for layer in sorted(n_lines):
        bottom[layer] = height + (PORTS_HEIGHT if layer in reader_layers else 0.0)
        further_lines = LINE_STEP * (n_lines[layer] - 1)
        name_heights[layer] = bottom[layer] + further_lines / 2 + NODE_HEIGHT
        height = bottom[layer] + further_lines + LAYER_HEIGHT
    return bottom, name_heights, height


def _place_writers(
    by_layer: Mapping[int, list[Node]], center: float, bottom: Mapping[int, float]
) -> dict[Node | Port, tuple[float, float]]:
    """Return where the writers of a column are, in lines around its center."""
    place: dict[Node | Port, tuple[float, float]] = {}
    for layer, nodes in by_layer.items():
        for number, node in enumerate(nodes):
            line, slot = divmod(number, WRITERS_PER_LINE)
            n_in_line = min(WRITERS_PER_LINE, len(nodes) - line * WRITERS_PER_LINE)
            x = center + slot - (n_in_line - 1) / 2
            place[node] = (x, bottom[layer] + LINE_STEP * line + NODE_HEIGHT)
    return place


def _draw_edges(
    graph: nx.DiGraph,
    place: dict[Node | Port, tuple[float, float]],
    ax: Axes,
    largest: float,
    unit: tuple[float, float],
) -> None:
    """Draw edges, the strongest first; `largest` is its effect, and `unit` the drawing's unit in
    inches.
    """
    start = {
        node: (x, y + 0.12 * (len(node) == 2)) for node, (x, y) in place.items()
    }  # the top of the writer
    for writer, port, row in sorted(
        graph.edges(data=True), key=lambda edge: -abs(edge[2]["effect"])
    ):
        uncertain = not (row["low"] > 0 or row["high"] < 0)  # also without an interval
        obstacles = []
        for node, center in place.items():
            if node not in (writer, port):
                obstacles.append((*center, *HALF_SIZES[len(node)]))
        n_bad_points = []
        for bend in CURVATURES:
            n_bad_points.append(_n_bad_points(start[writer], place[port], bend, obstacles, unit))
        curvature = CURVATURES[int(np.argmin(n_bad_points))]
        nx.draw_networkx_edges(
            graph,
            start,
            edgelist=[(writer, port)],
            ax=ax,
            width=MIN_LINE_WIDTH + (MAX_LINE_WIDTH - MIN_LINE_WIDTH) * abs(row["effect"]) / largest,
            edge_color=BLUE if row["effect"] >= 0 else ORANGE,
            style="dashed" if uncertain else "solid",
            alpha=0.65 if uncertain else 0.8,
            arrows=True,
            arrowstyle="-",
            connectionstyle=f"arc3,rad={curvature}",
            node_size=0,
        )


def _n_bad_points(
    start: tuple[float, float],
    end: tuple[float, float],
    curvature: float,
    other_nodes: list[tuple[float, float, float, float]],
    unit: tuple[float, float],
) -> int:
    """Return how many of 40 points on an edge lie on another node (x, y, half width, half height),
    or above or below both ends. The curve is that of matplotlib's "arc3".
    """
    a, b = np.array(start) * unit, np.array(end) * unit
    middle = (a + b) / 2 + curvature * np.array([b[1] - a[1], a[0] - b[0]])
    t = np.linspace(0, 1, 40)[:, None]
    points = ((1 - t) ** 2 * a + 2 * t * (1 - t) * middle + t**2 * b) / unit
    centers, half_sizes = np.split(np.array(other_nodes), 2, axis=1)
    is_covered = (np.abs(points[:, None] - centers) < half_sizes).all(-1).any(-1)
    low, high = sorted((start[1], end[1]))
    return int((is_covered | (points[:, 1] < low - 0.02) | (points[:, 1] > high + 0.02)).sum())


def _draw_nodes(
    graph: nx.DiGraph, place: dict[Node | Port, tuple[float, float]], readers: list[Node], ax: Axes
) -> None:
    box = {"facecolor": GRAY, "edgecolor": "none"}
    writers = [node for node in place if len(node) == 2 and node not in readers]
    ports = [node for node in place if len(node) == 3]
    for nodes, fontsize, weight, shape in (
        (writers, 6.5, 400, "round,pad=0.25"),
        (readers, 6.5, 700, "square,pad=0.3"),
        (ports, 6, 400, "circle,pad=0.1"),
    ):
        nx.draw_networkx_labels(
            graph,
            place,
            {node: _node_text(node) for node in nodes},
            ax=ax,
            font_size=fontsize,
            font_weight=weight,
            font_color="white",
            bbox=box | {"boxstyle": shape},
            clip_on=False,
        )


def _node_text(node: Node | Port) -> str:
    """Return what a node or a port shows."""
    if len(node) == 2:
        return node[0].replace("_", " ")
    return "in" if node[2] == "mlp_in" else node[2]


def _legend(graph: nx.DiGraph, largest: float) -> list[Line2D]:
    """Return what colors, lines and letters mean; `largest` is the strongest edge's effect."""
    letters = "q, k, v: read in the query, keys, values"
    if any(len(node) == 3 and node[2] == "mlp_in" for node in graph):
        letters += "; in: by an FFN"

    def line(label: str, color: str = BLUE, width: float = 1.5, **style: Any) -> Line2D:
        return Line2D([], [], color=color, linewidth=width, label=label, **style)

    return [
        line("removing it lowers the answer's log-odds"),
        line("removing it raises them", ORANGE),
        line("95% interval includes 0", linestyle="dashed", alpha=0.65),
        line(f"change of {largest:.2g} nats", width=MAX_LINE_WIDTH),
        line(letters, linestyle="none"),
        line("F0: FFN of layer 0; L1H2: head 2 of layer 1", linestyle="none"),
    ]


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG."""
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    return written.getvalue()
