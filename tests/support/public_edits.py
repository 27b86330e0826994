"""The public edits, and the arguments of their constructors."""

import inspect

import icl_lens as il


def by_name() -> dict[str, type[il.Edit]]:
    """Return the public subclasses of `il.Edit` by name."""
    edits = {}
    for name in il.__all__:
        public = getattr(il, name)
        if inspect.isclass(public) and issubclass(public, il.Edit) and public is not il.Edit:
            edits[name] = public
    return edits


def arguments(edit: type[il.Edit]) -> set[str]:
    """Return the arguments of an edit's constructor, without those that only the package passes."""
    return {name for name in inspect.signature(edit).parameters if not name.startswith("_")}
