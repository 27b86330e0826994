"""All verdicts given together: how many there are, and which survive an allowance for that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.lab.results import Result
from experiments.lab.study import Ranking
from experiments.lab.verdict import Outcome, Verdict, adjusted

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Given:
    """The verdicts of a table or page, and what is left of each once their number is allowed for (Holm)."""

    results: tuple[Result, ...]
    left: dict[Key, tuple[Outcome, float]]

    @classmethod
    def of(cls, results: Sequence[Result]) -> "Given":
        """Every verdict counts, undecided ones too; a claim about no heads has one, not two."""
        keys = [_key(result, ranking) for result in results for ranking in result.verdicts]
        left = adjusted([verdict for result in results for verdict in result.verdicts.values()])
        return cls(tuple(results), dict(zip(keys, left, strict=True)))

    def every(self) -> Iterator[tuple[Result, Ranking, Verdict, float]]:
        """Result, ranking, verdict, and its p-value as adjusted."""
        for result in self.results:
            for ranking, verdict in result.verdicts.items():
                yield result, ranking, verdict, self.left[_key(result, ranking)][1]

    def survives(self, result: Result, ranking: Ranking) -> bool:
        """Whether the verdict is the same with all others allowed for."""
        return self.left[_key(result, ranking)][0] == result.verdicts[ranking].outcome

    def said(self, result: Result, ranking: Ranking) -> str:
        """ "p = 0.003, of all 0.04": the p-value and the adjusted one, with † if the verdict does not survive."""
        p = result.verdicts[ranking].p
        mark = "" if self.survives(result, ranking) else " †"
        return f"p {_small(p)}, with all {_small(self.left[_key(result, ranking)][1])}{mark}"

    def __str__(self) -> str:
        """How many verdicts of which kind, and how many do not survive."""
        outcomes = [result.verdicts[ranking].outcome for result, ranking, _, _ in self.every()]
        lost = sum(not self.survives(result, ranking) for result, ranking, _, _ in self.every())
        kinds = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("supported", "not supported", "undecided"))
        return (
            f"{len(outcomes)} verdicts are given: {kinds}; {lost} of them do not survive an allowance for their number."
        )


def _key(result: Result, ranking: Ranking) -> Key:
    return result.id, result.model, result.task, ranking


def _small(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"
