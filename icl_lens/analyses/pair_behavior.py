"""Check whether a model does a task of pairs, next to what it does without demonstrations and by copying outputs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.analyses.check import Check
from icl_lens.engine.score import score
from icl_lens.intervals import Interval, bootstrap_interval
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.memory import CHECK_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Demonstration, Prompt
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

PairArrangement = Literal["given", "mismatched", "none"]


@dataclass(frozen=True, repr=False)
class PairCheck(Check):
    """What a model does on prompts whose answers are words of their own; made by `task_check`.

    `accuracy` is the share of prompts after which the most probable token of the whole vocabulary is the answer's, 0 to
    1: "given" of the prompts as they are, "mismatched" with the outputs exchanged between the demonstrations, so that
    none has its own, and "none" of the queries without demonstrations. `gain` is the accuracy of the prompts minus that
    without demonstrations, and `mapping` minus that of mismatched demonstrations: what the model takes from which
    output belongs to which input, and not from what outputs look like. All have 95% intervals, which resample queries;
    they are NaN if all prompts have the same query.

    `copied` is the share of prompts after which the most probable token is that of an output that the prompt shows and
    that is not the answer, and `copied_last` that of the last one. Two baselines: the answer is among the outputs shown
    in a share of the prompts, `shown`, and the last one, `last_output`.

    Example:
        >>> smollm2 = il.load_model("smollm2-135m")  # doctest: +SKIP
        >>> arrows = il.Template("{text} -> {label}", "{text} ->", "\\n")  # doctest: +SKIP
        >>> prompts = il.load_task("antonyms", n=25, demonstrations=10)  # doctest: +SKIP
        >>> check = il.task_check(smollm2, prompts, template=arrows)  # doctest: +SKIP
        >>> check.accuracy["given"].value, check.accuracy["none"].value, check.does_task  # doctest: +SKIP
        (0.76, 0.0, True)
    """

    n_prompts: int
    n_queries: int
    accuracy: dict[PairArrangement, Interval]
    gain: Interval
    mapping: Interval
    copied: float
    copied_last: float
    shown: float
    last_output: float
    edits: tuple[str, ...] = ()
    """What edited the model: the edits of open `with` blocks, and other hooks."""

    @property
    def does_task(self) -> bool:
        """Whether the model clearly does better with the demonstrations than without, and than the last output."""
        return self.gain.low > 0 and self.accuracy["given"].low > self.last_output

    def to_frame(self) -> pd.DataFrame:
        """Return value, low and high, one row per accuracy, difference of accuracies and share (no interval)."""
        rows = {f"accuracy, {name}": one for name, one in self.accuracy.items()}
        rows |= {"gain by demonstrations": self.gain, "gain by their mapping": self.mapping}
        shares = {"another output": self.copied, "the last output, wrongly": self.copied_last}
        shares |= {"baseline, answer is shown": self.shown, "baseline, last output": self.last_output}
        rows |= {name: Interval(share, float("nan"), float("nan")) for name, share in shares.items()}
        frames = {name: interval.to_frame() for name, interval in rows.items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def __str__(self) -> str:
        """Return whether the model does the task, its accuracies, and how often it copies."""
        given, mismatched, none = self.accuracy["given"], self.accuracy["mismatched"], self.accuracy["none"]
        interval = "" if given.low != given.low else f" ({given.low:.0%}–{given.high:.0%})"
        if self.n_queries < 2:
            verdict = "No verdict, because all prompts have the same query"
        elif self.does_task:
            verdict = "The model does the task from the demonstrations"
            verdict += "" if self.mapping.low > 0 else ", but not clearly worse with their outputs exchanged"
        elif none.low > self.last_output:
            verdict = "The model does the task, but not clearly better than without demonstrations"
        else:
            verdict = "The model cannot do the task, as far as these prompts show"
        return (
            f"{verdict}. The answer is the most probable token of the whole vocabulary in {given.value:.0%} of the "
            f"{self.n_prompts} prompts{interval}, in {none.value:.0%} without demonstrations and in "
            f"{mismatched.value:.0%} with their outputs exchanged; another output of the prompt is in "
            f"{self.copied:.0%}, the last one in {self.copied_last:.0%}. The answer is among the outputs shown in "
            f"{self.shown:.0%}, and the last one in {self.last_output:.0%}."
            + (f" {edits_note(self.edits)}" if self.edits else "")
        )


def check_pairs(
    model: Any, prompts: tuple[Prompt, ...], tokenized: Callable[[list[Prompt]], PromptBatch], run: Run | None
) -> PairCheck:
    """Return the check of prompts with answers, at least two different outputs each; see `PairCheck`."""
    arranged: dict[PairArrangement, list[Prompt]] = {
        "given": list(prompts),
        "mismatched": [_mismatched(prompt) for prompt in prompts],
        "none": [Prompt([], prompt.query, prompt.answer, prompt.labels) for prompt in prompts],
    }
    # A prompt that is the same in two arrangements runs once.
    row_of = {prompt: row for row, prompt in enumerate(dict.fromkeys(chain.from_iterable(arranged.values())))}
    batch = tokenized([*row_of]).first_decisions()
    plan = plan_in_order(batch, run, n_tokens=CHECK_TOKENS)

    def top_tokens(rows: list[int]) -> dict[str, Tensor]:
        found = score(model, batch[rows], [[]], read=lambda log_probs, _: log_probs.argmax(-1).double())
        return {"top": found[:, 0].long()}

    with start(run, model, batch, "pair check", {}, plan=plan) as stream:
        top = torch.from_numpy(stream.map("check", top_tokens)["top"])
    is_answer = (top == batch.answer_tokens.cpu()).double()
    correct: dict[PairArrangement, Float[Tensor, " prompt"]] = {
        name: is_answer[[row_of[prompt] for prompt in own]] for name, own in arranged.items()
    }
    given = [row_of[prompt] for prompt in prompts]
    outputs = torch.where(batch.label_index < 0, -1, batch.label_tokens[batch.label_index]).cpu()[given]
    is_copied = (outputs == top[given][:, None]) & (correct["given"] == 0)[:, None]
    last = [len(prompt.demonstrations) - 1 for prompt in prompts]
    queries = [prompt.query for prompt in prompts]

    def interval(values: Float[Tensor, " prompt"], low: float) -> Interval:
        return bootstrap_interval(values, clusters=queries, bounds=(low, 1.0))

    return PairCheck(
        n_prompts=len(prompts),
        n_queries=len(set(queries)),
        accuracy={name: interval(values, 0.0) for name, values in correct.items()},
        gain=interval(correct["given"] - correct["none"], -1.0),
        mapping=interval(correct["given"] - correct["mismatched"], -1.0),
        copied=float(is_copied.any(1).double().mean()),
        copied_last=float(is_copied[range(len(last)), last].double().mean()),
        shown=fmean(not prompt.has_own_answer for prompt in prompts),
        last_output=fmean(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts),
        edits=active_edits(ModelView.of(model)),
    )


def _mismatched(prompt: Prompt) -> Prompt:
    """Return the prompt with another demonstration's output after each input, of another word where there is one."""
    outputs = [one.label for one in prompt.demonstrations]
    order = sorted(range(len(outputs)), key=lambda place: outputs[place])
    shift = max(Counter(outputs).values())  # past all demonstrations with the same output
    moved = dict(zip(order, [*order[shift:], *order[:shift]], strict=True))
    shown = [Demonstration(one.text, outputs[moved[place]]) for place, one in enumerate(prompt.demonstrations)]
    return Prompt(shown, prompt.query, prompt.answer, prompt.labels)
