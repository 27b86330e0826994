"""Stream prompts in batches: each batch yields a chunk, computed by one of the processes or read from the run's folder.

1. `plan_batches` groups prompts of similar length, after a first batch that covers all lengths.
2. `ChunkStream.chunks` computes the batches that have no stored chunk, one batch per process in each round. The main
   process stores every chunk and yields all of them in order, so sums do not depend on the number of processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from icl_lens.errors import InputError
from icl_lens.locate.chunk import chunk_name
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.run_folder import CorruptChunk, RunFolder
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress
from icl_lens.prompts.batch import PromptBatch

# Memory limit of a batch's activations, as estimated by `prompt_bytes`.
BYTE_BUDGET = 64 * 2**20
# Limit of prompts per batch: above it, matrix products get no faster, and a lost chunk costs more to recompute.
MAX_ROWS = 64

Columns = Mapping[str, Any]


def prompt_bytes(view: ModelView, width: int) -> int:
    """Estimate the memory of a prompt of `width` tokens while its batch is captured, bytes."""
    layers, d_model, heads = view.n_layers, view.d_model, view.n_heads
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * d_model)
    kept = layers * (7 * d_model + 2 * heads * view.d_head + d_mlp + width * (view.n_kv_heads * view.d_head + heads))
    temporary = width * (4 * d_mlp + 8 * d_model) + 4 * heads * width**2
    return (kept + temporary) * view.model.W_U.element_size()


def plan_batches(
    view: ModelView, batch: PromptBatch, *, batch_size: int | None = None, byte_budget: int = BYTE_BUDGET
) -> list[list[int]]:
    """Return the rows of each batch: `batch_size` prompts or, by default, up to `MAX_ROWS` that fit `byte_budget`.

    Prompts of a batch are of similar length, except in the first, which covers all lengths and serves to choose
    candidate heads (see `locate`). The plan depends only on the lengths of prompts, the options, and the model's shape.
    Raise InputError if `batch_size` or `byte_budget` is below 1.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if byte_budget < 1:
        raise InputError(f"byte_budget must be at least 1, got {byte_budget}")

    def rows_of(width: int) -> int:
        return batch_size or max(1, min(MAX_ROWS, byte_budget // prompt_bytes(view, width)))

    lengths = (batch.last + 1).tolist()
    order = sorted(range(len(batch)), key=lambda row: (lengths[row], row))
    pilot_size = min(rows_of(max(lengths)), len(order))
    pilot = [order[(2 * i + 1) * len(order) // (2 * pilot_size)] for i in range(pilot_size)]
    rest = sorted(set(order) - set(pilot), key=lambda row: (lengths[row], row), reverse=True)
    batches = [pilot]
    while rest:
        size = rows_of(lengths[rest[0]])
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


@dataclass(frozen=True)
class ChunkStream:
    """The batches of a run, where their chunks are stored, and the processes that compute them.

    A chunk is the table of a batch's results; `compute(number)` returns the columns of batch `number`.
    """

    plan: list[list[int]]
    folder: RunFolder | None
    distributed: Distributed
    progress: Progress
    warn: Callable[[str], None] | None

    def first(self, compute: Callable[[int], Columns]) -> pa.Table:
        """Return the first batch's chunk in every process."""
        chunk = None
        if self.distributed.is_main:
            self.progress("part", 0, sum(map(len, self.plan)))
            chunk = self._stored("part", 0)
            if chunk is None:
                chunk = self._store("part", 0, pa.table(compute(0)))
        return self.distributed.broadcast(chunk)

    def chunks(
        self, kind: str, numbers: Sequence[int], compute: Callable[[int], Columns], *, done: int = 0
    ) -> Iterator[pa.Table]:
        """Yield the chunks of these batches in order, in the main process; other processes compute but yield nothing.

        `done` is the number of prompts finished before this call (for the progress display). If one process raises
        InputError, all do. A corrupt chunk is reported through `warn` and recomputed.
        """
        total = done + sum(len(self.plan[number]) for number in numbers)
        is_main = self.distributed.is_main
        if is_main:
            self.progress(kind, done, total)
        missing = {number for number in numbers if self._stored(kind, number) is None} if is_main else set()
        missing = self.distributed.broadcast(missing)
        computed = self._computed([number for number in numbers if number in missing], compute)
        for number in numbers:
            new = next(computed) if number in missing else None
            if is_main:
                chunk = self._stored(kind, number) if new is None else self._store(kind, number, new)
                assert chunk is not None, f"{chunk_name(kind, number)} disappeared"
                done += len(self.plan[number])
                self.progress(kind, done, total)
                yield chunk

    def _computed(self, numbers: Sequence[int], compute: Callable[[int], Columns]) -> Iterator[pa.Table]:
        """Yield the chunks of these batches, in order, in every process."""
        size, rank = self.distributed.size, self.distributed.rank
        for start in range(0, len(numbers), size):
            in_round = numbers[start : start + size]
            result: pa.Table | InputError | None = None
            if rank < len(in_round):
                try:
                    result = pa.table(compute(in_round[rank]))
                except InputError as error:
                    if size == 1:
                        raise
                    result = error
            results = self.distributed.gather(result)[: len(in_round)]
            # If one process fails, raise in all of them; otherwise the others would wait for it forever.
            if error := next((one for one in results if isinstance(one, InputError)), None):
                raise error
            yield from results

    def _store(self, kind: str, number: int, chunk: pa.Table) -> pa.Table:
        if self.folder is not None:
            self.folder.write(chunk_name(kind, number), chunk)
        return chunk

    def _stored(self, kind: str, number: int) -> pa.Table | None:
        """Return a stored chunk; None if it does not exist or is corrupt, which is reported through `warn`."""
        if self.folder is None:
            return None
        try:
            return self.folder.read(chunk_name(kind, number))
        except CorruptChunk as error:
            if self.warn is not None:
                self.warn(f"{error}; recomputing")
            return None
