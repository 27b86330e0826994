"""Published version: accuracy when the located heads, best for "foo" and best for "bar", are set to zero."""

from dataclasses import dataclass

import pandas as pd
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.lab.editing import BAR, FOO, averaged, how_many, located_for_both, says, zeroed
from experiments.lab.frames import stack
from experiments.lab.study import Study
from icl_lens.report.palette import BLUE, GREY, ORANGE

CONDITIONS = {
    ("none", ""): ("nothing", GREY),
    ("random", "zero"): ("random\nto zero", BLUE),
    ("located", "zero"): ("located\nto zero", ORANGE),
    ("random", "mean"): ("random\nto mean", BLUE),
    ("located", "mean"): ("located\nto mean", ORANGE),
}
MEASURES = ["correct", "vocabulary", "odds"]
LEAST, MOST = 0.3, 0.1
"""What located heads must cost beyond random ones, and what random ones may cost, of accuracy."""
CHANCE = 0.5
"""Between the two labels of these tasks."""


@dataclass(frozen=True)
class AblationConfig:
    """Heads located for each label (together at least 1 % of all, at most one in four), and sets of random heads."""

    heads: int = 6
    draws: int = 20
    mean_draws: int = 5
    """Sets for mean-ablation, which is told beside."""
    least: float = 0.1
    """A located head adds at least this share of what the best one adds."""


def table(study: Study, config: AblationConfig) -> pd.DataFrame:
    """group ("none" | "located" | "random"), mode ("zero" | "mean" | ""), layer, name (of the set), prompt, answer, …

    `vocabulary` (0–1): the answer is the most probable of all tokens; `correct`: the likelier label; `odds`: its
    log-odds between the labels, nats; `heads`: those located, `share` of all heads.
    """
    everything = located_for_both(study, len(study.view.heads()))
    # As many different ones as the two lists have together, also where both name the same heads.
    heads = everything[: 2 * how_many(study, config.heads)]
    chosen = study.halves[0]
    foo, bar = (study.rises(variant)[chosen].mean(0) for variant in (FOO, BAR))
    mean = foo + bar
    return removals(study, strong(heads, mean, config.least), config)


def strong(heads: list[il.Head], mean: Float[Tensor, "layer head"], least: float) -> list[il.Head]:
    """The heads that add at least this share of what the best one adds; the first, if there is none.

    Heads that add next to nothing are not located; as controls are as many, they would only blunt the comparison.
    """
    return [head for head in heads if mean[head] >= least * mean.max()] or heads[:1]


def removals(study: Study, heads: list[il.Head], config: AblationConfig) -> pd.DataFrame:
    """`table` for heads that were located otherwise."""
    draws = study.controls(heads, config.draws)
    total = len(study.view.heads())
    rows = study.test
    frames = []
    for answer, variant in (("foo", FOO), ("bar", BAR)):
        cases = [("none", "", "", [])]
        for mode in ("zero", "mean"):
            cases.append(("located", mode, "located", heads))
            some = draws if mode == "zero" else draws[: config.mean_draws]
            cases += [("random", mode, f"set {i}", drawn) for i, drawn in enumerate(some)]
        for group, mode, name, removed in cases:
            edit = None if not removed else {"zero": zeroed, "mean": averaged}[mode](study, removed)
            frame = says(study, variant, rows, edit, what=f"{mode or 'without'} {len(removed)} heads, {answer}")
            frame = frame.assign(prompt=rows.tolist(), answer=answer, group=group, mode=mode, name=name, layer=-1)
            frames.append(frame.assign(heads=" ".join(map(str, heads)), share=len(heads) / total))
    return stack(*frames)
