"""Published version, section 3.1: heads located by what removing each one does, beside those located by increase."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims import ablation
from experiments.claims.ablation import AblationConfig, removals, strong
from experiments.claims.head_overlap import in_common, top_lists
from experiments.lab.editing import BAR, FOO, how_many
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, stack, where
from experiments.lab.intervals import Resample, resample
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, cannot_tell, told, verdict
from icl_lens.digest import json_digest

QUARTER = 0.25
"""Of the heads: what both ways of locating share beyond random heads of the same layers."""
FEWEST = 2
"""Located heads of which a share can be in common."""
VARIANTS = (FOO, BAR)


@dataclass(frozen=True)
class CausalLocationConfig(AblationConfig):
    """As for ablation; prompts of either label that heads are located on, and bootstrap draws of the overlap."""

    prompts: int = 100
    overlap_draws: int = 1000


def table(study: Study, config: CausalLocationConfig) -> pd.DataFrame:
    """Two tables under one another: measure "removal", with `ablation`'s columns; measure "overlap", with draw, shared,
    layers (shares of the heads), clusters, spearman.

    Heads are located by the fall of log p(answer) (or of its log-odds, by contrast) when each alone is set to zero at
    the last position, on `prompts` prompts of the choosing half, mean over both labels as the answer; those with next
    to no effect are left out, as in `ablation.strong`. `shared`: how many of them are among as many of largest
    increase, on the same prompts; `layers`: how many random heads of the same layers would be. Draw 0 is the data.
    """
    rows = study.halves[0][: config.prompts]
    effects = sum_of(effects_of(study, variant, rows) for variant in VARIANTS)
    increases = sum_of(study.rises(variant)[rows] for variant in VARIANTS)
    best = best_heads(effects, 2 * how_many(study, config.heads))
    heads = strong(best, effects.mean(0), config.least)
    drawn = resample([study.queries()[rows.numpy()]], draws=config.overlap_draws, seed=study.settings.seed)
    causal, static = (top_lists(values, len(heads), drawn.weights) for values in (effects, increases))
    shared, layers = in_common(causal, static)
    agreed = il.agreement(effects.mean(0), increases.mean(0), k=len(heads))
    overlap = pd.DataFrame({"draw": range(len(shared)), "shared": shared, "layers": layers})
    overlap = overlap.assign(measure="overlap", prompt=-1, query=-1, clusters=drawn.clusters, spearman=agreed.spearman)
    removed = removals(study, heads, config).assign(measure="removal")
    return stack(removed.assign(query=study.queries()[removed["prompt"].to_numpy(dtype=int)]), overlap)


def sum_of(values: Iterable[Float[Tensor, "row layer head"]]) -> Float[Tensor, "row layer head"]:
    """The sum, prompt by prompt."""
    return torch.stack([one.double() for one in values]).sum(0)


def best_heads(values: Float[Tensor, "row layer head"], count: int) -> list[il.Head]:
    """The heads of largest mean, best first."""
    order = values.mean(0).flatten().argsort(descending=True)[:count]
    return [il.Head.at(i, values.shape[2]) for i in order.tolist()]


def effects_of(study: Study, variant: Variant, rows: Tensor) -> Float[Tensor, "row layer head"]:
    """What removing each head at the last position costs the answer, nats: of log p, or by contrast of its log-odds."""
    batches = study.batches(variant, rows)

    def effects(i: int) -> Tensors:
        found = il.head_effects(study.model, batches[i], positions="last")
        return {"value": torch.stack([found.log_prob, found.log_odds], dim=-1).float()}

    # A row of one token for each head takes about as long as ten prompts. Both rankings read one pass.
    found = study.passes.run(
        f"effects of each head, {variant}",
        [10 * len(batch) for batch in batches],
        effects,
        key=f"effects-{json_digest([repr(variant), rows.tolist()])[:12]}",
    )
    return joined(found)["value"][..., 0 if study.ranking == "increase" else 1]


def claim(table: pd.DataFrame) -> Verdict:
    """What ablation asks of located heads holds; and they are the heads of largest increase too, beyond their layers.

    Undecided where random heads of the same layers would share so many that none could share a quarter more.
    """
    removed, overlap = where(table, measure="removal"), where(table, measure="overlap").sort_values("draw")
    shared, layers = array(overlap, "shared"), array(overlap, "layers")
    drawn = Resample(np.ones((1, 1)), int(overlap["clusters"].iloc[0]))
    beyond = drawn.estimate(shared - layers)
    unit = "of the heads"
    count = len(str(removed["heads"].iloc[0]).split())
    if count < FEWEST:
        common = cannot_tell(f"{count} head is too few to share some with another list", unit=unit)
    elif layers[0] > 1 - QUARTER:
        common = cannot_tell(f"random heads of the same layers would share {layers[0]:.0%}", unit=unit, estimate=beyond)
    else:
        what = "share among as many of largest increase, beyond random heads of the same layers,"
        common = verdict(beyond, least=QUARTER, unit=unit, what=what)
    return told(
        all_of(*ablation.parts(removed), common),
        f"{shared[0]:.0%} of the heads are among as many of largest increase",
        f"rank correlation of effect and increase over all heads {overlap['spearman'].iloc[0]:.2f}",
        *ablation.notes(removed),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy without edits, and with random and causally located heads set to zero or to their mean; see ablation."""
    drawn = ablation.figure(where(table, measure="removal"))
    overlap = where(table, measure="overlap", draw=0).iloc[0]
    ax = drawn.axes[0]
    said = f"{overlap['shared']:.0%} located by increase too (random: {overlap['layers']:.0%})"
    ax.set_xlabel(f"{ax.get_xlabel()}; {said}; rank correlation {overlap['spearman']:.2f}", fontsize=7)
    return drawn


EXPERIMENT = Experiment(
    id="causal-location",
    title="Heads located by removing them",
    source="Published version, section 3.1",
    claim=(
        "Heads located by causal effect carry in-context learning, and they are the heads of largest increase: "
        "the paper locates by both."
    ),
    criterion=(
        "With heads located by the fall of the answer when each alone is set to zero at the last position, over both "
        "labels as the answer, all that "
        f"ablation asks holds; and {QUARTER:.0%} of them are among as many of largest increase, beyond what random "
        "heads of the same layers would be. Undecided where these would be too many already, and where one head is "
        "located only."
    ),
    paper="6 heads for each label, about 1 % of all, found by causal tracing and by increases",
    about="heads located by causal effect on log p(answer), or by contrast on its log-odds",
    chosen=(
        "That one located head leaves the verdict open, and what ablation's page names, was settled after results had "
        "been seen."
    ),
    departs=(
        "The published version finds heads by causal tracing and by increases together, and does not set the two "
        "beside each other. Here a head's effect is what the answer loses when that head alone is set to zero at "
        "the last position, exactly."
    ),
    config=CausalLocationConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
