"""Function vectors: what chosen heads write at the last position on average, and what it does to other prompts.

1. A head's indirect effect is what its mean output over good prompts, put in place of its own, gives back to the
   answer's probability on prompts whose labels are shuffled.
2. The function vector is the sum of the mean outputs of the heads of largest effect.
3. It is added to the residual stream behind a layer, at the last position of prompts without demonstrations.

Source: Todd et al., "Function vectors in large language models", arXiv 2310.15213, section 2.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import capture, last_log_probs
from icl_lens.errors import InputError
from icl_lens.interventions.effects import head_effects
from icl_lens.interventions.head_sets import Reducer, map_cached_rows
from icl_lens.interventions.prefix_cache import PrefixCacheUnsupported
from icl_lens.interventions.selection import group_by_layer
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model, model_lock
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


def function_vector(
    model: Any, heads: Iterable[Head | tuple[int, int]], reference: PromptBatch | Iterable[PromptBatch]
) -> Float[Tensor, " d_model"]:
    """The sum over heads of what each writes into the residual stream at the last position, averaged over `reference`.

    In residual-stream units; without b_O, which belongs to no head. Each head counts once. Raises InputError for a head
    the model does not have and for no prompts.

    Example:
        >>> vector = il.function_vector(model, [il.Head(2, 0), il.Head(3, 1)], batch)
        >>> len(vector) == model.cfg.d_model
        True
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    batches = [reference] if isinstance(reference, PromptBatch) else list(reference)
    if not batches:
        raise InputError("there is no reference prompt to average over; give at least one")
    total = torch.zeros(view.d_model, dtype=torch.float64)
    for batch in batches:
        acts = capture(model, batch)
        for layer, indices in by_layer.items():
            total += acts.head_outputs(layer)[:, indices].double().sum((0, 1)).cpu()
    return (total / sum(map(len, batches))).to(view.unembed_device, view.compute_dtype)


@locks_model
def indirect_effects(
    model: Any, corrupted: PromptBatch, reference: PromptBatch | Iterable[PromptBatch]
) -> Float[Tensor, "batch layer head"]:
    """What each head's mean output gives back to the answer's probability (−1 to 1) on corrupted prompts.

    The mean is over the last positions of the `reference` prompts, and stands in place of the head's own output at the
    last position. The mean over prompts is the average indirect effect. Cost and memory are those of
    `head_effects(..., positions="last", mode="mean")`. Raises InputError for prompts without answer or target.

    Example:
        >>> il.indirect_effects(model, batch, [batch]).shape == (1, model.cfg.n_layers, model.cfg.n_heads)
        True
    """
    lost = head_effects(model, corrupted, positions="last", mode="mean", reference=reference).log_prob
    clean = last_log_probs(model, corrupted).to(lost.device)
    own = clean[torch.arange(len(clean), device=lost.device), corrupted.answer_tokens.to(lost.device)][:, None, None]
    return (own - lost).exp() - own.exp()


@locks_model
def read_with_vectors(
    model: Any,
    batch: PromptBatch,
    vectors: Float[Tensor, "case d_model"],
    layers: Sequence[int],
    read: Reducer,
) -> Float[Tensor, "batch case n"]:
    """What `read` keeps after each prompt with each vector added behind its layer, as `add_vector` adds it.

    Costs a pass over the prompts, and a row of one token for each prompt and vector from the vector's layer on; where
    keys cannot be shared (see `head_effects`), a pass for each vector. Raises InputError as `add_vector` does.
    """
    view = ModelView.of(model)
    for layer in dict.fromkeys(layers):
        _check(view, vectors, layer, len(layers))
    order = sorted(range(len(layers)), key=lambda case: layers[case])
    places, ordered = [layers[case] for case in order], vectors[order]
    try:
        found = map_cached_rows(
            view, batch, len(order), lambda kept, some, _: kept.add_vectors(ordered[some], places[some]), read
        )
    except PrefixCacheUnsupported:
        each = []
        for vector, layer in zip(ordered, places, strict=True):
            with add_vector(model, vector, layer, batch):
                each.append(read(last_log_probs(model, batch)[:, None], batch))
        found = torch.cat(each, dim=1)
    return found[:, torch.tensor(order).argsort().to(found.device)]


@contextmanager
def add_vector(model: Any, vector: Tensor, layer: int, batch: PromptBatch) -> Iterator[None]:
    """Adds a vector to the residual stream behind a layer, at the last position of every prompt.

    `vector` [d_model], or [batch d_model]: one a prompt, in residual-stream units. Passes in the block must be over
    `batch`. Raises InputError for a vector of another shape or that is not finite, a layer that the model does not
    have, and passes of another shape.

    Example:
        >>> vector = il.function_vector(model, [il.Head(2, 0)], batch)
        >>> with il.add_vector(model, vector, 1, batch):
        ...     steered = il.label_log_probs(model, batch)
        >>> steered.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    _check(view, vector, layer, len(batch))

    def add(stream: Tensor, hook: Any) -> Tensor:
        if tuple(stream.shape[:2]) != tuple(batch.tokens.shape):
            raise InputError(
                f"the vector is for {len(batch)} prompts of {batch.tokens.shape[1]} tokens, and the pass is over "
                f"{tuple(stream.shape[:2])}; run the same batch"
            )
        stream = stream.clone()
        rows = torch.arange(len(batch), device=stream.device)
        stream[rows, batch.last.to(stream.device)] += vector.to(stream)
        return stream

    with model_lock(model, block=True), model.hooks(fwd_hooks=[(view.hook(layer, "hook_resid_post"), add)]):
        yield


def _check(view: ModelView, vector: Tensor, layer: int, n: int) -> None:
    """Raises InputError for a layer that is not there, and for a vector, or `n` of them, that cannot be added."""
    if not 0 <= layer < view.n_layers:
        raise InputError(f"there is no layer {layer} in {view.name}; layers are 0–{view.n_layers - 1}")
    if tuple(vector.shape) not in ((view.d_model,), (n, view.d_model)):
        raise InputError(
            f"the vector has shape {tuple(vector.shape)}; give {view.d_model} numbers, or as many for each of "
            f"{n} prompts"
        )
    if not bool(vector.isfinite().all()):
        raise InputError("the vector is not finite (NaN or infinite); give numbers")
