"""What the commands print: text of users is shown as it is, never read as markup, emoji or control characters."""

import io
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters but tab and line feed, what turns the direction of writing, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Text with control characters as escapes: a terminal shows "\x1b[2J" instead of clearing its screen."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class PlainConsole(Console):
    """A console to which every string is plain text, whatever prompts, labels, names and paths hold."""

    def __init__(self, **kwargs: Any):
        super().__init__(**{"markup": False, "emoji": False, **kwargs})
        if self.width < 1:  # COLUMNS=0 says that the width is not known; every line would be cut to nothing
            self.width = 80

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, with control characters in texts shown."""
        for segment in super().render(renderable, options):
            if segment.control or not _HIDDEN.search(segment.text):
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def report_error(program: str, message: object) -> None:
    """One line on standard error."""
    line = " ".join(str(message).split("\n"))
    PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(f"{program}: {line}")


def escape_unencodable() -> None:
    """Characters that the terminal's encoding lacks are written as escapes, instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
