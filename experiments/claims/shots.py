"""Prompts with any number of classes and demonstrations, whose labels name the classes, or other ones, or nothing.

Demonstrations come in rounds, each class once a round in random order: the first demonstrations are balanced however
many are shown, and neither the nearest label nor the most frequent one says the class. Every class is asked about in
turn. The same row is the same texts whatever its labels are and however many of them are shown.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import icl_lens as il
from experiments.lab.study import Study
from icl_lens.prompts.tasks import WORD_TASKS, word_list

Kind = Literal["right", "exchanged", "random", "arbitrary"]
"""Labels: the class's own name, the other class's, a name drawn for each demonstration (Min et al. 2022), or words
without meaning."""

ARBITRARY = ("foo", "bar", "baz", "qux")


def names_of(study: Study, classes: Sequence[str]) -> tuple[str, ...] | None:
    """The classes' own names as labels, with a capital or without; None where the model has no words for them.

    That is where two names begin with the same token, or one cannot be spelt.
    """
    first = study.prompts()[0]
    unknown = getattr(study.model.tokenizer, "unk_token_id", None)
    for names in (tuple(name.capitalize() for name in classes), tuple(classes)):
        shown = [il.Demonstration(first.demonstrations[0].text, name) for name in names]
        prompt = il.Prompt(shown, first.query, None, names)
        try:
            tokens = il.tokenize(study.model, [prompt], template=study.settings.template).label_tokens.tolist()
        except il.InputError:
            continue
        if unknown not in tokens and len({*tokens}) == len(names):
            return names
    return None


@dataclass(frozen=True)
class Row:
    """One prompt's texts: demonstrations with their classes, the query and its class (as indices)."""

    number: int
    shown: tuple[tuple[str, int], ...]
    query: str
    asked: int
    classes: int
    luck: tuple[int, ...]
    """A class for each demonstration, drawn whatever its own is."""

    def label_of(self, kind: Kind, labels: Sequence[str]) -> list[str]:
        """Each class's label; `labels` are names in the order of the classes. Arbitrary ones take turns."""
        turn = {"right": 0, "exchanged": 1, "random": 0, "arbitrary": self.number // self.classes}[kind]
        return [labels[(side + turn) % self.classes] for side in range(self.classes)]

    def answer(self, kind: Kind, labels: Sequence[str]) -> str:
        """What is right: the label of the query's class. Names that are drawn say nothing, and its own is right."""
        return self.label_of(kind, labels)[self.asked]

    def prompt(self, kind: Kind, labels: Sequence[str], shots: int) -> il.Prompt:
        """The prompt with the first so many demonstrations, at least one."""
        of = self.label_of(kind, labels)
        shown = [
            il.Demonstration(text, labels[drawn] if kind == "random" else of[side])
            for (text, side), drawn in zip(self.shown[:shots], self.luck, strict=False)
        ]
        return il.Prompt(shown, self.query, of[self.asked], tuple(labels))


def classes_of(task: str, path: str | None, count: int) -> list[str]:
    """The task's two categories and others: the paper's first, then the rest of the word list.

    Raises InputError for a task that is not two categories of words, and for too few of them.
    """
    categories = word_list(path) if path is None or path.endswith(".json") else {}
    own = task.split("-")
    if len(own) != 2 or not {*own} <= {*categories}:
        raise il.InputError(
            f"the task {task!r} is not two categories of words, of which these prompts are made; choose a word task "
            f"such as {WORD_TASKS[0]!r}"
        )
    papers = [name for one in WORD_TASKS for name in one.split("-") if name in categories]
    every = list(dict.fromkeys([*own, *papers, *sorted(categories)]))
    if len(every) < count:
        raise il.InputError(f"the word list has {len(every)} categories, and {count} are wanted; give more")
    return every[:count]


def rows_of(classes: Sequence[str], path: str | None, n: int, shots: int, seed: int) -> list[Row]:
    """`n` rows with as many as `shots` demonstrations; words of several of the classes are left out.

    Raises InputError where a class has too few words.
    """
    categories = word_list(path)
    words = {name: {*categories[name]} for name in classes}
    pools = []
    for name in classes:
        others = set().union(*(words[other] for other in classes if other != name))
        pools.append([word for word in dict.fromkeys(categories[name]) if word not in others])
    rounds = -(-shots // len(classes))
    for name, pool in zip(classes, pools, strict=True):
        if len(pool) <= rounds:
            raise il.InputError(
                f"the category {name!r} has {len(pool)} words of its own, and a prompt of {shots} demonstrations takes "
                f"{rounds + 1}"
            )
    rows = []
    for number in range(n):
        rng = random.Random(f"{seed} {number} {' '.join(classes)}")
        asked = number % len(classes)
        drawn = [rng.sample(pool, len(pool)) for pool in pools]
        query = drawn[asked].pop()
        shown: list[tuple[str, int]] = []
        for _ in range(rounds):
            for side in rng.sample(range(len(classes)), len(classes)):
                shown.append((drawn[side].pop(), side))
        lots = random.Random(f"lots {seed} {number}")
        luck = tuple(lots.randrange(len(classes)) for _ in shown)
        rows.append(Row(number, tuple(shown[:shots]), query, asked, len(classes), luck[:shots]))
    return rows
