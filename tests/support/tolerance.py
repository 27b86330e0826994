"""How much two computations of one number may differ on any processor, and float64 without steps in
float32.

Processors, and libraries that choose their code by processor, add the same terms up in different
orders. The difference grows with the precision's unit, the size of the numbers and the square root
of the number of terms, since roundings up and down cancel. No tolerance here is fitted to what one
machine gives.
"""

import math
from typing import Any

import families
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

FORWARD = families.N_LAYERS * (5 * families.D_MODEL + families.D_MLP + len(families.PROMPT_IDS))
"""Terms in a number from a tiny model; per layer: d_model for q, k, v, heads and FFN inputs;
neurons; positions.
"""
SAFETY = 64


def tolerance(
    dtype: torch.dtype = torch.float32, *, n_terms: int = FORWARD, scale: float = 1.0
) -> float:
    """Return what rounding may change in sums of `n_terms` terms that give numbers of size
    `scale`.
    """
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(n_terms) * scale


def assert_close(actual: Any, expected: Any, *, scale: float = 1.0, msg: str = "") -> None:
    """Assert that numbers from the tiny models are equal up to rounding in the coarser of their
    precisions.

    Numbers that are not tensors count as float32. `scale` is the size of the numbers that the
    result is computed from, if these are larger than 1 and than the result itself, as when large
    numbers are subtracted.
    """
    tensors = [
        x if isinstance(x, torch.Tensor) else np.asarray(x, dtype=np.float32)
        for x in (actual, expected)
    ]
    tensors = [torch.as_tensor(x).detach().cpu() for x in tensors]
    coarser = max((x.dtype for x in tensors), key=lambda dtype: torch.finfo(dtype).eps)
    ours, theirs = (x.double() for x in tensors)
    size = max([scale, *theirs[theirs.isfinite()].abs().tolist()])
    torch.testing.assert_close(
        ours,
        theirs,
        atol=tolerance(coarser, scale=size),
        rtol=0,
        msg=lambda text: f"{msg}: {text}" if msg else text,
    )


class Float64(TorchFunctionMode):
    """Makes libraries compute in float64, within the block, what they compute in float32 whatever
    the model's dtype.

    Hugging Face and TransformerLens take norms, rotations and softmaxes through float32. Load the
    models in the block too: their tables of rotations are then float64 from the start.
    """

    is_active = False

    def __enter__(self) -> "Float64":
        self.was_active = Float64.is_active
        Float64.is_active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Float64.is_active = self.was_active

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = func in (torch.Tensor.div, torch.Tensor.__truediv__, torch.div)

        def double(x: Any) -> Any:
            if divides and isinstance(x, torch.Tensor) and not x.is_floating_point():
                return x.double()  # whole numbers would be divided in the default dtype
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(
            *map(double, args), **{name: double(value) for name, value in (kwargs or {}).items()}
        )
