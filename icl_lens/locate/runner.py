"""Chunks of a run, one a batch: computed here, in the other processes, or taken from the folder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from icl_lens.locate.chunk import HeadChunk, chunk_from, chunk_name, columns_of
from icl_lens.locate.folder import DamagedChunk, RunFolder
from icl_lens.locate.processes import Processes
from icl_lens.models.view import ModelView

Progress = Callable[[str, int, int], None]
"""Called with the name of the pass, the prompts done and all prompts of that pass."""


@dataclass
class Runner:
    """Computes chunks in this and the other processes, or takes them from the folder, in the order of the batches."""

    view: ModelView
    folder: RunFolder | None
    processes: Processes
    progress: Progress
    warn: Callable[[str], None]
    plan: list[list[int]]
    n_prompts: int

    def chunk(self, kind: str, number: int, compute: Callable[[], HeadChunk]) -> HeadChunk:
        """One chunk, computed by the first process, known to all."""
        found = None
        if self.processes.first:
            self.progress(kind, 0, self.n_prompts)
            found = self._stored(kind, number)
            if found is None:
                found = compute()
                self._store(kind, number, found)
            self.progress(kind, len(found.rows), self.n_prompts)
        return self.processes.share(found)

    def chunks(
        self, kind: str, numbers: Sequence[int], compute: Callable[[int], HeadChunk], before: list[HeadChunk]
    ) -> Iterator[HeadChunk]:
        """The chunks in order in the first process, none in the others, which compute their share of them.

        `before` come first. Every process takes one of as many batches as there are processes; the first gathers them.
        """
        processes = self.processes
        total = sum(len(self.plan[number]) for number in numbers) + sum(len(chunk.rows) for chunk in before)
        done = sum(len(chunk.rows) for chunk in before)
        missing = [number for number in numbers if self._stored(kind, number) is None] if processes.first else None
        missing = processes.share(missing)
        fresh = self._computed(missing, compute)
        if processes.first:
            yield from before
        for number in numbers:
            if number in missing:
                _, chunk = next(fresh)
                if processes.first:
                    self._store(kind, number, chunk)
            elif processes.first:
                chunk = self._stored(kind, number)
                assert chunk is not None
            if processes.first:
                done += len(chunk.rows)
                self.progress(kind, done, total)
                yield chunk

    def _computed(self, numbers: list[int], compute: Callable[[int], HeadChunk]) -> Iterator[tuple[int, HeadChunk]]:
        size, rank = self.processes.size, self.processes.rank
        for start in range(0, len(numbers), size):
            mine = numbers[start : start + size]
            found = self.processes.gather(compute(mine[rank]) if rank < len(mine) else None)
            yield from zip(mine, found, strict=False)

    def _store(self, kind: str, number: int, chunk: HeadChunk) -> None:
        if self.folder is not None:
            self.folder.write(chunk_name(kind, number), columns_of(chunk, self.view.n_heads))

    def _stored(self, kind: str, number: int) -> HeadChunk | None:
        if self.folder is None:
            return None
        name = chunk_name(kind, number)
        try:
            table = self.folder.read(name)
        except DamagedChunk as damage:
            self.warn(f"{damage}: computed again")
            return None
        return None if table is None else chunk_from(table, self.view.n_heads)
