"""The sets of edges that a circuit's tests remove, and the tables of what their removal does to the log-odds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from icl_lens.interventions.controlled_ablation import random_head_sets
from icl_lens.interventions.head_edges import Removed
from icl_lens.locate.edge_space import EdgeSpace
from icl_lens.metrics import resampled_means
from icl_lens.models.view import ModelView

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of all edges that are kept, as in MIB."""
# Random subsets of the circuit for completeness, and sets of random receivers for groups.
SUBSETS, RANDOM_RECEIVERS = 10, 5
LEVEL = 0.95


@dataclass(eq=False)
class EdgeSets:
    """The edges that are removed in each of a circuit's tests, by the name of the test."""

    space: EdgeSpace
    circuit: Int[np.ndarray, " edge"]
    """The first edges of the ranking."""
    sizes: list[int]
    """Numbers of kept edges of the curve."""
    n_random: int
    names: list[tuple[object, ...]] = field(default_factory=list)
    masks: list[Bool[np.ndarray, " edge"]] = field(default_factory=list)

    @classmethod
    def of(
        cls, space: EdgeSpace, ranked: Int[np.ndarray, " edge"], *, n_edges: int, n_random: int, seed: int
    ) -> "EdgeSets":
        """Return the sets of every test, given all edges from the strongest to the weakest."""
        n = len(space)
        sizes = sorted({min(n_edges, n), *(max(1, round(share * n)) for share in SHARES)})
        sets = cls(space, ranked[:n_edges], sizes, n_random)
        sets._remove("all", chosen=np.array([], dtype=np.int64))
        sets._keep("none", chosen=np.array([], dtype=np.int64))
        for size in sizes:
            sets._keep("located", size, chosen=ranked[:size])
        for number in range(n_random):
            for size, chosen in zip(sizes, space.random_like(ranked, sizes, seed=seed + number), strict=True):
                sets._keep("random", number, size, chosen=chosen)
        rng = np.random.default_rng(seed)
        for number, edge in enumerate(sets.circuit):
            sets._remove("edge", number, chosen=edge[None])
            sets._keep("needed", number, chosen=np.setdiff1d(sets.circuit, edge))
        for number in range(SUBSETS):
            subset = rng.choice(sets.circuit, size=(len(sets.circuit) + 1) // 2, replace=False)
            sets._remove("model without", number, chosen=subset)
            sets._keep("circuit without", number, chosen=np.setdiff1d(sets.circuit, subset))
        for name, chosen in space.groups.items():
            sets._remove("group", name, chosen=np.flatnonzero(chosen))
            for number in range(RANDOM_RECEIVERS):
                sets._remove("control", name, number, chosen=np.array([], dtype=np.int64))  # in other receivers
        return sets

    def _remove(self, *name: object, chosen: Int[np.ndarray, " edge"]) -> None:
        mask = np.zeros(len(self.space), dtype=bool)
        mask[chosen] = True
        self.names.append(name)
        self.masks.append(mask)

    def _keep(self, *name: object, chosen: Int[np.ndarray, " edge"]) -> None:
        self._remove(*name, chosen=np.setdiff1d(np.arange(len(self.space)), chosen))

    def __len__(self) -> int:
        return len(self.names)

    def removed(self, view: ModelView, *, seed: int) -> Removed:
        """Return what each set removes from the receivers and, in controls of groups, from random heads."""
        removed = self.space.removing(np.stack(self.masks))
        randoms = random_head_sets(view, self.space.receivers, draws=RANDOM_RECEIVERS, seed=seed, same_layers=True)
        for number, heads in enumerate(randoms):
            space = EdgeSpace.of(view, heads)
            masks = np.zeros((len(self), len(space)), dtype=bool)
            for name, chosen in space.groups.items():
                if ("control", name, number) in self.names:
                    masks[self.names.index(("control", name, number))] = chosen
            for head, mask in space.removing(masks).items():
                removed[head] = removed[head] | mask if head in removed else mask
        return removed

    def tables(
        self,
        log_odds: Float[np.ndarray, "prompt set"],
        queries: Sequence[str],
        estimates: Float[np.ndarray, " edge"],
    ) -> dict[str, pd.DataFrame]:
        """Return the tables edges, curve, groups and scores, with 95% intervals over queries."""
        return _Tables(self, log_odds, queries).tables(estimates)


class _Tables:
    """Means and bootstrap draws of the sets' log-odds: [draw set], the first row being the means themselves."""

    def __init__(self, sets: EdgeSets, log_odds: Float[np.ndarray, "prompt set"], queries: Sequence[str]):
        self.sets, self.number = sets, {name: i for i, name in enumerate(sets.names)}
        draws = resampled_means(log_odds, queries) if len(set(queries)) > 1 else np.full((1, len(sets)), np.nan)
        self.means = np.concatenate([log_odds.mean(0, keepdims=True), draws])
        self.carried = self.at("all") - self.at("none")

    def at(self, *name: object) -> Float[np.ndarray, " draw"]:
        return self.means[:, self.number[name]]

    def faithfulness(self, *name: object) -> Float[np.ndarray, " draw"]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.at(*name) - self.at("none")) / self.carried

    def tables(self, estimates: Float[np.ndarray, " edge"]) -> dict[str, pd.DataFrame]:
        sets, space = self.sets, self.sets.space
        located = np.stack([self.faithfulness("located", size) for size in sets.sizes], axis=1)
        random = np.stack(
            [[self.faithfulness("random", number, size) for size in sets.sizes] for number in range(sets.n_random)]
        ).transpose(2, 0, 1)  # draw, ranking, size
        edges, curve, groups = [], [], []
        for number, edge in enumerate(sets.circuit):
            named = space.edge(int(edge))
            whole = self.at("located", len(sets.circuit))
            edges.append(
                {
                    "edge": str(named),
                    "receiver": str(named.receiver),
                    "part": named.part,
                    "sender": named.sender,
                    "role": named.role,
                    "estimate": float(estimates[edge]),
                    **_interval("effect", "", self.at("all") - self.at("edge", number)),
                    **_interval("needed", "needed_", whole - self.at("needed", number)),
                }
            )
        for i, size in enumerate(sets.sizes):
            means = random[0, :, i]
            curve.append(
                {
                    "kept": size,
                    "share": size / len(space),
                    **_interval("faithfulness", "", located[:, i]),
                    "random": float(means.mean()),
                    "random_low": float(means.min()),
                    "random_high": float(means.max()),
                    **_interval("difference", "difference_", located[:, i] - random[:, :, i].mean(1)),
                }
            )
        for name in space.groups:
            effect = self.at("all") - self.at("group", name)
            control = self.at("all") - np.mean([self.at("control", name, r) for r in range(RANDOM_RECEIVERS)], axis=0)
            groups.append(
                {
                    "group": name,
                    **_interval("effect", "", effect),
                    "control": float(control[0]),
                    **_interval("difference", "difference_", effect - control),
                }
            )
        shares = np.array([0, *(size / len(space) for size in sets.sizes), 1])
        areas = {"cpr": lambda f: f, "cmd": lambda f: np.abs(1 - f)}
        scores = {"all": self.at("all"), "none": self.at("none"), "all − none": self.carried}
        for name, of in areas.items():
            own, controls = (
                np.trapezoid(of(np.concatenate([0 * f[..., :1], f, 0 * f[..., :1] + 1], axis=-1)), shares, axis=-1)
                for f in (located, random)
            )
            scores |= {name: own, f"{name}, random": controls.mean(1), f"{name}, difference": own - controls.mean(1)}
        gaps = [
            np.abs(self.at("model without", j) - self.at("circuit without", j)) for j in range(len(self._subsets()))
        ]
        scores["completeness"] = np.mean(gaps, axis=0)
        rows = [{"name": name, **_interval("value", "", values)} for name, values in scores.items()]
        rest = np.delete(np.abs(estimates), sets.circuit)
        rows.append(
            {"name": "largest estimate left out", "value": float(rest.max(initial=0)), "low": np.nan, "high": np.nan}
        )
        return {
            "edges": pd.DataFrame(edges),
            "curve": pd.DataFrame(curve),
            "groups": pd.DataFrame(groups),
            "scores": pd.DataFrame(rows),
        }

    def _subsets(self) -> list[tuple[object, ...]]:
        return [name for name in self.sets.names if name[0] == "model without"]


def _interval(name: str, prefix: str, draws: Float[np.ndarray, " draw"]) -> dict[str, float]:
    """Return the value (first of `draws`) and the ends of its interval, as columns."""
    finite = draws[1:][np.isfinite(draws[1:])]
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(finite) else (np.nan, np.nan)
    return {name: float(draws[0]), f"{prefix}low": float(low), f"{prefix}high": float(high)}
