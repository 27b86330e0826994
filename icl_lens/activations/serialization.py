"""Save and load tensors with versioned JSON metadata in one safetensors file (no pickle)."""

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


def write_tensors(
    path: str | Path, kind: str, version: int, tensors: dict[str, Tensor], metadata: dict[str, Any]
) -> None:
    """Write the file atomically; raise InputError if the folder is not writable."""
    header = {KEY: json.dumps({"kind": kind, "version": version, "about": metadata}, ensure_ascii=False)}
    # safetensors rejects tensors that share storage, so views are copied.
    copies = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    with atomic_write(path) as temp_path:
        save_file(copies, temp_path, metadata=header)


def read_metadata(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Return a file's metadata; raise InputError if it is unreadable or of another kind or version."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {str(path)!r}: {error}; pass a file of saved {kind}") from error
    found = {} if header is None else json.loads(header)
    if found.get("kind") != kind:
        raise InputError(
            f"{str(path)!r} must hold {kind}, got {found.get('kind', 'other tensors')}; pass a file of saved {kind}"
        )
    if found["version"] != version:
        raise InputError(
            f"version of {str(path)!r} must be {version}, got {found['version']}; capture and save again with "
            "this version of icl_lens"
        )
    return found["about"]


def read_tensors(path: str | Path, device: torch.device | str) -> dict[str, Tensor]:
    """Return all tensors of a file, on `device`."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
