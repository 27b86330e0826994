"""Function vectors: the mean output of selected heads at the last position, and its effect on other prompts.

1. A head's indirect effect is how much of the answer's probability it recovers on prompts with shuffled labels when its
   output is replaced by its mean over clean prompts.
2. The function vector is the sum of the mean outputs of the heads with the largest effects.
3. It is added to the residual stream after a layer, at the last position of prompts without demonstrations.

Source: Todd et al., "Function vectors in large language models", arXiv 2310.15213, section 2.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import capture, last_log_probs
from icl_lens.errors import InputError
from icl_lens.interventions.ablation import reference_batches
from icl_lens.interventions.edited_scores import score_passes, score_rows
from icl_lens.interventions.editor import (
    are_edits_disabled,
    cached_length,
    check_no_ragged_generation,
    check_same_prompts,
    group_by_layer,
    pass_tokens,
)
from icl_lens.interventions.effects import head_effects
from icl_lens.interventions.partial_forward import ReduceLogProbs
from icl_lens.interventions.prefix_cache import RowEdits
from icl_lens.models.head import AnyHead
from icl_lens.models.independent_rows import independent_rows
from icl_lens.models.locking import model_lock
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


def function_vector(
    model: Any, heads: Iterable[AnyHead], reference: PromptBatch | Iterable[PromptBatch]
) -> Float[Tensor, " d_model"]:
    """Return the sum of the heads' outputs at the last position, averaged over the `reference` prompts.

    The vector is in residual-stream units and does not contain b_O. Duplicate heads count once. Raise InputError for an
    unknown head or an empty reference.

    Example:
        >>> vector = il.function_vector(model, [il.Head(2, 0), il.Head(3, 1)], batch)
        >>> len(vector) == model.cfg.d_model
        True
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    batches = reference_batches(reference)
    total = torch.zeros(view.d_model, dtype=torch.float64)
    for batch in batches:
        acts = capture(model, batch)
        for layer, indices in by_layer.items():
            total += acts.head_outputs(layer)[:, indices].double().sum((0, 1)).cpu()
    return (total / sum(map(len, batches))).to(view.unembed_device, view.compute_dtype)


def indirect_effects(
    model: Any, corrupted: PromptBatch, reference: PromptBatch | Iterable[PromptBatch]
) -> Float[Tensor, "batch layer head"]:
    """Return how much of the answer's probability (−1 to 1) each head's mean output recovers on corrupted prompts.

    The head's output at the last position is replaced by its mean over the last positions of the `reference` prompts.
    Averaged over `corrupted`, this is the average indirect effect of Todd et al. Cost and memory are those of
    `head_effects(..., mode="mean")`. Raise InputError for prompts without answer or target.

    Example:
        >>> il.indirect_effects(model, batch, [batch]).shape == (1, model.cfg.n_layers, model.cfg.n_heads)
        True
    """
    lost = head_effects(model, corrupted, mode="mean", reference=reference).log_prob
    clean = last_log_probs(model, corrupted).to(lost.device)
    own = clean[torch.arange(len(clean), device=lost.device), corrupted.answer_tokens.to(lost.device)][:, None, None]
    return (own - lost).exp() - own.exp()


def read_with_vectors(
    model: Any,
    batch: PromptBatch,
    vectors: Float[Tensor, "case d_model"],
    layers: Sequence[int],
    reduce_log_probs: ReduceLogProbs,
) -> Float[Tensor, "batch case n"]:
    """Return `reduce_log_probs` of the log-probabilities after each prompt, with each vector added after its layer.

    Costs one pass over the prompts, plus one single-token row per prompt and vector from the vector's layer on, or one
    pass per vector where the prefix cache is not supported (see `head_effects`). Raise InputError like `add_vector`.
    """
    view = ModelView.of(model)
    for layer in dict.fromkeys(layers):
        _check(view, vectors, layer, len(layers))
    marks = torch.zeros(len(layers), view.n_layers, 1, dtype=torch.long)
    marks[torch.arange(len(layers)), list(layers), 0] = torch.arange(len(layers)) + 1

    def add(layer: int, cases: list[int], x: Tensor) -> None:
        rows = [row for row, case in enumerate(cases, start=1) if layers[case] == layer]
        if rows:
            x[:, rows] += vectors[[cases[row - 1] for row in rows]].to(x)

    def fallback() -> Tensor:
        contexts = (add_vector(model, vector, layer, batch) for vector, layer in zip(vectors, layers, strict=True))
        return score_passes(view, batch, contexts, reduce_log_probs)

    edits = RowEdits(marks, edit_resid=add)
    return score_rows(view, batch, lambda _: edits, reduce_log_probs, fallback, n_sets=len(layers))[0]


@contextmanager
def add_vector(model: Any, vector: Tensor, layer: int, batch: PromptBatch) -> Iterator[None]:
    """Add a vector to the residual stream after a layer, at the last position of every prompt (steering).

    `vector` is [d_model], or [batch d_model] for one per prompt, in residual-stream units. Passes in the block must be
    over `batch`. Tokens may follow prompts of one length, as in `model.generate(batch.tokens)`: the vector stays at the
    prompts' last position, with and without a KV cache. Raise InputError for a vector of the wrong shape or with
    non-finite values, an unknown layer, and passes over other prompts.

    Example:
        >>> vector = il.function_vector(model, [il.Head(2, 0)], batch)
        >>> with il.add_vector(model, vector, 1, batch):
        ...     steered = il.label_log_probs(model, batch)
        >>> steered.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    _check(view, vector, layer, len(batch))

    continues = False  # whether the pass continues a KV cache of the prompts, which has the vector

    def start(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal continues
        continues = False
        if are_edits_disabled(view):
            return
        continues = cached_length(kwargs) >= batch.tokens.shape[1]
        if continues:
            check_no_ragged_generation(batch)
        elif (tokens := pass_tokens(args, kwargs)) is not None and len(tokens) == len(batch):
            check_same_prompts(batch, tokens)

    def add(stream: Tensor, hook: Any) -> Tensor:
        if are_edits_disabled(view) or continues:
            return stream
        if len(stream) != len(batch) or stream.shape[1] < batch.tokens.shape[1]:
            raise InputError(
                f"the forward pass must have shape {tuple(batch.tokens.shape)} like batch, got "
                f"{tuple(stream.shape[:2])}; run the same batch"
            )
        stream = stream.clone()
        rows = torch.arange(len(batch), device=stream.device)
        stream[rows, batch.last.to(stream.device)] += vector.to(stream)
        return stream

    module = getattr(model, "original_model", model)
    with ExitStack() as stack:
        stack.enter_context(model_lock(model, block=True))
        stack.enter_context(independent_rows(model))
        stack.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
        stack.enter_context(model.hooks(fwd_hooks=[(view.hook(layer, "hook_resid_post"), add)]))
        yield


def _check(view: ModelView, vector: Tensor, layer: int, n: int) -> None:
    """Raise InputError for an unknown layer, and for a vector (or `n`) of the wrong shape or with non-finite values."""
    if not 0 <= layer < view.n_layers:
        raise InputError(f"layer must be between 0 and {view.n_layers - 1} for {view.name}, got {layer!r}")
    if tuple(vector.shape) not in ((view.d_model,), (n, view.d_model)):
        raise InputError(
            f"vector must have shape ({view.d_model},) or ({n}, {view.d_model}), one per prompt, got "
            f"{tuple(vector.shape)}"
        )
    if not bool(vector.isfinite().all()):
        raise InputError("vector must be finite, got NaN or infinite values")
