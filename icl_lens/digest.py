"""Short digests that tell configurations and weights apart in result files: against mix-ups, not against forgery."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def json_digest(value: Any) -> str:
    """Sixteen hexadecimal digits that change with a value made of lists, dictionaries, numbers and strings."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def weights_digest(
    tensors: Mapping[str, Tensor],
    *,
    sample: int = 512,
    most: int | None = None,
    dtype: torch.dtype = torch.float32,
    digits: int = 16,
) -> str:
    """Hexadecimal digits that change with named weights: a digest of every name, shape, and some of the numbers.

    Of each tensor every (size // `sample`)-th number is read, as `dtype`, so at least `sample` of them where there
    are as many, and fewer than twice that; `most` cuts them short. Stored digests depend on these settings: `icl-lens
    locate` stores the default over the parameters, `experiments` another over the state.
    """
    found = hashlib.sha256()
    for name in sorted(tensors):  # one at a time: a mapping may read them from the disk
        tensor = tensors[name]
        size = tensor.numel()
        places = torch.arange(0, size, max(1, size // sample), device=tensor.device)[:most]
        # By their places: `reshape` would copy a transposed matrix as a whole.
        numbers = tensor.detach()[torch.unravel_index(places, tensor.shape)].to("cpu", dtype)
        found.update(f"{name}{tuple(tensor.shape)}".encode() + numbers.numpy().tobytes())
    return found.hexdigest()[:digits]
