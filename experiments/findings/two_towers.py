"""Finding 7: do queries and keys act as two towers?

1. A head's query at the last position is scored against its keys at the labels, without the position term. A prompt's
   AUROC is the share of pairs, a label of the query's class and one of the other, in which the first scores higher.
2. The same is measured with keys from the prompt whose labels are exchanged: keys that represent texts keep the order
   of the classes; keys that represent label words reverse it where the query already holds the answer.
3. In all located heads at once, the last position's query, or the keys or the values that it sees at labels, come from
   another prompt. Two towers predict that the answer becomes less likely if the query's class, the keys' texts or
   the values' labels are exchanged, but not if the keys' labels or the values' texts are.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

import icl_lens as il
from experiments.findings.behavior import label_log_probs
from experiments.framework.estimate import Comparison, auroc_of_rows, compare, compare_same_heads
from experiments.framework.finding import Finding, Measure, Measured, Row, rows_of
from experiments.framework.plotting import condition_dots
from experiments.framework.projections import layer_inputs
from experiments.framework.study import Ranking, Study, label_classes
from icl_lens.interventions.patching import HeadActivation
from icl_lens.metrics import label_log_odds
from icl_lens.prompts.donors import exchange_texts


class Swap(NamedTuple):
    """What heads take from another prompt, which prompt that is, and the swap's names."""

    name: str
    activation: HeadActivation
    source: str
    figure_name: str
    quantity: str
    """Heading in the table."""


SWAPS = (
    Swap("key_texts", "k", "texts", "K, texts exchanged", "located heads with keys of exchanged texts"),
    Swap("query", "q", "query", "Q, query of the other class", "located heads with a query of the other class"),
    Swap("value_labels", "v", "labels", "V, labels exchanged", "located heads with values of exchanged labels"),
    Swap(
        "key_labels",
        "k",
        "labels",
        "K, labels exchanged (idle)",
        "located heads with keys of exchanged labels (predicted: no effect)",
    ),
    Swap(
        "value_texts",
        "v",
        "texts",
        "V, texts exchanged (idle)",
        "located heads with values of exchanged texts (predicted: no effect)",
    ),
)

AUROC = Measure(
    "auroc", "located heads", "other heads of the same layers", "AUROC of the query's class among labels, 0–1"
)
CHANCE = Measure("chance", "located heads", "chance", AUROC.unit)
RELABELED = Measure(
    "relabeled", "located heads, labels of keys exchanged", "other heads, labels of keys exchanged", AUROC.unit
)
LOSSES = tuple(Measure(swap.name, swap.quantity, "random heads", "log-odds lost by the answer, nats") for swap in SWAPS)


def measure(study: Study) -> Measured:
    """Score queries against keys, and swap queries, keys and values in located heads and in random sets."""
    batch, exchanged = study.held_out, study.halves(exchanged=True)[1]
    values = {
        "auroc": class_aurocs(study, query_key_scores(study, batch, batch)),
        "relabeled": class_aurocs(study, query_key_scores(study, batch, exchanged)),
    }
    losses = swap_losses(study)
    rows: list[Row] = []
    for ranked in study.by_ranking():
        found = {name: ranked.compare_heads(some, bounds=(0, 1)) for name, some in values.items()}
        own = ranked.of_located(values["auroc"])
        found["chance"] = compare_same_heads(own, 0.5, study.clusters, bounds=(0, 1))
        found |= {name: lost[ranked.ranking] for name, lost in losses.items()}
        rows += rows_of(found, ranking=ranked.ranking)
    details = ({"swap": swap.figure_name} | asdict(losses[swap.name]["contrast"]) for swap in SWAPS)
    return Measured(rows, pd.DataFrame(details))


@torch.no_grad()
def query_key_scores(
    study: Study, queries: il.PromptBatch, keys: il.PromptBatch
) -> Float[np.ndarray, "row layer head demo"]:
    """Return each compared head's scores, without the position term, of one batch's last queries with another's keys.

    All other heads have NaN.
    """
    layers = sorted({head.layer for head in study.compared})
    of_queries, of_keys = (study.map(batch, lambda acts: layer_inputs(acts, layers)) for batch in (queries, keys))
    n_demos = of_keys.shape[2] - 1
    scores = np.full((len(queries), study.view.n_layers, study.view.n_heads, n_demos), np.nan)
    for head in study.compared:
        place = layers.index(head.layer)
        inputs = of_queries[:, place, :1], of_keys[:, place, 1:]
        found = il.query_key_metric(study.view, head).scores(*(one.to(study.view.unembed_device) for one in inputs))
        scores[:, *head] = found[:, 0].double().cpu().numpy()
    return scores


def class_aurocs(study: Study, scores: Float[np.ndarray, "row *rest demo"]) -> Float[torch.Tensor, "row *rest"]:
    """Return the AUROC (0–1) of each held-out prompt's scores: labels of texts of the query's class against others."""
    same, other = label_classes(study.held_out)
    return torch.from_numpy(auroc_of_rows(scores, same.numpy(), other.numpy()))


def swap_losses(study: Study) -> dict[str, dict[Ranking, Comparison]]:
    """Return the log-odds (nats) that each swap costs the answer, in located heads vs. random sets, by ranking."""
    sets: dict[Ranking, list[Sequence[il.Head]]] = {
        one.ranking: [one.located, *one.random_sets(one.located, n=10)] for one in study.by_ranking()
    }
    every = [heads for some in sets.values() for heads in some]
    sources = {
        "query": study.with_other_query,
        "texts": study.tokenize([exchange_texts(prompt) for prompt in study.held_out.prompts]),
        "labels": study.halves(exchanged=True)[1],
    }
    answer = study.held_out.answer.cpu()
    intact = label_log_odds(label_log_probs(study, study.held_out), answer)
    found: dict[str, dict[Ranking, Comparison]] = {}
    for swap in SWAPS:
        log_probs = patched_log_probs(study, every, sources[swap.source], swap.activation)
        odds = torch.stack([label_log_odds(one, answer) for one in log_probs.unbind(1)], dim=1)
        lost = iter((intact[:, None] - odds).double().numpy().T)
        found[swap.name] = {}
        for ranking, some in sets.items():
            own, *random = (next(lost) for _ in some)
            found[swap.name][ranking] = compare(own, np.mean(random, axis=0), study.clusters)
    return found


def patched_log_probs(
    study: Study, sets: Sequence[Sequence[il.Head]], source: il.PromptBatch, what: HeadActivation
) -> Float[torch.Tensor, "row set label"]:
    """Return the labels' log-probabilities with each set's queries, keys or values at labels taken from the source."""
    where: dict[str, Any] = {"positions": "last"} if what == "q" else {"align": "labels", "query_positions": "last"}
    pieces = study.pieces(study.held_out)
    pairs = zip(pieces, source.split(len(pieces[0])), strict=True)
    patched = (
        il.label_log_probs_patched(study.model, one, sets, other, activation=what, **where) for one, other in pairs
    )
    return torch.cat([one.cpu() for one in patched])


FINDING = Finding(
    id="two-towers",
    short="queries matched with keys",
    title="Do queries and keys act as two towers?",
    question="Do located heads score labels of the query's class higher, and does the answer change as two towers "
    "predict when their queries, keys or values come from a prompt with another query, with the texts of the two "
    "classes exchanged, or with the two labels exchanged?",
    claim="Query and key matrices can be regarded as two towers that learn the similarity of the input and each "
    "demonstration; values carry the label. The paper infers this from attention and top words; it neither measures "
    "the similarity nor swaps queries, keys or values.",
    covers="Sections 3.2, 4.4 and 6.1 (c); the published version's open question of direct evidence",
    measures=(*LOSSES, AUROC, CHANCE, RELABELED),
    measure=measure,
    look_for="In the second figure, two towers predict that the first three swaps in located heads lie far to the "
    "right, and the last two (idle: without effect) near zero, because queries and keys compare texts and values "
    "carry labels.",
    method="Scores are those of the head without rotary position embeddings; learned position embeddings remain, as "
    "part of the inputs. Both classes have the same number of demonstrations, in random order, and either label can "
    "be the answer, so that a head that prefers one label or position scores 0.5. A swap replaces only what the last "
    "position uses, in all located heads at once: its query, or the keys or values at labels. They come from the same "
    "prompt with a query of the other class, with the texts of the two classes exchanged while labels stay in place, "
    "or with the two labels exchanged while texts stay. Random sets have the same number of heads from the same "
    "layers.",
    caveats=(
        "A model that copies a label, such as the last one, also loses log-odds when values come from exchanged "
        "labels; swaps of queries and keys distinguish it from two towers.",
        "All located heads count equally: if more heads are located than do the work, the others pull the mean toward "
        "the control and widen its interval.",
        "Late heads may read the answer that earlier ones wrote at the last position; the swap of keys with exchanged "
        "labels shows this.",
    ),
    post_hoc="The exchange of keys' texts became the main measure, in place of the AUROC, after both had been seen on "
    "40 prompts of the real model: other heads of the same layers also score the query's class higher, but "
    "the answer does not depend on them. The AUROC is in the table of other measures.",
    earlier="auroc",
    draw=partial(condition_dots, x="swap", label="log-odds lost, nats", names=("located heads", "random heads")),
    arbitrary_labels=True,
)
