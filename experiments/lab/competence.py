"""Whether a model does the task at all: without that, no verdict on how it does it."""

from dataclasses import dataclass, replace

import torch

from experiments.lab.reductions import correct
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict
from icl_lens.metrics import bootstrap_interval

MARGIN = 0.05
"""By how much accuracy must exceed chance, beyond its interval."""

VARIANTS = tuple(Variant(layout, swapped) for layout in ("order", "reorder") for swapped in (False, True))
"""Over these, a model that always says the same label, or the nearest, or the first one, is right half the time."""


@dataclass(frozen=True)
class Competence:
    """Accuracy of the more probable label, averaged over both labels as the answer and both orders, and chance."""

    accuracy: float
    low: float
    high: float
    chance: float

    @property
    def capable(self) -> bool:
        """Whether accuracy is above chance by more than `MARGIN`."""
        return self.low > self.chance + MARGIN


NEEDS = tuple(Need(variant, correct) for variant in VARIANTS)
"""What `measure` reads."""


def measure(study: Study) -> Competence:
    """The model's competence on the study's task: one number per prompt, its mean over the four variants."""
    per_prompt = torch.stack([study.get(correct, variant) for variant in VARIANTS]).mean(0)
    chance = float((1 / study.batch().label_mask.sum(-1).float()).mean())
    accuracy, low, high = bootstrap_interval(per_prompt.numpy())
    return Competence(accuracy, low, high, chance)


def gated(verdict: Verdict, competence: Competence) -> Verdict:
    """A verdict on how the model does the task, which an incapable model leaves undecided."""
    if competence.capable:
        return verdict
    reason = (
        f"the model does not do the task (accuracy {competence.accuracy:.1%} [{competence.low:.1%}, "
        f"{competence.high:.1%}], chance {competence.chance:.0%}), so how it does it is no question; {verdict.reason}"
    )
    return replace(verdict, outcome="undecided", reason=reason)
