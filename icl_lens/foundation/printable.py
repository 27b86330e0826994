"""Text for terminals, in which control characters are written out."""

import re

# Control characters except tab and line feed, direction marks, and lone surrogates.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control_characters(text: str) -> str:
    r"""Escape control characters, so that a terminal shows "\x1b[2J" instead of clearing its
    screen.
    """
    return HIDDEN.sub(lambda hidden: hidden[0].encode("unicode_escape").decode("ascii"), text)
