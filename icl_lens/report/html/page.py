"""The page of one explanation; templates/explanation.html.j2 draws it."""

from pathlib import Path
from typing import Any

from icl_lens.files import write_text
from icl_lens.report.command import command
from icl_lens.report.findings import Findings
from icl_lens.report.html import heads, sections
from icl_lens.report.html.parts import Chip
from icl_lens.report.html.templating import render_notebook, render_page

TEMPLATE = "explanation.html.j2"


def explanation_page(e: Findings) -> str:
    """Return the explanation as one self-contained HTML document that loads no external resources."""
    return render_page(TEMPLATE, **_content(e))


def explanation_inline(e: Findings) -> str:
    """Return the page as an inline frame for notebooks, with a static version for viewers that strip frames."""
    return render_notebook(TEMPLATE, height=720, **_content(e))


def write_page(page: str, path: str | Path) -> None:
    """Write a page to `path` atomically. Raise InputError if the folder is not writable."""
    write_text(path, page)


def _content(e: Findings) -> dict[str, Any]:
    chips, next_token = sections.label_chips(e), e.next_tokens[0][0]
    return {
        "title": f"{e.model}: {e.target} explained",
        "element": False,
        "circuitsvis": True,
        "e": e,
        "target": chips[e.target],
        "predicted": chips[e.predicted],
        "correct": Chip(e.answer or ""),
        "continuation": chips.get(next_token, Chip(next_token)),
        "compared_with": [chips[name] for name in e.compared_with],
        "prompt": sections.prompt_pieces(e),
        "answer": sections.answer(e),
        "layer_charts": sections.layer_charts(e),
        "layers": sections.layers_table(e),
        "located": heads.located_table(e),
        "explorer": heads.explorer(e),
        "removal": sections.removal_table(e),
        "parts": sections.parts_table(e),
        "settings": sections.configuration(e),
        "command": command(e),
    }
