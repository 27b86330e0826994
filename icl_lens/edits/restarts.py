"""Score sets of edits of z, or at sites, by re-running prompts only from the first edited layer.

1. One unedited pass over the prompts stores the residual stream at the input of every layer in
   which a set starts.
2. Every pair of a prompt and a set makes one row; rows of sets that start at about the same layer
   and token share a pass.
3. Each pass resumes from the stored stream at the first of these layers and tokens, and each row has
   the edits of its set. Keys and values of earlier tokens, which do not change, are those of the
   unedited pass.
4. Such a pass has an unedited row, which must give the model's own log-probability; otherwise, all
   tokens are run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import (
    SITE_STAGES,
    Z_STAGES,
    EditAtLayers,
    Places,
    Stage,
    edits_at,
    writes_at,
)
from icl_lens.edits.edit_checks import unedited_tolerance
from icl_lens.edits.hugging_face_cache import (
    CACHE_ERRORS,
    gathered_cache,
    holds_all_layers,
    new_cache,
    reraise_if_out_of_memory,
)
from icl_lens.edits.read import Read
from icl_lens.edits.site_hooks import SiteWriter
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.passes.locking import model_lock
from icl_lens.models.passes.memory import (
    KEY_BYTES,
    LOGIT_BYTES,
    MIN_PASS_TOKENS,
    RESTART_BYTES,
    STREAM_BYTES,
)
from icl_lens.models.sizes import key_bytes, pass_bytes, rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.reading.layer_inputs import LayerInputs

Pair = tuple[int, int]
"""A set and a prompt."""
MIN_SKIPPED = 0.25
"""A pass skips the tokens before a prompt's first changed one if they are at least this share of
the prompt.
"""
MAX_UNCHANGED = 64
"""The most unchanged tokens, in all rows together, that a pass runs before its rows' first changed
ones; or a quarter of its tokens, if that is more.
"""


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
    firsts = _first_changes(view, batch, sets)
    n_layers = max(1, len(set(start_layers) - {view.n_layers}))
    width = batch.tokens.shape[1]
    bytes_per_prompt = n_layers * width * view.d_model * view.model.W_U.element_size()
    limits = [STREAM_BYTES // bytes_per_prompt, rows_at_once(view, width)]
    if bool(firsts.any()):
        limits.append(KEY_BYTES // key_bytes(view, width))
    size = len(batch) if view.has_hooks else max(1, min(limits))
    pieces = []
    for prompts in torch.arange(len(batch)).split(size):
        piece = PromptPiece(view, batch[prompts.tolist()], prompts, sets, start_layers, read)
        try:
            scores = piece.scores(firsts[:, prompts], pass_tokens, advance)
        except (LaterStartUnsupported, *CACHE_ERRORS) as error:
            reraise_if_out_of_memory(error)
            if not bool(firsts.any()):
                raise
            firsts = torch.zeros_like(firsts)
            scores = piece.scores(firsts[:, prompts], pass_tokens, advance)
        pieces.append(scores)
    return torch.cat(pieces)


class LaterStartUnsupported(Exception):
    """Raised if a pass that begins after a prompt's first token is not the model's own."""


@dataclass(frozen=True, eq=False)
class PromptPiece:
    """Some prompts that are scored together."""

    view: ModelView
    batch: PromptBatch
    prompts: Int[Tensor, " prompt"]
    """Index of each prompt in the whole batch."""
    sets: Sequence[Sequence[EditAtLayers]]
    start_layers: Sequence[int]
    """The first layer that each set changes."""
    read: Read

    def scores(
        self,
        firsts: Int[Tensor, "set prompt"],
        pass_tokens: int,
        advance: Callable[[int], None],
    ) -> Float[Tensor, "prompt set *n"]:
        """Return what is read under each set; `firsts` are the first tokens that need be run.

        Raise LaterStartUnsupported if the model does not run tokens after others that it has run.
        """
        view, batch = self.view, self.batch
        inputs = LayerInputs(view)
        layers = set(self.start_layers) - {view.n_layers}
        past = new_cache(view) if bool(firsts.any()) else None
        with model_lock(view.model), inputs.recorded(layers, Tensor.clone):  # in one pass
            log_probs = last_log_probs(view.model, batch, past=past)
        if bool(firsts.any()) and not holds_all_layers(past, view.n_layers, batch):
            raise LaterStartUnsupported
        top = log_probs.max(-1)
        clean = self.read(log_probs, self.prompts)
        scores = clean[:, None].repeat(1, len(self.sets), *[1] * (clean.ndim - 1))
        is_unchanged = firsts > batch.last.cpu()
        advance(int(is_unchanged.sum()))
        for first, pairs in planned_passes(view, self.start_layers, batch, firsts, pass_tokens):
            numbers, rows = map(list, zip(*pairs, strict=True))
            if first:  # an unedited row of the longest prompt
                numbers.append(len(self.sets))
                rows.append(max(rows, key=batch.last.tolist().__getitem__))
            log_probs = self._run(inputs, past, first, numbers, rows)
            if first:
                log_prob = log_probs[-1, top.indices[rows[-1]]]
                _check_unedited_row(view, log_prob - top.values[rows[-1]])
                log_probs, numbers, rows = log_probs[:-1], numbers[:-1], rows[:-1]
            scores[rows, numbers] = self.read(log_probs, self.prompts[rows])
            advance(len(rows))
        return scores

    def _run(
        self, inputs: LayerInputs, past: Any, first: int, numbers: list[int], rows: list[int]
    ) -> Float[Tensor, "row d_vocab"]:
        """Return log-probabilities of prompts, by row, with the edits of sets, by number; the number
        of sets is that of an unedited row.
        """
        view, run = self.view, self.batch[rows]
        layer = min(self.start_layers[number] for number in numbers if number < len(self.sets))
        sets = [*self.sets, ()]
        prompts = self.prompts[rows]
        hooks = list(_hooks(view, sets, torch.tensor(numbers), prompts, run.last - first, first))
        resid = inputs.resid[layer][rows, first : run.tokens.shape[1]]
        prefix = _prefix(view, past, rows, first) if first else None
        with (
            model_lock(view.model),
            inputs.resumed_at(layer, resid),
            view.model.hooks(fwd_hooks=hooks),
        ):
            return last_log_probs(view.model, run, past=prefix, first=first)


def _first_changes(
    view: ModelView, batch: PromptBatch, sets: Sequence[Sequence[EditAtLayers]]
) -> Int[Tensor, "set prompt"]:
    """Return the first position of each prompt that a set changes: 0 where passes need all tokens,
    the one after the last if nothing changes.
    """
    firsts = torch.zeros(len(sets), len(batch), dtype=torch.long)
    if view.has_hooks or not reads_only_earlier_tokens(view.model):
        return firsts
    for number, edits in enumerate(sets):
        if edits:
            changes = [edit_at.edit.first_changes(batch).cpu() for edit_at in edits]
            firsts[number] = torch.stack(changes).amin(0)
    n_tokens = batch.last.cpu() + 1
    return torch.where(firsts < MIN_SKIPPED * n_tokens, 0, firsts)


def _prefix(view: ModelView, past: Any, rows: Sequence[int], first: int) -> Any:
    """Return a cache of the first tokens of prompts, by row."""
    source = torch.tensor([(0, row) for row in rows])
    positions = torch.arange(first).expand(len(rows), first)
    return gathered_cache([past], view.n_layers, source, positions)


def _check_unedited_row(view: ModelView, deviation: Float[Tensor, ""]) -> None:
    """Raise LaterStartUnsupported unless an unedited row gives the model's log-probability."""
    if not float(deviation.abs()) <= unedited_tolerance(view):
        raise LaterStartUnsupported


def _first_layer(edits: Sequence[EditAtLayers], n_layers: int) -> int:
    """Return the first layer that a set of edits changes; `n_layers` for a set without edits."""
    return min([min(edit_at.heads, default=n_layers) for edit_at in edits], default=n_layers)


def _hooks(
    view: ModelView,
    sets: Sequence[Sequence[EditAtLayers]],
    number: Int[Tensor, " row"],
    prompt: Int[Tensor, " row"],
    last: Int[Tensor, " row"],
    first: int,
) -> Iterator[tuple[str, Any]]:
    """Yield hooks that edit z and sites in each row as the set of its number says.

    Rows begin at the token `first` of their prompts, and `last` are indices of those that are run.
    """
    distinct, number = number.unique(return_inverse=True)
    distinct_sets = [sets[number_of_set] for number_of_set in distinct.tolist()]
    layers: set[int] = set()
    for edits in distinct_sets:
        for edit_at in edits:
            layers |= edit_at.heads.keys()

    def places(members: Any, x: Tensor) -> Places:
        device = x.device
        return Places.of(members, number.to(device), prompt.to(device), last.to(device), first)

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
        if stages & {*SITE_STAGES}:
            writer = SiteWriter(partial(write_site, layer), stages.__contains__)
            yield from writer.hooks(view, layer, stages)


def planned_passes(
    view: ModelView,
    start_layers: Sequence[int],
    batch: PromptBatch,
    firsts: Int[Tensor, "set prompt"],
    pass_tokens: int,
) -> Iterator[tuple[int, list[Pair]]]:
    """Yield, for each pass to run, the position at which it begins, and its (set, prompt) pairs.

    Pairs are sorted by the first layer and the first position that change, and share a pass while
    there is room, of at most `pass_tokens` tokens. Sets without edits, and pairs of which no token
    changes, have no pass. Under hooks, each set has a pass over all tokens of all prompts.
    """
    set_numbers = [number for number, layer in enumerate(start_layers) if layer < view.n_layers]
    if view.has_hooks:
        for number in set_numbers:
            yield 0, [(number, row) for row in range(len(batch))]
        return
    last, firsts_of_sets = batch.last.tolist(), firsts.tolist()
    starts: list[tuple[int, int, Pair]] = []
    for number in set_numbers:
        for row, first in enumerate(firsts_of_sets[number]):
            if first <= last[row]:
                starts.append((start_layers[number], first, (number, row)))
    group = PassRows(view, pass_tokens)
    for layer, first, (number, row) in sorted(starts, key=lambda start: start[:2]):
        if not group.has_room(layer, first, last[row] + 1):
            yield group.first, group.pairs
            group = PassRows(view, pass_tokens)
        group.add(layer, first, last[row] + 1, (number, row))
    if group.pairs:
        yield group.first, group.pairs


@dataclass
class PassRows:
    """Rows of one pass, to which others are added while there is room."""

    view: ModelView
    pass_tokens: int
    """The most tokens that the pass may run."""
    pairs: list[Pair] = field(default_factory=list)
    layer: int = 0
    """The first layer of the first row."""
    first: int = 0
    """The first token that is run."""
    end: int = 0
    """One more than the last token that is run."""
    sum_of_firsts: int = 0

    def add(self, layer: int, first: int, end: int, pair: Pair) -> None:
        """Add a row that starts at a layer and a token and ends before another."""
        if not self.pairs:
            self.layer, self.first = layer, first
        self.first, self.end = min(self.first, first), max(self.end, end)
        self.sum_of_firsts += first
        self.pairs.append(pair)

    def has_room(self, layer: int, first: int, end: int) -> bool:
        """Return whether the pass is small enough with a row that is added."""
        if not self.pairs:
            return True
        n_tokens = len(self.pairs) * (self.end - self.first)
        if layer != self.layer and n_tokens >= MIN_PASS_TOKENS:
            return False
        n_rows = len(self.pairs) + 1
        sum_of_firsts = self.sum_of_firsts + first
        first, end = min(self.first, first), max(self.end, end)
        n_tokens = n_rows * (end - first)
        n_unchanged = sum_of_firsts - n_rows * first
        return (
            n_tokens <= self.pass_tokens
            and n_rows * pass_bytes(self.view, end - first, end) <= RESTART_BYTES
            and n_rows * 4 * self.view.model.W_U.shape[1] <= LOGIT_BYTES
            and n_unchanged <= max(MAX_UNCHANGED, n_tokens // 4)
        )
