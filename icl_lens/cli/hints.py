"""Hints for words of a command line that a command does not read: options of other commands, other
spellings of options, and heads without their option.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from icl_lens.errors import InputError

_HEADS = re.compile(r"L\d+H\d+([, ]+L\d+H\d+)*", re.IGNORECASE)


def check_words(commands: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raise InputError for a head or an unknown option, with what to write instead.

    `commands` are the Click commands by name, and `arguments` what follows the program's name.
    """
    if not arguments or arguments[0] not in commands:
        return
    name = arguments[0]
    option_of = _options(commands[name])
    is_value = False  # of the option before it
    for argument in arguments[1:]:
        if is_value:
            is_value = False
        elif argument == "--":
            return
        elif argument.startswith("--"):
            option, is_joined, _ = argument.partition("=")
            if option not in option_of:
                raise InputError(_unknown_option(commands, name, option))
            is_value = not (is_joined or option_of[option].is_flag)
        elif argument.startswith("-"):
            is_value = argument in option_of and not option_of[argument].is_flag
        elif _HEADS.fullmatch(argument):
            raise InputError(_head_without_option(name, option_of, argument))


def _options(command: Any) -> dict[str, Any]:
    """Return the command's options by each of their spellings."""
    option_of: dict[str, Any] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            spellings = [*parameter.opts, *parameter.secondary_opts]
            option_of.update(dict.fromkeys(spellings, parameter))
    for spelling in ("-h", "--help", "--help-all"):
        option_of.setdefault(spelling, _Help())
    return option_of


class _Help:
    """The options that print the help, which every command has."""

    is_flag = True


def _unknown_option(commands: Mapping[str, Any], name: str, option: str) -> str:
    """Return why a command does not read an option, and which one may be meant."""
    option_of = _options(commands[name])
    short = option[1:]  # -k for --k
    if len(short) == 2 and short in option_of:
        return f"no option {option}; write {'/'.join(option_of[short].opts)}"
    from icl_lens.result.number_format import joined  # numpy takes long to import

    having = [known for known, command in commands.items() if option in _options(command)]
    if having:
        return (
            f"icl-lens {name} has no option {option}, an option of {joined(having)}; see icl-lens "
            f"{name} --help-all"
        )
    words = {spelling.lstrip("-"): spelling for spelling in option_of}
    similar = get_close_matches(option.lstrip("-"), words, n=1)
    hint = f" (did you mean {words[similar[0]]}?)" if similar else ""
    return f"no option {option}{hint}; see icl-lens {name} --help-all"


def _head_without_option(name: str, option_of: Mapping[str, Any], heads: str) -> str:
    """Return the option with which a command reads heads."""
    for option in ("--heads", "--why"):
        if option in option_of:
            return f"{heads!r} names heads, not a prompt; write icl-lens {name} {option} {heads}"
    return (
        f"{heads!r} names heads, which icl-lens {name} does not read; see icl-lens ablate --heads"
    )
