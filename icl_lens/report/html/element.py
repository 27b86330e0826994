"""A visualization that displays itself in a notebook and renders as a page.

In a notebook, the output is a static fallback preceded by the page, which is stored in an attribute until a short
script puts it into a frame and hides the fallback. Viewers that strip scripts also strip unknown attributes, and
viewers that show disallowed tags as text (`nbconvert --sanitize-html`) drop attributes, so the page's source never
appears as text.
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
    """A visualization that displays itself in a notebook; `str(element)` is a self-contained page.

    `body` is its HTML without scripts and styles. `repr(element)`, and the HTML where scripts are stripped, show the
    same numbers as text and tables. No external resources are loaded.
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
    """Return a page as an inline frame, with a static fallback of its `body` for viewers that strip scripts.

    The frame isolates the page's scripts, names and styles from the surrounding notebook. It grows to its content's
    height if the notebook allows it; otherwise it scrolls.
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
    """Return a placeholder in which circuitsvis draws a component once it becomes visible.

    `marks` are tokens to underline in a label's color: position, label, and the share of that color that fills the
    token (0 to 1; None leaves the fill to circuitsvis). `dim` fades all other tokens. The caller must escape the tokens
    in `props` with `for_circuitsvis`.
    """
    data = json_script({"props": props, "marks": list(marks), "dim": dim})
    return (
        f'<div class="cv" data-component="{component}" role="img" aria-label="{safe(name)}">'
        f'<script type="application/json">{data}</script></div>'
    )
