"""A picture that shows itself in a notebook and turns into a page.

In a notebook it is a static twin, and before it the page, held in an attribute until a script of three lines puts it
into a frame and hides the twin. Viewers that take scripts away take unknown attributes too, and those that show what
they do not allow as text (`nbconvert --sanitize-html`) drop attributes without a word: the page's source is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from icl_lens.report.html.assets import document, read_asset
from icl_lens.report.html.escaping import json_script, safe
from icl_lens.report.html.static_html import NOTE, static_html, static_text

FRAME = read_asset("frame.js").strip()


@dataclass(frozen=True)
class Element:
    """One picture. In a notebook it shows itself; `str(element)` is a self-contained page of it. Nothing is fetched.

    `body` is its HTML without scripts and styles. `repr(element)` and, where scripts are stripped, its HTML hold the
    same numbers as text and tables.
    """

    title: str
    body: str

    def __str__(self) -> str:
        return document(
            escape(self.title), f'<main class="element">{self.body}</main>', circuitsvis='class="cv"' in self.body
        )

    def _repr_html_(self) -> str:
        return frame(self.title, str(self), self.body)

    def __repr__(self) -> str:
        return f"{self.title}\n{static_text(self.body)}"


def frame(title: str, page: str, body: str, *, height: int = 320) -> str:
    """A page as an inline frame, and the static twin of its `body` for where scripts are stripped.

    The page's scripts, names and styles cannot meet those of the notebook around it. The frame grows to its content's
    height where the notebook lets it, and scrolls where not.
    """
    return (
        f'<b class="icl-lens-page" title="{escape(title)}" data-height="{height}" data-page="{escape(page)}"></b>'
        f'<div class="icl-lens-twin">{static_html(body)}<em>{NOTE}</em></div>'
        f"<script>{FRAME}</script>"
    )


def circuitsvis_mount(
    component: str,
    props: dict[str, Any],
    name: str,
    *,
    marks: Sequence[tuple[int, int, float | None]] = (),
    dim: bool = False,
) -> str:
    """A place where circuitsvis draws one of its components, as soon as it is visible.

    `marks` are tokens to underline in a label's color: position, label, and how much of that color fills the token
    (0 to 1; None leaves the fill to circuitsvis); `dim` fades all others. Tokens in `props` must be made safe by the
    caller.
    """
    data = json_script({"props": props, "marks": list(marks), "dim": dim})
    return (
        f'<div class="cv" data-component="{component}" role="img" aria-label="{safe(name)}">'
        f'<script type="application/json">{data}</script></div>'
    )
