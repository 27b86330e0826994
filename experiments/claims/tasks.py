"""The tasks that claims about several tasks look at: those of the study, and the bundled ones."""

from collections.abc import Iterable

from experiments.lab.study import StudySettings


def compared(tasks: Iterable[str], settings: StudySettings) -> tuple[str, ...]:
    """The task under study, those named beside it, and `tasks`; where others are named, no mirror images of these."""
    found = [settings.task, *settings.others]
    for task in tasks:
        if task not in found and not (settings.others and any(mirrored(task, known) for known in found)):
            found.append(task)
    return tuple(found)


def mirrored(first: str, second: str) -> bool:
    """Whether two tasks are the same pair of categories with their roles exchanged."""
    return first != second and first.split("-") == second.split("-")[::-1]
