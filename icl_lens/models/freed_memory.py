"""Return the memory of freed tensors to the system, so that it does not stay beside large passes."""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from icl_lens.models.passes.memory import PASS_BYTES
from icl_lens.models.sizes import pass_bytes
from icl_lens.models.view import ModelView


def release_freed_memory() -> None:
    """Return the memory of freed tensors to the system, where glibc would keep it for reuse.

    It keeps those of up to 32 MiB, which would otherwise stay beside the large tensors that follow.
    """
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if malloc_trim is not None:
            malloc_trim(0)


def make_room(
    view: ModelView, n_rows: int, n_tokens: int, n_keys: int | None = None
) -> list[tuple[str, Any]]:
    """Return freed memory to the system before a pass that takes more than half of `PASS_BYTES`,
    which would stay beside its attention, and return hooks for the pass.

    In a pass that takes more than `PASS_BYTES`, such as one over a long prompt, they do the same
    before each layer.
    """
    n_bytes = n_rows * pass_bytes(view, n_tokens, n_keys)
    if torch.device(view.cfg.device).type != "cpu" or n_bytes <= PASS_BYTES // 2:
        return []
    release_freed_memory()
    if n_bytes <= PASS_BYTES:
        return []
    layers = range(view.n_layers)
    return [(view.hook(layer, "hook_resid_pre"), _release_freed_memory) for layer in layers]


def release_after_large_pass(view: ModelView, n_tokens: int) -> None:
    """Return freed memory to the system if a pass over one prompt takes more than half of
    `PASS_BYTES`, so that it does not stay beside what is computed next.
    """
    on_cpu = torch.device(view.cfg.device).type == "cpu"
    if on_cpu and pass_bytes(view, n_tokens) > PASS_BYTES // 2:
        release_freed_memory()


def _release_freed_memory(x: Tensor, hook: Any) -> None:
    release_freed_memory()
