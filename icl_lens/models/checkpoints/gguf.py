"""Load GGUF files: convert each one once into a Hugging Face folder in the user's cache.

1. Check that the file is complete and of an architecture whose files transformers reads correctly
   (`gguf_header`).
2. Dequantize the weights and rebuild the configuration and tokenizer with transformers' GGUF
   loader.
3. Write the result to a new folder and move it into place, so that an interrupted process leaves no
   partial result. Later loads use this folder, since converting the file again would take most of
   the loading time.
4. Check, after converting, that the file is still the one whose digest names the folder; and, on
   later loads, that the folder's files are as they were written (`file_digests`).
"""

import json
import logging
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError

from icl_lens.errors import InputError, first_line
from icl_lens.foundation.hub import blocking_file
from icl_lens.models.checkpoints.file_digests import (
    DigestedFile,
    damaged_file,
    record_digests,
    sync_to_disk,
)
from icl_lens.models.checkpoints.gguf_header import Header, cached_parser
from icl_lens.models.checkpoints.gguf_tokenizer import save_tokenizer, split_is_known
from icl_lens.models.checkpoints.quiet import quiet_loading

ORIGIN = "dequantized_from"
"""The key in a converted folder's config.json that describes the original file."""
UNKNOWN_SPLIT = "tokenizer.ggml.pre"
"""The key below `ORIGIN` for the way in which the tokenizer splits text, if it is unknown."""
UNQUANTIZED = ("F32", "F16", "BF16", "F64")
"""GGUF types of weights that are not quantized."""
SPACE_LEFT = 2**30
"""Bytes that a conversion leaves free on the disk of the cache."""
WEIGHTS_PER_SECOND = 1e7
"""Weights that one core converts in a second, roughly."""
CONVERSION = 2
"""Version of the conversion; increase it to invalidate folders converted before."""


def convert_gguf(source: DigestedFile, dtype: torch.dtype | None) -> Path:
    """Return the Hugging Face folder converted from a GGUF file, converting it if necessary.

    Weights are stored in `dtype` (float32 for float64; None: the file's own, and float32 if it is
    quantized). The folder's name depends on the file's content, so a changed file is reconverted.
    Raise InputError if the file cannot be read as GGUF or changes meanwhile, and if the cache
    cannot be written, has too little space or is damaged.
    """
    file = source.path
    if dtype is None:
        with cached_parser(file.name):
            dtype = Header(file).dtype
    if dtype == torch.float64:
        dtype = torch.float32
    stored_as = str(dtype).removeprefix("torch.")
    name = f"{source.sha256[:16]}-{stored_as}-transformers-{version('transformers')}-{CONVERSION}"
    folder = cache_folder() / name
    if (occupied := blocking_file(folder)) is not None:
        raise InputError(
            f"the cache of converted models must be a folder, but {str(occupied)!r} is a file; "
            "remove it, or set the environment variable XDG_CACHE_HOME to a folder"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{name}.lock"):
            if folder.is_dir():
                _check_undamaged(folder, file.name)
            else:
                for partial in folder.parent.glob(
                    f"{name}.partial-*"
                ):  # from an interrupted process
                    shutil.rmtree(partial, ignore_errors=True)
                with (
                    tempfile.TemporaryDirectory(
                        dir=folder.parent, prefix=f"{name}.partial-"
                    ) as partial,
                    quiet_loading(bars=False),
                ):
                    _convert(file, Path(partial), dtype)
                    source.check_unchanged()
                    record_digests(Path(partial, "model"))
                    Path(partial, "model").rename(folder)
                    sync_to_disk(folder.parent)
    except OSError as error:
        raise InputError(
            f"cannot write the converted weights of {file.name!r} to {str(folder.parent)!r}: "
            f"{first_line(error)}; free space there, or set the environment variable "
            "XDG_CACHE_HOME to a folder with more space"
        ) from error
    return folder


def cache_folder() -> Path:
    """Return the folder in which converted GGUF files are kept."""
    from platformdirs import user_cache_path

    return user_cache_path("icl_lens", appauthor=False) / "gguf"


def _check_undamaged(folder: Path, name: str) -> None:
    """Raise InputError if a file of a converted model is not as it was written."""
    if (damaged := damaged_file(folder)) is not None:
        raise InputError(
            f"{damaged!r} of the model converted from {name!r} is damaged; delete the folder "
            f"{str(folder)!r} and retry to reconvert it"
        )


def _check_space(name: str, n_bytes: int, dtype: torch.dtype, folder: Path) -> None:
    """Raise InputError if a converted model of `n_bytes` would fill the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if n_bytes + SPACE_LEFT <= free:
        return
    half = " pass dtype='bfloat16', which takes half," if dtype == torch.float32 else ""
    raise InputError(
        f"converting {name!r} takes {n_bytes / 1e9:.1f} GB in {str(cache_folder())!r}, where only "
        f"{free / 1e9:.1f} GB are free;{half} free space there, or set the environment variable "
        "XDG_CACHE_HOME to a folder with more space"
    )


def _conversion_time(n_parameters: int) -> str:
    """Return how long a conversion takes, roughly, as words."""
    seconds = n_parameters / WEIGHTS_PER_SECOND
    return "ten seconds" if seconds < 15 else f"{max(1, round(seconds / 60))} min"


def _convert(file: Path, partial: Path, dtype: torch.dtype) -> None:
    """Write the model and its tokenizer to `partial / "model"`."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # Link the file into a separate folder, since transformers would also read a config.json next to
    # it.
    link = partial / "file" / file.name
    link.parent.mkdir()
    link.symlink_to(file.resolve())
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    how: dict[str, Any] = {
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantize
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = partial / "model"
    log = logging.getLogger("icl_lens")
    with cached_parser(file.name):
        header = Header(link)
        try:
            config = AutoConfig.from_pretrained(link.parent, **where)
            header.complete_config(config)
            n_bytes = header.n_parameters * dtype.itemsize
            _check_space(file.name, n_bytes, dtype, partial)
            log.warning(
                "converting %s (%s) once to %.1f GB of %s, which takes about %s",
                file.name,
                header.quantization,
                n_bytes / 1e9,
                str(dtype).removeprefix("torch."),
                _conversion_time(header.n_parameters),
            )
            model_and_loading: Any = AutoModelForCausalLM.from_pretrained(
                link.parent, config=config, **where, **how
            )
            model, loading = model_and_loading
            header.check_weights_used(model, **loading)
            knows_split = split_is_known(header.tokenizer.get("model"), header.tokenizer.get("pre"))
            if header.has_tokenizer and knows_split:
                tokenizer = AutoTokenizer.from_pretrained(link.parent, **where)
                save_tokenizer(
                    tokenizer,
                    folder,
                    file=file.name,
                    architecture=header.architecture,
                    settings=header.tokenizer,
                )
        except InputError:
            raise
        except Exception as error:  # many types, from several libraries
            if (
                isinstance(error, OSError) and error.errno is not None
            ):  # from the disk; transformers' own have no errno
                raise
            raise InputError(
                f"{file.name!r} must be a file that transformers {transformers.__version__} can "
                f"load, got: {first_line(error)}; pass the folder or the Hub name of the original "
                "model"
            ) from error
    model.config.name_or_path = ""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # such as a full disk
        raise OSError(first_line(error)) from error
    config = json.loads((folder / "config.json").read_text())
    config[ORIGIN] = {"file": file.name, "quantization": header.quantization}
    if not knows_split:
        config[ORIGIN][UNKNOWN_SPLIT] = header.tokenizer["pre"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    log.warning("kept the converted model (%.0f MB) in %s", megabytes, cache_folder())
