"""Which rows a pass over kept keys needs: edits that agree up to some layer are one row up to there."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class EditTree:
    """Rows for sets of heads that are edited together: row 0 is edited nowhere, others leave a row at some layer."""

    entering: dict[int, list[int]]
    """Layer -> the row that each row which begins there is a copy of, up to there; behind those that are there."""
    set_of: list[int]
    """For each row behind row 0 a set whose heads it is edited in."""
    row_of: list[int]
    """For each set its row."""

    @classmethod
    def of(cls, chosen: Bool[Tensor, "set layer head"], *, mergeable: bool) -> "EditTree":
        """`alike`: sets that hold the same heads of a layer are edited alike there; else no two sets ever are."""
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
        """The sets of the rows that are there when a layer's heads are edited, row 0 aside."""
        return self.set_of[: sum(len(copied) for begun, copied in self.entering.items() if begun <= layer)]
