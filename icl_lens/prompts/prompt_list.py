"""A list of prompts that prints as a short summary."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, overload

from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.prompt import Prompt

MAX_NAMED = 6
"""Names of labels or classes in a summary, beyond which they are counted."""
MAX_CHARACTERS = 500
"""Characters of the first prompt in a summary."""


class PromptList(list[Prompt]):
    """Prompts of a task. It is a list, except that `print` and notebooks show a summary.

    Example:
        >>> il.load_task("sentiment-number", n=20)
        20 prompts of sentiment-number, 4 demonstrations each, 17 different queries
        classes: 'number' (10 queries), 'sentiment' (10 queries)
        labels: 'bar' (10 answers), 'foo' (10 answers)
        first: sorrow : bar dozen : foo pride : bar six : foo trillions :
    """

    def __init__(self, prompts: Iterable[Prompt] = (), name: str = "") -> None:
        super().__init__(prompts)
        self.name = name

    @overload
    def __getitem__(self, index: SupportsIndex) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> "PromptList": ...

    def __getitem__(self, index: SupportsIndex | slice) -> "Prompt | PromptList":
        if isinstance(index, slice):
            return PromptList(super().__getitem__(index), self.name)
        return super().__getitem__(index)

    def __repr__(self) -> str:
        """Return the number of prompts, their classes and labels, and the first prompt."""
        title = f"{len(self)} prompt{'' if len(self) == 1 else 's'}"
        if self.name:
            title += f" of {self.name}"
        if not self:
            return title
        n_queries = len({prompt.query for prompt in self})
        queries = "1 query" if n_queries == 1 else f"{n_queries} different queries"
        lines = [f"{title}, {demonstrations_each(self)}, {queries}"]
        classes, answers = _counts(self)
        if classes and {*classes} != {*answers}:
            lines.append(f"classes: {_named(classes, 'query', 'queries')}")
        if answers:
            lines.append(f"labels: {_named(answers, 'answer', 'answers')}")
        first = str(self[0])
        if len(first) > MAX_CHARACTERS:
            first = f"{first[:MAX_CHARACTERS]} …"
        lines.append(f"first:\n{first}" if "\n" in first else f"first: {first}")
        return "\n".join(lines)


def demonstrations_each(prompts: Sequence[Prompt]) -> str:
    """Return "4 demonstrations each", or "4 to 6 demonstrations each"."""
    numbers = {len(prompt.demonstrations) for prompt in prompts}
    low, high = min(numbers), max(numbers)
    number = str(low) if low == high else f"{low} to {high}"
    return f"{number} demonstration{'' if high == 1 else 's'} each"


def _counts(prompts: Iterable[Prompt]) -> tuple[Counter[str], Counter[str]]:
    """Return how many queries each class has, and of how many prompts each label is the answer."""
    classes: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for prompt in prompts:
        answers.update(dict.fromkeys(prompt.labels, 0))
        if prompt.answer is None:
            continue
        answers[prompt.answer] += 1
        if prompt.classes is not None:
            classes.update(dict.fromkeys(prompt.classes.values(), 0))
            classes[prompt.classes[prompt.answer]] += 1
    return classes, answers


def _named(counts: Counter[str], singular: str, plural: str) -> str:
    """Return the names with their counts, or the number of names if there are many."""
    if len(counts) > MAX_NAMED:
        return f"{len(counts)} different"
    named = []
    for name in in_order(counts):
        named.append(f"{name!r} ({counts[name]} {singular if counts[name] == 1 else plural})")
    return ", ".join(named)
