"""Two towers, tested by interchange: do queries and keys compare texts, and do values carry labels?

1. `il.two_towers` finds the heads whose queries matter, on the locating prompts, by exchanging each head's query alone.
2. On the held-out prompts, these heads take their query, keys or values at the last position from donor prompts, singly
   and jointly. Two towers predict for each exchange whether the answer becomes the other label.
3. The controls are the same exchanges in random sets of heads from the same layers.
4. The same with the first two heads of the scan alone; and with the heads of the scan on other prompts and in another
   template.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

import icl_lens as il
from experiments.framework.estimate import compare
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_or_reason
from experiments.framework.plotting import condition_dots
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import N_RANDOM_SETS, Study, thin_out
from experiments.framework.tasks import ARROWS
from icl_lens.analyses.two_towers import exchange_heads
from icl_lens.locate.exchanges import EXCHANGES, Exchange, tower_prompts

N_SCANNED = 16
"""Prompts of the scan."""
N_REPLICATED, N_RANDOM_REPLICATED = 60, 5
"""Maximum number of prompts, and number of random sets, of a replication."""
REPLICATED = ("query", "keys", "values", "query+keys", "query+values", "keys+values")
REPLICATIONS = {"other prompts": {"seed": 1}, "arrows": {"template": ARROWS}}
UNIT = "log-odds lost by the answer, nats"
PREDICTED = {"other": "predicted: the other label", "same": "predicted: no effect"}

# The keys come first: a model that goes by the last label, or by position, moves with the values only.
ORDERED = sorted(EXCHANGES, key=lambda one: one.name != "keys")
LOSSES = tuple(Measure(one.name, f"{one.name} ({PREDICTED[one.predicted]})", "random heads", UNIT) for one in ORDERED)
AS_PREDICTED = tuple(
    percent(f"predicted: {one.name}", f"{one.name}: label as predicted", "intact model", "share of the prompts, %")
    for one in EXCHANGES[:3]
)
TWO_HEADS = tuple(
    Measure(f"two heads: {name}", f"{name}, first two heads of the scan", "two random heads", UNIT)
    for name in REPLICATED
)
AGAIN = tuple(
    Measure(f"{what}: {name}", f"{name}, {what}", "random heads", UNIT) for what in REPLICATIONS for name in REPLICATED
)


def measure(study: Study) -> Measured:
    """Exchange queries, keys and values in the heads of a scan, in its first two, and with other prompts."""
    heads = scanned_heads(study)
    found, two = exchanged(study, [heads, heads[:2]])
    rows = loss_rows(study, found, "")
    for one in found.exchanges[: len(AS_PREDICTED)]:
        # The intact model gives the predicted label, which is the other one, where it is wrong.
        compared = compare(one.as_predicted.astype(float), 1.0 - found.correct, study.clusters, bounds=(0, 1))
        rows.append(Row.from_result(f"predicted: {one.name}", replace(compared, n_heads=len(heads))))
    rows += [
        row for row in loss_rows(study, two, "two heads: ") if row.measure.removeprefix("two heads: ") in REPLICATED
    ]
    for name, changed in REPLICATIONS.items():
        measures = [one for one in AGAIN if one.name.startswith(name)]
        rows += rows_or_reason(
            measures, lambda name=name, changed=changed: replicated_rows(study, heads, name, changed)
        )
    details = [{"exchanged": row.measure} | asdict(row) for row in rows if row.measure in {one.name for one in LOSSES}]
    return Measured(rows, pd.DataFrame(details).loc[:, ["exchanged", "quantity", "control", "low", "high"]])


def scanned_heads(study: Study) -> list[il.Head]:
    """Return the heads whose query alone matters most, on some of the locating prompts."""
    batch = thin_out(study.halves()[0], N_SCANNED)
    return il.locate_towers(study.model, batch).top(study.n_located)


def exchanged(
    study: Study,
    head_sets: Sequence[Sequence[il.Head]],
    exchanges: Sequence[Exchange] = EXCHANGES,
    n_random: int | None = None,
) -> list[il.results.TwoTowers]:
    """Return the exchanges in sets of heads on the held-out prompts, as `il.two_towers` does for one set."""
    prompts = tower_prompts(study.model, study.held_out, own_texts=len(exchanges) == len(EXCHANGES))
    return exchange_heads(
        study.view,
        prompts,
        head_sets,
        exchanges=exchanges,
        n_random=n_random or N_RANDOM_SETS,
        seed=study.seed,
    )


def replicated_rows(study: Study, heads: Sequence[il.Head], name: str, changed: dict[str, Any]) -> list[Row]:
    """Return the rows of `REPLICATED` exchanges in the same heads, with other prompts or in another template."""
    again = replicate(study, **changed)
    some = [one for one in EXCHANGES if one.name in REPLICATED]
    (found,) = exchanged(again, [heads], some, N_RANDOM_REPLICATED)
    return loss_rows(again, found, f"{name}: ")


def replicate(study: Study, *, seed: int = 0, template: il.Template | None = None) -> Study:
    """Return the study with other prompts or another template, and at most `N_REPLICATED` prompts per half."""
    task = study.task if template is None else replace(study.task, template=template)
    return Study(study.model, task, min(study.n, N_REPLICATED), seed=seed, n_heads=study.n_heads)


def loss_rows(study: Study, found: il.results.TwoTowers, prefix: str) -> list[Row]:
    """Return a row per exchange: the log-odds that it costs in the heads, and in random sets on average."""
    by_name = {one.name: one for one in found.exchanges}
    rows = []
    for name in [one.name for one in ORDERED if one.name in by_name]:
        one = by_name[name]
        compared = compare(one.lost, np.mean(one.random_lost, axis=0), study.clusters)
        note = " ".join(map(str, found.heads)) if name == "keys" else ""
        rows.append(Row.from_result(f"{prefix}{name}", replace(compared, n_heads=len(found.heads)), note=note))
    return rows


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    said = by_outcome(
        cells,
        "keys",
        "{where}, keys of texts of the other class change the answer",
        every="Yes: keys of texts of the other class change the answer on every task, keys of other labels hardly",
    )
    texts = each(cells, "keys", "{q} nats (random heads: {c})")
    return f"{said}. Exchanged texts cost {texts}. Exchanged labels cost {each(cells, 'keys: labels', '{q}')}."


FINDING = Finding(
    id="two-towers",
    title="Do queries and keys act as two towers?",
    question="Does the answer change as two towers predict when heads take their queries, keys or values from a prompt "
    "with another query, with the texts of the two classes exchanged, or with the two labels exchanged?",
    answer=answer,
    claim="Query and key matrices can be regarded as two towers that learn the similarity of the input and each "
    "demonstration; values carry the label. The paper infers this from attention and top words; it neither measures "
    "the similarity nor exchanges queries, keys or values.",
    covers="the hypothesis of sections 3.2, 4.4 and 6.1 (c); the published version's open question of direct evidence",
    measures=(*LOSSES, *AS_PREDICTED, *TWO_HEADS, *AGAIN),
    measure=measure,
    look_for="Log-odds lost when the scan's heads take their query, keys or values from another prompt (dots, bars: "
    "95%), and when random heads of the same layers do (circles). Two towers predict that the first three, “all” and "
    "“keys: own text” lie far to the right, and all others near zero.",
    method="A scan exchanges the query of every single head on the locating prompts; the heads with the largest effect "
    "are exchanged jointly on the held-out prompts, as only the last position sees them. Donors are the same prompt "
    "with a query of the other class (query), with the texts of the two classes exchanged while labels stay (keys), or "
    "with the two labels exchanged while texts stay (values); for “own text”, one demonstration's text alone is of the "
    "other class, for “other texts”, all but one. Each of 20 random sets has as many heads of the same layers. "
    "Replications keep the heads; their queries may be among those of the scan.",
    caveats=(
        "A model that copies the last label, or a label by its position, also moves with the values. What decides is "
        "keys of exchanged texts against keys of exchanged labels, own text against other texts, and pairs of "
        "exchanges that cancel.",
        "A model whose query already holds the answer and looks for its label moves with the query, the values and the "
        "keys of exchanged labels, but not with the keys of exchanged texts.",
        "Heads are chosen by exchanging their query, so the effect of the query is the least surprising.",
    ),
    post_hoc="An AUROC of the query's class among the labels was the main measure at first. Exchanges replaced it "
    "after both had been seen on the real model: other heads also score the query's class higher, but the answer does "
    "not depend on them. The AUROC is no longer measured.",
    draw=partial(
        condition_dots, x="exchanged", label="log-odds lost, nats", names=("heads of the scan", "random heads")
    ),
    arbitrary_labels=True,
)
