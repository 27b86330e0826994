"""Which method finds the heads that matter at what cost, and where are they?

Deep share: S = Σ_{h deep} max(c_h, 0) / Σ_h max(c_h, 0), where c_h is a head's mean contribution on held-out prompts.
Deep is the second half of the layers; with an odd number, the middle layer counts half. Deep heads write more than
shallow ones, whatever the answer is, so the control is the same share for contributions that say nothing about it: with
the sign of each prompt's contrasts drawn at random, or the increases of a random token. The same share is computed with
layers instead of heads: deep attention layers among all attention and FFN layers.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.findings.ablation import ablated_scores
from experiments.framework.estimate import Comparison, compare, compare_drawn
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_of
from experiments.framework.locating import METHODS, best_heads
from experiments.framework.plotting import COLORS, cell_rows, dots, legend_below
from experiments.framework.sentences import each
from experiments.framework.study import N_RANDOM_SETS, RANKINGS, Study, clusters_of
from icl_lens.intervals import weights_with_data

SHOWN_HEADS = 20
NO_CONTRIBUTION = "located heads add nothing above zero on held-out prompts, so shares would be those of noise"

UNRELATED = "the same for contributions unrelated to the answer"
DEPTH = percent("depth", "share of the deeper half of the layers", UNRELATED, "% of all positive head contributions")
DEPTH_OF_EFFECTS = replace(DEPTH, name="depth_effects", unit="% of all positive effects of removing one head")
DEPTH_OF_LAYERS = percent(
    "depth_layers",
    "share of deep attention layers",
    UNRELATED,
    "% of all positive layer contributions",
)
FFN_LAYERS = replace(DEPTH_OF_LAYERS, name="depth_ffns", quantity="share of deep FFN layers")
LOST = tuple(
    Measure(
        f"lost_{name}",
        f"lost without the heads found by {method.name}",
        "lost without random heads of their layers",
        "log-odds of the answer, nats",
    )
    for name, method in METHODS.items()
)
OWN_METHOD = next(one for one in LOST if one.name == "lost_increase")
OTHER_METHODS = [one for one in LOST if one is not OWN_METHOD]


def measure(study: Study) -> Measured:
    """Measure the deeper half's share by either ranking, by exact effects and of layers, and what each method finds."""
    scores = {name: method.score(study, study.halves()[0]) for name, method in METHODS.items()}
    layers = _layer_contributions(study)
    rows: list[Row] = []
    for i, ranked in enumerate(study.by_ranking()):
        is_contrast = ranked.ranking == "contrast"
        values = ranked.head_scores("held_out")
        unrelated = None if is_contrast else study.map(study.held_out, random_increases)
        unrelated_layers = None if is_contrast else layers[:, 2]
        found = {"depth": deep_share(values, unrelated, study.clusters)}
        for name, component in (("depth_layers", 0), ("depth_ffns", 1)):
            counted = slice(component, component + 1)
            found[name] = deep_share(layers[:, i], unrelated_layers, study.clusters, counted=counted)
        if is_contrast:
            found["depth_effects"] = deep_share(scores["effects"], None, clusters_of(study.halves()[0]))
        if not compare(ranked.of_located(values).sum(1), 0.0, study.clusters).low > 0:
            found = dict.fromkeys(found, NO_CONTRIBUTION)
        rows += rows_of(found, ranking=ranked.ranking)
    lost, details = _compared(study, {name: best_heads(one, study.n_located) for name, one in scores.items()})
    tables = [details, _layer_table(layers), _top_heads(study)]
    return Measured([*rows, *lost], pd.concat(tables, ignore_index=True))


def deep_share(
    values: Float[Tensor, "row layer part"],
    unrelated: Float[Tensor, "row layer part"] | None,
    clusters: Int[np.ndarray, " row"],
    counted: slice = slice(None),
) -> Comparison:
    """Compare the deep half's share of all positive mean contributions, in `counted` parts, with unrelated ones.

    Without `unrelated`, these are `values` with a random sign for each query, drawn anew for each draw of queries.
    """
    weights = weights_with_data(clusters)
    shares = _shares(weights, values, counted)
    if unrelated is None:
        rng = np.random.default_rng(0)
        signs = rng.choice([-1.0, 1.0], size=(len(weights), int(clusters.max()) + 1))[:, clusters]
        control = _shares(weights * signs, values, counted)
        control[0] = control[1:].mean()
    else:
        control = _shares(weights, unrelated, counted)
    return compare_drawn(shares, control, len(clusters), len(set(clusters.tolist())), bounds=(0, 1))


def _shares(
    weights: Float[np.ndarray, "draw row"], values: Float[Tensor, "row layer part"], counted: slice
) -> Float[np.ndarray, " draw"]:
    """Return, for each draw of the rows, the deep half's share of all positive means; an even share if none is."""
    positive = np.clip(np.einsum("dr,rlp->dlp", weights, values.double().numpy()), 0, None)
    n_layers, n_parts = positive.shape[1:]
    depth = 0.5 + 0.5 * np.sign(np.arange(n_layers) - (n_layers - 1) / 2)
    total = positive.sum((1, 2))
    nothing = np.full(len(total), 0.5 * len(range(n_parts)[counted]) / n_parts)
    return np.divide(positive[..., counted].sum(-1) @ depth, total, out=nothing, where=total > 0)


def random_tokens(batch: il.PromptBatch, d_vocab: int) -> Int[Tensor, " row"]:
    """Return one random token of the vocabulary per prompt, the same for the same prompt in every batch."""
    draws = [random.Random(f"{prompt.query} {prompt.demonstrations}").randrange(d_vocab) for prompt in batch.prompts]
    return torch.tensor(draws, device=batch.tokens.device)


def random_increases(acts: il.Activations) -> Float[Tensor, "row layer head"]:
    """Return what each head adds to the log-probability of a random token, nats."""
    return il.head_log_prob_increase(acts, random_tokens(acts.batch, acts.readout.W_U.shape[1]))


def _compared(study: Study, found: Mapping[str, Sequence[il.Head]]) -> tuple[list[Row], pd.DataFrame]:
    """Measure log-odds lost on held-out prompts without each method's heads, next to random heads of their layers."""
    sets = [[], *(one for heads in found.values() for one in [heads, *study.random_sets(heads)])]
    odds = ablated_scores(study, sets).odds
    lost = (odds[:, :1] - odds)[:, 1:].reshape(len(odds), len(found), 1 + N_RANDOM_SETS)
    n_heads = len(study.view.heads())
    rows, details = [], []
    for i, (name, heads) in enumerate(found.items()):
        compared = compare(lost[:, i, 0], lost[:, i, 1:].mean(1), study.clusters)
        compared = replace(compared, n_heads=len(heads))
        note = f"{len(heads)} of {n_heads} heads; with all heads the log-odds are {odds[:, 0].mean():.2f} nats"
        rows.append(Row.from_result(f"lost_{name}", compared, note=note))
        details.append(
            {"kind": "method", "name": METHODS[name].name, "quantity": compared.quantity, "control": compared.control}
            | {"low": compared.low, "high": compared.high, "passes": METHODS[name].passes(n_heads)}
            | {"heads": " ".join(map(str, heads)), "in_common_with_contrast": len({*heads} & {*found["contrast"]})}
        )
    return rows, pd.DataFrame(details)


def _layer_contributions(study: Study) -> Float[Tensor, "row kind layer component"]:
    """Return what each layer's attention and FFN add on held-out prompts, nats.

    Kinds are the answer's contrast, its increase, and the increase of a random token.
    """

    def added(acts: il.Activations) -> Float[Tensor, "row 3 layer 2"]:
        tokens, others = acts.batch.answer_tokens, acts.batch.other_label_tokens
        found = (
            il.layer_log_prob_increase(acts, tokens, against=others),
            il.layer_log_prob_increase(acts, tokens),
            il.layer_log_prob_increase(acts, random_tokens(acts.batch, acts.readout.W_U.shape[1])),
        )
        return torch.stack([torch.stack([*increase], dim=-1) for increase in found], dim=1)

    return study.map(study.held_out, added)


def _layer_table(contributions: Float[Tensor, "row kind layer component"]) -> pd.DataFrame:
    means = contributions.double().mean(0)
    return pd.DataFrame(
        {"kind": "layer", "ranking": ranking, "name": name, "layer": layer, "quantity": float(means[i, layer, j])}
        for i, ranking in enumerate(RANKINGS)
        for j, name in enumerate(("attention", "FFN"))
        for layer in range(means.shape[1])
    )


def _top_heads(study: Study) -> pd.DataFrame:
    """Return the `SHOWN_HEADS` heads of largest mean (nats) on held-out prompts, by either ranking."""
    rows = []
    for ranked in study.by_ranking():
        values = ranked.head_scores("held_out")
        for head in best_heads(values, min(SHOWN_HEADS, values[0].numel())):
            mean = float(values[:, head.layer, head.head].double().mean())
            rows.append((ranked.ranking, str(head), head.layer, mean))
    return pd.DataFrame(rows, columns=["ranking", "name", "layer", "quantity"]).assign(kind="head")


def draw(details: pd.DataFrame) -> Figure:
    """Draw each method's loss next to its control, and the layers' contributions: one row per model and task."""
    figure, cells = cell_rows(details, 2, width_ratios=(3, 2))
    for (left, right), title, part in cells:
        methods = part.loc[part["kind"] == "method"]
        costs = zip(methods["name"], methods["passes"], strict=True)
        names = [f"{name}\n{passes:.0f} pass{'es' * (passes > 1)}" for name, passes in costs]
        dots(left, methods, names, names=("without located heads (bar: 95%)", "without random heads"))
        left.set_title(title, fontsize=8)
        layers = part[(part["kind"] == "layer") & (part["ranking"] == "contrast")]
        for color, (name, line) in zip(COLORS[2:], layers.groupby("name"), strict=False):
            right.plot(line["layer"], line["quantity"], "o-", ms=3, color=color, label=name)
        right.axhline(0, color="#bbbbbb", lw=0.8)
        right.set_title("contrast by layer, nats", fontsize=8)
    (left, right), _, _ = cells[-1]
    left.set_xlabel("log-odds lost by the answer, nats")
    right.set_xlabel("layer")
    legend_below(figure, left, right)
    return figure


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in a few sentences."""
    lost = {
        name: each(cells, f"lost_{name}", "{q} nats (random heads: {c})")
        for name in ("increase", "contrast", "effects")
    }
    by_contrast = each(cells, "depth", "{q}% (unrelated to the answer: {c}%)")
    by_increase = each(cells, "depth_layers", "{q}% (a random token: {c}%)", "increase")
    return (
        "Removing the heads that the paper's own method, the increase, finds in one run of the model costs the answer "
        f"{lost['increase']}. For heads found by contrast, also in one run, it is {lost['contrast']}, and for heads "
        f"found by removing each head in turn {lost['effects']}. "
        f"Of the heads' positive contributions by contrast, the deeper half of the layers has {by_contrast}. Of what "
        f"all layers add by the paper's own measure, the increase, deep attention layers have {by_increase}."
    )


FINDING = Finding(
    id="location",
    title="Which method finds the heads that matter, and where are they?",
    question="Does the answer lose more without the heads that the paper's own method finds in one run of the model "
    "than without random heads? Do contributions to the answer come from deep layers?",
    answer=answer,
    claim="In GPT-2 large almost all improvements come from deep attention layers, and the important heads are in "
    "layers 18–31 of 36. The paper's method runs the model once, where causal methods run it many times; the published "
    "version locates 12 heads by causal tracing as well.",
    covers="Figures 2–4 and 12–15, section 6.2, and the published version's causal tracing",
    measures=(OWN_METHOD, *OTHER_METHODS, DEPTH, DEPTH_OF_LAYERS, FFN_LAYERS, DEPTH_OF_EFFECTS),
    measure=measure,
    look_for="Left: log-odds lost without the heads that each method finds (bar: 95%) and without random heads of "
    "their layers; below a method's name is what it costs. Right: what each layer adds to the answer's contrast.",
    method="Contributions are head means over held-out prompts; negative ones count as zero. No share is given if the "
    "heads located on the other half contribute nothing here that is above zero. Every method ranks all heads on one "
    "half of the prompts; its best heads are set to zero at the last position of the other half and compared with the "
    "mean of 20 random sets of the same number of heads from the same layers. Causal tracing runs the prompt with its "
    "labels exchanged, restores one head's output at the last position, and measures the log-odds restored. Contrast, "
    "increase and attention cost one forward pass per prompt, the gradient estimate five (a backward one counts as "
    "two), and exact effects and causal tracing one for each head; but heads share the "
    "prompt's keys and values, so that each costs one token.",
    caveats=(
        "The share of the deeper half was the main measure at first. It became a further one when it turned out not to "
        "exceed its control on planted models either, whose heads are deep: a few heads have nearly all contributions, "
        "and their signs often agree after shuffling.",
        "Contrast and increase count only what a head writes directly into the answer; exact effects and tracing also "
        "count what later layers make of it.",
        "A loss is measured by removing heads, which is also how exact effects rank them.",
    ),
    draw=draw,
)
