"""Compute gradients with respect to every head's z, or what is at sites of layers: one forward, and
one backward pass per score.

The graph of a whole pass takes gigabytes for a long prompt. So each block keeps its input only, and
runs again when the backward pass reaches it (gradient checkpointing: Chen et al., arXiv
1604.06174); a layer's gradients are read then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from icl_lens.edits.edit import Stage
from icl_lens.edits.recomputed_patterns import LayerValues
from icl_lens.edits.site_hooks import HOOKS
from icl_lens.models.freed_memory import make_room, release_freed_memory
from icl_lens.models.passes.inference import log_probs_of, replace_forwards
from icl_lens.models.passes.memory import GRAPH_BYTES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import check_finite

T = TypeVar("T")
HeadVectors = Float[Tensor, "batch pos head d_head"]


def z_gradients(
    view: ModelView,
    batch: PromptBatch,
    scores: Callable[[Float[Tensor, "batch d_vocab"]], Float[Tensor, "batch score"]],
    read: Callable[[int, HeadVectors, HeadVectors], T],
    hooks: Iterable[tuple[str, Callable[..., Any]]] = (),
    recorded: Sequence[LayerValues] = (),
) -> list[list[T]]:
    """Return for each score and layer what `read` returns for the layer, its z and its gradient.

    `scores` maps the log-probabilities after each prompt to scores, whose sums over prompts are
    differentiated. It must clone the index tensors it uses, because they may have been created in
    inference mode. The graph begins at the first layer's z; weights and embeddings have no
    gradients. `hooks` are run in the same pass; what they record of each layer in `recorded` is
    there when the layer is read.

    If other hooks are active on the model, which may count on running once, all layers' graphs are
    kept instead.
    """
    runs_blocks_again = not view.has_hooks
    zs: dict[int, Tensor] = {}
    leaf: list[Tensor] = []  # the first layer's z
    begun: set[int] = set()  # layers that have run
    by_score: list[dict[int, T]] = []

    def take(layer: int, gradient: Tensor) -> None:
        # The FFN's graph is freed here, and what is read, before attention's largest matrices come.
        release_freed_memory()
        with torch.no_grad():
            by_score[-1][layer] = read(layer, zs[layer], gradient)
        if runs_blocks_again:
            del zs[layer]
            _forget(recorded, layer)
        release_freed_memory()

    def keep(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            # The first z is the leaf of the graph; earlier computation has no gradient.
            z = z if z.requires_grad else z.detach().requires_grad_(True)
            is_first_run = layer not in begun
            if is_first_run:
                begun.add(layer)
                z.register_hook(partial(take, layer))
                if layer == 0:
                    leaf.append(z)
            if is_first_run and runs_blocks_again:
                _forget(recorded, layer)
            else:
                zs[layer] = z.detach()
            return z

        return hook_fn

    z_hooks = [(view.hook(layer, "attn.hook_z"), keep(layer)) for layer in range(view.n_layers)]
    with _log_probs_with_graph(
        view, batch, [*z_hooks, *hooks], runs_blocks_again=runs_blocks_again
    ) as log_probs:
        totals = scores(log_probs).sum(0)
        for number, total in enumerate(totals):
            by_score.append({})
            torch.autograd.grad(total, leaf[0], retain_graph=number + 1 < len(totals))
    readings = []
    for by_layer in by_score:
        readings.append([by_layer[layer] for layer in range(view.n_layers)])
    return readings


def site_gradients(
    view: ModelView,
    batch: PromptBatch,
    score: Callable[[Float[Tensor, "batch d_vocab"]], Float[Tensor, " batch"]],
    sites: Iterable[tuple[Stage, int]],
    read: Callable[[Stage, int, Float[Tensor, "batch pos width"]], None],
) -> None:
    """Call `read` with each site, layer and gradient of `score` there, in one backward pass.

    `score` is that of `z_gradients`. The stream between attention and FFN is its layer's input plus
    attention's output, so that its gradient is that of attention's output.
    """
    leaves: list[Tensor] = []  # where the graph begins
    begun: set[tuple[Stage, int]] = set()  # sites that have run
    asked_at: dict[tuple[Stage, int], list[Stage]] = {}
    for site, layer in sites:
        hooked = Stage.attn_out if site == Stage.resid_mid else site
        asked_at.setdefault((hooked, layer), []).append(site)

    def take(asked: Sequence[Stage], layer: int, gradient: Tensor) -> None:
        release_freed_memory()
        with torch.no_grad():
            for site in asked:
                read(site, layer, gradient)

    def mark(place: tuple[Stage, int], asked: Sequence[Stage]) -> Any:
        def hook_fn(x: Tensor, hook: Any) -> Tensor:
            is_first_run = place not in begun
            begun.add(place)
            if not x.requires_grad:
                x = x.detach().requires_grad_(True)
                if is_first_run:
                    leaves.append(x)
            x = x.clone()  # some families add to the stream in place
            if is_first_run:
                x.register_hook(partial(take, asked, place[1]))
            return x

        return hook_fn

    hooks = []
    for (site, layer), asked in asked_at.items():
        hooks.append((view.hook(layer, HOOKS[site]), mark((site, layer), asked)))
    runs_blocks_again = not view.has_hooks
    with _log_probs_with_graph(
        view, batch, hooks, runs_blocks_again=runs_blocks_again
    ) as log_probs:
        torch.autograd.grad(score(log_probs).sum(), leaves)


@contextmanager
def _log_probs_with_graph(
    view: ModelView,
    batch: PromptBatch,
    hooks: Iterable[tuple[str, Callable[..., Any]]],
    *,
    runs_blocks_again: bool,
) -> Iterator[Float[Tensor, "batch d_vocab"]]:
    """Run a pass with hooks and give log-probabilities after each prompt, to differentiate in the
    block.
    """

    def only_last(x: Tensor, hook: Any) -> Tensor:
        return x[torch.arange(len(x), device=x.device), last.to(x.device), None]

    room = make_room(view, *batch.tokens.shape)
    with (
        view.inference_pass() as kwargs,
        _frozen_weights(view),
        view.model.hooks(fwd_hooks=[*room, *hooks, (view.last_logits_hook, only_last)]),
        _blocks_run_again(view, is_on=runs_blocks_again),
    ):
        # Clones, because inference tensors cannot be saved for backward.
        tokens, mask, last = (x.clone() for x in (batch.tokens, batch.attention_mask, batch.last))
        logits = view.model(tokens, attention_mask=mask, return_type="logits", **kwargs)[:, 0]
        check_finite(logits)
        yield log_probs_of(logits)


def _forget(recorded: Sequence[LayerValues], layer: int) -> None:
    if recorded:
        recorded[layer].seen.clear()


@contextmanager
def _blocks_run_again(view: ModelView, *, is_on: bool) -> Iterator[None]:
    """Let blocks keep only their inputs for the backward pass, which then runs them again."""
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    blocks = list(view.model.blocks) if is_on else []
    with replace_forwards([(block, partial(checkpointed, block.forward)) for block in blocks]):
        yield


def prompts_at_once(view: ModelView, batch: PromptBatch) -> int:
    """Return the number of prompts whose backward pass fits in `GRAPH_BYTES`, at least one.

    A prompt takes the inputs of all blocks and the graph of one, or of all blocks if other hooks
    are active.
    """
    width = batch.tokens.shape[1]
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    numbers_per_block = 12 * view.d_model + 4 * d_mlp + 3 * view.n_heads * width
    n_graphs = view.n_layers if view.has_hooks else 1
    numbers_per_token = view.n_layers * view.d_model + n_graphs * numbers_per_block
    return max(1, GRAPH_BYTES // (4 * numbers_per_token * width))


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
