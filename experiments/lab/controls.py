"""Located heads beside random heads of the same layers, head by head."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

import icl_lens as il
from experiments.lab.study import Study


@dataclass(frozen=True)
class Comparison:
    """Located heads, best first, and many draws of as many random heads, each from its counterpart's layer."""

    located: tuple[il.Head, ...]
    draws: tuple[tuple[il.Head, ...], ...]

    @classmethod
    def of(cls, study: Study, located: Sequence[il.Head], draws: int) -> "Comparison":
        """The located heads of a study with that many draws; raises InputError if the model has too few heads."""
        drawn = study.controls(located, draws, distinct=False)
        return cls(tuple(located), tuple(tuple(heads) for heads in drawn))

    @property
    def heads(self) -> tuple[il.Head, ...]:
        """Every head of it once, the located ones first."""
        return tuple(dict.fromkeys([*self.located, *(head for drawn in self.draws for head in drawn)]))

    def groups(
        self, values_of: Callable[[il.Head], Float[np.ndarray, "..."]]
    ) -> Iterator[tuple[il.Head, str, Float[np.ndarray, "..."]]]:
        """For each located head its values ("located"), then the mean of its random counterparts' ("random")."""
        for rank, head in enumerate(self.located):
            yield head, "located", values_of(head)
            yield head, "random", np.mean([values_of(drawn[rank]) for drawn in self.draws], axis=0)
