"""Short digests that identify configurations and weights in result files; they guard against mix-ups, not forgery."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def json_digest(value: Any) -> str:
    """Return a 16-digit hexadecimal digest of a JSON-serializable value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def weights_digest(
    tensors: Mapping[str, Tensor],
    *,
    sample: int = 512,
    most: int | None = None,
    dtype: torch.dtype = torch.float32,
    digits: int = 16,
) -> str:
    """Return a hexadecimal digest of named weights: every name and shape, and a sample of the values.

    Every (size // `sample`)-th value of each tensor is read as `dtype`: between `sample` and 2 · `sample` values, or
    all of a smaller tensor; `most` limits their number. Stored digests depend on these settings: `icl-lens locate`
    stores the default over the parameters, `experiments` other settings over the state dict.
    """
    found = hashlib.sha256()
    for name in sorted(tensors):  # one at a time: a mapping may read them from disk
        tensor = tensors[name]
        size = tensor.numel()
        places = torch.arange(0, size, max(1, size // sample), device=tensor.device)[:most]
        # Index, since `reshape` would copy a transposed matrix.
        numbers = tensor.detach()[torch.unravel_index(places, tensor.shape)].to("cpu", dtype)
        found.update(f"{name}{tuple(tensor.shape)}".encode() + numbers.numpy().tobytes())
    return found.hexdigest()[:digits]
