"""What majority-bias and recency-bias share: the answer's log-odds in two layouts, before and after a fix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.drawing import WHISKERS, legend_below, whiskers
from experiments.lab.editing import BAR, FOO, EditOf, located_for_both, odds, right, scores
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, judge, verdict
from icl_lens.interventions.debias import Fix, choose_strength, debias
from icl_lens.metrics import bootstrap_interval
from icl_lens.prompts.tasks import Layout
from icl_lens.report.palette import GREY, ORANGE
from icl_lens.report.plots import COLUMN

GROUPS = {
    "none": ("no fix", GREY),
    "random": ("fix in random heads", "0.8"),
    "located": ("fix in located heads", ORANGE),
}
TRIED = (0.25, 0.5, 0.75, 1.0)
MAX_LOSS = 0.01
HELD_OUT = 100
CRITERION = "A bias; a reduction above zero and above that of random heads; at most 2 points of accuracy lost."


@dataclass(frozen=True)
class BiasConfig:
    """Heads located for each label (at most one in eight), and sets of random heads."""

    heads: int = 6
    draws: int = 5


@dataclass(frozen=True)
class Bias:
    """A bias of in-context learning, and the fix that is tried on it."""

    name: str
    fix: Fix
    layouts: tuple[Layout, Layout]
    """The one that helps the answer, and the one that does not."""
    paper: float
    """The share of the bias that the paper's fix takes away."""

    def experiment(self, *, id: str, title: str, source: str, claim: str) -> Experiment:
        """The experiment on this bias: how large it is, before and after the fix."""
        return Experiment(
            id=id,
            title=title,
            source=source,
            claim=claim,
            criterion=CRITERION,
            paper=f"bias reduced by {100 * self.paper:.0f} %",
            config=BiasConfig(),
            needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
            table=self.table,
            verdict=self.claim,
            figure=self.figure,
        )

    def table(self, study: Study, config: BiasConfig) -> pd.DataFrame:
        """fixed ("none" | "located" | "random": every draw), prompt, answer, favoured, against, accuracy, strength.

        `favoured`, `against`: log-odds (nats) of the answer in the layout that helps it and in the one that does not.
        Each set of heads gets the strength of smallest bias on the half on which heads are located, at a loss of at
        most one point of accuracy there: 0, and no fix, where none does.
        """
        located = located_for_both(study, study.few(config.heads))
        controls = study.controls(located, config.draws)
        cases = [("none", []), ("located", located), *(("random", drawn) for drawn in controls)]
        rows = study.test
        frames = []
        for answer, base in (("foo", FOO), ("bar", BAR)):
            variants = [Variant(layout, base.swapped) for layout in self.layouts]
            strengths = self._strengths(study, variants, [heads for _, heads in cases])
            for (fixed, heads), strength in zip(cases, strengths, strict=True):
                edit = self._edit(study, heads, strength)
                log_odds, hits = [], []
                for variant in variants:
                    label_scores = scores(study, variant, rows, edit, what=f"{self.fix}, {fixed}, {answer}")
                    log_odds.append(odds(study, variant, rows, label_scores))
                    hits.append(right(study, variant, rows, label_scores))
                columns = {
                    "prompt": rows.tolist(),
                    "favoured": log_odds[0],
                    "against": log_odds[1],
                    "accuracy": np.mean(hits, 0),
                }
                frames.append(pd.DataFrame(columns).assign(fixed=fixed, answer=answer, strength=strength))
        return stack(*frames)

    def _strengths(self, study: Study, variants: Sequence[Variant], sets: Sequence[list[il.Head]]) -> list[float]:
        """The strength of the fix in each set of heads, chosen on prompts that are not tested on; 0 without heads."""
        held_out = [study.batch(variant)[study.halves[0][:HELD_OUT]] for variant in variants]

        def chosen(i: int) -> Tensors:
            if not sets[i]:
                return {"value": torch.zeros(1, dtype=torch.float64)}
            best = choose_strength(study.model, sets[i], *held_out, fix=self.fix, tried=TRIED, max_loss=MAX_LOSS)
            return {"value": torch.tensor([best.strength], dtype=torch.float64)}

        sizes = [2 * (1 + len(TRIED)) * len(held_out[0]) * bool(heads) for heads in sets]
        return joined(study.passes.run(f"strength, {self.fix}", sizes, chosen))["value"].tolist()

    def _edit(self, study: Study, heads: list[il.Head], strength: float) -> EditOf:
        majority, recency = (strength if self.fix == fix else 0.0 for fix in ("majority", "recency"))
        return lambda batch: debias(study.model, batch, heads, majority=majority, recency=recency)

    def claim(self, table: pd.DataFrame) -> Verdict:
        """There is a bias; the fix in located heads takes some of it away, beyond random heads.

        At a loss of no more than two points of accuracy.
        """
        before, after, control = (_bias(table, fixed) for fixed in ("none", "located", "random"))
        if not array(where(table, fixed="located"), "strength").any():
            unfixed = judge(before, least=0.0, unit="nats", what="bias without a fix")
            reason = (
                f"no strength tried ({', '.join(map(str, TRIED))}) makes the bias smaller on held-out prompts at a "
                f"loss of at most {MAX_LOSS:.0%} of accuracy (paper: {self.paper:.0%}); {unfixed.reason}"
            )
            return Verdict("not supported", 0.0, 0.0, 0.0, "of the bias", reason)
        effect, low, high = bootstrap_interval(np.stack([before, after], axis=1), statistic=_reduction)
        others = bootstrap_interval(np.stack([before, control], axis=1), statistic=_reduction)
        loss = by_prompt(table, "accuracy", fixed="none") - by_prompt(table, "accuracy", fixed="located")
        joint = np.stack([before, after, control], axis=1)
        beyond = bootstrap_interval(joint, statistic=lambda x: _reduction(x[:, :2]) - _reduction(x[:, [0, 2]]))
        what = f"reduction (paper: {self.paper:.0%}; random {others.value:.0%})"
        return all_of(
            verdict(effect, low, high, least=0.0, unit="of the bias", what=what),
            judge(before, least=0.0, unit="nats", what="bias without a fix"),
            verdict(*beyond, least=0.0, unit="of the bias", what="reduction beyond random heads"),
            judge(-loss, least=-0.02, unit="of accuracy", what="gain of accuracy"),
        )

    def figure(self, table: pd.DataFrame) -> Figure:
        """Left: bias without a fix, with it in random and in located heads. Right: accuracy over both layouts."""
        drawn = Figure(figsize=(COLUMN, 2.3), layout="constrained")
        left, right_ax = drawn.subplots(1, 2)
        for i, (fixed, (label, hue)) in enumerate(GROUPS.items()):
            for ax, sample in ((left, _bias(table, fixed)), (right_ax, by_prompt(table, "accuracy", fixed=fixed))):
                ax.bar(i, sample.mean(), color=hue, width=0.8, label=label if ax is left else None)
                ax.errorbar(i, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
                ax.set_xticks([])
        left.axhline(0, color="0.3", linewidth=0.6)
        left.set_ylabel(f"{self.name} (nats of log-odds)")
        right_ax.set(ylabel="Accuracy (0–1)", ylim=(0, 1.02))
        legend_below(drawn, left, columns=2)
        return drawn


def _bias(table: pd.DataFrame, fixed: str) -> Float[np.ndarray, " prompt"]:
    """How much less the answer's log-odds are in the layout that does not help it, nats."""
    return by_prompt(table, "favoured", fixed=fixed) - by_prompt(table, "against", fixed=fixed)


def _reduction(rows: Float[np.ndarray, "prompt 2"]) -> float:
    """The share of the mean bias (before, after) that is gone; NaN where there is none to begin with."""
    before, after = rows[:, 0].mean(), rows[:, 1].mean()
    return float(1 - abs(after) / abs(before)) if before else float("nan")
