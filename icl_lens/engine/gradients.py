"""Compute gradients with respect to every head's z in one forward pass, and one backward pass per score."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.passes import check_finite
from icl_lens.models.inference import log_probs_of
from icl_lens.models.memory import GRAPH_BYTES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


def z_gradients(
    view: ModelView,
    batch: PromptBatch,
    scores: Callable[[Float[Tensor, "batch d_vocab"]], Float[Tensor, "batch score"]],
    hooks: Iterable[tuple[str, Callable[..., Any]]] = (),
) -> tuple[list[Float[Tensor, "batch pos head d_head"]], list[tuple[Tensor, ...]]]:
    """Return every layer's z, and for each score its gradients with respect to every layer's z.

    `scores` maps the log-probabilities after each prompt to scores, whose sums over prompts are differentiated. It must
    clone the index tensors it uses, because they may have been created in inference mode. The graph begins at the first
    layer's z; weights and embeddings have no gradients. `hooks` are run in the same pass.
    """
    zs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            # The first z is the leaf of the graph; earlier computation has no gradient.
            zs[layer] = z if z.requires_grad else z.detach().requires_grad_(True)
            return zs[layer]

        return hook_fn

    def only_last(x: Tensor, hook: Any) -> Tensor:
        return x[torch.arange(len(x), device=x.device), last.to(x.device), None]

    z_hooks = [(view.hook(layer, "attn.hook_z"), keep(layer)) for layer in range(view.n_layers)]
    z_hooks.append((view.last_logits_hook, only_last))
    with view.inference_pass() as kwargs, _frozen_weights(view), view.model.hooks(fwd_hooks=[*z_hooks, *hooks]):
        # Clones, because inference tensors cannot be saved for backward.
        tokens, mask, last = (x.clone() for x in (batch.tokens, batch.attention_mask, batch.last))
        logits = view.model(tokens, attention_mask=mask, return_type="logits", **kwargs)[:, 0]
        check_finite(logits)
        totals = scores(log_probs_of(logits)).sum(0)
        layers = [zs[layer] for layer in range(view.n_layers)]
        gradients = [
            torch.autograd.grad(total, layers, retain_graph=i + 1 < len(totals)) for i, total in enumerate(totals)
        ]
    return [z.detach() for z in layers], gradients


def prompts_at_once(view: ModelView, batch: PromptBatch) -> int:
    """Return the number of prompts whose backward pass fits in `GRAPH_BYTES`, at least one."""
    width = batch.tokens.shape[1]
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    numbers_per_token = 12 * view.d_model + 4 * d_mlp + 3 * view.n_heads * width
    return max(1, GRAPH_BYTES // (4 * view.n_layers * numbers_per_token * width))


@contextmanager
def _frozen_weights(view: ModelView) -> Iterator[None]:
    """Enable gradients in the block, except those of the weights."""
    weights = [parameter for parameter in view.model.parameters() if parameter.requires_grad]
    try:
        for parameter in weights:
            parameter.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter in weights:
            parameter.requires_grad_(True)
