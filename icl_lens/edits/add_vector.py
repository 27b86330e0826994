"""A vector added to the residual stream after a layer, or written in its place."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.edit import Edit, Places, Positions, Stage
from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@dataclass(frozen=True, eq=False)
class AddVector(Edit):
    """A vector added to the residual stream after a layer (steering), or written in its place with
    `replace=True`.

    `vector` is [d_model], or [batch d_model] for one per prompt, in residual-stream units.
    `positions` is the prompts' last position, "all" positions, or a list of positions, negative
    from the end of the prompt. It needs the prompts that are run, as `Reweight` does. Tokens may
    follow prompts of one length, as in `model.generate(batch.tokens)`: the last position stays that
    of the prompts, with and without a KV cache. Raise InputError for a vector of the wrong shape or
    with non-finite values, an unknown layer, positions outside a prompt, and passes over other
    prompts.

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
            raise InputError(
                f"vector must be a tensor, got {type(self.vector).__name__}; write "
                "torch.tensor(...)"
            )
        check_integers(layer=self.layer)
        if isinstance(self.positions, str):
            check_choice("positions", self.positions, ("all", "last"))
        else:
            object.__setattr__(self, "positions", tuple(self.positions))
            names = [f"positions[{number}]" for number in range(len(self.positions))]
            check_integers(**dict(zip(names, self.positions, strict=True)))
        if not bool(self.vector.isfinite().all()):
            raise InputError("vector must be finite, got NaN or infinite values")

    stages = (Stage.resid_post,)

    @property
    def description(self) -> str:
        """The edit in words, which stand alone: it has no heads to name before."""
        change = "in place of the residual stream" if self.replace else "added"
        vector = f"a vector {change} after layer {self.layer}"
        if self.positions == "last":
            return vector
        if self.positions == "all":
            return f"{vector} at all positions"
        return f"{vector} at positions {self.positions}"

    needs_batch = True
    at_prompt_end = True

    @property
    def supports_cache(self) -> bool:
        return self.positions == "last"

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        if not 0 <= self.layer < view.n_layers:
            raise InputError(
                f"layer must be between 0 and {view.n_layers - 1} for {view.name}, got "
                f"{self.layer!r}"
            )
        return {self.layer: []}

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        shortest = int(batch.last.min()) + 1
        for edit in edits:
            if tuple(edit.vector.shape) not in ((view.d_model,), (len(batch), view.d_model)):
                raise InputError(
                    f"vector must have shape ({view.d_model},) or ({len(batch)}, {view.d_model}), "
                    f"one per prompt, got {tuple(edit.vector.shape)}"
                )
            listed = () if isinstance(edit.positions, str) else edit.positions
            if not all(-shortest <= position < shortest for position in listed):
                raise InputError(
                    f"positions must be in every prompt, the shortest with {shortest} tokens, got "
                    f"{edit.positions}"
                )
        return edits

    def write_site(self, x: Tensor, at: Places, layer: int) -> None:
        vector = self.vector
        if vector.ndim > 1:
            vector = vector[at.prompt.to(vector.device)]
        vector = vector.to(x)
        places: list[Any] = []
        if self.positions == "all":
            places.append(slice(None))
            vector = vector.unsqueeze(-2)
        else:
            for position in (-1,) if self.positions == "last" else self.positions:
                if int(position) < 0:
                    places.append(at.last + 1 + position)
                else:
                    places.append(torch.full_like(at.last, int(position)))
        for place in places:
            x[at.row, place] = vector if self.replace else x[at.row, place] + vector
