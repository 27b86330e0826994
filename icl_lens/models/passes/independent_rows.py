"""Make the rows of a pass independent of each other and of earlier passes, as if each were run
alone.

Three things in Hugging Face models and bridges depend on a row's neighbors or on how a pass is run:

1. Some rotations (longrope, dynamic NTK) depend on the longest row of a pass, padding included, and
   dynamic NTK also on earlier passes. Each row is rotated as in the first pass of a new model over
   this row alone.
2. A masked score is the smallest number of the model's dtype. In float64, attention computed in
   float32 turns it into −inf, so padding that sees no key becomes NaN and spreads. Masks are
   limited to the range of float32.
3. OLMo 2 rotates in float32 and then returns to the model's dtype, which bridges do only with a KV
   cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.passes.inference import replace_forwards

Rotate = Callable[..., tuple[Tensor, ...]]
"""A rotation's `forward`: cosines and sines [#batch pos d_rotary] from an input, positions and
maybe a layer type.
"""

_OPEN: "WeakKeyDictionary[Any, tuple[int, ExitStack]]" = WeakKeyDictionary()
# Model -> number of open `independent_rows` blocks, and what undoes their changes.
_ROTATIONS: "WeakKeyDictionary[Any, list[Any]]" = WeakKeyDictionary()
# Model -> its modules whose rotation depends on the length of a pass.


@contextmanager
def independent_rows(model: Any) -> Iterator[None]:
    """Make the rows of passes in the block independent; blocks nest and may end in any order.

    Raise InputError in a pass that continues a KV cache whose keys have another rotation than the
    pass.
    """
    count, stack = _OPEN.get(model, (0, ExitStack()))
    if count == 0:
        _install(model, stack)
    _OPEN[model] = count + 1, stack
    try:
        yield
    finally:
        count, stack = _OPEN.pop(model)
        if count > 1:
            _OPEN[model] = count - 1, stack
        else:
            stack.close()


def rotations_by_length(model: Any, lengths: Sequence[int]) -> list[int]:
    """Return a number for each length of a row; lengths with the same number have the same rotation
    in all modules.
    """
    modules = _length_dependent_rotations(model)
    if not modules:
        return [0] * len(lengths)
    numbers: dict[tuple[bytes, ...], int] = {}
    number_of_length: dict[int, int] = {}
    for length in sorted(set(lengths)):
        angles = [angle.float().cpu().numpy().tobytes() for angle in first_angles(model, length)]
        number_of_length[length] = numbers.setdefault(tuple(angles), len(numbers))
    return [number_of_length[length] for length in lengths]


def first_angles(model: Any, length: int) -> list[Tensor]:
    """Return the cosines and sines of position 1 in a row of `length` tokens, for each rotation
    that depends on it.
    """
    angles: list[Tensor] = []
    for module in _length_dependent_rotations(model):
        forward = partial(type(module).forward, module)
        for layer_type in _layer_types(module):
            angles.append(_angles_at_one(module, forward, length, *layer_type))
    return angles


def _install(model: Any, stack: ExitStack) -> None:
    original = getattr(model, "original_model", None)
    if original is None:  # HookedTransformer rotates by a table and masks by −inf
        return
    masks: list[Tensor | None] = [None]

    def keep_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        masks[0] = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    modules = _length_dependent_rotations(model)
    if modules:
        stack.callback(original.register_forward_pre_hook(keep_mask, with_kwargs=True).remove)
        forwards = [
            (module, partial(_rotate_each_row, module, module.forward, masks)) for module in modules
        ]
        stack.enter_context(replace_forwards(forwards))
    dtype = model.W_U.dtype
    for block in model.blocks:
        attn = getattr(block, "attn", None)
        if attn is None:
            continue
        if dtype == torch.float64:
            stack.callback(attn.register_forward_pre_hook(_limit_mask, with_kwargs=True).remove)
        elif dtype != torch.float32:
            for name in ("hook_rot_q", "hook_rot_k"):
                if (point := getattr(attn, name, None)) is not None:
                    stack.callback(
                        point.register_forward_hook(lambda module, args, x: x.to(dtype)).remove
                    )


def _length_dependent_rotations(model: Any) -> list[Any]:
    """Return the modules that state a rotation which transformers recomputes by the length of a
    pass.
    """
    if model not in _ROTATIONS:
        original = getattr(model, "original_model", None)
        modules = [] if original is None else list(original.modules())
        _ROTATIONS[model] = [module for module in modules if _depends_on_length(module)]
    return _ROTATIONS[model]


def _depends_on_length(module: Any) -> bool:
    kinds = vars(module).get("rope_type")  # one type, or one by layer type
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def _layer_types(module: Any) -> list[tuple[str, ...]]:
    """Return the layer types that a module has a rotation for, each as the last arguments of its
    `forward`.
    """
    kinds = module.rope_type
    return [(layer_type,) for layer_type in kinds] if isinstance(kinds, dict) else [()]


def _rotate_each_row(
    module: Any,
    forward: Rotate,
    masks: list[Tensor | None],
    x: Tensor,
    position_ids: Int[Tensor, "#batch pos"],
    *layer_type: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Return the angles [#batch pos d_rotary] of `forward`, for each row those of a pass over it
    alone.
    """
    real = position_ids
    if masks[0] is not None:
        # With a KV cache, queries are the last keys.
        mask = masks[0][:, -position_ids.shape[1] :].to(real.device)
        real = torch.where(mask, position_ids, 0)
    lengths = real.max(-1).values + 1
    positions_of_rows = position_ids.expand(len(lengths), -1)
    angles_of_rows: list[Tensor] = []
    for length in lengths.unique().tolist():
        same = lengths == length
        # Rows of one length have the same positions unless they are padded on the left.
        positions = position_ids if len(position_ids) == 1 else positions_of_rows[same]
        first = int(positions.min())
        if first > 0:
            _check_same_rotation(module, forward, first, length, *layer_type)
        with _as_new(module):
            angles = forward(x, positions.clamp(max=length - 1), *layer_type, **kwargs)
        if bool(same.all()):
            return angles
        if not angles_of_rows:
            for angle in angles:
                angles_of_rows.append(angle.new_zeros(len(lengths), *angle.shape[1:]))
        for all_rows, angle in zip(angles_of_rows, angles, strict=True):
            all_rows[same] = angle.expand(int(same.sum()), *angle.shape[1:])
    return tuple(angles_of_rows)


def _check_same_rotation(
    module: Any, forward: Rotate, n_cached: int, length: int, *layer_type: str
) -> None:
    """Raise InputError unless a pass has the rotation of the KV cache that it continues."""
    cached = _angles_at_one(module, forward, n_cached, *layer_type)
    if not torch.equal(cached, _angles_at_one(module, forward, length, *layer_type)):
        raise InputError(
            f"the rotation of {type(module).__name__} must be the same for a pass and the KV cache "
            f"that it continues, got {n_cached} and {length} tokens; generate with "
            "use_past_kv_cache=False"
        )


def _angles_at_one(module: Any, forward: Rotate, length: int, *layer_type: str) -> Tensor:
    """Return the cosines and sines of position 1 in a pass of `length` tokens, which tell rotations
    apart.
    """
    prefix = f"{layer_type[0]}_" if layer_type else ""
    device = getattr(module, f"{prefix}original_inv_freq").device
    with _as_new(module):
        angles = forward(
            torch.zeros(1, device=device),
            torch.tensor([[1, length - 1]], device=device),
            *layer_type,
        )
    return torch.cat([angle[0, 0] for angle in angles])


@contextmanager
def _as_new(module: Any) -> Iterator[None]:
    """Give a rotation the state of a new model in the block, and restore its own afterwards."""
    attributes, buffers = dict(vars(module)), dict(module._buffers)
    try:
        for name, value in buffers.items():
            if name.endswith("original_inv_freq") and value is not None:
                # A copy, because longrope writes into it.
                module._buffers[name.replace("original_", "")] = value.clone()
        for name in attributes:
            if name.endswith("max_seq_len_cached"):
                vars(module)[name] = attributes["original_max_seq_len"]
        yield
    finally:
        for name in vars(module).keys() - attributes.keys():
            del vars(module)[name]
        vars(module).update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)


def _limit_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dtype != torch.float64:
        return None
    return args, {**kwargs, "attention_mask": mask.clamp(min=torch.finfo(torch.float32).min)}
