"""A picture that shows itself in a notebook and turns into a page.

In a notebook it is a frame with the page in it, and behind it a static twin. Where a viewer takes frames and scripts
away, the twin is what remains; where the frame stays, a rule of style hides the twin, without waiting for any script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from icl_lens.report.html.script import document
from icl_lens.report.html.text import json_script, safe
from icl_lens.report.html.twin import NOTE, static_html, static_text


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
    """A page as an inline frame, and the static twin of its `body` for where the frame is stripped.

    The page's scripts, names and styles cannot meet those of the notebook around it. The frame grows to its content's
    height where the notebook lets it, and scrolls where not.
    """
    return (
        f'<iframe title="{escape(title)}" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{height}px;border:0;display:block" loading="eager"></iframe>'
        f'<div class="icl-lens-twin">{static_html(body)}<p><em>{NOTE}</em></p></div>'
        # Goes where scripts go: what strips the frame or this rule leaves the twin to be seen.
        "<style>iframe[srcdoc] + .icl-lens-twin { display: none }</style>"
    )


def mount(
    component: str,
    props: dict[str, Any],
    name: str,
    *,
    marks: Sequence[tuple[int, int, float | None]] = (),
    dim: bool = False,
) -> str:
    """A place where circuitsvis draws one of its components, as soon as it is visible.

    `marks` are tokens to underline in a label's colour: position, label, and how much of that colour fills the token
    (0 to 1; None leaves the fill to circuitsvis); `dim` fades all others. Tokens in `props` must be made safe by the
    caller.
    """
    data = json_script({"props": props, "marks": list(marks), "dim": dim})
    return (
        f'<div class="cv" data-component="{component}" role="img" aria-label="{safe(name)}">'
        f'<script type="application/json">{data}</script></div>'
    )
