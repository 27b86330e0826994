"""A pretended GPU for tests: tensors count as being on it, and mixing them with tensors on the CPU
raises errors.

Everything is computed on the CPU. A tensor is "on the GPU" if it is marked; results of marked
tensors are marked too. `.to`, `.cpu` and functions with `device=` set the mark as they would move
tensors. What PyTorch refuses on a real GPU is refused here: mixing marked and unmarked tensors, a
marked index into an unmarked tensor, `.numpy()` of a marked one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

GPU = torch.device("cuda:0")
MARK = "_pretends_to_be_on_a_gpu"
CONVERTED = {"numpy", "__array__"}
MOVES = {"copy_", "set_", "set_data"}
INDEXES = {"__getitem__", "__setitem__", "index_put_", "index_put"}


def is_marked(x: Tensor) -> bool:
    return MARK in x.__dict__


def marked(x: Tensor) -> Tensor:
    """Mark a tensor as being on the GPU, in place; return it."""
    x.__dict__[MARK] = True
    return x


def fresh(x: Tensor) -> Tensor:
    """Return an unmarked view of a tensor; a sparse tensor is returned itself."""
    return x.view_as(x) if not x.is_sparse else x


def is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class PretendGpu(TorchFunctionMode):
    """Apply the rules in the module's docstring to every torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_gpu = any(is_marked(x) for x in tensors)
        if name == "__get__" and owner in ("device", "is_cuda"):
            if not on_gpu:
                return func(*args, **kwargs)
            return GPU if owner == "device" else True
        if name == "__set__" and owner == "data":
            return func(*args, **kwargs)
        if name in CONVERTED and on_gpu:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
            )
        if name in ("cpu", "cuda", "to"):
            return self._moved(name, func, args, kwargs)
        self._check(name, args, tensors)
        return self._computed(func, args, kwargs, on_gpu=on_gpu)

    def _moved(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a tensor on the device to which a function moves it."""
        if name == "to":
            return self._to(func, args, kwargs)
        x = fresh(args[0])
        return marked(x) if name == "cuda" else x

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], *, on_gpu: bool) -> Any:
        """Return what a function computes on the CPU, marked if it would be on the GPU."""
        name = getattr(func, "__name__", "")
        if "device" in kwargs:
            on_gpu = is_gpu(kwargs["device"])
            kwargs["device"] = torch.device("cpu") if on_gpu else kwargs["device"]
        if args and name == "device":
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if on_gpu and name not in ("tolist", "item"):
            tree_map_only(Tensor, marked, output)
        return output

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        x, remaining, device = args[0], [], None
        for argument in args[1:]:
            if isinstance(argument, (str, torch.device)):
                device = argument
            elif isinstance(argument, Tensor):
                device, argument = (GPU if is_marked(argument) else "cpu"), argument.dtype
                remaining.append(argument)
            else:
                remaining.append(argument)
        like_tensor = kwargs.pop("other", None)
        if like_tensor is not None:
            device, kwargs["dtype"] = (GPU if is_marked(like_tensor) else "cpu"), like_tensor.dtype
        device = kwargs.pop("device", device)
        moved = func(x, *remaining, **kwargs) if remaining or kwargs else x
        on_gpu = is_marked(x) if device is None else is_gpu(device)
        if on_gpu == is_marked(moved) and moved is x:
            return x
        moved = fresh(moved) if moved is x else moved
        moved.__dict__.pop(MARK, None)
        return marked(moved) if on_gpu else moved

    def _check(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        real = [x for x in tensors if x.dim() > 0]
        on = [is_marked(x) for x in real]
        if all(on) or not any(on) or name in MOVES:
            return
        if name in INDEXES and is_marked(args[0]):
            value = args[2] if name != "__getitem__" and len(args) > 2 else None
            by_tensor = any(isinstance(x, Tensor) for x in tree_flatten(args[1])[0])
            if not (
                isinstance(value, Tensor) and value.dim() > 0 and not is_marked(value) and by_tensor
            ):
                return
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu"
        )


@contextmanager
def on_a_pretended_gpu(model: Any) -> Iterator[Any]:
    """Treat the model as if it were on a GPU while the block runs."""
    roots = {id(root): root for root in (model, getattr(model, "original_model", model))}
    model_tensors = [x for root in roots.values() for x in (*root.parameters(), *root.buffers())]
    before = model.cfg.device
    try:
        for x in model_tensors:
            marked(x)
        model.cfg.device = GPU
        with PretendGpu():
            yield model
    finally:
        model.cfg.device = before
        for x in model_tensors:
            x.__dict__.pop(MARK, None)
