"""Figure 7: attention to true labels against the log-probability increase each of them brings, in the best heads."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import BLUE, GREEN, ORANGE, PAGE, legend_below
from experiments.lab.frames import array, long, where, wide
from experiments.lab.reductions import head_increases, is_true_label
from experiments.lab.registry import Experiment
from experiments.lab.study import Need, Settings, Study, Variant
from experiments.lab.verdict import Verdict, verdict
from icl_lens.metrics import bootstrap_interval

VALUES = ("attention", "increase")


@dataclass(frozen=True)
class AttentionVsIncrease:
    """The best heads looked at."""

    heads: int = 3


@dataclass(frozen=True)
class LabelParts:
    """[prompt head demo 2] attention to each label, and the increase (nats) that its part of the head brings.

    NaN for false labels and where a prompt has fewer demonstrations.
    """

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Tensor:
        dtype, targets = acts.readout.dtype, acts.batch.answer_tokens.to(acts.readout.W_U.device)
        true = is_true_label(acts.batch).to(targets.device)
        columns = []
        for head in self.heads:
            x = acts.resid_pre[:, head.layer, None].to(dtype)
            weight = acts.at_labels(acts.head_pattern(head.layer)[:, head.head])
            after = acts.readout.token_log_probs(x + weight[..., None] * il.label_values(acts, head), targets)
            increase = after - acts.readout.token_log_probs(x, targets)
            attention = acts.at_labels(acts.pattern[:, head.layer, head.head].to(dtype))
            columns.append(torch.stack([attention, increase], dim=-1).masked_fill(~true[..., None], torch.nan))
        return torch.stack(columns, dim=1)


def needs(config: AttentionVsIncrease, settings: Settings) -> Iterable[Need]:
    return [Need(Variant(), head_increases)]


def table(study: Study, config: AttentionVsIncrease) -> pd.DataFrame:
    """prompt, name, demo, attention (0–1), increase (nats): true labels, on the half the heads were not chosen on."""
    heads = tuple(study.located(study.few(config.heads)))
    parts = study.reduce(LabelParts(heads), Variant(), study.test, what="increase of each label").numpy()
    axes = {"prompt": study.test.tolist(), "name": [str(head) for head in heads], "demo": range(parts.shape[2])}
    frame = long(parts[..., 0], "attention", **axes).assign(increase=parts[..., 1].reshape(-1))
    return frame.dropna(ignore_index=True)


def claim(table: pd.DataFrame) -> Verdict:
    """Rank correlation of attention and increase over prompts and labels, mean over heads; prompts bootstrapped."""
    parts = [where(table, name=name) for name in dict.fromkeys(table["name"])]
    # [prompt, head, demo, (attention, increase)]: what belongs to a prompt is drawn together.
    rows = np.stack(
        [
            np.stack(
                [wide(part, of, index="prompt", columns="demo").to_numpy() for of in ("attention", "increase")], -1
            )
            for part in parts
        ],
        axis=1,
    )

    def correlation(drawn: np.ndarray) -> float:
        return float(np.mean([_spearman(*drawn[:, head].reshape(-1, 2).T) for head in range(drawn.shape[1])]))

    found = bootstrap_interval(rows, statistic=correlation, draws=500)
    return verdict(*found, least=0.5, unit="rank correlation", what="attention against increase")


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation; 0 where one of them never changes, since nothing then rises with anything."""
    x, y = _ranks(x), _ranks(y)
    spread = x.std() * y.std()
    return float(((x - x.mean()) * (y - y.mean())).mean() / spread) if spread else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing their mean."""
    unique, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts + 1) / 2)[inverse] if len(unique) else values


def figure(table: pd.DataFrame) -> Figure:
    """One dot a true label: attention to it against the increase it brings; dark: one prompt, as in the paper."""
    names = list(dict.fromkeys(table["name"]))
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = drawn.subplots(1, len(names), squeeze=False, sharey=True)[0]
    one = table["prompt"].iloc[0]
    for ax, name, hue in zip(axes, names, (BLUE, ORANGE, GREEN) * len(names), strict=False):
        part, own = where(table, name=name), where(table, name=name, prompt=one)
        ax.plot(part["attention"], part["increase"], ".", color=hue, markersize=3, alpha=0.4, markeredgewidth=0)
        ax.plot(own["attention"], own["increase"], "o", color="black", markersize=4, label="one prompt")
        rho = _spearman(array(part, "attention"), array(part, "increase"))
        ax.set(
            title=f"{name}: rank correlation {rho:.2f}", xlabel="Attention to a true label (0–1)", xlim=(-0.03, 1.03)
        )
    axes[0].set_ylabel("Log-probability increase (nats)")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="attention-vs-increase",
    title="Does more attention bring more of the label",
    source="Figure 7",
    claim="The more a located head attends to a true label, the more that label's value raises the answer.",
    criterion="Over true labels and prompts, attention and increase have a rank correlation above 0.5.",
    paper="GPT-2 large, one sentence, three best heads: increasing, not linear; no number",
    config=AttentionVsIncrease(),
    needs=needs,
    table=table,
    verdict=claim,
    figure=figure,
)
