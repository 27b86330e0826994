"""The page of one explanation, which templates/explanation.html.j2 draws."""

from typing import Any

from icl_lens.analyses.command import command
from icl_lens.analyses.explanation import Explanation
from icl_lens.report.html import head_contents, section_contents
from icl_lens.report.html.elements import Chip


def page(e: Explanation) -> tuple[str, dict[str, Any]]:
    """Return the page's template and what it shows of an explanation."""
    chips, next_token = section_contents.label_chips(e), e.scores.next_tokens[0][0]
    return "explanation.html.j2", {
        "title": f"{e.model}: {e.target} explained",
        "e": e,
        "target": chips[e.target],
        "predicted": chips[e.predicted],
        "correct": Chip(e.answer or ""),
        "continuation": chips.get(next_token, Chip(next_token)),
        "compared_with": [chips[name] for name in e.scores.compared_with],
        "prompt": section_contents.prompt_pieces(e),
        "answer": section_contents.answer(e),
        "demonstrations": section_contents.demonstrations_table(e),
        "layer_charts": section_contents.layer_charts(e),
        "layers": section_contents.layers_table(e),
        "located": head_contents.located_table(e),
        "explorer": head_contents.explorer(e),
        "removal": section_contents.removal_table(e),
        "parts": section_contents.parts_table(e),
        "settings": section_contents.configuration(e),
        "command": command(e),
    }
