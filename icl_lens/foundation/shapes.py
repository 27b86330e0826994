"""Check the tensors of a dataclass against the axes in its annotations, such as `Float[Tensor,
"batch layer d_model"]`.

Axes of one name must have one size in all fields. Types of elements and axes are those that
jaxtyping reads from the annotation; it compares them at every call in tests, but not in use.
"""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxtyping import AbstractArray


def check_shapes(
    kind: type, values: Mapping[str, Any], axes: Mapping[str, int] | None = None
) -> None:
    """Raise ValueError, naming the field, for another dtype or shape than `kind` annotates.

    `axes` are sizes known beforehand, by the name of the axis.
    """
    hints, sizes = get_type_hints(kind), dict(axes or {})
    for name, value in values.items():
        arrays = _array_types(hints.get(name))
        if not arrays or (value is None and type(None) in get_args(hints[name])):
            continue
        if not any(_fits(value, array, sizes) for array in arrays):
            form = " or ".join(f"{array.dtype.__name__} [{array.dim_str}]" for array in arrays)
            raise ValueError(f"{name} must be {form}, got {_described(value)}")


def _array_types(hint: Any) -> list[Any]:
    """Return the jaxtyping types of an annotation, which may be a union."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, AbstractArray)]


def _fits(value: Any, array: Any, sizes: dict[str, int]) -> bool:
    """Return whether a value has an annotation's dtype and axes; add the sizes of new axes."""
    if not isinstance(value, array.array_type):
        return False
    dtypes = array.dtypes
    if isinstance(dtypes, (list, tuple)) and str(value.dtype).removeprefix("torch.") not in dtypes:
        return False
    names = array.dim_str.split()
    if any(name.startswith(("*", "...")) for name in names):  # any number of axes
        return True
    if len(names) != len(value.shape):
        return False
    for name, size in zip(names, value.shape, strict=True):
        expected = int(name) if name.isdigit() else sizes.setdefault(name, int(size))
        if name != "_" and size != expected:
            return False
    return True


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
