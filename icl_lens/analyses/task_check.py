"""Check whether a model learns a task, knows its labels, copies the last one or prefers one.

1. Each prompt runs in the order given and in four arrangements of its demonstrations
   (`arrangements`).
2. Each behavior is measured by one contrast of the labels' log-odds (`behavior_contrasts`). A
   contrast is zero for the other behaviors, so that a preference for a label, however strong, does
   not hide that a model learns.
3. A behavior is named if its interval lies above `SMALLEST_NATS`; each one gets a sentence.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.analyses.arrangements import ArrangedPrompt, Arrangement, arrange
from icl_lens.analyses.behavior_contrasts import Contrasts, Design, Effect, contrasts
from icl_lens.analyses.pair_check import PairCheck, pair_check
from icl_lens.analyses.task_check_base import Check, few_queries
from icl_lens.edits.score import score
from icl_lens.errors import InputError, check_integers, quoted_list
from icl_lens.foundation.intervals import (
    MIN_CLUSTERS,
    Interval,
    bootstrap_interval,
    leave_one_out_interval,
    leave_one_out_weights,
)
from icl_lens.metrics import label_aurocs, mean_aurocs, most_probable
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.passes.memory import CHECK_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts
from icl_lens.prompts.tasks import Task, named_task
from icl_lens.prompts.tokenize import tokenize
from icl_lens.result.number_format import joined, signed
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

PromptVariant = Literal["given", "last", "other", "original", "exchanged"]
Behavior = Literal[
    "learns",
    "contradicts",
    "knows",
    "misreads",
    "copies",
    "avoids",
    "first",
    "avoids first",
    "prefers",
]

N_PROMPTS = 60
MIN_PROMPTS = 20
# A behavior is named if its contrast is clearly larger than this: odds that change by more than a
# tenth.
SMALLEST_NATS = 0.1
# Confidence level of each of the five contrasts, so that all five intervals hold with 95%
# confidence (Bonferroni).
EFFECT_LEVEL = 1 - 0.05 / 5
# What a contrast is called if it is positive, and if it is negative.
BEHAVIORS: dict[Effect, tuple[Behavior, Behavior | None]] = {
    "learns": ("learns", "contradicts"),
    "knows": ("knows", "misreads"),
    "copies": ("copies", "avoids"),
    "first": ("first", "avoids first"),
    "prefers": ("prefers", None),
}
# The arrangements of each layout; "given" is the order of the prompts themselves.
ARRANGEMENTS: dict[PromptVariant, tuple[Arrangement, ...]] = {
    "last": ("last", "last, exchanged"),
    "other": ("other", "other, exchanged"),
    "original": ("last", "other"),
    "exchanged": ("last, exchanged", "other, exchanged"),
}


@dataclass(frozen=True, repr=False)
class TaskCheck(Check):
    """What a model does on prompts of a task; made by `task_check`. `print` shows a sentence for
    each behavior.

    Each prompt runs in the order given and in four arrangements: in an order in which a
    demonstration of the query's class is last, in the same order with the demonstrations of another
    class in their place, and in both with the labels of the two classes exchanged. In half of the
    prompts, all demonstrations of one of the two classes are last and all of the other one first;
    the others end with the class that they begin with. Four layouts have two of the arrangements
    each: in "last", the query's class is last; in "other", the other one is; in "original", labels
    are as they are; in "exchanged", they are exchanged.

    `effects` are five contrasts of labels' log-odds against another label, nats. Each is zero for a
    model that shows only other behaviors, with any number of labels:

    - `learns`: what a label gains if the demonstrations give it to the query's class. The model
      "learns" from the demonstrations, or, if it is negative, "contradicts" them.
    - `knows`: what the prompt's original label gains whatever the demonstrations show. The model
      "knows" the classes' words, or "misreads" them. NaN if it cannot be told from a preference,
      because all answers are the same.
    - `copies`: what a label gains when it is shown last. The model "copies" the last label, or
      "avoids" it. It grows with what the labels before the last one count, if these count more than
      earlier ones.
    - `first`: what a label gains when it is shown first. If it is negative, the model "avoids
      first". NaN if each class has one demonstration: `copies` then compares the last label with
      the first one.
    - `prefers`: what `favorite` gains in all arrangements; the label that gains most.

    `shares` are the same contrasts of the model's answers: 1 if all of them follow the behavior, 0
    if none does. `behaviors` names the behaviors whose effect is clearly larger than 0.1 nats: a
    change of the odds by a tenth.

    `accuracy` is the share of prompts, by layout, whose answer is more probable than their other
    labels, 0 to 1. A preference for one label lowers it. `auroc` is free of this: the probability
    that a label's log-odds against the prompt's other labels are larger where it is the answer than
    where it is not, averaged over labels; chance is ½. It has the given prompts and two layouts;
    `label_auroc` has each label, over the given prompts. Two baselines for the given prompts are
    the accuracy of always predicting the last label (`last_label`), and of always predicting
    `commonest`, the most frequent answer (`one_label`).

    The intervals of the five effects hold jointly with 95% confidence (each alone with 99%), and so
    do those of the shares. All intervals resample queries, since prompts with the same query are
    not independent. If there are fewer than four queries, there is no interval and no verdict:
    `behaviors` is empty.

    Source: docs/howto/task_check.md.

    Example:
        >>> check = il.task_check(model, "animal-country", n=40)
        >>> check.behaviors
        ('learns',)
        >>> check.accuracy["exchanged"].value > 0.7
        True
    """

    version: ClassVar[int] = 2
    definitions: ClassVar[tuple[str, ...]] = (
        "Nats: the log-odds that a label gains over another by the behavior: the one",
        "that the demonstrations give (learns), the original one (knows), the one shown",
        "last (copies) or first (first), or the favorite one (prefers).",
        "Share of answers: how many follow the behavior; below 0%, they do the opposite.",
        "Accuracy: share of prompts whose answer is the most probable of their labels.",
        "Last, other: the query's class, or another, is last. Exchanged: labels swapped.",
        "Given, original: the prompts' own order, or labels. Baseline: a fixed rule.",
        "AUROC: how often log-odds tell a right label from a wrong one; chance: 0.50.",
        "Intervals of nats and shares of answers: 99%, wider with more than two labels,",
        "so that all five behaviors hold together with 95%. The others: 95%.",
        "How shares and intervals are calculated: docs/howto/task_check.md.",
    )
    interval_name: ClassVar[str] = "interval"

    n_prompts: int
    n_queries: int
    n_labels: int
    """Number of labels of a prompt, the largest of all prompts."""
    effects: dict[Effect, Interval]
    shares: dict[Effect, Interval]
    accuracy: dict[PromptVariant, Interval]
    auroc: dict[PromptVariant, Interval]
    label_auroc: dict[str, Interval]
    favorite: str
    commonest: str
    last_label: float
    one_label: float
    edits: tuple[str, ...] = ()
    """What edited the model: the edits of open `with` blocks, and other hooks."""

    @property
    def behaviors(self) -> tuple[Behavior, ...]:
        """The behaviors whose effect is clearly larger than 0.1 nats, largest effect first."""
        names: list[tuple[float, Behavior]] = []
        for effect, interval in self.effects.items():
            positive, negative = BEHAVIORS[effect]
            if interval.low > SMALLEST_NATS:
                names.append((interval.value, positive))
            elif interval.high < -SMALLEST_NATS and negative is not None:
                names.append((-interval.value, negative))
        names.sort(key=lambda size_and_name: -size_and_name[0])
        return tuple(name for _, name in names)

    @property
    def learns_from_demonstrations(self) -> bool:
        return "learns" in self.behaviors

    @property
    def lacks_task(self) -> bool:
        return self.n_queries >= MIN_CLUSTERS and not self.tells_apart

    @property
    def is_undecided(self) -> bool:
        return self.effects["learns"].is_undecided

    def sources_of_answers(self) -> list[str]:
        words: dict[Behavior, str] = {
            "contradicts": "the demonstrations, which it contradicts",
            "knows": "the meaning of the labels",
            "misreads": "the meaning of the labels",
            "copies": "which label is last",
            "avoids": "which label is last",
            "first": "which label is first",
            "avoids first": "which label is first",
            "prefers": f"a preference for {self.favorite!r}",
        }
        return [words[behavior] for behavior in self.behaviors if behavior in words]

    @property
    def tells_apart(self) -> bool:
        """Whether the model learns from the demonstrations or knows the classes' words."""
        return bool({"learns", "knows"} & {*self.behaviors})

    def to_frame(self) -> pd.DataFrame:
        """Return value, low and high of effects, shares, accuracies, AUROCs and baselines.

        Baselines have no interval.
        """
        rows = {f"{effect}, nats": interval for effect, interval in self.effects.items()}
        for effect, interval in self.shares.items():
            rows[f"{effect}, share of answers"] = interval
        rows |= {f"accuracy, {layout}": interval for layout, interval in self.accuracy.items()}
        rows |= {f"AUROC, {layout}": interval for layout, interval in self.auroc.items()}
        for label, interval in self.label_auroc.items():
            rows[f"AUROC of {label!r}, given"] = interval
        baselines = {"last label": self.last_label, f"always {self.commonest!r}": self.one_label}
        for name, share in baselines.items():
            rows[f"baseline, {name}"] = Interval(share, float("nan"), float("nan"))
        frames = {name: interval.to_frame() for name, interval in rows.items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def __str__(self) -> str:
        """Return a sentence on learning, one on each other behavior, and one on accuracy."""
        if self.n_queries < MIN_CLUSTERS:
            effects = [f"{name} {_nats(effect)}" for name, effect in self.effects.items()]
            measured = joined(effects)
            sentences = [
                f"No verdict, because {few_queries(self.n_prompts, self.n_queries)}. Measured, "
                f"in nats: {measured}."
            ]
        else:
            sentences = [self._learning()]
            about = {
                "knows": self._words,
                "misreads": self._words,
                "copies": self._last_label,
                "avoids": self._last_label,
                "first": self._first_label,
                "avoids first": self._first_label,
                "prefers": self._preference,
            }
            sentences += [about[behavior]() for behavior in self.behaviors if behavior in about]
        accuracy = self.accuracy["given"]
        interval = ""
        if not math.isnan(accuracy.low):
            interval = f"{accuracy.low:.0%}–{accuracy.high:.0%}; "
        sentences.append(
            f"In the order given, the model answers {accuracy.value:.0%} of the check's "
            f"{self.n_prompts} prompts correctly ({interval}always the last label "
            f"{self.last_label:.0%}, always {self.commonest!r} {self.one_label:.0%})."
        )
        if self.edits:
            sentences.append(edits_note(self.edits))
        return " ".join(sentences)

    def _learning(self) -> str:
        effect = self.effects["learns"]
        gained = "the label that they give the query's class"
        if "learns" in self.behaviors:
            sentence = (
                f"The model learns from the demonstrations: {gained} gains {_nats(effect)} over "
                "another one"
            )
            if not self.shares["learns"].low > 0:
                sentence += ", although its answers do not clearly follow"
        elif "contradicts" in self.behaviors:
            lost = _nats(_negative(effect))
            sentence = (
                f"The model contradicts the demonstrations: {gained} loses {lost} to another one"
            )
        else:
            sentence = (
                f"The model is not shown to learn from the demonstrations: {gained} gains "
                f"{_nats(effect)}"
            )
            if effect.low > 0:
                sentence += f", not clearly more than {SMALLEST_NATS}"
        right = (
            f"{self.accuracy['original'].value:.0%} of answers follow them with the original labels"
        )
        return (
            f"{sentence}; {right}, and {self.accuracy['exchanged'].value:.0%} with exchanged "
            "labels."
        )

    def _words(self) -> str:
        effect = self.effects["knows"]
        if "knows" in self.behaviors:
            return (
                "It knows which class a label names: the original label gains "
                f"{_nats(effect)}, whatever the demonstrations show."
            )
        return (
            "It reads the classes' words against the original labels: these lose "
            f"{_nats(_negative(effect))}, whatever the demonstrations show."
        )

    def _last_label(self) -> str:
        effect, share = self.effects["copies"], self.shares["copies"]
        is_copied = "copies" in self.behaviors
        moved = f"gains {_nats(effect)}" if is_copied else f"loses {_nats(_negative(effect))}"
        compared = "last rather than first" if math.isnan(self.effects["first"].value) else "last"
        is_followed = share.low > 0 if is_copied else share.high < 0
        if is_followed:
            verb, follow = "copies" if is_copied else "avoids", ""
        else:
            verb = "leans toward" if is_copied else "leans away from"
            follow = ", but its answers do not clearly follow"
        return (
            f"It {verb} the last label: a label {moved} where it is shown {compared}{follow}; "
            f"{self.accuracy['last'].value:.0%} of answers are right where the query's class is "
            f"last, and {self.accuracy['other'].value:.0%} where another class is."
        )

    def _first_label(self) -> str:
        effect, share = self.effects["first"], self.shares["first"]
        is_copied = effect.value > 0
        moved = f"gains {_nats(effect)}" if is_copied else f"loses {_nats(_negative(effect))}"
        is_followed = share.low > 0 if is_copied else share.high < 0
        if is_followed:
            verb, follow = "copies" if is_copied else "avoids", ""
        else:
            verb = "leans toward" if is_copied else "leans away from"
            follow = ", but its answers do not clearly follow"
        return f"It {verb} the first label: a label {moved} where it is shown first{follow}."

    def _preference(self) -> str:
        nats = _nats(self.effects["prefers"])
        if math.isnan(self.effects["knows"].value):
            return (
                f"It prefers {self.favorite!r} or knows its word, which these prompts cannot tell "
                f"apart because each label is always the answer or never: it gains {nats}, "
                "whatever the demonstrations show."
            )
        return f"It prefers {self.favorite!r} by {nats}, whatever the query."


def task_check(
    model: Any,
    task: str | Path | Task | Sequence[Prompt],
    *,
    n: int | None = None,
    template: Template = DEFAULT_TEMPLATE,
    prepend_bos: bool | None = None,
    seed: int = 0,
    run: Run | None = None,
) -> TaskCheck | PairCheck:
    """Check whether a model learns a task, knows its labels, copies the last one or prefers one.

    `task` is a task (`WordTask`, `TextTask`, `PairTask`) or its name, of which `n` prompts
    (default: 60) are drawn, or prompts. With two classes per prompt, each label of a task is the
    answer equally often. Your own prompts should be balanced in the same way: if all answers are
    "foo", a model that prefers "foo" is always right.

    The model runs on the prompts in the order given and on four arrangements of their
    demonstrations: an order in which the query's class is last, the same order with the
    demonstrations of another class in their place, and both with the labels of these two classes
    exchanged, also as the answer. With more than two labels, the other class is that of the next
    demonstrated label. The two classes get as many demonstrations; what one of them has more is
    left out.

    See `TaskCheck` for what is computed from them. If any answer is a word of its own, which no
    demonstration shows, a `PairCheck` is returned instead: the model answers with any token of its
    vocabulary, also with inputs exchanged between demonstrations, and without demonstrations.
    `template` and `prepend_bos` are those of `il.tokenize`; `run` says how the prompts run (see
    `Run`).

    The model runs on at most five texts per prompt. Raise InputError for fewer than 20 prompts,
    prompts without an answer, and prompts whose demonstrations all have the same label.
    Source: docs/howto/task_check.md.

    Example:
        >>> il.task_check(model, "animal-country", n=40).behaviors
        ('learns',)
        >>> prompts = il.load_task("animal-country", n=40, labels=["yes", "no"])
        >>> il.task_check(model, prompts).favorite in ("yes", "no")
        True
    """
    (seed,) = check_integers(seed=seed)
    prompts = _prompts(task, n, seed)
    _check_prompts(prompts)
    tokenized = partial(tokenize, model, template=template, prepend_bos=prepend_bos)
    if any(prompt.has_own_answer for prompt in prompts):
        return pair_check(model, prompts, tokenized, run)
    arranged = [arrange(prompt, seed=seed) for prompt in prompts]
    all_prompts = [*prompts]
    for prompt in arranged:
        all_prompts += prompt.prompts.values()
    # A prompt that is the same in two arrangements runs once.
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(all_prompts))}
    batch = tokenized([*row_of])
    if batch.decisions.prompt_index is not None:
        # Run all decisions between labels, not the answer's alone.
        batch = tokenized([replace(prompt, answer=None) for prompt in row_of])
    labels = batch.decisions.whole_labels
    plan = plan_in_order(batch, run, n_tokens=CHECK_TOKENS)
    with start(run, model, batch, "task check", {}, plan=plan) as stream:
        checked = stream.map("check", lambda rows: {"scores": score(model, batch[rows])})
    scores = torch.from_numpy(checked["scores"])
    log_probs = batch.decisions.whole_scores(scores, batch.label_mask)

    def scores_of(prompts: Sequence[Prompt]) -> LabelLogProbs:
        answers = torch.tensor([labels.index(str(prompt.answer)) for prompt in prompts])
        return LabelLogProbs(log_probs[[row_of[prompt] for prompt in prompts]], answers)

    by_arrangement: dict[Arrangement, LabelLogProbs] = {}
    for name in get_args(Arrangement):
        by_arrangement[name] = scores_of([prompt.prompts[name] for prompt in arranged])
    edits = active_edits(ModelView.of(model))
    return task_check_of_scores(
        scores_of(prompts), by_arrangement, prompts, arranged, labels, edits=edits
    )


def _prompts(
    task: str | Path | Task | Sequence[Prompt], n: int | None, seed: int
) -> tuple[Prompt, ...]:
    """Return `n` prompts that are drawn from a task, or the prompts themselves."""
    if isinstance(task, str | Path | Task):
        drawn_from = task if isinstance(task, Task) else named_task(task)
        return tuple(drawn_from.prompts(N_PROMPTS if n is None else n, seed=seed))
    if n is not None:
        raise InputError(f"n must be None for a list of prompts, got {n}; remove it")
    return as_prompts(task)


@dataclass(frozen=True)
class LabelLogProbs:
    """Log-probabilities of labels after prompts, -inf for labels that a prompt does not offer."""

    log_probs: Float[Tensor, "prompt label"]
    answer: Int[Tensor, " prompt"]

    @property
    def choices(self) -> Bool[Tensor, "prompt label"]:
        """Which labels each prompt offers."""
        return self.log_probs > -torch.inf

    @property
    def predicted(self) -> Int[Tensor, " prompt"]:
        """The index of the most probable of each prompt's labels."""
        return most_probable(self.log_probs, self.choices)

    @property
    def is_correct(self) -> Float[Tensor, " prompt"]:
        """1 where the answer is the most probable of the prompt's labels, else 0."""
        return (self.predicted == self.answer).double()


def task_check_of_scores(
    as_given: LabelLogProbs,
    by_arrangement: dict[Arrangement, LabelLogProbs],
    prompts: Sequence[Prompt],
    arranged: Sequence[ArrangedPrompt],
    labels: Sequence[str],
    *,
    edits: tuple[str, ...] = (),
) -> TaskCheck:
    """Return what follows from the labels' scores in the given order and the arrangements."""
    queries = [prompt.query for prompt in prompts]
    choices = as_given.choices.numpy()
    design = Design(
        answer=np.array([labels.index(prompt.answer) for prompt in arranged]),
        partner=np.array([labels.index(prompt.partner) for prompt in arranged]),
        choices=choices,
        starts_as_it_ends=np.array([prompt.starts_as_it_ends for prompt in arranged]),
    )
    in_order = [by_arrangement[name] for name in get_args(Arrangement)]
    log_probs = np.stack([scores.log_probs.double().numpy() for scores in in_order])
    predicted = np.stack([np.eye(len(labels))[scores.predicted] for scores in in_order])
    of_scores = contrasts(np.where(choices, log_probs, 0.0), design)
    of_answers = contrasts(predicted, design)
    preferences = of_scores.prefers.mean(0)
    if np.isnan(preferences).all():
        preferences = predicted.mean((0, 1))
    favorite = int(np.nanargmax(preferences))
    n_answers = Counter(prompt.answer for prompt in prompts)
    commonest = max(labels, key=lambda label: (n_answers[label], label == labels[favorite]))

    by_layout: dict[PromptVariant, list[LabelLogProbs]] = {"given": [as_given]}
    for layout, names in ARRANGEMENTS.items():
        by_layout[layout] = [by_arrangement[name] for name in names]
    labelings: tuple[PromptVariant, ...] = ("given", "original", "exchanged")
    aurocs: dict[PromptVariant, _Aurocs] = {}
    for layout in labelings:
        aurocs[layout] = _Aurocs.of(by_layout[layout], queries)
    label_intervals = map(aurocs["given"].of_label, range(len(labels)))
    return TaskCheck(
        n_prompts=len(prompts),
        n_queries=len({*queries}),
        n_labels=int(choices.sum(1).max()),
        effects=_intervals(of_scores, favorite, queries, n_labels=len(labels)),
        shares=_intervals(of_answers, favorite, queries, n_labels=len(labels), bounds=(-1.0, 1.0)),
        accuracy=_accuracies(by_layout, queries),
        auroc={layout: auroc.mean() for layout, auroc in aurocs.items()},
        label_auroc=dict(zip(labels, label_intervals, strict=True)),
        favorite=labels[favorite],
        commonest=commonest,
        last_label=fmean(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts),
        one_label=n_answers[commonest] / len(prompts),
        edits=edits,
    )


def _accuracies(
    by_layout: dict[PromptVariant, list[LabelLogProbs]], queries: Sequence[str]
) -> dict[PromptVariant, Interval]:
    """Return the accuracy in each layout, a mean over its arrangements."""
    accuracies: dict[PromptVariant, Interval] = {}
    for layout, arrangements in by_layout.items():
        is_correct = torch.stack([scores.is_correct for scores in arrangements]).mean(0)
        accuracies[layout] = bootstrap_interval(is_correct, clusters=queries, bounds=(0.0, 1.0))
    return accuracies


def _intervals(
    values: Contrasts,
    favorite: int,
    queries: Sequence[str],
    *,
    n_labels: int,
    bounds: tuple[float, float] | None = None,
) -> dict[Effect, Interval]:
    """Return the interval of each contrast, that of the preference for the favorite label.

    The favorite is the label with the largest preference of `n_labels`. Its interval is as much
    wider as is needed for none of them to be called preferred more often by chance than one label
    would be.
    """
    by_effect: dict[Effect, Float[np.ndarray, " prompt"]] = {
        "learns": values.learns,
        "knows": values.knows,
        "copies": values.copies,
        "first": values.first,
        "prefers": values.prefers[:, favorite],
    }
    intervals: dict[Effect, Interval] = {}
    for effect, of_prompts in by_effect.items():
        level = 1 - (1 - EFFECT_LEVEL) * 2 / n_labels if effect == "prefers" else EFFECT_LEVEL
        if np.isnan(of_prompts).any():
            intervals[effect] = Interval(math.nan, math.nan, math.nan)
        else:
            intervals[effect] = bootstrap_interval(
                of_prompts, clusters=queries, level=level, bounds=bounds
            )
    return intervals


@dataclass(frozen=True)
class _Aurocs:
    """The AUROC of each label over all prompts, the first row, and without each query in turn."""

    values: Float[np.ndarray, "draw label"]
    queries: Sequence[str]

    @classmethod
    def of(cls, parts: Sequence[LabelLogProbs], queries: Sequence[str]) -> "_Aurocs":
        """Return the AUROCs of the answers over the prompts of several arrangements."""
        log_probs = torch.cat([part.log_probs for part in parts])
        answers = torch.cat([part.answer for part in parts])
        weights = np.tile(leave_one_out_weights(queries), len(parts)) / len(parts)
        choices = log_probs > -torch.inf
        return cls(label_aurocs(log_probs, answers, choices=choices, weights=weights), queries)

    def mean(self) -> Interval:
        """Return the mean over labels."""
        return leave_one_out_interval(mean_aurocs(self.values), self.queries, bounds=(0.0, 1.0))

    def of_label(self, index: int) -> Interval:
        """Return that of one label."""
        return leave_one_out_interval(self.values[:, index], self.queries, bounds=(0.0, 1.0))


def _nats(interval: Interval) -> str:
    """Return "3.24 nats (2.91 … 3.57)", without the parentheses if there is no interval."""
    value, low, high = (signed(number, 2).removeprefix("+") for number in interval)
    if math.isnan(interval.value):
        return "–"
    return f"{value} nats" if math.isnan(interval.low) else f"{value} nats ({low} … {high})"


def _negative(interval: Interval) -> Interval:
    return Interval(-interval.value, -interval.high, -interval.low)


def _check_prompts(prompts: tuple[Prompt, ...]) -> None:
    if len(prompts) < MIN_PROMPTS:
        raise InputError(
            f"task must have at least {MIN_PROMPTS} prompts, got {len(prompts)}; draw more"
        )
    for row, prompt in enumerate(prompts):
        if prompt.answer is None:
            raise InputError(f"prompt {row} must have an answer, got None; pass answer= to Prompt")
        labels = tuple({demo.label: None for demo in prompt.demonstrations})
        if len(labels) < 2:
            raise InputError(
                f"prompt {row} must have demonstrations with at least two labels, got "
                f"{quoted_list(labels)}; add some"
            )
