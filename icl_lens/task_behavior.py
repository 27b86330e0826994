"""Check whether a model learns a task, knows its labels, copies the last label or prefers one label."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError
from icl_lens.metrics import Interval, bootstrap_interval, recent_label
from icl_lens.progress import Progress, progress_callback
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts, quoted_list
from icl_lens.prompts.tasks import load_task
from icl_lens.prompts.text_task import TextTask
from icl_lens.prompts.tokenize import tokenize

Arrangement = Literal["random", "exchanged", "order", "reorder"]
Behavior = Literal["learns", "knows", "copies", "prefers"]

N_PROMPTS = 60
MIN_PROMPTS = 20
# Confidence level of each of the four effects, so that all four intervals hold with 95% confidence (Bonferroni).
EFFECT_LEVEL = 1 - 0.05 / 4
# Learning and knowing add up to doing the task, so their sum is compared with the other effects.
_COMPARED: tuple[tuple[Behavior, ...], ...] = (("learns", "knows"), ("copies",), ("prefers",))
# Tokens per forward pass.
_PASS_TOKENS = 1024


@dataclass(frozen=True)
class TaskCheck:
    """What a model does on prompts of a task; made by `task_check`. `print` shows it as one sentence.

    `accuracy` is the share of prompts whose answer is more probable than their other labels, 0 to 1, with its 95%
    interval, for each arrangement. `favorite` is the label that the model predicts most often. Two baselines for random
    order are the accuracy of always predicting the last label (`last_label`), and of always predicting `favorite`
    (`one_label`).

    There are four `effects`. If all labels are the answer equally often, each is 1 for a model that shows only this
    behavior, and 0 for one that shows only another:

    - `learns`: how much more often the model predicts the answer of the prompt it gets than the answer of its other
      version (random order or exchanged labels). With two labels, this is accuracy in random order + accuracy with
      exchanged labels − 1.
    - `knows`: accuracy in random order − accuracy with exchanged labels.
    - `copies`: accuracy with the query's class last − accuracy with it first.
    - `prefers`: how much more often the model predicts `favorite` than it is the answer, over random order and
      exchanged labels, divided by the same for a model that always predicts `favorite`.

    `lesser` lists those of `behaviors` whose effect is clearly smaller than the largest: the interval of the paired
    difference is above zero. Learning and knowing are compared as one effect, their sum, because they add up to doing
    the task: with two labels, accuracy in random order is (1 + learns + knows) / 2.

    The intervals of the four effects hold jointly with 95% confidence (each alone with 98.75%). All intervals resample
    queries, since prompts with the same query are not independent.

    Example:
        >>> check = il.task_check(model, "animal-country", n=40)
        >>> check.behaviors
        ('learns',)
        >>> round(check.accuracy["exchanged"].value, 2)
        1.0
    """

    n_prompts: int
    accuracy: dict[Arrangement, Interval]
    effects: dict[Behavior, Interval]
    lesser: tuple[Behavior, ...]
    favorite: str
    last_label: float
    one_label: float

    @property
    def behaviors(self) -> tuple[Behavior, ...]:
        """The behaviors whose effect has an interval above zero, largest effect first."""
        names: list[Behavior] = [name for name, effect in self.effects.items() if effect.low > 0]
        names.sort(key=lambda name: -self.effects[name].value)
        return tuple(names)

    def to_frame(self) -> pd.DataFrame:
        """Return value, low and high, one row per accuracy, baseline (no interval) and effect."""
        rows = {f"accuracy, {name}": share for name, share in self.accuracy.items()}
        baselines = {"last label": self.last_label, "one label": self.one_label}
        rows |= {f"baseline, {name}": Interval(share, float("nan"), float("nan")) for name, share in baselines.items()}
        frames = {name: interval.to_frame() for name, interval in (rows | self.effects).items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of each row of `to_frame` and, as "sentence", what `print` shows, for JSON."""
        return {**self.to_frame()["value"], "sentence": str(self)}

    def __str__(self) -> str:
        """Return one sentence: what the model does, its accuracy in each arrangement, and baselines."""
        verbs = {
            "learns": "learns from the demonstrations",
            "knows": "knows the label words",
            "copies": "copies the last label",
            "prefers": f"prefers {self.favorite!r}",
        }
        main = [verb for name, verb in verbs.items() if name in self.behaviors and name not in self.lesser]
        behavior = _join_words(main) or "cannot do the task, as far as these prompts show"
        if self.lesser:
            behavior += f", and to a lesser degree {_join_words([verbs[name] for name in self.lesser])}"
        if main and not {"learns", "knows"} & {*self.behaviors}:
            behavior += ", but shows no clear sign of doing the task"
        shuffled, exchanged, order, reorder = (self.accuracy[name] for name in _ARRANGE)
        return (
            f"The model {behavior}: {shuffled.value:.0%} correct in random order "
            f"({shuffled.low:.0%}–{shuffled.high:.0%}, {self.n_prompts} prompts; always the last label "
            f"{self.last_label:.0%}, always {self.favorite!r} {self.one_label:.0%}), {exchanged.value:.0%} with labels "
            f"exchanged, {order.value:.0%} with the query's class last (copying: 100%) and {reorder.value:.0%} "
            "with it first (copying: 0%)."
        )


def task_check(
    model: Any,
    task: str | TextTask | Sequence[Prompt],
    *,
    n: int | None = None,
    template: Template = DEFAULT_TEMPLATE,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> TaskCheck:
    """Check whether a model learns a task from demonstrations, knows its labels, copies the last one or prefers one.

    `task` is the name of a task, a `TextTask`, or prompts. For the first two, `n` prompts (default: 60) come from
    `il.load_task(task, layout="random")`. With two classes per prompt, each label is then the answer equally often.
    Your own prompts should be balanced in the same way: if all answers are "foo", a model that prefers "foo" is always
    right.

    The model runs on four arrangements of the demonstrations of every prompt:

    - "random": a new random order.
    - "exchanged": the same order, with each label, also the answer, replaced by the next one.
    - "order" and "reorder": the query's class last, and first.

    See `TaskCheck` for what is computed from them. `template`, `prepend_bos` and `shared_prefix` are those of
    `il.tokenize`; `progress=True` shows a progress bar.

    The model runs on at most four texts per prompt. Raise InputError for fewer than 20 prompts, prompts without an
    answer, and prompts whose demonstrations all have the same label.

    Example:
        >>> il.task_check(model, "animal-country", n=40).behaviors
        ('learns',)
        >>> prompts = il.load_task("animal-country", layout="random", n=40, labels=["yes", "no"])
        >>> il.task_check(model, prompts).favorite in ("yes", "no")
        True
    """
    if isinstance(task, str | TextTask):
        prompts = tuple(load_task(task, n=N_PROMPTS if n is None else n, layout="random", seed=seed))
    elif n is not None:
        raise InputError(f"n must be None for a list of prompts, got {n}; remove it")
    else:
        prompts = as_prompts(task)
    _check_prompts(prompts)
    arranged = {name: [arrange(prompt, seed) for prompt in prompts] for name, arrange in _ARRANGE.items()}
    # A prompt that is the same in two arrangements runs once.
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(chain.from_iterable(arranged.values())))}
    batch = tokenize(model, [*row_of], template=template, prepend_bos=prepend_bos, shared_prefix=shared_prefix)
    predictions: list[Tensor] = []
    with progress_callback(progress) as report:
        for piece in batch.split(max(1, _PASS_TOKENS // batch.tokens.shape[1])):
            predictions.append(_predict(model, piece))
            report("checking the task", sum(map(len, predictions)), len(row_of))
    rows = {name: [row_of[prompt] for prompt in prompts_of] for name, prompts_of in arranged.items()}
    predicted = {name: torch.cat(predictions)[rows_of] for name, rows_of in rows.items()}
    answers = {name: batch.answer.cpu()[rows_of] for name, rows_of in rows.items()}
    last_shown, labels = recent_label(batch.label_index).cpu()[rows["random"]], batch.labels
    correct = {name: (predicted[name] == answers[name]).double() for name in _ARRANGE}
    favorite = torch.cat([predicted["random"], predicted["exchanged"]]).mode().values

    def equals(indices: Int[Tensor, " batch"], label: Tensor) -> Float[Tensor, " batch"]:
        return (indices == label).double()

    # Count the arrangements (of two: random order, exchanged labels) in which the favorite is predicted, in which it is
    # the answer, and in which it is one of the labels.
    n_predicted = equals(predicted["random"], favorite) + equals(predicted["exchanged"], favorite)
    n_answers = equals(answers["random"], favorite) + equals(answers["exchanged"], favorite)
    n_possible = 2 * torch.tensor([labels[int(favorite)] in prompt.labels for prompt in prompts]).double()
    per_prompt: dict[Behavior, Tensor] = {
        # Predictions that ignore the demonstrations are as often the answer of the other arrangement as of their own.
        "learns": (correct["random"] - equals(predicted["exchanged"], answers["random"])) / 2
        + (correct["exchanged"] - equals(predicted["random"], answers["exchanged"])) / 2,
        "knows": correct["random"] - correct["exchanged"],
        "copies": correct["order"] - correct["reorder"],
        "prefers": (n_predicted - n_answers) / (n_possible - n_answers).mean(),
    }
    queries = [prompt.query for prompt in prompts]

    def interval(values: Tensor) -> Interval:
        return bootstrap_interval(values, clusters=queries, level=EFFECT_LEVEL)

    effects: dict[Behavior, Interval] = {name: interval(values) for name, values in per_prompt.items()}
    return TaskCheck(
        n_prompts=len(prompts),
        accuracy={name: bootstrap_interval(correct[name], clusters=queries, bounds=(0.0, 1.0)) for name in _ARRANGE},
        effects=effects,
        lesser=_lesser({name: per_prompt[name] for name in per_prompt if effects[name].low > 0}, interval),
        favorite=labels[int(favorite)],
        last_label=float(equals(last_shown, answers["random"]).mean()),
        one_label=float(equals(answers["random"], favorite).mean()),
    )


def _lesser(
    per_prompt: dict[Behavior, Float[Tensor, " batch"]], interval: Callable[[Tensor], Interval]
) -> tuple[Behavior, ...]:
    """Return the behaviors whose effect is smaller than the largest; see `TaskCheck.lesser`."""
    groups: list[list[Behavior]] = [[name for name in names if name in per_prompt] for names in _COMPARED]
    totals = [(group, torch.stack([per_prompt[name] for name in group]).sum(0)) for group in groups if group]
    if not totals:
        return ()
    largest = max((total for _, total in totals), key=lambda total: float(total.mean()))
    return tuple(name for group, total in totals if interval(largest - total).low > 0 for name in group)


def _join_words(verbs: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(verbs[:-1]), *verbs[-1:])))


def _check_prompts(prompts: tuple[Prompt, ...]) -> None:
    if len(prompts) < MIN_PROMPTS:
        raise InputError(f"task must have at least {MIN_PROMPTS} prompts, got {len(prompts)}; draw more")
    for row, prompt in enumerate(prompts):
        if prompt.answer is None:
            raise InputError(f"prompt {row} must have an answer, got None; pass answer= to Prompt")
        shown = tuple({demo.label: None for demo in prompt.demonstrations})
        if len(shown) < 2:
            raise InputError(
                f"prompt {row} must have demonstrations with at least two labels, got {quoted_list(shown)}; add some"
            )


def _predict(model: Any, batch: PromptBatch) -> Int[Tensor, " batch"]:
    """Return the index of the most probable of each prompt's own labels."""
    return label_log_probs(model, batch).cpu().masked_fill(~batch.label_mask.cpu(), -torch.inf).argmax(-1)


def _shuffle(prompt: Prompt, seed: int) -> Prompt:
    # The prompt is part of the seed, so its order does not depend on the other prompts.
    order = random.Random(f"{seed} {prompt}").sample(prompt.demonstrations, len(prompt.demonstrations))
    return Prompt(order, prompt.query, prompt.answer, prompt.labels)


def _exchange_labels(prompt: Prompt, seed: int) -> Prompt:
    """Return the shuffled prompt with each label, also the answer, replaced by the next demonstrated one."""
    labels = [label for label in prompt.labels if label in {demo.label for demo in prompt.demonstrations}]
    following = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    shown = [replace(demo, label=following[demo.label]) for demo in _shuffle(prompt, seed).demonstrations]
    return Prompt(shown, prompt.query, following[str(prompt.answer)], prompt.labels)


def _sort_by_answer(prompt: Prompt, seed: int, *, last: bool) -> Prompt:
    """Return the shuffled prompt with the demonstrations of the answer moved to the end, or to the start."""
    shown = sorted(_shuffle(prompt, seed).demonstrations, key=lambda demo: (demo.label == prompt.answer) == last)
    return Prompt(shown, prompt.query, prompt.answer, prompt.labels)


_ARRANGE: dict[Arrangement, Callable[[Prompt, int], Prompt]] = {
    "random": _shuffle,
    "exchanged": _exchange_labels,
    "order": lambda prompt, seed: _sort_by_answer(prompt, seed, last=True),
    "reorder": lambda prompt, seed: _sort_by_answer(prompt, seed, last=False),
}
