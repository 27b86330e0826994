"""What a model does on a task: learn from the demonstrations, know the labels, copy the last label, prefer a label."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError
from icl_lens.metrics import Interval, bootstrap_interval
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt, Template, as_prompts
from icl_lens.prompts.tokenize import tokenize

Arrangement = Literal["random", "exchanged", "order", "reorder"]
Behavior = Literal["learns", "knows", "copies", "prefers"]

MIN_PROMPTS = 20
_DEFAULT_TEMPLATE = Template()
_PROMPTS_AT_ONCE = 16


@dataclass(frozen=True)
class TaskCheck:
    """What a model does on prompts of a task; made by `task_check`.

    `accuracy` is the share of prompts whose answer is more probable than their other labels, 0 to 1, by arrangement.
    With two labels, each the answer equally often, each effect is 1 for a model that shows only this behavior, and 0
    for one that shows only one of the others:

    - `learns`: the model's label follows the demonstrations when their labels are exchanged. With two labels, this is
      accuracy in random order + accuracy with exchanged labels − 1.
    - `knows`: accuracy in random order − accuracy with exchanged labels.
    - `copies`: accuracy with the answer's class last − accuracy with it first.
    - `prefers`: the share of prompts on which the model says `favorite` (its most frequent label), minus the share
      whose answer is `favorite`; summed over random order and exchanged labels.

    Example:
        >>> check = il.task_check(model, il.load_task("animal-country", layout="random", n=40))
        >>> check.behaviors
        ('learns',)
        >>> round(check.accuracy["exchanged"].value, 2)
        1.0
    """

    n_prompts: int
    accuracy: dict[Arrangement, Interval]
    effects: dict[Behavior, Interval]
    favorite: str

    @property
    def behaviors(self) -> tuple[Behavior, ...]:
        """The effects whose 95 % interval is above zero, largest first."""
        names: list[Behavior] = [name for name, effect in self.effects.items() if effect.low > 0]
        names.sort(key=lambda name: -self.effects[name].value)
        return tuple(names)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per accuracy and effect: value, low, high."""
        rows = {f"accuracy, {name}": share for name, share in self.accuracy.items()} | self.effects
        return pd.concat({name: interval.to_frame() for name, interval in rows.items()}, names=["measure"]).droplevel(1)

    def __str__(self) -> str:
        """Return one sentence: what the model does, and the accuracies that show it."""
        words = {
            "learns": "learns from the demonstrations",
            "knows": "knows the label words",
            "copies": "copies the last label",
            "prefers": f"prefers {self.favorite!r}",
        }
        what = " and ".join(words[name] for name in self.behaviors)
        what = what or "cannot do the task, as far as these prompts show"
        right, exchanged, order, reorder = (self.accuracy[name] for name in _ARRANGE)
        return (
            f"The model {what}: {right.value:.0%} correct in random order ({right.low:.0%}–{right.high:.0%}, "
            f"{self.n_prompts} prompts), {exchanged.value:.0%} with labels exchanged, {order.value:.0%} with the "
            f"answer's class last and {reorder.value:.0%} with it first."
        )


def task_check(
    model: Any, prompts: Sequence[Prompt], *, template: Template = _DEFAULT_TEMPLATE, seed: int = 0
) -> TaskCheck:
    """Return whether a model learns a task from demonstrations, knows its labels, copies the last one or prefers one.

    Every prompt is shown in four arrangements: demonstrations in random order; in the same order with labels exchanged,
    so that every demonstration and the answer have the next label; and with the demonstrations of the answer's label
    last ("order") or first ("reorder"). Behaviors are those effects of `TaskCheck` whose 95 % bootstrap interval over
    prompts is above zero. Use prompts whose answers are balanced, such as those of
    `il.load_task(name, layout="random")`: where all answers are "foo", a model that prefers "foo" is always right.

    Costs four forward passes per prompt. Raises InputError for fewer than 20 prompts, prompts without an answer, and
    prompts whose demonstrations all have the same label.

    Example:
        >>> prompts = il.load_task("animal-country", layout="random", n=40)
        >>> il.task_check(model, prompts).behaviors
        ('learns',)
    """
    prompts = as_prompts(prompts)
    _check(prompts)
    given: dict[Arrangement, Tensor] = {}
    right: dict[Arrangement, Tensor] = {}
    labels: tuple[str, ...] = ()
    for name, arrange in _ARRANGE.items():
        batch = tokenize(model, [arrange(prompt, seed) for prompt in prompts], template=template)
        given[name] = torch.cat([_most_probable(model, piece) for piece in _pieces(batch)])
        right[name], labels = batch.answer, batch.labels
    correct = {name: (given[name] == right[name]).double() for name in _ARRANGE}
    favorite = torch.cat([given["random"], given["exchanged"]]).mode().values

    def share(indices: Int[Tensor, " batch"], label: Tensor) -> Tensor:
        return (indices == label).double()

    answer, other = right["random"], right["exchanged"]
    per_prompt: dict[Behavior, Tensor] = {
        "learns": (correct["random"] - share(given["exchanged"], answer)) / 2
        + (correct["exchanged"] - share(given["random"], other)) / 2,
        "knows": correct["random"] - correct["exchanged"],
        "copies": correct["order"] - correct["reorder"],
        "prefers": share(given["random"], favorite)
        - share(answer, favorite)
        + share(given["exchanged"], favorite)
        - share(other, favorite),
    }
    return TaskCheck(
        len(prompts),
        {name: bootstrap_interval(correct[name]) for name in _ARRANGE},
        {name: bootstrap_interval(values) for name, values in per_prompt.items()},
        labels[int(favorite)],
    )


def _check(prompts: tuple[Prompt, ...]) -> None:
    if len(prompts) < MIN_PROMPTS:
        raise InputError(f"a task check needs at least {MIN_PROMPTS} prompts, got {len(prompts)}; draw more")
    for row, prompt in enumerate(prompts):
        if prompt.answer is None:
            raise InputError(f"prompt {row} has no answer; pass answer= to its constructor")
        if len({demo.label for demo in prompt.demonstrations}) < 2:
            raise InputError(f"prompt {row} must have demonstrations with different labels; add some")


def _pieces(batch: PromptBatch) -> Iterator[PromptBatch]:
    for start in range(0, len(batch.prompts), _PROMPTS_AT_ONCE):
        yield batch[start : start + _PROMPTS_AT_ONCE]


def _most_probable(model: Any, batch: PromptBatch) -> Int[Tensor, " batch"]:
    """Return the index of the most probable of each prompt's labels."""
    return label_log_probs(model, batch).cpu().masked_fill(~batch.label_mask.cpu(), -torch.inf).argmax(-1)


def _shuffled(prompt: Prompt, seed: int) -> Prompt:
    # Seeded by the prompt as well, so that its order does not depend on the prompts around it.
    order = random.Random(f"{seed} {prompt}").sample(prompt.demonstrations, len(prompt.demonstrations))
    return Prompt(order, prompt.query, prompt.answer, prompt.labels)


def _exchanged(prompt: Prompt, seed: int) -> Prompt:
    labels = [label for label in prompt.labels if label in {demo.label for demo in prompt.demonstrations}]
    following = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    shown = [replace(demo, label=following[demo.label]) for demo in _shuffled(prompt, seed).demonstrations]
    return Prompt(shown, prompt.query, following[str(prompt.answer)], prompt.labels)


def _ordered(prompt: Prompt, seed: int, *, last: bool) -> Prompt:
    shown = sorted(_shuffled(prompt, seed).demonstrations, key=lambda demo: (demo.label == prompt.answer) == last)
    return Prompt(shown, prompt.query, prompt.answer, prompt.labels)


_ARRANGE: dict[Arrangement, Callable[[Prompt, int], Prompt]] = {
    "random": _shuffled,
    "exchanged": _exchanged,
    "order": lambda prompt, seed: _ordered(prompt, seed, last=True),
    "reorder": lambda prompt, seed: _ordered(prompt, seed, last=False),
}
