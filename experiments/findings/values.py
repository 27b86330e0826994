"""What do located heads write about a label?

1. A head's value at a label position, carried through W_O, is projected into the vocabulary, where the label's own
   token has rank r. Means over the labels of a prompt: 1 / r, and the orders of magnitude log10(vocabulary size / r),
   which a few top ranks do not dominate.
2. In prompts with exchanged labels, the same token is ranked at the same position, which now holds the other label:
   the rank worsens if values name the label, and stays if they name the text or always the same words.
3. Label features: log p(foo) − log p(bar) of the value at foo minus that at bar, halved.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.framework.estimate import compare, compare_same_heads
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_of
from experiments.framework.plotting import head_dots
from experiments.framework.projections import (
    label_features,
    label_token_ranks,
    own_word_wins,
    top_words,
)
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import Study

EXAMPLE = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
"""The prompt of the paper's Table 1."""

HEADS = "located heads", "other heads of the same layers"
RANK = Measure(
    "rank",
    "MRR of the label in located heads",
    "MRR in other heads of the same layers",
    "mean reciprocal rank of the label's token, 0–1",
    digits=3,
    paper={"GPT-2 large, L19H11 (its lowest)": 0.0033},
)
MAGNITUDE = Measure("magnitude", *HEADS, "label's token, log10(vocabulary size / rank)")
FOLLOWS = Measure("follows", "where the label is", "where the other label is instead", MAGNITUDE.unit)
FEATURES = Measure("features", *HEADS, "log-odds of the label over the other, nats")
KEY_WORDS, QUERY_WORDS = (
    percent(f"{name}_words", what, "chance", "pairs in which the own word ranks first, %")
    for name, what in (("key", "label keys: their demonstration"), ("query", "last query: the input"))
)


def measure(study: Study) -> Measured:
    """Rank labels in the values of located and of control heads, and in the same heads with labels exchanged."""
    heads, natural = study.compared, "labels that name the classes cannot change places"
    ranks = study.map_heads(study.held_out, heads, lambda acts: label_token_ranks(acts, heads))
    moved = torch.full_like(ranks, torch.nan)
    if not study.task.natural:
        exchanged = study.halves(exchanged=True)[1]
        moved = study.map_heads(exchanged, heads, lambda acts: label_token_ranks(acts, heads, other=True))
    features = study.map_heads(study.held_out, heads, lambda acts: label_features(acts, heads))
    n_tokens = study.model.W_U.shape[1]
    rows: list[Row] = []
    for ranked in study.by_ranking():
        own, other = (ranked.of_located(magnitudes(some, n_tokens)) for some in (ranks, moved))
        found = {
            "rank": ranked.compare_heads(reciprocals(ranks), bounds=(0, 1)),
            "magnitude": ranked.compare_heads(magnitudes(ranks, n_tokens)),
            "follows": natural if study.task.natural else compare_same_heads(own, other, study.clusters),
            "features": ranked.compare_heads(features),
        }
        rows += rows_of(found, ranking=ranked.ranking)
    return Measured([*rows, *_words_of_best(study)], _details(study, reciprocals(ranks), reciprocals(moved)))


def reciprocals(ranks: Float[Tensor, "*row demo"]) -> Float[Tensor, "*row"]:
    """Return the mean over demonstrations of 1 / rank."""
    return (1 / ranks).nanmean(-1)


def magnitudes(ranks: Float[Tensor, "*row demo"], n_tokens: int) -> Float[Tensor, "*row"]:
    """Return the mean over demonstrations of log10(vocabulary size / rank): 0 for the last token."""
    return (n_tokens / ranks).log10().nanmean(-1)


def _words_of_best(study: Study) -> list[Row]:
    """Return rows on the top words of the best located head's keys and query, or the reason why there are none."""
    best, names = study.located[0], ("key_words", "query_words")
    if best.layer == 0:
        why = f"the best head, {best}, is in the first layer, whose inputs are embeddings"
        return rows_of(dict.fromkeys(names, why), ranking="contrast")
    wins = study.map(study.held_out, lambda acts: own_word_wins(acts, best)).double().numpy()
    compared = (compare(column, 0.5, study.clusters, bounds=(0, 1)) for column in wins.T)
    return rows_of(dict(zip(names, compared, strict=True)), ranking="contrast")


def _details(
    study: Study, own: Float[Tensor, "row layer head"], moved: Float[Tensor, "row layer head"]
) -> pd.DataFrame:
    """Return mean reciprocal ranks of each located head (part "head"), and the best head's top words for a prompt."""
    found = []
    for head in study.located:
        others = [float(own[:, *one].mean()) for one in study.controls[head.layer]]
        row = {"part": "head", "head": str(head), "rank": float(own[:, *head].mean()), "control": np.mean(others)}
        found.append(row | {"exchanged": float(moved[:, *head].mean())})
    paper = study.task.data == "sentiment-number" and study.task.labels == ("foo", "bar")
    prompt = study.tokenize([EXAMPLE if paper else study.held_out.prompts[0]])
    return pd.concat([pd.DataFrame(found), top_words(il.capture(study.model, prompt), study.located[0])])


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    said = by_outcome(
        cells, "magnitude", "Values of located heads name their label more than those of other heads {where}"
    )
    ranks = each(cells, "rank", "{q} (other heads: {c})")
    return (
        f"{said}; mean reciprocal rank {ranks}. The first word of a key is its own text's rather than another text's "
        f"in {each(cells, 'key_words', '{q}%')} (chance: 50%)."
    )


FINDING = Finding(
    id="values",
    title="What do located heads write about a label?",
    question="Do the values of located heads name the label they are read from, more than those of other heads?",
    answer=answer,
    claim="Label values of located heads rank the label's own word far higher than those of random heads in the same "
    "layers; the lowest mean reciprocal rank is 0.0033 (rank 303 of 50,257), in GPT-2 large L19H11. In L22H0 and "
    "L23H13 top words of values name the label, those of keys its demonstration, and those of the query the input. The "
    "published version finds that log p(foo) − log p(bar) of values is positive at foo and negative at bar.",
    covers="Figures 5, 16–18 and 22–24; Tables 1 and 3; the published version's label features",
    measures=(RANK, MAGNITUDE, FOLLOWS, FEATURES, KEY_WORDS, QUERY_WORDS),
    measure=measure,
    look_for="Mean reciprocal rank of the label's token in each located head's values. Where squares are as high as "
    "dots, the head writes the word whether or not that label is there.",
    method="Values at label positions go through W_O, unweighted by attention, and are ranked against the whole "
    "vocabulary without biases. Exchanging labels keeps every text in place. Log-odds are the difference between foo "
    "and bar positions, halved, so that a preference for one label cancels. Keys are "
    "residual streams at labels; queries are carried through the key matrix.",
    caveats=(
        "A head that copies every label equally, or the last one, also writes its name: values show what is copied, "
        "not how it is chosen.",
        "A mean reciprocal rank is dominated by a few top ranks: ranks 300 and 3,000 both look like 0. The orders of "
        "magnitude count every rank.",
        "Top words and their pairs are those of the best located head; a text is represented by its last token.",
    ),
    draw=partial(
        head_dots,
        series={"rank": "label's token", "exchanged": "same token, other label there", "control": "other heads"},
        label="mean reciprocal rank",
    ),
)
