"""How much there is to do: prompts through the model, known beforehand or estimated, done, and how fast they go.

What an experiment will ask for depends on what it finds (which heads, how many neurons), so its work is estimated;
when it ends, what it really took stands in the estimate's place.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.lab.experiment import Experiment
from experiments.lab.study import Need, Study

Estimate = Callable[[Any, "Size"], float]

WHOLE = 48
"""Heads of a model of which all prompts are edited at all positions where each edit is a pass over whole prompts: of a
model with ten times as many heads a tenth of the prompts is.
"""
SHARED = 384
"""The same at the last position, where an edit is a row of one token."""


@dataclass(frozen=True)
class Size:
    """What estimates are made from."""

    prompts: int
    """Of one variant."""
    test: int
    """Of them, those that are tested on."""
    heads: int
    layers: int


def _bias(config: Any, size: Size) -> float:
    held, tested = 1 + 2 * 4 * (1 + config.draws), 1 + 2 * (1 + config.draws)  # fixes, of both rankings
    # A row of one token costs about a tenth of a prompt. Half of it is each ranking's.
    return 4.0 * ((1 + 0.1 * tested) * size.test + (1 + 0.1 * held) * min(100, size.prompts - size.test))


def _location_methods(config: Any, size: Size) -> float:
    whole, shared = (min(1.0, heads / size.heads) for heads in (WHOLE, SHARED))  # of the prompts are edited
    few = min(config.ranked, size.prompts - size.test) * shared
    judged = config.judged_at_all * whole
    sets = 2 * (7 + config.draws) * (size.heads - 1).bit_length() if judged >= 2 else 0
    # A row of one token costs about a tenth of a prompt.
    rows = 0.1 * 2 * (7 * (1 + config.controls) + config.draws) * (size.heads - 1).bit_length()
    return 8 * (10 * few + rows * min(config.judged, size.test) * shared + few * whole * size.heads / 2 + judged * sets)


MOST_LAYERS = 16
"""Layers that a vector is added behind in turn."""

# Prompts through the model beside the shared passes: rows of one token for every head or fix, which share their
# prompt's keys, count as ten prompts or one. Experiments that are not here need few or none.
ESTIMATES: dict[str, Estimate] = {
    "ablation": lambda config, size: 2 * (3 + min(config.draws, size.test) + config.mean_draws) * size.test,
    "best-head": lambda config, size: 4 * size.test + 2 * (5 + 2 * config.edited) * min(config.prompts, size.test),
    "causal-location": lambda config, size: (
        2 * (3 + min(config.draws, size.test) + config.mean_draws) * size.test
        + 20 * min(config.prompts, size.prompts - size.test)
    ),
    "common-heads": lambda config, size: 2 * size.test,
    "neighbours": lambda config, size: 6 * min(config.prompts, size.test),
    "attention-vs-increase": lambda config, size: size.test,
    "copy": lambda config, size: 2 * min(config.prompts, size.test),
    "ffn": lambda config, size: 5 * min(config.prompts, size.test),
    "function-vectors": lambda config, size: (
        20 * min(config.prompts, size.prompts - size.test)
        + 0.1 * size.prompts * min(MOST_LAYERS, size.layers) * (7 + 3 * config.random_sets) / 2
    ),
    "head-atlas": lambda config, size: 22 * min(config.prompts, size.test),
    "head-count": lambda config, size: 2 * 10 * size.test,
    "label-features": lambda config, size: 2 * size.test,
    "label-rank": lambda config, size: size.test,
    "learning-kind": lambda config, size: (
        4 * min(config.prompts, size.prompts) * (len(config.shots) + 2 + config.draws)
    ),
    "location-methods": _location_methods,
    "majority-bias": _bias,
    "metric": lambda config, size: 2 * min(config.prompts, size.prompts),
    "prediction-shift": lambda config, size: 2 * size.test,
    "recency-bias": _bias,
    "shallow-flow": lambda config, size: size.prompts * (2 + size.layers - round(config.window * size.layers)) / 2,
    "task-transfer": lambda config, size: 2 * (3 + config.draws) * size.test,
    "two-tower": lambda config, size: (5 + 8 + 0.5 * (1 + config.draws)) * size.test,
    "vocabulary": lambda config, size: size.test,
}


@dataclass
class Work:
    """The whole run's work in prompts; a `Meter`."""

    changed: Callable[["Work"], None] = lambda work: None
    """Called whenever something is done."""
    what: str = ""
    """What is being done."""
    done: int = 0
    computed: int = 0
    """Of those done, not found in the folder."""
    later: int = 0
    """Runs like this one that are to come, each of about as much work."""
    _whole: float = 0.0
    _open: dict[str, float] = field(default_factory=dict)
    _part: str = ""
    _in_part: int = 0
    _since: float | None = None

    def expect(self, study: Study, needs: Iterable[Need], experiments: Sequence[Experiment]) -> None:
        """Sets down what a study's shared passes and the experiments will need."""
        size = Size(study.settings.n, len(study.test), study.view.n_layers * study.view.n_heads, study.view.n_layers)
        variants = {study.own(need.variant) for need in needs}
        self._open = {"shared": float(len(variants) * size.prompts)}
        for experiment in experiments:
            estimate = ESTIMATES.get(experiment.id)
            self._open[experiment.id] = (
                0.0 if estimate is None else float(estimate(experiment.config, size) * len(experiment.rankings))
            )
        self._whole = sum(self._open.values())
        self._part, self._in_part = "", 0

    def begin(self, part: str) -> None:
        self._part, self._in_part = part, 0

    def end(self) -> None:
        """The part under way took what it took."""
        self._open.pop(self._part, None)
        self.changed(self)

    def __call__(self, what: str, prompts: int, *, computed: bool) -> None:
        if computed and self._since is None:
            self._since = time.monotonic()
        self.what = what
        self.done += prompts
        self._in_part += prompts
        if computed:
            self.computed += prompts
        self.changed(self)

    @property
    def total(self) -> int:
        """Prompts in all: those done, and those that are expected still."""
        left = self.later * self._whole
        left += sum(expected for part, expected in self._open.items() if part != self._part)
        return self.done + round(left + max(0.0, self._open.get(self._part, 0.0) - self._in_part))

    @property
    def rate(self) -> float | None:
        """Prompts a second, of those that were computed."""
        spent = 0.0 if self._since is None else time.monotonic() - self._since
        return self.computed / spent if spent > 0.5 else None

    @property
    def left(self) -> float | None:
        """Seconds that are left at this rate."""
        return None if not self.rate else (self.total - self.done) / self.rate
