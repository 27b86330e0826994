"""Ablation and patching at sites: the residual stream before, within and after a layer, what
attention or FFN adds to it, and neurons of the FFN.

1. `AblateSite` replaces what is there by zero, a mean, or what a drawn prompt has; `PatchSite` by
   what given prompts have (activation patching).
2. Positions are all tokens, the last, listed ones or a role such as "labels" (`site_positions`), so
   that prompts may differ in length.
3. Only some neurons or, with `directions`, only a subspace may be replaced.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.ablate import Mode, Reference
from icl_lens.edits.edit import Edit, Places, Stage
from icl_lens.edits.reference_prompts import (
    drawn_prompts,
    finite_means,
    reference_batches,
    warn_of_same_pairs,
)
from icl_lens.edits.site_hooks import check_site, recording_site, site_width, within_columns
from icl_lens.edits.site_positions import (
    SitePlaces,
    SitePositions,
    aligned_places,
    checked_positions,
    first_changes,
    first_positions,
    places_of,
)
from icl_lens.errors import InputError, check_choice, check_integers, short_repr
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, check_vocabulary
from icl_lens.reading.last_logits import last_logits

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
    _first_changes: Int[Tensor, " prompt"] | None = field(default=None, repr=False)
    """The first position of each prompt that changes; None if it is not known."""

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
    def _place(self) -> "SitePlace":
        return Stage[self.site], self._positions

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

    def first_changes(self, batch: PromptBatch) -> Int[Tensor, " prompt"]:
        return super().first_changes(batch) if self._first_changes is None else self._first_changes

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
        """Write the values, at all tokens of the rows or at the listed places of their prompts.

        `at` says which rows of the pass are edited and which prompt each belongs to; `_places` says
        which positions of these prompts, and pairs each entry of `at` with those of its prompt.
        """
        if self._places is None:  # the same value at all tokens
            place: tuple[Any, ...] = (at.row, slice(None))
            if self.positions == "last":
                place = (at.row, at.last)
            x[place] = self._written(x[place], self._value(x, layer))
            return
        prompts = self._places.prompt.to(x.device)
        entry, index = (at.prompt.to(x.device)[:, None] == prompts).nonzero(as_tuple=True)
        position = self._places.position.to(x.device)[index] - at.first[entry]
        if self.positions == "last":  # also in rows of one token, and where tokens follow
            position = at.last[entry]
        # A row that begins later (`Places.first`) begins where its source has other values.
        is_run = position >= 0
        entry, index, position = entry[is_run], index[is_run], position[is_run]
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
    the same prompt), has there, as `PatchSite` does. As with `Ablate`, pass several batches for a
    mean over several tasks: the mean over one task of pairs keeps the task (`SamePairsWarning`).
    With `directions` (orthonormal columns), only the component in their span is replaced. Roles,
    listed positions and "resample" need the prompts that are run.

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
    def description(self) -> str:
        ablated = {
            "zero": "zeroed",
            "mean": "set to its mean",
            "resample": "set to that of other prompts",
        }[self.mode]
        return f"{self._where} {ablated}"

    @property
    def _references(self) -> tuple[PromptBatch, ...]:
        return cast("tuple[PromptBatch, ...]", self.reference or ())

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
        groups: dict[tuple[object, ...], list[AblateSite]] = {}
        for edit in edits:
            edit._check_model(view)
            key = (edit.mode, edit.seed, *map(id, edit._references))
            groups.setdefault(key, []).append(edit)
        prepared: dict[int, Edit] = {}
        for group in groups.values():
            for edit, ready in zip(group, _ready_ablations(view, batch, group), strict=True):
                prepared[id(edit)] = ready
        return [prepared[id(edit)] for edit in edits]


def _ready_ablations(
    view: ModelView, batch: PromptBatch | None, ablations: Sequence[AblateSite]
) -> Sequence[SiteEdit]:
    """Return ablations of one mode and reference, ready to write: with the places of their
    positions and, unless they write zero, with what they write there, from one run of the
    reference.
    """
    mode, references = ablations[0].mode, ablations[0]._references
    if batch is not None and references:
        warn_of_same_pairs(batch, references, stacklevel=4)
    if mode == "resample":
        assert batch is not None
        return _with_resampled_values(view, batch, ablations)
    if mode == "mean":
        ablations = _with_means(view, ablations)
    places_at: dict[object, SitePlaces | None] = {}
    firsts_at: dict[object, Tensor | None] = {}
    ready = []
    for ablation in ablations:
        positions = ablation._positions
        if positions not in places_at:
            places, firsts = None, None
            if ablation.needs_batch:
                assert batch is not None
                places = places_of(batch, positions)
                firsts = first_positions(batch, places.prompt, places.position)
            places_at[positions], firsts_at[positions] = places, firsts
        ready.append(
            replace(ablation, _places=places_at[positions], _first_changes=firsts_at[positions])
        )
    return ready


def _with_resampled_values(
    view: ModelView, batch: PromptBatch, ablations: Sequence[AblateSite]
) -> Sequence[SiteEdit]:
    """Return ablations with what the prompts drawn from their reference have."""
    references = list(ablations[0]._references)
    if len(references) > 1:
        raise InputError(
            f"reference must be one batch for mode='resample' at a site, got {len(references)}"
        )
    drawn = drawn_prompts(references[0], batch, ablations[0].seed).tolist()
    return _with_values(view, batch, ablations, references[0], drawn)


def _with_means(view: ModelView, ablations: Sequence[AblateSite]) -> list[AblateSite]:
    """Return ablations with the means over the tokens of their reference at the positions."""
    layers_at = _layers_at(ablations)
    sums: list[dict[int, Tensor]] = [{} for _ in layers_at]
    n_tokens = [0] * len(layers_at)

    def add(number: int, layer: int, entries: Tensor, values: Tensor) -> None:
        total = values.double().sum(0, keepdim=True)
        sums[number][layer] = sums[number].get(layer, 0.0) + total

    for reference in ablations[0]._references:
        readings = []
        for number, ((site, positions), layers) in enumerate(layers_at.items()):
            places = places_of(reference, positions)
            n_tokens[number] += len(places.prompt)
            readings.append(SiteReading(site, layers, places))
        with edits_disabled(view):
            read_sites(view, reference, readings, add)
    means: dict[SitePlace, dict[int, Tensor]] = {}
    for place, by_layer, n in zip(layers_at, sums, n_tokens, strict=True):
        means[place] = finite_means({layer: total / n for layer, total in by_layer.items()})
    with_means = []
    for ablation in ablations:
        of_place = means[ablation._place]
        values = {layer: of_place[layer] for layer in ablation._layers}
        with_means.append(replace(ablation, _values=values))
    return with_means


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
    def description(self) -> str:
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
            source = cast(PromptBatch, group[0].source)
            if len(source) not in (1, len(batch)):
                raise InputError(
                    "source must have one prompt or one per prompt of the batch, "
                    f"{len(batch)}, got {len(source)}"
                )
            source_rows = range(len(batch)) if len(source) > 1 else [0] * len(batch)
            with_values = _with_values(view, batch, group, source, source_rows)
            for edit, ready in zip(group, with_values, strict=True):
                prepared[id(edit)] = ready
        return [prepared[id(edit)] for edit in edits]


SitePlace = tuple[Stage, str | tuple[int, ...]]
"""A site and positions."""


def _layers_at(edits: Sequence[SiteEdit]) -> dict[SitePlace, tuple[int, ...]]:
    """Return the layers that edits change, by site and positions."""
    layers_at: dict[SitePlace, set[int]] = {}
    for edit in edits:
        layers_at.setdefault(edit._place, set()).update(edit._layers)
    return {place: tuple(sorted(layers)) for place, layers in layers_at.items()}


def _with_values(
    view: ModelView,
    batch: PromptBatch,
    edits: Sequence[SiteEdit],
    source: PromptBatch,
    source_rows: Sequence[int],
) -> list[SiteEdit]:
    """Return edits with the values that they write, recorded in one run of their source.

    `source_rows` has the row of each prompt's source.
    """
    layers_at = _layers_at(edits)
    places_at: dict[object, SitePlaces] = {}
    firsts_at: dict[object, Tensor] = {}
    readings = []
    for (site, positions), layers in layers_at.items():
        if positions not in places_at:
            places = aligned_places(batch, source, source_rows, positions)
            places_at[positions] = places
            firsts_at[positions] = first_changes(batch, source, places)
        readings.append(SiteReading(site, layers, places_at[positions]))
    with edits_disabled(view):
        values_at = record_sites(view, source, readings)
    recorded = dict(zip(layers_at, values_at, strict=True))
    with_values = []
    for edit in edits:
        values = {layer: recorded[edit._place][layer] for layer in edit._layers}
        positions = edit._positions
        with_values.append(
            replace(
                edit,
                _places=places_at[positions],
                _values=values,
                _first_changes=firsts_at[positions],
            )
        )
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
    """Run prompts and return, for each reading, a dict from layer to what the site has there, with
    a row for each place: what it has at the place's source position.
    """
    recorded: list[dict[int, Tensor]] = [{} for _ in readings]

    def keep(number: int, layer: int, entries: Tensor, values: Tensor) -> None:
        if layer not in recorded[number]:
            n_places = len(readings[number].places.source_prompt)
            recorded[number][layer] = values.new_empty(n_places, values.shape[-1])
        # these places are in the prompts of one piece of the run; others fill in the rest
        recorded[number][layer][entries.to(values.device)] = values

    read_sites(view, source, readings, keep)
    return recorded


def read_sites(
    view: ModelView,
    source: PromptBatch,
    readings: Sequence[SiteReading],
    read: Callable[[int, int, Int[Tensor, " entry"], Float[Tensor, "entry width"]], None],
) -> None:
    """Run prompts, a few at a time, and call `read` with the number of each reading, the layer, the
    entries of its places that were run, and the values there.
    """
    check_vocabulary(view.model, source, "source")

    def read_at(number: int, layer: int, entries: Tensor, at: Any, x: Tensor) -> None:
        row, position = at
        read(number, layer, entries, x[row.to(x.device), position.to(x.device)])

    rows = torch.arange(len(source))
    for piece_rows in rows.split(rows_at_once(view, source.tokens.shape[1])):
        first, last = int(piece_rows[0]), int(piece_rows[-1])
        hooks: list[tuple[str, Any]] = []
        for number, reading in enumerate(readings):
            places = reading.places
            is_in_piece = (places.source_prompt >= first) & (places.source_prompt <= last)
            (entries,) = is_in_piece.nonzero(as_tuple=True)
            at = places.source_prompt[entries] - first, places.source_position[entries]
            for layer in reading.layers:
                reader = partial(read_at, number, layer, entries, at)
                hooks += recording_site(view, layer, reading.site, reader)
        last_logits(view.model, source[piece_rows.tolist()], hooks)
