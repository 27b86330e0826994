"""Merge edit sets that share all edits up to some layer."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class EditTree:
    """Rows of a pass over head sets: row 0 has no edits, every other row branches off an earlier one at some layer."""

    entering: dict[int, list[int]]
    """Layer -> for each row that begins there, the row it copies; new rows are appended after the existing ones."""
    set_of: list[int]
    """For each row after row 0, one set with its edits."""
    row_of: list[int]
    """For each set, its row."""

    @classmethod
    def of(cls, chosen: Bool[Tensor, "set layer head"], *, mergeable: bool) -> "EditTree":
        """Build the tree; if `mergeable`, sets with the same heads in a layer have the same edits there."""
        nothing = bytes(chosen.shape[2])
        entering: dict[int, list[int]] = {}
        set_of: list[int] = []
        row_of = [0] * len(chosen)
        for layer in range(chosen.shape[1]):
            edits = [heads.tobytes() for heads in chosen[:, layer].cpu().numpy()]
            if not mergeable:
                edits = [edit + f" {place}".encode() * (edit != nothing) for place, edit in enumerate(edits)]
            known = {(0, nothing): 0, **{(1 + i, edits[place]): 1 + i for i, place in enumerate(set_of)}}
            for place, edit in enumerate(edits):
                row = known.get((row_of[place], edit))
                if row is None:
                    entering.setdefault(layer, []).append(row_of[place])
                    set_of.append(place)
                    row = known[row_of[place], edit] = len(set_of)
                row_of[place] = row
        return cls(entering, set_of, row_of)

    def sets_at_layer(self, layer: int) -> list[int]:
        """Return the sets of the rows that exist at a layer, without row 0."""
        return self.set_of[: sum(len(copied) for begun, copied in self.entering.items() if begun <= layer)]
