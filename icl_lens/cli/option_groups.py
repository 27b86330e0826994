"""Option groups: frozen dataclasses whose fields are Typer options shared by several commands."""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import chain
from typing import Annotated, Any, get_args, get_type_hints

from icl_lens.errors import InputError

RARE = frozenset(
    (
        *(
            "layout",
            "split",
            "max_words",
            "prefix",
            "system",
            "bos",
        ),
        *(
            "final_norm",
            "bias",
            "revision",
            "revision_b",
            "dtype",
            "device",
            "batch_size",
            "memory",
            "method",
        ),
        *("random_sets", "mean_over", "n_ablated", "open_page", "seed", "chat", "check"),
    )
)
"""Options that `--help` leaves out and `--help-all` shows."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each option group among its parameters expanded for Typer.

    A group is a dataclass with a class attribute `panel`, the help panel of its options, and fields
    `Annotated[type, typer.Option(...)]` with defaults. The options follow the command's other
    parameters.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    ungrouped = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    options = list(chain.from_iterable(map(_options, groups.values())))
    for parameter in ungrouped:
        for setting in getattr(hints[parameter.name], "__metadata__", ()):
            setting.hidden = setting.hidden or parameter.name in RARE
    signature = inspect.Signature(
        [*(p.replace(annotation=hints[p.name]) for p in ungrouped), *options]
    )

    @wraps(command)
    def flat(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, group in groups.items():
            names = [field.name for field in fields(group) if field.init]
            values[name] = group(**{field_name: values.pop(field_name) for field_name in names})
        command(**values)

    # Typer keeps the source's line breaks within paragraphs; join lines so that they wrap at the
    # terminal's width.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    flat.__doc__ = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    flat.__dict__["__signature__"] = signature
    flat.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    """Return a group's fields as keyword-only parameters that Typer shows in the group's panel."""
    hints = get_type_hints(group, include_extras=True)
    options = []
    for field in fields(group):
        if not field.init:
            continue
        kind, option = get_args(hints[field.name])
        option = copy(option)
        option.rich_help_panel = group.panel
        option.hidden = option.hidden or field.name in RARE
        annotation = Annotated[kind, option]
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=annotation,
            )
        )
    return options


def reject_options(group: Any, *names: str, reason: str) -> None:
    """Raise InputError if one of these options, which have no effect, differs from its default."""
    for field in fields(group):
        if field.name in names and getattr(group, field.name) != field.default:
            raise InputError(
                f"--{field.name.replace('_', '-')} has no effect here: {reason}; remove it"
            )


def option_words(group: Any, kind: type) -> list[str]:
    """Return the words of a command line that set those options of a group that differ from their
    defaults; only the options that `kind`, the group's class or a base of it, has.

    Example:
        >>> from icl_lens.cli.option_groups import option_words
        >>> from icl_lens.cli.options import ModelOptions
        >>> option_words(ModelOptions(model="smollm2-135m", dtype="bfloat16"), ModelOptions)
        ['-m', 'smollm2-135m', '--dtype', 'bfloat16']
    """
    hints = get_type_hints(kind, include_extras=True)
    words: list[str] = []
    for field in fields(kind):
        value = getattr(group, field.name)
        if not field.init or value == field.default:
            continue
        _, option = get_args(hints[field.name])
        # Typer takes the first spelling of an annotated option for its default.
        first = [option.default] if isinstance(option.default, str) else []
        spellings = [*first, *option.param_decls] or [f"--{field.name.replace('_', '-')}"]
        if isinstance(value, bool):
            with_flag, _, without = spellings[0].partition("/")
            words.append(with_flag if value else without)
        else:
            words += [min(spellings, key=len), str(value)]
    return words
