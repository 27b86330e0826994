"""What do located heads write about a label?

1. A head's value at a label, carried through W_O and not weighted by attention, is projected into
   the vocabulary, where the label's own token has rank r. Means over the labels of a prompt: 1 / r,
   and the orders of magnitude log10(vocabulary size / r), which a few top ranks do not dominate.
   The control is the mean over the other heads of each located head's layer.
2. In prompts with exchanged labels, the same token is ranked at the same position, which now holds
   the other label: the rank gets worse if values name the label, and stays if they name the text or
   always the same words.
3. Label features: log p(foo) − log p(bar) of the value at foo minus that at bar, halved.
4. For the best located head: is the word of a key's own text ranked above those of the other texts,
   and is the word of the query's text ranked first by the query? Guessing scores 50%.

    python experiments/values.py --model icl-mini --task animal-country -n 200

The paper's Figures 5, 16–18 and 22–24; Tables 1 and 3; the published version's label features.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from common import RANKINGS, Study, Table, from_command_line, head_dots
from label_attention import OTHER_HEADS, head_means
from matplotlib.figure import Figure

import icl_lens as il

MAGNITUDES = "orders of magnitude"
RANKED_ROWS = 256
"""Number of values whose scores over the vocabulary are in memory at a time."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Rank labels in the values of located and control heads, and with labels exchanged."""
    study = Study.from_command_line(
        "values", "What do located heads write about a label?", arguments
    )
    table, batch = Table(study), study.testing
    exchanged = study.tokenize(il.donor_prompts(batch.prompts)["labels"])
    heads = compared_heads(study)
    names = {"heads": list(map(str, heads))}

    def ranks_of_other(acts: il.Activations) -> torch.Tensor:
        return label_ranks(acts, heads, exchanged=True)

    ranks = study.read("ranks", batch, lambda acts: label_ranks(acts, heads), **names)
    moved = study.read("ranks of exchanged", exchanged, ranks_of_other, **names)
    features = study.read("features", batch, lambda acts: label_features(acts, heads), **names)
    n_tokens = study.model.W_U.shape[1]
    reciprocal = all_heads(study, heads, (1 / ranks).mean(-1))
    magnitude = all_heads(study, heads, np.log10(n_tokens / ranks).mean(-1))
    moved_magnitude = all_heads(study, heads, np.log10(n_tokens / moved).mean(-1))
    for ranking in RANKINGS:
        located = study.located_heads(ranking)
        controls = study.control_heads(located)
        for measure, values, unit in (
            ("mean reciprocal rank of the label", reciprocal, "0–1"),
            ("log10(vocabulary size / rank of the label)", magnitude, MAGNITUDES),
            ("log-odds of the label", all_heads(study, heads, features), "nats"),
        ):
            means = head_means(values, located, controls)
            table.add(measure, *means, versus=OTHER_HEADS, unit=unit, ranking=ranking)
        of_label = head_means(magnitude, located, controls)[0]
        of_exchanged = head_means(moved_magnitude, located, controls)[0]
        about = {"versus": "the other label there", "unit": MAGNITUDES, "ranking": ranking}
        table.add("log10(vocabulary size / rank), label there", of_label, of_exchanged, **about)
    add_best_head(study, table)
    add_heads(study, table, reciprocal, all_heads(study, heads, (1 / moved).mean(-1)))
    return table.write(draw(table.to_frame()))


def compared_heads(study: Study) -> list[il.Head]:
    """Return the heads located by either ranking and their control heads, in order."""
    heads: set[il.Head] = set()
    for ranking in RANKINGS:
        located = study.located_heads(ranking)
        heads.update(located)
        for control_heads in study.control_heads(located).values():
            heads.update(control_heads)
    return sorted(heads)


def all_heads(study: Study, heads: Sequence[il.Head], values: np.ndarray) -> np.ndarray:
    """Return values [prompt head in heads] as [prompt layer head], NaN for all other heads."""
    scattered = np.full((len(values), study.model.cfg.n_layers, study.model.cfg.n_heads), np.nan)
    scattered[:, [head.layer for head in heads], [head.head for head in heads]] = values
    return scattered


def label_ranks(
    acts: il.Activations, heads: Sequence[il.Head], *, exchanged: bool = False
) -> torch.Tensor:
    """Return the rank of each label's token in its own value, [prompt head label]; 1 is the top of
    the vocabulary.

    With `exchanged`, the token is that of the other label, which is not at the position.
    """
    batch = acts.batch
    tokens = batch.label_tokens[1 - batch.label_index if exchanged else batch.label_index].flatten()
    ranks = []
    for head in heads:
        values = acts.label_values(head).flatten(0, 1)
        of_head = []
        for some_values, some_tokens in zip(
            values.split(RANKED_ROWS), tokens.split(RANKED_ROWS), strict=True
        ):
            scores = acts.readout.vocabulary_scores(some_values)
            of_head.append(1 + (scores > scores.gather(1, some_tokens[:, None])).sum(1))
        ranks.append(torch.cat(of_head).view(batch.label_index.shape))
    return torch.stack(ranks, dim=1)


def label_features(acts: il.Activations, heads: Sequence[il.Head]) -> torch.Tensor:
    """Return half the difference of log p(first) − log p(second label) between values at the two,
    nats, [prompt head].

    Values are read out with each prompt's own final scale and without biases. A head that writes
    the same at both labels gets 0."""
    readout = acts.readout.using(final_norm="frozen", bias=False)
    first, second = acts.batch.label_tokens
    index = acts.batch.label_index
    features = []
    for head in heads:
        tokens = second.expand(len(index)), first.expand(len(index), 1)
        log_odds = readout.relative_logits(acts.label_values(head), *tokens)[..., 0]
        at_first, at_second = (
            (log_odds * (index == label)).sum(1) / (index == label).sum(1) for label in (0, 1)
        )
        features.append((at_first - at_second) / 2)
    return torch.stack(features, dim=1)


def add_best_head(study: Study, table: Table) -> None:
    """Add how often the best head's keys and query rank the word of their own text above that of
    another text."""
    best = study.located_heads("contrast")[0]
    measures = ("own text first in keys", "input first in the query")
    if best.layer == 0:
        for measure in measures:
            table.add_missing(
                measure,
                f"the best head, {best}, is in the first layer, whose inputs are embeddings",
            )
        return
    wins = study.read(
        "words", study.testing, lambda acts: own_word_wins(acts, best), head=str(best)
    )
    for measure, shares in zip(measures, wins.T, strict=True):
        table.add(measure, shares, 0.5, versus="chance", unit="%", note=str(best))


def own_word_wins(acts: il.Activations, head: il.Head) -> torch.Tensor:
    """Return the share of pairs in which the word of a key's, and of the query's, own text is
    ranked first, [prompt 2].

    A key's word is paired with the words of the other demonstrations, the query's with those of
    all. Each text is represented by its last token, so that long ones have no advantage; ties count
    half."""
    batch = acts.batch
    text_words = batch.tokens.gather(1, batch.text_ranges[..., 1] - 1)
    query_word = batch.tokens.gather(1, batch.query_range[:, 1:] - 1)
    n = text_words.shape[1]
    key_scores = acts.readout.vocabulary_scores(acts.label_keys(head))
    key_scores = key_scores.gather(-1, text_words[:, None].expand(-1, n, -1))
    query_scores = acts.readout.vocabulary_scores(acts.last_query(head))
    query_scores = query_scores.gather(-1, torch.cat([query_word, text_words], 1))
    in_keys = wins(key_scores.diagonal(dim1=1, dim2=2)[..., None], key_scores)
    is_other = ~torch.eye(n, dtype=torch.bool)
    in_query = wins(query_scores[:, :1], query_scores[:, 1:])
    return torch.stack([in_keys[:, is_other].mean(1), in_query.mean(1)], dim=1)


def wins(scores: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    """Return 1 where a score is larger than another one, ½ where the two tie, else 0."""
    return (scores > compared).float() + 0.5 * (scores == compared)


def add_heads(study: Study, table: Table, reciprocal: np.ndarray, moved: np.ndarray) -> None:
    """Add each located head's mean reciprocal rank of the label, next to that with the other label
    there."""
    for head in study.located_heads("contrast"):
        at_label, at_other = (values[:, head.layer, head.head] for values in (reciprocal, moved))
        about = {"at": str(head), "versus": "the other label there", "unit": "0–1"}
        table.add("mean reciprocal rank, one head", at_label, at_other, **about)


def draw(table: pd.DataFrame) -> Figure:
    """Draw the mean reciprocal rank of each located head, with the label there and with the other
    label there."""
    of_heads = table.query("measure == 'mean reciprocal rank, one head'")
    names = ("label's token", "same token, other label there")
    figure, pairs = head_dots(of_heads, label="mean reciprocal rank", names=names)
    for axes, _ in pairs:
        axes.set_yscale("log")
    return figure


if __name__ == "__main__":
    from_command_line(main)
