"""The processes that `accelerate launch` started together; one, if it did not."""

import os
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Processes:
    """This process's rank and the number of processes; rank 0 alone reads, writes and prints."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """The device that belongs to this process; None leaves the choice to the loader."""

    @classmethod
    def launched(cls) -> "Processes":
        """This process among those of `accelerate launch` (or torchrun), connected."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import PartialState

        state = PartialState()
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """The first process's value, in every process."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in their order."""
        if self.size == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])
