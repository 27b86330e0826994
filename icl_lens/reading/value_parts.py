"""Split what a head adds to the answer from each key by the components that wrote at that key.

1. From key j, a head adds a_j v_j W_O to the residual stream at the last position, where a_j is its
   attention to j.
2. With the scale of the norm n_j before attention frozen at the model's own value, v_j is linear in
   the layer's input, which is a sum over *writers* c. Writer c's part is C_jc = a_j · n_j(x_c) W_V
   W_O · g.
3. With one token in `against` and a frozen final norm, g is the direction of the contrast, and C is
   exact. Otherwise, g is the gradient of the contrast, or of log p(target), at the layer's input,
   and C is a first-order estimate.

Source: docs/howto/numbers.md.
"""

from dataclasses import dataclass, field

import pandas as pd
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import check_choice
from icl_lens.foundation.ranking_scores import DirectScore
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import AnyHead, Head
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.activations import Activations
from icl_lens.reading.head_parts import scaled_pattern
from icl_lens.reading.head_projection import (
    HeadProjection,
    key_positions,
    keys_of_label,
    require_writers,
)
from icl_lens.reading.increases import linear_direction
from icl_lens.reading.scored_tokens import Against, choose_ranking
from icl_lens.reading.search import layer_gradients
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, long_frame
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class ValueParts(Displayed):
    """What one head adds to the answer from each key, split by writer, nats; made by `value_parts`.

    Example:
        >>> acts = il.capture(model, batch, writers=True)
        >>> parts = il.value_parts(acts, "L2H0")
        >>> parts.is_exact, parts.parts.shape
        (True, torch.Size([1, 4, 17]))
    """

    acts: Activations
    head: Head
    writers: tuple[str, ...]
    """Names: "embed", "pos_embed", "L0H0", …, "F0", …, "bias" (b_O, b_V and the shift of the norm
    before attention).
    """
    positions: Int[Tensor, "batch key"]
    parts: Float[Tensor, "batch key writer"]
    """Each writer's part; the sum over writers is `value`. Zero where `positions` is -1."""
    is_exact: bool
    """Whether parts are exact (one token in `against`, frozen norm, no soft-cap) or only
    first-order.
    """
    direction: Float[Tensor, "batch key d_head"]
    """Attention times W_O g: a value's dot product with it is what that value adds to the answer,
    nats.
    """
    projection: HeadProjection = field(repr=False)
    """The map from the layer's input to the values."""

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        n, count, n_writers = self.parts.shape
        how = "exact" if self.is_exact else "first-order"
        by_writer = self.parts.sum(1).mean(0)
        order = by_writer.abs().argsort(descending=True)[:SHOWN_ROWS].tolist()
        title = (
            f"ValueParts({self.acts.view.name} {self.head}: {n} × {count} keys, {n_writers} "
            f"writers, {how})"
        )
        title += edits_suffix(self.acts.edits)
        columns: dict[str, list[object]] = {
            "writer": [self.writers[i] for i in order],
            "all keys, nats": [signed(float(by_writer[i])) for i in order],
        }
        return table_view(title, columns, n_writers)

    @property
    def value(self) -> Float[Tensor, "batch key"]:
        """What the head adds to the answer from each key, nats."""
        return self.parts.sum(-1)

    def of_label(self, label: Int[Tensor, " batch"]) -> Bool[Tensor, "batch key"]:
        """Return which keys are tokens of labels equal to `label` (an index into `batch.labels`,
        one per prompt).

        Raise InputError unless all keys are tokens of labels.
        """
        return keys_of_label(self.acts.batch, self.positions, label)

    def to_frame(self) -> pd.DataFrame:
        """Return writer, position (of the key), value (nats) and prompt: one row per key and
        writer.
        """
        frame = long_frame(self.parts, ("prompt", "position", "writer"))
        frame["position"] = (
            self.positions.flatten().repeat_interleave(len(self.writers)).cpu().numpy()
        )
        frame["writer"] = list(self.writers) * self.positions.numel()
        frame = columns_first(frame, "writer", "position", "value")
        return frame.query("position >= 0").reset_index(drop=True)

    def by_position(self, writer: AnyHead) -> Float[Tensor, "batch key pos"]:
        """Split an earlier head's entry in `parts` by the positions that it read (text → label →
        last position).

        Raise InputError unless the writer is a head of an earlier layer.
        """
        source = self.acts.view.check_head(writer)
        return self.projection.by_position(source, self.direction)

    def vectors(self, writer: str) -> Float[Tensor, "batch key d_model"]:
        """Return a writer's part of each value times W_O (see `acts.label_values`), for
        `acts.readout.top_tokens`.
        """
        check_choice("writer", writer, self.writers)
        parts = self.projection.parts(writer)[:, :, 0]
        return parts @ self.acts.view.W_O(self.head.layer)[self.head.head].to(parts)


def value_parts(
    acts: Activations,
    head: AnyHead,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    by: DirectScore | None = None,
    against: Against = None,
    keys: TokenPositions | None = None,
) -> ValueParts:
    """Split what one head adds to the answer from each label by the components that wrote at that
    label, nats.

    What a head adds is its contrast or, with `by="increase"`, its increase; `targets`, `by` and
    `against` are those of `top_subheads`. `keys` are positions; the default is all tokens of the
    labels, in order (-1 where a label has fewer than others), or all positions if prompts have no
    demonstrations. The activations must include the writers at these positions: `il.capture(model,
    batch, writers=True)`.

    The final norm is frozen. With one token in `against`, parts are exact and sum to
    `subhead_log_prob_increase` at these positions; otherwise, they are first-order estimates
    (`is_exact` is False). Raise InputError for invalid token ids, an unknown head, activations
    without writers, or a model with a logit soft-cap, whose readout is not affine.

    Example:
        >>> acts = il.capture(model, batch, writers=True)
        >>> il.value_parts(acts, il.Head(2, 0)).value.shape
        torch.Size([1, 4])
    """
    _, targets, against_ids, readout = choose_ranking(
        acts, by, targets, against, "frozen", bias=True
    )
    writers, view = require_writers(acts), acts.view
    head = view.check_head(head)
    g = linear_direction(readout, targets, against_ids)
    is_exact = g is not None
    if g is None:
        g = layer_gradients(acts, targets, readout, against=against_ids)[1][:, head.layer]
    positions = key_positions(acts, keys, acts.batch.all_label_positions.flatten(1))
    projection = HeadProjection(acts, head, "v", positions)
    through_W_O = einsum(
        g, view.W_O(head.layer)[head.head].to(g), "batch model, d model -> batch d"
    )
    attention = scaled_pattern(acts, head.layer)[:, head.head].gather(1, positions.clamp(min=0))
    direction = attention.masked_fill(positions < 0, 0)[..., None] * through_W_O[:, None]
    parts = einsum(
        projection.parts(), direction, "batch key writer d, batch key d -> batch key writer"
    )
    return ValueParts(
        acts, head, writers.names(head.layer), positions, parts, is_exact, direction, projection
    )
