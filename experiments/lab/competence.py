"""Whether a model does the task at all: without that, no verdict on how it does it."""

from dataclasses import dataclass, replace

import pandas as pd
import torch

from experiments.lab.frames import by_prompt
from experiments.lab.intervals import mean_estimate
from experiments.lab.reductions import correct
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict

MARGIN = 0.05
"""By how much accuracy must exceed chance, beyond its interval."""

VARIANTS = tuple(
    Variant(layout, swapped, asked=asked)
    for layout in ("order", "reorder")
    for swapped in (False, True)
    for asked in ("true", "false")
)
"""Over these, a model that always says the same label, the nearest, the first one, or that of one class of texts, is
right half the time."""


@dataclass(frozen=True)
class Competence:
    """Accuracy of the more probable label, over both labels, both orders and queries of both classes; and chance."""

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
    """The model's competence on the study's task: one number per prompt, its mean over all variants."""
    per_prompt = torch.stack([study.get(correct, variant) for variant in VARIANTS]).mean(0).numpy()
    chance = _chance(study)
    table = pd.DataFrame({"prompt": range(len(per_prompt)), "correct": per_prompt, **study.both_queries()})
    found = mean_estimate(by_prompt(table, "correct"), bounds=SHARE)
    return Competence(found.value, found.low, found.high, chance)


def _chance(study: Study) -> float:
    """What guessing gets, or saying the best label every time where some are the answer more often than others."""
    batches = [study.batch(variant) for variant in VARIANTS]
    guessing = float((1 / batches[0].label_mask.sum(-1).float()).mean())
    answers = torch.cat([batch.answer for batch in batches])
    return max(guessing, float(answers.bincount().max() / len(answers)))


def gated(verdict: Verdict, competence: Competence) -> Verdict:
    """A verdict on how the model does the task, which an incapable model leaves undecided."""
    if competence.capable:
        return verdict
    reason = (
        f"the model does not do the task (accuracy {competence.accuracy:.1%} [{competence.low:.1%}, "
        f"{competence.high:.1%}], chance {competence.chance:.0%}), so how it does it is no question; {verdict.reason}"
    )
    return replace(verdict, outcome="undecided", reason=reason, p=1.0)
