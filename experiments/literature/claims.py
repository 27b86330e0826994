"""What the scripts of this folder share: prompts of a claim, and rankings of heads.

Each script measures one claim of a paper: what its authors say, the quantity that they measure, a
control that could refute it, and the interval of the difference. `Table.state` says whether the
claim holds on a model and task: whether the intervals are above zero.
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import icl_lens as il

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Scores, Study, from_command_line
from common import Table as TableOfMeasures
from shared_tasks import natural_labels

__all__ = [
    "Scores",
    "Study",
    "Table",
    "ZeroedLists",
    "first_heads",
    "from_command_line",
    "heads_by_induction",
    "named_classes",
    "queries_alone",
    "relabeled",
    "shown_after",
    "top_token_is_answer",
    "usable_tokens",
    "with_random_labels",
    "without_shared",
]


class Table(TableOfMeasures):
    """The rows of a claim: those of `common.Table`, of which some state the claim."""

    def state(self, claim: str, n_rows: int = 1) -> None:
        """Say that the last rows, each with another control, state this claim.

        The claim holds if all their intervals of quantity − control are above zero, does not hold
        if one of them is below zero, and is otherwise not shown. It stands in the row that decides:
        the one with the lowest interval.
        """
        of_claim = self.rows[-n_rows:]
        deciding = min(of_claim, key=lambda row: row.get("low", -math.inf))
        deciding |= {"claim": claim, "holds": verdict(of_claim)}

    def to_frame(self) -> pd.DataFrame:
        """Return the rows; `claim` and `holds` are empty where a row states none."""
        measures = super().to_frame()
        for column in ("claim", "holds"):
            measures[column] = [row.get(column, "") for row in self.rows]
        return measures

    def write(self) -> pd.DataFrame:
        """Write and print the table, and whether its claims hold; return it."""
        measures = super().write()
        for row in self.rows:
            if "claim" in row:
                print(f"{row['claim']}: {row['holds']} on {row['model']}, {row['task']}.")
        return measures


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Return whether the claim of some rows holds."""
    if any("quantity" not in row for row in rows):
        return "not measured"
    if all(row["low"] > 0 for row in rows):
        return "holds"
    return "does not hold" if any(row["high"] < 0 for row in rows) else "not shown"


def named_classes(study: Study) -> Study:
    """Return the study with the names of the classes as labels."""
    return study.changed(labels=natural_labels(study))


def relabeled(prompt: il.Prompt, labels: Sequence[str]) -> il.Prompt:
    """Return the prompt with other labels at its demonstrations; the answer stays."""
    texts = [demonstration.text for demonstration in prompt.demonstrations]
    demonstrations = list(zip(texts, labels, strict=True))
    return il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels)


def with_random_labels(prompts: Sequence[il.Prompt], seed: int) -> list[il.Prompt]:
    """Return the prompts, each with its demonstrations' labels in random order.

    Every label is shown as often as before, so what is lost is the pairing of texts and labels.
    """
    rng = random.Random(seed)
    shuffled = []
    for prompt in prompts:
        labels = [demonstration.label for demonstration in prompt.demonstrations]
        rng.shuffle(labels)
        shuffled.append(relabeled(prompt, labels))
    return shuffled


def queries_alone(study: Study, batch: il.PromptBatch) -> il.PromptBatch:
    """Return the prompts without their demonstrations."""
    return study.tokenize(
        [il.Prompt([], prompt.query, prompt.answer, prompt.labels) for prompt in batch.prompts]
    )


def shown_after(
    study: Study, demonstrations: Sequence[il.Demonstration], prompts: Sequence[il.Prompt]
) -> list[il.Prompt]:
    """Return each different query of the prompts after the same demonstrations.

    The answer is the label that these demonstrations give to the query's class. Queries that are
    among the demonstrations are left out. Raise InputError for labeled texts whose classes are not
    known, or are the labels.
    """
    class_of = classes_of_words(study) if study.labels else {}
    label_of = {}
    for demonstration in demonstrations:
        label_of[class_of.get(demonstration.text)] = demonstration.label
    shown_texts = {demonstration.text for demonstration in demonstrations}
    by_query: dict[str, il.Prompt] = {}
    for prompt in prompts:
        if prompt.query in shown_texts or prompt.query in by_query:
            continue
        answer, labels = prompt.answer, prompt.labels
        if study.labels:
            answer = label_of[class_of[prompt.query]]
        else:  # the answers of pairs are words of their own
            labels = [*(demonstration.label for demonstration in demonstrations), answer]
            labels = tuple(dict.fromkeys(labels))
        by_query[prompt.query] = il.Prompt(demonstrations, prompt.query, answer, labels)
    return list(by_query.values())


@cache
def classes_of_words(study: Study) -> dict[str, str]:
    """Return the class of each text of the study's prompts: its label where labels are names of the
    classes.
    """
    class_of = {}
    for prompt in named_classes(study).prompts():
        assert prompt.answer is not None
        class_of[prompt.query] = prompt.answer
        for demonstration in prompt.demonstrations:
            class_of[demonstration.text] = demonstration.label
    return class_of


def first_heads(scores: torch.Tensor, k: int) -> list[il.Head]:
    """Return the k heads with the largest scores [layer head], largest first."""
    order = scores.double().flatten().argsort(descending=True, stable=True)[:k]
    return [il.Head.from_index(index, scores.shape[1]) for index in order.tolist()]


def usable_tokens(study: Study) -> list[int]:
    """Return the tokens of the vocabulary that are not special."""
    special = set(study.model.tokenizer.all_special_ids)
    return [token for token in range(study.model.cfg.d_vocab) if token not in special]


def heads_by_induction(study: Study, k: int) -> list[il.Head]:
    """Return the k heads that attend most, on repeated random tokens, to the token that came next
    before.
    """
    n_tokens = min(24, (study.model.cfg.n_ctx - 2) // 2)
    scores = il.repeated_token_scores(study.model, n_tokens=n_tokens, seed=study.seed)
    return first_heads(scores.induction, k)


def without_shared(lists: dict[str, list[il.Head]]) -> dict[str, list[il.Head]]:
    """Return two lists of heads without those that are in both; raise InputError if none is left."""
    first, second = lists.values()
    in_both = set(first).intersection(second)
    if not set(first) - in_both:
        raise il.InputError(
            f"the first {len(first)} heads of both lists are the same; pass fewer --heads"
        )
    remaining = {}
    for name, heads in lists.items():
        remaining[name] = [head for head in heads if head not in in_both]
    return remaining


@dataclass(frozen=True)
class ZeroedLists:
    """Sets of edits: none, and for each list of heads, its heads set to zero at all tokens, then
    random sets of as many heads of the same layers.
    """

    heads: dict[str, list[il.Head]]
    edits: list[list[il.Ablate]]
    n_random: int

    @classmethod
    def of(cls, study: Study, heads: dict[str, list[il.Head]], n_random: int) -> "ZeroedLists":
        """Return the edits of some lists of heads."""
        edits: list[list[il.Ablate]] = [[]]
        for of_list in heads.values():
            random_sets = il.random_head_sets(
                study.model, of_list, n_random=n_random, seed=study.seed
            )
            for head_set in (of_list, *random_sets):
                edits.append([il.Ablate(head_set, positions="all")])
        return cls(heads, edits, n_random)

    @property
    def names(self) -> dict[str, list[str]]:
        """The heads of each list in words."""
        return {name: list(map(str, heads)) for name, heads in self.heads.items()}

    def place(self, name: str) -> int:
        """Return which set of edits zeroes a list."""
        return 1 + list(self.heads).index(name) * (1 + self.n_random)

    def random_places(self, name: str) -> slice:
        """Return which sets of edits zero a list's random heads."""
        place = self.place(name)
        return slice(place + 1, place + 1 + self.n_random)


def top_token_is_answer(
    study: Study,
    part: str,
    batch: il.PromptBatch,
    edits: Sequence[Sequence[Any]],
    options: dict[str, Any],
) -> np.ndarray:
    """Return 1 where the most probable token of the whole vocabulary is the answer's first one,
    else 0, under each set of edits, [prompt set].

    `options` name what the edits depend on, and `part` is where the numbers are stored.
    """

    def of_rows(rows: list[int]) -> torch.Tensor:
        answers = batch[rows].answer_tokens

        def is_answer(log_probs: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
            return (log_probs.argmax(1) == answers.to(log_probs.device)[prompts]).double()

        return il.score(study.model, batch[rows], edits, read=is_answer)

    run = study.run(part)
    return il.map_prompts(study.model, batch, of_rows, options=options, run=run)
