"""Short digests that identify configurations and weights in result files; they guard against
mix-ups, not forgery.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def json_digest(value: Any) -> str:
    """Return a 16-digit hexadecimal digest of a JSON-serializable value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a 16-digit hexadecimal digest of named weights: every name and shape, and a sample of
    the values.

    Every (size // 512)-th value of each tensor is read in float32: at least 512 values, or all of a
    smaller one.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):  # one at a time: a mapping may read them from disk
        tensor = tensors[name]
        size = tensor.numel()
        places = torch.arange(0, size, max(1, size // 512), device=tensor.device)
        # Index, since `reshape` would copy a transposed matrix.
        numbers = tensor.detach()[torch.unravel_index(places, tensor.shape)].to(
            "cpu", torch.float32
        )
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]
