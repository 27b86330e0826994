"""Calibrate label probabilities: divide them by what the model gives the labels whatever the text.

Sources: contextual calibration, Zhao et al. (arXiv 2102.09690); batch calibration, Zhou et al.
(arXiv 2309.17249).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.score import score
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.passes.locking import reserves_model
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_labels
from icl_lens.prompts.tokenize import tokenizer_like
from icl_lens.reading.label_scores import LabelScores
from icl_lens.runs.progress import progress_switch, steps

CalibrationMethod = Literal["contextual", "batch"]
CONTENT_FREE = ("N/A", "[MASK]", "")
"""Inputs without content, of contextual calibration."""


@reserves_model
def calibrated_scores(
    model: Any,
    batch: PromptBatch,
    method: CalibrationMethod = "contextual",
    *,
    inputs: Sequence[str] = CONTENT_FREE,
    progress: bool | None = None,
) -> Float[Tensor, "batch label"]:
    """Return each label's calibrated log-probability among its prompt's labels, as `LabelScores`,
    nats.

    The probability of each label among the labels is divided by a prior and normalized. With
    "contextual", the prior is the mean over the same prompt with queries without content, `inputs`,
    which costs a pass over the prompts for each; with "batch", it is the mean over the prompts of
    the batch that offer the label. A preference for labels that does not depend on the text
    cancels. Labels that a prompt does not offer have −∞. If labels begin alike, each row is a
    decision between them (`tokenize`) and is calibrated by itself; `Decisions.whole_scores`
    adds decisions up.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    `metrics.accuracy(scores, batch)` is the accuracy with calibration. Raise InputError for prompts
    without labels, no `inputs`, and inputs that the
    tokenizer cannot write.

    Example:
        >>> calibrated = il.calibrated_scores(model, batch, inputs=["one", "two"])
        >>> calibrated.labels, bool((calibrated.exp().sum(-1) - 1).abs().max() < 1e-5)
        (('bar', 'foo'), True)
    """
    check_batch(batch)
    check_choice("method", method, ("contextual", "batch"))
    require_labels(batch, "label to calibrate")
    if isinstance(inputs, str) or not inputs:
        raise InputError(f"inputs must be a list of at least one text, got {short_repr(inputs)}")
    scores = _among_labels(score(model, batch, progress=progress), batch)
    if method == "batch":
        offered = batch.label_mask.to(scores.device).sum(0, keepdim=True)
        prior = (scores.exp().sum(0, keepdim=True) / offered.clamp(min=1)).log()
    else:
        priors, tokenized = torch.zeros_like(scores), tokenizer_like(model, batch)
        with progress_switch(progress), steps("calibrating", len(inputs) * len(batch)) as advance:
            for text in inputs:
                blank = {"query": text, "answer": None, "other_query": None}
                prompts = [replace(prompt, **blank) for prompt in batch.prompts]
                scores_of_text = score(model, tokenized(prompts, range(len(batch))))
                priors += _among_labels(scores_of_text, batch).exp()
                advance(len(batch))
        prior = (priors / len(inputs)).log()
    mask = batch.label_mask.to(scores.device)
    return LabelScores.from_tensor(_masked_log_softmax(scores - prior, mask), batch.labels)


def _among_labels(scores: Tensor, batch: PromptBatch) -> Float[Tensor, "batch label"]:
    """Return the log-probabilities of labels among those of their prompt; −∞ for others."""
    return _masked_log_softmax(scores.as_subclass(Tensor), batch.label_mask.to(scores.device))


def _masked_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.log_softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
