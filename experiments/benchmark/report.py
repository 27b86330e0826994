"""The benchmark's page, docs/benchmark.md or docs/benchmark-gpu.md: machine, times and memory."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from experiments.framework import markdown

PACKAGES = ("torch", "transformers", "transformer-lens", "icl-lens")


@dataclass(frozen=True)
class Row:
    """A line of the table of times; `parts` says how many parts of all were evaluated exactly."""

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
    """A line of the table of memory, for one process: GiB, and the seconds that it took after loading.

    `loaded` and `peak` are the largest resident set after loading and at the end.
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


def machine() -> list[str]:
    """Return lines on the processor, GPU and packages that the numbers were measured with."""
    cpu = platform.processor() or platform.machine()
    known = Path("/proc/cpuinfo")
    if known.exists():
        names = [line.split(":")[1].strip() for line in known.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    n = torch.get_num_threads()
    lines = [f"{cpu}, {os.cpu_count()} cores, {n} thread{'s' * (n != 1)}, {ram:.0f} GiB of memory"]
    if torch.cuda.is_available():
        lines.append(torch.cuda.get_device_name())
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return [*lines, f"Python {platform.python_version()}, {packages}"]


def document(rows: Sequence[Row], peaks: Sequence[Peak]) -> str:
    """Return the page in Markdown."""
    where = " on a GPU" if torch.cuda.is_available() else ""
    lines = [f"# Benchmark{where}", "", "Made by `python -m experiments.benchmark`; one run.", ""]
    lines += [f"* {line}" for line in machine()]
    lines += [
        "",
        "Times are medians over the runs given, in seconds, measured in alternation; ratios are to the bare "
        "forward pass over the same prompts, in the same run. A part is a (layer, head, position). Weights of the "
        "large shapes are random, scaled so that neither attention nor predictions are uniform.",
        "",
        markdown.table(
            ["model", "prompts × tokens", "variant", "seconds", "ratio", "runs", "evaluated exactly", ""],
            (row.cells() for row in rows),
            align="lllrrrll",
        ),
    ]
    if peaks:
        lines += [
            "",
            "Peak resident memory of a process that does nothing else, GiB. Libraries are part of it; so are the pages "
            "of the weight file that loading has read. Weights are the loaded model's; anything else that it "
            "keeps counts as peak. Seconds are those of one run after loading.",
            "",
            markdown.table(
                ["what", "weights", "after loading", "peak", "peak − weights", "peak ÷ weights", "seconds"],
                (peak.cells() for peak in peaks),
            ),
        ]
    return "\n".join(lines) + "\n"
