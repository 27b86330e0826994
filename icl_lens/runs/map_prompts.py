"""Map many prompts to one tensor entry each, in batches that a run's folder stores."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start


def map_prompts(
    model: Any,
    batch: PromptBatch,
    compute: Callable[[list[int]], Shaped[Tensor, "row *axes"]],
    *,
    options: Mapping[str, Any] | None = None,
    run: Run | None = None,
) -> Shaped[np.ndarray, "prompt *axes"]:
    """Return what `compute` returns for every prompt, computed in batches that `run` stores.

    `compute` gets the indices of some prompts, in order, and returns a tensor with one row per
    index. The prompts at these indices are `batch[rows]`, and their donors, if there are any,
    `donors[rows]`. With `run=il.Run(folder)`, every batch is stored, and the same call resumes an
    interrupted run. `options` must say, as JSON, what the numbers depend on beside the model and
    the prompts (heads, donors, seeds), because the folder refuses a run with other options.

    Raise InputError if `compute` returns another number of rows, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> def log_probs(rows):
        ...     return il.score(model, many[rows], [[], [il.Ablate(["L5H0"])]])
        >>> il.map_prompts(model, many, log_probs, options={"heads": ["L5H0"]}).shape
        (20, 2, 2)
    """
    ModelView.of(model)
    check_batch(batch)
    plan = plan_in_order(batch, run, n_tokens=PASS_TOKENS)

    def checked(rows: list[int]) -> dict[str, Tensor]:
        values = compute(rows)
        if len(values) != len(rows):
            raise InputError(
                f"compute must return one row per prompt, got {len(values)} rows for {len(rows)} "
                "prompts; do not average over prompts"
            )
        return {"values": values}

    with start(run, model, batch, "prompts", {"options": dict(options or {})}, plan=plan) as stream:
        return stream.map("prompts", checked)["values"]
