"""Finding 14: which components wrote what located heads' values carry to the last position?

1. What a head adds to the answer's log-odds from a label splits exactly by writers at that label (`il.value_parts`).
2. Writers are grouped: embeddings, and heads and FFNs of the first half of the layers, are early; heads and FFNs of
   the second half are late; biases are neither.
3. Summed over a prompt's labels, a group's part is what it adds through the head. Controls are other heads of the
   layer.
"""

from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.findings.tower_inputs import by_group
from experiments.framework.estimate import compare_same_heads
from experiments.framework.finding import Finding, Measure, Measured, Row, rows_of
from experiments.framework.plotting import group_lines
from experiments.framework.study import Study, compared_tokens
from icl_lens.attribution.writer_groups import GROUPS, group_sums

OTHERS = "other heads of the same layers"
UNIT = "log-odds added to the answer, nats"
EARLY_WRITERS = "early writers at labels, in located heads"
MEASURES = [
    Measure("early", EARLY_WRITERS, OTHERS, UNIT, digits=3),
    Measure("late", "late writers at labels, in located heads", OTHERS, UNIT, digits=3),
    Measure("early_minus_late", EARLY_WRITERS, "late writers", UNIT, digits=3),
    Measure("total", "all writers at labels, in located heads", OTHERS, UNIT, digits=3),
    *(Measure(group, f"{group} at labels, in located heads", OTHERS, UNIT, digits=3) for group in GROUPS),
]


def measure(study: Study) -> Measured:
    """Measure what heads add to the answer's log-odds from labels, by group of writers."""
    groups = study.map_heads(
        study.held_out, study.compared, lambda acts: value_groups(acts, study.compared), writers=True
    )
    values = by_group(groups) | {"total": groups.sum(-1)}
    rows: list[Row] = []
    for ranked in study.by_ranking():
        found = {name: ranked.compare_heads(numbers) for name, numbers in values.items()}
        of_early, of_late = (ranked.of_located(values[half]) for half in ("early", "late"))
        found["early_minus_late"] = compare_same_heads(of_early, of_late, study.clusters)
        rows += rows_of({one.name: found[one.name] for one in MEASURES}, ranking=ranked.ranking)
    details = pd.DataFrame(
        {"head": str(head), "group": group, "value": float(groups[:, *head, number].mean())}
        for head in study.located
        for number, group in enumerate(GROUPS)
    )
    return Measured(rows, details)


def value_groups(acts: il.Activations, heads: list[il.Head]) -> Float[Tensor, "row head group"]:
    """Return what each head adds to the answer's log-odds (nats) from all labels, by group of writers at the labels."""
    against = compared_tokens(acts.batch)
    found = []
    for head in heads:
        parts = il.value_parts(acts, head, acts.batch.answer_tokens, against=against)
        found.append(group_sums(parts.parts.sum(1), acts.view, parts.writers))
    return torch.stack(found, dim=1)


FINDING = Finding(
    id="value-inputs",
    short="what feeds the values",
    title="Which components wrote what located heads' values carry?",
    question="Does what located heads add to the answer from labels come from what embeddings and early layers wrote "
    "there, more than in other heads?",
    claim="Values at label positions hold the labels' own features, which shallow layers write there. The paper argues "
    "this from projections of values into the vocabulary and does not measure it.",
    covers="the hypothesis of sections 4.2 and 5",
    measures=MEASURES,
    measure=measure,
    look_for="Filled dots to the right of the hollow ones: early layers write what located heads carry to the answer.",
    method="What a head adds to the answer's log-odds from labels, split exactly by what earlier components wrote at "
    "the label, with the scales of all norms and the attention frozen, summed over a prompt's labels in balanced "
    "random order. Early writers are the embeddings, and heads and FFNs of the first half of the layers.",
    caveats=(
        "The split is exact but not causal: if a late head passes on what an early head wrote, the late head counts.",
        "Halves of the layers were chosen before these numbers were computed, but after one prompt had been looked at.",
    ),
    draw=partial(group_lines, by=("model", "task"), label=UNIT),
)
