"""Edge attribution patching (EAP) and integrated gradients (EAP-IG) of the edges that `il.locate_circuit` ranks.

EAP estimates what is lost when a writer's output u is replaced by its mean, as read by a reader's query, keys or values:

    (u − mean u) · ∂m/∂x

m are the answer's log-odds, and x is the reader's own copy of the residual stream at the tokens of the edge's role,
which it reads once for queries, once for keys and once for values. Only its output at `reader_at` depends on them, as
in `il.head_to_head_effects`. EAP-IG averages the gradient over steps k = 1 … n of a path from replaced (0) to intact
(1):

- "inputs": the model's embeddings are mean + k/n (own − mean), and everything follows from them.
- "readers": x of all readers is mean + k/n (own − mean), each from the intact pass; everything later responds. With many
  steps, the estimates of all edges sum to what they jointly carry.

Source: EAP: Syed et al. (arXiv 2310.10348); EAP-IG: Hanna et al. (arXiv 2403.17806), "inputs"; the path of activations
in MIB (arXiv 2504.13151), "readers". Only the formulas are theirs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from icl_lens.activations.activations import Activations
from icl_lens.attribution.head_projection import HeadProjection, require_writers
from icl_lens.edits.edges import capture_pieces, positions_in
from icl_lens.edits.edit import PARTS
from icl_lens.edits.reader import Means, Reader
from icl_lens.measures.head_to_head_effects import log_odds_gradients
from icl_lens.models.inference import replace_forwards
from icl_lens.models.view import ModelView
from icl_lens.prompts.roles import EdgeRole, role_masks

Path = Literal["inputs", "readers"]


def attribute_edges(
    model: Any,
    batch: il.PromptBatch,
    readers: Sequence[il.Head],
    means: Means,
    *,
    path: Path | None = None,
    steps: int = 5,
    reader_at: EdgeRole = "last",
) -> dict[il.Head, Float[Tensor, "batch part edge_role _"]]:
    """Return EAP's estimates or, with a path, those of EAP-IG, in the form of `estimate_effects`, nats."""
    view, masks = ModelView.of(model), role_masks(batch)
    places = positions_in(role_masks(batch, [reader_at])[:, 0])
    found: dict[il.Head, list[Tensor]] = {head: [] for head in readers}
    for acts, prompts in capture_pieces(model, batch, "all"):
        edges = [_Edges(acts, Reader(acts, head, means, places[prompts])) for head in readers]
        for number in range(1, steps + 1) if path else [1]:
            _add_gradients(view, acts, edges, path, number / steps if path else 1.0)
        for one in edges:
            found[one.reader.head].append(one.estimates(masks[prompts]) / (steps if path else 1))
    return {head: torch.cat(pieces) for head, pieces in found.items()}


class _Edges:
    """A reader in intact passes, and the sum of its inputs' gradients over the steps of a path."""

    def __init__(self, acts: Activations, reader: Reader) -> None:
        assert reader.means is not None
        self.reader, self.writers = reader, require_writers(acts)
        self.x = self.writers.resid_pre[:, reader.head.layer].to(reader.q)
        self.change = change_of_writers(acts, reader.means, reader.head.layer)
        self.gradient = self.x.new_zeros(len(self.x), len(PARTS), self.x.shape[1])

    def z_from(self, x: Float[Tensor, "row d_model"]) -> tuple[list[Tensor], Float[Tensor, "batch place d_head"]]:
        """Return a copy of the layer's input for queries, keys and values each, and z as a function of these."""
        reader, found = self.reader, []
        copies = [x.detach().clone().requires_grad_(True) for _ in PARTS]
        for part, copy in zip(PARTS, copies, strict=True):
            at = reader.places if part == "q" else reader.key_positions
            projection = HeadProjection(reader.acts, reader.head, part, at)
            value = projection.rotate(projection.project(copy[projection.rows]), at)[:, :, None]
            found.append(value * projection.scoring.scale if part == "q" else value)
        return copies, reader.z_from(*found)[:, 0]

    def estimates(self, masks: Tensor) -> Float[Tensor, "batch part edge_role writer"]:
        """Return the dot products of gradients and changes, summed over each role's tokens."""
        of_row = einsum(self.gradient, self.change, "row part d, row writer d -> row part writer")
        rows = self.writers.row
        at = masks.to(rows.device)[..., : rows.shape[1]] & (rows >= 0)[:, None]
        return einsum(at.to(of_row), of_row[rows.clamp(min=0)], "batch role pos, batch pos part writer -> batch part role writer")


def change_of_writers(acts: Activations, means: Means, layer: int) -> Float[Tensor, "row writer d_model"]:
    """Return what each writer adds to a layer's input, minus its mean over tokens of the same role."""
    writers = require_writers(acts)
    role = torch.zeros(len(writers.z), dtype=torch.long, device=writers.row.device)
    is_kept = writers.row >= 0
    role[writers.row[is_kept]] = acts.batch.role_indices.to(role.device)[:, : is_kept.shape[1]][is_kept]
    u = writers.vectors(torch.arange(len(role), device=role.device), layer)[:, :-1]
    return u - means[:, : u.shape[1]].to(u)[role]


def _add_gradients(view: ModelView, acts: Activations, edges: Sequence[_Edges], path: Path | None, share: float) -> None:
    """Add the gradients of every reader's inputs at one step; run one forward and one backward pass."""
    row, inputs = require_writers(acts).row, dict[int, Tensor]()
    outer, own = list[tuple[str, Any]](), {one.reader.head: one.x for one in edges}
    if path == "inputs":
        moved = acts.writers.resid_pre[:, 0] - (1 - share) * change_of_writers(acts, edges[0].reader.means, 0).sum(1)
        outer.append((view.hook(0, "hook_resid_pre"), lambda x, hook: torch.where(row[..., None] < 0, x, moved[row].to(x))))
    if path == "readers":
        own = {one.reader.head: one.x - (1 - share) * one.change.sum(1) for one in edges}

    def keep(layer: int) -> Any:
        def hook_fn(x: Tensor, hook: Any) -> None:
            inputs[layer] = x.detach()

        return view.hook(layer, "hook_resid_pre"), hook_fn

    built = {} if path == "inputs" else {one: one.z_from(own[one.reader.head]) for one in edges}

    def replace_z(one: _Edges) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            z, new = z.clone(), built[one][1].detach().to(z)
            prompt, place = (one.reader.places >= 0).nonzero().unbind(1)
            z[prompt, one.reader.places[prompt, place], one.reader.head.head] = new[prompt, place]
            return z

        return view.hook(one.reader.head.layer, "attn.hook_z"), hook_fn

    if path == "readers":
        outer += [replace_z(one) for one in edges]
    layers = {one.reader.head.layer for one in edges}
    with view.model.hooks(fwd_hooks=outer):  # before those of the gradients
        gradients = log_odds_gradients(view, acts.batch, [keep(layer) for layer in layers] if path == "inputs" else [])
    for one in edges:
        reader, is_kept = one.reader, row >= 0
        if path == "inputs":
            x = one.x.clone()
            x[row[is_kept]] = inputs[reader.head.layer][is_kept].to(x)
            built[one] = one.z_from(x)
        at = torch.arange(len(row), device=row.device)[:, None], reader.places.clamp(min=0)
        g = gradients[reader.head.layer].to(one.x)[*at, reader.head.head]
        copies, z = built[one]
        found = torch.autograd.grad(z, copies, g.masked_fill(reader.places[..., None] < 0, 0))
        one.gradient += torch.stack(found, dim=1)


@dataclass
class Passes:
    """Forward and backward passes through whole prompts; a block over one token of n is 1/(n · blocks) of a pass."""

    forwards: float = 0.0
    backwards: float = 0.0


@contextmanager
def counted(view: ModelView, batch: il.PromptBatch) -> Iterator[Passes]:
    """Count the passes that run in the block, relative to one pass over the batch."""
    passes, whole = Passes(), view.n_layers * batch.tokens.numel()

    def noted(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            x = found[0] if isinstance(found, tuple) else found
            share = x.shape[:2].numel() / whole
            passes.forwards += share
            if x.requires_grad:

                def note(gradient: Tensor) -> None:
                    passes.backwards += share

                x.register_hook(note)
            return found

        return run

    with replace_forwards([(block, noted(block.forward)) for block in view.model.blocks]):
        yield passes
