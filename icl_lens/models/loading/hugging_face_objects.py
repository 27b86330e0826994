"""Accept models of Hugging Face that a user has built or changed in memory, also with adapters of
peft.
"""

from typing import Any

from icl_lens.errors import InputError, first_line


def name_of(hf_model: Any) -> str:
    """Return the folder or Hub name that a model was loaded by, or its class if there is none."""
    base = without_adapter_wrapper(hf_model)
    return str(getattr(getattr(base, "config", None), "name_or_path", "") or type(base).__name__)


def without_adapter_wrapper(hf_model: Any) -> Any:
    """Return the model inside a wrapper of peft, whose projections keep their adapters.

    Raise InputError for prompt and prefix tuning, which put positions before every text.
    """
    adapters = getattr(hf_model, "peft_config", None)
    if not isinstance(adapters, dict) or not adapters:
        return hf_model
    for adapter in adapters.values():
        if getattr(adapter, "is_prompt_learning", False):
            kind = (
                str(getattr(adapter.peft_type, "value", adapter.peft_type))
                .lower()
                .replace("_", " ")
            )
            raise InputError(
                f"hf_model must have no {kind}, which puts learned positions before every text, so "
                "that positions of results would not be those of tokens; pass the base model, or "
                "one with LoRA"
            )
    return hf_model.get_base_model() if hasattr(hf_model, "get_base_model") else hf_model


def transformers_class(hf_model: Any) -> str:
    """Return the name of the class of transformers that a model has, or that its class is derived
    from.
    """
    for kind in type(hf_model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind.__name__
    return type(hf_model).__name__


def wrap_error(hf_model: Any, error: BaseException) -> str:
    """Return one sentence about why TransformerLens could not wrap a model."""
    name, cause = type(hf_model).__name__, first_line(error)
    if any(hasattr(module, "weight_orig") for module in _modules(hf_model)):
        return (
            f"cannot use hf_model={name} while hooks prune or reparameterize its weights; make "
            "that permanent with torch.nn.utils.prune.remove(module, 'weight') first"
        )
    quantized = [
        module for module in _modules(hf_model) if callable(getattr(module, "weight", None))
    ]
    if quantized:  # as by torch.ao.quantization: a method returns the weight
        return (
            f"cannot use hf_model={name} with quantized modules ({type(quantized[0]).__name__} of "
            f"{type(quantized[0]).__module__}); pass the model before it is quantized"
        )
    if "upported architecture" in cause:  # followed by a list of some hundred names
        return (
            f"cannot use hf_model={name}: TransformerLens does not support "
            f"{transformers_class(hf_model)}; use a family that docs/families.md lists as exact"
        )
    return (
        f"cannot use hf_model={name}: {type(error).__name__} {cause[:200]}; pass a decoder-only "
        "language model of transformers"
    )


def _modules(hf_model: Any) -> list[Any]:
    return list(hf_model.modules()) if hasattr(hf_model, "modules") else []
