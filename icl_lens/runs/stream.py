"""Stream prompts in batches, whose chunks processes compute or read from the run's folder.

1. `plan_batches` groups prompts of similar length, after a first batch that covers all lengths;
   `plan_in_order` takes them as they come.
2. `start` joins the processes, and initializes the folder with the run's configuration.
3. `ChunkStream.chunks` computes the batches that have no stored chunk, one batch per process in
   each round. The main process stores every chunk and yields all of them in order, so sums do not
   depend on the number of processes. Other runs in the same folder compute other chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import pyarrow as pa
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.digest import json_digest
from icl_lens.models.passes.memory import BUDGET, MAX_ROWS
from icl_lens.models.sizes import captured_bytes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest
from icl_lens.runs.configuration import configuration
from icl_lens.runs.distributed import Distributed
from icl_lens.runs.folder import CorruptChunk, FolderError, RunFolder
from icl_lens.runs.progress import Progress, progress_callback
from icl_lens.runs.run import Run, as_run

Columns = Mapping[str, Any]
Plan = list[list[int]]
"""The rows of each batch."""


def chunk_name(kind: str, number: int) -> str:
    """Return a chunk's file name; `kind` is what it holds, e.g. "part" for a first pass."""
    return f"{kind}-{number:05d}.parquet"


def plan_batches(view: ModelView, batch: PromptBatch, run: Run | None = None) -> Plan:
    """Return the rows of each batch, whose prompts are of similar length.

    A batch has `run.batch_size` prompts or, by default, up to `MAX_ROWS` that fit `run.memory`. The
    first batch has prompts of all lengths, so that its duration tells how long the run will take.
    The plan depends only on the lengths of prompts, the options, and the model's shape.
    """
    run = as_run(run)

    def rows_of(width: int) -> int:
        return run.batch_size or max(1, min(MAX_ROWS, run.memory // captured_bytes(view, width)))

    lengths = (batch.last + 1).tolist()
    order = sorted(range(len(batch)), key=lambda row: (lengths[row], row))
    pilot_size = min(rows_of(max(lengths)), len(order))
    pilot = []
    for number in range(pilot_size):  # the middles of as many equal parts of the order
        middle = (2 * number + 1) * len(order) // (2 * pilot_size)
        pilot.append(order[middle])
    longest_first = sorted(
        set(order) - set(pilot), key=lambda row: (lengths[row], row), reverse=True
    )
    batches = [pilot]
    while longest_first:
        size = rows_of(lengths[longest_first[0]])
        batches.append(longest_first[:size])
        longest_first = longest_first[size:]
    return batches


def plan_in_order(batch: PromptBatch, run: Run | None, *, n_tokens: int) -> Plan:
    """Return the rows of each batch, in the order of the prompts.

    A batch has `run.batch_size` prompts or, by default, as many as have `n_tokens` tokens with the
    default `run.memory`, and more or fewer in proportion to it.
    """
    run = as_run(run)
    size = run.batch_size or max(1, n_tokens * run.memory // BUDGET // batch.tokens.shape[1])
    rows = list(range(len(batch)))
    return [rows[start : start + size] for start in range(0, len(batch), size)]


@dataclass(frozen=True)
class ChunkStream:
    """The batches of a run, where their chunks are stored, and the processes that compute them.

    A chunk is the table of a batch's results; `compute(number)` returns the columns of batch
    `number`.
    """

    plan: Plan
    batch: PromptBatch
    folder: RunFolder | None
    distributed: Distributed
    progress: Progress

    def chunks(
        self,
        kind: str,
        numbers: Sequence[int],
        compute: Callable[[int], Columns],
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the number and the chunk of these batches, in order, in the main process only.

        If one process raises InputError, all do. A corrupt chunk is recomputed, with a warning.
        """
        broadcast = self.distributed.broadcast
        if not self.distributed.is_main:
            while in_round := broadcast(None):
                self._compute(in_round, compute)
            return
        done, total = 0, sum(len(self.plan[number]) for number in numbers)
        self.progress(kind, done, total)
        computed: dict[int, pa.Table] = {}
        for index, number in enumerate(numbers):
            while (chunk := self._next_chunk(computed, kind, number)) is None:
                ahead = [later for later in numbers[index:] if later not in computed]
                with self._claimed(kind, ahead) as in_round:
                    if not in_round:
                        continue
                    tables = self._compute(broadcast(in_round), compute)
                    for number_in_round, table in zip(in_round, tables, strict=True):
                        self._store(kind, number_in_round, table)
                        if self.folder is None or number_in_round == number:
                            computed[number_in_round] = table
            done += len(self.plan[number])
            self.progress(kind, done, total)
            yield number, chunk
        broadcast([])

    def _next_chunk(self, computed: dict[int, pa.Table], kind: str, number: int) -> pa.Table | None:
        """Return a batch's chunk and remove it from those computed, or read it from the folder."""
        if number in computed:
            return computed.pop(number)
        return self._stored(kind, number)

    def _store(self, kind: str, number: int, chunk: pa.Table) -> None:
        """Write a batch's chunk to the folder, if there is one."""
        if self.folder is not None:
            self.folder.write(chunk_name(kind, number), chunk, self._contents(kind, number))

    def map(
        self, kind: str, compute: Callable[[list[int]], Mapping[str, Tensor | list[str]]]
    ) -> dict[str, np.ndarray]:
        """Return arrays with one row per prompt, in the order of the prompts, in every process.

        `compute` gets the rows of a batch. A chunk's column `prompt` says which they are.
        """

        def columns(number: int) -> Columns:
            rows = self.plan[number]
            values_by_name = compute(rows)
            arrow_arrays = {name: _to_column(values) for name, values in values_by_name.items()}
            return {"prompt": rows} | arrow_arrays

        chunks = [chunk for _, chunk in self.chunks(kind, range(len(self.plan)), columns)]
        self.distributed.run_on_main(lambda: self._check_same_columns(kind, chunks))

        def joined() -> dict[str, np.ndarray]:
            arrays: dict[str, np.ndarray] = {}
            for name in chunks[0].column_names:
                pieces = [_from_column(chunk.column(name)) for chunk in chunks]
                arrays[name] = np.concatenate(pieces)
            order = np.argsort(arrays.pop("prompt"))
            return {name: values[order] for name, values in arrays.items()}

        return self.distributed.run_on_main(joined)

    def _check_same_columns(self, kind: str, chunks: Sequence[pa.Table]) -> None:
        """Raise InputError if some chunks were stored by a version that measured other columns."""
        for number, chunk in enumerate(chunks):
            different = set(chunk.column_names).symmetric_difference(chunks[0].column_names)
            if different:
                raise FolderError(
                    f"chunks of a run must have the same columns, but {chunk_name(kind, 0)} and "
                    f"{chunk_name(kind, number)} differ in {', '.join(sorted(different))}; the "
                    "folder was begun by another version of icl_lens: use an empty folder"
                )

    @contextmanager
    def _claimed(self, kind: str, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of the chunks of the next round; with a folder, lock them."""
        size = self.distributed.size
        if self.folder is None:
            yield list(numbers[:size])
            return
        by_name = {chunk_name(kind, number): number for number in numbers}
        with self.folder.claimed(list(by_name), size) as names:
            yield [by_name[name] for name in names]

    def _compute(self, in_round: list[int], compute: Callable[[int], Columns]) -> list[pa.Table]:
        """Compute the chunks of a round of batches, one in each process, and return all of them."""
        size, rank = self.distributed.size, self.distributed.rank
        chunk_or_error: pa.Table | InputError | None = None
        if rank < len(in_round):
            try:
                chunk_or_error = pa.table(compute(in_round[rank]))
            except InputError as error:
                if size == 1:
                    raise
                chunk_or_error = error
        chunks = self.distributed.gather(chunk_or_error)[: len(in_round)]
        # If one process fails, all raise its error; otherwise the others would wait for it forever.
        for chunk in chunks:
            if isinstance(chunk, InputError):
                raise chunk
        return chunks

    def _stored(self, kind: str, number: int) -> pa.Table | None:
        """Return a stored chunk; None if it does not exist or is corrupt, which gives a warning.

        Raise InputError if it is no readable file.
        """
        if self.folder is None:
            return None
        try:
            return self.folder.read(chunk_name(kind, number), self._contents(kind, number))
        except CorruptChunk as error:
            warn(CorruptChunk(f"{error}; recomputing"), stacklevel=4)
            self.folder.remove(chunk_name(kind, number))
            return None

    def _contents(self, kind: str, number: int) -> dict[str, str]:
        """Return what a chunk's metadata say of it: its name and a digest of its prompts."""
        rows = self.plan[number]
        return {
            "name": chunk_name(kind, number),
            "prompts": prompts_digest(self.batch[rows]),
            "rows": json_digest(rows),
        }

    def write_result(self, tables: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write tables and result.json to the folder, if there is one."""
        if self.folder is not None:
            self.folder.write_result(tables, result)


@contextmanager
def start(
    run: Run | None,
    model: Any,
    batch: PromptBatch,
    by: str,
    options: Mapping[str, Any],
    *,
    plan: Plan | None = None,
) -> Iterator[ChunkStream]:
    """Yield the stream of a run over a batch.

    `by` and `options` name what is computed, so that chunks do not mix; `options` are those that
    determine the numbers, as JSON. Raise InputError if the folder holds another run or is not
    writable, and if the processes of a launcher do not make the same call.
    """
    run = as_run(run)
    distributed = run.distributed
    plan = plan_batches(ModelView.of(model), batch, run) if plan is None else plan
    folder = None
    if run.folder is not None or distributed.size > 1:
        inputs = configuration(model, batch, plan, {"by": by, **options}, run.about)
        distributed.check_equal(json_digest(inputs))
        if run.folder is not None and distributed.is_main:
            folder = RunFolder(Path(run.folder), inputs)
        distributed.run_on_main(lambda: folder and folder.initialize())
    with progress_callback(run.progress if distributed.is_main else False) as show_progress:
        yield ChunkStream(plan, batch, folder, distributed, show_progress)


def _to_column(values: Tensor | list[str]) -> pa.Array:
    if isinstance(values, list):
        return pa.array(values)
    array = np.ascontiguousarray(values.detach().cpu().numpy())
    if array.ndim == 1:
        return pa.array(array)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array)


def _from_column(column: pa.ChunkedArray) -> np.ndarray:
    array = column.combine_chunks()
    if isinstance(array, pa.FixedShapeTensorArray):
        return array.to_numpy_ndarray()
    return array.to_numpy(zero_copy_only=False)
