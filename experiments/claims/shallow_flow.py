"""Open question 1: attention from labels back to their texts blocked in windows of layers; who misses it?"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from experiments.claims.blocked import Case, blocked
from experiments.lab.drawing import by_name, legend_below, means, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, mean_by, stack, where
from experiments.lab.intervals import clusters_of, resample
from experiments.lab.reductions import head_increases
from experiments.lab.study import RANKINGS, Need, Study
from experiments.lab.verdict import Verdict, all_of, cannot_tell, judge, verdict
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

LEAST = 0.1
"""Of the attention there was: the smallest change worth the claim."""


@dataclass(frozen=True)
class ShallowFlowConfig:
    """Heads located for each label (at most one in eight), and layers in a window, as a share of all."""

    heads: int = 6
    window: float = 0.25


def windows_of(n_layers: int, size: int) -> list[tuple[int, int]]:
    """Windows of layers, first and first beyond, each wholly in one half, so that shallow and deep ones share no layer.

    The middle one of an odd number of layers is in none.
    """
    half = n_layers // 2
    size = max(1, min(size, half))
    return [(start, start + size) for first in (0, n_layers - half) for start in range(first, first + half - size + 1)]


def table(study: Study, config: ShallowFlowConfig) -> pd.DataFrame:
    """window ("none" or "first–last"), edges ("own" | "random"), start, deep, half, prompt, fall (nats), correct, gap.

    `half`: "choose" or "test"; windows are compared on the one and judged on the other. `edges`: from labels to their
    own texts, or as many others. `fall`: what the answer's log-odds lose. `gap`: attention (0–1) of located heads on
    true minus on false labels.
    """
    view = study.view
    located = {one: located_for_both(study.ranked_by(one), study.few(config.heads)) for one in RANKINGS}
    # Both rankings read one pass, which keeps what either looks at.
    every = sorted({head for some in located.values() for head in some})
    places = [every.index(head) for head in located[study.ranking]]
    windows = windows_of(view.n_layers, round(config.window * view.n_layers))
    cases: list[Case] = [(None, "own"), *((window, edges) for window in windows for edges in ("own", "random"))]
    rows = torch.cat(study.halves)
    found = study.once(("attention blocked", config), lambda: blocked(study, rows, cases, every))
    log_odds = found["odds"].double().numpy()
    frames = []
    for i, (window, kind) in enumerate(cases):
        columns = {
            "prompt": rows.tolist(),
            "half": ["choose"] * len(study.halves[0]) + ["test"] * len(study.halves[1]),
            "fall": log_odds[:, 0] - log_odds[:, i],
            "correct": found["correct"][:, i].numpy(),
            "gap": found["gap"][:, i, places].mean(1).numpy(),
        }
        name = "none" if window is None else f"{window[0]}–{window[1] - 1}"
        start = -1 if window is None else window[0]
        deep = window is not None and window[0] >= view.n_layers - view.n_layers // 2
        frames.append(pd.DataFrame(columns).assign(window=name, edges=kind, start=start, deep=deep))
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """Blocking costs the answer in the worst shallow window, more than in any deep one and than random edges.

    And located heads lose a tenth of their attention on true minus false labels by it.
    """
    blocked = table.loc[(table["start"] >= 0) & (table["edges"] == "own")]
    shallow, deep = where(blocked, deep=False), where(blocked, deep=True)
    if not len(shallow) or not len(deep):
        return cannot_tell("a model of one layer has no shallow and deep layers to compare", unit="nats")
    worst = [_worst_window(where(part, half="choose")) for part in (shallow, deep)]
    test = where(table, half="test")
    first, second = (by_prompt(test, "fall", window=window, edges="own") for window in worst)
    other = by_prompt(test, "fall", window=worst[0], edges="random")
    drawn = resample(clusters_of(first.index))
    gaps = [drawn.mean(by_prompt(test, "gap", window=name, edges="own").to_numpy()) for name in ("none", worst[0])]
    sees = verdict(
        drawn.estimate(gaps[0]),
        least=0.0,
        unit="of attention",
        what="located heads' attention on true minus false labels",
    )
    return all_of(
        judge(first, least=0.0, unit="nats", what=f"fall with layers {worst[0]} blocked"),
        judge(first - second, least=0.0, unit="nats", what=f"that fall minus the one with layers {worst[1]} blocked"),
        judge(
            first - other,
            least=0.0,
            unit="nats",
            what=f"that fall minus the one with random edges in layers {worst[0]} blocked",
        ),
        sees,
        verdict(
            drawn.estimate(1 - gaps[1] / gaps[0]),
            least=LEAST,
            unit="of what it was",
            what="what that attention loses",
        ),
    )


def _worst_window(table: pd.DataFrame) -> str:
    """The window whose mean fall is largest; of equal ones the first by name."""
    windows = sorted(set(table["window"]))
    return windows[int(np.argmax(mean_by(table, "fall", "window")))]


def figure(table: pd.DataFrame) -> Figure:
    """Fall of the answer, and attention of located heads on true minus false labels, by window; 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    axes = drawn.subplots(1, 2)
    table = where(table, half="test")
    names = [name for name in dict.fromkeys(table["window"]) if name != "none"]
    at = np.arange(len(names))
    titles = ("Fall of the answer's\nlog-odds (nats)", "Located heads' attention,\ntrue minus false labels")
    for ax, value, hue, title in zip(axes, ("fall", "gap"), (BLUE, ORANGE), titles, strict=True):
        for kind, style, shade, label in (("own", "o-", hue, "own texts"), ("random", "s--", "0.5", "random edges")):
            samples = by_name(table, value, names, column="window", edges=kind)
            ax.plot(at, means(samples), style, color=shade, markersize=3.5, linewidth=1, label=f"blocked: {label}")
            reach = whiskers(samples)
            ax.errorbar(at, means(samples), yerr=reach, fmt="none", ecolor=shade, elinewidth=0.8, capsize=1.5)
        whole = by_prompt(table, value, window="none").mean()
        ax.axhline(whole, color="0.3", linewidth=0.8, linestyle=":", label="nothing blocked")
        # All of it in sight, zero and the unblocked model included.
        low, high = ax.get_ylim()
        low, high = min(low, 0.0, whole), max(high, 0.0, whole)
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        ax.set_xlim(-0.5, len(names) - 0.5)
        step = max(1, len(names) // 8)
        ax.set_xticks(at[::step], names[::step])
        ax.set(xlabel="Layers in which labels cannot see their texts", ylabel=title)
    legend_below(drawn, *axes)
    return drawn


EXPERIMENT = Experiment(
    id="shallow-flow",
    title="Shallow layers bring texts to labels",
    source="Abstract, section 1 (a few layers: ours)",
    claim=(
        "Labels gather their texts' features in a few shallow layers: cut there, the answer loses most, and located "
        "heads tell labels apart a tenth less."
    ),
    criterion=(
        "Blocking attention from labels to their texts costs the answer most in a window of the shallower half, more "
        "than in "
        "any window of the deeper half, which share no layer, and more than blocking as many random edges; and then "
        f"located heads' attention on true minus false labels falls by {LEAST:.0%} of what it was. Windows are "
        "chosen on one "
        "half of the prompts."
    ),
    departs=(
        "The paper takes this step from Wang et al. (2023), who measured it by saliency, and sees it in the words of "
        "label keys. Here attention from labels to their texts is cut in windows of layers, which neither does this "
        "way. A window is a few layers, for which others may stand in: that labels gather anything in the shallower "
        "half at all is what anchors asks, which cuts all of it."
    ),
    paper=None,
    config=ShallowFlowConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
