"""Figure 2: log-probability increase of every attention and FFN layer, for the example prompt and the task's mean."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import icl_lens as il
from experiments.lab.drawing import WHISKERS, added_to, by_name, legend_below, means, whiskers
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, long, stack, where
from experiments.lab.intervals import clusters_of, resample
from experiments.lab.reductions import layer_contrasts, layer_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict, verdict
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

COMPONENTS = ("attention", "FFN")
HUES = {"attention": BLUE, "FFN": ORANGE}
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class LayersConfig:
    """The paper's example prompt."""

    example: str = "love : bar like : bar eight : foo two : foo one :"
    answer: str = "foo"


def table(study: Study, config: LayersConfig) -> pd.DataFrame:
    """prompts ("example" | "task"), prompt, layer, component, increase (nats).

    By contrast, the increase of the answer's log-odds, on the task's prompts its mean over both labels as the answer.
    """
    measure = layer_increases if study.ranking == "increase" else layer_contrasts
    batch = study.example(config.example, config.answer)
    task = study.get(measure)
    if study.ranking == "contrast":
        task = (task + study.get(measure, Variant(swapped=True))) / 2
    parts = {"example": measure(il.capture(study.model, batch)).cpu(), "task": task}
    return stack(
        *(
            long(
                values[None],
                "increase",
                prompts=[name],
                prompt=range(len(values)),
                layer=range(study.view.n_layers),
                component=COMPONENTS,
            )
            for name, values in parts.items()
        )
    )


def claim(table: pd.DataFrame) -> Verdict:
    """The share of deep attention layers in all positive increases of the prompts together."""
    task = where(table, prompts="task")
    layer, gain = array(task, "layer"), np.maximum(array(task, "increase"), 0)
    deep = (layer >= (layer.max() + 1) / 2) & (array(task, "component") == "attention")
    of_prompt = task.assign(gain=gain, deep_gain=gain * deep)
    part, whole = by_prompt(of_prompt, "deep_gain"), by_prompt(of_prompt, "gain")
    drawn = resample(clusters_of(whole.index))
    share = drawn.estimate(drawn.mean(part.to_numpy()) / drawn.mean(whole.to_numpy()), bounds=SHARE)
    what = "share of attention in the deeper half of layers"
    return verdict(share, least=NEARLY_ALL, unit="of all increases", what=what)


def figure(table: pd.DataFrame) -> Figure:
    """Increase by layer: the example prompt, and the mean over the task's prompts with 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    for ax, prompts, title in zip(axes, ("example", "task"), ("Example prompt", "Mean over prompts"), strict=True):
        for i, component in enumerate(COMPONENTS):
            part = where(table, prompts=prompts, component=component)
            samples = by_name(part, "increase", sorted(set(part["layer"])), column="layer")
            at = np.arange(len(samples)) + 0.4 * (i - 0.5)
            ax.bar(at, means(samples), width=0.4, color=HUES[component], label=component)
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
        ax.axhline(0, color="0.3", linewidth=0.6)
        ax.set(xlabel="Layer", title=title)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel(f"{added_to(table).capitalize()} increase (nats)")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="layers",
    title="Which layers raise the answer",
    source="Figure 2",
    claim="Nearly all of the answer's log-probability increase comes from deep attention layers.",
    criterion="Attention layers of the deeper half hold nine tenths of all positive increases.",
    about="layers: by increase of the answer's log-probability, and by contrast",
    departs=(
        "The paper shows one sentence and says “almost all”, of layers 18–31 of 36. Here that sentence is drawn "
        "beside the task's prompts, which alone decide; deep is the deeper half of the layers, and almost all nine "
        "tenths of the positive increases. By contrast these are means over both labels as the answer, in which what "
        "pushes one label cancels."
    ),
    paper="GPT-2 large, example prompt: almost all in attention layers 18–31 of 36",
    classes="any",
    config=LayersConfig(),
    needs=(Need(Variant(), layer_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
