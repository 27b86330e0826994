"""The located heads: what each adds to the answer and to its log-odds, and whether it tells the labels apart."""

from dataclasses import dataclass

from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.reductions import head_contrasts, head_increases
from experiments.lab.study import RANKINGS, Need, Ranking, Study
from icl_lens.report.findings import TELLS_APART

HEADS = 6
"""Located for each label, by contrast for both together, as in most experiments (at most one in eight)."""

NEEDS = tuple(Need(variant, reduction) for variant in (FOO, BAR) for reduction in (head_increases, head_contrasts))
"""What `located_heads` reads."""


@dataclass(frozen=True)
class LocatedHead:
    """A located head, and its means (nats) on the prompts that heads are chosen on, over both labels as the answer."""

    head: str
    increase: float
    contrast: float
    ranked_by: Ranking

    @property
    def tells_apart(self) -> bool:
        """Whether the contrast is at least half of a positive increase, as in explanations."""
        return self.increase > 0 and self.contrast >= TELLS_APART * self.increase


def located_heads(study: Study) -> tuple[LocatedHead, ...]:
    """The heads located for either label, best first, by increase and then by contrast."""
    chosen = study.halves[0]
    increase, contrast = (
        (study.get(reduction, FOO)[chosen].mean(0) + study.get(reduction, BAR)[chosen].mean(0)) / 2
        for reduction in (head_increases, head_contrasts)
    )
    return tuple(
        LocatedHead(str(head), round(float(increase[head]), 6), round(float(contrast[head]), 6), ranking)
        for ranking in RANKINGS
        for head in located_for_both(study.ranked_by(ranking), study.few(HEADS))
    )
