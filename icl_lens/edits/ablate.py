"""Ablation of heads: zeros, a mean, or another prompt's values take the place of what they
compute.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from numbers import Real
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edit import Edit, Places, Positions, Stage
from icl_lens.edits.reference_prompts import (
    drawn_prompts,
    last_z,
    mean_z,
    reference_batches,
    warn_of_same_pairs,
)
from icl_lens.errors import InputError, check_choice, check_integers, short_repr
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

    `mode="zero"` sets z to zero, "mean" to its mean over all tokens of the `reference` prompts or,
    with `positions="last"`, over their last tokens, and "resample", with `positions="last"`, to
    that at the last token of one reference prompt, drawn for each prompt by its tokens and `seed`
    (never the same prompt). No edits are active in passes over the reference. Pass several batches
    for a mean over all prompts of several tasks: a mean over one task of pairs
    keeps what heads do in all its prompts, so there is a warning. `positions="last"` edits only
    each prompt's last position, "labels" all tokens of the labels in the demonstrations, which
    needs the prompts that are run, and a list the tokens at these positions of every prompt,
    negative ones from its end. `strength` interpolates: 1 replaces z, 0 keeps it, 0.3 moves it by
    30 %; one number for all heads, or one per head (soft gates). A zeroed head's output is
    thus scaled by 1 − strength: −1 doubles it. `AblateSite` ablates the residual
    stream, attention and FFN outputs, and neurons.

    Raise InputError for an unknown head, mode or positions, positions outside a prompt, a mean
    without `reference` or with non-finite values, a `reference` for zeros, and strengths that are
    not finite or not one per head.

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
    positions: Positions | Literal["labels"] | Sequence[int] = "all"
    seed: int = 0
    strength: float | Sequence[float] | Float[Tensor, "*head"] = 1.0
    recorded_z: LayerZ | None = field(default=None, repr=False)
    """What takes the place of z, once recorded."""
    _draws: Int[Tensor, " drawn"] | None = field(default=None, repr=False)
    """For each prompt, the recorded prompt that is drawn for it."""
    _label_mask: Bool[Tensor, "batch pos"] | None = field(default=None, repr=False)
    """For each prompt, which positions are tokens of labels."""
    _strength_of: Mapping[Head, float] = field(default_factory=dict, repr=False)
    """The strength of each head, if they differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "strength", self._checked_strength())
        (seed,) = check_integers(seed=self.seed)
        object.__setattr__(self, "seed", seed)
        if isinstance(self.positions, str):
            check_choice("positions", self.positions, ("all", "last", "labels"))
        else:
            object.__setattr__(self, "positions", _position_tuple(self.positions))
        check_choice("mode", self.mode, ("zero", "mean", "resample"))
        if self.mode == "zero" and self.reference is not None:
            raise InputError(
                f"reference must be omitted for mode='zero', got {type(self.reference).__name__}"
            )
        if self.mode != "zero" and self.reference is None:
            raise InputError(f"reference must be given for mode={self.mode!r}, got None")
        if self.mode == "resample" and self.positions != "last":
            raise InputError(
                f"positions must be 'last' for mode='resample', got "
                f"{short_repr(self.positions)}; prompts "
                "differ in length"
            )
        if self.reference is not None and not isinstance(self.reference, PromptBatch):
            object.__setattr__(self, "reference", tuple(reference_batches(self.reference)))

    def _checked_strength(self) -> float | tuple[float, ...]:
        """Return the strength as a number, or as one per head; raise InputError for other
        values.
        """
        n_heads = len(tuple(self.heads))
        is_number = isinstance(self.strength, Real) or getattr(self.strength, "ndim", 1) == 0
        strengths: tuple[Any, ...] = (self.strength,)
        if not is_number:
            strengths = tuple(cast("Sequence[float]", self.strength))
        is_finite = all(
            isinstance(strength, Real | Tensor) and math.isfinite(strength)
            for strength in strengths
        )
        if not is_finite or (not is_number and len(strengths) != n_heads):
            raise InputError(
                f"strength must be a finite number, or one per head, {n_heads}, got "
                f"{self.strength!r}"
            )
        return float(strengths[0]) if is_number else tuple(map(float, strengths))

    stages = (Stage.removal,)

    @property
    def description(self) -> str:
        if self.mode == "zero" and isinstance(self.strength, float) and self.strength != 1:
            return f"scaled by {1 - self.strength:g}{self._where}"
        ablated = {
            "zero": "zeroed",
            "mean": "set to their mean",
            "resample": "set to those of other prompts",
        }[self.mode]
        strength = "" if self.strength == 1 else f" with strength {self.strength}"
        return ablated + strength + self._where

    @property
    def _where(self) -> str:
        """The positions in words, with a space before them; nothing for all positions."""
        if isinstance(self.positions, str):
            return {"all": "", "last": " at the last position", "labels": " at the labels"}[
                self.positions
            ]
        return f" at positions {', '.join(map(str, self.positions))}"

    @property
    def supports_cache(self) -> bool:
        return self.positions == "all"

    @property
    def needs_batch(self) -> bool:
        return self.mode == "resample" or self.positions == "labels"

    @property
    def write_key(self) -> object:
        if type(self) is not Ablate or self._strength_of:
            return id(self)
        return (
            self.positions,
            self.strength,
            id(self.recorded_z),
            id(self._draws),
            id(self._label_mask),
        )

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence["Ablate"], batch: PromptBatch | None
    ) -> Sequence["Ablate"]:
        groups: dict[tuple[object, ...], list[Ablate]] = {}
        for edit in edits:
            references = edit.reference if isinstance(edit.reference, tuple) else (edit.reference,)
            key = (edit.mode, *map(id, references), edit.positions, edit.seed, id(edit.recorded_z))
            groups.setdefault(key, []).append(edit)
        recorded: dict[int, Ablate] = {}
        for group in groups.values():
            recording = cls._recording(view, group, batch)
            for edit in group:
                recorded[id(edit)] = replace(edit, **recording) if recording else edit
        mask = None
        if batch is not None and any(edit.positions == "labels" for edit in edits):
            mask = _label_mask(batch)
        prepared = []
        for edit in edits:
            edit = recorded[id(edit)]
            if edit.positions == "labels":
                edit = replace(edit, _label_mask=mask)
            prepared.append(edit._with_strengths(view))
        return prepared

    @classmethod
    def _recording(
        cls, view: ModelView, group: Sequence["Ablate"], batch: PromptBatch | None
    ) -> dict[str, Any]:
        """Return values for the fields `recorded_z` and `_draws` of a group of ablations, which have
        the same mode, reference and positions: the reference is run once for the whole group.
        """
        ablation = group[0]
        reference = ablation.reference
        recording: dict[str, Any] = {}
        if reference is None:
            return recording
        if ablation.recorded_z is None:
            if batch is not None:
                warn_of_same_pairs(batch, reference, stacklevel=4)
            layers = sorted(set(chain.from_iterable(edit.by_layer(view) for edit in group)))
            if ablation.mode == "mean":
                positions = "last" if ablation.positions == "last" else "all"
                recording["recorded_z"] = mean_z(view, layers, reference, positions)
            else:
                recording["recorded_z"] = last_z(view, layers, reference)
        if batch is not None and ablation.mode == "resample":
            recording["_draws"] = drawn_prompts(reference, batch, ablation.seed)
        return recording

    def _with_strengths(self, view: ModelView) -> "Ablate":
        if isinstance(self.strength, int | float):
            return self
        heads = [view.check_head(head) for head in self.heads]
        return replace(self, _strength_of=dict(zip(heads, self.strength, strict=True)))

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        if self.positions == "last":
            place: tuple[Any, ...] = (at.row, at.last, at.head)
        elif self.positions == "all":
            place = (at.row, slice(None), at.head)
        else:
            entry, position = self._entries(at, z.shape[1])
            at = Places(*(indices[entry] for indices in at))
            place = (at.row, position, at.head)
        value: Any = 0.0
        if self.recorded_z is not None:
            recorded_prompt = torch.zeros_like(at.prompt)
            if self._draws is not None:
                recorded_prompt = self._draws.to(z.device)[at.prompt]
            value = self.recorded_z[layer][recorded_prompt, at.head].to(z)
            if self.positions == "all":
                value = value[:, None]
        if self.strength != 1:
            strength: Any = self.strength
            if self._strength_of:
                strengths = [self._strength_of[Head(layer, head)] for head in at.head.tolist()]
                strength = z.new_tensor(strengths).reshape(-1, *[1] * (z[place].ndim - 1))
            value = z[place] + strength * (value - z[place])
        z[place] = value

    def _entries(
        self, at: Places, width: int
    ) -> tuple[Int[Tensor, " edited"], Int[Tensor, " edited"]]:
        """Return every pair of an entry of `at` and a position to edit in its row, as two tensors
        of indices.

        Raise InputError for listed positions outside a prompt.
        """
        if self._label_mask is not None:
            entry, position = self._label_mask.to(at.row.device)[at.prompt, :width].nonzero(
                as_tuple=True
            )
            return entry, position
        listed = torch.tensor(self.positions, device=at.row.device)
        positions = torch.where(listed < 0, at.last[:, None] + 1 + listed, listed)
        if bool(((positions < 0) | (positions > at.last[:, None])).any()):
            raise InputError(
                f"positions must be in every prompt, the shortest with {int(at.last.min()) + 1} "
                f"tokens, got {self.positions}"
            )
        entry = torch.arange(len(positions), device=positions.device)[:, None].expand_as(positions)
        return entry.flatten(), positions.flatten()


def _position_tuple(positions: object) -> tuple[int, ...]:
    """Return listed positions as a tuple; raise InputError unless they are different integers."""
    if not isinstance(positions, Iterable):
        raise InputError(
            f"positions must be 'all', 'last', 'labels' or a list of positions, got "
            f"{short_repr(positions)}"
        )
    listed = tuple(positions)
    checked = check_integers(
        **{f"positions[{number}]": position for number, position in enumerate(listed)}
    )
    if not listed or len(set(listed)) < len(listed):
        raise InputError(
            f"positions must be different positions, at least one, got {short_repr(list(listed))}"
        )
    return tuple(checked)


def _label_mask(batch: PromptBatch) -> Bool[Tensor, "batch pos"]:
    """Return which positions of each prompt are tokens of labels; raise InputError for prompts that
    show no label.
    """
    tokens = batch.all_label_positions.flatten(1)
    if not bool((tokens >= 0).any()):
        raise InputError(
            "positions must be 'all', 'last' or a list for prompts without demonstrations, got "
            "'labels'"
        )
    mask = torch.zeros(
        len(batch), batch.tokens.shape[1] + 1, dtype=torch.bool, device=tokens.device
    )
    mask.scatter_(1, tokens.masked_fill(tokens < 0, batch.tokens.shape[1]), value=True)
    return mask[:, :-1]
