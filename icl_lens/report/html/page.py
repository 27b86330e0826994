"""The page of one explanation, which templates/explanation.html.j2 draws."""

from typing import Any

from icl_lens.analyses.command import command
from icl_lens.analyses.explanation import Explanation
from icl_lens.report.html import heads, sections
from icl_lens.report.html.elements import Chip


def page(e: Explanation) -> tuple[str, dict[str, Any]]:
    """Return the page's template and what it shows of an explanation."""
    chips, next_token = sections.label_chips(e), e.scores.next_tokens[0][0]
    return "explanation.html.j2", {
        "title": f"{e.model}: {e.target} explained",
        "e": e,
        "target": chips[e.target],
        "predicted": chips[e.predicted],
        "correct": Chip(e.answer or ""),
        "continuation": chips.get(next_token, Chip(next_token)),
        "compared_with": [chips[name] for name in e.scores.compared_with],
        "prompt": sections.prompt_pieces(e),
        "answer": sections.answer(e),
        "demonstrations": sections.demonstrations_table(e),
        "layer_charts": sections.layer_charts(e),
        "layers": sections.layers_table(e),
        "located": heads.located_table(e),
        "explorer": heads.explorer(e),
        "removal": sections.removal_table(e),
        "parts": sections.parts_table(e),
        "settings": sections.configuration(e),
        "command": command(e),
    }
