"""Peak memory, measured in child processes that do one thing each."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import icl_lens as il
from experiments.benchmark.rows import Peak
from experiments.benchmark.shapes import random_prompts
from experiments.benchmark.variants import VARIANTS

EXAMPLE = "love : bar like : bar eight : foo two : foo one :"


def peak_of(folder: Path, what: str, n: int, n_tokens: int) -> Peak:
    """Of a fresh process that loads the model and does `what` to `n` prompts.

    `what` is a variant's key, "locate", "removed" (every head, at the last position) or "explain".
    """
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmark.memory", str(folder), what, str(n), str(n_tokens)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    return Peak(f"{what}, {n:,} × {n_tokens}", **json.loads(done.stdout.splitlines()[-1]))


def _resident() -> float:
    """The process's largest resident set so far, GiB; pages of a mapped weight file count."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss would be at least that of the process this one was started from
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _measure(folder: str, what: str, n: int, n_tokens: int) -> dict[str, float]:
    """The numbers of a `Peak`, of this process."""
    model = il.load_model(folder, device="cpu")
    # Parts of a fused matrix may be views of one storage, which is counted once.
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    loaded = _resident()
    if what == "explain":
        il.explain(model, EXAMPLE, answer="foo").to_html()
    else:
        batch = il.tokenize(model, random_prompts(n, n_tokens))
        if what == "locate":
            il.locate_heads(model, batch, k=20)
        elif what == "removed":
            il.head_effects(model, batch, positions="last")
        else:
            VARIANTS[what].run(model, batch)
    return {"weights": sum(storages.values()) / 2**30, "loaded": loaded, "peak": _resident()}


if __name__ == "__main__":
    folder, what, n, n_tokens = sys.argv[1:]
    print(json.dumps(_measure(folder, what, int(n), int(n_tokens))))
