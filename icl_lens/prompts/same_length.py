"""Texts with the same number of tokens, so that all rows of a batch have their labels at the same
positions.
"""

from collections import Counter
from itertools import chain
from typing import Any

import torch

from icl_lens.errors import InputError, quoted_list
from icl_lens.prompts.prompt import Demonstration, Prompt, Template
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts
from icl_lens.prompts.tokenize import tokenize


def texts_of_one_length(
    groups: list[list[str]], label: str, model: Any, template: Template
) -> list[list[str]]:
    """Return the texts of each group that have one token length: the length that leaves the
    smallest group the most texts.

    Tokens are counted in context, from the start of the prompt to the label and from the label to
    the end of the query, since some tokenizers split a word differently at the start.
    """
    texts = list(dict.fromkeys(chain.from_iterable(groups)))
    lengths = _token_lengths([(text, label) for text in texts], model, template)
    length_of = dict(zip(texts, lengths, strict=True))
    counts = [Counter(map(length_of.__getitem__, group)) for group in groups]
    best = max(sorted(set(lengths)), key=lambda length: min(count[length] for count in counts))
    groups_of_best = []
    for group in groups:
        groups_of_best.append([text for text in group if length_of[text] == best])
    return groups_of_best


def pairs_of_one_length(
    model: Any, template: Template, pairs: list[tuple[str, str]], separator: str
) -> list[tuple[str, str]]:
    """Return the pairs with the most frequent numbers of tokens of their texts and outputs."""
    lengths = _token_lengths(pairs, model, template.separated_by(separator))
    (best, _), *_ = Counter(lengths).most_common(1)
    return [pair for pair, length in zip(pairs, lengths, strict=True) if length == best]


def check_rows_align(prompts: list[Prompt], model: Any, template: Template) -> None:
    """Raise InputError for the first row whose labels or end are at other positions than those of
    row 0.
    """
    batch = tokenize(model, prompts, template=template)
    ranges = torch.cat([batch.label_ranges.flatten(1), batch.last[:, None]], dim=1)
    positions = torch.cat([batch.label_ranges[..., 1] - 1, batch.last[:, None]], dim=1)
    differs = (ranges != ranges[0]).any(-1)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise InputError(
            f"labels must have the same number of tokens, got {quoted_list(batch.labels)}, which "
            f"put the labels and end of prompt {row} at {positions[row].tolist()} and of prompt 0 "
            f"at {positions[0].tolist()}; choose other labels"
        )


def _token_lengths(
    pairs: list[tuple[str, str]], model: Any, template: Template
) -> list[tuple[int, int, int]]:
    """Return for each text and label where the label begins and how long it is, and the length of a
    query after it.
    """
    prompts = [Prompt([Demonstration(text, label)], text) for text, label in pairs]
    texts = tokenize_texts(require_fast_tokenizer(model), list(map(template.render, prompts)))
    lengths = []
    for text in texts:
        start, end = text.range_of(text.rendered.label_spans[0])
        lengths.append((start, end - start, len(text.ids) - end))
    return lengths
