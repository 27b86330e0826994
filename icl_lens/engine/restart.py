"""Score sets of edits of z, or at sites, by re-running prompts only from the first edited layer.

1. One unedited pass over the prompts stores the residual stream at the input of every layer in
   which a set starts.
2. Every pair of a prompt and a set makes one row; rows of sets that start at about the same layer
   share a pass.
3. Each pass resumes from the stored stream at the first of these layers, and each row has the edits
   of its set.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.passes import last_log_probs
from icl_lens.edits.edit import (
    SITE_STAGES,
    Z_STAGES,
    EditAtLayers,
    Places,
    Stage,
    edits_at,
    writes_at,
)
from icl_lens.edits.site_hooks import SiteWriter
from icl_lens.models.inference import log_probs_of, replace_forwards
from icl_lens.models.locking import model_lock
from icl_lens.models.memory import MIN_PASS_TOKENS, RESTART_BYTES, STREAM_BYTES
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Read = Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"]], Float[Tensor, "row *n"]]
"""A function of log-probabilities over the vocabulary, nats, and each row's prompt in the batch."""


@dataclass(frozen=True)
class ReadAmong:
    """Read the log-probabilities of some tokens among themselves, which sum to 1.

    Rows of one token then need no logits of the rest of the vocabulary, a large part of their cost.
    """

    tokens: Int[Tensor, " n"]

    def __call__(
        self, log_probs: Float[Tensor, "*rest d_vocab"], prompt: Int[Tensor, " row"]
    ) -> Float[Tensor, "*rest n"]:
        return log_probs_of(log_probs[..., self.tokens.to(log_probs.device)])


Pair = tuple[int, int]
"""A set and a prompt."""


def score_restarted(
    view: ModelView,
    batch: PromptBatch,
    sets: Sequence[Sequence[EditAtLayers]],
    read: Read,
    *,
    pass_tokens: int,
    advance: Callable[[int], None],
) -> Float[Tensor, "batch set *n"]:
    """Return what `read` reads after each prompt under each set of edits of z or sites.

    If hooks are active on the model, each set has a pass over the full batch, as the hooks expect.
    `advance` is called with the number of scores that each pass adds.
    """
    start_layers = [_first_layer(edits, view.n_layers) for edits in sets]
    layers = set(start_layers) - {view.n_layers}
    bytes_per_layer = batch.tokens.shape[1] * view.d_model * view.model.W_U.element_size()
    bytes_per_prompt = max(1, len(layers)) * bytes_per_layer
    fitting = STREAM_BYTES // bytes_per_prompt, rows_at_once(view, batch.tokens.shape[1])
    size = len(batch) if view.has_hooks else max(1, min(fitting))
    pieces = []
    for start in range(0, len(batch), size):
        prompts = torch.arange(start, min(start + size, len(batch)))
        batch_piece = batch[prompts.tolist()]
        inputs = BlockInputs(view)
        with model_lock(view.model), inputs.recorded(layers, Tensor.clone):  # in one pass
            clean = read(last_log_probs(view.model, batch_piece), prompts)
        piece = clean[:, None].repeat(1, len(sets), *[1] * (clean.ndim - 1))
        for pairs in _passes(view, start_layers, batch_piece, pass_tokens):
            numbers, rows = map(list, zip(*pairs, strict=True))
            first = min(start_layers[number] for number in numbers)
            run = batch_piece[rows]
            hooks = list(_hooks(view, sets, torch.tensor(numbers), prompts[rows], run.last))
            resid = inputs.resid[first][rows, : run.tokens.shape[1]]
            with (
                model_lock(view.model),
                inputs.resumed_at(first, resid),
                view.model.hooks(fwd_hooks=hooks),
            ):
                log_probs = last_log_probs(view.model, run)
            piece[rows, numbers] = read(log_probs, prompts[rows])
            advance(len(rows))
        pieces.append(piece)
    return torch.cat(pieces)


def _first_layer(edits: Sequence[EditAtLayers], n_layers: int) -> int:
    """Return the first layer that a set of edits changes; `n_layers` for a set without edits."""
    return min([min(placed.heads, default=n_layers) for placed in edits], default=n_layers)


@dataclass
class BlockInputs:
    """Inputs of some blocks in a pass over some prompts, from which later passes resume."""

    view: ModelView
    resid: dict[int, Float[Tensor, "batch *pos d_model"]] = field(default_factory=dict)
    """Layer -> what `recorded` kept of its input."""
    n_returned: int | None = None
    """Length of the tuple that each block returns; None for a single tensor."""

    @contextmanager
    def recorded(self, layers: Iterable[int], keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Record what `keep` returns for the inputs of `layers`, in passes in the context."""

        def recorder(layer: int) -> Any:
            def hook_fn(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                self.resid[layer] = keep(_stream(args, kwargs).detach())

            return hook_fn

        def count(module: Any, args: Any, output: Any) -> None:
            self.n_returned = len(output) if isinstance(output, tuple) else None

        blocks = self.view.model.blocks
        with ExitStack() as stack:
            stack.callback(blocks[0].register_forward_hook(count).remove)
            for layer in layers:
                hook_fn = recorder(layer)
                handle = blocks[layer].register_forward_pre_hook(hook_fn, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def resumed_at(self, layer: int, resid: Float[Tensor, "row pos d_model"]) -> Iterator[None]:
        """Start passes in the context at the block of a layer, with `resid` as its input."""
        blocks, n_returned = self.view.model.blocks, self.n_returned

        def identity(*args: Any, **kwargs: Any) -> Any:
            x = _stream(args, kwargs)
            return x if n_returned is None else (x, *[None] * (n_returned - 1))

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return replace_residual(args, kwargs, lambda x: resid.to(x.device))

        with replace_forwards([(blocks[skipped], identity) for skipped in range(layer)]):
            handle = blocks[layer].register_forward_pre_hook(enter, with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()


def replace_residual(
    args: Any, kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with the residual stream replaced by `change` of it."""
    x = change(_stream(args, kwargs))
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": x}
    return (x, *args[1:]), kwargs


def _stream(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the residual stream among a block's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _passes(
    view: ModelView, start_layers: list[int], batch: PromptBatch, pass_tokens: int
) -> Iterator[list[Pair]]:
    """Yield the (set, prompt) pairs of each pass by the set's first layer; skip empty sets."""
    n, width = batch.tokens.shape
    sets = [number for number, layer in enumerate(start_layers) if layer < view.n_layers]
    if view.has_hooks:
        for number in sets:
            yield [(number, row) for row in range(n)]
        return
    max_rows = min(pass_tokens // width, rows_at_once(view, width, RESTART_BYTES))
    group: list[Pair] = []
    for number in sorted(sets, key=start_layers.__getitem__):
        for row in range(n):
            is_full = len(group) >= max_rows
            if row == 0 and group and start_layers[number] != start_layers[group[0][0]]:
                is_full |= len(group) * width >= MIN_PASS_TOKENS
            if group and is_full:
                yield group
                group = []
            group.append((number, row))
    if group:
        yield group


def _hooks(
    view: ModelView,
    sets: Sequence[Sequence[EditAtLayers]],
    number: Int[Tensor, " row"],
    prompt: Int[Tensor, " row"],
    last: Int[Tensor, " row"],
) -> Iterator[tuple[str, Any]]:
    """Yield hooks that edit z and sites in each row as the set of its number says."""
    distinct, number = number.unique(return_inverse=True)
    distinct_sets = [sets[number_of_set] for number_of_set in distinct.tolist()]
    layers: set[int] = set()
    for edits in distinct_sets:
        for placed in edits:
            layers |= placed.heads.keys()

    def places(members: Any, x: Tensor) -> Places:
        return Places.of(members, number.to(x.device), prompt.to(x.device), last.to(x.device))

    def write_z(layer: int, z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        for edit, members in writes_at(distinct_sets, layer, Z_STAGES):
            edit.write_z(z, places(members, z), layer)
        return z

    def write_site(layer: int, site: Stage, x: Tensor) -> Tensor:
        for edit, members in writes_at(distinct_sets, layer, (site,)):
            edit.write_site(x, places(members, x), layer)
        return x

    for layer in sorted(layers):
        stages: set[Stage] = set()
        for edits in distinct_sets:
            stages |= {stage for stage, _, _ in edits_at(edits, layer, (*Z_STAGES, *SITE_STAGES))}
        if stages & {*Z_STAGES}:
            yield view.hook(layer, "attn.hook_z"), partial(write_z, layer)
        writer = SiteWriter(partial(write_site, layer), stages.__contains__)
        yield from writer.hooks(view, layer, stages)
