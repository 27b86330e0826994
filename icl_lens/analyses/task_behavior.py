"""Check whether a model learns a task, knows its labels, copies the last label or prefers one label.

Whether a model tells classes apart is judged by the log-odds of the labels, not by which label is most probable: a
model that always predicts "bar" may still give "bar" higher log-odds where it is the answer.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.analyses.check import Check
from icl_lens.analyses.pair_behavior import PairCheck, check_pairs
from icl_lens.engine.score import score
from icl_lens.errors import InputError, check_integers
from icl_lens.intervals import Interval, bootstrap_interval, percentile_interval, weights_with_data
from icl_lens.metrics import label_aurocs, mean_aurocs, most_probable
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.memory import CHECK_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts, quoted_list
from icl_lens.prompts.tasks import Task, named_task
from icl_lens.prompts.tokenize import tokenize
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

Arrangement = Literal["given", "random", "exchanged", "order", "reorder"]
Behavior = Literal["learns", "knows", "copies", "prefers"]

N_PROMPTS = 60
MIN_PROMPTS = 20
# Confidence level of each of the four effects, so that all four intervals hold with 95% confidence (Bonferroni).
EFFECT_LEVEL = 1 - 0.05 / 4
# Learning and knowing add up to doing the task, so their sum is compared with the other effects.
_COMPARED: tuple[tuple[Behavior, ...], ...] = (("learns", "knows"), ("copies",), ("prefers",))

Draws = Float[np.ndarray, " draw"]
"""A statistic of the data (first) and of each bootstrap draw of queries."""


@dataclass(frozen=True, repr=False)
class TaskCheck(Check):
    """What a model does on prompts of a task; made by `task_check`. `print` shows it in a few sentences.

    Each dictionary by arrangement has "given", the prompts as they are, "random", their demonstrations in a new random
    order, "exchanged", this order with labels exchanged, and "order" and "reorder", with the query's class last and
    first.

    `accuracy` is the share of prompts whose answer is more probable than their other labels, 0 to 1. A preference for
    one label lowers it, and may hide that the model tells the classes apart. `auroc` is free of this: the probability
    that a label's log-odds against the prompt's other labels are larger where it is the answer than where it is not,
    averaged over labels; chance is ½. Both have 95% intervals. `label_auroc` has the same for each label, over random
    order and exchanged labels.

    `favorite` is the label with the largest mean log-probability over random order and exchanged labels, and
    `preference` how far it is above the mean of the prompt's other labels, nats, as if all labels were equally often
    the answer, before and after the exchange. Two baselines for the given prompts are the accuracy of always predicting
    the last label (`last_label`), and of always predicting `favorite` (`one_label`).

    There are four `effects`. If all labels are the answer equally often, each is 1 for a model that shows only this
    behavior, and 0 for one that shows only another. The first three are 2 · AUROC − 1 of the labels' log-odds, so that
    a preference does not change them:

    - `learns`: whether a label's log-odds are larger where it is the answer, over random order and exchanged labels.
    - `knows`: the same with the answers before labels were exchanged.
    - `copies`: whether a label's log-odds are larger where it is shown last, over the query's class last and first.
    - `prefers`: how much more often the model predicts `favorite` than it is the answer, over random order and
      exchanged labels, divided by the same for a model that always predicts `favorite`.

    `lesser` lists those of `behaviors` whose effect is clearly smaller than the largest: the interval of the paired
    difference is above zero. Learning and knowing are compared as one effect, their sum, because they add up to doing
    the task.

    The intervals of the four effects hold jointly with 95% confidence (each alone with 98.75%). All intervals resample
    queries, since prompts with the same query are not independent. If all prompts have one query, there is no interval
    and therefore no verdict: `behaviors` is empty.

    Example:
        >>> check = il.task_check(model, "animal-country", n=40)
        >>> check.behaviors, check.tells_apart
        (('learns', 'copies'), True)
        >>> round(check.auroc["exchanged"].value, 2)
        1.0
    """

    n_prompts: int
    n_queries: int
    accuracy: dict[Arrangement, Interval]
    auroc: dict[Arrangement, Interval]
    label_auroc: dict[str, Interval]
    effects: dict[Behavior, Interval]
    lesser: tuple[Behavior, ...]
    favorite: str
    preference: Interval
    last_label: float
    one_label: float
    edits: tuple[str, ...] = ()
    """What edited the model: the edits of open `with` blocks, and other hooks."""

    @property
    def behaviors(self) -> tuple[Behavior, ...]:
        """The behaviors whose effect has an interval above zero, largest effect first."""
        names: list[Behavior] = [name for name, effect in self.effects.items() if effect.low > 0]
        names.sort(key=lambda name: -self.effects[name].value)
        return tuple(names)

    @property
    def tells_apart(self) -> bool:
        """Whether the model clearly tells the classes apart: it learns from the demonstrations or knows the labels."""
        return bool({"learns", "knows"} & {*self.behaviors})

    def to_frame(self) -> pd.DataFrame:
        """Return value, low and high, one row per accuracy, AUROC, baseline (no interval), preference and effect."""
        rows = {f"accuracy, {name}": share for name, share in self.accuracy.items()}
        rows |= {f"AUROC, {name}": share for name, share in self.auroc.items()}
        rows |= {f"AUROC of {label!r}": share for label, share in self.label_auroc.items()}
        baselines = {"last label": self.last_label, "one label": self.one_label}
        rows |= {f"baseline, {name}": Interval(share, float("nan"), float("nan")) for name, share in baselines.items()}
        rows[f"preference for {self.favorite!r}, nats"] = self.preference
        frames = {name: interval.to_frame() for name, interval in (rows | self.effects).items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def __str__(self) -> str:
        """Return what the model does, how well it tells the classes apart, what it prefers, accuracies, baselines."""
        preference = f"{self.favorite!r} by {self.preference.value:.1f} nats"
        if self.n_queries < 2:
            verdict = (
                f"No verdict, because all {self.n_prompts} prompts have the same query: there is no interval over "
                f"queries. Measured: AUROC of the log-odds {_number(self.auroc['random'])} in random order; mean "
                f"log-probability highest for {preference}"
            )
        else:
            verdict = f"The model {self._behavior()}. {self._apart(preference)}"
        given, *others = (self.accuracy[name] for name in get_args(Arrangement))
        shuffled, exchanged, order, reorder = (f"{one.value:.0%}" for one in others)
        interval = "" if math.isnan(given.low) else f"{given.low:.0%}–{given.high:.0%}; "
        return (
            f"{verdict}. {given.value:.0%} of the {self.n_prompts} prompts correct ({interval}always the last label "
            f"{self.last_label:.0%}, always {self.favorite!r} {self.one_label:.0%}), {shuffled} in a new random order, "
            f"{exchanged} with labels exchanged, {order} with the query's class last (copying: 100%) and {reorder} "
            "with it first (copying: 0%)." + (f" {edits_note(self.edits)}" if self.edits else "")
        )

    def _behavior(self) -> str:
        """Return the behaviors as verbs."""
        verbs = {
            "learns": "learns from the demonstrations",
            "knows": "knows the label words",
            "copies": "copies the last label",
            "prefers": f"prefers {self.favorite!r}",
        }
        if self.tells_apart:
            del verbs["prefers"]  # the next sentence says it, with its size
        main = [verb for name, verb in verbs.items() if name in self.behaviors and name not in self.lesser]
        lesser = [verb for name, verb in verbs.items() if name in self.lesser]
        behavior = _join_words(main) or "cannot do the task, as far as these prompts show"
        if lesser:
            behavior += f", and to a lesser degree {_join_words(lesser)}"
        if main and not self.tells_apart:
            behavior += ", but shows no clear sign of doing the task"
        return behavior

    def _apart(self, preference: str) -> str:
        """Return whether the model tells the classes apart, and what it prefers, with the numbers."""
        apart = "tells the classes apart" if self.tells_apart else "does not clearly tell the classes apart"
        aurocs = f"{_number(self.auroc['random'])} in random order, {_number(self.auroc['exchanged'])} exchanged"
        low, high = self.preference.low, self.preference.high
        nats = f"{preference} ({low:.1f} … {high:.1f})"
        if not low > 0:
            prefers = f"and prefers no label clearly ({nats})"
        else:
            prefers = f"{'but' if self.tells_apart else 'and'} prefers {nats}"
        return f"By its log-odds, it {apart} (AUROC {aurocs}; chance 0.5), {prefers}"


def task_check(
    model: Any,
    task: str | Task | Sequence[Prompt],
    *,
    n: int | None = None,
    template: Template = DEFAULT_TEMPLATE,
    prepend_bos: bool | None = None,
    seed: int = 0,
    run: Run | None = None,
) -> TaskCheck | PairCheck:
    """Check whether a model learns a task from demonstrations, knows its labels, copies the last one or prefers one.

    `task` is a task (`WordTask`, `TextTask`, `PairTask`) or its name, of which `n` prompts (default: 60) are drawn, or
    prompts. With two classes per prompt, each label of a task is the answer equally often. Your own prompts should be
    balanced in the same way: if all answers are "foo", a model that prefers "foo" is always right.

    The model runs on the prompts as they are and on four arrangements of their demonstrations:

    - "random": a new random order.
    - "exchanged": the same order, with each label, also the answer, replaced by the next one.
    - "order" and "reorder": the query's class last, and first.

    See `TaskCheck` for what is computed from them. If any answer is a word of its own, which no demonstration shows, a
    `PairCheck` is returned instead: the model answers with any token of its vocabulary, also with outputs exchanged
    between demonstrations, and without demonstrations. `template` and `prepend_bos` are those of
    `il.tokenize`; `run` says how the prompts run (see `Run`).

    The model runs on at most five texts per prompt. Raise InputError for fewer than 20 prompts, prompts without an
    answer, and prompts whose demonstrations all have the same label.

    Example:
        >>> il.task_check(model, "animal-country", n=40).behaviors
        ('learns', 'copies')
        >>> prompts = il.load_task("animal-country", n=40, labels=["yes", "no"])
        >>> il.task_check(model, prompts).favorite in ("yes", "no")
        True
    """
    (seed,) = check_integers(seed=seed)
    if isinstance(task, str | Task):
        drawn = named_task(task) if isinstance(task, str) else task
        prompts = tuple(drawn.prompts(N_PROMPTS if n is None else n, seed=seed))
    elif n is not None:
        raise InputError(f"n must be None for a list of prompts, got {n}; remove it")
    else:
        prompts = as_prompts(task)
    _check_prompts(prompts)
    tokenized = partial(tokenize, model, template=template, prepend_bos=prepend_bos)
    if any(prompt.has_own_answer for prompt in prompts):
        return check_pairs(model, prompts, tokenized, run)
    arranged: dict[Arrangement, list[Prompt]] = {
        name: [arrange(prompt, seed) for prompt in prompts] for name, arrange in _ARRANGE.items()
    }
    # A prompt that is the same in two arrangements runs once.
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(chain.from_iterable(arranged.values())))}
    batch = tokenized([*row_of])
    if batch.decision_index is not None:  # run all decisions between labels, not the answer's alone
        batch = tokenized([replace(prompt, answer=None) for prompt in row_of])
    labels = batch.whole_labels
    plan = plan_in_order(batch, run, n_tokens=CHECK_TOKENS)
    with start(run, model, batch, "task check", {}, plan=plan) as stream:
        checked = stream.map("check", lambda rows: {"scores": score(model, batch[rows])})
    found = batch.whole_scores(torch.from_numpy(checked["scores"]))
    rows: dict[Arrangement, list[int]] = {
        name: [row_of[prompt] for prompt in prompts_of] for name, prompts_of in arranged.items()
    }
    scores: dict[Arrangement, _Scores] = {
        name: _Scores(found[own], torch.tensor([labels.index(prompt.answer) for prompt in arranged[name]]))
        for name, own in rows.items()
    }
    last_shown: dict[Arrangement, Tensor] = {
        name: torch.tensor([labels.index(prompt.demonstrations[-1].label) for prompt in prompts_of])
        for name, prompts_of in arranged.items()
    }
    queries = [prompt.query for prompt in prompts]
    return _from_scores(scores, last_shown, queries, labels, active_edits(ModelView.of(model)))


def _from_scores(
    scores: Mapping[Arrangement, "_Scores"],
    last_shown: Mapping[Arrangement, Int[Tensor, " batch"]],
    queries: Sequence[str],
    labels: Sequence[str],
    edits: tuple[str, ...],
) -> TaskCheck:
    """Return what follows from the labels' scores in each arrangement, the labels shown last and the queries."""
    weights = weights_with_data(queries)

    def interval(draws: Draws, *, level: float = 0.95, bounds: tuple[float, float] | None = None) -> Interval:
        return percentile_interval(float(draws[0]), draws[1:], n_clusters=len(set(queries)), level=level, bounds=bounds)

    def aurocs(names: Sequence[Arrangement], label: Mapping[Arrangement, Tensor]) -> Float[np.ndarray, "draw label"]:
        joint = _Scores.joint([scores[name] for name in names])
        labels = torch.cat([label[name] for name in names])
        return label_aurocs(
            joint.log_probs, labels, choices=joint.choices, weights=np.tile(weights, len(names)) / len(names)
        )

    answers: dict[Arrangement, Tensor] = {name: one.answer for name, one in scores.items()}
    both: tuple[Arrangement, ...] = ("random", "exchanged")
    of_labels = aurocs(both, answers)
    preferences = _preferences(
        _Scores.joint([scores[name] for name in both]), answers["random"].repeat(2), np.tile(weights, 2) / 2
    )
    favorite = int(np.nanargmax(preferences[0]))
    predicted = torch.stack([(scores[name].predicted == favorite).double() for name in both]).mean(0)
    is_answer = torch.stack([(answers[name] == favorite).double() for name in both]).mean(0)
    n_possible = scores["random"].choices[:, favorite].double()
    of_original: dict[Arrangement, Tensor] = dict.fromkeys(both, answers["random"])
    effects: dict[Behavior, Draws] = {
        "learns": 2 * mean_aurocs(of_labels) - 1,
        "knows": 2 * mean_aurocs(aurocs(both, of_original)) - 1,
        "copies": 2 * mean_aurocs(aurocs(("order", "reorder"), last_shown)) - 1,
        "prefers": weights @ ((predicted - is_answer) / (n_possible - is_answer).mean()).numpy(),
    }
    intervals: dict[Behavior, Interval] = {
        name: interval(draws, level=EFFECT_LEVEL, bounds=(-1.0, 1.0)) for name, draws in effects.items()
    }
    return TaskCheck(
        n_prompts=len(queries),
        n_queries=len(set(queries)),
        accuracy={
            name: bootstrap_interval(one.correct, clusters=queries, bounds=(0.0, 1.0)) for name, one in scores.items()
        },
        auroc={name: interval(mean_aurocs(aurocs([name], answers)), bounds=(0.0, 1.0)) for name in scores},
        label_auroc={label: interval(of_labels[:, index], bounds=(0.0, 1.0)) for index, label in enumerate(labels)},
        effects=intervals,
        lesser=_lesser({name: effects[name] for name, one in intervals.items() if one.low > 0}, interval),
        favorite=labels[favorite],
        preference=interval(preferences[:, favorite]),
        last_label=float((last_shown["given"] == answers["given"]).double().mean()),
        one_label=float((answers["given"] == favorite).double().mean()),
        edits=edits,
    )


@dataclass(frozen=True)
class _Scores:
    """Log-probabilities of the labels after the prompts of an arrangement, with their answers and choices."""

    log_probs: Float[Tensor, "batch label"]
    answer: Int[Tensor, " batch"]

    @property
    def choices(self) -> Bool[Tensor, "batch label"]:
        """Which labels each prompt offers."""
        return self.log_probs > -torch.inf

    @classmethod
    def joint(cls, parts: Sequence["_Scores"]) -> "_Scores":
        """Return the scores of several arrangements, one after the other."""
        return cls(*(torch.cat([getattr(one, name) for one in parts]) for name in ("log_probs", "answer")))

    @property
    def predicted(self) -> Int[Tensor, " batch"]:
        """The index of the most probable of each prompt's own labels."""
        return most_probable(self.log_probs, self.choices)

    @property
    def correct(self) -> Float[Tensor, " batch"]:
        """1 where the answer is the most probable of the prompt's own labels, else 0."""
        return (self.predicted == self.answer).double()


def _preferences(
    scores: _Scores, original: Int[Tensor, " batch"], weights: Float[np.ndarray, "draw batch"]
) -> Float[np.ndarray, "draw label"]:
    """Return how far each label's mean log p is above that of a prompt's other labels, nats.

    It is the mean over four kinds of prompts: those that have the label as their answer and those that do not, each
    with it as the `original` answer, before labels were exchanged, or not. With K choices, having it counts 1/K, as if
    all labels were equally often either answer, so that neither learning nor knowing looks like a preference. Kinds
    that do not occur are left out.
    """
    log_probs, choices = scores.log_probs.double(), scores.choices
    n_choices = choices.sum(-1, keepdim=True)
    total = log_probs.masked_fill(~choices, 0).sum(-1, keepdim=True)
    above = (log_probs - (total - log_probs) / (n_choices - 1)).masked_fill(~choices, 0).numpy()
    labels = torch.arange(choices.shape[1])
    is_answer, is_original = ((label[:, None] == labels).numpy() for label in (scores.answer, original))
    possible = choices.numpy()
    summed, size = np.zeros((2, len(weights), len(labels)))
    with np.errstate(invalid="ignore"):
        share = (weights @ possible.astype(float)) / (weights @ (possible * n_choices.numpy()))  # 1/K
        for has, had in product((True, False), repeat=2):
            kind = possible & (is_answer == has) & (is_original == had)
            mean = (weights @ (above * kind)) / (weights @ kind.astype(float))
            of_kind = (share if has else 1 - share) * (share if had else 1 - share)
            summed += np.where(np.isnan(mean), 0, of_kind * mean)
            size += np.where(np.isnan(mean), 0, of_kind)
        return summed / size


def _lesser(effects: dict[Behavior, Draws], interval: Callable[[Draws], Interval]) -> tuple[Behavior, ...]:
    """Return the behaviors whose effect is smaller than the largest; see `TaskCheck.lesser`."""
    groups: list[list[Behavior]] = [[name for name in names if name in effects] for names in _COMPARED]
    totals = [(group, np.stack([effects[name] for name in group]).sum(0)) for group in groups if group]
    if not totals:
        return ()
    largest = max((total for _, total in totals), key=lambda total: float(total[0]))
    return tuple(name for group, total in totals if interval(largest - total).low > 0 for name in group)


def _number(share: Interval) -> str:
    """Return "0.98 (0.95–1.00)", without the parentheses if there is no interval, and "–" for NaN."""
    if math.isnan(share.value):
        return "–"
    return f"{share.value:.2f}" + ("" if math.isnan(share.low) else f" ({share.low:.2f}–{share.high:.2f})")


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
    "given": lambda prompt, seed: prompt,
    "random": _shuffle,
    "exchanged": _exchange_labels,
    "order": lambda prompt, seed: _sort_by_answer(prompt, seed, last=True),
    "reorder": lambda prompt, seed: _sort_by_answer(prompt, seed, last=False),
}
