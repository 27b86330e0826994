"""Finding 13: which components wrote the keys (at labels) and queries (at the last position) of located heads?

1. A head's score from the last position splits exactly by writers at the key, and by writers at the query
   (`il.attention_score_parts`). What matters to attention is a difference of scores: the mean over labels of the
   answer's class minus the mean over the other labels.
2. Writers are grouped: embeddings, and heads and FFNs of the first half of the layers, are early; heads and FFNs of
   the second half are late; biases are neither.
3. A group's part in located heads is compared with its part in other heads of their layers: what distinguishes the
   classes in every head is not specific to located heads.
"""

from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.framework.estimate import compare_same_heads
from experiments.framework.finding import Finding, Measure, Measured, Row, rows_of
from experiments.framework.plotting import group_lines
from experiments.framework.study import Study
from icl_lens.attribution.writer_groups import EARLY_GROUPS, GROUPS, group_sums

OTHERS = "other heads of the same layers"
UNIT = "score, true minus false labels"
WHERE = {"key": "at labels", "query": "at the last position"}


def _measures() -> list[Measure]:
    found = [Measure("total", "all writers, in located heads", OTHERS, UNIT)]
    for side, where in WHERE.items():
        early = f"early writers {where}, in located heads"
        found += [
            Measure(f"early_{side}", early, OTHERS, UNIT),
            Measure(f"late_{side}", f"late writers {where}, in located heads", OTHERS, UNIT),
            Measure(f"early_minus_late_{side}", early, "late writers", UNIT),
            *(Measure(f"{group}_{side}", f"{group} {where}, in located heads", OTHERS, UNIT) for group in GROUPS),
        ]
    return sorted(found, key=lambda measure: measure.name != "early_key")  # the main measure comes first


MEASURES = _measures()


def measure(study: Study) -> Measured:
    """Measure differences of scores between true and false labels, by group of writers and side (key or query)."""
    groups = study.map_heads(
        study.held_out, study.compared, lambda acts: score_groups(acts, study.compared), writers=True
    )
    key, query = groups.unbind(3)
    values = {"total": key.sum(-1)}
    for side, parts in (("key", key), ("query", query)):
        values |= {f"{name}_{side}": numbers for name, numbers in by_group(parts).items()}
    rows: list[Row] = []
    for ranked in study.by_ranking():
        found = {name: ranked.compare_heads(numbers) for name, numbers in values.items()}
        for side in WHERE:
            of_early, of_late = (ranked.of_located(values[f"{half}_{side}"]) for half in ("early", "late"))
            found[f"early_minus_late_{side}"] = compare_same_heads(of_early, of_late, study.clusters)
        rows += rows_of({one.name: found[one.name] for one in MEASURES}, ranking=ranked.ranking)
    details = pd.DataFrame(
        {"head": str(head), "side": side, "group": group, "value": float(parts[:, *head, number].mean())}
        for side, parts in (("at labels", key), ("at the last position", query))
        for head in study.located
        for number, group in enumerate(GROUPS)
    )
    return Measured(rows, details)


def by_group(parts: Float[Tensor, "*rest group"]) -> dict[str, Float[Tensor, "*rest"]]:
    """Return the sums over early and over late groups of writers, and each group's own part."""
    early = torch.tensor([group in EARLY_GROUPS for group in GROUPS])
    late = torch.tensor([group.startswith("late") for group in GROUPS])
    found = {"early": parts[..., early].sum(-1), "late": parts[..., late].sum(-1)}
    return found | dict(zip(GROUPS, parts.unbind(-1), strict=True))


def score_groups(acts: il.Activations, heads: list[il.Head]) -> Float[Tensor, "row head 2 group"]:
    """Return each head's difference of scores between the classes, by group of writers at keys and at the query."""
    found = []
    for head in heads:
        parts = il.attention_score_parts(acts, head)
        difference = parts.contrast(parts.of_label(acts.batch.answer))
        sides = (difference.key_side, difference.query_side)
        sums = [group_sums(side, acts.view, difference.writers) for side in sides]
        found.append(torch.stack(sums, dim=1))
    return torch.stack(found, dim=1)


FINDING = Finding(
    id="tower-inputs",
    short="what feeds the two towers",
    title="Which components wrote what located heads compare?",
    question="Do the differences of attention scores between labels of the query's class and others come from what "
    "early layers wrote at the labels, more in located heads than in other heads?",
    claim="Shallow layers merge the features of texts into the label positions and the last position, and the query "
    "and key matrices of deep in-context heads compare them. The paper argues this from projections of keys and "
    "queries into the vocabulary and does not measure it.",
    covers="the hypothesis of sections 4.4 and 5",
    measures=MEASURES,
    measure=measure,
    look_for="Filled dots to the right of zero and of the hollow ones: early layers write what located heads compare.",
    method="Attention scores from the last position to labels, split exactly by what earlier components wrote, with "
    "the scales of all norms frozen; each number is the mean over labels of the answer's class (true) minus that over "
    "the others (false), in balanced random order. Early writers are the embeddings, and heads and FFNs of the first "
    "half of the layers.",
    caveats=(
        "The split is exact but not causal: if a late head passes on what an early head wrote, the late head counts.",
        "With frozen norms, a writer's effect on the length of the residual stream is not counted.",
        "Halves of the layers were chosen before these numbers were computed, but after one prompt had been looked at.",
        "Groups sum to the whole difference on either side; the two sides are two splits of the same difference.",
    ),
    draw=partial(group_lines, by=("model", "task", "side"), label=UNIT, title_size=7),
)
