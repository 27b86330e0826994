"""Open a live view; the widget library is imported only then."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from icl_lens.errors import InputError, short_repr
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.live_view.state import LiveState

if TYPE_CHECKING:
    from icl_lens.report.live_view.widget import LiveView


def live(
    model: Any,
    prompt: Prompt | str,
    *,
    template: Template | None = None,
    prepend_bos: bool | None = None,
    heads: Sequence[AnyHead] = (),
) -> "LiveView":
    """Return a view of a prompt for notebooks, in which demonstrations are edited and heads are
    clicked.

    It shows the labels' probabilities, a map of all heads, what removing the chosen heads, or
    exchanging their query, keys or values at the last position, does beside 20 random sets of the
    same layers, what each demonstration adds, and where the last chosen head attends and why. All
    numbers are those of the public functions; "Copy as Python" gives the calls. `prompt` may be a
    string for `Prompt.parse`; `template` and `prepend_bos` are those of `tokenize`.

    `LiveView.state` is what is looked at, a plain value that can be set; `LiveView.to_html` writes
    the static page of `explain`. A saved notebook shows the last state without a kernel.

    The view runs the model in a thread of its own, and each edit cancels what is computed for the
    one before. Raise InputError if the package anywidget is missing (`pip install anywidget`), for
    a prompt without demonstrations, and for heads that the model does not have.

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
    state = LiveState.of(prompt, heads=ModelView.of(model).check_heads(heads))
    template = (template or Template()).for_prompts([prompt])
    return LiveView(model, LiveState.from_dict(state.to_dict()), template, prepend_bos)
