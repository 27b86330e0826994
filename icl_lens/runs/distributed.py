"""Exchange values between processes started by torchrun, `accelerate launch`, srun or mpirun.

Processes exchange only small values in main memory (batch numbers, chunks), never GPU tensors. They
therefore use gloo on GPUs too, so that tests cover the same code, and two processes can share a
GPU. If one dies, its launcher ends the others.
Sources: torch.distributed.run (environment variables), accelerate.state (launchers), srun(1) (those
of a job step).
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from icl_lens.errors import InputError, first_line

# World size variables of torchrun, Open MPI, MPICH (Intel MPI) and MVAPICH.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# Limit of one exchange; long, because a slow batch keeps the others waiting.
TIMEOUT = timedelta(days=1)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Distributed:
    """Rank of this process and world size; only rank 0, the main process, does input and output."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Device of this process; None leaves the choice to the loader."""

    @classmethod
    def from_environment(cls) -> "Distributed":
        """Connect this process to those that torchrun, `accelerate launch`, srun or mpirun started.

        Raise InputError if `accelerate launch --cpu` started a single process instead of several,
        as it does without MPI, and if the other processes cannot be reached.
        """
        _translate_slurm()
        if max(int(os.environ.get(name) or 1) for name in SIZES) < 2:
            _check_accelerate()
            return cls()
        from accelerate import PartialState

        try:
            state = PartialState(cpu=True, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                "cannot join the other processes at "
                f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}: {first_line(error)}; start "
                "all of them with the same address, port and number of processes"
            ) from None
        device = None
        if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
            device = torch.device("cuda", state.local_process_index % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return cls(state.process_index, state.num_processes, device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value in every process."""
        from accelerate.utils import broadcast_object_list

        if self.size == 1:
            return value
        return self._exchanged(lambda: broadcast_object_list([value])[0])

    def gather(self, value: Any) -> list[Any]:
        """Return all processes' values by rank."""
        from accelerate.utils import gather_object

        if self.size == 1:
            return [value]
        return self._exchanged(lambda: gather_object([value]))

    def run_on_main(self, compute: Callable[[], _Value]) -> _Value:
        """Run `compute` on the main process; return its result, or raise its InputError, in all."""
        if self.size == 1:
            return compute()
        value_or_error: Any = None
        if self.is_main:
            try:
                value_or_error = compute()
            except InputError as error:
                value_or_error = error
        value_or_error = self.broadcast(value_or_error)
        if isinstance(value_or_error, InputError):
            raise value_or_error
        return value_or_error

    def check_equal(self, digest: str) -> None:
        """Raise InputError in every process unless all have the same digest of their inputs."""
        if len(set(self.gather(digest))) > 1:
            raise InputError(
                f"all {self.size} processes must make the same call, got other prompts or options "
                "in some; pass run=il.Run(processes=1) to let each work alone"
            )

    def _exchanged(self, exchange: Callable[[], _Value]) -> _Value:
        """Return the result of `exchange`; raise InputError if another process has ended."""
        try:
            return exchange()
        except RuntimeError as error:
            raise InputError(
                f"another process has ended ({first_line(error)}); rerun with the same settings "
                "and any number of processes: with a folder (--out), it resumes from its chunks"
            ) from None


def _translate_slurm() -> None:
    """Tell torch about the tasks of a job step that srun started.

    Only srun sets SLURM_STEP_NUM_TASKS: a batch script without it is one process, whatever its
    --ntasks.
    """
    environment = os.environ
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "WORLD_SIZE" in environment:
        return
    # The first of a list such as node[03-05,07],other.
    first_node = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", environment["SLURM_STEP_NODELIST"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    port = 20000 + (7 * job + step) % 10000
    environment.setdefault("MASTER_ADDR", "".join(first_node.groups("")) if first_node else "")
    environment.setdefault("MASTER_PORT", str(port))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]


def _check_accelerate() -> None:
    """Raise InputError if `accelerate launch` started one process instead of several.

    With --cpu, `accelerate launch` starts one process, or those of --mpirun_hostfile, and sets
    MASTER_ADDR if several were requested.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and os.environ.get("MASTER_ADDR"):
        raise InputError(
            "`accelerate launch --cpu` starts a single process whatever --num_processes is; use "
            "`torchrun --nproc_per_node 2 -m icl_lens …` or `accelerate launch --multi_gpu "
            "--num_processes 2 -m icl_lens …`, which also work without a GPU; a single one needs "
            "no launcher"
        )
