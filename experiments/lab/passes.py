"""The narrow waist: every pass over prompts goes through here, leaves chunks, and is shared among processes.

A pass is numbered pieces of work (batches of prompts, mostly) and a function from a piece to tensors. What a piece
gave is kept in a file of its own, so that a run that was killed goes on from there; it is the mechanism of
`icl_lens.locate`. All processes ask for the same passes in the same order, compute different pieces, and get all.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
import torch
from torch import Tensor

import experiments
import icl_lens
from icl_lens.digest import json_digest
from icl_lens.errors import InputError
from icl_lens.locate.folder import MANIFEST, RunFolder
from icl_lens.locate.processes import Processes
from icl_lens.locate.runner import Form, Runner

Tensors = Mapping[str, Tensor]
"""What a piece of work gives: named tensors whose first axis is the same."""

FOLDER = "passes"
"""Where chunks are kept, beside the folders of results."""


@runtime_checkable
class Meter(Protocol):
    """Is told what is done."""

    def __call__(self, what: str, prompts: int, *, computed: bool) -> None:
        """So many prompts of a pass are done: computed now, or found in the folder."""


class Passes:
    """Passes of one run: their chunks, their share among processes, their progress."""

    def __init__(
        self,
        folder: RunFolder | None = None,
        processes: Processes | None = None,
        meter: Meter | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ):
        self.processes = processes or Processes()
        self._meter = meter
        self._runner = Runner(Form[Tensors](columns_of, tensors_from), folder, self.processes, warn)
        self._part = "study"
        self._count = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Passes in the block belong to a part of the run, which names those that have no name of their own."""
        before, self._part, self._count = (self._part, self._count), name, 0
        try:
            yield
        finally:
            self._part, self._count = before

    def run(
        self,
        what: str,
        sizes: Sequence[int],
        compute: Callable[[int], Tensors],
        *,
        key: str | None = None,
    ) -> list[Tensors]:
        """What every piece of work gives; `sizes` are their numbers of prompts.

        `key` tells the pass from all others that the run's configuration allows. Without one, it is the how-manieth
        without a key that this part of the run asks for: the same in every run, since nothing but the configuration
        decides which passes there are. Raises the InputError of a piece in all processes.
        """
        key = key or self.numbered(what, sizes)
        (found,) = self.together(what, sizes, [key], lambda number, _: [compute(number)])
        return found

    def numbered(self, what: str, sizes: Sequence[int]) -> str:
        """The key of a pass that has no name: its number in this part of the run."""
        self._count += 1
        return f"{self._part}-{self._count:03d}-{json_digest([what, list(sizes)])[:8]}"

    def together(
        self,
        what: str,
        sizes: Sequence[int],
        keys: Sequence[str],
        compute: Callable[[int, Sequence[int]], Sequence[Tensors]],
    ) -> list[list[Tensors]]:
        """Several passes over the same pieces at once: what every piece gives, for each key.

        `compute` gets a piece and the places in `keys` of the passes that lack it.
        """
        work = {number: [f"{key}-{number:05d}.parquet" for key in keys] for number in range(len(sizes))}

        def lacking(number: int, names: Sequence[str]) -> list[Tensors]:
            found = compute(number, [work[number].index(name) for name in names])
            return [{name: plain(tensor) for name, tensor in one.items()} for one in found]

        found: list[list[Tensors]] = [[] for _ in keys]
        for number, chunks, computed in self._runner.each(work, lacking):
            for kept, chunk in zip(found, chunks, strict=True):
                kept.append(chunk)
            if self._meter is not None:
                self._meter(what, sizes[number], computed=computed)
        return self.processes.share(found)


def plain(tensor: Tensor) -> Tensor:
    """A tensor as it is kept: in main memory, half precision widened, which changes no value.

    Raises InputError for other dtypes than floating-point numbers and 64-bit integers.
    """
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point() and tensor.itemsize < 4:
        return tensor.float()
    if tensor.dtype not in (torch.float32, torch.float64, torch.int64):
        raise InputError(f"a pass gives {tensor.dtype}, which is not kept; give floating-point numbers or int64")
    return tensor


def columns_of(tensors: Tensors) -> dict[str, Any]:
    """A chunk as table columns: one row for each entry of the first axis."""
    columns: dict[str, Any] = {}
    for name, tensor in tensors.items():
        values = tensor.numpy().copy()  # in order also where an axis has length one, whose stride may be any
        if values.ndim == 1:
            columns[name] = values
        else:
            columns[name] = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    return columns


def tensors_from(table: pa.Table) -> dict[str, Tensor]:
    """The chunk that `columns_of` made a table of."""
    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        if isinstance(column, pa.ExtensionArray):
            found[name] = torch.from_numpy(column.to_numpy_ndarray().copy())
        else:
            found[name] = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    return found


def joined(found: Sequence[Tensors]) -> dict[str, Tensor]:
    """The pieces' tensors one after the other."""
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def stable_name(function: Callable[..., Any]) -> str | None:
    """What a function is called in every run: where it is defined, and its values if it is a dataclass.

    None for what has no such name: functions made in functions.
    """
    if is_dataclass(function) and not isinstance(function, type):
        values = {field.name: repr(getattr(function, field.name)) for field in fields(function)}
        kind = type(function)
        return f"{kind.__qualname__}-{json_digest([kind.__module__, kind.__qualname__, values])[:12]}"
    name = getattr(function, "__qualname__", "<")
    return None if "<" in name else f"{name}-{json_digest([function.__module__, name])[:12]}"


def code_digest() -> str:
    """A digest of this program's sources: chunks of other sources are not taken up."""
    found = sha256()
    for package in (icl_lens, experiments):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def chunk_folder(parent: Path, configuration: Mapping[str, Any], *, overwrite: bool) -> RunFolder:
    """The folder of the chunks of this configuration, taken: one for each configuration.

    Chunks that only other sources or versions of packages could take up again are removed, and with `overwrite`
    those of all other settings. Raises InputError if the folder cannot be made.
    """
    own = json_digest(dict(configuration))
    root = parent / FOLDER
    try:
        (root / own).mkdir(parents=True, exist_ok=True)
        for other in root.iterdir():
            if other.name != own and other.is_dir() and (overwrite or _outdated(other, configuration)):
                _remove(other)
    except OSError as error:
        raise InputError(
            f"the folder {str(root)!r} cannot be written to: {error.strerror or error}; choose another folder"
        ) from error
    folder = RunFolder(root / own, configuration)
    folder.take()
    return folder


def _outdated(folder: Path, configuration: Mapping[str, Any]) -> bool:
    """Whether chunks are of the same settings, made by other sources or packages."""
    try:
        theirs = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all(theirs[name] == value for name, value in configuration.items() if name not in ("code", "versions"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove(folder: Path) -> None:
    """Removes a folder of chunks, and nothing in it that is not ours."""
    for path in [*folder.glob("*-[0-9][0-9][0-9][0-9][0-9].parquet"), folder / MANIFEST]:
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
