"""Translate argument names in error messages to command-line options."""

import re
from collections.abc import Callable

_RENAMED = {"k": "top", "n_ablated": "ablate", "n_random_sets": "random-sets", "prepend_bos": "bos"}
_SUBJECTS = (
    *_RENAMED,
    *("n", "seed", "layout", "classes", "demonstrations", "split", "labels", "columns", "path", "max_words"),
    *("batch_size", "answer", "against", "template", "shared_prefix", "final_norm", "dtype", "device", "revision"),
)

_CLI_TERMS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        r"^byte_budget must be at least 1, got (-?\d+)",
        lambda found: f"--budget must be at least 1, got {int(found[1]) // 2**20}",
    ),
    (
        rf"^({'|'.join(_SUBJECTS)})(?= must )",
        lambda found: f"--{_RENAMED.get(found[1], found[1].replace('_', '-'))}",
    ),
    (r"\bcolumns=\(text, label\)", "--columns TEXT,LABEL"),
    (r"\bcolumns=\('([^']*)', '([^']*)'\)", r"--columns \1,\2"),
    (r"\(revision= in Python\) ", ""),
    (r"\bprepend_bos=True or False\b", "--bos or --no-bos"),
    (r"\bprepend_bos=False\b", "--no-bos"),
    (r"\bleave prepend_bos out\b", "leave --bos out"),
    (r"\bshared_prefix=\"append\"", "--shared-prefix append"),
    (r", or pass load_model\(\.\.\., tokenizer=\) in Python", ""),
    (r"\bdtype=(?:torch\.)?(\w+)", r"--dtype \1"),
    (r"\bdevice='(\w+)'", r"--device \1"),
    (r"\bbyte_budget=(-?\d+)", lambda found: f"--budget {int(found[1]) // 2**20}"),
    (r"\bn_ablated=(\S+?)(?=[ ;,:)]|$)", r"--ablate \1"),
    (r"\bmax_words=(\S+?)(?=[ ;,:)]|$)", r"--max-words \1"),
    (r"\b(a larger|a smaller) max_words\b", r"\1 --max-words"),
    (r"\bbatch_size=None and ", ""),
    (r"\bbatch_size=(\S+?)(?=[ ;,:)]|$)", r"--batch-size \1"),
    (r"(?<![\w-])k=(\S+?)(?=[ ;,:)]|$)", r"--top \1"),
    (r"(?<![\w-])(n|seed|layout|classes|demonstrations|split)=(\S+?)(?=[ ;,:)]|$)", r"--\1 \2"),
    (r"\brandom_sets=(\S+?)(?=[ ;,:)]|$)", r"--random-sets \1"),
    (r"\bpath=(?=[ ;,.:)]|$)", "--path"),
    (r"\blabels=(\(.*?\)|\[.*?\]|'[^']*')", r"--labels \1"),
    (r"\blabels=(?=[ ;,.:)]|$)", "--labels"),
    (r"\bil\.tokenize\(model, prompts\)", "a prompt"),
)


def to_cli_terms(message: str) -> str:
    """Replace Python argument names in a message by command-line options.

    Example:
        >>> from icl_lens.cli.option_messages import to_cli_terms
        >>> to_cli_terms("k must be at least 1, got 0")
        '--top must be at least 1, got 0'
    """
    for pattern, option in _CLI_TERMS:
        message = re.sub(pattern, option, message)
    return message
