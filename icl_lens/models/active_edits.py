"""What edits a model now, in words: edits of open `with` blocks, and forward hooks that others have
set.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from icl_lens.models.passes.locking import model_lock, model_reserved, thread_noted
from icl_lens.models.passes.module_hooks import hooked_modules
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Names and hooks that `active_edits` lists; it counts the rest.
MAX_NAMED = 8


class OpenEdits(Protocol):
    """The edits of open `with` blocks of a model, as `icl_lens.edits.whole_passes` has them."""

    def descriptions(self) -> list[str]:
        """Return what edits passes of this thread, in words."""
        ...

    def handle_ids(self) -> set[int]:
        """Return the ids of the handles of the edits' hooks."""
        ...

    def can_select(self, batch: PromptBatch) -> bool:
        """Return whether all edits belong to the prompts of a batch."""
        ...

    def selected(self, prompts: Sequence[int]) -> AbstractContextManager[None]:
        """Return a block in which passes over some of the prompts have the edits of these."""
        ...


# Model -> its open edits, if it has any.
OPEN_EDITS: "WeakKeyDictionary[Any, OpenEdits]" = WeakKeyDictionary()
# Model -> threads inside `edits_disabled`.
_DISABLED: "WeakKeyDictionary[Any, set[int]]" = WeakKeyDictionary()


@contextmanager
def edits_disabled(view: ModelView) -> Iterator[None]:
    """Disable all edits in this thread inside the `with` block, which reserves the model."""
    with model_reserved(view.model), thread_noted(_DISABLED, view.model):
        yield


def are_edits_disabled(view: ModelView) -> bool:
    """Return whether a block of `edits_disabled` is open in this thread."""
    return get_ident() in _DISABLED.get(view.model, ())


def rows_per_pass(view: ModelView, batch: PromptBatch) -> int:
    """Return how many rows of a batch one pass runs: as many as `PASS_BYTES` allows, at least one.

    These are all rows under hooks of the user, which may count on the whole batch, and under open
    edits that were not made for these prompts.
    """
    with model_lock(view.model):
        is_divisible = not view.has_hooks
        if view.model in OPEN_EDITS and not _has_other_hooks(view):
            is_divisible = OPEN_EDITS[view.model].can_select(batch)
    return rows_at_once(view, batch.tokens.shape[1]) if is_divisible else len(batch)


def edits_of_rows(view: ModelView, rows: Sequence[int]) -> AbstractContextManager[None]:
    """Return a block in which passes over some rows of a batch have the open edits of these
    rows; see `rows_per_pass`.
    """
    open_edits = OPEN_EDITS.get(view.model)
    return nullcontext() if open_edits is None else open_edits.selected(rows)


def _has_other_hooks(view: ModelView) -> bool:
    """Return whether hooks other than those of open edits are active."""
    edit_handles = OPEN_EDITS[view.model].handle_ids()
    for point in view.model.hook_dict.values():
        for handle in point.fwd_hooks:
            if not handle.is_permanent and id(handle) not in edit_handles:
                return True
    return bool(hooked_modules(view.model))


def active_edits(view: ModelView) -> tuple[str, ...]:
    """Return in words what edits the model now: the edits of open `with` blocks, and other forward
    hooks.

    These are hooks of TransformerLens' hook points, and hooks of PyTorch modules that are not set
    by a library in `module_hooks.LIBRARIES`. Every function runs the model as it
    is, so its numbers are those of the edited model, and results name the edits.
    """
    with model_lock(view.model):  # or the hooks of another thread's pass would count
        words: list[str] = []
        edit_handles: set[int] = set()
        if view.model in OPEN_EDITS:
            open_edits = OPEN_EDITS[view.model]
            words, edit_handles = open_edits.descriptions(), open_edits.handle_ids()
        # A hook point may have several names; the last is that of TransformerLens' documentation.
        names = {id(point): name for name, point in view.model.hook_dict.items()}
        points = {id(point): point for point in view.model.hook_dict.values()}
        hooks: list[str] = []
        for key, point in points.items():
            if any(id(handle) not in edit_handles for handle in point.fwd_hooks):
                hooks.append(names[key])
        modules = hooked_modules(view.model)
    words = list(dict.fromkeys(words))
    if hooks:
        words.append(f"hooks at {some_of(hooks, 'activations')}")
    if modules:
        kind = "a forward hook" if len(modules) == 1 else "forward hooks"
        words.append(f"{kind} on {some_of(modules, 'modules')}")
    return tuple(words)


def edits_note(edits: Sequence[str], what: str = "All numbers") -> str:
    """Return a sentence that says that numbers are those of an edited model; empty without
    edits.
    """
    return f"{what} are those of the edited model: {'; '.join(edits)}." if edits else ""


def edits_suffix(edits: Sequence[str]) -> str:
    """Return " (edited model: …)" for the title of a table; empty without edits."""
    return f" (edited model: {'; '.join(edits)})" if edits else ""


def some_of(names: Sequence[str], what: str) -> str:
    """Return the first names, and how many others there are."""
    n_unnamed = len(names) - MAX_NAMED
    first_names = ", ".join(names[:MAX_NAMED])
    return f"{first_names} and {n_unnamed} other {what}" if n_unnamed > 0 else first_names
