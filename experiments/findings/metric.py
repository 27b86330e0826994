"""Finding 8: is the bilinear form of the located heads a learned metric, better than plain similarity?

1. x is what enters a head at the last position, y what enters it at a label, both after the norm without its gain and
   shift. The head's form is xᵀ M y with M = gain W_Q W_Kᵀ gain; the baseline is the cosine of the same x and y.
2. Form and cosine have the same centered inputs: x minus the mean x of the prompts, and y minus the mean y. This
   removes what every query adds to a label's score, and what every label adds to a query's.
3. The AUROC of a prompt is the share of pairs, a label of the query's class and one of the other, in which the first
   scores higher (ties count half); precision@1 is the share of prompts whose best label is of the query's class (of
   labels that tie for the best, the share that are).
4. Where the cosine is near 1, nothing can exceed it. The same heads are therefore also compared on categories of close
   meaning, on which they were not located.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

import icl_lens as il
from experiments.framework.estimate import (
    Comparison,
    auroc_of_rows,
    compare,
    compare_same_heads,
    precision_of_rows,
)
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_of
from experiments.framework.plotting import head_dots
from experiments.framework.projections import layer_inputs
from experiments.framework.study import Study, clusters_of, label_classes
from icl_lens.errors import InputError

CLOSE = ("city-country", "food-drink", "clothing-furniture", "insect-animal", "taste-texture")
"""Pairs of categories of close meaning; the first three without a category of the task are used."""
N_ROTATIONS = 5

HEAD, COSINE, UNIT = "located heads' form", "cosine of the same inputs", "AUROC of the query's class among labels, 0–1"
MEASURES = (
    Measure("auroc", HEAD, COSINE, UNIT, digits=3),
    Measure("best", "the best located head's form", COSINE, UNIT, digits=3),
    Measure("close", f"{HEAD}, close categories", f"{COSINE}, close categories", UNIT, digits=3),
    Measure("rotated", HEAD, "the same with keys rotated at random", UNIT, digits=3),
    Measure("uncentered", f"{HEAD}, not centered", f"{COSINE}, not centered", UNIT, digits=3),
    percent("precision", HEAD, COSINE, "precision@1, %"),
)


def center(
    queries: Float[Tensor, "row d_model"], keys: Float[Tensor, "row demo d_model"]
) -> tuple[Float[Tensor, "row d_model"], Float[Tensor, "row demo d_model"]]:
    """Return queries minus their mean over rows, and keys minus their mean over rows and demonstrations."""
    return queries - queries.mean(0), keys - keys.flatten(0, 1).mean(0)


def form(
    metric: il.QueryKeyMetric, queries: Float[Tensor, "row d_model"], keys: Float[Tensor, "row demo d_model"]
) -> Float[Tensor, "row demo"]:
    """Return xᵀ M y of each prompt's query and labels."""
    return ((queries @ metric.query_side)[:, None] * (keys @ metric.key_side)).sum(-1)


def cosine(queries: Float[Tensor, "row d_model"], keys: Float[Tensor, "row demo d_model"]) -> Float[Tensor, "row demo"]:
    """Return the cosine of each prompt's query and labels."""
    return (normalize(queries, dim=-1)[:, None] * normalize(keys, dim=-1)).sum(-1)


def measure(study: Study) -> Measured:
    """Compare located heads' forms with the cosine of their inputs, with rotated keys, and on close categories."""
    pairs = {
        "auroc": ("form", "cosine"),
        "rotated": ("form", "rotated"),
        "uncentered": ("raw_form", "raw_cosine"),
        "precision": ("form_first", "cosine_first"),
    }
    rows: list[Row] = []
    for ranked in study.by_ranking():
        own = head_columns(ranked, study.held_out)
        found: dict[str, Comparison | str] = {
            name: compare_same_heads(own[first], own[second], study.clusters, bounds=(0, 1))
            for name, (first, second) in pairs.items()
        }
        found["best"] = compare(own["form"][:, 0], own["cosine"][:, 0], study.clusters, bounds=(0, 1))
        found["close"] = close_categories(ranked)
        rows += rows_of({one.name: found[one.name] for one in MEASURES}, ranking=ranked.ranking)
    means = {name: values.mean(0) for name, values in head_columns(study, study.held_out).items()}
    return Measured(rows, pd.DataFrame({"head": list(map(str, study.located))} | means))


@torch.no_grad()
def head_columns(study: Study, batch: il.PromptBatch) -> dict[str, Float[np.ndarray, "row head"]]:
    """Return AUROCs (0–1) of each located head's form and of the cosine of its inputs, centered and not ("raw_").

    Also return those of forms with rotated keys, and precision@1 (0–1) of the centered form and cosine ("_first").
    """
    layers = sorted({head.layer for head in study.located})
    streams = study.map(batch, lambda acts: layer_inputs(acts, layers)).to(study.view.unembed_device)
    classes = [one.numpy() for one in label_classes(batch)]
    columns: dict[str, list[np.ndarray]] = {}
    for head in study.located:
        metric = il.query_key_metric(study.view, head)
        inputs = metric.inputs(streams[:, layers.index(head.layer)].to(metric.query_side))
        raw = inputs[:, 0], inputs[:, 1:]
        centered = center(*raw)
        pairs = {"form": form(metric, *centered), "cosine": cosine(*centered)}
        pairs |= {"raw_form": form(metric, *raw), "raw_cosine": cosine(*raw)}
        scores = {name: one.double().cpu().numpy() for name, one in pairs.items()}
        found = {name: auroc_of_rows(one, *classes) for name, one in scores.items()}
        found |= {f"{name}_first": precision_of_rows(scores[name], *classes) for name in ("form", "cosine")}
        rotated = [form(metric.with_random_rotation(seed=study.seed + i), *centered) for i in range(N_ROTATIONS)]
        aurocs = [auroc_of_rows(one.double().cpu().numpy(), *classes) for one in rotated]
        found["rotated"] = np.mean([one if one.mean() >= 0.5 else 1 - one for one in aurocs], axis=0)
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    return {name: np.stack(values, axis=1) for name, values in columns.items()}


def close_categories(study: Study) -> Comparison | str:
    """Compare located heads' forms with the cosine on categories of close meaning, or return why it is impossible."""
    chosen = [name for name in CLOSE if not {*study.task.data.split("-")} & {*name.split("-")}][:3]
    tasks = [replace(study.task, name=name, data=name, path=None) for name in chosen]
    n = max(8, study.n // 3)
    try:
        batches = study.memoize("close", lambda: [Study(study.model, one, n, study.seed).held_out for one in tasks])
    except InputError as error:
        return str(error)
    columns = [head_columns(study, batch) for batch in batches]
    own, baseline = (np.concatenate([one[name] for one in columns]) for name in ("form", "cosine"))
    clusters = np.concatenate([len(batch) * 10 * i + clusters_of(batch) for i, batch in enumerate(batches)])
    return compare_same_heads(own, baseline, clusters, bounds=(0, 1))


FINDING = Finding(
    id="metric",
    short="learned similarity vs. cosine",
    title="Is the form of the located heads a learned metric?",
    question="Does the bilinear form of located heads find labels of the query's class better than plain similarity of "
    "the same inputs does?",
    claim="Query and key matrices are two towers for learning the similarity metric between the input and each "
    "demonstration. The paper does not measure the metric, nor claim that it beats plain similarity: earlier layers "
    "have already brought the features of texts to labels and the last position.",
    covers="the paper's title, sections 4.4 and 6.1 (c)",
    predicted_above=False,
    measures=MEASURES,
    measure=measure,
    look_for="In the second figure, dots as high as squares: the classes are as clear in the inputs as in the form. "
    "Both above the diamonds: a form that was not learned loses part of it.",
    method="The form and the cosine have the same inputs: those of located heads at the last position and at labels, "
    "after the norm, minus their means over the prompts. The form does not include biases and rotation. Each prompt "
    "shows two labels of each class in balanced random order. Rotated keys keep their lengths; for each rotation, "
    "the sign of its scores is the one that gives it the higher AUROC. Close categories are three pairs of the "
    "library's word list, none of which is in the task.",
    caveats=(
        "Where the cosine is near 1, no form can be better: a tie there means that the inputs already separate "
        "the classes, not that the form was not learned.",
        "Inputs of two classes differ mostly along one direction; a random form, with the better of its two signs, "
        "separates them nearly as well. Rotated keys are therefore a hard control.",
        "Where both are near 0.5 on close categories, the model does not separate them at all.",
        "All located heads count equally, even those that add little to the answer; the best head has a row of its "
        "own.",
        "If queries or keys have norms of their own, the form includes only the gains of these norms.",
    ),
    draw=partial(
        head_dots,
        series={"form": "the head's form", "cosine": "cosine of the same inputs", "rotated": "keys rotated at random"},
        label="AUROC, 0–1",
        line=0.5,
        limits=(0.4, 1.03),
    ),
    arbitrary_labels=True,
)
