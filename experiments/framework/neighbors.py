"""How much of a neighboring text is in the query: located heads get the queries of prompts in which one text differs.

Keys, values and labels stay those of the intact prompt, so a demonstration's text counts only as part of the query.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float

import icl_lens as il
from experiments.framework.study import Study
from icl_lens.metrics import label_log_odds


@dataclass(frozen=True)
class ExchangedTexts:
    """Prompts, and the same with one text exchanged for one of the other class; labels stay."""

    intact: list[il.Prompt]
    input: list[il.Prompt]
    """The query's text exchanged."""
    last: list[il.Prompt]
    """The last demonstration's."""
    before_last: list[il.Prompt]
    """That of the demonstration before the last."""


def exchange_texts(prompts: Sequence[il.Prompt], seed: int) -> ExchangedTexts:
    """Take one random demonstration of each class out of each prompt, and exchange other texts for theirs."""
    rng = random.Random(seed)
    found = ExchangedTexts([], [], [], [])
    for prompt in prompts:
        shown, spare = list(prompt.demonstrations), {}
        for own in (True, False):
            spare[own] = rng.choice([one for one in shown if (one.label == prompt.answer) == own])
            shown.remove(spare[own])
        found.intact.append(il.Prompt(shown, prompt.query, prompt.answer, prompt.labels))
        found.input.append(il.Prompt(shown, spare[False].text, prompt.answer, prompt.labels))
        for some, place in ((found.last, -1), (found.before_last, -2)):
            other = list(shown)
            other[place] = replace(shown[place], text=spare[shown[place].label != prompt.answer].text)
            some.append(il.Prompt(other, prompt.query, prompt.answer, prompt.labels))
    return found


def query_effects(study: Study, texts: ExchangedTexts, heads: Sequence[il.Head]) -> Float[np.ndarray, "row 3"]:
    """Return what the answer's log-odds lose by each exchange in the last position's queries of these heads, nats.

    Columns: input, last, before_last. Where the exchanged text was of the other class than the query, an answer that
    follows it should gain, and the gain is returned instead.
    """
    intact = study.tokenize(texts.intact)
    size = len(study.pieces(intact)[0])
    same = torch.ones(len(intact), 3)
    same[:, 1:] = (intact.label_index[:, [-1, -2]] == intact.answer[:, None]).cpu() * 2 - 1
    columns = []
    for prompts in (texts.input, texts.last, texts.before_last):
        lost = []
        for piece, source in zip(intact.split(size), study.tokenize(prompts).split(size), strict=True):
            before = il.label_log_probs(study.model, piece)
            patched = il.label_log_probs_patched(study.model, piece, [heads], source, activation="q", positions="last")
            lost.append((label_log_odds(before, piece.answer) - label_log_odds(patched[:, 0], piece.answer)).cpu())
        columns.append(torch.cat(lost))
    return (torch.stack(columns, dim=1) * same).double().numpy()
