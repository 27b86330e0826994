"""Figure 2: log-probability increase of every attention and FFN layer, for the example prompt and the task's mean."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

import icl_lens as il
from experiments.drawing import BLUE, ORANGE, PAGE, WHISKERS, whiskers
from experiments.reductions import layer_increases
from experiments.registry import Experiment
from experiments.study import Need, Study, Variant
from experiments.verdict import Verdict, judge

COMPONENTS = ("attention", "FFN")
HUES = {"attention": BLUE, "FFN": ORANGE}


@dataclass(frozen=True)
class Layers:
    """The paper's example prompt."""

    example: str = "love : bar like : bar eight : foo two : foo one :"
    answer: str = "foo"


def needs(config: Layers) -> Iterable[Need]:
    return [Need(Variant(), layer_increases)]


def table(study: Study, config: Layers) -> pd.DataFrame:
    """prompts ("example" | "task"), prompt, layer, component, increase (nats)."""
    batch = il.tokenize(study.model, [il.Prompt.parse(config.example, answer=config.answer)])
    parts = {"example": layer_increases(il.capture(study.model, batch)).cpu(), "task": study.get(layer_increases)}
    return pd.concat([_rows(name, values) for name, values in parts.items()], ignore_index=True)


def _rows(prompts: str, values: torch.Tensor) -> pd.DataFrame:
    n, n_layers, _ = values.shape
    index = pd.MultiIndex.from_product([range(n), range(n_layers), COMPONENTS], names=["prompt", "layer", "component"])
    frame = index.to_frame(index=False)
    frame.insert(0, "prompts", prompts)
    return frame.assign(increase=values.flatten().numpy())


def claim(table: pd.DataFrame) -> Verdict:
    """The share of deep attention layers in all positive increases, prompt by prompt."""
    task = table[table["prompts"] == "task"]
    deep = (task["layer"] >= (task["layer"].max() + 1) / 2) & (task["component"] == "attention")
    gain = task["increase"].clip(lower=0)
    of_prompt = task.assign(gain=gain, deep_gain=gain.where(deep, 0.0)).groupby("prompt")[["gain", "deep_gain"]].sum()
    share = (of_prompt["deep_gain"] / of_prompt["gain"].replace(0, np.nan)).to_numpy()
    return judge(share, least=0.5, unit="of all increases", what="share of attention in the deeper half of layers")


def figure(table: pd.DataFrame) -> Figure:
    """Increase by layer: the example prompt, and the mean over the task's prompts with 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    for ax, prompts, title in zip(axes, ("example", "task"), ("Example prompt", "Mean over prompts"), strict=True):
        part = table[table["prompts"] == prompts]
        for i, component in enumerate(COMPONENTS):
            values = part[part["component"] == component].pivot(index="layer", columns="prompt", values="increase")
            at = values.index.to_numpy() + 0.4 * (i - 0.5)
            ax.bar(at, values.mean(axis=1), width=0.4, color=HUES[component], label=component)
            if values.shape[1] > 1:
                ax.errorbar(at, values.mean(axis=1), yerr=whiskers(values.to_numpy()), **WHISKERS)
        ax.axhline(0, color="0.3", linewidth=0.6)
        ax.set(xlabel="Layer", title=title)
    axes[0].set_ylabel("Log-probability increase (nats)")
    axes[1].legend()
    return drawn


EXPERIMENT = Experiment(
    id="layers",
    title="Which layers raise the answer",
    source="Figure 2",
    claim="Nearly all of the answer's log-probability increase comes from deep attention layers.",
    criterion="Attention layers of the deeper half hold more than half of all positive increases.",
    paper="GPT-2 large, example prompt: almost all in attention layers 18–31 of 36",
    config=Layers(),
    needs=needs,
    table=table,
    verdict=claim,
    figure=figure,
)
