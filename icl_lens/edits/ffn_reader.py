"""Compute what an FFN writes at some positions when earlier components are removed from what it reads.

1. The FFN's input x is the residual stream after attention or, in parallel layers, before the
   layer. It is the sum of what *writers* (embeddings, earlier heads and FFNs, and the layer's own
   heads unless layers are parallel) and biases wrote.
2. To remove writer w, the FFN, its norm included, is run on x − u_w. u_w is what w wrote at that
   position. If w is replaced by its mean instead of zero, it is run on x − (u_w − mean u_w).

The axes are those of `head_reader`: an FFN reads at its places only, so that it has no other positions.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.head_reader import Means
from icl_lens.errors import InputError
from icl_lens.models.freed_memory import release_after_large_pass
from icl_lens.models.head import FFN
from icl_lens.models.passes.memory import PIECE_BYTES
from icl_lens.prompts.batch import ROLES, role_indices
from icl_lens.reading.activations import Activations
from icl_lens.reading.ffn_outputs import ffn_outputs
from icl_lens.reading.head_projection import require_writers
from icl_lens.reading.writers import names_before_ffn

# Largest difference, relative to the largest output, between the FFN's output in the pass and that
# for its recorded input.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class FFNReader:
    """An FFN in captured passes, whose output at some places can be computed without some writers.

    A removed writer's output is replaced by its mean in `means`, or by zero if that is None; what
    is in `more` is subtracted unchanged.
    """

    def __init__(
        self,
        acts: Activations,
        ffn: FFN,
        means: Means | None,
        places: Int[Tensor, "batch place"],
        more: Float[Tensor, "row more d_model"] | None = None,
    ) -> None:
        """Read the FFN's input at places, -1 where a prompt has fewer.

        Raise InputError if its output does not follow from this input.
        """
        self.acts, self.view, self.ffn, self.means = acts, acts.view, ffn, means
        self.writers = require_writers(acts)
        self.more = self.writers.resid_pre[:, :0] if more is None else more
        self.n_components = len(names_before_ffn(self.view, ffn.layer))
        self.n_writers = self.n_components + self.more.shape[1]
        self.places = places.to(acts.z.device)
        self.is_place = self.places >= 0
        self.rows = self.writers.rows_at(self.places)[self.is_place]
        roles = role_indices(acts.batch).to(self.places.device)
        self.roles = roles.gather(1, self.places.clamp(min=0))[self.is_place]
        self.x = self.writers.ffn_input(self.rows, ffn.layer)
        self.written = ffn_outputs(self.view, ffn.layer, self.x)
        if not acts.edits:  # an edit may have written the output, and writes it again
            self._check_output()

    def _check_output(self) -> None:
        recorded = self.writers.mlp_out[self.rows, self.ffn.layer].to(self.written)
        if not len(recorded):
            return
        error = float((self.written - recorded).abs().max() / (1 + recorded.abs().max()))
        allowed = TOLERANCE.get(self.acts.z.dtype, 1e-3)
        if not error <= allowed:
            raise InputError(
                f"edges into FFNs of {self.view.architecture} are not supported: what {self.ffn} "
                f"writes does not follow from what it reads (error {error:.1e}, allowed "
                f"{allowed:.0e}); use il.AblateSite, which removes whole outputs"
            )

    @property
    def output(self) -> Float[Tensor, "batch place d_model"]:
        """What the FFN writes at the places; 0 where there is none."""
        return self._at_places(self.written[:, None])[:, 0]

    def output_without_each(self) -> Float[Tensor, "batch writer place d_model"]:
        """Return the output without each writer."""
        alone = torch.eye(self.n_writers, dtype=torch.bool)
        return self.output_without_sets(alone.expand(len(ROLES), -1, -1))

    def output_without_sets(
        self, removed: Bool[Tensor, "role set writer"]
    ) -> Float[Tensor, "batch set place d_model"]:
        """Return the output for each set, with its writers removed jointly."""
        n_sets = removed.shape[1]
        release_after_large_pass(self.view, self.acts.pattern.shape[-1])
        outputs = self.x.new_zeros(len(self.x), n_sets, self.view.d_model)
        for role in self.roles.unique().tolist():
            # For most roles, many sets lack the same writers.
            distinct, index_of_set = (
                removed[role].to(self.x.device).unique(dim=0, return_inverse=True)
            )
            bytes_per_row = 4 * self.view.d_model * (self.n_writers + 3 * len(distinct))
            with_role = (self.roles == role).nonzero()[:, 0]
            for piece in with_role.split(max(1, PIECE_BYTES // (2 * bytes_per_row))):
                outputs[piece] = self._outputs(piece, role, distinct)[:, index_of_set]
        return self._at_places(outputs)

    def _outputs(
        self, piece: Int[Tensor, " row"], role: int, removed: Bool[Tensor, "set writer"]
    ) -> Float[Tensor, "row set d_model"]:
        """Return the output of some rows with tokens of a role."""
        u = self._removable(self.rows[piece], role)
        x = self.x[piece, None] - removed.to(u) @ u
        return ffn_outputs(self.view, self.ffn.layer, x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def _removable(
        self, rows: Int[Tensor, " row"], role: int
    ) -> Float[Tensor, "row writer d_model"]:
        """Return what each writer wrote, minus its mean over tokens of a role if it is replaced by
        this.
        """
        u = self.writers.ffn_vectors(rows, self.ffn.layer)
        if self.means is not None:
            u -= self.means[role, : self.n_components].to(u)
        return torch.cat([u, self.more[rows].to(u)], dim=1) if self.more.shape[1] else u

    def _at_places(
        self, values: Float[Tensor, "row set d_model"]
    ) -> Float[Tensor, "batch set place d_model"]:
        """Return the values of rows at their places, 0 elsewhere."""
        n_sets, d_model = values.shape[1:]
        placed = values.new_zeros(*self.places.shape, n_sets, d_model)
        placed[self.is_place] = values
        return placed.transpose(1, 2)
