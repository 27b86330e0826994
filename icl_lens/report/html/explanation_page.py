"""The page of one explanation, which templates/explanation.html.j2 draws section by section."""

from collections.abc import Callable
from typing import Any

from icl_lens.analyses.explanation import sections
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.models.active_edits import edits_note
from icl_lens.report.html import head_contents, section_contents, view_page
from icl_lens.report.html.elements import Chip

CONTENTS: dict[str, Callable[[Explanation], dict[str, Any]]] = {
    "prompt": section_contents.prompt,
    "answer": section_contents.answer,
    "layers": section_contents.layers,
    "located": head_contents.located,
    "heads": head_contents.explorer,
    "removal": section_contents.removal,
    "configuration": section_contents.configuration,
}
"""What the sections with a template of their own show (templates/explanation/NAME.html.j2)."""


def page(e: Explanation) -> tuple[str, dict[str, Any]]:
    """Return the page's template and what it shows of an explanation."""
    chips, next_token = section_contents.label_chips(e), e.scores.next_tokens[0][0]
    return "explanation.html.j2", {
        "title": f"{e.model}: {e.target} explained",
        "e": e,
        "edits_note": edits_note(e.edits),
        "target": chips[e.target],
        "predicted": chips[e.predicted],
        "correct": Chip(e.answer or ""),
        "continuation": chips.get(next_token, Chip(next_token)),
        "compared_with": [chips[name] for name in e.scores.compared_with],
        "sections": _sections(e),
    }


def _sections(e: Explanation) -> list[dict[str, Any]]:
    """Return what each section shows: contents for its own template, or else its view."""
    contents: list[dict[str, Any]] = []
    for section in sections.SECTIONS:
        heading = {"name": section.name, "title": section.title_of(e)}
        if section.name in CONTENTS:
            contents.append(heading | {"view": None} | CONTENTS[section.name](e))
            continue
        view = section.view(e)
        if view is not None:
            contents.append(heading | {"view": view_page.contents_of_section(view, {})})
    return contents
