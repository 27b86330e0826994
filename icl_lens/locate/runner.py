"""Compute a run's chunks in one or several processes, or read them from its folder.

A run consists of numbered work items, each of which yields one or more chunks; every chunk is a file with a unique
name. The work items must be the same in all processes and in every run with the same configuration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from icl_lens.errors import InputError
from icl_lens.locate.chunk import chunk_name
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.progress import Progress
from icl_lens.locate.run_folder import CorruptChunk, RunFolder

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class ChunkFormat(Generic[Chunk]):
    """The on-disk format of chunks."""

    columns: Callable[[Chunk], Mapping[str, Any]]
    """Function that converts a chunk to table columns."""
    read: Callable[[pa.Table], Chunk]
    """Function that converts a table to a chunk."""


@dataclass
class Runner(Generic[Chunk]):
    """Computes chunks in all processes, or reads them from the folder, in order."""

    form: ChunkFormat[Chunk]
    folder: RunFolder | None
    distributed: Distributed
    warn: Callable[[str], None]

    def compute_one(self, name: str, compute: Callable[[], Chunk]) -> Chunk:
        """Compute or read one chunk on the main process and broadcast it."""
        found = None
        if self.distributed.is_main:
            found = self._stored(name)
            if found is None:
                found = compute()
                self._store(name, found)
        return self.distributed.broadcast(found)

    def compute_all(
        self, work: Mapping[int, Sequence[str]], compute: Callable[[int, Sequence[str]], Sequence[Chunk]]
    ) -> Iterator[tuple[int, list[Chunk], bool]]:
        """Yield (work item, chunks, whether they were computed now) in order on the main process.

        The other processes compute but yield nothing. `work` maps each item to the names of its chunks. `compute` takes
        an item and the names of its missing chunks. Items are computed in rounds of one per process, and the main
        process gathers the chunks. An InputError in one process is raised in all.
        """
        first = self.distributed.is_main
        missing: dict[int, list[str]] = {}
        if first:
            for number, names in work.items():
                if lacking := [name for name in names if self._stored(name) is None]:
                    missing[number] = lacking
        missing = self.distributed.broadcast(missing)
        fresh = self._computed(missing, compute)
        for number, names in work.items():
            found: dict[str, Chunk] = {}
            if number in missing:
                found = next(fresh)
            if not first:
                continue
            for name, chunk in found.items():
                self._store(name, chunk)
            chunks = [found[name] if name in found else self._known(name) for name in names]
            yield number, chunks, number in missing

    def _computed(
        self, missing: Mapping[int, Sequence[str]], compute: Callable[[int, Sequence[str]], Sequence[Chunk]]
    ) -> Iterator[dict[str, Chunk]]:
        numbers, size, rank = list(missing), self.distributed.size, self.distributed.rank
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            mine: Sequence[Chunk] | InputError | None = None
            if rank < len(some):
                try:
                    mine = compute(some[rank], missing[some[rank]])
                except InputError as error:
                    if size == 1:
                        raise
                    mine = error
            found = self.distributed.gather(mine)
            # Raise an error of one process in all, because the others would wait for it.
            if error := next((one for one in found if isinstance(one, InputError)), None):
                raise error
            for number, chunks in zip(some, found, strict=False):
                yield {} if chunks is None else dict(zip(missing[number], chunks, strict=True))

    def _store(self, name: str, chunk: Chunk) -> None:
        if self.folder is not None:
            self.folder.write(name, self.form.columns(chunk))

    def _known(self, name: str) -> Chunk:
        chunk = self._stored(name)
        assert chunk is not None, f"{name} disappeared"
        return chunk

    def _stored(self, name: str) -> Chunk | None:
        if self.folder is None:
            return None
        try:
            table = self.folder.read(name)
        except CorruptChunk as damage:
            self.warn(f"{damage}; recomputing")
            return None
        return None if table is None else self.form.read(table)


@runtime_checkable
class HasRows(Protocol):
    """A chunk with the indices of its prompts."""

    @property
    def rows(self) -> Any: ...


PromptChunk = TypeVar("PromptChunk", bound=HasRows)


@dataclass
class BatchRunner(Generic[PromptChunk]):
    """Runs passes over planned batches of prompts with progress, one chunk per batch."""

    runner: Runner[PromptChunk]
    plan: list[list[int]]
    n_prompts: int
    progress: Progress

    def chunk(self, kind: str, number: int, compute: Callable[[], PromptChunk]) -> PromptChunk:
        """Compute or read one chunk on the main process, broadcast it, and report progress."""
        first = self.runner.distributed.is_main
        if first:
            self.progress(kind, 0, self.n_prompts)
        found = self.runner.compute_one(chunk_name(kind, number), compute)
        if first:
            self.progress(kind, len(found.rows), self.n_prompts)
        return found

    def chunks(
        self,
        kind: str,
        numbers: Sequence[int],
        compute: Callable[[int], PromptChunk],
        before: Sequence[PromptChunk] = (),
    ) -> Iterator[PromptChunk]:
        """Yield chunks in order on the main process, and none on the others, starting with those in `before`."""
        done = sum(len(chunk.rows) for chunk in before)
        total = sum(len(self.plan[number]) for number in numbers) + done
        if self.runner.distributed.is_main:
            yield from before
            if not before:
                self.progress(kind, 0, total)
        work = {number: [chunk_name(kind, number)] for number in numbers}
        for _, (chunk,), _ in self.runner.compute_all(work, lambda number, _: [compute(number)]):
            done += len(chunk.rows)
            self.progress(kind, done, total)
            yield chunk
