"""Measure what vectors do at each layer: task vectors in place of the residual stream, function
vectors added to it.

Sources: task vectors, Hendel et al. (arXiv 2310.15916); function vectors, Todd et al. (arXiv
2310.15213).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.edits.add_vector import AddVector
from icl_lens.edits.reference_prompts import reference_batches
from icl_lens.edits.score import score
from icl_lens.errors import InputError, check_integers, short_repr
from icl_lens.foundation.intervals import mean_intervals
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.passes.locking import reserves_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.reading.capture import capture
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps


@dataclass(frozen=True, repr=False)
class VectorGains(Result):
    """What a vector after each layer does to the answer, on the same prompts without and with it.

    Example:
        >>> gains = il.vector_gains(model, il.task_vectors(model, batch), batch, replace=True)
        >>> gains.to_frame().columns[:4].tolist()
        ['layer', 'gain', 'low', 'high']
    """

    layers: tuple[int, ...]
    intact: Float[Tensor, " batch"]
    """log p(answer) without a vector, nats."""
    log_prob: Float[Tensor, "batch layer"]
    """log p(answer) with the vector, nats."""
    top1_intact: Bool[Tensor, " batch"]
    """Whether the answer is the most probable token of the vocabulary."""
    top1: Bool[Tensor, "batch layer"]
    replace: bool
    queries: tuple[str, ...]
    """The query of each prompt; intervals resample them."""
    edits: tuple[str, ...] = ()
    """What else edited the model throughout: open `with` blocks, and other hooks."""

    @property
    def gain(self) -> Float[Tensor, "batch layer"]:
        """What the vector adds to log p(answer), nats."""
        return self.log_prob - self.intact[:, None]

    @property
    def best(self) -> int:
        """The layer with the largest mean gain on these prompts; use it on others, since it was
        chosen by its gain.
        """
        return self.layers[int(self.gain.double().mean(0).argmax())]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per layer: gain in log p(answer), nats, with its 95% interval, and
        accuracy with and without.

        Accuracy is the share of prompts whose answer is the most probable token of the vocabulary,
        0 to 1.
        """
        mean, low, high = mean_intervals(self.gain.double().cpu().numpy(), self.queries)
        accuracy = self.top1.double().mean(0).cpu().numpy()
        intact = np.full_like(accuracy, float(self.top1_intact.double().mean()))
        columns = {"layer": self.layers, "gain": mean, "low": low, "high": high}
        return pd.DataFrame(columns | {"accuracy": accuracy, "accuracy_intact": intact})

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        table = self.to_frame()
        largest = table.nlargest(SHOWN_ROWS // 2, "gain").sort_values("layer")
        where = (
            "in place of the residual stream" if self.replace else "added to the residual stream"
        )
        share_intact = float(self.top1_intact.double().mean())
        title = (
            f"VectorGains: a vector {where}, {plural_prompts(len(self.queries))}; without it, the "
            f"answer is the top token in {share_intact:.0%}{edits_suffix(self.edits)}"
        )
        if len(largest) < len(table):
            title += "\nThe largest gains:"
        columns: dict[str, list[Any]] = {
            "after layer": largest["layer"].tolist(),
            "log p(answer) gained": list(map(signed, largest["gain"])),
            "low": list(map(signed, largest["low"])),
            "high": list(map(signed, largest["high"])),
            "answer is top token": [f"{share:.0%}" for share in largest["accuracy"]],
        }
        return table_view(title, columns, len(table))


def task_vectors(
    model: Any, reference: PromptBatch | Iterable[PromptBatch], *, progress: bool | None = None
) -> Float[Tensor, "layer d_model"]:
    """Return the mean residual stream after each layer at the last position of the `reference`
    prompts.

    It is written in place of the residual stream of other prompts by `vector_gains(...,
    replace=True)`. Hendel et al. have one such vector for each set of demonstrations, over dummy
    queries: pass prompts that share demonstrations.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False. Raise InputError for an empty reference.

    Example:
        >>> il.task_vectors(model, batch).shape == (model.cfg.n_layers, model.cfg.d_model)
        True
    """
    batches = reference_batches(reference)
    view = ModelView.of(model)
    total = torch.zeros(view.n_layers, view.d_model, dtype=torch.float64)
    with progress_switch(progress), steps("capturing", sum(map(len, batches))) as advance:
        for batch in batches:
            acts = capture(model, batch)
            total[:-1] += acts.resid_pre[:, 1:].double().sum(0).cpu()
            total[-1] += acts.resid_final.double().sum(0).cpu()
            advance(len(batch))
    return (total / sum(map(len, batches))).to(view.unembed_device, view.compute_dtype)


@reserves_model
def vector_gains(
    model: Any,
    vectors: Float[Tensor, "*layer d_model"],
    batch: PromptBatch,
    *,
    layers: Sequence[int] | None = None,
    replace: bool = False,
    progress: bool | None = None,
) -> VectorGains:
    """Return what a vector after each layer, at the last position, does to the answer's
    log-probability and accuracy.

    `vectors` is one vector for all layers, such as `function_vector(...)`, or one per layer of the
    model, such as `task_vectors(...)`. It is added to the residual stream or, with `replace=True`,
    written in its place. `layers` are all by default. `batch` are typically prompts without
    demonstrations. The prompts run once, and each layer re-runs one token per prompt.

    Two controls are yours to run: random vectors of the same norm, and, because a vector may only
    make words of the task's kind more probable, the same prompts with each other's answers
    (`Prompt(..., answer=)`).

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    Raise InputError for vectors of another shape, unknown layers, and prompts without answer or
    target.

    Example:
        >>> vector = il.function_vector(model, batch, ["L2H0", "L3H1"])
        >>> il.vector_gains(model, vector, batch, layers=[1, 2]).log_prob.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    check_batch(batch)
    checked_layers = _checked_layers(view, layers)
    if not isinstance(vectors, Tensor):
        raise InputError(
            f"vectors must be a tensor, got {type(vectors).__name__}; write torch.tensor(...)"
        )
    if tuple(vectors.shape) not in ((view.d_model,), (view.n_layers, view.d_model)):
        raise InputError(
            f"vectors must have shape ({view.d_model},) or ({view.n_layers}, {view.d_model}), got "
            f"{tuple(vectors.shape)}"
        )
    answers = batch.answer_tokens
    if bool((answers < 0).any()):
        raise InputError(
            "every prompt must have an answer or a target, and some have none; drop these prompts"
        )

    def log_prob_and_top1(log_probs: Tensor, prompts: Tensor) -> Float[Tensor, "row 2"]:
        answer = answers.to(log_probs.device)[prompts.to(log_probs.device)]
        log_prob = log_probs.gather(1, answer[:, None])[:, 0]
        is_top1 = log_probs.argmax(1) == answer
        return torch.stack([log_prob, is_top1.to(log_prob)], dim=1)

    vector_of_layer = vectors.expand(view.n_layers, -1)
    sets: list[list[AddVector]] = [[]]
    for layer in checked_layers:
        sets.append([AddVector(vector_of_layer[layer], layer, replace=replace)])
    scores = score(model, batch, sets, read=log_prob_and_top1, progress=progress)
    log_prob, top1 = scores.unbind(-1)
    return VectorGains(
        layers=tuple(checked_layers),
        intact=log_prob[:, 0],
        log_prob=log_prob[:, 1:],
        top1_intact=top1[:, 0].bool(),
        top1=top1[:, 1:].bool(),
        replace=replace,
        queries=batch.queries,
        edits=active_edits(view),
    )


def _checked_layers(view: ModelView, layers: Sequence[int] | None) -> list[int]:
    """Return layers, by default all; raise InputError for none, and for those that do not exist."""
    if layers is None:
        return list(range(view.n_layers))
    checked = list(layers)
    check_integers(**{f"layers[{number}]": layer for number, layer in enumerate(checked)})
    if not checked or not all(0 <= layer < view.n_layers for layer in checked):
        raise InputError(
            f"layers must be between 0 and {view.n_layers - 1}, at least one, got "
            f"{short_repr(layers)}"
        )
    return checked
