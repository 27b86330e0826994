"""Which earlier components do located heads depend on, and do these edges alone carry the answer?

`FINDING.method` says how it is measured.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import icl_lens as il
from experiments.framework.finding import Finding, Measure, Measured, Row, percent
from experiments.framework.plotting import COLORS, cell_rows, legend_below
from experiments.framework.sentences import each, real_rows
from experiments.framework.study import Study, thin_out
from icl_lens.locate.edge_space import THIRDS

N_PROMPTS, N_RANDOM = 40, 20
"""Minimum number of prompts of each half, and number of random rankings."""
SHARE = 0.01
"""The share of edges kept in the measure "kept"."""
RANDOM = "random edges of the same parts, roles and layers"
HEADS = "edges of the same kind into random heads of the same layers"
NATS = "log-odds of the answer, nats"

CPR = Measure("cpr", "share of the answer that the first k edges keep, averaged over k", RANDOM, "CPR, 0–1")
KEPT = percent("kept", "kept by the first 1% of edges", RANDOM, "% of what all edges carry")
INPUTS = {
    "query": "queries",
    "keys at the labels": "keys at labels",
    "keys at demonstrations' texts": "keys at texts",
    "values at the labels": "values at labels",
}
GROUPS = {
    f"{third} third → {end}": f"lost without edges from the {third} third of the layers to {words}"
    for end, words in INPUTS.items()
    for third in THIRDS
}
MEASURES = [CPR, KEPT, *(Measure(group, words, HEADS, NATS) for group, words in GROUPS.items())]


def measure(study: Study) -> Measured:
    """Measure CPR, what the first 1% of edges keep, and groups of edges, for heads located by contrast."""
    ranking, testing = (thin_out(half, N_PROMPTS) for half in study.halves())  # all classes and labels
    circuit = il.locate_circuit(study.model, ranking, testing, study.located, n_random=N_RANDOM)
    sizes = {
        "ranking": study.ranking,
        "n_prompts": circuit.n_prompts,
        "n_clusters": circuit.n_queries,
        "n_heads": len(study.located),
    }
    rows: list[Row] = []
    if circuit.is_defined:
        _, low, high = circuit.score("cpr, difference")
        rows.append(Row("cpr", circuit.score("cpr")[0], circuit.score("cpr, random")[0], low, high, **sizes))
        curve = circuit.to_frame("curve")
        near = curve.iloc[int((curve["share"] - SHARE).abs().argmin())]
        ends = float(near["difference_low"]), float(near["difference_high"])
        rows.append(Row("kept", float(near["faithfulness"]), float(near["random"]), *ends, **sizes))
    else:
        reason = "the edges carry nothing that is distinguishable from zero"
        rows += [Row("cpr", note=reason, **sizes), Row("kept", note=reason, **sizes)]
    groups = {row["group"]: row for row in circuit.to_frame("groups").to_dict("records")}
    for name in GROUPS:
        if (row := groups.get(name)) is None:
            rows.append(Row(name, note="located heads have no such edges", **sizes))
        else:
            ends = row["difference_low"], row["difference_high"]
            rows.append(Row(name, row["effect"], row["control"], *ends, **sizes))
    tables = [circuit.to_frame(name).assign(table=name) for name in ("curve", "layers")]
    return Measured(rows, pd.concat(tables, ignore_index=True))


def draw(details: pd.DataFrame) -> Figure:
    """Draw what edges from each layer carry, and faithfulness by the share of edges kept: a row per model and task."""
    figure, cells = cell_rows(details, 2, width_ratios=(3, 2))
    for (left, right), title, part in cells:
        layers = part[part["table"] == "layers"]
        for color, (end, words) in zip(COLORS, INPUTS.items(), strict=False):
            line = layers[layers["input"] == end]
            left.fill_between(line["layer"], line["low"], line["high"], color=color, alpha=0.2, lw=0)
            left.plot(line["layer"], line["effect"], "o-", ms=2.5, lw=1, color=color, label=words)
        left.axhline(0, color="#bbbbbb", lw=0.8)
        left.set_title(title, fontsize=8)
        left.set_ylabel("log-odds lost, nats", fontsize=8)
        curve = part[part["table"] == "curve"]
        shares = 100 * curve["share"]
        ends = 100 * curve["random_low"], 100 * curve["random_high"]
        right.fill_between(shares, *ends, color="#999999", alpha=0.25, lw=0)
        right.plot(shares, 100 * curve["random"], "-", color="#777777", lw=1, label="random edges")
        right.plot(shares, 100 * curve["faithfulness"], "s-", ms=3, color=COLORS[5], label="first edges")
        for level in (0, 100):
            right.axhline(level, color="#bbbbbb", lw=0.8)
        right.set_xscale("log")
        right.set_ylim(-60, 160)
        right.set_title("% of what all edges carry", fontsize=8)
    (left, right), _, _ = cells[-1]
    left.set_xlabel("layer that wrote (−1: embeddings)")
    right.set_xlabel("edges kept, %")
    legend_below(figure, left, right, columns=3)
    return figure


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    kept = each(cells, "kept", "{q}% (random edges: {c}%)")
    parts = []
    for end, words in INPUTS.items():
        totals = [
            (third, sum(row.quantity for _, row in real_rows(cells, f"{third} third → {end}"))) for third in THIRDS
        ]
        if any(total for _, total in totals):
            parts.append(f"{words} most from the {max(totals, key=lambda pair: pair[1])[0]} third")
    read = f" Of what the heads read, {', '.join(parts)} of the layers." if parts else ""
    return f"Of what all edges carry, 1% of them carries {kept}.{read}"


FINDING = Finding(
    id="circuit",
    title="Which earlier components do located heads depend on?",
    question="An edge is what an earlier component wrote, as read by a located head. Do the strongest edges carry more "
    "of the answer than random edges of the same kinds, and are they those of the information flow that the paper "
    "describes? CPR is the share of the answer that the first k edges of the ranking keep, averaged over k, from none "
    "to all edges.",
    answer=answer,
    claim="Shallow layers merge features into label positions and the last position; deep heads compare the last "
    "position's query with keys at labels and copy the labels' values. The paper argues this from projections and does "
    "not remove edges.",
    covers="the hypothesis of section 5 and its figure",
    measures=MEASURES,
    measure=measure,
    look_for="Left: log-odds lost when what one layer wrote is removed from what the located heads read there "
    "(bands: 95%). Right: faithfulness when only the first edges are kept, and random edges instead.",
    method="An edge leads from an earlier head, FFN or embedding to a located head's query at the last position, or to "
    "its keys or values at tokens of one role. To remove an edge is to replace what the writer wrote there by its mean "
    "over other prompts' tokens of the same role, with norms recomputed; the head's output changes at the last "
    "position, and later components run as usual. Each head is rebuilt from the intact model's activations without the "
    "removed edges. Faithfulness is (m − m(none)) / (m(all) − m(none)), where m is the mean log-odds; CPR is the area "
    "under faithfulness over the share of edges kept (MIB, arXiv 2504.13151). Embeddings count to the first "
    f"third of the layers. At least {N_PROMPTS} prompts rank the edges; the same number of other prompts test "
    "them.",
    caveats=(
        "Only edges that end in located heads are removed. If a removal changes what one located head writes, the "
        "others do not read the change.",
        "CPR is close to 1 for any ranking that keeps the answer early, because large shares make up most of the area. "
        "Compare it with that of random rankings.",
        "Where the control of a group is below zero, random heads of these layers work against the answer.",
        "A model that copies the last label has no edges that carry the answer here: in balanced order, the last label "
        "is false as often as true.",
        "We chose the measure of 1% of the edges, and the groups, after looking at SmolLM2 and icl-mini on 32 to 40 "
        "prompts. We chose CPR before.",
    ),
    draw=draw,
)
