"""Published version: attention of located heads when the input is exchanged so that the prediction flips."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, nothing_to_show, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study
from experiments.lab.verdict import Verdict, all_of, cannot_tell, verdict
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

HUES = (BLUE, ORANGE)
"""Of the first label and of the second one, "foo" and "bar" unless others are asked for."""
LEAST = 0.1
"""Of located heads' attention on labels: the smallest change worth the claim."""


@dataclass(frozen=True)
class PredictionShiftConfig:
    """Heads located for each label (at most one in eight), and the most controls of a layer."""

    heads: int = 6
    controls: int = 20


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
    """group, layer, name, input ("first" | "exchanged"), prompt, query, other, label ("foo" | "bar"), attention,
    flipped.

    Only demonstrations' labels count. "random" heads are the others of the layers. `flipped`: whether the prediction
    goes from "foo" to "bar".
    """
    compared = Comparison.of(study, located_for_both(study, study.few(config.heads)), config.controls)
    rows = study.test
    first = study.batch(FOO)[rows]
    exchanged = study.batch(replace(FOO, asked="false"))[rows]
    (before, was), (after, now) = (_attention(study, batch) for batch in (first, exchanged))
    flipped = ((was == 0) & (now == 1)).numpy()
    queries = study.both_queries(rows)

    def frame(head: il.Head) -> pd.DataFrame:
        frames = []
        for name, attention in (("first", before), ("exchanged", after)):
            values = long(
                attention[:, head.layer, head.head], "attention", prompt=rows.tolist(), label=list(study.labels)
            )
            both = {column: np.repeat(numbers, 2) for column, numbers in queries.items()}
            frames.append(values.assign(input=name, flipped=np.repeat(flipped, 2), **both))
        return stack(*frames)

    return stack(*compared.rows(frame))


def claim(table: pd.DataFrame) -> Verdict:
    """Where the prediction flips, attention leaves "foo" and comes to "bar", by a tenth of that on labels.

    And by more than in the other heads of the layers.
    """
    part = where(table, flipped=True)
    n = len(set(part["prompt"]))
    if n < 2:
        return cannot_tell(
            f"the prediction flips from the first label to the other in {n} prompts, which is too few",
            unit="of attention on labels",
        )
    first, second = labels = list(dict.fromkeys(part["label"]))
    found = {
        (shown, label): beside(part, "attention", input=shown, label=label)
        for shown in ("first", "exchanged")
        for label in labels
    }
    drawn = found["first", first].drawn
    on_labels = found["first", first].located + found["first", second].located
    change = {
        label: (found["exchanged", label].located - found["first", label].located) / on_labels for label in labels
    }

    def moved(group: str) -> Float[np.ndarray, " draw"]:
        foo, bar = (
            getattr(found["exchanged", label], group) - getattr(found["first", label], group) for label in labels
        )
        return bar - foo

    unit = "of attention on labels"
    return all_of(
        verdict(drawn.estimate(-change[first]), least=LEAST, unit=unit, what=f"fall of attention at {first} positions"),
        verdict(
            drawn.estimate(change[second]), least=LEAST, unit=unit, what=f"rise of attention at {second} positions"
        ),
        verdict(
            drawn.estimate(moved("located") - moved("random")),
            least=0.0,
            unit="of attention",
            what=f"shift beyond {found['first', first].named} of the same layers",
        ),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention at "foo" and "bar" positions before and after, where the prediction flips; 95 % intervals."""
    part = where(table, flipped=True)
    if part.empty:
        return nothing_to_show("in no prompt does the prediction flip from the first label to the other")
    labels = list(dict.fromkeys(part["label"]))
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    bars: list[list[tuple[float, float]]] = []
    for ax, group in zip(axes, ("located", "random"), strict=True):
        seen: list[tuple[float, float]] = []
        for i, (label, hue) in enumerate(zip(labels, HUES, strict=True)):
            samples = []
            for shown in ("first", "exchanged"):
                of_input = where(part, input=shown, label=label)
                both = by_prompt(of_input, "attention", group="located") if group == "located" else None
                samples.append(matched(of_input, "attention") if both is None else both)
            at = np.arange(2) + 0.36 * (i - 0.5)
            ax.bar(at, means(samples), width=0.36, color=hue, label=f"at {label} positions")
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            seen += zip(at, means(samples), strict=True)
        bars.append(seen)
        ax.set_xticks(range(2), [f"first input\n(predicts {labels[0]})", f"exchanged\n(predicts {labels[1]})"])
        ax.set_title(f"{group} heads")
    for ax, seen in zip(axes, bars, strict=True):
        mark_zeros(ax, *zip(*seen, strict=True))
    axes[0].set_ylabel("Attention from the last token,\nmean over heads (0–1)")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="prediction-shift",
    title="Attention goes where the prediction goes",
    source="Published version, section 3.3",
    claim="When another input flips the prediction from foo to bar, attention falls at foo and rises at bar.",
    criterion=(
        f"Both by {LEAST:.0%} of attention on labels in located heads, and more than in their layers' other heads."
    ),
    departs=(
        "The published version exchanges the input so that the prediction flips, and tells which way attention moves. "
        "Here the other input is a text of the other class after the same demonstrations, prompts in which the "
        "prediction does not go from the first label to the second are left out, and attention must move by a stated "
        "share and further than in other heads."
    ),
    paper="attention falls at foo and rises at bar positions",
    config=PredictionShiftConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
