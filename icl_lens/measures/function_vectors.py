"""Function vectors: the mean output of selected heads at the last position, and its effect on other
prompts.

1. A head's indirect effect is how much of the answer's probability it recovers on prompts with
   shuffled labels when its output is replaced by its mean over clean prompts.
2. The function vector is the sum of the mean outputs of the heads with the largest effects.
3. `AddVector` adds it to the residual stream after a layer, at the last position of prompts without
   demonstrations.

Source: Todd et al., "Function vectors in large language models", arXiv 2310.15213, section 2.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit import group_by_layer
from icl_lens.edits.reference_prompts import mean_z, reference_batches
from icl_lens.edits.score import score_sets
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.reading.capture import capture
from icl_lens.reading.scored_tokens import AnswerTokens
from icl_lens.runs.progress import progress_switch, steps


def function_vector(
    model: Any,
    reference: PromptBatch | Iterable[PromptBatch],
    heads: Iterable[AnyHead],
    *,
    progress: bool | None = None,
) -> Float[Tensor, " d_model"]:
    """Return the sum of the heads' outputs at the last position, averaged over the `reference`
    prompts.

    The vector is in residual-stream units and does not contain b_O. Duplicate heads count once.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False. Raise InputError for an unknown head or an empty reference.

    Example:
        >>> vector = il.function_vector(model, batch, ["L2H0", "L3H1"])
        >>> len(vector) == model.cfg.d_model
        True
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    batches = reference_batches(reference)
    total = torch.zeros(view.d_model, dtype=torch.float64)
    with progress_switch(progress), steps("capturing", sum(map(len, batches))) as advance:
        for batch in batches:
            acts = capture(model, batch)
            for layer, indices in by_layer.items():
                total += acts.head_outputs(layer)[:, indices].double().sum((0, 1)).cpu()
            advance(len(batch))
    return (total / sum(map(len, batches))).to(view.unembed_device, view.compute_dtype)


def indirect_effects(
    model: Any,
    corrupted: PromptBatch,
    reference: PromptBatch | Iterable[PromptBatch],
    *,
    progress: bool | None = None,
) -> Float[Tensor, "batch layer head"]:
    """Return how much of the answer's probability (−1 to 1) each head's mean output recovers on
    corrupted prompts.

    The head's output at the last position is replaced by its mean over the last positions of the
    `reference` prompts. Averaged over `corrupted`, this is the average indirect effect of Todd et
    al. Cost, memory and `progress` are those of `head_effects(..., mode="mean")`. Raise InputError
    for prompts without answer or target.

    Example:
        >>> effects = il.indirect_effects(model, batch, [batch])
        >>> effects.shape == (1, model.cfg.n_layers, model.cfg.n_heads)
        True
    """
    view = ModelView.of(model)
    check_batch(corrupted)
    with progress_switch(progress):
        batches = tuple(reference_batches(reference))
        means = mean_z(view, range(view.n_layers), batches, "last")
        to_mean = Ablate([], mode="mean", reference=batches, positions="last", recorded_z=means)
        return recovered_probabilities(view, corrupted, to_mean)


def recovered_probabilities(
    view: ModelView, corrupted: PromptBatch, to_mean: Ablate
) -> Float[Tensor, "batch layer head"]:
    """Return `indirect_effects` of replacing each head's output as `to_mean` says."""
    tokens = AnswerTokens.from_batch(view, corrupted, None, None)

    def probability(log_probs: Tensor, prompts: Tensor) -> Float[Tensor, " row"]:
        return tokens.outcomes(log_probs, prompts)[:, 0].exp()

    sets: list[list[Ablate]] = [[]]
    for head in view.heads():
        sets.append([replace(to_mean, heads=[head])])
    probabilities, _ = score_sets(view, corrupted, sets, probability)
    recovered = probabilities[:, 1:] - probabilities[:, :1]
    return recovered.unflatten(1, (view.n_layers, view.n_heads))
