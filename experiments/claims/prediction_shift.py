"""Published version: attention of located heads when the input is exchanged so that the prediction flips."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import WHISKERS, legend_below, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

LABELS = {"foo": BLUE, "bar": ORANGE}
LEAST = 0.02


@dataclass(frozen=True)
class PredictionShiftConfig:
    """Heads located for each label (at most one in eight), and sets of random heads."""

    heads: int = 6
    draws: int = 100


def _attention(
    study: Study, batch: il.PromptBatch
) -> tuple[Float[Tensor, "prompt layer head label"], Int[Tensor, " prompt"]]:
    """Attention to each label (0–1), and the predicted one."""
    pieces = list(batch.split(64))

    def seen(i: int) -> Tensors:
        acts = il.capture(study.model, pieces[i])
        return {"attention": il.attention_by_label(acts).float(), "predicted": acts.predicted}

    found = joined(study.passes.run("attention to labels", [len(piece) for piece in pieces], seen))
    return found["attention"], found["predicted"]


def table(study: Study, config: PredictionShiftConfig) -> pd.DataFrame:
    """group, input ("first" | "exchanged"), prompt, label ("foo" | "bar"), attention (0–1, mean over heads), flipped.

    Only demonstrations' labels count. "random" is the mean over all draws. `flipped`: whether the prediction goes from
    "foo" to "bar".
    """
    heads = located_for_both(study, study.few(config.heads))
    draws = study.controls(heads, config.draws, distinct=False)
    rows = study.test
    first = study.batch(FOO)[rows]
    exchanged = study.batch(replace(FOO, asked="false"))[rows]
    (before, was), (after, now) = (_attention(study, batch) for batch in (first, exchanged))
    flipped = ((was == 0) & (now == 1)).numpy()
    groups = {"located": heads, "random": [head for drawn in draws for head in drawn]}
    frames = []
    for group, members in groups.items():
        layers, indices = [head.layer for head in members], [head.head for head in members]
        for name, attention in (("first", before), ("exchanged", after)):
            mean = attention[:, layers, indices].mean(1).numpy()
            axes = {"group": [group], "input": [name], "prompt": rows.tolist(), "label": list(LABELS)}
            frames.append(long(mean[None, None], "attention", **axes).assign(flipped=np.repeat(flipped, 2)))
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """Where the prediction flips, attention leaves "foo" and comes to "bar", more than in random heads."""

    def shift(group: str, label: str) -> Float[np.ndarray, " prompt"]:
        part = where(table, flipped=True)
        first, exchanged = (
            by_prompt(part, "attention", group=group, input=shown, label=label) for shown in ("first", "exchanged")
        )
        return exchanged - first

    fall, rise = -shift("located", "foo"), shift("located", "bar")
    both = fall + rise + shift("random", "foo") - shift("random", "bar")
    return all_of(
        judge(fall, least=LEAST, unit="of attention", what="fall at foo positions"),
        judge(rise, least=LEAST, unit="of attention", what="rise at bar positions"),
        judge(both, least=0.0, unit="of attention", what="shift beyond random heads"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention at "foo" and "bar" positions before and after, where the prediction flips; 95 % intervals."""
    part = where(table, flipped=True)
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    for ax, group in zip(axes, ("located", "random"), strict=True):
        for i, (label, hue) in enumerate(LABELS.items()):
            samples = [
                by_prompt(part, "attention", group=group, input=shown, label=label) for shown in ("first", "exchanged")
            ]
            at = np.arange(2) + 0.36 * (i - 0.5)
            means = [sample.mean() if len(sample) else np.nan for sample in samples]
            ax.bar(at, means, width=0.36, color=hue, label=f"at {label} positions")
            ax.errorbar(at, means, yerr=whiskers(samples), **WHISKERS)
        ax.set_xticks(range(2), ["first input\n(predicts foo)", "exchanged\n(predicts bar)"])
        ax.set_title(f"{group} heads")
    axes[0].set_ylabel("Attention from the last token,\nmean over heads (0–1)")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="prediction-shift",
    title="Attention goes where the prediction goes",
    source="Published version, section 3.3",
    claim="When another input flips the prediction from foo to bar, attention falls at foo and rises at bar.",
    criterion=f"Both by {LEAST} or more in located heads, and more than in random heads of their layers.",
    paper="attention falls at foo and rises at bar positions",
    config=PredictionShiftConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
