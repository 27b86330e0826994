"""Located heads beside the other heads of their layers, head by head; or a set of heads beside random sets."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

import icl_lens as il
from experiments.lab.frames import by_prompt, levels, where
from experiments.lab.intervals import Resample, clusters_of, drawn_counts, resample
from experiments.lab.study import Study


@dataclass(frozen=True)
class Comparison:
    """Located heads, best first, and for each of their layers the heads that they are compared with."""

    located: tuple[il.Head, ...]
    controls: dict[int, tuple[il.Head, ...]]

    @classmethod
    def of(cls, study: Study, located: Sequence[il.Head], most: int) -> "Comparison":
        """Controls are heads of the same layer that are not located: all of them, or `most` of them at random.

        Those of the nearest layer that has any stand in where a layer has none. Raises InputError if all of the
        model's heads are located.
        """
        rng = random.Random(study.settings.seed)
        free = [head for head in study.view.heads() if head not in {*located}]
        if not free:
            raise il.InputError(
                f"all {len(located)} heads of {study.view.name} are located, and none is left to compare with; "
                "choose fewer"
            )
        controls = {}
        for layer in dict.fromkeys(head.layer for head in located):
            nearest = min(abs(other.layer - layer) for other in free)
            same = [other for other in free if abs(other.layer - layer) == nearest]
            controls[layer] = tuple(same if len(same) <= most else sorted(rng.sample(same, most)))
        return cls(tuple(located), controls)

    @property
    def heads(self) -> tuple[il.Head, ...]:
        """Every head of it once, the located ones first."""
        return tuple(dict.fromkeys([*self.located, *(head for heads in self.controls.values() for head in heads)]))

    def rows(self, frame_of: Callable[[il.Head], pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """For each head a table of its own with columns group ("located" | "random"), layer and name.

        `layer` is that of the located heads which a random head is compared with.
        """
        for head in self.located:
            yield frame_of(head).assign(group="located", layer=head.layer, name=str(head))
        for layer, heads in self.controls.items():
            for head in heads:
                yield frame_of(head).assign(group="random", layer=layer, name=str(head))


@dataclass(frozen=True)
class Beside:
    """The means of located heads and of those they are compared with, in the data (first) and in bootstrap draws."""

    located: Float[np.ndarray, " draw"]
    random: Float[np.ndarray, " draw"]
    drawn: Resample
    controls: int
    """How many heads (or sets) located ones are compared with."""

    @property
    def named(self) -> str:
        """The controls in words: "2 other heads, which is few"."""
        return self._in_words("other head")

    @property
    def sets(self) -> str:
        """The same where heads are edited together: "5 random sets"."""
        return self._in_words("random set")

    def _in_words(self, one: str) -> str:
        few = " (few)" if self.controls < FEW else ""
        return f"{self.controls} {one}{'' if self.controls == 1 else 's'}{few}"


FEW = 5


def beside(table: pd.DataFrame, value: str, *, these: bool = False, **wanted: object) -> Beside:
    """Located heads beside random ones of their layers, drawing whole queries, and heads within layer and group.

    Each layer counts as often as it has located heads. `these`: the claim is about these very located heads, and not
    about what kind of heads they are, so that only the others are drawn.
    """
    return beside_by(table, lambda drawn, part: drawn.mean(part[value].to_numpy()), these=these, **wanted)


def beside_by(
    table: pd.DataFrame,
    statistic: Callable[[Resample, pd.DataFrame], Float[np.ndarray, " draw"]],
    *,
    these: bool = False,
    **wanted: object,
) -> Beside:
    """`beside` for any statistic of one head: from the bootstrap's weights and that head's rows, which they are for."""
    table = where(table, **wanted)
    # One numbering of clusters and one set of draws for all heads, so that what they share cancels.
    prompts = table.drop_duplicates("prompt").set_index(levels(table)).sort_index()
    ids = clusters_of(prompts.index)
    drawn = resample(ids)
    place = pd.Index(prompts.index.get_level_values("prompt"))
    of_rows: dict[bytes, Resample] = {}  # heads have the same prompts, mostly
    rng = np.random.default_rng(1)
    total: dict[str, Float[np.ndarray, " draw"]] = {"located": np.zeros(len(drawn.weights)), "random": np.zeros(1)}
    names: set[str] = set()
    located = where(table, group="located").groupby("layer")["name"].nunique()
    for group in ("located", "random"):
        sums = np.zeros(len(drawn.weights))
        for layer, count in located.items():
            part = where(table, group=group, layer=layer)
            values = []
            for name, rows in part.groupby("name", sort=False):
                if group == "random":
                    names.add(str(name))
                at = place.get_indexer(pd.Index(rows["prompt"]))
                if at.tobytes() not in of_rows:
                    of_rows[at.tobytes()] = Resample(drawn.weights[:, at], drawn.clusters)
                values.append(statistic(of_rows[at.tobytes()], rows))
            weights = np.ones((len(sums), len(values)))
            if len(values) > 1 and not (these and group == "located"):
                weights[1:] = drawn_counts(len(values), len(sums) - 1, rng)
            sums += count / located.sum() * (weights * np.stack(values, axis=1)).mean(1)
        total[group] = sums
    return Beside(total["located"], total["random"], drawn, len(names))


def matched(table: pd.DataFrame, value: str, **wanted: object) -> pd.Series:
    """By prompt, the mean over random heads, each layer counted as often as it has located heads."""
    located = where(table, group="located").groupby("layer")["name"].nunique()
    parts = [
        count / located.sum() * by_prompt(table, value, group="random", layer=layer, **wanted)
        for layer, count in located.items()
    ]
    return sum(parts[1:], parts[0])
