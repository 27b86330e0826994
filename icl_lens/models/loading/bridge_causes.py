"""Say why a bridge differs from the Hugging Face model that it was built from, as far as the model
shows it.
"""

from typing import Any

from torch import nn

from icl_lens.models.passes.module_hooks import LIBRARIES, hooked_modules, own_name, package_of


def likely_cause(model: Any, hf_model: Any = None) -> str:
    """Return why a bridge differs from its Hugging Face model, as far as the model shows it, and
    what to do.
    """
    root = model.original_model if hf_model is None else hf_model
    config: Any = getattr(root, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text_config, "is_causal", True) is False or getattr(
        text_config, "use_bidirectional_attention", False
    ):
        return (
            "its configuration says that attention is not causal (is_causal=False); use the causal "
            "model that it was made from"
        )
    remedy = (
        "put the change into the weights, or remove it and edit the model after loading (il.edited)"
    )
    if replaced := replaced_forwards(root):
        return (
            f"the forward of {replaced[0]} was replaced, and TransformerLens runs its own code "
            f"there; {remedy}"
        )
    if hooked := hooked_modules(root):
        return f"a forward hook acts on {hooked[0]}, which TransformerLens may not run; {remedy}"
    foreign = foreign_modules(root)
    if adapted := [name for name, kind in foreign if kind.__module__.startswith("peft.tuners.")]:
        return (
            f"an adapter of peft acts on {adapted[-1]}, of whose weight TransformerLens makes a "
            "copy without it; merge it with hf_model.merge_and_unload() before loading"
        )
    if foreign:
        name, kind = foreign[0]
        return f"{name} is a {kind.__name__}, whose own code TransformerLens may not run; {remedy}"
    return (
        "a value of its configuration, or code of its own, is not what TransformerLens expects of "
        "this family; use its usual configuration, another version of TransformerLens, or a family "
        "that docs/families.md lists as exact"
    )


def replaced_forwards(root: nn.Module) -> list[str]:
    """Return the names of modules whose `forward`, or that of their class, was replaced by code
    outside `LIBRARIES`.
    """
    return [
        own_name(name) for name, module in root.named_modules() if _has_replaced_forward(module)
    ]


def _has_replaced_forward(module: nn.Module) -> bool:
    own_forward = vars(module).get("forward")
    if own_forward is not None and package_of(own_forward) not in LIBRARIES:
        return True
    module_class = type(module)
    forward_package = package_of(module_class.forward)
    return forward_package not in (*LIBRARIES, package_of(module_class))


def foreign_modules(root: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    """Return the names and classes of modules whose class no library defines."""
    foreign: list[tuple[str, type[nn.Module]]] = []
    for name, module in root.named_modules():
        module_class = type(module)
        if package_of(module_class) not in LIBRARIES:
            foreign.append((own_name(name), module_class))
    return foreign
