"""Methods of finding heads: each scores all heads on prompts and selects those of largest mean score."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.framework.study import Study, contrasts, increases

HeadScores = Float[Tensor, "row layer head"]


@dataclass(frozen=True)
class Method:
    """A way of scoring every head on every locating prompt."""

    name: str
    score: Callable[[Study, il.PromptBatch], HeadScores]
    passes: Callable[[int], int]
    """Runs of the model that a prompt takes, by the model's number of heads; a backward pass counts as two."""


def best_heads(values: HeadScores, k: int) -> list[il.Head]:
    """Return the k heads of largest mean score."""
    order = values.double().mean(0).flatten().argsort(descending=True)[:k]
    return [il.Head.from_index(index, values.shape[2]) for index in order.tolist()]


def by_effect(study: Study, batch: il.PromptBatch) -> HeadScores:
    """Return what the answer's log-odds lose if each head alone is set to zero at the last position, nats."""
    found = [il.head_effects(study.model, piece).log_odds for piece in study.pieces(batch)]
    return torch.cat(found).cpu()


def by_gradient(study: Study, batch: il.PromptBatch) -> HeadScores:
    """Return the first-order estimate of `by_effect`, z · ∂ log-odds / ∂z, nats."""
    found = [il.head_effects(study.model, piece, method="gradient").log_odds for piece in study.pieces(batch)]
    return torch.cat(found).cpu()


def by_attention(study: Study, batch: il.PromptBatch) -> HeadScores:
    """Return the attention from the last position to labels of the answer's class minus that to all other labels."""

    def score(acts: il.Activations) -> HeadScores:
        by_label = acts.attention_by_label()
        sign = 2 * torch.nn.functional.one_hot(acts.batch.answer, by_label.shape[-1]).to(by_label) - 1
        return (by_label * sign[:, None, None]).sum(-1)

    return study.map(batch, score)


def by_tracing(study: Study, batch: il.PromptBatch) -> HeadScores:
    """Return the log-odds (nats) that each head restores in a run of the same prompt with its labels exchanged.

    The head's output at the last position comes from the run with the right labels; the rest is unchanged. `batch`
    must be the first prompts of the study's locating half.
    """
    exchanged, heads = study.halves(exchanged=True)[0], study.view.heads()

    def sets_of(rows: slice) -> list[list[il.Patch]]:
        clean = batch[rows]  # one batch for all patches, which then share its pass
        return [[], *([il.Patch([head], clean, activation="z", positions="last")] for head in heads)]

    # The log-odds of the answer of `batch`, which is the other label of `exchanged`.
    odds = -torch.from_numpy(study.scores(exchanged[: len(batch)], sets_of).odds)
    return (odds[:, 1:] - odds[:, :1]).unflatten(1, (study.view.n_layers, study.view.n_heads))


METHODS = {
    "contrast": Method("contrast", lambda study, batch: study.map(batch, contrasts), lambda heads: 1),
    "increase": Method("increase", lambda study, batch: study.map(batch, increases), lambda heads: 1),
    "effects": Method("exact effects", by_effect, lambda heads: 1 + heads),
    "gradient": Method("gradient estimate", by_gradient, lambda heads: 1 + 2 * 2),  # backward for log p and log-odds
    "attention": Method("attention to labels", by_attention, lambda heads: 1),
    "tracing": Method("causal tracing", by_tracing, lambda heads: 2 + heads),
}
