"""Ablation and patching at sites: the residual stream before, within and after a layer, what
attention or FFN adds to it, and neurons of the FFN.

1. `AblateSite` replaces what is there by zero, a mean, or what a drawn prompt has; `PatchSite` by
   what given prompts have (activation patching).
2. Positions are all tokens, the last, listed ones or a role such as "labels" (`site_positions`), so
   that prompts may differ in length.
3. Only some neurons or, with `directions`, only a subspace may be replaced.
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.passes import last_logits
from icl_lens.edits.ablate import Mode, Reference
from icl_lens.edits.edit import Edit, Places, Stage
from icl_lens.edits.reference import drawn_prompts, reference_batches
from icl_lens.edits.site_hooks import check_site, recording_site, site_width, within_columns
from icl_lens.edits.site_positions import (
    SitePlaces,
    SitePositions,
    aligned_places,
    checked_positions,
    places_of,
)
from icl_lens.errors import InputError, check_choice, check_integers, short_repr
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch, check_vocabulary

Site = Literal["resid_pre", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post"]
SITES: tuple[Site, ...] = get_args(Site)

# Largest difference from 0 or 1 of products of columns that count as orthonormal.
ORTHONORMAL_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class SiteEdit(Edit):
    """What edits of sites have in common."""

    site: Site
    layers: int | Iterable[int]
    _: KW_ONLY
    positions: SitePositions = "all"
    neurons: Sequence[int] | None = None
    directions: Float[Tensor, "width direction"] | None = None
    heads = ()
    _places: SitePlaces | None = field(default=None, repr=False)
    """The positions to edit in each prompt; None for the same in all."""
    _values: dict[int, Float[Tensor, "n width"]] = field(default_factory=dict, repr=False)
    """Layer -> what replaces the values: one row, or one per entry of `_places`; {} for zeros."""

    def __post_init__(self) -> None:
        check_choice("site", self.site, SITES)
        layers = [self.layers] if isinstance(self.layers, int) else list(self.layers)
        names = [f"layers[{number}]" for number in range(len(layers))]
        checked_layers = check_integers(**dict(zip(names, layers, strict=True)))
        if not checked_layers:
            raise InputError("layers must contain at least one layer, got none")
        object.__setattr__(self, "layers", tuple(dict.fromkeys(checked_layers)))
        object.__setattr__(self, "positions", checked_positions(self.positions))
        if self.neurons is not None:
            self._check_neurons()
        if self.directions is not None:
            _check_orthonormal(self.directions)

    def _check_neurons(self) -> None:
        if self.site != "mlp_post" or self.directions is not None:
            raise InputError(
                "neurons must be None unless site='mlp_post' without directions, got "
                f"{short_repr(self.neurons)}"
            )
        neurons = list(self.neurons or ())
        names = [f"neurons[{number}]" for number in range(len(neurons))]
        checked = check_integers(**dict(zip(names, neurons, strict=True)))
        if not checked or min(checked) < 0:
            raise InputError(
                f"neurons must be indices from 0, at least one, got {short_repr(self.neurons)}"
            )
        object.__setattr__(self, "neurons", tuple(checked))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage[self.site],)

    @property
    def _layers(self) -> tuple[int, ...]:
        assert isinstance(self.layers, tuple)
        return self.layers

    @property
    def _positions(self) -> str | tuple[int, ...]:
        assert isinstance(self.positions, str | tuple)
        return self.positions

    @property
    def _where(self) -> str:
        """The site, layers and positions in words."""
        layers = ", ".join(map(str, self._layers))
        words = f"{self.site} of layer{'s' * (len(self._layers) > 1)} {layers}"
        if self.neurons is not None:
            words += f" (neurons {', '.join(map(str, self.neurons))})"
        if self.positions == "all":
            return words
        if isinstance(self.positions, str):
            return (
                f"{words} at {'the last position' if self.positions == 'last' else self.positions}"
            )
        return f"{words} at positions {', '.join(map(str, self.positions))}"

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        for layer in self._layers:
            if not 0 <= layer < view.n_layers:
                raise InputError(
                    f"layer must be between 0 and {view.n_layers - 1} for {view.name}, got {layer}"
                )
        return {layer: [] for layer in self._layers}

    def _check_model(self, view: ModelView) -> None:
        """Raise InputError for a site, a layer, neurons or directions that the model lacks."""
        self.by_layer(view)
        site = Stage[self.site]
        check_site(view, site)
        width = site_width(view, site)
        if self.neurons is not None and max(self.neurons) >= width:
            raise InputError(
                f"neurons must be below {width} for {view.name}, got {max(self.neurons)}"
            )
        if self.directions is not None and len(self.directions) != width:
            raise InputError(
                f"directions must have {width} rows at {self.site} of {view.name}, got "
                f"{len(self.directions)}"
            )

    def write_site(self, x: Tensor, at: Places, layer: int) -> None:
        if self._places is None:  # the same value at all tokens
            place: tuple[Any, ...] = (at.row, slice(None))
            if self.positions == "last":
                place = (at.row, at.last)
            x[place] = self._written(x[place], self._value(x, layer))
            return
        prompts = self._places.prompt.to(x.device)
        entry, index = (at.prompt.to(x.device)[:, None] == prompts).nonzero(as_tuple=True)
        position = self._places.position.to(x.device)[index]
        if self.positions == "last":  # also in rows of one token, and where tokens follow
            position = at.last[entry]
        if len(position) and int(position.max()) >= x.shape[1]:
            raise InputError("the forward pass must run `batch`, got shorter prompts")
        place = (at.row[entry], position)
        value = self._value(x, layer)
        x[place] = self._written(x[place], value[index] if len(value) > 1 else value)

    def _value(self, x: Tensor, layer: int) -> Float[Tensor, "n width"]:
        if layer in self._values:
            return self._values[layer].to(x)
        return x.new_zeros(1, x.shape[-1])

    def _written(self, old: Tensor, new: Tensor) -> Tensor:
        """Return what replaces `old`: `new`, or only its neurons or directions."""
        new = new.expand_as(old)
        if self.neurons is None:
            return within_columns(old, new, self.directions)
        neurons = list(self.neurons)
        written = old.clone()
        written[..., neurons] = new[..., neurons]
        return written


def _check_orthonormal(directions: Any) -> None:
    """Raise InputError unless `directions` has orthonormal columns."""
    if not isinstance(directions, Tensor) or directions.ndim != 2:
        raise InputError(
            f"directions must be a tensor [width, direction], got {short_repr(directions)}"
        )
    columns = directions.double()
    error = (columns.T @ columns - torch.eye(columns.shape[1]).to(columns)).abs().max()
    if not float(error) <= ORTHONORMAL_TOLERANCE:
        raise InputError(
            "directions must have orthonormal columns, got products that differ by "
            f"{float(error):.1e}; pass torch.linalg.qr(directions).Q"
        )


@dataclass(frozen=True, eq=False)
class AblateSite(SiteEdit):
    """Ablation at a site: zero, a mean, or another prompt's values take the place of what is there.

    Sites have TransformerLens' names: "resid_pre", "resid_mid" and "resid_post" are the residual
    stream before a layer, between its attention and FFN, and after it; "attn_out" and "mlp_out" are
    what attention and FFN add to it, with their biases; "mlp_post" are the FFN's neurons, of which
    `neurons` selects some. `positions` are "all" tokens, the "last", a list (negative from the
    prompt's end), or a role: "labels", "texts" (of demonstrations), "query" (its text) or
    "separators" (all other tokens before the last).

    `mode="mean"` takes the mean over the tokens of the `reference` prompts at the same positions,
    and "resample" what one reference prompt, drawn for each prompt by its tokens and `seed` (never
    the same prompt), has there, as `PatchSite` does. With `directions` (orthonormal columns), only
    the component in their span is replaced. Roles, listed positions and "resample" need the prompts
    that are run.

    Raise InputError for unknown sites, layers, neurons or positions, for "resid_mid" in models
    whose attention and FFN read the same input, for neurons of a mixture of experts, and for
    directions that are not orthonormal.

    Example:
        >>> sets = [[il.AblateSite("mlp_out", layer, positions="labels")] for layer in (1, 2)]
        >>> il.score(model, batch, sets).shape
        torch.Size([1, 2, 2])
    """

    _: KW_ONLY
    mode: Mode = "zero"
    reference: Reference = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, ("zero", "mean", "resample"))
        check_integers(seed=self.seed)
        if (self.mode == "zero") != (self.reference is None):
            expected = "omitted" if self.mode == "zero" else "given"
            raise InputError(
                f"reference must be {expected} for mode={self.mode!r}, got "
                f"{short_repr(self.reference)}"
            )
        if self.reference is not None:
            object.__setattr__(self, "reference", tuple(reference_batches(self.reference)))

    @property
    def what(self) -> str:
        ablated = {
            "zero": "zeroed",
            "mean": "set to its mean",
            "resample": "set to that of other prompts",
        }[self.mode]
        return f"{self._where} {ablated}"

    @property
    def needs_batch(self) -> bool:
        return self.mode == "resample" or self.positions not in ("all", "last")

    @property
    def supports_cache(self) -> bool:
        return self.positions == "all" and not self.needs_batch

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        prepared: list[Edit] = []
        for edit in edits:
            edit._check_model(view)
            if not edit.needs_batch:
                prepared.append(replace(edit, _values=edit._means(view)))
                continue
            assert batch is not None
            if edit.mode == "resample":
                prepared.append(edit._resampled(view, batch))
                continue
            places = places_of(batch, edit._positions)
            prepared.append(replace(edit, _places=places, _values=edit._means(view)))
        return prepared

    def _means(self, view: ModelView) -> dict[int, Float[Tensor, "1 width"]]:
        """Return layer -> mean over the reference's tokens at the positions; {} for zeros."""
        if self.mode != "mean":
            return {}
        sums: dict[int, Tensor] = {}
        n_tokens = 0
        for reference in self._references:
            places = places_of(reference, self._positions)
            n_tokens += len(places.prompt)
            reading = SiteReading(Stage[self.site], self._layers, places)
            (values,) = record_sites(view, reference, [reading])
            for layer, value in values.items():
                sums[layer] = sums.get(layer, 0.0) + value.double().sum(0, keepdim=True)
        return {layer: total / n_tokens for layer, total in sums.items()}

    @property
    def _references(self) -> tuple[PromptBatch, ...]:
        return cast("tuple[PromptBatch, ...]", self.reference)

    def _resampled(self, view: ModelView, batch: PromptBatch) -> "AblateSite":
        batches = list(self._references)
        if len(batches) > 1:
            raise InputError(
                f"reference must be one batch for mode='resample' at a site, got {len(batches)}"
            )
        reference = batches[0]
        drawn = drawn_prompts(reference, batch, self.seed).tolist()
        places = aligned_places(batch, reference, drawn, self._positions)
        reading = SiteReading(Stage[self.site], self._layers, places)
        (values,) = record_sites(view, reference, [reading])
        return replace(self, _places=places, _values=values)


@dataclass(frozen=True, eq=False)
class PatchSite(SiteEdit):
    """What other prompts have at a site, written in its place (activation patching).

    `site`, `layers`, `positions`, `neurons` and `directions` are those of `AblateSite`. Prompt i of
    the batch takes the values of prompt i of `source`, or of its only prompt. At a role, stretches
    of tokens are paired in order (the second text with the second text), and their tokens from the
    end, so that prompts may differ in length; a token without a counterpart keeps its value.
    `source` is run once, without other edits. The edit needs the prompts that are run.

    Raise InputError as `AblateSite` does, and for sources that do not match: another number of
    prompts or demonstrations or, for "all" positions, of tokens.

    Example:
        >>> donor = il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :")
        >>> patches = [
        ...     il.PatchSite("resid_post", layer, il.tokenize(model, donor), positions="query")
        ...     for layer in range(3)
        ... ]
        >>> il.score(model, batch, [[patch] for patch in patches]).shape
        torch.Size([1, 3, 2])
    """

    source: PromptBatch | None = None
    _: KW_ONLY
    needs_batch = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_batch(self.source, "source")

    @property
    def what(self) -> str:
        return f"{self._where} patched"

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        by_source: dict[int, list[PatchSite]] = {}
        for edit in edits:
            edit._check_model(view)
            by_source.setdefault(id(edit.source), []).append(edit)
        prepared: dict[int, Edit] = {}
        for group in by_source.values():
            for edit, with_values in zip(group, _with_values(view, batch, group), strict=True):
                prepared[id(edit)] = with_values
        return [prepared[id(edit)] for edit in edits]

    def is_only_last(self, batch: PromptBatch) -> bool:
        return self.positions == "last"


def _with_values(
    view: ModelView, batch: PromptBatch, patches: Sequence[PatchSite]
) -> list[PatchSite]:
    """Return patches from one source with the values that they write, recorded in one run of it."""
    source = patches[0].source
    assert source is not None
    if len(source) not in (1, len(batch)):
        raise InputError(
            f"source must have one prompt or one per prompt of the batch, {len(batch)}, got "
            f"{len(source)}"
        )
    source_rows = range(len(batch)) if len(source) > 1 else [0] * len(batch)
    places_at: dict[object, SitePlaces] = {}
    layers_at: dict[tuple[Stage, object], set[int]] = {}
    for patch in patches:
        if patch.positions not in places_at:
            places = aligned_places(batch, source, source_rows, patch._positions)
            places_at[patch.positions] = places
        layers_at.setdefault((Stage[patch.site], patch.positions), set()).update(patch._layers)
    readings = []
    for (site, positions), layers in layers_at.items():
        readings.append(SiteReading(site, tuple(sorted(layers)), places_at[positions]))
    recorded = dict(zip(layers_at, record_sites(view, source, readings), strict=True))
    with_values = []
    for patch in patches:
        values = recorded[Stage[patch.site], patch.positions]
        of_layers = {layer: values[layer] for layer in patch._layers}
        with_values.append(replace(patch, _places=places_at[patch.positions], _values=of_layers))
    return with_values


@dataclass(frozen=True, eq=False)
class SiteReading:
    """What to record of a run: a site of some layers, at the source positions of places."""

    site: Stage
    layers: tuple[int, ...]
    places: SitePlaces


def record_sites(
    view: ModelView, source: PromptBatch, readings: Sequence[SiteReading]
) -> list[dict[int, Float[Tensor, "n width"]]]:
    """Run prompts without edits and return, for each reading, layer -> its values at places."""
    check_vocabulary(view.model, source, "source")
    pieces: list[dict[int, list[Tensor]]] = []
    for reading in readings:
        pieces.append({layer: [] for layer in reading.layers})
    orders: list[list[Tensor]] = [[] for _ in readings]
    rows = torch.arange(len(source))
    for piece_rows in rows.split(rows_at_once(view, source.tokens.shape[1])):
        first, last = int(piece_rows[0]), int(piece_rows[-1])
        hooks: list[tuple[str, Any]] = []
        for number, reading in enumerate(readings):
            places = reading.places
            is_in_piece = (places.source_prompt >= first) & (places.source_prompt <= last)
            (entries,) = is_in_piece.nonzero(as_tuple=True)
            orders[number].append(entries)
            row, position = places.source_prompt[entries] - first, places.source_position[entries]
            for layer in reading.layers:
                keep = partial(_keep_at, pieces[number][layer], row, position)
                hooks += recording_site(view, layer, reading.site, keep)
        with edits_disabled(view):
            last_logits(view.model, source[piece_rows.tolist()], hooks)
    recorded = []
    for by_layer, order in zip(pieces, orders, strict=True):
        place = torch.cat(order).argsort()
        recorded.append({layer: torch.cat(values)[place] for layer, values in by_layer.items()})
    return recorded


def _keep_at(kept: list[Tensor], row: Tensor, position: Tensor, x: Tensor) -> None:
    """Add what is at some positions of a pass to a list."""
    kept.append(x[row.to(x.device), position.to(x.device)])
