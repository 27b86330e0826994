"""Are located heads induction heads? Their scores on random tokens shown twice, and how many are among the best."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.controls import beside
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, long, where
from experiments.lab.intervals import Resample, clusters_of, resample
from experiments.lab.passes import joined
from experiments.lab.reductions import head_increases
from experiments.lab.repeats import front_of, random_tokens, repeat_scores
from experiments.lab.study import Need, Study
from experiments.lab.verdict import CHANGE, Verdict, all_of, cannot_tell, verdict
from icl_lens.digest import json_digest
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

LEAST = 0.25
"""Of located heads: the smallest share beyond chance that is worth the claim."""
HALF = 0.5
"""Of a head's attention: an induction head gives at least this to what followed."""


@dataclass(frozen=True)
class InductionConfig:
    """Heads located for each label (at most one in eight), sequences of random tokens, and tokens in each."""

    heads: int = 6
    sequences: int = 40
    length: int = 24


def table(study: Study, config: InductionConfig) -> pd.DataFrame:
    """prompt and query (a sequence of random tokens), layer, head, name, group ("located" | "random"), value (0–1).

    `value`: a head's induction score, its attention to the token after the last occurrence, mean over the second half
    of a sequence shown twice. "random" are all other heads.
    """
    view = study.view
    located = {*located_for_both(study, study.few(config.heads))}
    front = front_of(study, study.batch(FOO).tokens[0].tolist())
    length = min(config.length, (int(view.cfg.n_ctx) - len(front)) // 2)
    seeds = [1_000_003 * study.settings.seed + i for i in range(config.sequences)]
    found = joined(
        study.passes.run(
            "random tokens repeated",
            [2] * len(seeds),
            lambda i: repeat_scores(study, random_tokens(study, length, seeds[i]), front=front),
            key=f"random-tokens-{json_digest([seeds, length])}",
        )
    )["induction"]
    axes = {"prompt": range(len(seeds)), "layer": range(view.n_layers), "head": range(view.n_heads)}
    frame = long(found, "value", **axes)
    heads = [il.Head(*pair) for pair in zip(frame["layer"], frame["head"], strict=True)]
    return frame.assign(
        query=frame["prompt"],
        name=[str(head) for head in heads],
        group=["located" if head in located else "random" for head in heads],
    )


def claim(table: pd.DataFrame) -> Verdict:
    """Located heads are among the best induction heads beyond chance, and better ones than others of their layers."""
    scores, drawn, heads = _scores(table)
    located = (heads["group"] == "located").to_numpy()
    count = int(located.sum())
    best = scores.argsort(axis=1)[:, ::-1][:, :count]
    if np.take_along_axis(scores, best[:, :1], axis=1)[0, 0] < HALF:
        why = f"no head gives half of its attention to what followed: the best gives {scores[0].max():.2g}"
        return cannot_tell(why, unit="of located heads")
    shared = located[best].mean(1)
    layers = heads["layer"].to_numpy()
    # What as many random heads of the located ones' layers would share.
    share_of = {layer: located[layers == layer].mean() for layer in {*layers.tolist()}}
    chance = np.array([share_of[layer] for layer in layers.tolist()])[best].mean(1)
    shared_layers = {*where(table, group="located")["layer"]} & {*where(table, group="random")["layer"]}
    comparable = table.loc[np.isin(array(table, "layer"), [*shared_layers])]
    if not len(comparable):
        return cannot_tell("no layer has located heads and others", unit="of located heads")
    other = beside(comparable, "value")
    return all_of(
        verdict(
            drawn.estimate(shared - chance, bounds=CHANGE),
            least=LEAST,
            unit="of located heads",
            what=f"located heads among the {count} best induction heads, minus chance in their layers,",
        ),
        verdict(
            other.drawn.estimate(other.located - other.random),
            least=0.0,
            unit="of attention",
            what=f"induction score of located heads minus {other.named} of their layers",
        ),
    )


def _scores(table: pd.DataFrame) -> tuple[Float[np.ndarray, "draw head"], Resample, pd.DataFrame]:
    """Every head's mean score in the data (first) and in bootstrap draws of sequences; and the heads, in that order."""
    wide = table.pivot_table("value", index=["prompt", "query"], columns="name", sort=False)
    drawn = resample(clusters_of(wide.index))
    heads = table.drop_duplicates("name").set_index("name").loc[list(wide.columns)]
    return drawn.mean(wide.to_numpy()), drawn, heads


def figure(table: pd.DataFrame) -> Figure:
    """Left: the score of all heads, by layer. Right: of the located ones, best first, beside their layers' others.

    A head whose layer has no others is on the left only.
    """
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    for group, hue, size in (("random", GREY, 3), ("located", ORANGE, 4)):
        part = where(table, group=group).groupby("name").agg({"layer": "first", "value": "mean"})
        name = "located heads" if group == "located" else "other heads"
        left.plot(array(part, "layer"), array(part, "value"), "o", color=hue, markersize=size, label=name)
    left.axhline(HALF, color="0.3", linewidth=0.8, linestyle=":")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="Layer", ylabel="Attention to what followed\nthe last time (0–1)")
    own = where(table, group="located")
    scored = {name: part["value"].mean() for name, part in own.groupby("name")}
    layer_of = dict(zip(own["name"], own["layer"], strict=True))
    beside_others = {*where(table, group="random")["layer"]}
    names = sorted((str(name) for name in scored if layer_of[name] in beside_others), key=lambda name: -scored[name])
    samples = [by_prompt(own, "value", name=name) for name in names]
    others = [by_prompt(table, "value", group="random", layer=layer_of[name]) for name in names]
    at = np.arange(len(names))
    for shift, some, hue, label in ((-0.2, samples, BLUE, "located head"), (0.2, others, GREY, "others of its layer")):
        right.bar(at + shift, means(some), width=0.4, color=hue, label=label)
        right.errorbar(at + shift, means(some), yerr=whiskers(some), **WHISKERS)
        mark_zeros(right, at + shift, means(some))
    name_heads(right, names)
    right.set_xlabel("Located heads, best induction head first")
    legend_below(drawn, left, right)
    return drawn


EXPERIMENT = Experiment(
    id="induction",
    title="Located heads and induction heads",
    source="Olsson et al. 2022 (arXiv 2209.11895)",
    claim="Heads that carry in-context learning are the induction heads.",
    criterion=(
        "On random tokens shown twice, the share of located heads among as many heads of highest induction score "
        f"exceeds that of random heads of the same layers by {LEAST:.0%}, and their score exceeds that of the other "
        f"heads of their layers. Undecided in a model whose best head gives less than {HALF:.0%} of its attention to "
        "what followed."
    ),
    paper=None,
    departs=(
        "Not a claim of the paper, but of a neighbouring one, about heads found on random tokens shown twice. Here "
        "they are set beside the heads that this paper's increases locate."
    ),
    config=InductionConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
