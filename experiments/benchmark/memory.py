"""Peak memory, measured in child processes that do one thing each."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

import icl_lens as il
from experiments.benchmark.model_shapes import random_prompts
from experiments.benchmark.report import Peak
from experiments.benchmark.variants import VARIANTS

EXAMPLE = "love : bar like : bar eight : foo two : foo one :"


def peak_of(folder: Path, what: str, n: int, n_tokens: int, *, dtype: torch.dtype = torch.float32) -> Peak:
    """Return the peak of a fresh process that loads the model in this precision and does `what` to `n` prompts.

    `what` is a variant's key, "locate", "removed" (every head, at the last position) or "explain".
    """
    named = str(dtype).removeprefix("torch.")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmark.memory", str(folder), what, str(n), str(n_tokens), named],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    size = f"{what}, {n:,} × {n_tokens}"
    shown = f"{folder.name}, {size}" + ("" if dtype == torch.float32 else f", {named}")
    return Peak(shown, **json.loads(done.stdout.splitlines()[-1]))


def _resident() -> float:
    """Return the process's largest resident set so far, GiB; pages of a mapped weight file count."""
    # Not ru_maxrss, which is at least that of the parent process.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def _measure(folder: str, what: str, n: int, n_tokens: int, dtype: str) -> dict[str, float]:
    """Return the numbers of a `Peak` for this process."""
    model = il.load_model(folder, device="cpu", dtype=getattr(torch, dtype))
    # Parts of a fused matrix may be views of one storage, which is counted once.
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    loaded = _resident()
    start = time.perf_counter()
    if what == "explain":
        il.explain(model, il.Prompt.parse(EXAMPLE, answer="foo")).to_html()
    else:
        batch = il.tokenize(model, random_prompts(n, n_tokens))
        if what == "locate":
            il.locate_heads(model, batch, k=20, by="increase")
        elif what == "removed":
            il.head_effects(model, batch)
        else:
            VARIANTS[what].run(model, batch)
    seconds = time.perf_counter() - start
    return {"weights": sum(storages.values()) / 2**30, "loaded": loaded, "peak": _resident(), "seconds": seconds}


if __name__ == "__main__":
    folder, what, n, n_tokens, dtype = sys.argv[1:]
    print(json.dumps(_measure(folder, what, int(n), int(n_tokens), dtype)))
