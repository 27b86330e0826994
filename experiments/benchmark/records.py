"""What the benchmark finds, line by line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table of times; `parts` are those evaluated exactly, of all."""

    model: str
    prompts: str
    variant: str
    seconds: float | None = None
    ratio: float | None = None
    runs: int = 0
    parts: str = ""
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        seconds = "" if self.seconds is None else f"{self.seconds:.3g}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (self.model, self.prompts, self.variant, seconds, ratio, str(self.runs or "–"), self.parts, self.note)


@dataclass(frozen=True)
class Peak:
    """A line of the table of memory, of one process, GiB, and what it took without loading, seconds.

    The model's weights, and the largest resident set after loading and at the end.
    """

    what: str
    weights: float
    loaded: float
    peak: float
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        numbers = (self.weights, self.loaded, self.peak, self.peak - self.weights, self.peak / self.weights)
        return (self.what, *(f"{number:.2f}" for number in numbers), f"{self.seconds:.3g}")
