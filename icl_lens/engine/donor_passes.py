"""Run donor prompts and record what heads take from them: last queries, and keys and values at labels.

Donors that begin like other prompts run only from the first token that differs. Queries and keys are recorded before
rotation, label by label, so that donors may differ in length from the prompts that take from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.passes import check_finite
from icl_lens.edits.edit import Part
from icl_lens.edits.interchange import DonorRecording, LayerTensors
from icl_lens.edits.kv_cache import per_kv_head
from icl_lens.edits.pattern import LayerValues, recording_hooks
from icl_lens.engine.edit_checks import PATTERN_TOLERANCE
from icl_lens.engine.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.inference import log_probs_of
from icl_lens.models.memory import PASS_BYTES, PASS_TOKENS
from icl_lens.models.sizes import pass_bytes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Padding tokens in a pass over donors; another pass costs about as much.
MAX_PADDING = 64


@dataclass(frozen=True, eq=False)
class Donor:
    """Prompts whose queries, keys or values others take, and where each prompt's labels have their tokens in them."""

    batch: PromptBatch
    rows: Int[Tensor, "prompt token"]
    """For each token of a prompt's labels, the row of `batch` that its key and value come from; -1 for its own."""
    places: Int[Tensor, "prompt token"]
    """The position in that row."""
    has_queries: bool = True
    """Whether row i of `batch` is a whole prompt for prompt i; otherwise, rows end at labels."""

    def select(self, prompts: Sequence[int]) -> "Donor":
        """Return the donor of some of the prompts."""
        index = list(prompts)
        rows, places = self.rows[index], self.places[index]
        used = torch.tensor(index) if self.has_queries else rows[rows >= 0].unique()
        place = torch.full((len(self.batch),), -1)
        place[used] = torch.arange(len(used))
        rows = torch.where(rows >= 0, place[rows.clamp(min=0)], -1)
        return Donor(self.batch[used.tolist()], rows, places, self.has_queries)


class Pasts(NamedTuple):
    """What rows of a pass have before their first token that is run: a cache, and how many of its tokens are theirs."""

    cache: Any
    lengths: list[int]


@dataclass(eq=False)
class Prefixes:
    """Prompts that donors begin with, and Hugging Face's caches of their keys and values.

    A donor row then runs only from the first token in which it differs. Rows of one pass may begin with different
    numbers of tokens, like left-padded prompts. Caches are used only for models for which they give the same
    activations as a plain pass, which is tested on one row of the first pass whose rows differ.
    """

    view: ModelView
    ids: list[list[int]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """For each prompt, its cache and its row there."""
    is_tested: bool = False
    is_usable: bool = True
    rows: PrefixCache | None = None
    """The first prompts with what single-token rows need, from the same pass; None if it cannot be used."""

    @classmethod
    def of(cls, view: ModelView, batch: PromptBatch) -> "Prefixes":
        """Run prompts and keep their keys and values, for donors and for single-token rows."""
        prefixes, cache = cls(view), new_cache(view)
        rows = None
        if cache is not None:
            try:
                rows = PrefixCache.of(view, batch, tokens=batch.label_tokens, past=cache)
                prefixes.add(batch, cache)
                if prefixes.is_usable:
                    _share_memory(cache, rows)
            except (PrefixCacheUnsupported, InputError, *CACHE_ERRORS) as error:
                _raise_out_of_memory(error)
        prefixes.is_usable &= rows is not None
        return replace(prefixes, rows=rows if prefixes.is_usable else None)

    def add(self, batch: PromptBatch, cache: Any) -> None:
        """Add prompts with a cache that their pass has filled."""
        kept: list[Any] = list(getattr(cache, "layers", ()))
        try:
            is_complete = len(kept) == self.view.n_layers and all(
                (len(layer.keys), layer.keys.shape[2]) == tuple(batch.tokens.shape) for layer in kept
            )
        except (AttributeError, TypeError):
            is_complete = False
        self.is_usable &= is_complete
        self.places += [(len(self.caches), row) for row in range(len(batch))]
        self.ids += [row[: last + 1] for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)]
        self.caches.append(cache)

    def longest(self, ids: Sequence[int], limit: int) -> tuple[int, int]:
        """Return the prompt that shares the most first tokens with `ids`, and how many, at most `limit`."""
        shared = [
            next((place for place, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), min(len(own), len(ids)))
            for own in self.ids
        ]
        best = max(range(len(shared)), key=shared.__getitem__)
        return best, min(shared[best], limit)

    def pasts(self, starts: Sequence[tuple[int, int]]) -> Pasts | None:
        """Return a cache of the first tokens of some prompts, given as (prompt, number of tokens); None for no tokens.

        The first tokens of shorter ones are padding, so that all end where the pass begins.
        """
        from icl_lens.engine.gathered_cache import gathered_cache

        width = max(length for _, length in starts)
        if not width:
            return None
        lengths = torch.tensor([length for _, length in starts])
        source = torch.tensor([self.places[prompt] for prompt, _ in starts])
        positions = (torch.arange(width) - (width - lengths)[:, None]).clamp(min=0)
        return Pasts(gathered_cache(self.caches, self.view.n_layers, source, positions), lengths.tolist())


# Keys of two caches that differ by no more than this are equal.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}

# What Hugging Face models raise if they do not take a cache.
CACHE_ERRORS = (AttributeError, TypeError, RuntimeError, ValueError, IndexError)


def new_cache(view: ModelView) -> Any:
    """Return an empty cache of Hugging Face, or None for models of other libraries."""
    if getattr(view.model, "original_model", None) is None:
        return None
    from transformers import DynamicCache

    return DynamicCache()


def _share_memory(cache: Any, rows: PrefixCache) -> None:
    """Let a cache of Hugging Face hold the same tensors as that of single-token rows, where they are equal."""
    for number, layer in enumerate(cache.layers):
        same = rows.keys[number]
        for name, ours in (("keys", same.k), ("values", same.v)):
            theirs = getattr(layer, name)
            is_same_kind = theirs.shape == ours.shape and theirs.dtype == ours.dtype
            if is_same_kind and torch.allclose(theirs, ours, rtol=ROUNDING["rtol"], atol=ROUNDING["atol"]):
                setattr(layer, name, ours)


def _raise_out_of_memory(error: Exception) -> None:
    if isinstance(error, torch.OutOfMemoryError):
        raise error


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

    With `keep`, whole donors run, and `prefixes` gets their keys and values. A pass has as many rows as fit in
    `PASS_BYTES`, with the keys and values that they begin with. Raise InputError for families without the hooks of
    queries, keys and values.
    """
    batch = donor.batch
    at, slots = _places_by_row(donor)
    lengths = (batch.last + 1).tolist()
    starts = [(0, 0)] * len(batch)
    if prefixes is not None and prefixes.is_usable and not keep:
        limits = [length - 1 for length in lengths]
        if set(parts) & {"k", "v"}:
            limits = [min(limit, int(places.min())) for limit, places in zip(limits, at, strict=True)]
        rows = zip(batch.tokens.tolist(), lengths, limits, strict=True)
        starts = [prefixes.longest(ids[:length], limit) for ids, length, limit in rows]
    run = partial(_record_rows, view, batch, at, donor.has_queries, layers, parts)
    order: list[int] = []
    pieces: list[dict[tuple[str, int], Tensor]] = []
    for some in _passes(view, lengths, [start for _, start in starts]):
        order += some
        if prefixes is None or not prefixes.is_usable:
            pieces.append(run(some))
        elif keep:
            cache = new_cache(view)
            pieces.append(run(some, Pasts(cache, [0] * len(some))))
            prefixes.add(batch[some], cache)
        else:
            pasts = prefixes.pasts([starts[row] for row in some])
            found = _checked(run, some, prefixes, pasts)
            if found is None:
                prefixes.is_usable = False
                return record(view, donor, layers, parts)
            pieces.append(found)
    place = torch.tensor(order).argsort()
    found = {key: torch.cat([one[key] for one in pieces])[place] for key in pieces[0]}
    rows = donor.rows.clamp(min=0)
    by_part: dict[str, LayerTensors] = {
        part: {layer: found[part, layer] if part == "q" else found[part, layer][rows, slots] for layer in layers}
        for part in parts
    }
    return DonorRecording(donor.rows < 0, **by_part, log_probs=found.get(("labels", -1)))


def _passes(view: ModelView, lengths: Sequence[int], starts: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows that run in one pass, from their starts on: of similar lengths, and as many as fit in memory.

    A pass has at most `MAX_PADDING` tokens of padding, `PASS_TOKENS` tokens and `PASS_BYTES` of temporary tensors.
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


def _places_by_row(donor: Donor) -> tuple[Int[Tensor, "row slot"], Int[Tensor, "prompt token"]]:
    """Return the positions to record in each row of a donor, and which of them belongs to each token of each prompt."""
    places: list[list[int]] = [[] for _ in range(len(donor.batch))]
    slots = torch.zeros_like(donor.rows)
    for prompt, token in (donor.rows >= 0).nonzero().tolist():
        row = places[int(donor.rows[prompt, token])]
        slots[prompt, token] = len(row)
        row.append(int(donor.places[prompt, token]))
    width = max(1, *map(len, places))
    lasts = donor.batch.last.tolist()
    return torch.tensor([row + [last] * (width - len(row)) for row, last in zip(places, lasts, strict=True)]), slots


def _record_rows(
    view: ModelView,
    batch: PromptBatch,
    at: Int[Tensor, "row slot"],
    has_queries: bool,
    layers: Sequence[int],
    parts: Sequence[Part],
    some: list[int],
    pasts: Pasts | None = None,
) -> dict[tuple[str, int], Tensor]:
    """Return (part, layer) -> what is recorded of some rows and, at ("labels", -1), the labels' log-probabilities.

    With `pasts`, only the tokens after these are run.
    """
    batch, at = batch[some], at[some]
    values = {layer: LayerValues(view, layer) for layer in layers}
    found: dict[tuple[str, int], Tensor] = {}
    starts = torch.zeros(len(batch), dtype=torch.long) if pasts is None else torch.tensor(pasts.lengths)
    last = batch.last.cpu() - starts
    rows = torch.arange(len(batch))

    def keep(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> None:
            for part in parts:
                x = values[layer].seen[part]
                if part == "q":
                    found[part, layer] = x[rows, last].clone()
                else:
                    found[part, layer] = per_kv_head(x, view.n_kv_heads)[rows[:, None], at - starts[:, None]].clone()
            values[layer].seen.clear()

        return hook_fn

    hooks: list[tuple[str, Any]] = []
    for layer, one in values.items():
        hooks += [*recording_hooks(one, *parts), (view.hook(layer, "attn.hook_z"), keep(layer))]
    tokens, mask = _after(batch, starts)
    past = None if pasts is None else pasts.cache
    logits = _run(view, tokens, mask, hooks, past, last if has_queries else None)
    if has_queries:
        check_finite(logits)
        log_probs = log_probs_of(logits)
        found["labels", -1] = log_probs[:, batch.label_tokens.to(log_probs.device)]
    return found


def _after(batch: PromptBatch, starts: Int[Tensor, " row"]) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row key"]]:
    """Return the tokens from `starts` on, and the mask of these and all tokens before them.

    The first max(starts) keys of the mask are those of the cache; a row has the last of them. Positions follow from the
    mask, as for left-padded prompts.
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

    with (
        torch.no_grad(),
        view.inference_pass() as kwargs,
        edits_disabled(view),
        view.model.hooks(fwd_hooks=[*hooks, (view.last_logits_hook, select)]),
    ):
        cached = {} if past is None else {"use_cache": True, "past_key_values": past}
        return view.model(tokens, attention_mask=mask, return_type="logits", **kwargs | cached)[:, 0]


def _checked(
    run: Callable[..., dict[tuple[str, int], Tensor]], some: list[int], prefixes: Prefixes, pasts: Pasts | None
) -> dict[tuple[str, int], Tensor] | None:
    """Record rows with a cache; return None if the model does not take it or gives other activations with it."""
    if pasts is None:
        return run(some)
    try:
        found = run(some, pasts)
    except CACHE_ERRORS as error:
        _raise_out_of_memory(error)
        return None
    if prefixes.is_tested:
        return found
    padded = [row for row, length in enumerate(pasts.lengths) if 0 < length < max(pasts.lengths)]
    row = padded[0] if padded else 0
    plain = run([some[row]])
    for key, theirs in plain.items():
        ours, theirs = found[key][row].float(), theirs[0].float()
        error = float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-30))
        if not error <= PATTERN_TOLERANCE.get(prefixes.view.model.W_U.dtype, 1e-4):
            return None
    prefixes.is_tested = bool(padded)
    return found
