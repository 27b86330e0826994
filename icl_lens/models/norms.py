"""Infer a norm's gain, shift and eps by probing the module."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.passes.offload import weights_loaded
from icl_lens.models.readout import norm_scale


class NormView(NamedTuple):
    """A norm as an affine map with a data-dependent scale: gain, shift, eps, whether it centers,
    its width.

    `normalize` is False if the module returns its input unchanged.
    """

    gain: Tensor | None
    shift: Tensor | None
    eps: float
    center: bool
    normalize: bool
    width: int

    def gain_as(self, dtype: torch.dtype) -> Tensor:
        return torch.ones((), dtype=dtype) if self.gain is None else self.gain.to(dtype)

    def __call__(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        """Return the module's output for `x`, in the dtype of `x`."""
        if not self.normalize:
            return x
        y = x - x.mean(-1, keepdim=True) if self.center else x
        y = y * norm_scale(x, eps=self.eps, center=self.center)[..., None] * self.gain_as(x.dtype)
        return y if self.shift is None else y + self.shift.to(x.dtype)


def infer_norm(module: Any, width: int, device: torch.device, *, default_eps: float) -> NormView:
    """Infer a norm module's gain, shift and centering from its outputs; raise InputError if it is
    no norm.

    Families differ in where gains are and whether they are stored as `w` or `1 + w`; outputs do not
    depend on this. The output for the zero vector is the shift. Two long vectors, for which eps is
    negligible, give centering and the gain. A short one tests eps.
    """
    signs = torch.ones(1, 1, width, dtype=torch.float64)
    signs[..., 1::2] = -1
    with weights_loaded(module), torch.no_grad():
        weight = next((p for p in module.parameters()), None)
        # Probing in the module's own dtype is exact for half precision, since the gains round the
        # same way.
        dtype = torch.float32 if weight is None else weight.dtype
        where = device if weight is None else weight.device
        long = signs * (2.0**24 if dtype == torch.float64 else 2.0**10)

        def output(x: Tensor) -> Tensor:
            return module(x.to(where, dtype))[0, 0].to(device, torch.float64).cpu()

        shift, ones, alternating = output(torch.zeros_like(signs)), output(long.abs()), output(long)
        if torch.equal(alternating, long[0, 0]):
            return NormView(
                gain=None, shift=None, eps=default_eps, center=False, normalize=False, width=width
            )
        center = bool(
            torch.allclose(ones, shift, atol=1e-3)
            and not torch.allclose(alternating, shift, atol=1e-3)
        )
        gain = (alternating - shift) * signs[0, 0]
        eps = _eps_of(module, default_eps)
        expected = shift + gain * signs[0, 0] / math.sqrt(2)
        if not torch.allclose(output(signs * math.sqrt(eps)), expected, rtol=2e-2, atol=2e-2):
            raise InputError(
                f"norm must be a LayerNorm or an RMSNorm, got {type(module).__name__}, which is "
                f"neither with eps={eps}; this family is not supported"
            )
    # With an odd width the alternating vector has a mean, which LayerNorm removes.
    if center and width % 2:
        raise InputError(f"width of a LayerNorm must be even, got {width}")
    return NormView(
        gain=None if bool((gain == 1).all()) else gain.to(device),
        shift=shift.to(device) if bool(shift.any()) else None,
        eps=eps,
        center=center,
        normalize=True,
        width=width,
    )


def _eps_of(module: Any, default: float) -> float:
    for owner in (module, getattr(module, "original_component", None)):
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(owner, name, None) if owner is not None else None
            if isinstance(value, (int, float)):
                return float(value)
    return default
