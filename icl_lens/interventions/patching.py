"""Giving chosen heads the queries, keys, values, patterns or z that they have on another prompt."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import Positions, group, heads_of
from icl_lens.interventions.editor import Attention, Edit, Stage, asleep, editing
from icl_lens.interventions.pattern import Inputs, LayerValues, layer_hooks, score_inputs
from icl_lens.interventions.probe import check_moves, check_understood
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

What = Literal["q", "k", "v", "pattern", "z"]


@contextmanager
def patch_heads(
    model: Any,
    heads: Iterable[Head | tuple[int, int]],
    source: PromptBatch,
    *,
    what: What,
    positions: Positions = "all",
) -> Iterator[None]:
    """Gives chosen heads what they have on other prompts, position by position.

    `"q"`, `"k"`: queries or keys, after their norm where a family has one, before rotation; `"v"`: values; the pattern
    follows from the patched ones. `"pattern"`: attention probabilities. `"z"`: the weighted sum of values. With grouped
    queries only the chosen heads see the patched keys or values. Row i of a pass gets row i of `source`; one source
    prompt serves all rows. `source` is run once, on entering, as if no other block were there.

    Source and prompt must have the same number of tokens. `positions="last"` patches the last position only (queries,
    pattern rows, z); queries and z may then come from prompts of another length. Warns once if a head does not reach
    the logits. Raises InputError for a head the model does not have, what does not fit, and families whose attention
    cannot be recomputed.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> with il.patch_heads(model, [il.Head(2, 0)], other, what="q", positions="last"):
        ...     patched = il.label_log_probs(model, batch)
        >>> patched.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    by_layer = group(view, heads)
    check_choice("what", what, ("q", "k", "v", "pattern", "z"))
    check_choice("positions", positions, ("all", "last"))
    if positions == "last" and what in ("k", "v"):
        raise InputError(f"what={what!r} is read at every position; patch it with positions='all'")
    if what != "z":
        check_understood(view, by_layer)
    sources = _record(view, by_layer, source, what)
    free = positions == "last" and what in ("q", "z")

    def fit(target: Tensor, value: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Source values with a row for each row of the pass, and where its rows end."""
        rows = len(target)
        if len(source) not in (1, rows):
            raise InputError(f"the source has {len(source)} prompts, and the forward pass {rows} rows; give as many")
        end = source.last.to(target.device).expand(rows)
        if not free and (value.shape[1] != target.shape[1] or not torch.equal(end, last)):
            raise InputError(
                f"source and prompt differ in their number of tokens ({_ends(end)} and {_ends(last)}), so that "
                f"positions do not correspond; use prompts of the same length"
                + (", or positions='last'" if what in ("q", "z") else "")
            )
        return value.expand(rows, *value.shape[1:]).to(target), end

    def write(target: Tensor, value: Tensor, places: list[int], last: Tensor) -> None:
        """target [batch pos head …] gets value [source pos chosen …] at the places."""
        value, end = fit(target, value, last)
        if positions == "all":
            target[:, :, places] = value
        else:
            every = torch.arange(len(target), device=target.device)
            at = torch.tensor(places, device=target.device)
            target[every[:, None], last[:, None], at] = value[every, end]

    def patch(work: Attention, indices: list[int], layer: int) -> None:
        places, found = work.places(indices), sources[layer]
        if what == "v":
            work.v = work.v.clone()
            write(work.v, found["v"], places, work.last)
        elif what == "pattern":
            assert work.pattern is not None
            write(work.pattern.transpose(1, 2), found["pattern"].transpose(1, 2), places, work.last)
        else:
            work.rescored.update(places)
            for name in (what, f"{what}_share"):
                old = getattr(work.inputs, name)
                if old is not None:
                    new = old.clone()
                    write(new, found[name], places, work.last)
                    setattr(work.inputs, name, new)

    def patch_z(z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        write(z, sources[layer]["z"], indices, last)

    stage = {"pattern": Stage.pattern, "z": Stage.z}.get(what, Stage.inputs)
    check_moves(view, heads_of(by_layer))
    with editing(view, Edit(stage, by_layer, patch_z if what == "z" else patch)):
        yield


def _ends(last: Tensor) -> str:
    lengths = sorted({int(end) + 1 for end in last})
    return "/".join(map(str, lengths))


def _record(
    view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, what: What
) -> dict[int, dict[str, Tensor]]:
    """Layer -> what its chosen heads have on the source prompts, by name."""
    values = {layer: LayerValues(view, layer, source.attention_mask.bool()) for layer in by_layer}

    def keeper(layer: int, name: str) -> Callable[..., None]:
        def hook_fn(value: Tensor, hook: Any) -> None:
            values[layer].see(name, value.detach())

        return hook_fn

    hooks = []
    for layer in by_layer:
        names = {"z": view.hook(layer, "attn.hook_z")} if what == "z" else layer_hooks(view, layer)
        hooks += [(hook, keeper(layer, name)) for name, hook in names.items()]
    with torch.no_grad(), asleep(view), view.model.hooks(fwd_hooks=hooks):
        view.model(source.tokens, attention_mask=source.attention_mask, return_type="logits")
    found = {}
    for layer, chosen in by_layer.items():
        seen = values[layer].seen
        if what == "z":
            found[layer] = {"z": seen["z"][:, :, chosen]}
        elif what == "v":
            found[layer] = {"v": values[layer].heads("v", chosen)}
        elif what == "pattern":
            found[layer] = {"pattern": seen["pattern"][:, chosen]}
        else:
            inputs: Inputs = score_inputs(values[layer], chosen)
            names = (what, f"{what}_share")
            found[layer] = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    return found
