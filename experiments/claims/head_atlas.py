"""Section 2.4, deferred there: in-context, induction, previous-token and function-vector scores of the same heads."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.induction import HALF
from experiments.claims.queries import labels_shuffled
from experiments.lab.controls import beside
from experiments.lab.drawing import added_to, legend_below, name_dots
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, long, mean_by, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.repeats import front_of, repeat_scores
from experiments.lab.study import Need, Study
from experiments.lab.verdict import Verdict, all_of, cannot_tell, verdict
from icl_lens.digest import json_digest
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

SCORES = {
    "in-context": "log-probability increase (nats)",
    "induction": "attention to the token after its\nlast occurrence (0–1)",
    "previous": "attention to the token\nbefore (0–1)",
    "function": "answer's log-odds restored by\nits mean output (nats)",
}


NAMED = 0.15
"""Heads with this share of the largest in-context score have their names in the figure."""


@dataclass(frozen=True)
class HeadAtlasConfig:
    """Heads located for each label (at most one in eight), and prompts for the scores that need passes of their own."""

    heads: int = 6
    prompts: int = 64


def table(study: Study, config: HeadAtlasConfig) -> pd.DataFrame:
    """score (of SCORES), name, layer, group ("located" | "random": all others), prompt, value.

    "induction", "previous": on prompts' own tokens, shuffled and shown twice, mean over the second half. "function":
    demonstrations' labels shuffled, the head's output at the last position replaced by its mean over true prompts, of
    which half ask for the other class: a mean that only says one label gives one answer what it takes from the other.
    """
    view, rows = study.view, study.test[: config.prompts]
    located = {*located_for_both(study, study.few(config.heads))}
    increase = study.ranked(FOO)[rows]
    repeats = joined(
        study.passes.run(
            "tokens shuffled and repeated",
            [2] * len(rows),
            lambda i: repeated(study, int(rows[i])),
            key=f"repeated-{json_digest(rows.tolist())}",
        )
    )
    induction, previous = repeats["induction"], repeats["previous"]
    of_score = {
        "in-context": increase,
        "induction": induction,
        "previous": previous,
        "function": _function(study, rows),
    }
    frames = []
    for score, values in of_score.items():
        frame = long(values, "value", prompt=rows.tolist(), layer=range(view.n_layers), head=range(view.n_heads))
        heads = [il.Head(*pair) for pair in zip(frame["layer"], frame["head"], strict=True)]
        names = [str(head) for head in heads]
        frames.append(
            frame.assign(score=score, name=names, group=["located" if head in located else "random" for head in heads])
        )
    return stack(*frames)


def repeated(study: Study, row: int) -> Tensors:
    """Induction and previous-token scores [1 layer head] on one prompt's tokens, shuffled and repeated."""
    tokens = list(dict.fromkeys(study.batch(FOO)[row].tokens[0].tolist()))
    front = front_of(study, tokens)
    tokens = tokens[len(front) :]
    random.Random(row).shuffle(tokens)
    return repeat_scores(study, tokens, front=front)


def _function(study: Study, rows: Int[Tensor, " row"]) -> Float[Tensor, "row layer head"]:
    """What each head's mean output adds to the answer's log-odds where labels say nothing.

    Mean over a query of the true class and one of the false class, both in the mean output and in what is asked.
    """
    asked = (FOO, replace(FOO, asked="false"))
    clean = [study.batch(variant)[study.halves[0][: len(rows)]] for variant in asked]
    prompts = [[labels_shuffled(study.prompts(variant)[row], row) for row in rows.tolist()] for variant in asked]
    shuffled = [study.tokenize(of_class) for of_class in prompts]
    pieces = [piece for batch in shuffled for piece in batch.split(32)]

    def restored(i: int) -> Tensors:
        found = il.head_effects(study.model, pieces[i], positions="last", mode="mean", reference=clean)
        return {"value": -found.log_odds.float()}

    # A row of one token for each head takes about as long as ten prompts.
    found = study.passes.run(
        "mean outputs put in",
        [10 * len(piece) for piece in pieces],
        restored,
        key=f"means-{json_digest(rows.tolist())}",
    )
    return joined(found)["value"].unflatten(0, (len(shuffled), -1)).mean(0)


def claim(table: pd.DataFrame) -> Verdict:
    """Located heads are induction heads and function-vector heads: both scores exceed those of their layers' other
    heads.

    Layers whose heads are all located are left out: there is nothing to compare them with. Undecided where no head
    gives half of its attention to what followed, as in `induction`.
    """
    scored = where(table, score="induction")
    score, best = max((float(array(part, "value").mean()), str(name)) for name, part in scored.groupby("name"))
    if score < HALF:
        why = f"no head is an induction head: the best, {best}, scores {score:.3g}, below {HALF:g}"
        return cannot_tell(why, unit="of attention")
    located, other = ({*where(table, group=group)["layer"]} for group in ("located", "random"))
    table = table.loc[np.isin(array(table, "layer"), [*(located & other)])]
    if not len(table):
        return cannot_tell("no layer has located heads and others", unit="of attention")
    gaps = []
    for score, unit in (("induction", "of attention"), ("function", "nats")):
        heads = beside(table, "value", score=score)
        what = f"{score} score of located heads minus {heads.named} of their layers"
        gaps.append(verdict(heads.drawn.estimate(heads.located - heads.random), least=0.0, unit=unit, what=what))
    return all_of(*gaps)


def figure(table: pd.DataFrame) -> Figure:
    """Each head's other scores against its in-context score; the better located heads named."""
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    axes = drawn.subplots(1, len(SCORES) - 1)
    names = np.array(sorted(set(table["name"])))
    located = np.isin(names, sorted({*where(table, group="located")["name"]}))
    x = mean_by(where(table, score="in-context"), "value", "name")
    for ax, score in zip(axes, list(SCORES)[1:], strict=True):
        y = mean_by(where(table, score=score), "value", "name")
        ax.plot(x[~located], y[~located], "o", color=GREY, markersize=3, label="other heads")
        ax.plot(x[located], y[located], "o", color=ORANGE, markersize=4, label="located heads")
        # Room for the dots at the edges, and for names that stand to their right.
        ax.margins(x=0.16, y=0.1)
        ax.axhline(0, color="0.3", linewidth=0.4)
        ax.set_xlabel(f"In-context score:\n{added_to(table)} increase (nats)")
        ax.set_ylabel(f"{score.capitalize()}: {SCORES[score]}")
    legend_below(drawn, axes[0])
    # Heads near zero lie on one another and stay unnamed.
    named = [str(names[i]) for i in np.argsort(-x) if located[i] and x[i] >= NAMED * x.max()]
    for ax, score in zip(axes, list(SCORES)[1:], strict=True):
        y = mean_by(where(table, score=score), "value", "name")
        name_dots(drawn, ax, {str(name): (float(x[i]), float(y[i])) for i, name in enumerate(names)}, named, color=BLUE)
    return drawn


EXPERIMENT = Experiment(
    id="head-atlas",
    title="One table of heads",
    source="Open (section 2.4 leaves it to later work)",
    claim="Heads that carry in-context learning are induction heads too, and their mean output carries the task.",
    criterion="Located heads' mean induction and function-vector scores exceed those of their layers' other heads.",
    chosen=(
        "That a model without an induction head leaves the verdict open, as in induction, was settled after results "
        "of the models shown here had been seen; their verdicts were undecided before."
    ),
    departs=(
        "Section 2.4 says that in-context heads are like induction heads in what they write, unlike them in what "
        "they look for, and leaves the comparison to later work. The scores are those of the literature on induction "
        "and function vectors, not the paper's."
    ),
    paper=None,
    config=HeadAtlasConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
