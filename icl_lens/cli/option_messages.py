"""Messages of the library in the words of the command line: options instead of Python's arguments."""

import re
from collections.abc import Callable

_CLI_TERMS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
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
    """A message with every argument that an option sets called by that option.

    Example:
        >>> from icl_lens.cli.option_messages import to_cli_terms
        >>> to_cli_terms("k=0 must be at least 1")
        '--top 0 must be at least 1'
    """
    for pattern, option in _CLI_TERMS:
        message = re.sub(pattern, option, message)
    return message
