"""Keep what `task_check` found in the user's cache, so that one check serves all commands.

1. A check is named by a digest of everything that it depends on: weights, prompts, format,
   precision, device, packages, and this package's code, which developers change between versions.
2. It is stored as JSON, like any result. A file that cannot be read is computed again.
3. A cache that cannot be written to is no error: then checks are not kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import icl_lens
from icl_lens.errors import InputError

if TYPE_CHECKING:
    from icl_lens.analyses.pair_check import PairCheck
    from icl_lens.analyses.task_check import TaskCheck
    from icl_lens.prompts.prompt import Prompt

    AnyCheck = TaskCheck | PairCheck

PACKAGES = ("icl-lens", "transformer-lens", "transformers", "torch")


def checks_folder() -> Path:
    """Return the folder of stored checks."""
    from platformdirs import user_cache_path

    return user_cache_path("icl_lens", appauthor=False) / "checks"


def check_digest(
    model: Any, prompts: "Sequence[Prompt]", *, seed: int, tokenized: Mapping[str, Any]
) -> str:
    """Return a digest of all that a check depends on; `tokenized` are the keyword arguments of
    `il.tokenize`.
    """
    from icl_lens.foundation.digest import json_digest, weights_digest
    from icl_lens.models.passes.offload import ParameterMap
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.token_ids import vocabulary_digest

    view = ModelView.of(model)
    code = sha256()
    for path in sorted(Path(icl_lens.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return json_digest(
        {
            "weights": weights_digest(ParameterMap(model)),
            "vocabulary": vocabulary_digest(model.tokenizer),
            "dtype": str(model.W_U.dtype),
            "device": view.unembed_device.type,
            "prompts": [asdict(prompt) for prompt in prompts],
            "tokenized": {name: repr(value) for name, value in tokenized.items()},
            "seed": seed,
            "versions": {name: version(name) for name in PACKAGES},
            "code": code.hexdigest(),
        }
    )


def stored_check(digest: str) -> "AnyCheck | None":
    """Return a stored check; None if there is none that can be read."""
    from icl_lens.results import load

    path = checks_folder() / f"{digest}.json"
    try:
        return load(path) if path.is_file() else None
    except (InputError, OSError):
        return None


def store_check(digest: str, check: "AnyCheck") -> None:
    """Store a check, if the cache can be written to."""
    try:
        checks_folder().mkdir(parents=True, exist_ok=True)
        check.save(checks_folder() / f"{digest}.json")
    except (InputError, OSError):
        return
