"""Do shallow layers collect texts at labels, and do deep layers read them there?

Attention is blocked along the edges of one flow in some layers, all heads at once, and what the answer's log-odds lose
(nats) is measured. Text to label: from each label, and the tokens between text and label, to the demonstration's own
text. Label to last: from the last position to every label. A blocked edge's attention goes to the query's other keys.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

import icl_lens as il
from experiments.framework.estimate import compare
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, reason_rows, rows_or_reason
from experiments.framework.label_attention import label_edges, random_edges, text_edges
from experiments.framework.plotting import curves
from experiments.framework.sentences import each
from experiments.framework.study import Study, clusters_of, thin_out
from icl_lens.metrics import label_log_odds

UNIT = "log-odds lost by the answer, nats"
TEXT = Measure("text_to_label", "text → label blocked in the shallow half", "the same in the deep half", UNIT)
LABEL = Measure("label_to_last", "label → last blocked in the deep half", "the same in the shallow half", UNIT)
RANDOM = tuple(
    Measure(f"{one.name}_random", f"{one.quantity}, next to random edges", "the same number of random edges", UNIT)
    for one in (TEXT, LABEL)
)
INTACT = Measure("intact", "intact model", "text → label blocked in all layers", "log-odds of the answer, nats")
SALIENCY = tuple(
    percent(
        f"saliency_{flow}",
        f"saliency of {words} in the {half} half",
        "as salient as other tokens' edges",
        f"% of the saliency of {words} and other tokens'",
    )
    for flow, words, half in (
        ("text_to_label", "edges into labels", "shallow"),
        ("label_to_last", "edges from labels to the last position", "deep"),
    )
)
EDGES = {"text_to_label": text_edges, "label_to_last": label_edges}
NAMES = {
    "text_to_label": ("text → label", "random edges into labels"),
    "label_to_last": ("label → last", "random edges into the last token"),
}
N_WINDOWS = 4
"""Maximum number of windows of layers in the curve."""
N_CURVE, N_SALIENCY = 100, 200
"""Minimum number of prompts (if there are more) for the curve, and for saliency, which takes a backward pass."""


def measure(study: Study) -> Measured:
    """Measure what blocking each flow costs, by half of the layers and in windows of them, and the saliency of both."""
    halves = halves_of(study.view.n_layers)
    try:
        rows, details = _blocked_rows(study, halves)
    except il.InputError as error:
        rows = reason_rows((TEXT, LABEL, *RANDOM, INTACT), error)
        details = pd.DataFrame()
    rows += rows_or_reason(SALIENCY, lambda: _saliency_rows(study, halves))
    return Measured(rows, details)


def halves_of(n_layers: int) -> dict[str, list[int]]:
    """Return the shallow and the deep half of the layers; the middle one of an odd number is in neither."""
    half = n_layers // 2
    if not half:
        raise il.InputError("a model with one layer has no shallow and deep half")
    return {"shallow": list(range(half)), "deep": list(range(n_layers - half, n_layers))}


def _blocked_rows(study: Study, halves: dict[str, list[int]]) -> tuple[list[Row], pd.DataFrame]:
    """Measure what blocking each flow costs: rows by half of the layers, and the curve by window of layers."""
    batch, layers = study.held_out, range(study.view.n_layers)
    intact, rows = log_odds(study, batch), []
    for flow, half, other in (("text_to_label", "shallow", "deep"), ("label_to_last", "deep", "shallow")):
        lost = intact - log_odds(study, batch, halves[half], flow)
        controls = {flow: (other, "own"), f"{flow}_random": (half, "random")}
        for name, (where, kind) in controls.items():
            control = intact - log_odds(study, batch, halves[where], flow, kind)
            rows.append(Row.from_result(name, compare(lost, control, study.clusters)))
    nothing = log_odds(study, batch, layers, "text_to_label")
    rows.append(Row.from_result("intact", compare(intact, nothing, study.clusters)))
    some = thin_out(batch, N_CURVE)
    intact, details = log_odds(study, some), []
    for window in np.array_split(layers, min(N_WINDOWS, len(layers))):
        for flow, names in NAMES.items():
            for kind, name in zip(("own", "random"), names, strict=True):
                lost = intact - log_odds(study, some, window.tolist(), flow, kind)
                columns = {"edges": name, "first_layer": int(window[0]), "last_layer": int(window[-1])}
                details.append(columns | {"layer": float(window.mean()), "lost": float(lost.mean())})
    return rows, pd.DataFrame(details)


def log_odds(
    study: Study, batch: il.PromptBatch, layers: Iterable[int] = (), flow: str = "", kind: str = "own"
) -> Float[np.ndarray, " row"]:
    """Return the answer's log-odds after each prompt with a flow's edges blocked in some layers, nats."""
    heads = [head for head in study.view.heads() if head.layer in set(layers)]
    found = []
    for i, piece in enumerate(study.pieces(batch)):
        if heads:
            edges = EDGES[flow](piece)
            if kind == "random":
                edges = random_edges(edges, torch.Generator().manual_seed(1000 * study.seed + i))
            with il.edited(study.model, il.Block(heads, edges)):
                log_probs = il.score(study.model, piece)
        else:
            log_probs = il.score(study.model, piece)
        found.append(label_log_odds(log_probs, piece.answer).cpu())
    return torch.cat(found).double().numpy()


def _saliency_rows(study: Study, halves: dict[str, list[int]]) -> list[Row]:
    """Measure each flow's saliency in its half, as a share of its sum with other tokens' edges of the same kind."""
    batch = thin_out(study.held_out, N_SALIENCY)
    flows = [il.saliency_flow(study.model, piece) for piece in study.pieces(batch)]
    rows = []
    for measure, kind, other, half in (
        (SALIENCY[0], "text_to_label", "text_to_other", "shallow"),
        (SALIENCY[1], "label_to_last", "other_to_last", "deep"),
    ):
        one, rest = (
            torch.cat([getattr(flow, name)[:, halves[half]].sum(1).cpu() for flow in flows]).double().numpy()
            for name in (kind, other)
        )
        share = np.divide(one, one + rest, out=np.full_like(one, 0.5), where=one + rest > 0)
        rows.append(Row.from_result(measure.name, compare(share, 0.5, clusters_of(batch), bounds=(0, 1))))
    return rows


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    texts = each(cells, "text_to_label", "{q} nats in the shallow half ({c} in the deep half)")
    labels = each(cells, "label_to_last", "{q} nats in the deep half ({c} in the shallow half)")
    return (
        f"Blocking attention from labels to their texts costs the answer {texts}. Blocking attention from the last "
        f"position to labels costs {labels}."
    )


FINDING = Finding(
    id="information-flow",
    short="text → label → last position",
    title="Do labels collect texts in shallow layers, to be read in deep ones?",
    question="Does the answer lose more when labels cannot attend to their texts in the shallow half of the layers "
    "than in the deep half, and more when the last position cannot attend to labels in the deep half than in the "
    "shallow half?",
    answer=answer,
    claim="In shallow layers, the features of demonstrations are merged into their labels; in deep layers, in-context "
    "heads move label information to the last token. The paper takes the first step from Wang et al. (2023), who "
    "measure it by saliency, and leaves it as an open question; neither gives a number of this kind.",
    covers="the paper's hypothesis (Figure 1), open question 1, and Wang et al. 2023 (label words are anchors)",
    measures=(TEXT, LABEL, *RANDOM, INTACT, *SALIENCY),
    measure=measure,
    look_for="Log-odds lost when attention is blocked in a quarter of the layers, along each flow and along random "
    "edges.",
    method="Demonstrations are in balanced random order. Attention is blocked in all heads of some layers, and the "
    "attention of blocked edges is divided among the query's other keys. Text → label: from each label, and the "
    "tokens before it that follow its text, to that text. Label → last: from the last position to all labels. With an "
    "odd number of layers, the middle one is in neither half. Random edges: from the same tokens to the same number "
    "of other earlier positions, with the first position blocked where the flow's own edges block it. Saliency: "
    "|attention · gradient of the loss|, summed over heads, mean over a half's layers; edges into labels next to "
    "edges into other tokens of the demonstrations, edges from labels to the last position next to edges from other "
    "tokens.",
    caveats=(
        "A text can reach the last position without passing through its label, so the loss is a lower bound on its "
        "use.",
        "A label that cannot attend to its own text attends to the others before it, more of which are of the other "
        "class, so the answer can lose more than the log-odds that the intact model has.",
        "Blocking a flow in many layers puts the model into states it never encounters; random edges show how much "
        "that alone costs.",
    ),
    draw=partial(curves, x="layer", y="lost", by="edges", labels=("layer", "log-odds lost, nats")),
)
