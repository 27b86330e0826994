"""The error for invalid user input and how its sentence quotes values; checks of simple arguments;
warnings for users.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, cast


class InputError(ValueError):
    """Invalid input that the caller can correct; the message gives the cause, the value and a fix
    in one sentence.

    Example:
        >>> il.Prompt.parse("no colon here")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        icl_lens.errors.InputError: no ' : ' separator in 'no colon here'; write ...
    """


MAX_REPR = 120
"""The largest number of characters of a value in an error."""

MAX_ELEMENTS = 6
"""The largest number of elements of a list in an error."""


REPR_MODULES = ("builtins", "pathlib", "enum")
"""Modules of types whose `repr` is safe and, cut off, short enough."""


def short_repr(value: object) -> str:
    """Return a value as errors write it: at most some 120 characters in one line.

    Texts, numbers and short objects are written like `repr`, lists with their first elements.
    Of objects whose `repr` can be long, such as models and tables, only the type is named.

    Example:
        >>> from icl_lens.errors import short_repr
        >>> short_repr("foo"), short_repr([1, 2.5]), short_repr(object())
        ("'foo'", '[1, 2.5]', 'an object of type object')
    """
    kind = type(value)
    is_plain = value is None or (kind.__module__ in REPR_MODULES and kind is not object)
    is_number = kind.__module__ == "numpy" and not hasattr(value, "__len__")
    is_ours = kind.__module__.startswith("icl_lens")
    if kind in (list, tuple):
        text = _list_repr(cast("list[object] | tuple[object, ...]", value))
    elif is_plain or is_number or (is_ours and len(repr(value)) <= MAX_REPR):
        text = repr(value)
    else:
        text = f"an object of type {kind.__name__}"
    text = text.replace("\n", " ")
    return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 1]}…"


def _list_repr(values: "list[object] | tuple[object, ...]") -> str:
    """Return a list or a tuple with its first elements, each as `short_repr` writes it."""
    elements = [short_repr(element) for element in values[:MAX_ELEMENTS]]
    if len(values) > MAX_ELEMENTS:
        elements.append("…")
    text = ", ".join(elements)
    if isinstance(values, list):
        return f"[{text}]"
    return f"({text},)" if len(values) == 1 else f"({text})"


_MODEL_FIRST = {
    "PromptBatch": "batch",
    "Prompt": "prompt",
    "Text": "text",
    "Activations": "acts",
    "ActivationCache": "cache",
    "Template": "template",
    "DataFrame": "prompts",
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
    if isinstance(model, str) and " " in model.strip():
        remedy = "the model comes first, as in function(model, prompt)"
    elif isinstance(model, str):
        remedy = f"load it first, with model = il.load_model({model!r:.60}), and pass the model"
    elif "Module" in kinds:
        remedy = (
            "write model = il.load_model('my-name', hf_model=model, tokenizer=tokenizer) and pass "
            "the result"
        )
    elif "PreTrainedTokenizerBase" in kinds:
        remedy = "pass the model that il.load_model returns; it holds its tokenizer"
    elif name in _MODEL_FIRST:
        remedy = f"the model comes first, as in function(model, {_MODEL_FIRST[name]})"
    else:
        remedy = "load one with il.load_model or TransformerBridge.boot_transformers"
    return InputError(f"model must be a TransformerLens model, got {name}; {remedy}")


def warn_user(message: str) -> None:
    """Warn, with the place in the user's code that called the library."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("icl_lens."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} must be one of {quoted_list(choices)}, got {short_repr(value)}")


def quoted_list(names: Sequence[str]) -> str:
    """Return names as errors list them: quoted, with commas between."""
    return ", ".join(repr(name) for name in names)


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error, without request IDs and cut to 160 characters;
    if none, its type.
    """
    for line in str(error).splitlines():
        line = re.sub(r"\s*\(Request ID: [^)]*\)", "", line).strip().rstrip(".:;")
        if line:
            return line if len(line) <= 160 else f"{line[:159]}…"
    return type(error).__name__


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
            raise InputError(f"{name} must be an integer, got {short_repr(value)}")
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
