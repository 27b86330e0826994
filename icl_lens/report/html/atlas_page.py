"""The page of an atlas of heads, which templates/atlas.html.j2 draws: maps of all scores, a card of one
head, and two scores against each other.
"""

from typing import Any

from icl_lens.atlas.head_atlas import HeadAtlas
from icl_lens.models.head import Head
from icl_lens.report.html import view_page
from icl_lens.result.view import View

FIRST_AXES = ("induction", "exchange", "effect", "previous_token", "copying")
"""The scores that a scatter shows first, if the atlas has them."""


def page(atlas: HeadAtlas) -> tuple[str, dict[str, Any]]:
    """Return the page's template and what it shows of an atlas."""
    view = atlas.to_view()
    maps = {score.title for score in atlas}
    sections = tuple(section for section in view.sections if section.title not in maps)
    without_maps = View(view.title, view.sentences, sections, view.about)
    return "atlas.html.j2", view_page.contents(without_maps, {}) | {"atlas": data(atlas)}


def data(atlas: HeadAtlas) -> dict[str, Any]:
    """Return the numbers that the page's script draws."""
    n_layers, n_heads = atlas.shape
    names = atlas.names
    axes = [name for name in FIRST_AXES if name in atlas.scores]
    axes = [*axes, *(name for name in atlas.scores if name not in axes)][:2]
    scores = []
    for score in atlas:
        values = score.mean.double().flatten().tolist()
        scores.append(
            {
                "name": score.name,
                "title": score.title,
                "definition": score.definition,
                "unit": score.unit,
                "values": values,
            }
        )
    kinds = {}
    for head, kinds_of_head in names.items():
        kinds[head.layer * n_heads + head.head] = kinds_of_head
    first = next(iter(names), atlas[axes[0]].top(1)[0])
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "scores": scores,
        "kinds": kinds,
        "axes": [axes[0], axes[-1]],
        "marked": _index(first, n_heads),
    }


def _index(head: Head, n_heads: int) -> int:
    """Return the place of a head among all heads, layer by layer."""
    return head.layer * n_heads + head.head
