"""Compare two models over many prompts by the scores of answers and heads, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.intervals import Interval, bootstrap_interval, mean_intervals
from icl_lens.foundation.ranking_scores import DIRECT_SCORES, SCORES, Score, choose_score
from icl_lens.measures.effects import head_effects
from icl_lens.measures.exchanges import SINGLE, single_exchanges, tower_prompts
from icl_lens.measures.head_findings import MODELS_NOTE
from icl_lens.measures.locate_result import score_definitions
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import CAPTURE_TOKENS
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import head_log_prob_increase
from icl_lens.result.base import Result
from icl_lens.result.number_format import percent, signed, signed_ends
from icl_lens.result.tables import intervals_note, plural_prompts
from icl_lens.result.view import Column, HeadValues, Section, View
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import plan_in_order, start

N_SHOWN = 12
"""Number of heads in the repr, on the page and in the terminal."""
MEASURES = ("accuracy", "log p", "log-odds")


@dataclass(frozen=True, repr=False, eq=False)
class ModelComparison(Result):
    """Scores of the same prompts by two models, A and B, returned by `compare_models`.

    `a` and `b` hold one value per prompt for "accuracy" (0 or 1, among the labels; see
    `compare_models`), "log p" of the answer and its "log-odds" against the other labels (nats), and
    [prompt layer head] for the heads' "contrast", "increase" and, if heads are ranked by it,
    "effect" or "exchange" (nats). Intervals are paired 95% bootstrap intervals over `queries`,
    because prompts with the same query are not independent; they are NaN for fewer than four
    queries.

    Example:
        >>> both = il.compare_models(model, model, il.load_task("sentiment-number", n=4))
        >>> both.summary().columns.tolist()
        ['measure', 'a', 'b', 'change', 'low', 'high']
    """

    version: ClassVar[int] = 2
    models: tuple[str, str]
    by: Score
    a: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]
    queries: tuple[str, ...]
    """The query of each prompt (`PromptBatch.queries`)."""
    edits: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """What edited A and B: the edits of open `with` blocks, and other hooks."""

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.a["log p"])

    @property
    def is_undecided(self) -> bool:
        """Whether the interval of the change of the log-odds includes zero or, for lack of queries,
        is missing.
        """
        change = self.summary().set_index("measure").loc["log-odds"]
        return Interval(*change[["change", "low", "high"]].tolist()).is_undecided

    @property
    def same_heads(self) -> bool:
        """Whether both models have as many layers and heads, so that heads can be compared."""
        return self.a["increase"].shape == self.b["increase"].shape

    def summary(self) -> pd.DataFrame:
        """Return means over prompts: measure, a, b, change, and the change's low and high ends."""
        rows = []
        for name in MEASURES:
            bounds = (-1.0, 1.0) if name == "accuracy" else None
            change = bootstrap_interval(
                self.b[name] - self.a[name], clusters=self.queries, bounds=bounds
            )
            rows.append((name, float(self.a[name].mean()), float(self.b[name].mean()), *change))
        return pd.DataFrame(rows, columns=["measure", "a", "b", "change", "low", "high"])

    def to_frame(self, by: Score | None = None) -> pd.DataFrame:
        """Return each head's mean score in A and B and its change, with a 95% interval, nats.

        The heads with the largest changes come first.

        Raise InputError if the models have different numbers of layers or heads, or for a score
        that was not computed.
        """
        by = by or self.by
        if not self.same_heads or by not in self.a:
            raise InputError(
                f"models must have the same (layers, heads) and scores of every head by {by!r}, "
                f"got {self.a['increase'].shape[1:]} and {self.b['increase'].shape[1:]} with "
                f"{', '.join(self.a)}"
            )
        a, b = self.a[by], self.b[by]
        heads = [Head(layer, head) for layer, head in np.ndindex(a.shape[1:])]
        layer, head = zip(*heads, strict=True)
        change, low, high = mean_intervals((b - a).reshape(len(a), -1), self.queries)
        frame = pd.DataFrame(
            {"name": list(map(str, heads)), "change": change, "low": low, "high": high}
        )
        frame = frame.assign(a=a.mean(0).ravel(), b=b.mean(0).ravel(), layer=layer, head=head)
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    @property
    def edits_notes(self) -> list[str]:
        """One sentence per edited model."""
        notes = []
        for name, edits in zip("AB", self.edits, strict=True):
            if edits:
                notes.append(edits_note(edits, f"Numbers of {name}"))
        return notes

    @property
    def shown_scores(self) -> list[Score]:
        """The scores to show heads by: the one that ranks them, the contrast and the increase."""
        scores: list[Score] = [self.by, *DIRECT_SCORES]
        return list(dict.fromkeys(scores))

    def to_view(self) -> View:
        """Return how both models answer, and the heads whose mean scores changed most."""
        shares = [percent(float(side["accuracy"].mean())) for side in (self.a, self.b)]
        title = f"A answers {shares[0]} of {self.n_prompts} prompts correctly, B {shares[1]}"
        a, b = self.models
        answered = (
            f"A ({a}) answers {shares[0]} of {self.n_prompts} prompts correctly, B ({b}) "
            f"{shares[1]}."
        )
        sentences = (answered, *self.edits_notes)
        sections = [self._answers_section()]
        if self.same_heads:
            sections += [self._changes_section(by) for by in self.shown_scores]
            notes = (score_definitions(self.shown_scores), MODELS_NOTE)
            sections[-1] = replace(sections[-1], notes=notes)
            sections.append(self._map_section(frozenset(str(row[0]) for row in sections[1].rows)))
        else:
            sections += [self._best_section("A", self.a), self._best_section("B", self.b)]
        return View(title, sentences, tuple(sections), about="A and B")

    def _answers_section(self) -> Section:
        columns = (
            Column("mean of", is_number=False),
            Column("A"),
            Column("B"),
            Column("change"),
            Column("95% interval"),
        )
        rows = []
        for measure in self.summary().to_dict("records"):
            name, scale, digits, format_value = measure["measure"], 1, 3, signed
            if name == "accuracy":
                name, scale, digits, format_value = "accuracy (change in points)", 100, 1, percent
            low, high = scale * measure["low"], scale * measure["high"]
            rows.append(
                (
                    name,
                    format_value(measure["a"]),
                    format_value(measure["b"]),
                    signed(scale * measure["change"], digits),
                    signed_ends(low, high, digits),
                )
            )
        n_queries = len(set(self.queries))
        return Section(
            f"Answers to {plural_prompts(self.n_prompts)}",
            "Means over prompts: accuracy among the labels, log p of the answer, and its log-odds "
            "against the other labels (nats).",
            columns,
            tuple(rows),
            notes=(
                "Accuracy: share of prompts whose answer is the most probable of their labels, or "
                "of all tokens where no demonstration shows it. Log p: of the answer. Log-odds: of "
                "the answer against the other labels. Change: B minus A.",
                intervals_note(
                    n_queries, f"95% intervals resample the {n_queries} queries, paired."
                ),
            ),
        )

    def _changes_section(self, by: Score) -> Section:
        columns = (
            Column("head", is_number=False),
            Column("A"),
            Column("B"),
            Column("change", has_bars=True),
            Column("95% interval"),
        )
        rows = []
        for head in self.to_frame(by).head(N_SHOWN).to_dict("records"):
            interval = signed_ends(head["low"], head["high"])
            rows.append((head["name"], head["a"], head["b"], head["change"], interval))
        return Section(
            f"Heads whose mean {by} changed most, nats",
            "Mean over prompts in A and B, and the change: blue if it is larger in B, orange if "
            "it is smaller.",
            columns,
            tuple(rows),
            n_rows=self.a[by][0].size,
        )

    def _map_section(self, marked: frozenset[str]) -> Section:
        """Return every head's change on a map with `marked` heads, and its scores in a figure."""
        changes = (self.b[self.by] - self.a[self.by]).mean(0)
        head_map = HeadValues(
            f"change of {self.by}, B minus A, nats",
            tuple(map(tuple, changes.tolist())),
            frozenset(Head.parse(name) for name in marked),
        )
        return Section(
            "Every head in A and B",
            f"Mean {self.by} of each head in A (across) and B (up), with the line of equal "
            "scores; below, its change, B minus A, by layer and head. The heads of the first "
            "table are ringed.",
            figure="heads",
            head_map=head_map,
        )

    def _best_section(self, name: str, side: Mapping[str, np.ndarray]) -> Section:
        """Return a side's heads with the largest mean scores."""
        means = side[self.by].mean(0)
        rows = []
        for index in np.argsort(-means, axis=None)[:N_SHOWN]:
            head = Head.from_index(int(index), means.shape[1])
            rows.append((str(head), float(means[head])))
        return Section(
            f"Best heads of {name}",
            "The models have different numbers of layers or heads, so their heads do not "
            "correspond.",
            (Column("head", is_number=False), Column(f"mean {self.by}, nats", has_bars=True)),
            tuple(rows),
        )


def compare_models(
    a: Any,
    b: Any,
    prompts: Sequence[Prompt],
    *,
    by: Score | None = None,
    template: Template | None = None,
    prepend_bos: bool | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    run: Run | None = None,
) -> ModelComparison:
    """Compare two models on the same prompts, for example a model before and after fine-tuning.

    Both models score each prompt's answer: whether it is the most probable label or, if no
    demonstration shows it, the most probable token of the vocabulary, log p(answer), and log
    p(answer) − log Σ p(other labels). The scores of each head are its contrast, its increase and,
    with `by="effect"`, the log-odds that the answer loses if the head is zeroed at the last
    position, or, with `by="exchange"`, those that it loses if the head's query there is exchanged
    (`il.locate`). `by` selects the score whose mean change ranks heads, by default the
    contrast. Intervals resample queries, because prompts with the same query are not independent.
    `template` and `prepend_bos` are those of `tokenize`. `run` says how the prompts run (see
    `Run`); the chunks of each model are in a folder of its own, "a" and "b".

    Raise InputError for fewer than two prompts, prompts without an answer, or an unknown `by`; with
    `by="exchange"`, also for prompts that do not demonstrate their answer and another label.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=4)
        >>> both = il.compare_models(model, model, prompts)
        >>> both.to_frame().columns.tolist()
        ['name', 'change', 'low', 'high', 'a', 'b', 'layer', 'head']
        >>> both.summary()["change"].tolist()
        [0.0, 0.0, 0.0]
    """
    by = choose_score(by, SCORES, comparable=True)
    if (
        not isinstance(prompts, Sequence)
        or len(prompts) < 2
        or any(getattr(prompt, "answer", None) is None for prompt in prompts)
    ):
        got = plural_prompts(len(prompts)) if isinstance(prompts, Sequence) else repr(prompts)
        raise InputError(
            f"prompts must be at least two prompts with answers, got {got}; use il.compare for one "
            "prompt"
        )
    tokenizing: dict[str, Any] = {"prepend_bos": prepend_bos}
    options: dict[str, Any] = {"final_norm": final_norm, "bias": bias}
    sides = []
    for side, model in zip("ab", (a, b), strict=True):
        batch = tokenize(model, prompts, template=template or Template(), **tokenizing)
        exchanged = tower_prompts(model, batch) if by == "exchange" else None

        def compute(
            numbers: list[int], model=model, batch=batch, exchanged=exchanged
        ) -> dict[str, Tensor]:
            rows = batch[numbers]
            acts, choices = capture(model, rows), rows.label_mask
            scores = acts.label_log_probs.cpu()
            against = rows.other_label_tokens
            measured = {
                "accuracy": _is_correct(acts),
                "log p": scores.gather(1, rows.answer.cpu()[:, None])[:, 0],
                "log-odds": label_log_odds(scores, rows.answer, choices=choices),
                "increase": head_log_prob_increase(acts, rows.answer_tokens, **options),
                "contrast": head_log_prob_increase(
                    acts, rows.answer_tokens, against=against, **options
                ),
            }
            if by == "effect":
                measured["effect"] = head_effects(model, rows).log_odds
            if exchanged is not None:
                lost, _ = single_exchanges(acts.view, exchanged.select(numbers), SINGLE[:1])
                measured["exchange"] = lost[:, 0]
            return {name: scores_of_rows.double() for name, scores_of_rows in measured.items()}

        plan = plan_in_order(batch, run, n_tokens=CAPTURE_TOKENS)
        named = {"measure": by, **options}
        run_of_side = as_run(run).step(side)
        with start(run_of_side, model, batch, "comparison", named, plan=plan) as stream:
            sides.append(stream.map("comparison", compute))
    queries = batch.queries
    views = ModelView.of(a), ModelView.of(b)
    names, edits = (views[0].name, views[1].name), (active_edits(views[0]), active_edits(views[1]))
    return ModelComparison(names, by, *sides, queries=queries, edits=edits)


def _is_correct(acts: Activations) -> Bool[Tensor, " batch"]:
    """Return whether each answer is the most probable label or, if it is its own word, token."""
    batch, readout = acts.batch, acts.readout.using(final_norm="frozen", bias=True)
    among = is_correct(acts.label_log_probs.cpu(), batch.answer, choices=batch.label_mask)
    over = readout.log_probs(acts.resid_final).argmax(-1).cpu() == batch.answer_tokens.cpu()
    return torch.where(
        torch.tensor([prompt.has_own_answer for prompt in batch.prompts]), over, among
    )
