"""Resolve a model name to a folder: bundled, local, converted from GGUF, or downloaded from the
Hub.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch

from icl_lens.errors import InputError
from icl_lens.foundation.hub import Repository, open_repository
from icl_lens.models.checkpoints.file_digests import DigestedFile
from icl_lens.models.checkpoints.gguf import ORIGIN, UNKNOWN_SPLIT, convert_gguf
from icl_lens.models.checkpoints.installed import INSTALLED_MODELS

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SMALL_FILE_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja")
_NOT_NEEDED = re.compile(
    r"(trainer_state|optimizer|training_args|.*\.index)\.json|README.*|LICENSE.*|requirements.*"
)
_TOKENIZER = re.compile(
    r"tokenizer\.json|vocab\.(json|txt)|.*\.(model|tiktoken)|tokenizer_config\.json|tekken\.json"
)


@dataclass(frozen=True)
class ModelSource:
    """The folder of a model, its display name, and its source: local or bundled, the Hub, or
    converted from GGUF.
    """

    name: str
    folder: Path
    kind: Literal["local", "hub", "gguf"]


def bundled_models() -> list[str]:
    """Return the names of the models bundled with the package, which load offline.

    Example:
        >>> "icl-mini" in il.bundled_models()
        True
    """
    folder = files("icl_lens") / "bundled"
    return sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())


def resolve_model(
    name: str,
    *,
    revision: str | None,
    weights: bool = True,
    tokenizer: bool = True,
    code: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> ModelSource:
    """Return the folder of a bundled or local model, or of a Hub model after downloading missing
    files.

    Without `weights` or `tokenizer`, these files are not required. With `code`, Python files (for
    trust_remote_code) are downloaded too. A GGUF file is converted to weights in `dtype`. Raise
    InputError if the model is unavailable.
    """
    from transformer_lens.supported_models import MODEL_ALIASES

    if name in INSTALLED_MODELS:
        _check_no_revision(name, revision)
        model = INSTALLED_MODELS[name]
        return ModelSource(name, convert_gguf(model.checked_file(), dtype), "gguf")
    if name.endswith(".gguf"):
        return ModelSource(
            name, convert_gguf(DigestedFile.read(_gguf_file(name, revision)), dtype), "gguf"
        )
    local = _local(name)
    if local is not None:
        _check_no_revision(name, revision)
        return ModelSource(name, local, "local")
    official = next(
        (hub_name for hub_name, aliases in MODEL_ALIASES.items() if name in aliases), name
    )

    def is_complete(repository: Repository) -> bool:
        names = repository.files
        if "config.json" not in names or (tokenizer and not has_tokenizer(names)):
            return False
        return not weights or set(_weights(repository)) <= set(names)

    repository = open_repository(official, kind="model", revision=revision, is_complete=is_complete)
    if "config.json" not in repository.files:
        raise _no_config_error(f"model {name!r} on the Hugging Face Hub", name, repository.files)
    small_files = [file for file in repository.files if _is_small_file(file, code)]
    if tokenizer and not has_tokenizer(repository.files):
        raise missing_tokenizer_error(name)
    repository.fetch(["config.json", *(file for file in small_files if file != "config.json")])
    if weights:
        repository.fetch(_weights(repository))
    repository.record_revision()
    return ModelSource(name, repository.folder, "hub")


def _check_no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"{name!r} is not a Hugging Face Hub model and has no revision {revision!r}; omit "
            "--revision (revision= in Python)"
        )


def _gguf_file(name: str, revision: str | None) -> Path:
    """Return the GGUF file at a local path, or "OWNER/REPOSITORY/FILE.gguf" from the Hub."""
    path = _path(name)
    if path.is_file():
        _check_no_revision(name, revision)
        return path
    *folders, file = name.split("/", 2)
    hub_name = "/".join(folders)
    if (
        len(folders) < 2
        or path.is_absolute()
        or folders[0] in ("", ".", "..", "~")
        or Path(hub_name).is_dir()
    ):
        raise InputError(
            f"there is no file {name!r}; pass an existing .gguf file, or OWNER/REPOSITORY/FILE.gguf"
        )
    repository = open_repository(
        hub_name, kind="model", revision=revision, is_complete=lambda cached: file in cached.files
    )
    if file not in repository.files:
        raise InputError(
            f"model {hub_name!r} on the Hugging Face Hub has no file {file!r}; "
            f"{_gguf_hint(hub_name, repository.files) or 'choose another model'}"
        )
    folder = repository.fetch([file])
    repository.record_revision()
    return folder / file


def _gguf_hint(name: str, files: Sequence[str]) -> str:
    """Return a hint to pass one of the GGUF files of a folder or repository; empty if there are
    none.
    """
    gguf_files = sorted(file for file in files if file.endswith(".gguf"))
    if not gguf_files:
        return ""
    more = f" (or another of its {len(gguf_files)} GGUF files)" if len(gguf_files) > 1 else ""
    path = f"{name.rstrip('/')}/{gguf_files[0]}"
    return f"pass its GGUF file: {path!r}{more}"


def has_tokenizer(names: Sequence[str]) -> bool:
    """Return whether any of the files belongs to a tokenizer."""
    return any(_TOKENIZER.fullmatch(name) for name in names)


def missing_tokenizer_error(name: str, converted: Path | None = None) -> InputError:
    """Return the error for a model without a tokenizer; `converted` is the folder of a converted
    GGUF file.
    """
    if converted is not None:
        origin = json.loads((converted / "config.json").read_text(encoding="utf-8")).get(ORIGIN, {})
        if UNKNOWN_SPLIT in origin:
            return InputError(
                f"{name!r} must have a tokenizer that splits text in a known way, got "
                f"tokenizer.ggml.pre={origin[UNKNOWN_SPLIT]!r}; pass the folder or the Hub name of "
                "the original model, or its tokenizer (load_model(..., tokenizer=) in Python)"
            )
    if name.endswith(".gguf"):
        return InputError(
            f"{name!r} must contain a tokenizer, got none; pass load_model(..., tokenizer=) in "
            "Python, or another file"
        )
    return InputError(
        f"model {name!r} has no tokenizer (no tokenizer.json, tokenizer.model or vocab.json); copy "
        "the tokenizer's files into its folder, or pass load_model(..., tokenizer=) in Python"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files in the format that transformers prefers; empty if there are
    none.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            names = _shards(folder / name) if name.endswith(".index.json") else [name]
            return [folder / file for file in names]
    return []


def _local(name: str) -> Path | None:
    """Return the folder of a bundled or local model; None for a Hub name."""
    if name in bundled_models():
        return Path(str(files("icl_lens") / "bundled" / name))
    path = _path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _no_config_error(
                f"folder {name!r}", name, sorted(file.name for file in path.iterdir())
            )
        return path
    if path.is_file():
        raise InputError(
            f"a model file must be a .gguf file, got {name!r}; pass its folder, with config.json "
            "and a tokenizer"
        )
    if path.is_absolute() or name.startswith((".", "~")):
        raise InputError(
            f"there is no folder {name!r}; pass an existing Hugging Face folder or a Hub name"
        )
    if name.startswith("icl-") and "/" not in name:
        raise InputError(
            f"there is no bundled model {name!r}; choose one of {', '.join(bundled_models())}"
        )
    return None


def _path(name: str) -> Path:
    """Return a name as a path, existing or not; raise InputError if it cannot be one."""
    path = Path(name).expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # name too long, no permission, a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"invalid model or folder name {name!r}: {reason}; pass another"
        ) from error
    return path


def _no_config_error(where: str, name: str, files: Sequence[str]) -> InputError:
    """Return the error for a folder or repository with these files, but no config.json."""
    if "adapter_config.json" in files:
        what, remedy = (
            "is an adapter of another model",
            "merge it into its model with peft and save that",
        )
    else:
        what, remedy = (
            "is not a Hugging Face model",
            "choose another, or save it with transformers first",
        )
    return InputError(
        f"{where} {what}: it has no config.json ({_listing(files)}); "
        f"{_gguf_hint(name, files) or remedy}"
    )


def _is_small_file(file: str, code: bool) -> bool:
    """Return whether the model needs this file besides its weights."""
    if "/" in file:
        return code and file.endswith(".py")
    if file == "adapter_model.safetensors":  # transformers loads it with the model
        return True
    return (file.endswith(_SMALL_FILE_SUFFIXES) and not _NOT_NEEDED.fullmatch(file)) or (
        code and file.endswith(".py")
    )


def _weights(repository: Repository) -> list[str]:
    """Return a repository's weight files, downloading the index if there is one."""
    for name in _WEIGHTS:
        if name in repository.files:
            if not name.endswith(".index.json"):
                return [name]
            return [name, *_shards(repository.fetch([name]) / name)]
    if repository.from_cache:
        return [
            "model.safetensors"
        ]  # a file that the cache lacks, so the cached copy is not complete
    raise InputError(
        f"model {repository.name!r} on the Hugging Face Hub has no weights as safetensors or "
        f"PyTorch files ({_listing(repository.files)}); choose another, or convert it with "
        "transformers first"
    )


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{str(index)!r} is not a valid index of weight files ({type(error).__name__}); delete "
            "it and download it again"
        ) from error


def _listing(names: Sequence[str]) -> str:
    visible = [name for name in names if not name.startswith(".")]
    return (
        f"it has {', '.join(visible[:5])}{', …' if len(visible) > 5 else ''}"
        if visible
        else "it is empty"
    )
