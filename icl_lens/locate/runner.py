"""Chunks of a run: computed here, in the other processes, or taken from the folder. Every resumable run goes this way.

A run is numbered pieces of work, each of which gives one or several chunks; every chunk is a file with a name of its
own. Which pieces there are must be the same in all processes and in every run with one configuration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from icl_lens.errors import InputError
from icl_lens.locate.chunk import chunk_name
from icl_lens.locate.distributed import Processes
from icl_lens.locate.progress import Progress
from icl_lens.locate.run_folder import CorruptChunk, RunFolder

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class ChunkFormat(Generic[Chunk]):
    """The form of chunks on disk."""

    columns: Callable[[Chunk], Mapping[str, Any]]
    """The columns of a chunk's file."""
    read: Callable[[pa.Table], Chunk]
    """The chunk that such a file holds."""


@dataclass
class Runner(Generic[Chunk]):
    """Computes chunks in this and the other processes, or takes them from the folder, in order."""

    form: ChunkFormat[Chunk]
    folder: RunFolder | None
    processes: Processes
    warn: Callable[[str], None]

    def compute_one(self, name: str, compute: Callable[[], Chunk]) -> Chunk:
        """One chunk, computed by the first process, known to all."""
        found = None
        if self.processes.is_main:
            found = self._stored(name)
            if found is None:
                found = compute()
                self._store(name, found)
        return self.processes.broadcast(found)

    def compute_all(
        self, work: Mapping[int, Sequence[str]], compute: Callable[[int, Sequence[str]], Sequence[Chunk]]
    ) -> Iterator[tuple[int, list[Chunk], bool]]:
        """Every piece of work with its chunks, and whether they were computed now; in order, in the first process.

        Nothing in the others, which help.

        `work` names each piece's chunks. `compute` is given a piece and those of its chunks that are not there yet.
        Every process takes one of as many pieces as there are processes; the first gathers them. Where one of them
        raises InputError, all do.
        """
        first = self.processes.is_main
        missing: dict[int, list[str]] = {}
        if first:
            for number, names in work.items():
                if lacking := [name for name in names if self._stored(name) is None]:
                    missing[number] = lacking
        missing = self.processes.broadcast(missing)
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
        numbers, size, rank = list(missing), self.processes.size, self.processes.rank
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
            found = self.processes.gather(mine)
            if size > 1:
                # An error of one process is an error of all: otherwise the others would wait for it.
                error = self.processes.broadcast(next((one for one in found if isinstance(one, InputError)), None))
                if error is not None:
                    raise error
            for number, chunks in zip(some, found, strict=False):
                yield {} if chunks is None else dict(zip(missing[number], chunks, strict=True))

    def _store(self, name: str, chunk: Chunk) -> None:
        if self.folder is not None:
            self.folder.write(name, self.form.columns(chunk))

    def _known(self, name: str) -> Chunk:
        chunk = self._stored(name)
        assert chunk is not None, f"{name} was there a moment ago"
        return chunk

    def _stored(self, name: str) -> Chunk | None:
        if self.folder is None:
            return None
        try:
            table = self.folder.read(name)
        except CorruptChunk as damage:
            self.warn(f"{damage}: computed again")
            return None
        return None if table is None else self.form.read(table)


@runtime_checkable
class HasRows(Protocol):
    """A chunk that knows which prompts it is about."""

    @property
    def rows(self) -> Any: ...


PromptChunk = TypeVar("PromptChunk", bound=HasRows)


@dataclass
class BatchRunner(Generic[PromptChunk]):
    """Passes over planned batches of prompts, one chunk a batch, with progress."""

    runner: Runner[PromptChunk]
    plan: list[list[int]]
    n_prompts: int
    progress: Progress

    def chunk(self, kind: str, number: int, compute: Callable[[], PromptChunk]) -> PromptChunk:
        """One chunk, computed by the first process, known to all."""
        first = self.runner.processes.is_main
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
        """The chunks in order in the first process, none in the others; those given as `before` come first."""
        done = sum(len(chunk.rows) for chunk in before)
        total = sum(len(self.plan[number]) for number in numbers) + done
        if self.runner.processes.is_main:
            yield from before
            if not before:
                self.progress(kind, 0, total)
        work = {number: [chunk_name(kind, number)] for number in numbers}
        for _, (chunk,), _ in self.runner.compute_all(work, lambda number, _: [compute(number)]):
            done += len(chunk.rows)
            self.progress(kind, done, total)
            yield chunk
