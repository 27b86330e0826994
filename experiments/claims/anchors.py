"""Label words are anchors (Wang et al. 2023): texts flow to labels in shallow layers, labels to the end in deep."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, whiskers
from experiments.lab.editing import BAR, FOO
from experiments.lab.experiment import NO_HEADS, Experiment
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.intervals import Resample, clusters_of, resample
from experiments.lab.passes import Tensors, joined
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, cannot_tell, told, verdict
from icl_lens.interventions.saliency import KINDS, edge_kinds
from icl_lens.metrics import label_log_odds
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE
from icl_lens.report.plots import PAGE

LEAST = 0.1
"""Of the answer's log-odds: the smallest loss worth the claim."""
TWICE = 2 / 3
"""The share of edges that are twice as salient as those beside them."""
FLOWS = {"text_to_label": ("shallow", "text_to_other"), "label_to_last": ("deep", "other_to_last")}
"""The two flows, the half of the layers each is said to be in, and the edges of other tokens that it is set beside."""
OTHER = {"shallow": "deep", "deep": "shallow"}
NAMES = {"text_to_label": "text to label", "label_to_last": "label to last"}


@dataclass(frozen=True)
class AnchorsConfig:
    """How many prompts have their saliency measured: each takes a pass there and back."""

    prompts: int = 300


def halves_of(n_layers: int) -> dict[str, range]:
    """The shallower and the deeper half; the middle one of an odd number of layers is in neither."""
    half = n_layers // 2
    return {"shallow": range(half), "deep": range(n_layers - half, n_layers)}


def cut_edges(batch: il.PromptBatch, flow: str, rng: torch.Generator | None) -> Bool[Tensor, "batch query key"]:
    """The edges of a flow, or (with `rng`) as many other tokens' edges of the same kind.

    Into as many random other tokens of the demonstrations as there are labels; or from the last position to as many
    random other tokens. The prompt's first token, into which nothing flows, is not drawn.
    """
    kinds = edge_kinds(batch)
    if rng is None:
        return kinds[flow]
    others = kinds[FLOWS[flow][1]]
    axis = 2 if flow == "text_to_label" else 1
    free = others.any(axis)
    free[:, 0] = False
    count = (batch.label_positions >= 0).sum(-1, keepdim=True)
    luck = torch.rand(free.shape, generator=rng).to(free.device).masked_fill(~free, -1.0)
    rank = luck.argsort(-1, descending=True).argsort(-1)
    drawn = free & (rank < count)
    return others & (drawn[:, :, None] if flow == "text_to_label" else drawn[:, None, :])


def table(study: Study, config: AnchorsConfig) -> pd.DataFrame:
    """measure ("saliency" | "odds"), answer, half, edges, cut ("none" | "own" | "random"), layer, prompt, value (nats).

    "saliency": the mean of each kind of edges (`saliency.KINDS`) by layer, of the first test prompts. "odds": the
    answer's log-odds with nothing cut, and with a flow's edges, or as many random tokens', cut in a half of the layers.
    """
    halves = halves_of(study.view.n_layers)
    rows = study.test[: config.prompts]
    half_of = {layer: half for half, layers in halves.items() for layer in layers}
    frames = []
    for answer, variant in (("foo", FOO), ("bar", BAR)):
        found = study.over(variant, rows, lambda batch: _flow(study, batch), what="saliency of attention")
        values = torch.stack([found[kind] for kind in KINDS], dim=-1)
        frame = long(values, "value", prompt=rows.tolist(), layer=range(study.view.n_layers), edges=KINDS)
        half = [half_of.get(layer, "middle") for layer in frame["layer"]]
        frames.append(frame.assign(measure="saliency", answer=answer, half=half, cut="none"))
        cases = [(None, "", "none")]
        if halves["shallow"]:
            cases += [(half, flow, cut) for half in halves for flow in FLOWS for cut in ("own", "random")]
        for half, flow, cut in cases:
            heads = [head for head in study.view.heads() if half is not None and head.layer in halves[half]]
            odds = _odds(study, variant, heads, flow, cut)
            columns = {"prompt": study.test.tolist(), "value": odds, "layer": -1, "edges": flow, "half": half or ""}
            frames.append(pd.DataFrame(columns).assign(measure="odds", answer=answer, cut=cut))
    return stack(*frames)


def _flow(study: Study, batch: il.PromptBatch) -> Tensors:
    flow = il.saliency_flow(study.model, batch)
    return {kind: getattr(flow, kind) for kind in KINDS}


def _odds(study: Study, variant: Variant, heads: list[il.Head], flow: str, cut: str) -> Float[np.ndarray, " prompt"]:
    """The answer's log-odds with edges of these heads cut; test half."""
    batches = study.batches(variant, study.test)

    def scored(i: int) -> Tensors:
        batch = batches[i]
        if not heads:
            scores = il.label_log_probs(study.model, batch)
        else:
            # A seed for each batch: whether those before it are computed here makes no difference.
            rng = torch.Generator().manual_seed(1_000_003 * study.settings.seed + i) if cut == "random" else None
            with il.block_attention(study.model, heads, cut_edges(batch, flow, rng)):
                scores = il.label_log_probs(study.model, batch)
        return {"odds": label_log_odds(scores, batch.answer, choices=batch.label_mask)}

    what = f"{variant}: {NAMES.get(flow, 'nothing')} cut ({cut})"
    found = joined(study.passes.run(what, [len(batch) for batch in batches], scored))
    return found["odds"].double().numpy()


def claim(table: pd.DataFrame) -> Verdict:
    """Each flow matters in its half, to the answer when cut off and in saliency, more than elsewhere and others."""
    odds = where(table, measure="odds")
    clean = by_prompt(odds, "value", cut="none")
    drawn = resample(clusters_of(clean.index))
    whole = drawn.mean(clean.to_numpy())
    if not len(where(odds, half="deep")):
        return cannot_tell("a model of one layer has no shallow and deep layers to compare", unit="of the log-odds")
    if whole[0] <= 0:
        return cannot_tell("the answer has no log-odds to lose", unit="of the log-odds")

    def cost(flow: str, half: str, cut: str = "own") -> Float[np.ndarray, " draw"]:
        return 1 - drawn.mean(by_prompt(odds, "value", edges=flow, half=half, cut=cut).to_numpy()) / whole

    parts = []
    for flow in reversed(FLOWS):
        half, beside = FLOWS[flow]
        parts += _lost(drawn, cost, flow, half)
        parts.append(_salient(table, flow, beside, half))
    rest = by_prompt(table, "value", measure="saliency", edges="rest").mean()
    return told(all_of(*parts), f"mean saliency of all other edges: {rest:.2g} nats")


def _lost(drawn: Resample, cost: Callable[..., Float[np.ndarray, " draw"]], flow: str, half: str) -> list[Verdict]:
    """What the answer loses by a cut: of its log-odds, beyond the other half, beyond random tokens."""
    own, unit, name = cost(flow, half), "of the log-odds", f"{NAMES[flow]} cut in the {half} half"
    return [
        verdict(drawn.estimate(own), least=LEAST, unit=unit, what=f"what the answer loses, {name},"),
        verdict(
            drawn.estimate(own - cost(flow, OTHER[half])),
            least=0.0,
            unit=unit,
            what=f"what it loses beyond a cut in the {OTHER[half]} half, {NAMES[flow]},",
        ),
        verdict(
            drawn.estimate(own - cost(flow, half, "random")),
            least=0.0,
            unit=unit,
            what=f"what it loses beyond random tokens' edges, {name},",
        ),
    ]


def _salient(table: pd.DataFrame, flow: str, beside: str, half: str) -> Verdict:
    """A flow's mean saliency in a half, as a share in its sum with that of the edges beside it; by prompt."""
    one, other = (by_prompt(table, "value", measure="saliency", edges=kind, half=half) for kind in (flow, beside))
    shares = one / (one + other)
    drawn = resample(clusters_of(shares.index))
    what = f"saliency of {NAMES[flow]} in the {half} half, of it and other tokens',"
    estimate = drawn.estimate(drawn.mean(shares.to_numpy()), bounds=SHARE)
    return verdict(estimate, least=round(TWICE, 3), unit="of both", what=what)


def figure(table: pd.DataFrame) -> Figure:
    """Left: mean saliency of each kind of edges by layer. Right: the answer's log-odds with edges cut, by half."""
    drawn = Figure(figsize=(PAGE, 2.5), layout="constrained")
    left, right = drawn.subplots(1, 2)
    saliency = where(table, measure="saliency")
    layers = sorted({*saliency["layer"]})
    styles = {
        "text_to_label": (BLUE, "o-", "text to label"),
        "text_to_other": (BLUE, "o:", "text to other tokens"),
        "label_to_last": (ORANGE, "s-", "label to last"),
        "other_to_last": (ORANGE, "s:", "other tokens to last"),
        "rest": (GREY, "^--", "all other edges"),
    }
    for kind, (hue, style, name) in styles.items():
        heights = [by_prompt(saliency, "value", edges=kind, layer=layer).mean() for layer in layers]
        seen = [(layer, height) for layer, height in zip(layers, heights, strict=True) if height > 0]
        left.plot(*zip(*seen, strict=True), style, color=hue, markersize=3, linewidth=1, label=name)
    left.set(xlabel="Layer", ylabel="Mean saliency of an edge\n(nats, log scale)", yscale="log")
    left.xaxis.get_major_locator().set_params(integer=True)

    odds = where(table, measure="odds")
    right.axhline(by_prompt(odds, "value", cut="none").mean(), color="0.3", linewidth=0.8, linestyle=":")
    ticks, bars = [(flow, half) for flow in FLOWS for half in OTHER], []
    for i, (cut, hue, name) in enumerate(
        (("own", GREEN, "cut: these edges"), ("random", GREY, "cut: random tokens' edges"))
    ):
        samples = [by_prompt(odds, "value", edges=flow, half=half, cut=cut) for flow, half in ticks]
        at = np.arange(len(ticks)) + 0.36 * (i - 0.5)
        right.bar(at, means(samples), width=0.36, color=hue, label=name)
        right.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
        bars += zip(at, means(samples), strict=True)
    right.axhline(0, color="0.3", linewidth=0.4)
    mark_zeros(right, *zip(*bars, strict=True))
    right.set_xticks(range(len(ticks)), [f"{NAMES[flow]},\n{half} half" for flow, half in ticks], fontsize=6)
    right.set_ylabel("Answer's log-odds (nats);\ndotted: nothing cut")
    legend_below(drawn, left, right, columns=4)
    return drawn


EXPERIMENT = Experiment(
    id="anchors",
    title="Label words are anchors",
    source="Wang et al. 2023 (arXiv 2305.14160)",
    claim="Texts are gathered at label words in shallow layers, and the answer is read from label words in deep ones.",
    criterion=(
        "Without the edges from labels to the last position in the deeper half of the layers the answer loses "
        f"{LEAST:.0%} of its log-odds, more than in the shallower half and than without as many random tokens; so it "
        "does without the edges from all that is before a label to it, in the shallower half. The saliency of both, "
        "there, is twice that of other tokens' edges."
    ),
    paper=None,
    about=NO_HEADS,
    departs=(
        "Not a claim of the paper, but of a neighbouring one, on labels with a meaning and large models. Here "
        "labels are foo and bar, halves of the layers stand for its first and last five, and edges are cut where "
        "it isolates layers. Cut is all that comes before a label, in half of the layers at once; shallow-flow cuts a "
        "label's own text only, in a quarter of them, and may say otherwise."
    ),
    config=AnchorsConfig(),
    table=table,
    verdict=claim,
    figure=figure,
)
