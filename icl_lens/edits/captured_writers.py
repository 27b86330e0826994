"""What writers wrote, for edges: in the prompts that are run, and its means over a reference."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.head_reader import Means
from icl_lens.models.passes.memory import WRITER_BYTES
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch, role_indices
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.roles import indices_in_roles
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture_with_hooks
from icl_lens.reading.decompose import head_outputs
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.writers import (
    has_pos_embed,
    vector_bytes,
    z_and_norm_scale,
)


def capture_writers(
    model: Any, batch: PromptBatch, positions: TokenPositions, layers: Iterable[int]
) -> Activations:
    """Return activations with the writers at `positions` that components of some layers read."""
    # Rows that share a pass would share what chains write, although the same token can have
    # another role in each.
    own_passes = replace(batch, prompt_index=None)
    return capture_with_hooks(model, own_passes, [], writers=positions, readers=list(layers))


def writer_pieces(
    view: ModelView, batch: PromptBatch, positions: TokenPositions
) -> list[list[int]]:
    """Return the indices of the prompts whose writers at `positions` are captured at a time."""
    bytes_per_prompt = vector_bytes(view) * (1 if positions == "last" else batch.tokens.shape[1])
    rows_per_pass = rows_at_once(view, batch.tokens.shape[1])
    size = max(1, min(WRITER_BYTES // bytes_per_prompt, rows_per_pass))
    return [piece.tolist() for piece in torch.arange(len(batch)).split(size)]


def writer_means(model: Any, batch: PromptBatch) -> Means:
    """Return the mean of what each writer wrote to tokens of each role; 0 for roles that do not
    occur.

    True and false labels have one mean, so that it does not reveal which labels equal the answer.
    """
    check_batch(batch, "reference")
    view = ModelView.of(model)
    sums = _RoleSums(view)
    for prompts in batch.split(rows_at_once(view, batch.tokens.shape[1])):
        sums.add(prompts)
    total, count = sums.total(), sums.count
    labels = list(indices_in_roles("label"))
    total[labels], count[labels] = total[labels].sum(0), count[labels].sum()
    return (total / count.clamp(min=1)[:, None, None]).to(view.compute_dtype, copy=True)


class _RoleSums:
    """Sums of what writers wrote to tokens of each role, in float64; passes keep nothing else.

    What a head writes is linear in its z, of which the sums are kept.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.count = torch.zeros(len(ROLES), dtype=torch.float64)
        self.by_name: dict[str, Float[Tensor, "role *width"]] = {}
        """Sums of embeddings, of each layer's z ("z3") and of what its FFN wrote ("F3")."""

    def add(self, prompts: PromptBatch) -> None:
        """Run prompts and add what they have."""
        view = self.view
        roles = role_indices(prompts).cpu()
        row, position = (roles >= 0).nonzero().unbind(1)
        role_of_token = roles[row, position]
        self.count += torch.bincount(role_of_token, minlength=len(ROLES))

        def add_tokens(x: Tensor, hook: Any, name: str, layer: int | None = None) -> None:
            row_of_x = row if len(x) > 1 else torch.zeros_like(row)  # positions have one row
            tokens = x.detach()[row_of_x.to(x.device), position.to(x.device)]
            if layer is not None:
                tokens, _ = z_and_norm_scale(view, layer, tokens)
            if name not in self.by_name:
                shape = len(ROLES), *tokens.shape[1:]
                self.by_name[name] = torch.zeros(shape, dtype=torch.float64)
            self.by_name[name].index_add_(0, role_of_token, tokens.double().cpu())

        hooks: list[tuple[str, Any]] = []
        if has_pos_embed(view):
            hooks.append(("hook_pos_embed", partial(add_tokens, name="pos_embed")))
        hooks.append((view.hook(0, "hook_resid_pre"), partial(add_tokens, name="input")))
        for layer in range(view.n_layers):
            add_z = partial(add_tokens, name=f"z{layer}", layer=layer)
            hooks.append((view.hook(layer, "attn.hook_z"), add_z))
            add_ffn = partial(add_tokens, name=f"F{layer}")
            hooks.append((view.hook(layer, "hook_mlp_out"), add_ffn))
        last_logits(view.model, prompts, hooks)

    def total(self) -> Float[Tensor, "role writer d_model"]:
        """Return the sums of all writers but the biases, in the order of `writer_names`."""
        by_writer = [self.by_name["input"]]
        if "pos_embed" in self.by_name:
            position = self.by_name["pos_embed"]
            by_writer = [self.by_name["input"] - position, position]
        for layer in range(self.view.n_layers):
            heads = head_outputs(self.by_name[f"z{layer}"], self.view.W_O(layer).double().cpu())
            by_writer += [*heads.unbind(1), self.by_name[f"F{layer}"]]
        return torch.stack(by_writer, dim=1)
