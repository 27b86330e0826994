"""Refuse models whose blocks cannot be read as heads that write to one residual stream, in one
clear error each.

`check_layout` asks what blocks, hooks and weights state (which of them have attention, the shapes
of their matrices, the sizes in the configuration); it matches no class names, so it also decides
about families that nobody has tried. What only a forward pass can show is checked when activations
are captured.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from icl_lens.errors import InputError
from icl_lens.models.passes.offload import weights_loaded_if_offloaded

# Models that passed; the check reads every layer, and views of a model are made at each call.
_CHECKED: "WeakSet[Any]" = WeakSet()

# What `Activations` reads from every layer.
_HOOKS = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_resid_post",
)

REMEDY = "use a decoder with attention and FFN in every layer, such as those in docs/families.md"


def check_layout(model: Any, name: str) -> None:
    """Raise InputError if some layers of a model have no attention, latent attention, other sizes,
    or missing hooks.

    `name` is the model's class in errors.
    """
    if model in _CHECKED:
        return
    parts = [part for part in ("blocks", "ln_final", "unembed") if not hasattr(model, part)]
    if parts:
        raise _layout_error(
            name, f"it has no {' and no '.join(parts)}", "a final norm and an unembedding"
        )
    if (
        hasattr(model, "original_model")
        and getattr(model.ln_final, "original_component", None) is None
    ):
        raise _layout_error(name, "it has no final norm", "a final norm and an unembedding")
    config = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(config, "add_cross_attention", False):
        raise _layout_error(
            name, "it has cross attention (add_cross_attention)", "attention to the text alone"
        )
    hooks = frozenset(model.hook_dict)
    _check_blocks(model, name, hooks)
    has_learned_positions = (
        getattr(model.cfg, "positional_embedding_type", "standard") == "standard"
    )
    if has_learned_positions and "hook_pos_embed" not in hooks:
        raise _layout_error(
            name,
            "its position embeddings have no hook (hook_pos_embed)",
            "positions that can be told from words",
        )
    _CHECKED.add(model)


def _check_blocks(model: Any, name: str, hooks: frozenset[str]) -> None:
    """Raise InputError unless every block has attention, an FFN, their matrices and their hooks."""
    blocks = list(model.blocks)
    if without := [layer for layer, block in enumerate(blocks) if not hasattr(block, "attn")]:
        kind = "layers without attention" if len(without) < len(blocks) else "no attention"
        raise _layout_error(name, f"it has {kind} ({_list(without)})", "attention in every layer")
    if without := [layer for layer, block in enumerate(blocks) if not hasattr(block, "mlp")]:
        raise _layout_error(
            name, f"it has layers without an FFN ({_list(without)})", "an FFN in every layer"
        )
    _check_weights(model, name, blocks)
    for layer in range(len(blocks)):
        missing = [hook for hook in _HOOKS if f"blocks.{layer}.{hook}" not in hooks]
        if missing:
            raise _layout_error(
                name,
                f"layer {layer} has no {missing[0]}",
                "the hooks of a decoder of attention + FFN layers",
            )


def _check_weights(model: Any, name: str, blocks: list[Any]) -> None:
    """Raise InputError unless every layer's attention matrices have the sizes in the
    configuration.
    """
    cfg = model.cfg
    n_heads, d_head, d_model = int(cfg.n_heads), int(cfg.d_head), int(cfg.d_model)
    n_kv_heads = int(getattr(cfg, "n_key_value_heads", None) or n_heads)
    if len(blocks) != int(cfg.n_layers):
        raise _layout_error(
            name, f"it has {len(blocks)} blocks for {cfg.n_layers} layers", "one block per layer"
        )
    allowed = {
        "W_Q": [(n_heads, d_model, d_head)],
        "W_K": [(heads, d_model, d_head) for heads in (n_kv_heads, n_heads)],
        "W_V": [(heads, d_model, d_head) for heads in (n_kv_heads, n_heads)],
        "W_O": [(n_heads, d_head, d_model)],
    }
    for layer, block in enumerate(blocks):
        for matrix, shapes in allowed.items():
            try:
                with weights_loaded_if_offloaded(model, block.attn):
                    shape = tuple(getattr(block.attn, matrix).shape)
            except (AttributeError, NotImplementedError):
                raise _layout_error(
                    name,
                    f"attention in layer {layer} has no {matrix} (latent attention, or heads that "
                    "share matrices)",
                    "one query, key, value and output matrix per head",
                ) from None
            except (
                RuntimeError,
                ValueError,
            ):  # a bridge cannot divide it into the heads of the configuration
                shape = None
            if shape not in shapes:
                raise _layout_error(
                    name,
                    f"{matrix} in layer {layer} does not have the size {_size(shapes[0])} of the "
                    "configuration",
                    "heads of one size in every layer",
                )


def _layout_error(name: str, what: str, needed: str) -> InputError:
    return InputError(
        f"{name} is not supported: {what}, and heads can be explained only with {needed}; {REMEDY}"
    )


def _list(layers: Iterable[int]) -> str:
    numbers = list(layers)
    more = f", … ({len(numbers)} in all)" if len(numbers) > 4 else ""
    return f"{'layer' if len(numbers) == 1 else 'layers'} {', '.join(map(str, numbers[:4]))}{more}"


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))
