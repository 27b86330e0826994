"""The page of an atlas of heads, which templates/atlas.html.j2 draws: maps of all scores, a card of one
head, and two scores against each other.
"""

from typing import Any

from icl_lens.analyses.atlas.head_atlas_result import Q_VALUE, HeadAtlas
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
    kinds = {
        _index(head, n_heads): kinds_of_head for head, kinds_of_head in atlas.kinds_by_head.items()
    }
    notes = {}
    for place in range(atlas.n_heads):
        if sentences := atlas.notes_on(Head.from_index(place, n_heads)):
            notes[place] = sentences
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "scores": scores,
        "kinds": kinds,
        "notes": notes,
        "q_value": Q_VALUE,
        "axes": [axes[0], axes[-1]],
        "marked": _index(opening_head(atlas), n_heads),
    }


def opening_head(atlas: HeadAtlas) -> Head:
    """Return the head whose card is open at first: the first that was asked about, or the head with
    a kind, if any has, that is first by the score whose first heads cost the answer most. Without
    held-out prompts, that score is the effect, if the atlas has it.
    """
    if atlas.heads:
        return atlas.heads[0]
    losses: dict[str, float] = {}
    for name, removal in atlas.removals.items():
        if removal.shows_that_heads_matter:
            losses[name] = removal.lost.value
    if losses:
        name = max(losses, key=lambda name: losses[name])
    else:
        name = "effect" if "effect" in atlas.scores else next(iter(atlas.scores))
    ranked, with_kind = atlas[name].top(atlas.n_heads), atlas.kinds_by_head
    ranked_with_kind = [head for head in ranked if head in with_kind]
    return next(iter([*ranked_with_kind, *with_kind, *ranked]), Head(0, 0))


def _index(head: Head, n_heads: int) -> int:
    """Return the place of a head among all heads, layer by layer."""
    return head.layer * n_heads + head.head
