"""A model and a task under study: the prompts, passes over them, the two halves, located heads and their controls."""

import random
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.lab.passes import Passes, Tensors, joined, stable_name
from experiments.lab.reductions import RANKED
from icl_lens.digest import json_digest
from icl_lens.models.view import ModelView
from icl_lens.prompts.tasks import Asked, Layout, load_task

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


Ranking = Literal["increase", "contrast"]
"""By what heads are located: the paper's log p(answer), or the answer's log-odds against the other label."""
RANKINGS: tuple[Ranking, ...] = ("increase", "contrast")


@dataclass(frozen=True)
class StudySettings:
    """What the command line says: which model, which task, how many prompts, drawn with which seed."""

    model: str = "icl-mini"
    task: str = "sentiment-number"
    n: int = 1000
    seed: int = 0
    path: str | None = None
    """A word list (.json, for all word tasks) or the files of the sentence task, see `load_task`."""
    compared: tuple[str, ...] = ()
    """Other tasks that claims about several tasks look at, "TASK" or "TASK=PATH" where a task has files of its own."""

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
        return self.path if task == self.task or (self.path and self.path.endswith(".json")) else None


@dataclass(frozen=True)
class Variant:
    """Which prompts of a task: the same texts in another layout, or with the two labels exchanged."""

    layout: Layout = "order"
    swapped: bool = False
    """The true class's label is "bar" instead of "foo"."""
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
        self.ranking: Ranking = "increase"

    def ranked_by(self, ranking: Ranking) -> "Study":
        """The same study, with heads located by this; whatever either computes, both keep."""
        other = copy(self)
        other.ranking = ranking
        return other

    @cached_property
    def halves(self) -> tuple[Int[Tensor, " chosen_on"], Int[Tensor, " tested_on"]]:
        """Rows to choose heads on, and rows to test them on, which ask about other texts."""
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(self.prompts()):
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
            settings = self.settings
            task = variant.task or settings.task
            prompts = load_task(
                task,
                n=settings.n,
                seed=settings.seed,
                layout=variant.layout,
                asked=variant.asked,
                labels=("bar", "foo") if variant.swapped else ("foo", "bar"),
                path=settings.path_of(task),
            )
            # One order of labels in all variants, so that label axes can be compared.
            self._batches[variant] = il.tokenize(self.model, prompts, labels=("foo", "bar"))
        return self._batches[variant]

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

    def rises(self, variant: Variant = Variant()) -> Float[Tensor, "prompt layer head"]:
        """What every head adds to the answer, nats: to its log-probability, or to its log-odds (`ranking`)."""
        return self.get(RANKED[self.ranking], variant)

    def located(self, k: int, variant: Variant = Variant()) -> list[il.Head]:
        """The k heads that add most to the answer on the choosing half, on average; best first."""
        mean = self.rises(variant)[self.halves[0]].mean(0)
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
    """<model>/<task>, as folder names."""
    name = Path(settings.model).name if Path(settings.model).is_dir() else settings.model
    return Path(_slug(name), _slug(settings.task))


def _key(reduction: Reduction, variant: Variant, sizes: Sequence[int], rows: Int[Tensor, " row"] | None) -> str | None:
    """What tells a reduction's pass from all others; None where the reduction has no lasting name."""
    name = stable_name(reduction)
    about = [repr(variant), list(sizes), None if rows is None else rows.tolist()]
    return None if name is None else f"{name}-{json_digest(about)[:12]}"


def _slug(name: str) -> str:
    """A name as one folder: "EleutherAI/gpt-j-6b" is "EleutherAI--gpt-j-6b"."""
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.strip("/").replace("/", "--"))
    return clean.lstrip(".") or "model"
