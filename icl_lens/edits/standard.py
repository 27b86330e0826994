"""The standard edits: ablation of heads, changes of their attention, and a vector added to the residual stream.

`patch` has the edit that writes activations of other prompts, `edges` the one that removes edges between heads.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from numbers import Real
from typing import Any, Literal, cast
from zlib import crc32

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from icl_lens.edits.edit import Attention, Edit, Places, Positions, Stage, of_prompts
from icl_lens.edits.pattern import without_keys
from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch, check_vocabulary

Mode = Literal["zero", "mean", "resample"]
Reference = PromptBatch | Iterable[PromptBatch] | None
LayerZ = Mapping[int, Float[Tensor, "prompt head d_head"]]
"""Layer -> what z is replaced by, the same for all prompts (one row) or one row per prompt."""


@dataclass(frozen=True, eq=False)
class Ablate(Edit):
    """Ablation of heads: their z is replaced, so that they write nothing of their own; b_O is kept.

    `mode="zero"` sets z to zero, "mean" to its mean over all tokens of the `reference` prompts or, with
    `positions="last"`, over their last tokens, and "resample", with `positions="last"`, to that at the last token of
    one reference prompt, drawn for each prompt by its tokens and `seed` (never the same prompt). No edits are active in
    passes over the reference. `positions="last"` edits only each prompt's last position. `strength` interpolates: 1
    replaces z, 0 keeps it, 0.3 moves it by 30 %; one number for all heads, or one per head (soft gates).

    Raise InputError for an unknown head, mode or positions, a mean without `reference` or with non-finite values, a
    `reference` for zeros, and strengths that are not finite or not one per head.

    Example:
        >>> with il.edited(model, il.Ablate(["L2H0", "L3H1"])):
        ...     ablated = il.score(model, batch)
        >>> ablated.shape
        torch.Size([1, 2])
    """

    heads: Iterable[AnyHead]
    _: KW_ONLY
    mode: Mode = "zero"
    reference: Reference = None
    positions: Positions = "all"
    seed: int = 0
    strength: float | Sequence[float] | Float[Tensor, "*head"] = 1.0
    recorded_z: LayerZ | None = field(default=None, repr=False)
    """What takes the place of z, once recorded."""
    _tokens: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """The tokens of the recorded prompts, for draws."""
    _draws: Int[Tensor, " drawn"] | None = field(default=None, repr=False)
    """For each prompt, the recorded prompt that is drawn for it."""
    _strength_of: Mapping[Head, float] = field(default_factory=dict, repr=False)
    """The strength of each head, if they differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        n_heads = len(tuple(self.heads))
        is_one = isinstance(self.strength, Real) or getattr(self.strength, "ndim", 1) == 0
        given: tuple[Any, ...] = (self.strength,) if is_one else tuple(cast("Sequence[float]", self.strength))
        is_finite = all(isinstance(one, Real | Tensor) and math.isfinite(one) for one in given)
        if not is_finite or (not is_one and len(given) != n_heads):
            raise InputError(f"strength must be a finite number, or one per head, {n_heads}, got {self.strength!r}")
        object.__setattr__(self, "strength", float(given[0]) if is_one else tuple(map(float, given)))
        check_choice("positions", self.positions, ("all", "last"))
        check_choice("mode", self.mode, ("zero", "mean", "resample"))
        if (self.mode == "zero") == (self.reference is not None):
            raise InputError(
                f"reference must be {'omitted' if self.mode == 'zero' else 'given'} for mode={self.mode!r}, got "
                f"{'None' if self.reference is None else type(self.reference).__name__}"
            )
        if self.mode == "resample" and self.positions != "last":
            raise InputError("positions must be 'last' for mode='resample', got 'all'; prompts differ in length")
        if self.reference is not None and not isinstance(self.reference, PromptBatch):
            object.__setattr__(self, "reference", tuple(reference_batches(self.reference)))

    stages = (Stage.removal,)

    @property
    def what(self) -> str:
        done = {"zero": "zeroed", "mean": "set to their mean", "resample": "set to those of other prompts"}[self.mode]
        partly = "" if self.strength == 1 else f" with strength {self.strength}"
        return done + partly + " at the last position" * (self.positions == "last")

    @property
    def supports_cache(self) -> bool:
        return self.positions == "all"

    @property
    def needs_batch(self) -> bool:
        return self.mode == "resample"

    @property
    def shared(self) -> object:
        if type(self) is not Ablate or self._strength_of:
            return id(self)
        return self.positions, self.strength, id(self.recorded_z), id(self._draws)

    @classmethod
    def prepare(cls, view: ModelView, edits: Sequence["Ablate"], batch: PromptBatch | None) -> Sequence["Ablate"]:
        groups: dict[tuple[object, ...], list[Ablate]] = {}
        for edit in edits:
            same = edit.reference if isinstance(edit.reference, tuple) else (edit.reference,)
            key = (edit.mode, *map(id, same), edit.positions, edit.seed, id(edit.recorded_z))
            groups.setdefault(key, []).append(edit)
        ready: dict[int, Ablate] = {}
        for group in groups.values():
            one = group[0]
            if one.reference is not None:
                layers = sorted({layer for edit in group for layer in edit.by_layer(view)})
                new = _recorded(view, layers, one) if one.recorded_z is None else {}
                if batch is not None and one.mode == "resample":
                    new["_draws"] = _drawn(new.get("_tokens", one._tokens), batch, one.seed)
                ready |= {id(edit): replace(edit, **new) for edit in group}
        found = [ready.get(id(edit), edit) for edit in edits]
        return [edit._with_strengths(view) for edit in found]

    def _with_strengths(self, view: ModelView) -> "Ablate":
        if isinstance(self.strength, int | float):
            return self
        heads = [view.check_head(head) for head in self.heads]
        return replace(self, _strength_of=dict(zip(heads, self.strength, strict=True)))

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        value: Any = 0.0
        if self.recorded_z is not None:
            row = torch.zeros_like(at.prompt) if self._draws is None else self._draws.to(z.device)[at.prompt]
            value = self.recorded_z[layer][row, at.head].to(z)
        place = (at.row, at.last, at.head) if self.positions == "last" else (at.row, slice(None), at.head)
        if self.positions == "all" and self.recorded_z is not None:
            value = value[:, None]
        if self.strength != 1:
            strength: Any = self.strength
            if self._strength_of:
                each = [self._strength_of[Head(layer, head)] for head in at.head.tolist()]
                strength = z.new_tensor(each).reshape(-1, *[1] * (z[place].ndim - 1))
            value = z[place] + strength * (value - z[place])
        z[place] = value


@dataclass(frozen=True, eq=False)
class Reweight(Edit):
    """Attention of heads from the last position to all tokens of each label, multiplied by a factor per demonstration.

    `weights` [batch demo] are factors: 1 keeps the attention to a label, 0 removes it. With `renormalize`, the last
    position's attention is then scaled to the sum it had, which redistributes removed attention. It needs the prompts
    that are run: `score` has them, a block takes them as `il.edited(..., batch=batch)`, where a batch of one prompt
    stands for any number of rows that all begin with this prompt.

    Raise InputError for weights that are negative, not finite or of the wrong shape, an unknown head, prompts without
    demonstrations, passes over other prompts, and families whose attention cannot be recomputed. Source: the published
    version, section 4.1 (weights against majority-label bias).

    Example:
        >>> only_foo = il.Reweight(["L2H0"], [[0.0, 0.0, 1.0, 1.0]], renormalize=True)
        >>> with il.edited(model, only_foo, batch=batch):
        ...     acts_of_foo = il.capture(model, batch)
        >>> acts_of_foo.attention_by_label()[0, 2, 0, 0]
        tensor(0.)
    """

    heads: Iterable[AnyHead]
    weights: Tensor | Sequence[Sequence[float]]
    _: KW_ONLY
    renormalize: bool
    _batch: PromptBatch | None = field(default=None, repr=False)

    stages = (Stage.pattern,)
    what = "with scaled attention to labels"
    needs_batch = True
    positions = "last"

    @classmethod
    def prepare(cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None) -> Sequence[Edit]:
        assert batch is not None
        batch.require_demonstrations("label attention to scale", "use il.Block, which edits attention to any position")
        return [replace(edit, weights=edit._checked(batch), _batch=batch) for edit in edits]

    def _checked(self, batch: PromptBatch) -> Float[Tensor, "batch demo"]:
        try:
            weights = torch.as_tensor(self.weights, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"weights must be numbers, one per prompt and demonstration, got {self.weights!r}"
            ) from None
        shape = tuple(batch.label_positions.shape)
        if tuple(weights.shape) != shape:
            raise InputError(
                f"weights must have shape {shape}, one per prompt and demonstration, got {tuple(weights.shape)}"
            )
        valid = torch.isfinite(weights) & (weights >= 0)
        if not bool(valid.all()):
            raise InputError(
                f"weights must be finite and non-negative, got {float(weights[~valid][0])}; 1 keeps a label, 0 hides it"
            )
        return weights

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        assert self._batch is not None
        assert isinstance(self.weights, Tensor)
        batch, pattern, device = self._batch, attention.pattern, attention.pattern.device
        rows, n_keys = len(pattern), pattern.shape[-1]
        check_length(batch, attention.prompt, n_keys)
        tokens = of_prompts(batch.label_token_positions.to(device), attention.prompt)
        factors = of_prompts(self.weights.to(device), attention.prompt)[..., None].expand(tokens.shape).flatten(1)
        positions = tokens.flatten(1)
        factors = factors.masked_fill(positions < 0, 1.0)
        ones = factors.new_ones(rows, n_keys)
        factor_of_key = ones.scatter_reduce(1, positions.clamp(min=0), factors, "prod")[:, None]
        row, last = attention.last_queries
        indices = torch.tensor(attention.indices_of(heads), device=device)
        at = row[:, None], indices, last[:, None]
        intact = pattern[at]
        edited = intact * factor_of_key.to(pattern.dtype)
        if self.renormalize:  # to the sum it had, which is less than 1 with an attention sink
            before, after = (one.sum(-1, keepdim=True) for one in (intact, edited))
            edited = edited * (before / after.clamp(min=torch.finfo(edited.dtype).tiny))
        pattern[at] = edited


@dataclass(frozen=True, eq=False)
class RemovePosition(Edit):
    """Query-key products of heads without their position term.

    In rotary models, q·k is computed without rotation. With learned positions, the position embedding's share of the
    heads' queries and keys is subtracted; the norm's scale stays that of the unedited input. With ALiBi, the bias is
    omitted. Mask and softmax are unchanged, and position information that earlier layers wrote remains. `strength`
    interpolates the scores: 1 removes the position term, 0 keeps it. `positions="last"` edits only the attention of the
    last position.

    Raise InputError for an unknown head, a strength outside 0 to 1, and families whose attention cannot be recomputed.
    Source: the published version, section 4.2.

    Example:
        >>> with il.edited(model, il.RemovePosition(["L2H0"], strength=0.5)):
        ...     weakened = il.score(model, batch)
        >>> weakened.shape
        torch.Size([1, 2])
    """

    heads: Iterable[AnyHead]
    _: KW_ONLY
    strength: float = 1.0
    positions: Positions = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("positions", self.positions, ("all", "last"))
        if not isinstance(self.strength, Real) or not 0 <= self.strength <= 1:
            raise InputError(f"strength must be between 0 (no change) and 1, got {self.strength!r}")

    stages = (Stage.scores,)
    what = "with a weakened position term"

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        indices = attention.indices_of(heads)
        if self.positions == "all":
            attention.weight[:, indices] *= 1 - self.strength
        else:
            row, last = attention.last_queries
            attention.weight[row[:, None], torch.tensor(indices)[None], last[:, None]] *= 1 - self.strength


@dataclass(frozen=True, eq=False)
class Block(Edit):
    """Attention of heads without the `edges` that are True, renormalized over the other keys (attention knockout).

    `edges` [batch query key]: an edge is here a pair of a query and a key position. A query with all edges blocked
    attends nowhere. If `edges` has batch size 1, it applies to every row of a pass. Raise InputError for an unknown
    head, passes of another shape, and families whose attention cannot be recomputed.

    Example:
        >>> edges = batch.attention_mask.new_zeros((1, batch.tokens.shape[1], batch.tokens.shape[1])).bool()
        >>> edges[0, -1, batch.label_positions[0, :2]] = True  # from the last position to both "bar"
        >>> with il.edited(model, il.Block(["L2H0"], edges)):
        ...     blocked = il.capture(model, batch)
        >>> blocked.attention_to_labels()[0, 2, 0, :2]
        tensor([0., 0.])
    """

    heads: Iterable[AnyHead]
    edges: Bool[Tensor, "batch query key"]
    _batch: PromptBatch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        edges = self.edges
        if not isinstance(edges, Tensor) or edges.dtype != torch.bool or edges.ndim != 3:
            what = f"{tuple(edges.shape)} {edges.dtype}" if isinstance(edges, Tensor) else type(edges).__name__
            raise InputError(f"edges must be a boolean tensor [batch query key], True to block attention, got {what}")

    stages = (Stage.pattern,)
    what = "with blocked attention"

    @classmethod
    def prepare(cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None) -> Sequence[Edit]:
        if batch is not None:
            for edit in edits:
                edit._check_shape((len(batch), batch.tokens.shape[1], batch.tokens.shape[1]))
        return [replace(edit, _batch=batch) for edit in edits]

    def _check_shape(self, shape: tuple[int, int, int]) -> None:
        if self.edges.shape[0] not in (1, shape[0]) or tuple(self.edges.shape[1:]) != shape[1:]:
            raise InputError(
                f"edges must have the shape of the pass, {shape}, got {tuple(self.edges.shape)}; run the same batch"
            )

    def is_only_last(self, batch: PromptBatch) -> bool:
        if self.edges.shape[0] not in (1, len(batch)) or tuple(self.edges.shape[1:]) != (batch.tokens.shape[1],) * 2:
            return False  # `prepare` raises the error
        is_last = torch.arange(batch.tokens.shape[1]) == batch.last.cpu()[:, None]
        return not bool((self.edges.cpu() & ~is_last[:, :, None]).any())

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        pattern, edges = attention.pattern, self.edges.to(attention.pattern.device)
        rows, _, n_queries, n_keys = pattern.shape
        if attention.queries is not None:  # rows of one token, in pieces of the batch
            edges = of_prompts(edges, attention.prompt)[..., :n_keys]
            edges = edges[torch.arange(rows)[:, None], attention.queries.to(edges.device)]
        elif self._batch is not None:  # which the pass runs, or a part of it, and tokens may follow
            check_length(self._batch, attention.prompt, n_keys)
            more = max(0, n_keys - edges.shape[-1])
            edges = functional.pad(of_prompts(edges, attention.prompt), (0, more, 0, more))[:, :n_queries, :n_keys]
        else:
            self._check_shape((rows, n_queries, n_keys))
        indices = attention.indices_of(heads)
        pattern[:, indices] = without_keys(pattern[:, indices], edges[:, None], has_sink=attention.has_sink)


@dataclass(frozen=True, eq=False)
class AddVector(Edit):
    """A vector added to the residual stream after a layer (steering), or written in its place with `replace=True`.

    `vector` is [d_model], or [batch d_model] for one per prompt, in residual-stream units. `positions` is the prompts'
    last position, "all" positions, or a list of positions, negative from the end of the prompt. It needs the prompts
    that are run, as `Reweight` does. Tokens may follow prompts of one length, as in `model.generate(batch.tokens)`: the
    last position stays that of the prompts, with and without a KV cache. Raise InputError for a vector of the wrong
    shape or with non-finite values, an unknown layer, positions outside a prompt, and passes over other prompts.

    Example:
        >>> vector = il.function_vector(model, batch, ["L2H0"])
        >>> with il.edited(model, il.AddVector(vector, 1), batch=batch):
        ...     steered = il.score(model, batch)
        >>> steered.shape
        torch.Size([1, 2])
    """

    vector: Float[Tensor, "*batch d_model"]
    layer: int
    _: KW_ONLY
    replace: bool = False
    positions: Positions | Sequence[int] = "last"
    heads = ()

    def __post_init__(self) -> None:
        if not isinstance(self.vector, Tensor):
            raise InputError(f"vector must be a tensor, got {type(self.vector).__name__}; write torch.tensor(...)")
        check_integers(layer=self.layer)
        if isinstance(self.positions, str):
            check_choice("positions", self.positions, ("all", "last"))
        else:
            object.__setattr__(self, "positions", tuple(self.positions))
            check_integers(**{f"positions[{number}]": one for number, one in enumerate(self.positions)})
        if not bool(self.vector.isfinite().all()):
            raise InputError("vector must be finite, got NaN or infinite values")

    stages = (Stage.resid,)

    @property
    def what(self) -> str:
        done = f"a vector {'in place of the residual stream' if self.replace else 'added'} after layer {self.layer}"
        if self.positions == "last":
            return done
        return f"{done} at {'all positions' if self.positions == 'all' else f'positions {self.positions}'}"

    needs_batch = True
    at_prompt_end = True

    @property
    def supports_cache(self) -> bool:
        return self.positions == "last"

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        if not 0 <= self.layer < view.n_layers:
            raise InputError(f"layer must be between 0 and {view.n_layers - 1} for {view.name}, got {self.layer!r}")
        return {self.layer: []}

    @classmethod
    def prepare(cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None) -> Sequence[Edit]:
        assert batch is not None
        for edit in edits:
            if tuple(edit.vector.shape) not in ((view.d_model,), (len(batch), view.d_model)):
                raise InputError(
                    f"vector must have shape ({view.d_model},) or ({len(batch)}, {view.d_model}), one per prompt, got "
                    f"{tuple(edit.vector.shape)}"
                )
            shortest = int(batch.last.min()) + 1
            if not isinstance(edit.positions, str) and not all(-shortest <= one < shortest for one in edit.positions):
                raise InputError(
                    f"positions must be in every prompt, the shortest with {shortest} tokens, got {edit.positions}"
                )
        return edits

    def write_resid(self, x: Tensor, at: Places, layer: int) -> None:
        vector = (self.vector if self.vector.ndim == 1 else self.vector[at.prompt.to(self.vector.device)]).to(x)
        if self.positions == "all":
            places: list[Any] = [slice(None)]
            vector = vector.unsqueeze(-2)
        else:
            given = (-1,) if self.positions == "last" else self.positions
            places = [at.last + 1 + one if int(one) < 0 else torch.full_like(at.last, int(one)) for one in given]
        for place in places:
            x[at.row, place] = vector if self.replace else x[at.row, place] + vector


def check_length(batch: PromptBatch, prompt: Int[Tensor, " row"], n_keys: int) -> None:
    """Raise InputError for a pass that is shorter than the prompts of its rows."""
    n_tokens = int(of_prompts(batch.last, prompt).max()) + 1
    if n_tokens > n_keys:
        raise InputError(
            f"the forward pass must have at least {n_tokens} tokens like batch, got {n_keys}; run the same batch"
        )


def reference_batches(reference: PromptBatch | Iterable[PromptBatch]) -> list[PromptBatch]:
    """Return the batches of a reference; raise InputError if there are none."""
    batches: list[Any] = [reference]
    if isinstance(reference, Iterable) and not isinstance(reference, PromptBatch):
        batches = list(reference)
    if not batches:
        raise InputError("reference must contain at least one batch, got none")
    for batch in batches:
        check_batch(batch, "reference")
    return batches


def mean_z(
    view: ModelView, layers: Sequence[int], reference: PromptBatch | Iterable[PromptBatch], positions: Positions
) -> dict[int, Float[Tensor, "head d_head"]]:
    """Return layer -> float64 mean of its heads' z over all tokens of the reference, or over each prompt's last."""
    sums: dict[int, Tensor] = {}
    count = 0

    def add(batch: PromptBatch, layer: int, z: Tensor) -> None:
        z = z.double()
        if positions == "last":
            total = z[torch.arange(len(z)), batch.last.to(z.device)].sum(0)
        else:
            total = (z * batch.attention_mask.to(z)[:, :, None, None]).sum((0, 1))
        sums[layer] = sums.get(layer, 0.0) + total

    for batch in reference_batches(reference):
        count += len(batch) if positions == "last" else int(batch.attention_mask.sum())
        _read_z(view, layers, batch, add)
    means = {layer: total / count for layer, total in sums.items()}
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise InputError("the mean over reference must be finite, got NaN or infinite values; pass other prompts")
    return means


def _recorded(view: ModelView, layers: Sequence[int], edit: Ablate) -> dict[str, Any]:
    """Run the reference of an ablation; return what it records as fields of `Ablate`."""
    assert edit.reference is not None
    if edit.mode == "mean":
        means = mean_z(view, layers, edit.reference, edit.positions)
        return {"recorded_z": {layer: z[None] for layer, z in means.items()}}
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(batch: PromptBatch, layer: int, z: Tensor) -> None:
        found[layer].append(z[torch.arange(len(z)), batch.last.to(z.device)].clone())

    batches = reference_batches(edit.reference)
    for one in batches:
        _read_z(view, layers, one, keep)
    tokens = tuple(chain.from_iterable(map(_token_rows, batches)))
    return {"recorded_z": {layer: torch.cat(pieces) for layer, pieces in found.items()}, "_tokens": tokens}


def _drawn(known: Sequence[tuple[int, ...]], batch: PromptBatch, seed: int) -> Int[Tensor, " prompt"]:
    """Return for each prompt of the batch the index of a known prompt: drawn by its tokens, and never itself."""
    drawn = []
    for number, tokens in enumerate(_token_rows(batch)):
        others = [index for index, other in enumerate(known) if other != tokens]
        if not others:
            raise InputError(f"reference must have a prompt other than prompt {number} of the batch; pass more prompts")
        drawn.append(others[crc32(repr((seed, tokens)).encode()) % len(others)])
    return torch.tensor(drawn)


def _token_rows(batch: PromptBatch) -> list[tuple[int, ...]]:
    return [tuple(row[: last + 1]) for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)]


def _read_z(
    view: ModelView, layers: Sequence[int], batch: PromptBatch, read: Callable[[PromptBatch, int, Tensor], None]
) -> None:
    """Run prompts of a reference without edits, and call `read` with each layer's z."""
    check_vocabulary(view.model, batch, "reference")
    hooks: list[tuple[str, Any]] = [(view.last_logits_hook, lambda x, hook: x[:, :1])]  # logits are not used

    def reader(layer: int) -> Any:
        return lambda z, hook: read(batch, layer, z.detach())

    hooks += [(view.hook(layer, "attn.hook_z"), reader(layer)) for layer in layers]
    with torch.no_grad(), view.inference_pass() as kwargs, edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
        view.model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits", **kwargs)
