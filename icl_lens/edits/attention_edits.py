"""Edits of attention: weights of labels, scores without the position term, and blocked
attention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from icl_lens.edits.edit import Attention, Edit, Positions, Stage, of_prompts
from icl_lens.edits.recomputed_patterns import without_keys
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import require_demonstrations


@dataclass(frozen=True, eq=False)
class Reweight(Edit):
    """Attention of heads from the last position to all tokens of each label, multiplied by a factor
    per demonstration.

    `weights` [batch demo] are factors: 1 keeps the attention to a label, 0 removes it. With
    `renormalize`, the last position's attention is then scaled to the sum it had, which
    redistributes removed attention. It needs the prompts that are run: `score` has them, a block
    takes them as `il.edited(..., batch=batch)`, where a batch of one prompt stands for any number
    of rows that all begin with this prompt.

    Raise InputError for weights that are negative, not finite or of the wrong shape, an unknown
    head, prompts without demonstrations, passes over other prompts, and families whose attention
    cannot be recomputed. Source: the published version, section 4.1 (weights against majority-label
    bias).

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
    description = "with scaled attention to labels"
    needs_batch = True
    positions = "last"

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        require_demonstrations(
            batch, "label attention to scale", "use il.Block, which edits attention to any position"
        )
        return [replace(edit, weights=edit._checked(batch), _batch=batch) for edit in edits]

    def _checked(self, batch: PromptBatch) -> Float[Tensor, "batch demo"]:
        try:
            weights = torch.as_tensor(self.weights, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"weights must be numbers, one per prompt and demonstration, got "
                f"{short_repr(self.weights)}"
            ) from None
        shape = tuple(batch.label_positions.shape)
        if tuple(weights.shape) != shape:
            raise InputError(
                f"weights must have shape {shape}, one per prompt and demonstration, got "
                f"{tuple(weights.shape)}"
            )
        valid = torch.isfinite(weights) & (weights >= 0)
        if not bool(valid.all()):
            raise InputError(
                f"weights must be finite and non-negative, got {float(weights[~valid][0])}; 1 "
                "keeps a label, 0 hides it"
            )
        return weights

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        assert self._batch is not None
        assert isinstance(self.weights, Tensor)
        batch, pattern, device = self._batch, attention.pattern, attention.pattern.device
        rows, n_keys = len(pattern), pattern.shape[-1]
        _check_length(batch, attention.prompt, n_keys)
        tokens = of_prompts(batch.all_label_positions.to(device), attention.prompt)
        factors = (
            of_prompts(self.weights.to(device), attention.prompt)[..., None]
            .expand(tokens.shape)
            .flatten(1)
        )
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
            before, after = (x.sum(-1, keepdim=True) for x in (intact, edited))
            edited = edited * (before / after.clamp(min=torch.finfo(edited.dtype).tiny))
        pattern[at] = edited


@dataclass(frozen=True, eq=False)
class RemovePosition(Edit):
    """Query-key products of heads without their position term.

    In rotary models, q·k is computed without rotation. With learned positions, the position
    embedding's share of the heads' queries and keys is subtracted; the norm's scale stays that of
    the unedited input. With ALiBi, the bias is omitted. Mask and softmax are unchanged, and
    position information that earlier layers wrote remains. `strength` interpolates the scores: 1
    removes the position term, 0 keeps it. `positions="last"` edits only the attention of the last
    position.

    Raise InputError for an unknown head, a strength outside 0 to 1, and families whose attention
    cannot be recomputed. Source: the published version, section 4.2.

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
            raise InputError(
                f"strength must be between 0 (no change) and 1, got {short_repr(self.strength)}"
            )

    stages = (Stage.scores,)
    description = "with a weakened position term"

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        indices = attention.indices_of(heads)
        if self.positions == "all":
            attention.weight[:, indices] *= 1 - self.strength
        else:
            row, last = attention.last_queries
            attention.weight[row[:, None], torch.tensor(indices)[None], last[:, None]] *= (
                1 - self.strength
            )


@dataclass(frozen=True, eq=False)
class Block(Edit):
    """Attention of heads to keys that are not `blocked`, renormalized over these (attention
    knockout).

    `blocked` [batch query key] is True for the pairs of a query and a key position without
    attention. A query with all keys blocked attends nowhere. If `blocked` has batch size 1, it
    applies to every row of a pass. Raise InputError for an unknown head, passes of another shape, and families whose
    attention cannot be recomputed.

    Example:
        >>> n_tokens = batch.tokens.shape[1]
        >>> blocked = batch.attention_mask.new_zeros((1, n_tokens, n_tokens)).bool()
        >>> blocked[0, -1, batch.label_positions[0, :2]] = True  # from the last token to both "bar"
        >>> with il.edited(model, il.Block(["L2H0"], blocked)):
        ...     acts = il.capture(model, batch)
        >>> acts.attention_to_labels()[0, 2, 0, :2]
        tensor([0., 0.])
    """

    heads: Iterable[AnyHead]
    blocked: Bool[Tensor, "batch query key"]
    _batch: PromptBatch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        blocked = self.blocked
        if not isinstance(blocked, Tensor) or blocked.dtype != torch.bool or blocked.ndim != 3:
            what = (
                f"{tuple(blocked.shape)} {blocked.dtype}"
                if isinstance(blocked, Tensor)
                else type(blocked).__name__
            )
            raise InputError(
                "blocked must be a boolean tensor [batch query key], True to block attention, got "
                f"{what}"
            )

    stages = (Stage.pattern,)
    description = "with blocked attention"

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        if batch is not None:
            for edit in edits:
                edit._check_shape((len(batch), batch.tokens.shape[1], batch.tokens.shape[1]))
        return [replace(edit, _batch=batch) for edit in edits]

    def _check_shape(self, shape: tuple[int, int, int]) -> None:
        if self.blocked.shape[0] not in (1, shape[0]) or tuple(self.blocked.shape[1:]) != shape[1:]:
            raise InputError(
                f"blocked must have the shape of the pass, {shape}, got {tuple(self.blocked.shape)}; "
                "run the same batch"
            )

    def changes_only_last(self, batch: PromptBatch) -> bool:
        if (
            self.blocked.shape[0] not in (1, len(batch))
            or tuple(self.blocked.shape[1:]) != (batch.tokens.shape[1],) * 2
        ):
            return False  # `prepare` raises the error
        is_last = torch.arange(batch.tokens.shape[1]) == batch.last.cpu()[:, None]
        return not bool((self.blocked.cpu() & ~is_last[:, :, None]).any())

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        pattern, blocked = attention.pattern, self.blocked.to(attention.pattern.device)
        rows, _, n_queries, n_keys = pattern.shape
        if attention.queries is not None:  # rows of one token, in pieces of the batch
            blocked = of_prompts(blocked, attention.prompt)[..., :n_keys]
            blocked = blocked[torch.arange(rows)[:, None], attention.queries.to(blocked.device)]
        elif self._batch is not None:  # which the pass runs, or a part of it, and tokens may follow
            _check_length(self._batch, attention.prompt, n_keys)
            more = max(0, n_keys - blocked.shape[-1])
            blocked = functional.pad(of_prompts(blocked, attention.prompt), (0, more, 0, more))[
                :, :n_queries, :n_keys
            ]
        else:
            self._check_shape((rows, n_queries, n_keys))
        indices = attention.indices_of(heads)
        pattern[:, indices] = without_keys(
            pattern[:, indices], blocked[:, None], has_sink=attention.has_sink
        )


def _check_length(batch: PromptBatch, prompt: Int[Tensor, " row"], n_keys: int) -> None:
    """Raise InputError for a pass that is shorter than the prompts of its rows."""
    n_tokens = int(of_prompts(batch.last, prompt).max()) + 1
    if n_tokens > n_keys:
        raise InputError(
            f"the forward pass must have at least {n_tokens} tokens like batch, got {n_keys}; run "
            "the same batch"
        )
