"""Option groups: frozen dataclasses whose fields are Typer options shared by several commands."""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer.models import ParameterInfo


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each option group among its parameters expanded for Typer.

    A group is a dataclass with a class attribute `panel`, the help panel of its options, and fields
    `Annotated[type, typer.Option(...)]`. Its own options precede inherited ones, and all follow the command's other
    parameters. Raises TypeError if two groups share an option name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    others = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    options = [option for group in groups.values() for option in _options(group)]
    parameters = [*(p.replace(annotation=hints[p.name]) for p in others), *options]
    if len({p.name for p in parameters}) < len(parameters):
        raise TypeError(f"{command.__name__} has two options with the same name")
    signature = inspect.Signature(parameters)

    @wraps(command)
    def flat(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **built)

    # Typer keeps the source's line breaks within paragraphs; join lines so that they wrap at the terminal's width.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    flat.__doc__ = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    flat.__dict__["__signature__"] = signature
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    field = {f.name: f for f in fields(group)}
    own_first = dict.fromkeys(name for cls in group.__mro__ for name in inspect.get_annotations(cls) if name in field)
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field[name].default is MISSING else field[name].default,
            annotation=_in_panel(hints[name], group.panel),
        )
        for name in own_first
    ]


def _in_panel(hint: Any, panel: str) -> Any:
    """Return the annotation with the panel set on a copy of its Typer option."""
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{hint!r} is not an option; write Annotated[type, typer.Option(...)]")
    plain, *extras = get_args(hint)
    return Annotated[(plain, *(_with_panel(extra, panel) for extra in extras))]


def _with_panel(extra: Any, panel: str) -> Any:
    if not isinstance(extra, ParameterInfo):
        return extra
    copied = copy(extra)
    copied.rich_help_panel = panel
    return copied
