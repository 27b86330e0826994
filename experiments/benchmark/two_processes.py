"""Locating heads by two processes of one thread each, relative to one such process, as complete commands."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from experiments.benchmark.report import Row

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def two_processes(folder: Path, n: int) -> Iterator[Row]:
    """Time `icl-lens locate`, including start and loading, and compare the two tables of heads."""
    with tempfile.TemporaryDirectory() as temporary:
        one, alone = _located((), folder, n, Path(temporary) / "one")
        two, shared = _located(TORCHRUN, folder, n, Path(temporary) / "two")
    both = alone.merge(shared, on=["layer", "head"], suffixes=("", "_shared"))
    same = "the same" if len(both) == len(alone) == len(shared) else "OTHER"
    error = (both["increase"] - both["increase_shared"]).abs().max()
    prompts, label = f"{n:,} prompts", "icl-lens locate, whole command,"
    yield Row(folder.name, prompts, f"{label} one process of one thread", one, 1.0, 1)
    note = f"{one / two:.2f} × faster; {same} {len(alone)} heads, values differ by at most {error:.0e} nats"
    yield Row(folder.name, prompts, f"{label} two processes of one thread", two, two / one, 1, note=note)


def _located(launcher: tuple[str, ...], folder: Path, n: int, out: Path) -> tuple[float, pd.DataFrame]:
    """Return the seconds of one command and its table of heads."""
    task = ["--task", "sentiment-number", "-n", str(n), "--top", "20", "--by", "increase"]
    command = [sys.executable, *launcher, "-m", "icl_lens", "locate", *task, "--model", str(folder), "--out", str(out)]
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    return time.perf_counter() - start, pd.read_parquet(out / "heads.parquet")
