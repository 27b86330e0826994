"""Edge attribution patching (EAP) and integrated gradients (EAP-IG) of the edges that
`il.locate_circuit` ranks.

EAP estimates what is lost when a writer's output u is replaced by its mean, as read by a reader's
query, keys or values:

    (u − mean u) · ∂m/∂x

m are the answer's log-odds, and x is the reader's own copy of the residual stream at the tokens of
the edge's role, which it reads once for queries, once for keys and once for values. Only its output
at `reader_at` depends on them, as in `il.head_to_head_effects`. EAP-IG averages the gradient over
steps k = 1 … n of a path from replaced (0) to intact (1):

- "inputs": the model's embeddings are mean + k/n (own − mean), and everything follows from them.
- "readers": x of all readers is mean + k/n (own − mean), each from the intact pass, so that readers
  do not reach each other; everything else responds. With many steps, the estimates of all edges sum
  to what they jointly carry.

Source: EAP: Syed et al. (arXiv 2310.10348); EAP-IG: Hanna et al. (arXiv 2403.17806), "inputs"; the
path of activations in MIB (arXiv 2504.13151), "readers". Only the formulas are theirs.
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
from icl_lens.edits.captured_writers import capture_writers, writer_pieces
from icl_lens.edits.edge_removal import positions_in
from icl_lens.edits.edges import layers_of
from icl_lens.edits.edit import PARTS
from icl_lens.edits.gradients import z_gradients
from icl_lens.edits.head_reader import HeadReader, Means
from icl_lens.measures.head_to_head_effects import log_odds_of
from icl_lens.models.passes.inference import replace_forwards
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import role_indices
from icl_lens.prompts.roles import EdgeRole, role_masks
from icl_lens.reading.activations import Activations
from icl_lens.reading.head_projection import HeadProjection, require_writers

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
    """Return EAP's estimates or, with a path, those of EAP-IG, in the form of `estimate_effects`,
    nats.
    """
    view, masks = ModelView.of(model), role_masks(batch)
    places = positions_in(role_masks(batch, [reader_at])[:, 0])
    shares = [number / steps for number in range(1, steps + 1)] if path else [1.0]
    gradients: dict[il.Head, list[Tensor]] = {head: [] for head in readers}
    for prompts in writer_pieces(view, batch, "all"):
        acts = capture_writers(model, batch[prompts], "all", layers_of(readers))
        edges = [
            _Edges(acts, HeadReader(acts, head, means, places[prompts]), means) for head in readers
        ]
        for share in shares:
            _add_gradients(view, acts, edges, path, share)
        for edge in edges:
            at = masks[prompts][..., : edge.x.shape[1]].to(edge.x)
            total = einsum(
                edge.gradient,
                edge.change,
                "batch part pos d, batch pos writer d -> batch part pos writer",
            )
            total = einsum(
                total, at, "batch part pos writer, batch role pos -> batch part role writer"
            )
            gradients[edge.reader.head].append(total / len(shares))
    return {head: torch.cat(pieces) for head, pieces in gradients.items()}


class _Edges:
    """A reader in intact passes, with its layer's input x, each writer's part of x minus its mean,
    and gradients.
    """

    def __init__(self, acts: Activations, reader: HeadReader, means: Means) -> None:
        self.reader, writers, layer = reader, require_writers(acts), reader.head.layer
        rows = writers.row.clamp(min=0)
        self.x = writers.inputs(layer)[rows].to(reader.q)  # [batch pos d_model]
        u = writers.vectors(rows.flatten(), layer)[:, :-1].unflatten(0, rows.shape)
        self.change = (
            u - means[:, : u.shape[2]].to(u)[role_indices(acts.batch).clamp(min=0).to(u.device)]
        )
        self.gradient = self.x.new_zeros(len(self.x), len(PARTS), *self.x.shape[1:])
        self.prompts = torch.arange(len(rows), device=rows.device)[:, None]

    def z_from(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[list[Tensor], Float[Tensor, "batch place d_head"]]:
        """Return a copy of the layer's input for queries, keys and values each, and z as a function
        of these.
        """
        reader, scaled_parts = self.reader, []
        copies = [x.detach().clone().requires_grad_(True) for _ in PARTS]
        for part, copy in zip(PARTS, copies, strict=True):
            at = reader.places if part == "q" else reader.key_positions
            projection = HeadProjection(reader.acts, reader.head, part, at)
            value = projection.rotate(projection.project(copy[self.prompts, at.clamp(min=0)]), at)[
                :, :, None
            ]
            scaled_parts.append(value * projection.scoring.scale if part == "q" else value)
        return copies, reader.z_from(*scaled_parts)[:, 0]

    def replace_z(
        self, z: Float[Tensor, "batch pos head d_head"], new: Tensor
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Return all heads' z with another z of the reader at its places."""
        z, (prompt, place) = z.clone(), (self.reader.places >= 0).nonzero().unbind(1)
        z[prompt, self.reader.places[prompt, place], self.reader.head.head] = new[prompt, place].to(
            z
        )
        return z


def _add_gradients(
    view: ModelView, acts: Activations, edges: Sequence[_Edges], path: Path | None, share: float
) -> None:
    """Add the gradients of every reader's inputs at one step; run one forward and one backward
    pass.
    """
    inputs, built, moves = dict[int, Tensor](), dict[_Edges, Any](), list[tuple[str, Any]]()
    if path == "inputs":
        n_embeddings = len(require_writers(acts).names(0)) - 1
        moved = (1 - share) * edges[0].change[:, :, :n_embeddings].sum(2)
        moves.append((view.hook(0, "hook_resid_pre"), lambda x, hook: x - moved.to(x)))
    if path == "readers":
        for copied_edge in edges:
            built[copied_edge] = copied_edge.z_from(
                copied_edge.x - (1 - share) * copied_edge.change.sum(2)
            )
            write = lambda z, hook, edge=copied_edge: edge.replace_z(z, built[edge][1].detach())  # noqa: E731
            moves.append((view.hook(copied_edge.reader.head.layer, "attn.hook_z"), write))

    def keep(layer: int) -> tuple[str, Any]:
        return view.hook(layer, "hook_resid_pre"), lambda x, hook: inputs.update(
            {layer: x.detach()}
        )

    with view.model.hooks(fwd_hooks=moves):  # run before the hooks of the gradients
        (gradients,) = z_gradients(
            view,
            acts.batch,
            log_odds_of(acts.batch),
            lambda layer, z, gradient: gradient,
            map(keep, {edge.reader.head.layer for edge in edges}),
        )
    for copied_edge in edges:
        layer, places = copied_edge.reader.head.layer, copied_edge.reader.places
        copies, z = (
            built[copied_edge]
            if copied_edge in built
            else copied_edge.z_from(inputs[layer].to(copied_edge.x))
        )
        g = gradients[layer].to(z)[
            copied_edge.prompts, places.clamp(min=0), copied_edge.reader.head.head
        ]
        part_gradients = torch.autograd.grad(z, copies, g.masked_fill(places[..., None] < 0, 0))
        copied_edge.gradient += torch.stack(part_gradients, dim=1)


@dataclass
class Passes:
    """Forward and backward passes through whole prompts; a block over one token of n is 1/(n ·
    blocks) of a pass.
    """

    forwards: float = 0.0
    backwards: float = 0.0


@contextmanager
def counted(view: ModelView, batch: il.PromptBatch) -> Iterator[Passes]:
    """Count the passes that run in the block, relative to one pass over the batch."""
    passes, whole = Passes(), view.n_layers * batch.tokens.numel()

    def noted(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            block_output = forward(*args, **kwargs)
            x = block_output[0] if isinstance(block_output, tuple) else block_output
            share = x.shape[:2].numel() / whole
            passes.forwards += share
            if x.requires_grad:

                def note(gradient: Tensor) -> None:
                    passes.backwards += share

                x.register_hook(note)
            return block_output

        return run

    with replace_forwards([(block, noted(block.forward)) for block in view.model.blocks]):
        yield passes
