"""How benchmarks time calls, and the tables that they write.

Calls are timed in alternation, so that a busy machine slows all of them; times are medians, and
ratios are within the run.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

PACKAGES = ("torch", "transformers", "transformer-lens", "icl-lens")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, until the GPU has finished, and what it returns."""
    start = time.perf_counter()
    value = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def time_in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each call after a first run that is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timed(call)[0])
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """Return a line on the processor, GPU and packages that numbers were measured with."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":")[1].strip()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    threads = torch.get_num_threads()
    return f"{cpu}{gpu}, {os.cpu_count()} cores, {threads} threads; {packages}"


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table as csv beside its place and move it there; print it and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.part")
    table.to_csv(temporary, index=False, float_format="%.4g", lineterminator="\n")
    os.replace(temporary, path)
    print(table.to_string(index=False))
    print(machine())
