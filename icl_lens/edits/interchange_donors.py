"""Run donor prompts and record their last queries, and their keys and values at labels.

Donors that begin like other prompts run only from the first token that differs. Queries and keys
are recorded before rotation, label by label, so that donors may differ in length from the prompts
that take from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import Part
from icl_lens.edits.edit_checks import PATTERN_TOLERANCE
from icl_lens.edits.hugging_face_cache import (
    CACHE_ERRORS,
    gathered_cache,
    holds_all_layers,
    new_cache,
    reraise_if_out_of_memory,
)
from icl_lens.edits.interchange import DonorRecording, LayerTensors
from icl_lens.edits.one_token_rows.layer_attention import per_kv_head
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.edits.recomputed_patterns import LayerValues, recording_hooks
from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.freed_memory import make_room
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.passes.inference import log_probs_of
from icl_lens.models.passes.memory import PASS_BYTES, PASS_TOKENS
from icl_lens.models.sizes import pass_bytes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import check_finite

# Padding tokens in a pass over donors; another pass costs about as much.
MAX_PADDING = 64


@dataclass(frozen=True, eq=False)
class Donor:
    """Prompts that give queries, keys or values to other prompts, and where their labels are."""

    batch: PromptBatch
    rows: Int[Tensor, "prompt token"]
    """For each token of a prompt's labels, the row of `batch` that gives its key and value.

    -1 is for tokens that keep their own.
    """
    positions: Int[Tensor, "prompt token"]
    """The position in that row at which the donor's key and value are."""
    has_queries: bool = True
    """Whether row i of `batch` is a whole prompt for prompt i; otherwise, rows end at labels."""

    def select(self, prompts: Sequence[int]) -> "Donor":
        """Return the donor of some of the prompts."""
        index = list(prompts)
        rows, positions = self.rows[index], self.positions[index]
        used = torch.tensor(index) if self.has_queries else rows[rows >= 0].unique()
        new_number = torch.full((len(self.batch),), -1)
        new_number[used] = torch.arange(len(used))
        rows = torch.where(rows >= 0, new_number[rows.clamp(min=0)], -1)
        return Donor(self.batch[used.tolist()], rows, positions, self.has_queries)


class Pasts(NamedTuple):
    """A cache of what rows of a pass begin with, and how many of its tokens belong to each row."""

    cache: Any
    lengths: list[int]


@dataclass(eq=False)
class Prefixes:
    """Prompts that donors begin with, and Hugging Face's caches of their keys and values.

    A donor row then runs only from the first token in which it differs. Rows of one pass may begin
    with different numbers of tokens, like left-padded prompts. Caches are used only for models for
    which they give the same activations as a plain pass, which is tested on one row of the first
    pass whose rows differ.
    """

    view: ModelView
    ids: list[list[int]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    cache_and_row: list[tuple[int, int]] = field(default_factory=list)
    """For each prompt, the index of its cache, and its row there."""
    is_tested: bool = False
    is_usable: bool = True
    prefix_cache: PrefixCache | None = None
    """The first prompts with what rows of one token need; None if it cannot be used."""

    @classmethod
    def empty(cls, view: ModelView) -> "Prefixes":
        """Return no prompts; `record` adds the donors that it keeps."""
        is_usable = not view.has_hooks and reads_only_earlier_tokens(view.model)
        return cls(view, is_usable=is_usable and new_cache(view) is not None)

    @classmethod
    def of(cls, view: ModelView, batch: PromptBatch) -> "Prefixes":
        """Run prompts and keep their keys and values, for donors and for single-token rows."""
        prefixes, cache = cls(view), new_cache(view)
        prefix_cache = None
        if cache is not None:
            try:
                prefix_cache = PrefixCache.of(view, batch, tokens=batch.label_tokens, past=cache)
                prefixes.add(batch, cache)
            except (PrefixCacheUnsupported, InputError, *CACHE_ERRORS) as error:
                reraise_if_out_of_memory(error)
        prefixes.is_usable &= prefix_cache is not None
        return replace(prefixes, prefix_cache=prefix_cache if prefixes.is_usable else None)

    def add(self, batch: PromptBatch, cache: Any) -> None:
        """Add prompts with a cache that their pass has filled."""
        self.is_usable &= holds_all_layers(cache, self.view.n_layers, batch)
        self.cache_and_row += [(len(self.caches), row) for row in range(len(batch))]
        for tokens, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True):
            self.ids.append(tokens[: last + 1])
        self.caches.append(cache)

    def longest(self, ids: Sequence[int], limit: int) -> tuple[int, int]:
        """Return the prompt that shares most first tokens with `ids`, and how many of `limit`."""
        n_shared = [_n_shared(prompt, ids) for prompt in self.ids]
        best = max(range(len(n_shared)), key=n_shared.__getitem__)
        return best, min(n_shared[best], limit)

    def pasts(self, starts: Sequence[tuple[int, int]]) -> Pasts | None:
        """Return a cache of the first tokens of some prompts; None for no tokens.

        `starts` has the prompt and the number of tokens of each row. Rows with fewer tokens begin
        with padding, so that all end where the pass begins.
        """
        width = max(length for _, length in starts)
        if not width:
            return None
        lengths = torch.tensor([length for _, length in starts])
        source = torch.tensor([self.cache_and_row[prompt] for prompt, _ in starts])
        positions = (torch.arange(width) - (width - lengths)[:, None]).clamp(min=0)
        return Pasts(
            gathered_cache(self.caches, self.view.n_layers, source, positions), lengths.tolist()
        )


def _n_shared(prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Return the number of first tokens that two prompts share."""
    n_shared = 0
    for ours, theirs in zip(prompt, ids, strict=False):
        if ours != theirs:
            break
        n_shared += 1
    return n_shared


Recording = dict[tuple[str, int], Tensor]
"""(part, layer) -> what is recorded of rows; ("labels", -1) -> the labels' log-probabilities."""


def record(
    view: ModelView,
    donor: Donor,
    layers: Sequence[int],
    parts: Sequence[Part],
    prefixes: Prefixes | None = None,
    *,
    keep: bool = False,
) -> DonorRecording:
    """Run donor prompts and record queries, keys or values of all heads of some layers.

    With `keep`, whole donors run, and `prefixes` gets their keys and values. A pass has as many
    rows as fit in `PASS_BYTES`, with the keys and values that they begin with. Raise InputError for
    families without the hooks of queries, keys and values.
    """
    batch = donor.batch
    at, slots = _positions_by_row(donor)
    starts = [(0, 0)] * len(batch)
    if prefixes is not None and prefixes.is_usable and prefixes.ids and not keep:
        starts = _longest_starts(prefixes, batch, at if set(parts) & {"k", "v"} else None)
    run = partial(_record_rows, view, batch, at, donor.has_queries, layers, parts)
    order: list[int] = []
    recordings: list[Recording] = []
    for rows in _passes(view, (batch.last + 1).tolist(), [length for _, length in starts]):
        recording = _record_pass(run, rows, batch, starts, prefixes, keep=keep)
        if recording is None:
            assert prefixes is not None
            prefixes.is_usable = False
            return record(view, donor, layers, parts)
        order += rows
        recordings.append(recording)
    by_row = _joined(recordings, order)
    row_of_token = donor.rows.clamp(min=0)
    by_part: dict[str, LayerTensors] = {}
    for part in parts:
        by_part[part] = {}
        for layer in layers:
            vectors = by_row[part, layer]
            by_part[part][layer] = vectors if part == "q" else vectors[row_of_token, slots]
    return DonorRecording(donor.rows < 0, **by_part, log_probs=by_row.get(("labels", -1)))


def _longest_starts(
    prefixes: Prefixes, batch: PromptBatch, at: Int[Tensor, "row slot"] | None
) -> list[tuple[int, int]]:
    """Return the prompt that each row begins like, and how many tokens of it the row need not run.

    The last token is run in any case, and so are the positions `at` and all tokens after them.
    """
    starts = []
    for row, (ids, last) in enumerate(zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)):
        limit = last if at is None else min(last, int(at[row].min()))
        starts.append(prefixes.longest(ids[: last + 1], limit))
    return starts


def _record_pass(
    run: Callable[..., Recording],
    rows: list[int],
    batch: PromptBatch,
    starts: Sequence[tuple[int, int]],
    prefixes: Prefixes | None,
    *,
    keep: bool,
) -> Recording | None:
    """Record the rows of one pass; None if the model does not take the cache they begin with."""
    if prefixes is None or not prefixes.is_usable:
        return run(rows)
    if keep:
        cache = new_cache(prefixes.view)
        try:
            recording = run(rows, Pasts(cache, [0] * len(rows)))
        except CACHE_ERRORS as error:
            reraise_if_out_of_memory(error)
            return None
        prefixes.add(batch[rows], cache)
        return recording
    return _recording_or_none(run, rows, prefixes, prefixes.pasts([starts[row] for row in rows]))


def _joined(recordings: Sequence[Recording], order: Sequence[int]) -> Recording:
    """Return recordings of several passes as one, whose rows were recorded in this order."""
    in_order = torch.tensor(order).argsort()
    joined = {}
    for key in recordings[0]:
        joined[key] = torch.cat([recording[key] for recording in recordings])[in_order]
    return joined


def _passes(view: ModelView, lengths: Sequence[int], starts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the rows of each pass, which have similar lengths from their starts on.

    A pass has at most `MAX_PADDING` tokens of padding, `PASS_TOKENS` tokens and `PASS_BYTES` of
    temporary tensors.
    """
    n_run = [length - start for length, start in zip(lengths, starts, strict=True)]
    rows: list[int] = []
    n_padding = n_keys = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-n_run[row], -lengths[row])):
        longest = n_run[rows[0]] if rows else n_run[row]
        n_padding += longest - n_run[row]
        n_keys = max(n_keys, longest + starts[row])
        n_rows = len(rows) + 1
        is_full = n_padding > MAX_PADDING or n_rows * longest > PASS_TOKENS
        is_full |= n_rows * pass_bytes(view, longest, n_keys) > PASS_BYTES
        if rows and is_full:
            yield rows
            rows, n_padding, n_keys = [], 0, lengths[row]
        rows.append(row)
    if rows:
        yield rows


def _positions_by_row(donor: Donor) -> tuple[Int[Tensor, "row slot"], Int[Tensor, "prompt token"]]:
    """Return the positions to record in each row of a donor, and each token's slot among them."""
    positions: list[list[int]] = [[] for _ in range(len(donor.batch))]
    slots = torch.zeros_like(donor.rows)
    for prompt, token in (donor.rows >= 0).nonzero().tolist():
        of_row = positions[int(donor.rows[prompt, token])]
        slots[prompt, token] = len(of_row)
        of_row.append(int(donor.positions[prompt, token]))
    width = max(1, *map(len, positions))
    for of_row, last in zip(positions, donor.batch.last.tolist(), strict=True):
        of_row += [last] * (width - len(of_row))
    return torch.tensor(positions), slots


def _record_rows(
    view: ModelView,
    batch: PromptBatch,
    at: Int[Tensor, "row slot"],
    has_queries: bool,
    layers: Sequence[int],
    parts: Sequence[Part],
    rows: list[int],
    pasts: Pasts | None = None,
) -> Recording:
    """Run some rows of a batch, or only their tokens after `pasts`, and record them."""
    batch, at = batch[rows], at[rows]
    values = {layer: LayerValues(view, layer) for layer in layers}
    recording: Recording = {}
    starts = (
        torch.zeros(len(batch), dtype=torch.long) if pasts is None else torch.tensor(pasts.lengths)
    )
    last = batch.last.cpu() - starts
    index = torch.arange(len(batch))

    def keep(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> None:
            for part in parts:
                x = values[layer].seen[part]
                if part == "q":
                    recording[part, layer] = x[index, last].clone()
                else:
                    x = per_kv_head(x, view.n_kv_heads)
                    recording[part, layer] = x[index[:, None], at - starts[:, None]].clone()
            values[layer].seen.clear()

        return hook_fn

    hooks: list[tuple[str, Any]] = []
    for layer, layer_values in values.items():
        hooks += recording_hooks(layer_values, *parts)
        hooks.append((view.hook(layer, "attn.hook_z"), keep(layer)))
    tokens, mask = _after(batch, starts)
    past = None if pasts is None else pasts.cache
    logits = _run(view, tokens, mask, hooks, past, last if has_queries else None)
    if has_queries:
        check_finite(logits)
        log_probs = log_probs_of(logits)
        recording["labels", -1] = log_probs[:, batch.label_tokens.to(log_probs.device)]
    return recording


def _after(
    batch: PromptBatch, starts: Int[Tensor, " row"]
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row key"]]:
    """Return the tokens from `starts` on, and the mask of these and all tokens before them.

    The first max(starts) keys of the mask are those of the cache; a row has the last of them.
    Positions follow from the mask, as for left-padded prompts.
    """
    lengths, starts = batch.last + 1, starts.to(batch.tokens.device)
    n_before = int(starts.max())
    positions = starts[:, None] + torch.arange(int((lengths - starts).max()), device=starts.device)
    is_own = positions < lengths[:, None]
    positions = positions.clamp(max=batch.tokens.shape[1] - 1)
    before = torch.arange(n_before, device=starts.device) >= n_before - starts[:, None]
    mask = torch.cat([before, is_own], dim=1).to(batch.attention_mask.dtype)
    return batch.tokens.gather(1, positions), mask


def _run(
    view: ModelView,
    tokens: Int[Tensor, "row pos"],
    mask: Int[Tensor, "row key"],
    hooks: Sequence[tuple[str, Any]],
    past: Any = None,
    last: Int[Tensor, " row"] | None = None,
) -> Float[Tensor, "row d_vocab"]:
    """Run tokens without edits, after those of the cache `past` if given, and add them to it.

    Return logits at `last`; without it, logits that mean nothing.
    """

    def select(x: Tensor, hook: Any) -> Tensor:
        return x[:, :1] if last is None else x[torch.arange(len(x)), last, None]

    n_rows, n_tokens = tokens.shape
    room = make_room(view, n_rows, n_tokens, mask.shape[1])
    with (
        torch.no_grad(),
        view.inference_pass() as kwargs,
        edits_disabled(view),
        view.model.hooks(fwd_hooks=[*room, *hooks, (view.last_logits_hook, select)]),
    ):
        cached = {} if past is None else {"use_cache": True, "past_key_values": past}
        return view.model(tokens, attention_mask=mask, return_type="logits", **kwargs | cached)[
            :, 0
        ]


def _recording_or_none(
    run: Callable[..., Recording], rows: list[int], prefixes: Prefixes, pasts: Pasts | None
) -> Recording | None:
    """Record rows with a cache; None if the model gives other activations with it, or none."""
    if pasts is None:
        return run(rows)
    try:
        recording = run(rows, pasts)
    except CACHE_ERRORS as error:
        reraise_if_out_of_memory(error)
        return None
    if prefixes.is_tested:
        return recording
    padded = [row for row, length in enumerate(pasts.lengths) if 0 < length < max(pasts.lengths)]
    row = padded[0] if padded else 0
    plain = run([rows[row]])
    for key, theirs in plain.items():
        ours, theirs = recording[key][row].float(), theirs[0].float()
        error = float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-30))
        if not error <= PATTERN_TOLERANCE.get(prefixes.view.model.W_U.dtype, 1e-4):
            return None
    prefixes.is_tested = bool(padded)
    return recording
