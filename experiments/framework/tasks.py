"""Tasks that findings are measured on, and their prompts in balanced order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from icl_lens.prompts.prompt import Demonstration, Prompt, Template
from icl_lens.prompts.tasks import load_task

WORDS = Path(__file__).with_name("words.json")
"""Word categories in addition to the library's own word list."""

LINES = Template(separator="\n")
PAPER = Template()
ARROWS = Template("{text} -> {label}", "{text} ->", "\n")
QUESTIONS = Template("Input: {text}\nLabel: {label}", "Input: {text}\nLabel:", "\n\n")

Layout = Literal["random", "order", "reorder"]
_NAMES: Mapping[Layout, Literal["random", "last", "first"]] = {"random": "random", "order": "last", "reorder": "first"}
"""The layouts' names for `load_task`, whose "order" and "reorder" are not balanced."""


@dataclass(frozen=True)
class Task:
    """Two classes of texts and the label word of each, with the way prompts show them."""

    name: str
    """The name in folders and tables."""
    data: str
    """The name for `load_task`."""
    labels: tuple[str, str] = ("foo", "bar")
    """Label words; natural ones belong to the classes in the order of `data`."""
    demonstrations: int = 2
    """Demonstrations of each class."""
    template: Template = PAPER
    path: str | None = None
    """A word list, or files with sentences; see `load_task`."""

    @property
    def natural(self) -> bool:
        """Whether the labels name the classes, so that they must not change places."""
        return {label.casefold() for label in self.labels} == {name.casefold() for name in self.data.split("-")}

    def prompts(
        self,
        n: int,
        *,
        seed: int = 0,
        layout: Layout = "random",
        exchanged: bool = False,
        same_length_for: Any = None,
    ) -> list[Prompt]:
        """Return n prompts whose queries alternate between both classes.

        Each arbitrary label is the answer in half of the prompts of either class. Natural labels stay with their
        class. In "order" the query's class is demonstrated last, in "reorder" first. With `exchanged`, every prompt
        has the two labels exchanged and the answer with them: the same texts demonstrate the opposite mapping. The same
        seed gives the same texts in every layout. `same_length_for`, a model, keeps only texts with the same number of
        tokens.
        """
        # `load_task` gives its first label to the class named last in `data`, in every other pair of prompts.
        labels = self.labels if exchanged else self.labels[::-1]
        exchange = None
        if self.natural and exchanged:
            exchange = dict(zip(self.labels, self.labels[::-1], strict=True))
        aligned = {"same_length_for": same_length_for, "template": self.template}
        prompts = self._load(n, seed, labels=labels, layout=_NAMES[layout], **aligned)
        return [with_labels(prompt, self.labels, exchange) for prompt in prompts]

    def _load(self, n: int, seed: int, **how: Any) -> list[Prompt]:
        return load_task(self.data, self.path, n=n, seed=seed, demonstrations=self.demonstrations, **how)

    def other_queries(self, n: int, *, seed: int = 0) -> list[Prompt]:
        """Return `prompts(n)`, each with a query of its other class, so that the answer is the other label."""
        prompts = self._load(n, seed, labels=self.labels[::-1])
        return [with_labels(prompt.with_other_query(), self.labels) for prompt in prompts]


def with_labels(prompt: Prompt, choices: Sequence[str], exchange: Mapping[str, str] | None = None) -> Prompt:
    """Return the prompt with `choices` as its labels, in this order; `exchange` maps old labels to new ones."""
    label = {name: name for name in choices} if exchange is None else exchange
    shown = [Demonstration(one.text, label[one.label]) for one in prompt.demonstrations]
    return Prompt(shown, prompt.query, None if prompt.answer is None else label[prompt.answer], choices)


PAPER_TASKS = (Task("sentiment-number", "sentiment-number"), Task("animal-country", "animal-country"))
"""The paper's word tasks, written as in the paper."""
