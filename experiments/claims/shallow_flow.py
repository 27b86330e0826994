"""Open question 1: attention from labels back to their texts blocked in windows of layers; who misses it?"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import legend_below, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, mean_by, stack, where
from experiments.lab.passes import Tensors
from experiments.lab.reductions import head_increases, is_true_label
from experiments.lab.study import Need, Study
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE


@dataclass(frozen=True)
class ShallowFlowConfig:
    """Heads located for each label (at most one in eight), and layers in a window, as a share of all."""

    heads: int = 6
    window: float = 0.25


def label_to_text(batch: il.PromptBatch) -> Bool[Tensor, "batch query key"]:
    """Edges from each demonstration's label, and the tokens between, back to its text's tokens."""
    rows, width = batch.tokens.shape
    place = torch.arange(width, device=batch.tokens.device)
    edges = torch.zeros(rows, width, width, dtype=torch.bool, device=place.device)
    for demo in range(batch.label_positions.shape[1]):
        start, stop = batch.text_ranges[:, demo, :1], batch.text_ranges[:, demo, 1:]
        is_text = (place >= start) & (place < stop)
        after = (place >= stop) & (place <= batch.label_positions[:, demo, None]) & (start >= 0)
        edges |= after[:, :, None] & is_text[:, None, :]
    return edges


def table(study: Study, config: ShallowFlowConfig) -> pd.DataFrame:
    """window ("none" or "first–last"), start, middle (0–1 of depth), half, prompt, fall (nats), correct, gap.

    `half`: "choose" or "test"; windows are compared on the one and judged on the other.
    `fall`: what the answer's log-odds lose. `gap`: attention (0–1) of located heads on true minus on false labels.
    """
    view = study.view
    size = max(1, round(config.window * view.n_layers))
    heads = located_for_both(study, study.few(config.heads))
    layers, indices = [head.layer for head in heads], [head.head for head in heads]
    windows: list[tuple[int, int] | None] = [None, *((s, s + size) for s in range(view.n_layers - size + 1))]
    whole: np.ndarray | None = None
    rows = torch.cat(study.halves)
    frames = []
    for window in windows:
        blocked = [] if window is None else [head for head in study.view.heads() if window[0] <= head.layer < window[1]]
        name = "none" if window is None else f"{window[0]}–{window[1] - 1}"

        def measured(batch: il.PromptBatch, blocked: list[il.Head] = blocked) -> Tensors:
            with il.block_attention(study.model, blocked, label_to_text(batch)):
                acts = il.capture(study.model, batch)
            scores = acts.label_log_probs
            attention = il.attention_to_labels(acts)[:, layers, indices].float().mean(1)
            true = is_true_label(batch).to(attention.device)
            return {
                "odds": label_log_odds(scores, batch.answer, choices=batch.label_mask),
                "correct": is_correct(scores, batch.answer, choices=batch.label_mask).float(),
                "gap": (attention * true).sum(-1) - (attention * ~true).sum(-1),
            }

        found = study.over(FOO, rows, measured, what=f"layers {name} blocked")
        log_odds = found["odds"].double().numpy()
        whole = log_odds if whole is None else whole
        columns = {
            "prompt": rows.tolist(),
            "half": ["choose"] * len(study.halves[0]) + ["test"] * len(study.halves[1]),
            "fall": whole - log_odds,
            "correct": found["correct"].numpy(),
            "gap": found["gap"].numpy(),
        }
        start = -1 if window is None else window[0]
        middle = np.nan if window is None else (window[0] + window[1] - 1) / 2 / max(view.n_layers - 1, 1)
        frames.append(pd.DataFrame(columns).assign(window=name, start=start, middle=middle))
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """Blocking costs the answer in the worst shallow window, more than in any deep one; located heads see less."""
    blocked = table.loc[table["start"] >= 0]
    shallow, deep = blocked.loc[blocked["middle"] < 0.5], blocked.loc[blocked["middle"] >= 0.5]
    if not len(shallow) or not len(deep):
        return judge([], least=0.0, unit="nats", what="fall of the answer")
    worst = [_worst_window(where(part, half="choose")) for part in (shallow, deep)]
    first, second = (by_prompt(table, "fall", window=window, half="test") for window in worst)
    lost = by_prompt(table, "gap", window="none", half="test") - by_prompt(table, "gap", window=worst[0], half="test")
    return all_of(
        judge(first, least=0.0, unit="nats", what=f"fall with layers {worst[0]} blocked"),
        judge(first - second, least=0.0, unit="nats", what=f"the same minus layers {worst[1]}"),
        judge(lost, least=0.02, unit="of attention", what="what located heads' attention on true labels loses"),
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
        samples = [by_prompt(table, value, window=name) for name in names]
        means = [sample.mean() for sample in samples]
        ax.plot(at, means, "o-", color=hue, markersize=3.5, linewidth=1, label="blocked")
        ax.errorbar(at, means, yerr=whiskers(samples), fmt="none", ecolor=hue, elinewidth=0.8, capsize=1.5)
        whole = by_prompt(table, value, window="none").mean()
        ax.axhline(whole, color="0.3", linewidth=0.8, linestyle=":", label="nothing blocked")
        step = max(1, len(names) // 8)
        ax.set_xticks(at[::step], names[::step])
        ax.set(xlabel="Layers in which labels cannot see their texts", ylabel=title)
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="shallow-flow",
    title="Shallow layers bring texts to labels",
    source="Published version, open question 1",
    claim="Labels gather their texts' features in shallow layers, and located heads compare the input with these.",
    criterion=(
        "Blocking attention from labels to their texts costs the answer most in a window of the shallower half, and "
        "then located heads' attention on true minus false labels falls by 0.02 or more. Windows are chosen on one "
        "half of the prompts."
    ),
    paper=None,
    config=ShallowFlowConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
