"""Finding 15: through which earlier components do located heads work, and do these edges alone carry the answer?

`il.locate_circuit` ranks every edge into the located heads (sender → query, keys or values, by role of the token) by
first-order effect on some prompts. On held-out prompts, only the first k edges are kept, all others replaced by means;
random rankings with as many edges of every part, role and sender's layer are the control. The paper's flow is a set of
groups of edges, each removed jointly, next to the same group into random heads of the same layers.
"""

import pandas as pd
from matplotlib.figure import Figure

import icl_lens as il
from experiments.framework.finding import Finding, Measure, Measured, Row, percent
from experiments.framework.plotting import COLORS, panels
from experiments.framework.study import Study, thin_out

N_PROMPTS, N_RANDOM = 40, 20
"""Least number of prompts of either half, and random rankings."""
SHARE = 0.01
RANDOM = "random edges of the same parts, roles and layers"
HEADS = "the same edges into random heads of the same layers"
NATS = "log-odds of the answer, nats"

CPR = Measure("cpr", "area under the share of the answer that the first edges keep", RANDOM, "CPR, 0–1")
KEPT = percent("kept", "kept by the first 1% of edges", RANDOM, "% of what all edges carry")
GROUPS = {
    "early → query": "lost without early layers in queries",
    "late → query": "lost without late layers in queries",
    "early → keys at the labels": "lost without early layers in keys at labels",
    "late → keys at the labels": "lost without late layers in keys at labels",
    "early → keys at demonstrations' texts": "lost without early layers in keys at texts",
    "late → keys at demonstrations' texts": "lost without late layers in keys at texts",
    "early → values at the labels": "lost without early layers in values at labels",
    "late → values at the labels": "lost without late layers in values at labels",
}
MEASURES = [CPR, KEPT, *(Measure(group, words, HEADS, NATS) for group, words in GROUPS.items())]


def measure(study: Study) -> Measured:
    """The circuit into the heads located by contrast: areas, the first 1% of edges, and groups of edges."""
    ranking, testing = (thin_out(half, N_PROMPTS) for half in study.halves())  # of all classes and labels
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
    return Measured(rows, circuit.to_frame("curve"))


def draw(details: pd.DataFrame) -> Figure:
    """Draw faithfulness by the share of edges kept, next to random rankings."""
    figure, parts = panels(details)
    for axes, part in parts:
        shares = 100 * part["share"]
        axes.fill_between(shares, 100 * part["random_low"], 100 * part["random_high"], color=COLORS[1], alpha=0.2, lw=0)
        axes.plot(shares, 100 * part["random"], "-", color=COLORS[1], lw=1, label="random edges (band: all rankings)")
        axes.fill_between(shares, 100 * part["low"], 100 * part["high"], color=COLORS[0], alpha=0.25, lw=0)
        axes.plot(shares, 100 * part["faithfulness"], "o-", ms=3, color=COLORS[0], label="first edges (band: 95%)")
        for level in (0, 100):
            axes.axhline(level, color="#bbbbbb", lw=0.8)
        axes.set_xscale("log")
        axes.set_ylim(-60, 160)
        axes.title.set_fontsize(7)
        axes.set_xlabel("edges kept, %")
    parts[0][0].legend(fontsize=6, frameon=False, loc="upper left")
    figure.supylabel("% of what all edges carry", fontsize=8)
    return figure


FINDING = Finding(
    id="circuit",
    short="the circuit into located heads",
    title="Through which earlier components do located heads work?",
    question="Do a few edges from earlier components into located heads carry the answer, more than random edges of "
    "the same kinds, and are they those of the paper's flow?",
    claim="Shallow layers merge features into label positions and the last position; deep heads compare the last "
    "position's query with keys at labels and copy the labels' values. The paper argues this from projections and does "
    "not remove edges.",
    covers="the hypothesis of section 5 and its figure",
    measures=MEASURES,
    measure=measure,
    look_for="Filled dots to the right of the hollow ones: the first edges carry more of the answer than random ones.",
    method="Every edge from an earlier head, FFN or embedding to a located head's query at the last position, or to "
    "its keys or values at tokens of one role. To remove an edge is to replace what the sender wrote there by its mean "
    "over other prompts' tokens of the same role, with norms recomputed; the head's output changes at the last "
    "position, and later components run as usual. Heads read the intact model's input without the removed edges. "
    "Faithfulness is (m − m(none)) / (m(all) − m(none)) of the mean log-odds m; CPR is the area under it over the "
    f"share of edges kept (MIB). At least {N_PROMPTS} prompts rank the edges, as many others test them.",
    caveats=(
        "Edges lead one step back from located heads: what a removal changes in one head does not reach another.",
        "CPR is near 1 for any ranking that soon keeps everything, so read it next to that of random rankings.",
        "Where the control of a group is below zero, random heads of these layers work against the answer.",
        "A model that copies the last label has no edges that carry the answer here: in balanced order, that label is "
        "as often false as true.",
        "Chosen after SmolLM2 and icl-mini had been looked at on 32 to 40 prompts: the further measure of 1% of the "
        "edges, and the groups. CPR was not.",
    ),
    draw=draw,
)
