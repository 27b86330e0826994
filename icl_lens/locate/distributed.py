"""The processes that torchrun, `accelerate launch` or mpirun started together; one, if none of them did.

What travels between them are small values in main memory (numbers of batches, chunks), never a tensor on a GPU. So
they are connected by gloo on GPUs too: what runs there is what the tests run, and two processes may share a GPU.
Sources: torch.distributed.run (the environment of a process), accelerate.commands.launch (which launcher starts what).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from icl_lens.errors import InputError
from icl_lens.locate.heartbeat import Heartbeat

# How many there are, in the environment that torchrun, Open MPI, MPICH (Intel MPI) and MVAPICH make.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# For the others to start. Once connected no time limit could tell a slow batch from a dead process: `Watch` does.
JOIN = timedelta(minutes=10)
FOREVER = timedelta(days=365)
# Seconds: so long a process with an error waits for the first to meet it, too.
FIRST_SPEAKS = 5.0

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Processes:
    """This process's rank and the number of processes; rank 0 alone reads, writes and prints."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """The device that belongs to this process; None leaves the choice to the loader."""
    group: Any = None
    """The gloo group that connects them."""
    watch: Heartbeat | None = None
    """Knows which of the others are alive; ends this process when one of them dies."""

    @classmethod
    def from_environment(cls) -> "Processes":
        """This process among those of torchrun, `accelerate launch` or mpirun, connected to them.

        Raises InputError where `accelerate launch --cpu` was asked for several processes and started one, as it does
        without MPI, and where the others cannot be reached.
        """
        if max(int(os.environ.get(name) or 1) for name in SIZES) < 2:
            _check_accelerate()
            return cls()
        from accelerate.utils.environment import get_cpu_distributed_information

        place = get_cpu_distributed_information()
        group = _connected(place.rank, place.world_size)
        device = None
        if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        alone = place.local_world_size == place.world_size
        host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
        watch = Heartbeat(place.rank, place.world_size, place.rank - place.local_rank)
        processes = cls(place.rank, place.world_size, device, group, watch)
        try:
            watch.begin(host, *processes.broadcast(watch.listen("127.0.0.1" if alone else "")))
        except (OSError, EOFError) as error:
            raise InputError(
                f"process {place.rank} of {place.world_size} cannot reach the first one at {host}: {error}; "
                "--master_addr (accelerate: --main_process_ip) must name the first machine, and its firewall let in "
                "the others"
            ) from None
        return processes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mark_reported(self) -> None:
        """This process ends with an error that it tells itself: the others end without a word."""
        if self.watch is not None:
            self.watch.explained()

    def main_also_failed(self) -> bool:
        """Whether the first process, being another, tells of an error now: most errors are met by all of them."""
        return self.watch is not None and self.rank > 0 and self.watch.main_failed(within=FIRST_SPEAKS)

    def broadcast(self, value: Any) -> Any:
        """The first process's value, in every process."""
        if self.size == 1:
            return value
        from torch.distributed import broadcast_object_list

        values = [value]
        self._exchanged(lambda: broadcast_object_list(values, src=0, group=self.group))
        return values[0]

    def run_on_main(self, find: Callable[[], _Value]) -> _Value:
        """What the first process finds, in every process; where it raises InputError, all do."""
        if self.size == 1:
            return find()
        found: Any = None
        if self.is_main:
            try:
                found = find()
            except InputError as error:
                found = error
        found = self.broadcast(found)
        if isinstance(found, InputError):
            raise found
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in their order, in the first process; None for each of them in the others."""
        values = [value] if self.size == 1 else [None] * self.size
        if self.size > 1:
            from torch.distributed import gather_object

            self._exchanged(lambda: gather_object(value, values if self.is_main else None, dst=0, group=self.group))
        return values

    def _exchanged(self, exchange: Callable[[], _Value]) -> _Value:
        """The exchange; where it breaks off, another process is gone, and the watch ends this one."""
        try:
            return exchange()
        except RuntimeError:
            if self.watch is not None:
                self.watch.exit_if_peer_lost()
            raise


def _connected(rank: int, size: int) -> Any:
    import torch.distributed as dist

    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=rank, world_size=size, timeout=JOIN)
        return dist.new_group(backend="gloo", timeout=FOREVER)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"process {rank} of {size} cannot join the others at {os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:"
            f"{os.environ['MASTER_PORT']}: {str(error).strip().splitlines()[0]}; start all of them, with one address, "
            "port and number of processes"
        ) from None


def _check_accelerate() -> None:
    """Raises InputError where accelerate was asked for several processes, and started one.

    With --cpu it starts one process, or those of --mpirun_hostfile; it sets MASTER_ADDR if several were asked for.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and os.environ.get("MASTER_ADDR"):
        raise InputError(
            "`accelerate launch --cpu` starts one process, however many --num_processes asks for; start them with "
            "`torchrun --nproc_per_node 2 -m icl_lens …` or `accelerate launch --multi_gpu --num_processes 2 -m "
            "icl_lens …`, which also work without a GPU; a single one needs no launcher"
        )
