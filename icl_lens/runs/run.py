"""How a computation over many prompts is run."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from icl_lens.errors import InputError, check_at_least, short_repr
from icl_lens.models.passes.memory import BUDGET
from icl_lens.runs.distributed import Distributed
from icl_lens.runs.progress import Progress


@dataclass(frozen=True)
class Run:
    """How a function over many prompts runs: the `run=` of `il.locate`, `two_towers` and others.

    With a `folder`, each batch of prompts is stored there as a chunk. The same call with the same
    folder resumes an interrupted run: it computes only the missing chunks and returns the same
    numbers. Several processes may work on one folder at once, such as the tasks of a Slurm array:
    each takes chunks that no other is computing. Raise InputError if the folder holds a run with
    other prompts, options, weights or versions, or is not writable.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> il.locate(model, many, k=4, run=il.Run(batch_size=5, processes=1)).n_prompts
        20
    """

    folder: str | Path | None = None
    """Where chunks and results are stored; None stores nothing."""
    _: KW_ONLY
    batch_size: int | None = None
    """Prompts per batch; None is as many as fit `memory`, 64 at most."""
    memory: int = BUDGET
    """Limit of a batch's activations in bytes, by an estimate; a GPU can take 2**30.

    At least one prompt runs, whatever the limit.
    """
    progress: Progress | bool | None = None
    """None shows a bar after two seconds, in terminals and notebooks, True always, and False never.

    A function is called with the name of a stage, the number of finished prompts, and the total.
    """
    processes: int | None = None
    """None shares the work between all processes that torchrun, accelerate, Slurm or MPI started.

    Each process makes the same call and gets the same result. 1 is this process alone.
    """
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the folder's manifest, such as the task's name.

    A run with other entries needs another folder.
    """

    def __post_init__(self) -> None:
        check_at_least(1, memory=self.memory)
        if self.batch_size is not None:
            check_at_least(1, batch_size=self.batch_size)
        if self.processes not in (None, 1):
            raise InputError(
                f"processes must be None (all that a launcher started) or 1, got "
                f"{short_repr(self.processes)}; start several "
                "with torchrun, accelerate, srun or mpirun"
            )

    @property
    def distributed(self) -> Distributed:
        """This process among those that share the work."""
        return Distributed() if self.processes == 1 else Distributed.from_environment()

    @property
    def device(self) -> torch.device | None:
        """The GPU of this process, for `load_model(device=)`; None without a launcher."""
        return self.distributed.device

    def step(self, name: str) -> "Run":
        """Return the run of one step of the computation, in the folder of that name in `folder`."""
        return self if self.folder is None else replace(self, folder=Path(self.folder) / name)


def as_run(run: Run | None) -> Run:
    """Return the run, `Run()` for None; raise InputError for anything else."""
    if run is None or isinstance(run, Run):
        return run or Run()
    raise InputError(
        f"run must be an il.Run, got {short_repr(run)}; pass e.g. run=il.Run('runs/located')"
    )
