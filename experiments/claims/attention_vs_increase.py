"""Figure 7: attention to true labels against the log-probability increase each of them brings, in the best heads."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import legend_below
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, long, where, wide
from experiments.lab.reductions import head_increases, is_true_label
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, verdict
from icl_lens.metrics import bootstrap_interval, spearman
from icl_lens.report.palette import BLUE, GREEN, ORANGE
from icl_lens.report.plots import PAGE

VALUES = ("attention", "increase")


@dataclass(frozen=True)
class AttentionVsIncreaseConfig:
    """The best heads looked at."""

    heads: int = 3


@dataclass(frozen=True)
class LabelParts:
    """Attention to each label, and the increase (nats) that its part of the head brings.

    NaN for false labels and where a prompt has fewer demonstrations.
    """

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head demo 2"]:
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


def table(study: Study, config: AttentionVsIncreaseConfig) -> pd.DataFrame:
    """prompt, name, demo, attention (0–1), increase (nats): true labels, on the half the heads were not chosen on."""
    heads = tuple(study.located(study.few(config.heads)))
    parts = study.reduce(LabelParts(heads), Variant(), study.test, what="increase of each label").numpy()
    axes = {"prompt": study.test.tolist(), "name": [str(head) for head in heads], "demo": range(parts.shape[2])}
    frame = long(parts[..., 0], "attention", **axes).assign(increase=parts[..., 1].reshape(-1))
    return frame.dropna(ignore_index=True)


def claim(table: pd.DataFrame) -> Verdict:
    """Rank correlation of attention and increase over prompts and labels, mean over heads; prompts bootstrapped."""
    parts = [where(table, name=name) for name in dict.fromkeys(table["name"])]
    # What belongs to a prompt is drawn together.
    rows = np.stack([_pairs(part) for part in parts], axis=1)

    def correlation(drawn: Float[np.ndarray, "prompt head demo 2"]) -> float:
        return float(np.mean([rises(*drawn[:, head].reshape(-1, 2).T) for head in range(drawn.shape[1])]))

    effect, low, high = bootstrap_interval(rows, statistic=correlation, draws=500)
    return verdict(effect, low, high, least=0.5, unit="rank correlation", what="attention against increase")


def _pairs(table: pd.DataFrame) -> Float[np.ndarray, "prompt demo 2"]:
    """One head's rows of the table: the attention to each true label, and the increase that it brings."""
    return np.stack([wide(table, value, index="prompt", columns="demo").to_numpy() for value in VALUES], axis=-1)


def rises(attention: Float[np.ndarray, " n"], increase: Float[np.ndarray, " n"]) -> float:
    """Rank correlation; 0 where one of them never changes, since nothing then rises with anything."""
    rho = spearman(torch.tensor(attention), torch.tensor(increase))
    return 0.0 if math.isnan(rho) else rho


def figure(table: pd.DataFrame) -> Figure:
    """One dot a true label: attention to it against the increase it brings; dark: one prompt, as in the paper."""
    names = list(dict.fromkeys(table["name"]))
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = drawn.subplots(1, len(names), squeeze=False, sharey=True)[0]
    first = table["prompt"].iloc[0]
    for ax, name, hue in zip(axes, names, (BLUE, ORANGE, GREEN) * len(names), strict=False):
        part, own = where(table, name=name), where(table, name=name, prompt=first)
        ax.plot(part["attention"], part["increase"], ".", color=hue, markersize=3, alpha=0.4, markeredgewidth=0)
        ax.plot(own["attention"], own["increase"], "o", color="black", markersize=4, label="one prompt")
        rho = rises(array(part, "attention"), array(part, "increase"))
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
    config=AttentionVsIncreaseConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
