"""The sets of edges that are removed to test a circuit, and tables of how the log-odds change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from icl_lens.edits.edges import RemovalMasks
from icl_lens.foundation.intervals import (
    leave_one_out_interval,
    leave_one_out_means,
    with_random_sets,
)
from icl_lens.measures.edge_space import EdgeSpace
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of all edges that are kept, as in MIB (arXiv 2504.13151)."""
# Random halves of the circuit for completeness, and random sets of readers for groups.
N_SUBSETS, N_RANDOM_READERS = 10, 5


@dataclass(eq=False)
class EdgeSets:
    """The edges that each test of a circuit removes. A set is named by a tuple:

    - ("all",), ("none",): all edges are kept, or none.
    - ("located", size): only the first `size` edges are kept; ("random", number, size): as many of
      a random ranking.
    - ("edge", i): the i-th edge is removed; ("needed", i): only the circuit without it is kept.
    - ("model without", j), ("circuit without", j): the j-th random half of the circuit is removed;
      all other edges are kept, or only the rest of the circuit.
    - ("group", name): a group is removed; ("control", name, number): the same group into random
      heads. Groups of edges into FFNs have no control: a layer has a single FFN.
    - ("layer", input, layer): all edges from one layer to one kind of input are removed.
    """

    space: EdgeSpace
    circuit: Int[np.ndarray, " edge"]
    """The first edges of the ranking, as indices into `space`."""
    sizes: list[int]
    """Numbers of edges that are kept in the curve of faithfulness."""
    n_random: int
    """Number of random rankings."""
    names: list[tuple[object, ...]] = field(default_factory=list)
    masks: list[Bool[np.ndarray, " edge"]] = field(default_factory=list)
    """The removed edges of each set."""

    @classmethod
    def of(
        cls,
        space: EdgeSpace,
        ranked: Int[np.ndarray, " edge"],
        *,
        n_edges: int,
        n_random: int,
        seed: int,
    ) -> "EdgeSets":
        """Return the sets of all tests; `ranked` are all edges, from the strongest to the
        weakest.
        """
        n = len(space)
        sizes = sorted({min(n_edges, n), *(max(1, round(share * n)) for share in SHARES)})
        sets = cls(space, ranked[:n_edges], sizes, n_random)
        sets._add_removed("all", edges=np.array([], dtype=np.int64))
        sets._add_kept("none", edges=np.array([], dtype=np.int64))
        for size in sizes:
            sets._add_kept("located", size, edges=ranked[:size])
        for number in range(n_random):
            for size, edges in zip(
                sizes, space.random_like(ranked, sizes, seed=seed + number), strict=True
            ):
                sets._add_kept("random", number, size, edges=edges)
        rng = np.random.default_rng(seed)
        for number, edge in enumerate(sets.circuit):
            sets._add_removed("edge", number, edges=edge[None])
            sets._add_kept("needed", number, edges=np.setdiff1d(sets.circuit, edge))
        for number in range(N_SUBSETS):
            subset = rng.choice(sets.circuit, size=(len(sets.circuit) + 1) // 2, replace=False)
            sets._add_removed("model without", number, edges=subset)
            sets._add_kept("circuit without", number, edges=np.setdiff1d(sets.circuit, subset))
        for name, in_group in space.groups.items():
            sets._add_removed("group", name, edges=np.flatnonzero(in_group))
            for number in range(N_RANDOM_READERS if space.has_control(name) else 0):
                # No edges into the readers; `removal_masks` adds those into random heads.
                sets._add_removed("control", name, number, edges=np.array([], dtype=np.int64))
        for (end, layer), in_layer in space.layers.items():
            sets._add_removed("layer", end, layer, edges=np.flatnonzero(in_layer))
        return sets

    def _add_removed(self, *name: object, edges: Int[np.ndarray, " edge"]) -> None:
        mask = np.zeros(len(self.space), dtype=bool)
        mask[edges] = True
        self.names.append(name)
        self.masks.append(mask)

    def _add_kept(self, *name: object, edges: Int[np.ndarray, " edge"]) -> None:
        self._add_removed(*name, edges=np.setdiff1d(np.arange(len(self.space)), edges))

    def __len__(self) -> int:
        return len(self.names)

    def removal_masks(self, view: ModelView, *, seed: int) -> RemovalMasks:
        """Return what each set removes from the readers and, in controls of groups, from random
        heads.
        """
        removed = self.space.removal_masks(np.stack(self.masks))
        heads = [reader for reader in self.space.readers if isinstance(reader, Head)]
        randoms: list[list[Head]] = []
        if heads:
            randoms = random_head_sets(view.model, heads, n_random=N_RANDOM_READERS, seed=seed)
        for number, random_heads in enumerate(randoms):
            space = EdgeSpace.of(view, random_heads, self.space.reader_at)
            masks = np.zeros((len(self), len(space)), dtype=bool)
            for name, in_group in space.groups.items():
                if ("control", name, number) in self.names:
                    masks[self.names.index(("control", name, number))] = in_group
            for reader, mask in space.removal_masks(masks).items():
                removed[reader] = removed[reader] | mask if reader in removed else mask
        return removed

    def tables(
        self,
        log_odds: Float[np.ndarray, "prompt set"],
        queries: Sequence[str],
        estimates: Float[np.ndarray, " edge"],
        selected: Float[np.ndarray, " edge"],
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of `Circuit`; queries are resampled for 95% intervals."""
        tables = _Tables(self, log_odds, queries)
        return {
            "edges": tables.edges(estimates, selected),
            "curve": tables.curve(),
            "groups": tables.groups(),
            "layers": tables.layers(),
            "scores": tables.scores(estimates),
        }


class _Tables:
    """Each set's mean log-odds, [draw set]: row 0 is over all prompts, the others are without each
    query.
    """

    def __init__(
        self, sets: EdgeSets, log_odds: Float[np.ndarray, "prompt set"], queries: Sequence[str]
    ):
        self.sets, self.space = sets, sets.space
        self.column = {name: i for i, name in enumerate(sets.names)}
        self.queries = queries
        self.means = leave_one_out_means(log_odds, queries)
        self.all_minus_none = self.mean("all") - self.mean("none")
        self.located = np.stack(
            [self.faithfulness("located", size) for size in sets.sizes], axis=1
        )  # draw, size
        by_ranking = []
        for number in range(sets.n_random):
            by_size = [self.faithfulness("random", number, size) for size in sets.sizes]
            by_ranking.append(np.stack(by_size))
        self.random = np.stack(by_ranking).transpose(2, 0, 1)  # draw, ranking, size

    def interval(
        self,
        name: str,
        prefix: str,
        values: Float[np.ndarray, " draw"],
        *means_of_sets: Float[np.ndarray, " set"],
    ) -> dict[str, float]:
        """Return columns: `name` is the first of `values`, low and high are the ends of its
        interval.

        `means_of_sets` are the random sets whose mean the value contains (see `with_random_sets`).
        """
        interval = leave_one_out_interval(values, self.queries)
        if means_of_sets:
            interval = with_random_sets(interval, *means_of_sets)
        return {name: interval.value, f"{prefix}low": interval.low, f"{prefix}high": interval.high}

    def mean(self, *name: object) -> Float[np.ndarray, " draw"]:
        return self.means[:, self.column[name]]

    def faithfulness(self, *name: object) -> Float[np.ndarray, " draw"]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.mean(*name) - self.mean("none")) / self.all_minus_none

    def edges(
        self, estimates: Float[np.ndarray, " edge"], selected: Float[np.ndarray, " edge"]
    ) -> pd.DataFrame:
        rows = []
        circuit = self.mean("located", len(self.sets.circuit))
        for number, index in enumerate(self.sets.circuit):
            edge = self.space.edge(int(index))
            rows.append(
                {
                    "edge": str(edge),
                    "reader": str(edge.reader),
                    "part": edge.part,
                    "writer": edge.writer,
                    "role": edge.role,
                    "selected": float(selected[index]),
                    "estimate": float(estimates[index]),
                    **self.interval("effect", "", self.mean("all") - self.mean("edge", number)),
                    **self.interval("needed", "needed_", circuit - self.mean("needed", number)),
                }
            )
        return pd.DataFrame(rows)

    def curve(self) -> pd.DataFrame:
        rows = []
        for i, size in enumerate(self.sets.sizes):
            located, random = self.located[:, i], self.random[:, :, i]
            rows.append(
                {
                    "kept": size,
                    "share": size / len(self.space),
                    **self.interval("faithfulness", "", located),
                    "random": float(random[0].mean()),
                    "random_low": float(random[0].min()),
                    "random_high": float(random[0].max()),
                    **self.interval(
                        "difference", "difference_", located - random.mean(1), random[0]
                    ),
                }
            )
        return pd.DataFrame(rows)

    def groups(self) -> pd.DataFrame:
        rows = []
        for name in self.space.groups:
            effect = self.mean("all") - self.mean("group", name)
            controls = np.full((N_RANDOM_READERS, len(effect)), np.nan)
            if self.space.has_control(name):
                for number in range(N_RANDOM_READERS):
                    controls[number] = self.mean("control", name, number)
            control = self.mean("all") - controls.mean(0)
            rows.append(
                {
                    "group": name,
                    **self.interval("effect", "", effect),
                    "control": float(control[0]),
                    **self.interval("difference", "difference_", effect - control, controls[:, 0]),
                }
            )
        return pd.DataFrame(rows)

    def layers(self) -> pd.DataFrame:
        return pd.DataFrame(
            {"input": end, "layer": layer}
            | self.interval("effect", "", self.mean("all") - self.mean("layer", end, layer))
            for end, layer in self.space.layers
        )

    def scores(self, estimates: Float[np.ndarray, " edge"]) -> pd.DataFrame:
        scores = {
            "all": self.mean("all"),
            "none": self.mean("none"),
            "all − none": self.all_minus_none,
        }
        random_areas: dict[str, Float[np.ndarray, " set"]] = {}
        for name in ("cpr", "cmd"):
            located, areas = self.area(name, self.located), self.area(name, self.random)
            random = areas.mean(1)
            scores |= {
                name: located,
                f"{name}, random": random,
                f"{name}, difference": located - random,
            }
            random_areas |= {f"{name}, random": areas[0], f"{name}, difference": areas[0]}
        gaps = [
            np.abs(self.mean("model without", j) - self.mean("circuit without", j))
            for j in range(N_SUBSETS)
        ]
        scores["completeness"] = np.mean(gaps, axis=0)
        rows = []
        for name, values in scores.items():
            means_of_sets = [random_areas[name]] if name in random_areas else []
            rows.append({"name": name, **self.interval("value", "", values, *means_of_sets)})
        outside = np.delete(np.abs(estimates), self.sets.circuit)
        largest = {"value": float(outside.max(initial=0)), "low": np.nan, "high": np.nan}
        return pd.DataFrame([*rows, {"name": "largest estimate left out", **largest}])

    def area(
        self, name: str, faithfulness: Float[np.ndarray, "draw *n size"]
    ) -> Float[np.ndarray, "draw *n"]:
        """Return the area under F ("cpr") or |1 − F| ("cmd") by share of edges kept, with F(0) = 0
        and F(1) = 1.
        """
        shares = [0, *(size / len(self.space) for size in self.sets.sizes), 1]
        zero = 0 * faithfulness[..., :1]  # NaN where faithfulness is not defined
        F = np.concatenate([zero, faithfulness, zero + 1], axis=-1)
        return np.trapezoid(F if name == "cpr" else np.abs(1 - F), shares, axis=-1)
