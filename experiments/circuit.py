"""Which earlier components do located heads depend on, and do the strongest edges alone carry the
answer?

An edge is what an earlier head, FFN or embedding wrote, as read by a located head: by its query at
the last position, or by its keys or values at tokens of one role. To remove an edge is to replace
what was written by its mean over other prompts' tokens of the same role (`il.locate_circuit`).

1. Edges into the located heads are ranked on prompts of the locating half, by their first-order
   effect.
2. On prompts of the testing half, only the first edges are kept. Faithfulness is the share of the
   answer's log-odds that they keep, and CPR its mean over all numbers of edges, from none to all
   (MIB, arXiv 2504.13151). The control are 20 random rankings with as many edges of the same kinds.
3. Edges from each third of the layers to the heads' queries, keys or values are removed jointly.
   The control are the same edges into random heads of the same layers.

    python experiments/circuit.py --model icl-mini --task animal-country -n 200

The paper's hypothesis (section 5) and its figure.
"""

import pandas as pd
from common import COLORS, Study, Table, from_command_line, grid, legend_below, thinned
from matplotlib.figure import Figure

import icl_lens as il

N_PROMPTS, N_RANDOM = 40, 20
"""Prompts of each half (to twice as many, or all of a half that has fewer), and number of random
rankings."""
SHARE = 0.01
"""The share of all edges that the measure "kept by the first 1%" keeps."""
RANDOM_EDGES = "random edges of the same parts, roles and layers"
RANDOM_HEADS = "edges of the same kind into random heads of the same layers"
INPUTS = ("query", "keys at the labels", "keys at demonstrations' texts", "values at the labels")


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the first edges keep, and what is lost without groups of edges."""
    study = Study.from_command_line(
        "circuit", "Which earlier components do located heads depend on?", arguments
    )
    located = study.located_heads("contrast")
    ranking, testing = thinned(study.locating, N_PROMPTS), thinned(study.testing, N_PROMPTS)
    circuit = il.locate_circuit(
        study.model, ranking, testing, located, n_random=N_RANDOM, run=study.run("circuit")
    )
    table = Table(study)
    add_kept(table, circuit)
    add_groups(table, circuit)
    return table.write(draw(table.to_frame()))


def add_kept(table: Table, circuit: il.results.Circuit) -> None:
    """Add CPR, and faithfulness by the number of edges kept, next to random edges."""
    sizes = {"prompts": circuit.n_prompts, "queries": circuit.n_queries}
    if not circuit.is_defined:
        table.add_missing("CPR", "the edges carry nothing that is distinguishable from zero")
        return
    _, low, high = circuit.score("cpr, difference")
    numbers = {"quantity": circuit.score("cpr")[0], "control": circuit.score("cpr, random")[0]}
    heads = " ".join(circuit.readers)
    table.add_row(
        "CPR", **numbers, low=low, high=high, unit="0–1", versus=RANDOM_EDGES, **sizes, note=heads
    )
    curve = circuit.to_frame("curve")
    one_percent = (curve["share"] - SHARE).abs().argmin()
    for place, row in enumerate(curve.to_dict("records")):
        names = ["kept by the first edges"]
        if place == one_percent:
            names.append("kept by the first 1% of edges")
        numbers = {"quantity": 100 * row["faithfulness"], "control": 100 * row["random"]}
        ends = {"low": 100 * row["difference_low"], "high": 100 * row["difference_high"]}
        about = {"at": f"{100 * row['share']:.4g}", "unit": "%", "versus": RANDOM_EDGES}
        for name in names:
            table.add_row(name, **numbers, **ends, **about, **sizes)


def add_groups(table: Table, circuit: il.results.Circuit) -> None:
    """Add the log-odds lost without edges from each third of the layers, and from each single
    layer."""
    sizes = {"prompts": circuit.n_prompts, "queries": circuit.n_queries}
    for row in circuit.to_frame("groups").to_dict("records"):
        ends = {"low": row["difference_low"], "high": row["difference_high"]}
        numbers = {"quantity": row["effect"], "control": row["control"]}
        about = {"unit": "nats", "versus": RANDOM_HEADS}
        table.add_row(f"lost without {row['group']}", **numbers, **ends, **about, **sizes)
    for row in circuit.to_frame("layers").to_dict("records"):
        numbers = {"quantity": row["effect"], "control": 0.0}
        ends = {"low": row["low"], "high": row["high"]}
        about = {"at": row["layer"], "unit": "nats", "versus": "zero"}
        table.add_row(f"one layer → {row['input']}", **numbers, **ends, **about, **sizes)


def draw(table: pd.DataFrame) -> Figure:
    """Draw what edges from each layer carry, and what the first edges keep: a row of panels per
    model and task."""
    figure, rows_of_panels = grid(table, 2, width_ratios=(3, 2))
    for (left, right), title, rows in rows_of_panels:
        left.set_title(title, fontsize=8)
        for color, name in zip(COLORS, INPUTS, strict=False):
            line = rows.query("measure == @measure", local_dict={"measure": f"one layer → {name}"})
            layers = line["at"].astype(float)
            left.fill_between(layers, line["low"], line["high"], color=color, alpha=0.2, lw=0)
            left.plot(layers, line["quantity"], "o-", ms=2.5, lw=1, color=color, label=name)
        left.axhline(0, color="#bbbbbb", lw=0.8)
        left.set_ylabel("log-odds lost, nats", fontsize=8)
        curve = rows.query("measure == 'kept by the first edges'")
        right.set_title("% of what all edges carry", fontsize=8)
        if curve.empty:
            middle = {"ha": "center", "va": "center", "fontsize": 8}
            right.text(
                0.5,
                0.5,
                "all edges carry nothing\nthat differs from zero",
                transform=right.transAxes,
                **middle,
            )
            right.set_xticks([])
            right.set_yticks([])
            continue
        shares = curve["at"].astype(float)
        right.plot(shares, curve["control"], "-", color="#777777", lw=1, label="random edges")
        right.plot(shares, curve["quantity"], "s-", ms=3, color=COLORS[5], label="first edges")
        for level in (0, 100):
            right.axhline(level, color="#bbbbbb", lw=0.8)
        right.set_xscale("log")
        right.set_ylim(-60, 160)
    (left, right), _, _ = rows_of_panels[-1]
    left.set_xlabel("layer that wrote (−1: embeddings)")
    right.set_xlabel("edges kept, %")
    legend_below(figure, left, right)
    return figure


if __name__ == "__main__":
    from_command_line(main)
