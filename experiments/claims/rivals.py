"""Located heads against a rival on a scale from chance to one: a tenth of what the rival leaves, or no room to tell."""

import numpy as np
from jaxtyping import Float

from experiments.lab.controls import Beside
from experiments.lab.verdict import CHANGE, Verdict, cannot_tell, verdict

SHARE_OF_ROOM = 0.1
"""The smallest advantage worth it, as a share of what the rival leaves between itself and one."""
ROOM = 0.05
"""A rival that leaves less than this is so good that no head could be better."""


def beyond(heads: Beside, rival: Float[np.ndarray, " draw"], *, unit: str, what: str, whom: str) -> Verdict:
    """Whether located heads exceed the rival by a tenth of what it leaves; undecided where that is next to nothing.

    `rival`: its mean in the data (first) and in the same draws as `heads`.
    """
    left = 1 - float(rival[0])
    if left < ROOM:
        said = f"{what} over {whom} ({rival[0]:.3g})"
        plain = verdict(heads.drawn.estimate(heads.located - rival, bounds=CHANGE), least=0.0, unit=unit, what=said)
        if plain.outcome == "not supported":
            return plain
        why = f"{whom} ({rival[0]:.3g}) leave {left:.2g} of {what}, too little for any head to be better"
        return cannot_tell(why, unit=unit)
    excess = heads.located - rival - SHARE_OF_ROOM * (1 - rival)
    said = f"{what} over {whom} ({rival[0]:.3g}), less a tenth of what they leave,"
    return verdict(heads.drawn.estimate(excess, bounds=CHANGE), least=0.0, unit=unit, what=said)
