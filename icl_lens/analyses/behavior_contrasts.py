"""Contrasts of the labels' scores, each of which is zero for all behaviors but one.

There may be any number of labels. A prompt runs in four arrangements (`arrangements`).
Suppose that a label's score, up to what all labels of the prompt have in common, is a sum of

- L if the demonstrations give it to the query's class,
- W if it is the prompt's original label, whatever the demonstrations show: the model knows the
  classes' words,
- C if it is shown last, and F if it is shown first,
- P(label), its preference.

Let a be the original label, b the partner's, and d = s[a] − s[b]. Two signs describe an
arrangement: e is −1 if the labels are exchanged, and σ is −1 if b's class is last; φ is −1 if the
demonstrations begin with the other class than they end with. Then

    d = e·L + W + P(a) − P(b) + σ·e·C + φ·σ·e·F

1. The mean of e·d over the four arrangements is L in every prompt. Whatever a model does by the
   sequence of labels alone changes sign with σ·e and cancels.
2. The mean of σ·e·d is C + φ·F. Least squares over prompts with both φ separates the two.
3. Averaged over the arrangements, a label's score is P(label), plus W if it is a, plus (L + C + F)
   / 2 if it is a or b. Least squares over prompts with different original labels separates the
   three terms.

A contrast is returned as one value per prompt whose mean it is, so that all intervals are those of
a mean. Where least squares is used, these are the estimate plus the prompt's influence on it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from icl_lens.analyses.arrangements import Arrangement

Effect = Literal["learns", "knows", "copies", "first", "prefers"]

ARRANGEMENTS = get_args(Arrangement)
IS_EXCHANGED: Float[np.ndarray, " arrangement"] = np.array(
    [-1.0 if name.endswith("exchanged") else 1.0 for name in ARRANGEMENTS]
)
"""e of each arrangement."""
IS_LAST: Float[np.ndarray, " arrangement"] = np.array(
    [1.0 if name.startswith("last") else -1.0 for name in ARRANGEMENTS]
)
"""σ of each arrangement."""


@dataclass(frozen=True)
class Design:
    """What the arrangements of each prompt have in common."""

    answer: Int[np.ndarray, " prompt"]
    """The original label, an index."""
    partner: Int[np.ndarray, " prompt"]
    """The label that it is exchanged with."""
    choices: Bool[np.ndarray, "prompt label"]
    """Which labels each prompt offers."""
    starts_as_it_ends: Bool[np.ndarray, " prompt"]
    """Whether φ is 1."""


@dataclass(frozen=True)
class Contrasts:
    """One value per prompt for each contrast, in the unit of the scores; NaN if undetermined."""

    learns: Float[np.ndarray, " prompt"]
    knows: Float[np.ndarray, " prompt"]
    copies: Float[np.ndarray, " prompt"]
    first: Float[np.ndarray, " prompt"]
    prefers: Float[np.ndarray, "prompt label"]


def contrasts(scores: Float[np.ndarray, "arrangement prompt label"], design: Design) -> Contrasts:
    """Return the contrasts of scores; those of labels that a prompt does not offer are ignored.

    If no prompt has φ = 1, `first` is NaN, and `copies` is C − F: the last label rather than the
    first one. If W cannot be told from preferences, because each label is always the original one
    or never, `knows` is NaN, and preferences contain it. The preference for a label is relative to
    the mean of its prompts' other labels; NaN if all prompts compare the same two of more labels,
    since what they gain by being shown cannot be told from it.
    """
    rows = np.arange(len(design.answer))
    difference = scores[:, rows, design.answer] - scores[:, rows, design.partner]
    learns = (IS_EXCHANGED[:, None] * difference).mean(0)
    by_sequence = ((IS_LAST * IS_EXCHANGED)[:, None] * difference).mean(0)
    phi = np.where(design.starts_as_it_ends, 1.0, -1.0)
    columns = np.stack([np.ones_like(phi), phi], axis=1)[:, None]
    copies = fitted_values(columns, by_sequence[:, None], np.array([1.0, 0]))
    first = fitted_values(columns, by_sequence[:, None], np.array([0, 1.0]))
    if not design.starts_as_it_ends.any():
        copies = by_sequence

    labels = np.arange(scores.shape[2])
    is_answer = design.answer[:, None] == labels
    is_partner = design.partner[:, None] == labels
    mean_scores = np.where(design.choices, scores.mean(0), 0.0)
    is_label = np.broadcast_to(np.eye(len(labels)), (len(rows), len(labels), len(labels)))
    terms = [is_label, (is_answer | is_partner)[:, :, None], is_answer[:, :, None]]
    columns = _centered(np.concatenate(terms, axis=2), design.choices)
    mean_scores = _centered(mean_scores, design.choices)
    knows = fitted_values(columns, mean_scores, np.eye(columns.shape[2])[-1])
    if np.isnan(knows).any():
        columns = columns[:, :, :-1]
    n_other_terms = columns.shape[2] - len(labels)
    preferred = []
    for contrast in _against_the_others(design.choices):
        contrast = np.append(contrast, np.zeros(n_other_terms))
        preferred.append(fitted_values(columns, mean_scores, contrast))
    return Contrasts(learns, knows, copies, first, np.stack(preferred, axis=1))


def balanced_values(
    log_odds: Float[np.ndarray, " prompt"],
    answer: Int[np.ndarray, " prompt"],
    partner: Int[np.ndarray, " prompt"],
) -> Float[np.ndarray, " prompt"]:
    """Return log-odds of the answer against its partner, by prompt, without preferences for labels.

    Only the mean of the values is that of the log-odds. With d = L + P(answer) − P(partner), it is
    L, by least squares; see `fitted_values`. Where answers and partners cannot tell L from P, as
    with the same answer in all prompts, the log-odds are returned as they are.
    """
    labels = np.arange(max(answer.max(), partner.max()) + 1)
    preference = (answer[:, None] == labels).astype(float) - (partner[:, None] == labels)
    columns = np.concatenate([np.ones((len(answer), 1)), preference], axis=1)[:, None]
    values = fitted_values(columns, log_odds[:, None], np.eye(columns.shape[2])[0])
    return log_odds if np.isnan(values).any() else values


def fitted_values(
    columns: Float[np.ndarray, "prompt row column"],
    values: Float[np.ndarray, "prompt row"],
    contrast: Float[np.ndarray, " column"],
) -> Float[np.ndarray, " prompt"]:
    """Return one value per prompt whose mean is a contrast of the coefficients of least squares.

    It is the estimate plus the prompt's influence, n · contrast · (XᵀX)⁻¹ · Xᵀ · residual; the
    spread of these values is that of the estimate (the sandwich variance). NaN if the columns do
    not determine the contrast.
    """
    information = np.einsum("prc,prd->cd", columns, columns)
    inverse = np.linalg.pinv(information, rcond=1e-9, hermitian=True)
    if not np.allclose(contrast @ inverse @ information, contrast, atol=1e-6):
        return np.full(len(values), np.nan)
    coefficients = inverse @ np.einsum("prc,pr->c", columns, values)
    residuals = values - columns @ coefficients
    influence = np.einsum("c,prc,pr->p", contrast @ inverse, columns, residuals)
    return contrast @ coefficients + len(values) * influence


def _centered(
    values: Float[np.ndarray, "prompt label *column"], choices: Bool[np.ndarray, "prompt label"]
) -> Float[np.ndarray, "prompt label *column"]:
    """Return values minus their mean over the prompt's choices; zero for other labels."""
    is_choice = choices.reshape(*choices.shape, *[1] * (values.ndim - 2))
    mean = np.where(is_choice, values, 0.0).sum(1, keepdims=True) / is_choice.sum(1, keepdims=True)
    return np.where(is_choice, values - mean, 0.0)


def _against_the_others(
    choices: Bool[np.ndarray, "prompt label"],
) -> Float[np.ndarray, "label label"]:
    """Return contrasts of each label with the others.

    A label has weight 1; each other label has minus its mean weight in the prompts that offer the
    label.
    """
    contrasts = np.eye(choices.shape[1])
    for label in range(choices.shape[1]):
        offering = choices[choices[:, label]].astype(float)
        if len(offering):
            offering[:, label] = 0
            contrasts[label] -= (offering / offering.sum(1, keepdims=True)).mean(0)
    return contrasts
