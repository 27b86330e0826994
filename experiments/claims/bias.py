"""What majority-bias and recency-bias share: the answer's log-odds in two layouts, before and after a fix."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.drawing import COLUMN, GREY, ORANGE, WHISKERS, legend_below, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both, odds, right, scores
from experiments.lab.frames import array, by_prompt, stack, where
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import Verdict, all_of, judge, verdict
from icl_lens.interventions.debias import Fix, choose_strength, debias
from icl_lens.metrics import bootstrap_interval

GROUPS = {"none": GREY, "random": "0.8", "located": ORANGE}
TRIED = (0.25, 0.5, 0.75, 1.0)
MAX_LOSS = 0.01
HELD_OUT = 100


def bias_table(study: Study, fix: Fix, layouts: Sequence[str], *, heads: int, draws: int) -> pd.DataFrame:
    """fixed ("none" | "located" | "random", mean of all draws), prompt, answer, favoured, against, accuracy, strength.

    `favoured`, `against`: log-odds (nats) of the answer in the layout that helps it and in the one that does not. Each
    set of heads gets the strength of smallest bias on the half on which heads are located, at a loss of at most one
    point of accuracy there: 0, and no fix, where none does.
    """
    chosen = located_for_both(study, study.few(heads))
    controls = study.controls(chosen, draws)
    choosing, rows = study.halves
    held_out_rows = choosing[:HELD_OUT]
    frames = []
    for answer, base in (("foo", FOO), ("bar", BAR)):
        variants = [Variant(layout, base.swapped) for layout in layouts]
        held_out = [study.batch(variant)[held_out_rows] for variant in variants]
        cases = [("none", []), ("located", chosen), *(("random", drawn) for drawn in controls)]
        for name, some in cases:
            strength = 0.0
            if some:
                best = choose_strength(study.model, some, *held_out, fix=fix, tried=TRIED, max_loss=MAX_LOSS)
                strength = best.strength

            def edit(batch: il.PromptBatch, some=some, strength=strength):
                return debias(study.model, batch, some, **{fix: strength})

            found = [scores(study, variant, rows, edit, what=f"{fix}, {name}, {answer}") for variant in variants]
            values = [odds(study, variant, rows, each) for variant, each in zip(variants, found, strict=True)]
            hits = [right(study, variant, rows, each) for variant, each in zip(variants, found, strict=True)]
            columns = {
                "prompt": rows.tolist(),
                "favoured": values[0],
                "against": values[1],
                "accuracy": np.mean(hits, 0),
            }
            frames.append(pd.DataFrame(columns).assign(fixed=name, answer=answer, strength=strength))
    return stack(*frames)


def bias_claim(table: pd.DataFrame, *, paper: float) -> Verdict:
    """There is a bias; the fix in located heads takes some of it away, at little cost, more than in random heads."""

    def bias(fixed: str) -> np.ndarray:
        return by_prompt(table, "favoured", fixed=fixed) - by_prompt(table, "against", fixed=fixed)

    def share(rows: np.ndarray) -> float:
        return float(1 - abs(rows[:, 1].mean()) / abs(rows[:, 0].mean())) if rows[:, 0].mean() else float("nan")

    before, after, control = bias("none"), bias("located"), bias("random")
    if not array(where(table, fixed="located"), "strength").any():
        found = judge(before, least=0.0, unit="nats", what="bias without a fix")
        reason = (
            f"no strength tried ({', '.join(map(str, TRIED))}) makes the bias smaller on held-out prompts at a loss of "
            f"at most {MAX_LOSS:.0%} of accuracy (paper: {paper:.0%}); {found.reason}"
        )
        return Verdict("not supported", 0.0, 0.0, 0.0, "of the bias", reason)
    reduction = bootstrap_interval(np.stack([before, after], axis=1), statistic=share)
    others = bootstrap_interval(np.stack([before, control], axis=1), statistic=share)
    loss = by_prompt(table, "accuracy", fixed="none") - by_prompt(table, "accuracy", fixed="located")
    kept = judge(-loss, least=-0.02, unit="of accuracy", what="gain of accuracy")
    joint = np.stack([before, after, control], axis=1)
    beyond = bootstrap_interval(joint, statistic=lambda x: share(x[:, :2]) - share(x[:, [0, 2]]))
    return all_of(
        verdict(
            *reduction, least=0.0, unit="of the bias", what=f"reduction (paper: {paper:.0%}; random {others.value:.0%})"
        ),
        judge(before, least=0.0, unit="nats", what="bias without a fix"),
        verdict(*beyond, least=0.0, unit="of the bias", what="reduction beyond random heads"),
        kept,
    )


def bias_figure(table: pd.DataFrame, *, what: str) -> Figure:
    """Left: bias without a fix, with it in random and in located heads. Right: accuracy over both layouts."""
    drawn = Figure(figsize=(COLUMN, 2.3), layout="constrained")
    left, right_ax = drawn.subplots(1, 2)
    for i, (fixed, hue) in enumerate(GROUPS.items()):
        bias = by_prompt(table, "favoured", fixed=fixed) - by_prompt(table, "against", fixed=fixed)
        label = {"none": "no fix", "random": "fix in random heads", "located": "fix in located heads"}[fixed]
        for ax, sample in ((left, bias), (right_ax, by_prompt(table, "accuracy", fixed=fixed))):
            ax.bar(i, sample.mean(), color=hue, width=0.8, label=label if ax is left else None)
            ax.errorbar(i, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
            ax.set_xticks([])
    left.axhline(0, color="0.3", linewidth=0.6)
    left.set_ylabel(f"{what} (nats of log-odds)")
    right_ax.set(ylabel="Accuracy (0–1)", ylim=(0, 1.02))
    legend_below(drawn, left, columns=2)
    return drawn
