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
from icl_lens.progress import Progress, reported
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts, quoted_list
from icl_lens.prompts.tasks import load_task
from icl_lens.prompts.text_task import TextTask
from icl_lens.prompts.tokenize import tokenize

Arrangement = Literal["random", "exchanged", "order", "reorder"]
Behavior = Literal["learns", "knows", "copies", "prefers"]

N_PROMPTS = 60
MIN_PROMPTS = 20
# The four effects are tested together: 95% confidence that none is found by chance (Bonferroni).
EFFECT_LEVEL = 1 - 0.05 / 4
# Behaviors whose effects are compared: learning and knowing add up to doing the task.
_GROUPS: tuple[tuple[Behavior, ...], ...] = (("learns", "knows"), ("copies",), ("prefers",))
# Tokens per forward pass.
_PASS_TOKENS = 1024


@dataclass(frozen=True)
class TaskCheck:
    """What a model does on prompts of a task; made by `task_check`. `print` shows it as one sentence.

    `accuracy` is the share of prompts whose answer is more probable than their other labels, 0 to 1, with its 95%
    interval, for each arrangement; `last_label` and `one_label` are the accuracies in random order of always predicting
    the last label, and always `favorite`, the model's most frequent label. If all labels are the answer equally often,
    each effect is 1 for a model that shows only this behavior, and 0 for one that shows only another:

    - `learns`: the model's label follows the demonstrations when their labels are exchanged. With two labels, this is
      accuracy in random order + accuracy with exchanged labels − 1.
    - `knows`: accuracy in random order − accuracy with exchanged labels.
    - `copies`: accuracy with the query's class last − accuracy with it first.
    - `prefers`: the share of prompts with prediction `favorite` minus the share with answer `favorite`, over random
      order and exchanged labels, divided by this difference for a model that always predicts `favorite`.

    `lesser` are the behaviors whose effect is smaller than the largest one: the interval of the paired difference is
    above zero. Learning and knowing count as one effect, their sum, because they add up to doing the task: accuracy in
    random order is (1 + learns + knows) / 2 with two labels.

    The intervals of the four effects hold jointly with 95% confidence (each has 98.75%). All intervals resample
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
        """The effects whose interval is above zero, largest first."""
        names: list[Behavior] = [name for name, effect in self.effects.items() if effect.low > 0]
        names.sort(key=lambda name: -self.effects[name].value)
        return tuple(names)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per accuracy, baseline (without interval) and effect: value, low, high."""
        rows = {f"accuracy, {name}": share for name, share in self.accuracy.items()}
        baselines = {"last label": self.last_label, "one label": self.one_label}
        rows |= {f"baseline, {name}": Interval(share, float("nan"), float("nan")) for name, share in baselines.items()}
        frames = {name: interval.to_frame() for name, interval in (rows | self.effects).items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of each row of `to_frame` and, as "sentence", what `print` shows, for JSON."""
        return {**self.to_frame()["value"], "sentence": str(self)}

    def __str__(self) -> str:
        """Return one sentence: what the model does, and the accuracies that show it, next to baselines."""
        verbs = {
            "learns": "learns from the demonstrations",
            "knows": "knows the label words",
            "copies": "copies the last label",
            "prefers": f"prefers {self.favorite!r}",
        }
        main = [verb for name, verb in verbs.items() if name in self.behaviors and name not in self.lesser]
        behavior = _listed(main) or "cannot do the task, as far as these prompts show"
        if self.lesser:
            behavior += f", and to a lesser degree {_listed([verbs[name] for name in self.lesser])}"
        if main and not {"learns", "knows"} & {*self.behaviors}:
            behavior += ", but shows no clear sign of doing the task"
        right, exchanged, order, reorder = (self.accuracy[name] for name in _ARRANGE)
        return (
            f"The model {behavior}: {right.value:.0%} correct in random order ({right.low:.0%}–{right.high:.0%}, "
            f"{self.n_prompts} prompts; always the last label {self.last_label:.0%}, always {self.favorite!r} "
            f"{self.one_label:.0%}), {exchanged.value:.0%} with labels exchanged, {order.value:.0%} with the query's "
            f"class last (copying: 100%) and {reorder.value:.0%} with it first (copying: 0%)."
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
    """Return whether a model learns a task from demonstrations, knows its labels, copies the last one or prefers one.

    `task` is the name of a task, a `TextTask`, or prompts. For a named task, `n` prompts (default: 60) come
    from `il.load_task(task, layout="random")`: queries of both classes, each label the answer equally often. Your own
    prompts should be balanced in the same way: if all answers are "foo", a model that prefers "foo" is always right.

    The model runs on four arrangements of every prompt: its demonstrations in a new random order; in the same order
    with labels exchanged, each label (also the answer) replaced by the next; and with the query's class last
    ("order") or first ("reorder"). Behaviors are those effects of `TaskCheck` whose interval is
    above zero. `template`, `prepend_bos` and `shared_prefix` are those of `il.tokenize`; `progress=True` shows a
    progress bar.

    Takes at most four forward passes per prompt. Raise InputError for fewer than 20 prompts, prompts without an
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
    _check(prompts)
    arranged = {name: [arrange(prompt, seed) for prompt in prompts] for name, arrange in _ARRANGE.items()}
    # Random order is the same as another arrangement for some prompts, which then run once.
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(chain.from_iterable(arranged.values())))}
    batch = tokenize(model, [*place], template=template, prepend_bos=prepend_bos, shared_prefix=shared_prefix)
    pieces: list[Tensor] = []
    with reported(progress) as report:
        for piece in batch.split(max(1, _PASS_TOKENS // batch.tokens.shape[1])):
            pieces.append(_predict(model, piece))
            report("checking the task", sum(map(len, pieces)), len(place))
    rows = {name: [place[prompt] for prompt in some] for name, some in arranged.items()}
    predicted = {name: torch.cat(pieces)[some] for name, some in rows.items()}
    answers = {name: batch.answer.cpu()[some] for name, some in rows.items()}
    last_shown, labels = recent_label(batch.label_index).cpu()[rows["random"]], batch.labels
    correct = {name: (predicted[name] == answers[name]).double() for name in _ARRANGE}
    favorite = torch.cat([predicted["random"], predicted["exchanged"]]).mode().values

    def share(indices: Int[Tensor, " batch"], label: Tensor) -> Tensor:
        return (indices == label).double()

    answer, other = answers["random"], answers["exchanged"]
    preferred = share(predicted["random"], favorite) + share(predicted["exchanged"], favorite)
    n_answer_favorite = share(answer, favorite) + share(other, favorite)
    n_choices_favorite = 2 * torch.tensor([labels[int(favorite)] in prompt.labels for prompt in prompts]).double()
    per_prompt: dict[Behavior, Tensor] = {
        "learns": (correct["random"] - share(predicted["exchanged"], answer)) / 2
        + (correct["exchanged"] - share(predicted["random"], other)) / 2,
        "knows": correct["random"] - correct["exchanged"],
        "copies": correct["order"] - correct["reorder"],
        "prefers": (preferred - n_answer_favorite) / (n_choices_favorite - n_answer_favorite).mean(),
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
        last_label=float(share(last_shown, answer).mean()),
        one_label=float(share(answer, favorite).mean()),
    )


def _lesser(
    per_prompt: dict[Behavior, Float[Tensor, " batch"]], interval: Callable[[Tensor], Interval]
) -> tuple[Behavior, ...]:
    """Return the behaviors whose effect is smaller than the largest; see `TaskCheck.lesser`."""
    groups: list[list[Behavior]] = [[name for name in names if name in per_prompt] for names in _GROUPS]
    totals = [(group, torch.stack([per_prompt[name] for name in group]).sum(0)) for group in groups if group]
    if not totals:
        return ()
    largest = max((total for _, total in totals), key=lambda total: float(total.mean()))
    return tuple(name for group, total in totals if interval(largest - total).low > 0 for name in group)


def _listed(verbs: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(verbs[:-1]), *verbs[-1:])))


def _check(prompts: tuple[Prompt, ...]) -> None:
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
    """Return the index of the most probable label among each prompt's own."""
    return label_log_probs(model, batch).cpu().masked_fill(~batch.label_mask.cpu(), -torch.inf).argmax(-1)


def _shuffle(prompt: Prompt, seed: int) -> Prompt:
    # The prompt is part of the seed, so its order does not depend on the other prompts.
    order = random.Random(f"{seed} {prompt}").sample(prompt.demonstrations, len(prompt.demonstrations))
    return Prompt(order, prompt.query, prompt.answer, prompt.labels)


def _exchange_labels(prompt: Prompt, seed: int) -> Prompt:
    labels = [label for label in prompt.labels if label in {demo.label for demo in prompt.demonstrations}]
    following = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    shown = [replace(demo, label=following[demo.label]) for demo in _shuffle(prompt, seed).demonstrations]
    return Prompt(shown, prompt.query, following[str(prompt.answer)], prompt.labels)


def _sort_by_answer(prompt: Prompt, seed: int, *, last: bool) -> Prompt:
    shown = sorted(_shuffle(prompt, seed).demonstrations, key=lambda demo: (demo.label == prompt.answer) == last)
    return Prompt(shown, prompt.query, prompt.answer, prompt.labels)


_ARRANGE: dict[Arrangement, Callable[[Prompt, int], Prompt]] = {
    "random": _shuffle,
    "exchanged": _exchange_labels,
    "order": lambda prompt, seed: _sort_by_answer(prompt, seed, last=True),
    "reorder": lambda prompt, seed: _sort_by_answer(prompt, seed, last=False),
}
