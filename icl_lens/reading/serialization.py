"""Save and load tensors with versioned JSON metadata in one safetensors file (no pickle)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.files import atomic_write

KEY = "icl_lens"


def write_tensors(
    path: str | Path, kind: str, version: int, tensors: dict[str, Tensor], metadata: dict[str, Any]
) -> None:
    """Write the file atomically; raise InputError if the folder is not writable."""
    # safetensors rejects tensors that share storage, so views are copied.
    copies = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    digest = _content_digest(copies, metadata)
    header = {"kind": kind, "version": version, "about": metadata, "digest": digest}
    with atomic_write(path) as temp_path:
        save_file(copies, temp_path, metadata={KEY: json.dumps(header, ensure_ascii=False)})


def read_metadata(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Return a file's metadata; raise InputError if it is unreadable or of another kind or
    version.
    """
    header = _read_header(path, kind)
    if header.get("kind") != kind:
        raise InputError(
            f"{str(path)!r} must hold {kind}, got {header.get('kind', 'other tensors')}; pass a "
            f"file of saved {kind}"
        )
    if header.get("version") != version:
        raise InputError(
            f"version of {str(path)!r} must be {version}, got {header.get('version')}; capture and "
            "save again with this version of icl_lens"
        )
    metadata = header.get("about")
    if not isinstance(metadata, dict):
        raise damaged_error(path, kind, "it has no metadata")
    return metadata


def read_tensors(path: str | Path, kind: str, device: torch.device | str) -> dict[str, Tensor]:
    """Return all tensors of a file, on `device`; raise InputError if its content is not what was
    written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise damaged_error(path, kind, error) from error
    header = _read_header(path, kind)
    # Files of earlier versions have no digest.
    if "digest" in header and header["digest"] != _content_digest(tensors, header.get("about")):
        raise damaged_error(path, kind, "its content is not what was written")
    return {name: value.to(device) for name, value in tensors.items()}


def damaged_error(path: str | Path, kind: str, reason: object) -> InputError:
    return InputError(f"{str(path)!r} is damaged ({reason}); capture and save the {kind} again")


def _read_header(path: str | Path, kind: str) -> dict[str, Any]:
    """Return what `write_tensors` wrote beside the tensors; empty for other files of tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise InputError(
            f"cannot read {str(path)!r}: {error}; pass a file of saved {kind}"
        ) from error
    if text is None:
        return {}
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged_error(path, kind, "its metadata is not valid JSON") from error
    return header if isinstance(header, dict) else {}


def _content_digest(tensors: dict[str, Tensor], metadata: Any) -> str:
    """Return a digest of metadata and of every tensor's name, dtype, shape and bytes."""
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
