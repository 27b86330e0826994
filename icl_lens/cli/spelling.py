"""Error messages of the library in the words of the shell: `--max-words 20` for `max_words=20`."""

import re

# Arguments of library functions that are options of the commands.
_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("labels", "columns", "path", "split", "max_words", "classes", "layout", "demonstrations"),
        *(
            "answer",
            "against",
            "by",
            "template",
            "separator",
            "prefix",
            "device",
            "dtype",
            "revision",
            "seed",
        ),
    )
}
_NAME = rf"(?<![\w'\"(.-])({'|'.join([*_OPTIONS, 'prepend_bos', 'pairs'])})"
_VALUE = r"(\{[^}]*\}|\([^)]*\)|\"[^\"]*\"|'[^']*'|[\w. ]*?(?= \(--)|[\w.]*)"
# `name=value (--option value)`, in which the parentheses already contain the shell's words.
_BOTH = re.compile(rf"{_NAME}(?:={_VALUE})? \((--[^)]*)\)")
_PYTHON = re.compile(rf"{_NAME}={_VALUE}")


def shell_spelling(message: str) -> str:
    """Return an error message with options instead of Python arguments.

    Example:
        >>> from icl_lens.cli.spelling import shell_spelling
        >>> shell_spelling('no prompts are left; pass max_words=20')
        'no prompts are left; pass --max-words 20'
        >>> shell_spelling("use columns=(text, label); pass prepend_bos=True (--bos)")
        'use --columns text,label; pass --bos'
    """

    def option(spelled: re.Match[str]) -> str:
        name, value = spelled.groups()
        if name not in _OPTIONS:
            return spelled[0]
        value = value.strip("()\"'").replace(", ", ",") if value[:1] != "{" else value
        return f"{_OPTIONS[name]} {value}".rstrip()

    return _PYTHON.sub(option, _BOTH.sub(lambda spelled: spelled[3], message))
