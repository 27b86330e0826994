"""Ablation of heads: zeros, a mean, or another prompt's values take the place of what they compute."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import Edit, Places, Positions, Stage
from icl_lens.edits.reference import drawn_prompts, last_z, mean_z, reference_batches, warn_of_same_pairs
from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

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
    passes over the reference. Pass several batches for a mean over several tasks, in which each has the same weight: a
    mean over one task of pairs keeps what heads do in all its prompts, so there is a warning. `positions="last"` edits
    only each prompt's last position. `strength` interpolates: 1 replaces z, 0 keeps it, 0.3 moves it by 30 %; one
    number for all heads, or one per head (soft gates).

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
        (seed,) = check_integers(seed=self.seed)
        object.__setattr__(self, "seed", seed)
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
                new: dict[str, Any] = {}
                if one.recorded_z is None:
                    if batch is not None:
                        warn_of_same_pairs(batch, one.reference)
                    layers = sorted({layer for edit in group for layer in edit.by_layer(view)})
                    is_mean = one.mode == "mean"
                    new["recorded_z"] = (
                        mean_z(view, layers, one.reference, one.positions)
                        if is_mean
                        else last_z(view, layers, one.reference)
                    )
                if batch is not None and one.mode == "resample":
                    new["_draws"] = drawn_prompts(one.reference, batch, one.seed)
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
