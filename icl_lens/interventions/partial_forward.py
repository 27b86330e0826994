"""Ablate head sets by re-running only from the first ablated layer.

1. One unedited pass over the prompts stores the residual stream at the input of every layer in which a set starts.
2. Every prompt and set makes one row; rows of sets that start at about the same layer share a pass.
3. Each pass resumes from the stored stream at the first of these layers, and the heads of each row's set are ablated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.interventions.editor import Positions
from icl_lens.interventions.layer_ranges import Returns, record_arity, run_layers
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Read = Callable[[Float[Tensor, "row d_vocab"], list[int]], Float[Tensor, "row n"]]
"""Function that reduces log-probabilities, given them and the prompt index of each row."""
Replacement = Mapping[int, Float[Tensor, "head d_head"]] | None
"""Layer -> replacement of each head's z; None for zero."""
Pair = tuple[int, int]
"""A set and a prompt."""

# Tokens above which larger passes are hardly faster: sets that start at another layer then get a separate pass.
MIN_PASS_TOKENS = 512
# Memory for stored residual streams.
STREAM_BYTES = 256 * 2**20


def map_ablated_sets(
    view: ModelView,
    batch: PromptBatch,
    removed: Bool[Tensor, "set layer head"],
    read: Read,
    replacement: Replacement = None,
    *,
    positions: Positions = "all",
    pass_tokens: int,
) -> Float[Tensor, "batch set n"]:
    """Return `read` of the log-probabilities after each prompt when each head set is ablated at `positions`."""
    start_layers = [int(one.any(-1).nonzero()[0]) if bool(one.any()) else view.n_layers for one in removed]
    each = len(set(start_layers)) * batch.tokens.shape[1] * view.d_model * view.model.W_U.element_size()
    size = max(1, STREAM_BYTES // each)
    found = []
    for start in range(0, len(batch), size):
        rows = list(range(start, min(start + size, len(batch))))
        streams = ResidualCache.of(view, batch[rows], {layer for layer in start_layers if layer < view.n_layers})
        found.append(_read(streams, rows, removed, start_layers, read, replacement, positions, pass_tokens))
    return torch.cat(found)


def _read(
    streams: "ResidualCache",
    rows: list[int],
    removed: Bool[Tensor, "set layer head"],
    start_layers: list[int],
    read: Read,
    replacement: Replacement,
    positions: Positions,
    pass_tokens: int,
) -> Float[Tensor, "row set n"]:
    """Like `map_ablated_sets`, for the prompts of `streams`, which are `rows` of the full batch."""
    view, batch = streams.view, streams.batch
    position_free = read(streams.log_probs, rows)
    found = position_free[:, None].repeat(1, len(removed), 1)
    for pairs in _passes(start_layers, len(batch), batch.tokens.shape[1], view.n_layers, pass_tokens):
        sets, prompts = [one for one, _ in pairs], [row for _, row in pairs]
        first = min(start_layers[one] for one in sets)
        some = batch[prompts]
        hooks = list(
            _ablation_hooks(view, removed[sets], first, replacement, some.last if positions == "last" else None)
        )
        with view.exclusive_pass(), streams.resume_at(first, prompts), view.model.hooks(fwd_hooks=hooks):
            log_probs = last_log_probs(view.model, some)
        found[prompts, sets] = read(log_probs, [rows[row] for row in prompts])
    return found


@dataclass(frozen=True)
class ResidualCache:
    """Inputs of some layers in a pass over some prompts, from which later passes can resume."""

    view: ModelView
    batch: PromptBatch
    stream: dict[int, Float[Tensor, "batch pos d_model"]]
    log_probs: Float[Tensor, "batch d_vocab"]
    """After each prompt, nats."""
    block_returns: Returns

    @classmethod
    def of(cls, view: ModelView, batch: PromptBatch, layers: Iterable[int]) -> "ResidualCache":
        """Run one pass over the batch and store the inputs of `layers`."""
        stream: dict[int, Tensor] = {}
        returns: Returns = []

        def keep(layer: int) -> Any:
            return lambda value, hook: stream.__setitem__(layer, value.detach().clone())

        hooks = [(view.hook(layer, "hook_resid_pre"), keep(layer)) for layer in layers]
        with (
            view.exclusive_pass(),
            record_arity(view, range(view.n_layers), returns),
            view.model.hooks(fwd_hooks=hooks),
        ):
            log_probs = last_log_probs(view.model, batch)
        return cls(view, batch, stream, log_probs, returns)

    @contextmanager
    def resume_at(self, layer: int, rows: Sequence[int] | None = None) -> Iterator[None]:
        """Start passes in the block at this stored layer; they must be over `batch`, or over these rows of it."""
        x = self.stream[layer]
        # A copy in both cases, because blocks of some families add to it in place.
        x = x.clone() if rows is None else x[rows, : self.batch[rows].tokens.shape[1]]
        with run_layers(self.view, range(layer, self.view.n_layers), self.block_returns, resid_in=x):
            yield


def _passes(start_layers: list[int], n: int, width: int, n_layers: int, pass_tokens: int) -> Iterator[list[Pair]]:
    """Yield the rows of each pass: sets ordered by their first layer, without empty sets."""
    group: list[Pair] = []
    layer = 0
    for one in sorted(
        (place for place, begin in enumerate(start_layers) if begin < n_layers), key=lambda place: start_layers[place]
    ):
        if group and start_layers[one] != layer and len(group) * width >= MIN_PASS_TOKENS:
            yield group
            group = []
        layer = start_layers[one] if not group else layer
        for row in range(n):
            if group and (len(group) + 1) * width > pass_tokens:
                yield group
                group, layer = [], start_layers[one]
            group.append((one, row))
    if group:
        yield group


def _ablation_hooks(
    view: ModelView,
    removed: Bool[Tensor, "row layer head"],
    first: int,
    replacement: Replacement,
    last: Int[Tensor, " row"] | None,
) -> Iterator[tuple[str, Any]]:
    """Yield hooks that ablate the heads of each row's set, at all positions or at `last`."""

    def remove(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            rows, heads = (place.to(z.device) for place in removed[:, layer].nonzero(as_tuple=True))
            z = z.clone()
            new = z.new_zeros(()) if replacement is None else replacement[layer].to(z)[heads]
            if last is None:
                z[rows, :, heads] = new if replacement is None else new[:, None]
            else:
                z[rows, last.to(z.device)[rows], heads] = new
            return z

        return hook_fn

    for layer in range(first, view.n_layers):
        if bool(removed[:, layer].any()):
            yield view.hook(layer, "attn.hook_z"), remove(layer)
