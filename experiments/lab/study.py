"""A model and a task under study: the prompts, passes over them, the two halves, located heads and their controls."""

import random
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.lab.passes import Passes, Tensors, joined, stable_name
from experiments.lab.reductions import RANKED
from icl_lens.digest import json_digest
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Template
from icl_lens.prompts.tasks import SENTENCE_TASKS, Asked, Layout, load_task

Reduction = Callable[[il.Activations], Tensor]
"""From the activations of some prompts to what is kept of them: a tensor whose first axis is the prompt.

A plain function, or a frozen dataclass that can be called: equal reductions are computed once.
"""

# What one batch may hold of captured activations. The rest of its memory is the model's own.
PASS_BYTES = 128 * 2**20
# More prompts make no product faster; fewer are lost when a run is killed, and are shared out more evenly.
MOST_ROWS = 128


def batch_limits() -> list[int]:
    """The most bytes of activations and the most prompts that a batch may hold: chunks of other batches differ."""
    return [PASS_BYTES, MOST_ROWS]


Found = TypeVar("Found")

Ranking = Literal["increase", "contrast"]
"""By what heads are located: the paper's log p(answer), or the answer's log-odds against the other label."""
RANKINGS: tuple[Ranking, ...] = ("increase", "contrast")


ASKED: tuple[Asked, Asked] = ("true", "false")
"""The class of the query."""
LABELS = ("foo", "bar")
"""The words that labels are unless others are asked for: the true class's, and the false one's."""
DEFAULT_TEMPLATE = Template()
ALWAYS = ("model", "task", "n", "seed", "path")
"""Settings that a configuration always holds."""


@dataclass(frozen=True)
class StudySettings:
    """What the command line says: which model, which task, how its prompts are drawn and written; see `load_task`."""

    model: str = "icl-mini"
    task: str = "sentiment-number"
    n: int = 1000
    seed: int = 0
    path: str | None = None
    """A word list (.json, for all word tasks) or the files of the sentence task, see `load_task`."""
    compared: tuple[str, ...] = ()
    """Other tasks that claims about several tasks look at, "TASK" or "TASK=PATH" where a task has files of its own."""
    demonstrations: int = 2
    """Of each class."""
    labels: tuple[str, ...] | None = None
    """`LABELS` where none are given; of all classes, the library's first words."""
    classes: Literal["binary", "all"] = "binary"
    columns: tuple[str, str] = ("text", "label")
    split: str = "test"
    max_words: int | None = None
    template: Template = DEFAULT_TEMPLATE

    def further(self) -> dict[str, Any]:
        """All but the first ones (`ALWAYS`) that are not the default."""
        default = StudySettings()
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ALWAYS}
        given = {name: value for name, value in given.items() if value != getattr(default, name)}
        if self.classes == "binary" and self.labels == LABELS:
            given.pop("labels", None)
        return {name: asdict(value) if name == "template" else value for name, value in given.items()}

    def described(self) -> dict[str, Any]:
        """What a configuration holds of these: the first always, the others where they are not the default."""
        return {name: getattr(self, name) for name in ALWAYS} | self.further()

    @property
    def said(self) -> str:
        """The task, with what is not the default: "sst2, 4 demonstrations of each class, labels yes and no"."""
        said = {
            "compared": f"compared with {' and '.join(self.compared)}",
            "demonstrations": f"{self.demonstrations} demonstrations of each class",
            "labels": f"labels {' and '.join(self.labels or ())}",
            "classes": "all classes",
            "columns": f"columns {' and '.join(self.columns)}",
            "split": f"queries from {self.split}",
            "max_words": f"at most {self.max_words} words",
            "template": f"written {self.template.prefix + self.template.demonstration + self.template.separator!r}",
        }
        return ", ".join([self.task, *(said[name] for name in self.further() if name in said)])

    @property
    def of_sentences(self) -> bool:
        """Whether the task is of sentences, not of words."""
        return self.task in SENTENCE_TASKS if self.path is None else not self.path.endswith(".json")

    def check(self) -> None:
        """Raises InputError for settings that would do nothing for the task."""
        given = self.further()
        for name, remedy in (
            ("classes", "a word task has two classes"),
            ("columns", "a word list has no columns"),
            ("split", "a word list has no splits"),
            ("max_words", "its texts are words"),
        ):
            if name in given and not self.of_sentences:
                raise il.InputError(
                    f"{name}={given[name]!r} has nothing to do for the word task {self.task!r}: {remedy}; leave it out"
                )
        if "columns" in given and self.path is None:
            raise il.InputError(
                f"columns={self.columns!r} name those of your own sentences, {self.task!r} has its own; leave it out"
            )
        if "split" in given and self.path is not None and Path(self.path).is_file():
            raise il.InputError(
                f"split={self.split!r} has nothing to do here: a single file has one split; leave it out"
            )

    @property
    def others(self) -> dict[str, str | None]:
        """The tasks compared with, and the path of each; raises InputError for one that is named twice."""
        named = [one.partition("=") for one in self.compared]
        found = {task: path or None for task, _, path in named}
        if "" in found or len(found) < len(named) or self.task in found:
            raise il.InputError(
                f"the tasks to compare {self.task!r} with, {', '.join(map(repr, self.compared))}, must be different "
                "ones; give each once, as TASK or TASK=PATH"
            )
        return found

    def path_of(self, task: str) -> str | None:
        """Where a task's data are: the path is the own task's, and a word list that of all tasks without another."""
        if self.others.get(task):
            return self.others[task]
        of_words = self.path and self.path.endswith(".json") and task not in SENTENCE_TASKS
        return self.path if task == self.task or of_words else None


@dataclass(frozen=True)
class Variant:
    """Which prompts of a task: the same texts in another layout, or with the two labels exchanged."""

    layout: Layout = "order"
    swapped: bool = False
    """The true class's label is "bar" instead of "foo"; of several classes each has the next one's."""
    task: str | None = None
    """Another task than the one under study."""
    asked: Asked = "true"
    """Which class the query is of: "false" asks the same demonstrations about the other one."""

    def __str__(self) -> str:
        exchanged = "labels exchanged" if self.swapped else ""
        return ", ".join(
            filter(None, (self.task, self.layout, exchanged, "other query" if self.asked == "false" else ""))
        )


@dataclass(frozen=True)
class Need:
    """One reduction of one variant's prompts, announced beforehand so that experiments share the pass."""

    variant: Variant
    reduction: Reduction


class Study:
    """Everything an experiment may ask about one model and one task.

    Reductions are computed once, kept on the CPU, and dropped with the study. Rows are prompts; the same row is the
    same texts in every variant of a task.
    """

    def __init__(self, model: Any, settings: StudySettings, *, passes: Passes | None = None):
        self.model = model
        self.settings = settings
        self.view = ModelView.of(model)
        self.passes = passes or Passes()
        self._batches: dict[Variant, il.PromptBatch] = {}
        self._kept: dict[Need, Tensor] = {}
        self._once: dict[Any, Any] = {}
        self.ranking: Ranking = "increase"

    def ranked_by(self, ranking: Ranking) -> "Study":
        """The same study, with heads located by this; whatever either computes, both keep."""
        other = copy(self)
        other.ranking = ranking
        return other

    @cached_property
    def halves(self) -> tuple[Int[Tensor, " chosen_on"], Int[Tensor, " tested_on"]]:
        """Rows to choose heads on, and rows to test them on, which ask about other texts (of the true class)."""
        return self._parted(Variant())

    @cached_property
    def apart(self) -> tuple[Int[Tensor, " chosen_on"], Int[Tensor, " tested_on"]]:
        """Those rows of either half that ask about other texts whichever class is asked; about half of them each."""
        parted = [
            torch.tensor(sorted({*own.tolist()} & {*other.tolist()}), dtype=torch.long)
            for own, other in zip(self.halves, self._parted(Variant(asked="false")), strict=True)
        ]
        if not all(len(rows) for rows in parted):
            raise il.InputError(
                f"the {self.settings.n} prompts ask about too few texts for halves that ask about no text in common; "
                "give more prompts or more data"
            )
        return parted[0], parted[1]

    def _parted(self, variant: Variant) -> tuple[Int[Tensor, " chosen_on"], Int[Tensor, " tested_on"]]:
        """All rows in two halves whose queries in this variant are different texts."""
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts(variant)):
            rows.setdefault(prompt.query, []).append(row)
        queries = list(rows)
        random.Random(self.settings.seed).shuffle(queries)
        choosing: list[int] = []
        while queries and len(choosing) + len(rows[queries[-1]]) // 2 < self.settings.n / 2:
            choosing += rows[queries.pop()]
        if not queries or not choosing:
            raise il.InputError(
                f"all {self.settings.n} prompts ask about {len(rows)} texts, too few for a half to choose heads on and "
                "one to test them on; give more data"
            )
        return torch.tensor(sorted(choosing)), torch.tensor(sorted(row for query in queries for row in rows[query]))

    @property
    def test(self) -> Int[Tensor, " row"]:
        """The half that heads are tested on."""
        return self.halves[1]

    def own(self, variant: Variant) -> Variant:
        """The variant, with the task under study left unnamed."""
        return replace(variant, task=None) if variant.task == self.settings.task else variant

    def prompts(self, variant: Variant = Variant()) -> tuple[il.Prompt, ...]:
        """All prompts of a variant."""
        return self.batch(variant).prompts

    def batch(self, variant: Variant = Variant()) -> il.PromptBatch:
        """All prompts of a variant, tokenized."""
        variant = self.own(variant)
        if variant not in self._batches:
            labels = self._labels(variant)
            # Each class gets the next one's label where they are exchanged.
            prompts = self._drawn(variant, labels[1:] + labels[:1] if variant.swapped else labels, self.settings.n)
            # One order of labels in all variants, so that label axes can be compared.
            self._batches[variant] = il.tokenize(self.model, prompts, template=self.settings.template, labels=labels)
        return self._batches[variant]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The label words, of the true class and the false one (`LABELS`); of all classes in order of their names."""
        return self._labels(Variant())

    def tokenize(self, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
        """Other prompts with the same labels, written by the same template."""
        return il.tokenize(self.model, prompts, template=self.settings.template, labels=self.labels)

    def alone(self, texts: Sequence[str]) -> il.PromptBatch:
        """Each text asked about with no demonstration, written by the same template; no labels."""
        template = self.settings.template
        return il.tokenize_text(
            self.model, [template.prefix + template.query.replace("{text}", text) for text in texts]
        )

    def example(self, text: str, answer: str) -> il.PromptBatch:
        """The paper's example, with its own labels, written by the study's template."""
        return il.tokenize(self.model, [il.Prompt.parse(text, answer=answer)], template=self.settings.template)

    def _labels(self, variant: Variant) -> tuple[str, ...]:
        settings = self.settings
        if settings.classes == "binary":
            return tuple(settings.labels or LABELS)
        if variant.task is not None:  # another task has two classes
            return tuple(settings.labels or LABELS)[:2]
        return tuple(settings.labels) if settings.labels else self._drawn(variant, None, 1)[0].labels

    def _drawn(self, variant: Variant, labels: tuple[str, ...] | None, n: int) -> list[il.Prompt]:
        """Prompts of a variant (`own`) with these labels."""
        settings, own = self.settings, variant.task is None
        return load_task(
            variant.task or settings.task,
            n=n,
            seed=settings.seed,
            layout=variant.layout,
            asked=variant.asked,
            labels=labels,
            demonstrations=settings.demonstrations,
            path=settings.path_of(variant.task or settings.task),
            split=settings.split,
            classes=settings.classes if own else "binary",
            columns=settings.columns if own else StudySettings.columns,
            max_words=settings.max_words,
        )

    def batches(self, variant: Variant = Variant(), rows: Int[Tensor, " row"] | None = None) -> list[il.PromptBatch]:
        """The prompts of a variant (or only some rows) in batches that fit into memory; see `pieces`."""
        batch = self.batch(variant) if rows is None else self.batch(variant)[rows]
        return self.pieces(batch)

    def pieces(self, batch: il.PromptBatch) -> list[il.PromptBatch]:
        """A batch in pieces that fit into memory."""
        bytes_per_prompt = 4 * self.view.n_layers * batch.tokens.shape[1] * self.view.d_model
        most_bytes, most_rows = batch_limits()
        return list(batch.split(max(1, min(most_rows, most_bytes // bytes_per_prompt))))

    def over(
        self,
        variant: Variant,
        rows: Int[Tensor, " row"],
        compute: Callable[[il.PromptBatch], Tensors],
        *,
        what: str = "",
        key: str | None = None,
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """A pass over some rows of a variant: what `compute` makes of its batches, joined; see `Passes.run`."""
        batches = self.batches(variant, rows)
        sizes = [len(batch) for batch in batches]
        found = self.passes.run(what or str(variant), sizes, lambda i: compute(batches[i]), key=key)
        return joined(found)

    def collect(self, needs: Iterable[Need]) -> None:
        """Computes what is not yet there: one pass over each variant's prompts for all its reductions together."""
        wanted: dict[Variant, list[Reduction]] = {}
        for need in (Need(self.own(need.variant), need.reduction) for need in needs):
            reductions = wanted.setdefault(need.variant, [])
            if need not in self._kept and need.reduction not in reductions:
                reductions.append(need.reduction)
        for variant, reductions in wanted.items():
            if not reductions:
                continue
            batches = self.batches(variant)
            sizes = [len(batch) for batch in batches]
            what = str(variant) or "all prompts"
            keys = [
                _key(reduction, variant, sizes, None) or self.passes.numbered(what, sizes) for reduction in reductions
            ]

            def reduced(
                number: int,
                lacking: Sequence[int],
                reductions: list[Reduction] = reductions,
                batches: list[il.PromptBatch] = batches,
            ) -> list[Tensors]:
                acts = il.capture(self.model, batches[number])
                return [{"value": reductions[i](acts)} for i in lacking]

            every = self.passes.together(what, sizes, keys, reduced)
            for found, reduction in zip(every, reductions, strict=True):
                self._kept[Need(variant, reduction)] = joined(found)["value"]

    def get(self, reduction: Reduction, variant: Variant = Variant()) -> Shaped[Tensor, "prompt ..."]:
        """A reduction of all prompts of a variant; a pass of its own where nobody announced it."""
        need = Need(self.own(variant), reduction)
        if need not in self._kept:
            self.collect([need])
        return self._kept[need]

    def reduce(
        self, reduction: Reduction, variant: Variant, rows: Int[Tensor, " row"], *, what: str = ""
    ) -> Shaped[Tensor, "row ..."]:
        """A reduction of some rows only; not kept in memory."""
        variant = self.own(variant)
        sizes = [len(batch) for batch in self.batches(variant, rows)]
        key = _key(reduction, variant, sizes, rows)

        def reduced(batch: il.PromptBatch) -> Tensors:
            return {"value": reduction(il.capture(self.model, batch))}

        return self.over(variant, rows, reduced, what=what, key=key)["value"]

    def once(self, about: Any, compute: Callable[[], Found]) -> Found:
        """What `compute` gives, computed the first time that it is asked for; by either ranking."""
        if about not in self._once:
            self._once[about] = compute()
        return self._once[about]

    def rises(self, variant: Variant = Variant()) -> Float[Tensor, "prompt layer head"]:
        """What every head adds to the answer, nats: to its log-probability, or to its log-odds (`ranking`)."""
        return self.get(RANKED[self.ranking], variant)

    def ranked(self, variant: Variant = Variant()) -> Float[Tensor, "prompt layer head"]:
        """What heads are ranked by, nats: by increase `rises`; by contrast its mean over both labels as the answer.

        A head that pushes one label, whatever is asked, adds to the answer's log-odds where that label is the answer,
        and takes as much from them where the same texts have the labels exchanged: it tells nothing apart. Of several
        classes, the labels are each class's own and the next one's.
        """
        rises = self.rises(variant)
        if self.ranking == "increase":
            return rises
        return (rises + self.rises(replace(variant, swapped=not variant.swapped))) / 2

    def located(self, k: int, variant: Variant = Variant()) -> list[il.Head]:
        """The k heads that add most to the answer on the choosing half, on average (`ranked`); best first."""
        mean = self.ranked(variant)[self.halves[0]].mean(0)
        order = mean.flatten().argsort(descending=True)[: min(k, mean.numel())]
        return [il.Head.at(index, mean.shape[1]) for index in order.tolist()]

    def queries(self, variant: Variant = Variant()) -> Int[np.ndarray, " prompt"]:
        """Which prompts ask about the same text: the number of each prompt's query, in order of appearance."""
        number: dict[str, int] = {}
        return np.array([number.setdefault(prompt.query, len(number)) for prompt in self.prompts(variant)])

    def both_queries(self, rows: Int[Tensor, " row"] | None = None) -> dict[str, Int[np.ndarray, " row"]]:
        """The columns query and other: of prompts asked about a text of either class, the numbers of both texts."""
        both = {"query": self.queries(), "other": self.queries(Variant(asked="false"))}
        return both if rows is None else {name: numbers[rows.numpy()] for name, numbers in both.items()}

    def few(self, at_most: int) -> int:
        """How many heads to locate: `at_most`, but no more than one in eight of a small model's."""
        return max(1, min(at_most, self.view.n_layers * self.view.n_heads // 8))

    def controls(self, heads: Sequence[il.Head], draws: int, *, avoid: Sequence[il.Head] = ()) -> list[list[il.Head]]:
        """`draws` sets of as many random heads, each from the layer of its counterpart, none of them chosen or avoided.

        Where a layer has no free head left, the nearest layer that has stands in; no set holds a head twice. To compare
        head by head, see `controls.Comparison`. Raises InputError if there are too few heads.
        """
        rng = random.Random(self.settings.seed)
        taken = {*heads, *avoid}
        free = [head for head in self.view.heads() if head not in taken]
        sets = []
        for _ in range(draws):
            left, drawn = list(free), []
            for head in heads:
                if not left:
                    raise il.InputError(
                        f"{self.view.name} has {len(free)} heads beside the {len(taken)} chosen ones, too few for as "
                        "many random ones; choose fewer"
                    )
                nearest = min(abs(other.layer - head.layer) for other in left)
                pick = rng.choice([other for other in left if abs(other.layer - head.layer) == nearest])
                left.remove(pick)
                drawn.append(pick)
            sets.append(drawn)
        return sets

    def folder(self) -> Path:
        """<model>/<task>, as folder names."""
        return folder_of(self.settings)


def folder_of(settings: StudySettings) -> Path:
    """<model>/<task>, as folder names; what is not the default about the task's prompts is part of the task's."""
    settings = replace(settings, compared=())  # claims that do not compare are the same with them
    name = Path(settings.model).name if Path(settings.model).is_dir() else settings.model
    if settings.said == settings.task:
        return Path(_slug(name), _slug(settings.task))
    # Readable, and different for settings that differ in what a folder's name cannot hold.
    readable = _slug(settings.said)[:80].rstrip("-")
    return Path(_slug(name), f"{readable}-{json_digest(settings.further())[:8]}")


def _key(reduction: Reduction, variant: Variant, sizes: Sequence[int], rows: Int[Tensor, " row"] | None) -> str | None:
    """What tells a reduction's pass from all others; None where the reduction has no lasting name."""
    name = stable_name(reduction)
    about = [repr(variant), list(sizes), None if rows is None else rows.tolist()]
    return None if name is None else f"{name}-{json_digest(about)[:12]}"


def _slug(name: str) -> str:
    """A name as one folder: "EleutherAI/gpt-j-6b" is "EleutherAI--gpt-j-6b"."""
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.strip("/").replace("/", "--"))
    return clean.lstrip(".") or "model"
