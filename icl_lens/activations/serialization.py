"""Tensors and what belongs to them in one file: safetensors with a versioned description, no pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.files import atomic_write

KEY = "icl_lens"


def write_tensors(path: str | Path, kind: str, version: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Writes beside `path` and moves into place. Raises InputError where the folder does not allow it."""
    described = {KEY: json.dumps({"kind": kind, "version": version, "about": about}, ensure_ascii=False)}
    # Views of one storage are written as tensors of their own.
    own = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    with atomic_write(path) as beside:
        save_file(own, beside, metadata=described)


def read_metadata(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """What a file of this kind says of itself; raises InputError for another kind of file, or a newer version."""
    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}; give a file that was saved as {kind}") from error
    found = {} if described is None else json.loads(described)
    if found.get("kind") != kind:
        raise InputError(f"{str(path)!r} holds no {kind} but {found.get('kind', 'other tensors')}; give another file")
    if found["version"] > version:
        raise InputError(
            f"{str(path)!r} is of version {found['version']}, and this icl_lens reads up to {version}; "
            "install a newer icl_lens, or save the file anew"
        )
    return found["about"]


def read_tensors(path: str | Path, device: torch.device | str) -> dict[str, Tensor]:
    """All tensors of a file, on a device."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
