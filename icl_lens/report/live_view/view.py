"""Open a live view; the widget library is imported only then."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.errors import InputError, short_repr
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.live_view.state import LiveState

if TYPE_CHECKING:
    from icl_lens.report.live_view.widget import LiveView

N_OUTLINED = 4
"""First heads of a score whose kind no head has."""


def live(
    model: Any,
    prompt: Prompt | str,
    *,
    template: Template | None = None,
    prepend_bos: bool | None = None,
    heads: Sequence[AnyHead] = (),
    atlas: HeadAtlas | None = None,
) -> "LiveView":
    """Return a view of a prompt for notebooks, in which demonstrations are edited and heads are
    clicked.

    It shows the labels' probabilities, a map of all heads, what removing the chosen heads, or
    exchanging their query, keys or values at the last position, does beside 20 random sets of the
    same layers, what each demonstration adds, and where the last chosen head attends and why. All
    numbers are those of the public functions; "Copy as Python" gives the calls. `prompt` may be a
    string for `Prompt.parse`; `template` and `prepend_bos` are those of `tokenize`. With the
    `atlas` of this model (`head_atlas`), the map offers its scores and kinds as well.

    `LiveView.state` is what is looked at, a plain value that can be set; `LiveView.to_html` writes
    the static page of `explain`. A saved notebook shows the last state without a kernel.

    The view runs the model in a thread of its own, and each edit cancels what is computed for the
    one before. Raise InputError if the package anywidget is missing (`pip install anywidget`), for
    a prompt without demonstrations, for heads that the model does not have, and for an atlas of
    another model.

    Example:
        >>> view = il.live(model, prompt, heads=["L5H0"])
        >>> view.wait(timeout=60)
        True
        >>> view.numbers["change"]["heads"], len(view.numbers["change"]["draws"])
        (['L5H0'], 20)
        >>> view.close()
    """
    try:
        from icl_lens.report.live_view.widget import LiveView
    except ImportError as error:
        if error.name not in ("anywidget", "ipywidgets", "traitlets"):
            raise
        raise InputError(
            "the live view requires anywidget; install it with pip install anywidget"
        ) from None
    prompt = Prompt.parse(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(prompt, Prompt):
        raise InputError(
            f"prompt must be a string or an il.Prompt, got {short_repr(prompt)}; il.explain shows other texts"
        )
    view = ModelView.of(model)
    state = LiveState.of(prompt, heads=view.check_heads(heads))
    atlas_scores = () if atlas is None else scores_of_atlas(view, atlas)
    template = (template or Template()).for_prompts([prompt])
    return LiveView(
        model, LiveState.from_dict(state.to_dict()), template, prepend_bos, atlas_scores
    )


def scores_of_atlas(view: ModelView, atlas: object) -> list[dict[str, Any]]:
    """Return what the map shows of each score of an atlas: its name, meaning, and all heads' values,
    as numbers and as text; raise InputError if it is not an atlas of this model.
    """
    if not isinstance(atlas, HeadAtlas):
        raise InputError(f"atlas must be the result of il.head_atlas, got {short_repr(atlas)}")
    if atlas.model != view.name or atlas.shape != (view.n_layers, view.n_heads):
        raise InputError(
            f"atlas must be of the model of the view, {view.name} with {view.n_layers} layers of "
            f"{view.n_heads} heads, got one of {atlas.model} with {atlas.shape[0]} of "
            f"{atlas.shape[1]}; pass il.head_atlas(model)"
        )
    score_panels: list[dict[str, Any]] = []
    for score in atlas.scores.values():
        values: list[float | None] = []
        texts: list[str] = []
        for value in score.mean.flatten().tolist():
            values.append(None if math.isnan(value) else value)
            texts.append(score.format(value))
        of_kind = [str(head) for head in score.heads_of_kind(atlas.rate)]
        outlined = of_kind or [str(head) for head in score.top(N_OUTLINED)]
        score_panels.append(
            {
                "name": score.name,
                "title": score.title,
                "meaning": f"{score.definition} {score.samples[0].upper()}{score.samples[1:]}.",
                "unit": "" if score.unit == "score" else score.unit,
                "kind": score.kind if of_kind else "",
                "values": values,
                "texts": texts,
                "outlined": outlined,
            }
        )
    return score_panels
