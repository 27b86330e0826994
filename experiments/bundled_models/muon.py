"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum whose singular values are made equal.

Small transformers leave chance in a third of the steps that Adam takes. In float32, since a CPU has no fast bfloat16.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the Newton-Schulz iteration that takes singular values from (0, 1] to about 1 in five steps."""


def orthogonalized(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return the nearest matrix whose singular values are all 1, to within about 30%, by Newton-Schulz iteration."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Updates matrices by the orthogonalized Nesterov momentum of their gradients.

    An update's root mean square is about 0.2 × `lr`, the size of AdamW's, whatever the matrix's shape. Parameters of
    a group with `parts` > 1 are `parts` matrices stacked along `axis` (queries, keys and values in one).
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum, "parts": 1, "axis": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("momentum", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                blend = parameter.grad.lerp(average, group["momentum"])
                update = torch.cat(
                    [
                        orthogonalized(part) * 0.2 * max(part.shape) ** 0.5
                        for part in blend.chunk(group["parts"], group["axis"])
                    ],
                    group["axis"],
                )
                parameter.add_(update, alpha=-group["lr"])
