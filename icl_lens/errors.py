"""Errors for invalid user input."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """Invalid input that the caller can correct; the message gives the cause, the value and a fix
    in one sentence.

    Example:
        >>> il.Prompt.parse("no colon here")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        icl_lens.errors.InputError: no ' : ' separator in 'no colon here'; write ...
    """


_MODEL_FIRST = {
    "PromptBatch": "batch",
    "Prompt": "prompt",
    "Text": "text",
    "Activations": "acts",
    "ActivationCache": "cache",
    "Template": "template",
    "list": "prompts",
    "tuple": "prompts",
}
"""Types that are passed in place of a model when arguments are exchanged, and what to call them."""


def not_a_model_error(model: object) -> InputError:
    """Return the error for a value in place of a TransformerLens model, with the right call.

    The type is read from its name, since this module needs no other package.
    """
    kinds = {kind.__name__ for kind in type(model).__mro__}
    name = type(model).__name__
    if isinstance(model, str):
        remedy = f"load it first, with model = il.load_model({model!r:.60}), and pass the model"
    elif "Module" in kinds:
        remedy = "write model = il.load_model('my-name', hf_model=model, tokenizer=tokenizer) and pass the result"
    elif "PreTrainedTokenizerBase" in kinds:
        remedy = "pass the model that il.load_model returns; it holds its tokenizer"
    elif name in _MODEL_FIRST:
        remedy = f"the model comes first, as in function(model, {_MODEL_FIRST[name]})"
    else:
        remedy = "load one with il.load_model or TransformerBridge.boot_transformers"
    return InputError(f"model must be a TransformerLens model, got {name}; {remedy}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return " (did you mean 'icl-mini'?)" for a name that resembles one of `names`, else an empty
    string.
    """
    matches = get_close_matches(name, [known for known in names if known != name], n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_integers(**values: object) -> tuple[int, ...]:
    """Return the values as integers of Python; raise InputError unless each is one, or one of
    NumPy.

    Random generators, JSON and hashes of texts do not take integers of NumPy for those of Python.

    Example:
        >>> from icl_lens.errors import check_integers
        >>> check_integers(k=3, n=10)
        (3, 10)
    """
    integers: list[int] = []
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(f"{name} must be an integer, got {value!r}")
        integers.append(int(value))
    return tuple(integers)


def check_at_least(minimum: int, **values: Any) -> tuple[int, ...]:
    """Return the values as integers of Python; raise InputError unless each is an integer of at
    least `minimum`.
    """
    integers = check_integers(**values)
    for name, value in zip(values, integers, strict=True):
        if value < minimum:
            raise InputError(f"{name} must be at least {minimum}, got {value}")
    return integers
