"""Check whether a model does a task of pairs from its demonstrations, or by knowing or copying."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.analyses.task_check_base import Check, few_queries
from icl_lens.edits.score import score
from icl_lens.foundation.intervals import MIN_CLUSTERS, Interval, bootstrap_interval
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.passes.memory import CHECK_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.decision_rows import first_decisions
from icl_lens.prompts.prompt import Demonstration, Prompt
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

PairArrangement = Literal["given", "mismatched", "none"]
PairEffect = Literal["learns", "maps", "knows", "copies"]


@dataclass(frozen=True, repr=False)
class PairCheck(Check):
    """What a model does on prompts whose answers are words of their own; made by `task_check`.

    `accuracy` is the share of prompts after which the most probable token of the whole vocabulary
    is the answer's, 0 to 1: "given" of the prompts themselves, "mismatched" with the inputs
    exchanged between the demonstrations, so that none has its own output, while outputs stay in
    their places, and "none" of the queries without demonstrations.

    `effects` are four differences of shares, each zero for a model that shows only other behaviors,
    and for one that always says the same word:

    - `learns`: the accuracy of the given prompts minus that without demonstrations, over the
      prompts whose answer no demonstration shows. NaN if there are fewer than two.
    - `maps`: the accuracy of the given prompts minus that of mismatched ones: what the model takes
      from which output belongs to which input, and not from what outputs look like.
    - `knows`: the accuracy without demonstrations, minus the share of prompts with other queries
      whose answer the model's word is.
    - `copies`: the share of given prompts after which the most probable token is that of an output
      that the prompt shows and that is not the answer, minus the same share without demonstrations.

    `gained` is the accuracy of the given prompts minus that without demonstrations, over all
    prompts: learning, and copying of answers that demonstrations show.

    `behaviors` are those whose 95% interval is above zero. All intervals resample queries; they are
    NaN if all prompts have the same query.

    `copied` and `copied_last` are the shares of given prompts with another output of the prompt, or
    the last one, as the most probable token. Two baselines: the answer is among the outputs shown
    in a share of the prompts, `shown`, and the last one, `last_output`.

    Example:
        >>> smollm2 = il.load_model("smollm2-135m")  # doctest: +SKIP
        >>> arrows = il.Template("{text} -> {label}", "{text} ->", "\\n")  # doctest: +SKIP
        >>> prompts = il.load_task("antonyms", n=25, demonstrations=10)  # doctest: +SKIP
        >>> check = il.task_check(smollm2, prompts, template=arrows)  # doctest: +SKIP
        >>> check.accuracy["given"].value, check.does_task  # doctest: +SKIP
        (0.76, True)
    """

    version: ClassVar[int] = 2
    definitions: ClassVar[tuple[str, ...]] = (
        "Accuracy: share of prompts whose answer is the most probable of all tokens.",
        "Mismatched: the inputs exchanged between demonstrations. None: without these.",
        "Gained: given minus none. Learns: the same where the answer is not shown.",
        "Maps: given minus mismatched.",
        "Knows: none, beyond chance. Copies: other outputs of the prompt, beyond none.",
        "Output: a demonstration's answer. Shares of answers, baselines: of the prompts.",
    )

    n_prompts: int
    n_queries: int
    accuracy: dict[PairArrangement, Interval]
    effects: dict[PairEffect, Interval]
    gained: Interval
    copied: float
    copied_last: float
    shown: float
    last_output: float
    edits: tuple[str, ...] = ()
    """What edited the model: the edits of open `with` blocks, and other hooks."""

    @property
    def behaviors(self) -> tuple[PairEffect, ...]:
        """The behaviors whose effect has an interval above zero."""
        return tuple(name for name, effect in self.effects.items() if effect.low > 0)

    @property
    def does_task(self) -> bool:
        """Whether the model learns from the demonstrations.

        It does if they help where they do not show the answer. Where they do, it could be copied,
        and help must come with what they map: then which output belongs to which input must matter,
        too, and they must not harm where they do not show the answer.
        """
        if "learns" in self.behaviors:
            return True
        helps_by_mapping = self.gained.low > 0 and "maps" in self.behaviors
        return self.shown > 0 and helps_by_mapping and not self.effects["learns"].high < 0

    @property
    def learns_from_demonstrations(self) -> bool:
        return self.does_task

    @property
    def lacks_task(self) -> bool:
        does_task = self.does_task or "knows" in self.behaviors
        return self.n_queries >= MIN_CLUSTERS and not does_task

    @property
    def is_undecided(self) -> bool:
        if self.does_task:
            return False
        return self.effects["learns"].is_undecided or self.effects["maps"].is_undecided

    def sources_of_answers(self) -> list[str]:
        words: dict[PairEffect, str] = {
            "maps": "which output belongs to which input",
            "knows": "what the model knows without demonstrations",
            "copies": "the outputs that the prompt shows",
        }
        return [words[behavior] for behavior in self.behaviors if behavior in words]

    def to_frame(self) -> pd.DataFrame:
        """Return value, low and high, one row per effect, accuracy and share (no interval)."""
        rows = {f"{name}, share of answers": effect for name, effect in self.effects.items()}
        rows["gained, share of answers"] = self.gained
        rows |= {f"accuracy, {name}": interval for name, interval in self.accuracy.items()}
        shares = {
            "another output": self.copied,
            "the last output, wrongly": self.copied_last,
            "baseline, answer is shown": self.shown,
            "baseline, last output": self.last_output,
        }
        for name, share in shares.items():
            rows[name] = Interval(share, float("nan"), float("nan"))
        frames = {name: interval.to_frame() for name, interval in rows.items()}
        return pd.concat(frames, names=["measure"]).droplevel(1)

    def __str__(self) -> str:
        """Return a sentence on learning, one on each other behavior, and one on the baselines."""
        accuracy = self.accuracy["given"]
        interval = ""
        if not math.isnan(accuracy.low):
            interval = f" ({accuracy.low:.0%}–{accuracy.high:.0%})"
        right = (
            "the answer is the most probable token of the whole vocabulary in "
            f"{accuracy.value:.0%} of the {self.n_prompts} prompts{interval}, in "
            f"{self.accuracy['none'].value:.0%} without demonstrations and in "
            f"{self.accuracy['mismatched'].value:.0%} with their inputs exchanged"
        )
        if self.n_queries < MIN_CLUSTERS:
            few = few_queries(self.n_prompts, self.n_queries)
            sentences = [f"No verdict, because {few}: {right}."]
        elif self.does_task:
            sentences = [f"The model does the task from the demonstrations: {right}."]
        else:
            sentences = [f"The model is not shown to do the task from the demonstrations: {right}."]
        if "maps" in self.behaviors and self.does_task:
            sentences.append("It learns which output belongs to which input.")
        elif "maps" in self.behaviors:
            sentences.append(
                "Exchanging the inputs of the demonstrations makes it right less often."
            )
        elif self.does_task:
            sentences.append("Which output belongs to which input is not shown to matter.")
        if "knows" in self.behaviors:
            sentences.append("It knows answers without the demonstrations.")
        if "copies" in self.behaviors:
            sentences.append("It copies outputs of the demonstrations.")
        sentences.append(
            f"Another output of the prompt is the most probable token in {self.copied:.0%}, the "
            f"last one in {self.copied_last:.0%}; the answer is among the outputs shown in "
            f"{self.shown:.0%}, and the last one in {self.last_output:.0%}."
        )
        if self.edits:
            sentences.append(edits_note(self.edits))
        return " ".join(sentences)


def pair_check(
    model: Any,
    prompts: tuple[Prompt, ...],
    tokenized: Callable[[list[Prompt]], PromptBatch],
    run: Run | None,
) -> PairCheck:
    """Return the `PairCheck` of prompts with answers and two or more different outputs."""
    arranged: dict[PairArrangement, list[Prompt]] = {
        "given": list(prompts),
        "mismatched": [_mismatched(prompt) for prompt in prompts],
        "none": [_without_demonstrations(prompt) for prompt in prompts],
    }
    # A prompt that is the same in two arrangements runs once.
    distinct_prompts = dict.fromkeys(chain.from_iterable(arranged.values()))
    row_of = {prompt: row for row, prompt in enumerate(distinct_prompts)}
    batch = first_decisions(tokenized([*row_of]))
    plan = plan_in_order(batch, run, n_tokens=CHECK_TOKENS)

    def top_tokens(rows: list[int]) -> dict[str, Tensor]:
        tokens = score(
            model, batch[rows], [[]], read=lambda log_probs, _: log_probs.argmax(-1).double()
        )
        return {"top": tokens[:, 0].long()}

    with start(run, model, batch, "pair check", {}, plan=plan) as stream:
        top = torch.from_numpy(stream.map("check", top_tokens)["top"])
    predicted: dict[PairArrangement, Int[Tensor, " prompt"]] = {}
    for name, prompts_of_name in arranged.items():
        predicted[name] = top[[row_of[prompt] for prompt in prompts_of_name]]
    rows_as_given = [row_of[prompt] for prompt in prompts]
    answers = batch.answer_tokens.cpu()[rows_as_given]
    outputs = torch.where(batch.label_index < 0, -1, batch.label_tokens[batch.label_index])
    outputs = outputs.cpu()[rows_as_given]
    edits = active_edits(ModelView.of(model))
    return pair_check_of_tokens(prompts, predicted, answers, outputs, edits=edits)


def pair_check_of_tokens(
    prompts: Sequence[Prompt],
    predicted: dict[PairArrangement, Int[Tensor, " prompt"]],
    answers: Int[Tensor, " prompt"],
    outputs: Int[Tensor, "prompt demo"],
    *,
    edits: tuple[str, ...] = (),
) -> PairCheck:
    """Return what follows from the most probable token after each prompt.

    `outputs` are padded with -1.
    """
    queries = [prompt.query for prompt in prompts]
    correct: dict[PairArrangement, Float[Tensor, " prompt"]] = {
        name: (tokens == answers).double() for name, tokens in predicted.items()
    }
    accuracy = {}
    for name, is_correct in correct.items():
        accuracy[name] = bootstrap_interval(is_correct, clusters=queries, bounds=(0.0, 1.0))
    known = correct["none"] - _answer_share(predicted["none"], answers, queries)
    is_copied = _is_other_output(predicted["given"], answers, outputs)
    is_copy_anyway = _is_other_output(predicted["none"], answers, outputs)
    is_unshown = [prompt.has_own_answer for prompt in prompts]
    last = [len(prompt.demonstrations) - 1 for prompt in prompts]

    def effect(
        values: Float[Tensor, " prompt"], low: float, used: Sequence[bool] | None = None
    ) -> Interval:
        places = [place for place in range(len(queries)) if used is None or used[place]]
        if len(places) < 2:
            return Interval(math.nan, math.nan, math.nan)
        clusters = [queries[place] for place in places]
        return bootstrap_interval(values[places], clusters=clusters, bounds=(low, 1.0))

    return PairCheck(
        n_prompts=len(prompts),
        n_queries=len({*queries}),
        accuracy=accuracy,
        effects={
            "learns": effect(correct["given"] - correct["none"], -1.0, is_unshown),
            "maps": effect(correct["given"] - correct["mismatched"], -1.0),
            "knows": effect(known, -1.0),
            "copies": effect(is_copied.any(1).double() - is_copy_anyway.any(1).double(), -1.0),
        },
        gained=effect(correct["given"] - correct["none"], -1.0),
        copied=float(is_copied.any(1).double().mean()),
        copied_last=float(is_copied[range(len(last)), last].double().mean()),
        shown=fmean(not unshown for unshown in is_unshown),
        last_output=fmean(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts),
        edits=edits,
    )


def _answer_share(
    predicted: Int[Tensor, " prompt"], answers: Int[Tensor, " prompt"], queries: Sequence[str]
) -> Float[Tensor, " prompt"]:
    """Return the share of prompts with other queries whose answer is the token after a prompt."""
    places = [sorted({*queries}).index(query) for query in queries]
    is_other_query = torch.tensor(places)[:, None] != torch.tensor(places)
    is_answer = (predicted[:, None] == answers) & is_other_query
    return is_answer.sum(1).double() / is_other_query.sum(1).clamp(min=1)


def _is_other_output(
    predicted: Int[Tensor, " prompt"],
    answers: Int[Tensor, " prompt"],
    outputs: Int[Tensor, "prompt demo"],
) -> Bool[Tensor, "prompt demo"]:
    """Return which demonstrations have the predicted token, where it is not the answer."""
    return (outputs == predicted[:, None]) & (predicted != answers)[:, None]


def _without_demonstrations(prompt: Prompt) -> Prompt:
    return Prompt([], prompt.query, prompt.answer, prompt.labels, separator=prompt.separator)


def _mismatched(prompt: Prompt) -> Prompt:
    """Return the prompt with another demonstration's input before each output.

    It is the input of another output where there is one.
    """
    outputs = [demonstration.label for demonstration in prompt.demonstrations]
    order = sorted(range(len(outputs)), key=lambda place: outputs[place])
    shift = max(Counter(outputs).values())  # past all demonstrations with the same output
    source = dict(zip([*order[shift:], *order[:shift]], order, strict=True))
    moved = []
    for place, output in enumerate(outputs):
        moved.append(Demonstration(prompt.demonstrations[source[place]].text, output))
    return Prompt(moved, prompt.query, prompt.answer, prompt.labels, separator=prompt.separator)
