"""`il.head_atlas`: measure all scores of all heads of a model.

1. Scores of weights, of random repeated tokens and of texts need no prompts.
2. The scores of `il.locate` and those of `task_scores` run over the prompts, as `run` says.
3. What a model or the prompts cannot have is left out, with the reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from icl_lens.analyses.atlas import token_scores, weight_scores
from icl_lens.analyses.atlas.definitions import (
    DEFINITIONS,
    TASK_SCORES,
    TEXT_SCORES,
    UNITS_OF_SHARES,
)
from icl_lens.analyses.atlas.head_atlas_result import N_FIRST, NO_HEADS, HeadAtlas, ordered
from icl_lens.analyses.atlas.head_score import AttentionElsewhere, HeadScore
from icl_lens.analyses.atlas.kinds import (
    N_TURNS,
    PROMPT_KINDS,
    RATE,
    TURNED_KINDS,
    average_head_p_values,
    copying_p_values,
    discoveries,
    queries_needed,
    turned_p_values,
)
from icl_lens.analyses.atlas.task_scores import ReadScores, has_labels, with_shuffled_labels
from icl_lens.analyses.atlas.turned_heads import N_TURNED_SEQUENCES, turned_attention
from icl_lens.edits.ablate import Ablate
from icl_lens.edits.reference_prompts import mean_z
from icl_lens.errors import InputError, check_at_least, check_integers
from icl_lens.foundation.defaults import N_LOCATED, N_RANDOM_SETS_PER_GROUP
from icl_lens.foundation.intervals import MIN_RANDOM_SETS
from icl_lens.measures.effects import log_odds_lost
from icl_lens.measures.exchanges import tower_prompts
from icl_lens.measures.function_vectors import recovered_probabilities
from icl_lens.measures.head_measures import (
    DirectMeasure,
    EffectMeasure,
    ExchangeMeasure,
    HeadMeasure,
)
from icl_lens.measures.joint_removal import ListRemoval, remove_lists
from icl_lens.measures.ranking_means import SHARE_LIMITS, mean_score
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, count_prompts, prompts_digest
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize, tokenizer_like
from icl_lens.reading.repeated_tokens import (
    ATTENTION_SCORES,
    N_SEQUENCES,
    N_TOKENS,
    repeated_sequences,
    repeated_token_attention,
)
from icl_lens.reading.scored_tokens import AnswerTokens, choose_tokens
from icl_lens.reading.similarity import check_similarity
from icl_lens.runs.folder import FolderError
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import Plan, plan_batches, start

NEEDS_PROMPTS = "it needs prompts of an in-context task"
NEEDS_DEMONSTRATIONS = "it needs prompts with demonstrations"

N_EDITED = 24
"""Prompts on which heads are edited one by one, unless `n_edited` is given."""

Values = Float[np.ndarray, "sample layer head"]


def head_atlas(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt] | None = None,
    *,
    text: Sequence[str] | None = None,
    heads: Iterable[AnyHead] | None = None,
    k: int | None = None,
    n_sequences: int = N_SEQUENCES,
    n_edited: int = N_EDITED,
    held_out: PromptBatch | Sequence[Prompt] | None = None,
    n_random: int = N_RANDOM_SETS_PER_GROUP,
    seed: int = 0,
    run: Run | None = None,
) -> HeadAtlas:
    """Measure every head of a model by the scores that papers use.

    Without prompts, these are scores of weights, of attention to random tokens shown twice
    (`n_sequences` sequences), and of attention to texts (`text`; by default short English ones).
    With `prompts` of an in-context task, they are also what each head adds to the answer, what
    zeroing it or exchanging its query, keys or values costs, its function-vector effect, and its
    attention to labels. docs/howto/atlas.md has all scores with their units, sources and costs.

    Scores for which each head is edited alone (`effect`, `exchange`, `keys`, `values` and
    `indirect_effect`) run one token for each head and prompt. They are measured on the first
    `n_edited` prompts (default: 24); `atlas[name].n` is the number of prompts of each score.

    On `held_out` prompts, which should have other queries (`il.split_by_query`), the first `k` heads
    by each score, at most half of the model's, are zeroed jointly at the last position, beside
    `n_random` random sets of heads of the same layers: `removal_frame` says what the answer loses.
    As many of these prompts are used as heads are edited on.

    With `heads`, such as those that `il.locate` has found, what is shown begins with them: their
    kinds, scores and ranks, and why they have no kind (`HeadAtlas.for_heads`). All heads are
    measured all the same, because a kind compares a head with the others.

    Scores that the model or the prompts cannot have are left out; `left_out` says why. Intervals
    are 95% intervals over sequences, texts or queries. `selected` is the share of draws of these
    in which the head is among the first `k` (default: 12, or all if fewer); a table lists the first
    `k` of each score, by default three. `seed` draws random
    tokens and shuffles labels. `run` says how the prompts run; its folder has a folder for each
    score, so that an interrupted call resumes.

    Raise InputError for unknown `heads`, for invalid `text`, `k`, `n_sequences`, `n_edited`, `n_random` or `seed`, for
    scores that are not finite, for held-out prompts without `prompts` or without answers, and like
    `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> atlas = il.head_atlas(model, many, n_sequences=8)
        >>> atlas["contrast"].n, atlas["contrast"].unit
        (20, 'nats')
        >>> atlas.to_frame().columns.tolist()[:4]
        ['name', 'kinds', 'previous_token', 'duplicate_token']
    """
    view = ModelView.of(model)
    n_heads = len(view.heads())
    asked_heads = _checked_heads(view, heads)
    n_listed = N_FIRST if k is None else min(check_at_least(1, k=k)[0], n_heads)
    (k,) = check_at_least(1, k=N_LOCATED if k is None else k)
    k = min(k, n_heads)
    n_sequences, n_edited = check_at_least(1, n_sequences=n_sequences, n_edited=n_edited)
    (seed,) = check_integers(seed=seed)
    (n_random,) = check_at_least(MIN_RANDOM_SETS, n_random=n_random)
    run = as_run(run)
    batch, n_prompts_edited = None, 0
    if prompts is not None:
        batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
        check_batch(batch)
    testing = _checked_held_out(model, batch, held_out, n_edited)
    survey = Survey(view, k, seed)
    survey.measure_without_task(n_sequences, text)
    if batch is None:
        survey.leave_out(TASK_SCORES, NEEDS_PROMPTS)
    else:
        edited_rows = list(range(min(n_edited, len(batch))))
        n_prompts_edited = count_prompts(batch[edited_rows])
        survey.measure_task(batch, edited_rows, run)
    scores = ordered(survey.scores, tuple(DEFINITIONS))
    queries = set() if batch is None else set(batch.queries)
    removals: dict[str, ListRemoval] = {}
    if testing is not None:
        n_removed = min(k, n_heads // 2)  # random sets need as many other heads
        first_heads = {name: score.top(n_removed) for name, score in scores.items()}
        removals = remove_lists(
            view, testing, first_heads, n_random=n_random, seed=seed, run=run.step("removal")
        )
    return HeadAtlas(
        model=view.name,
        scores=scores,
        left_out={name: survey.left_out[name] for name in DEFINITIONS if name in survey.left_out},
        untested=survey.untested,
        k=k,
        n_prompts=0 if batch is None else count_prompts(batch),
        n_queries=len(queries),
        n_edited=n_prompts_edited,
        removals=removals,
        n_held_out=0 if testing is None else count_prompts(testing),
        n_shared_queries=0 if testing is None else len(queries.intersection(testing.queries)),
        heads=asked_heads,
        n_listed=n_listed,
        edits=active_edits(view),
    )


def _checked_heads(view: ModelView, heads: Iterable[AnyHead] | None) -> tuple[Head, ...]:
    """Return the heads that are asked about, none for None; raise InputError if there is none."""
    if heads is None:
        return ()
    checked = view.check_heads(heads)
    if not checked:
        raise InputError(NO_HEADS)
    return checked


def _checked_held_out(
    model: Any,
    batch: PromptBatch | None,
    held_out: PromptBatch | Sequence[Prompt] | None,
    n_tested: int,
) -> PromptBatch | None:
    """Return the held-out prompts that are used; raise InputError for prompts that cannot be."""
    if held_out is None:
        return None
    if batch is None:
        raise InputError(
            "held_out must be omitted without prompts; pass prompts of the same task as well"
        )
    testing = held_out if isinstance(held_out, PromptBatch) else tokenize(model, held_out)
    check_batch(testing)
    testing = testing[list(range(min(n_tested, len(testing))))]
    if bool((testing.answer < 0).any()):
        raise InputError("held_out prompts must have answers, to see what the answer loses")
    return testing


@dataclass(eq=False)
class Survey:
    """The scores of a model that have been measured, and those that could not be."""

    view: ModelView
    k: int
    seed: int
    scores: dict[str, HeadScore] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    """Kinds that could not be tested, and why."""

    def leave_out(self, names: Sequence[str], reason: str) -> None:
        """Remember why scores are left out."""
        for name in names:
            self.left_out[name] = reason

    def attempt(
        self,
        names: Sequence[str],
        measure: Callable[[], Mapping[str, Values]],
        samples: Sequence[str] | None = None,
    ) -> None:
        """Measure scores and add their means; leave them out, with the reason, if the model or the
        prompts cannot have them.
        """
        try:
            values_by_name = measure()
        except FolderError:
            raise
        except InputError as error:
            self.leave_out(names, str(error))
            return
        for name in names:
            self.add(name, values_by_name[name], samples)

    def add(self, name: str, values: Values, samples: Sequence[str] | None = None) -> None:
        """Add the means of a score; `samples` names the query of each row, by default each row is a
        sample of its own. Raise InputError for means that are not finite.
        """
        samples = list(map(str, range(len(values)))) if samples is None else samples
        rows_with_score = [row for row, scores in enumerate(values) if not np.isnan(scores).all()]
        n_samples = len(rows_with_score)
        if n_samples == 0:
            self.leave_out([name], "no prompt has what it needs")
            return
        limits = SHARE_LIMITS if DEFINITIONS[name].unit in UNITS_OF_SHARES else None
        mean = mean_score(name, values, samples, self.k, limits=limits)
        self.scores[name] = HeadScore.of(
            DEFINITIONS[name],
            mean.mean,
            low=mean.low,
            high=mean.high,
            selected=mean.selected,
            n=n_samples,
        )
        if name in PROMPT_KINDS:
            n_queries = len({samples[row] for row in rows_with_score})
            self._add_kind_by_prompts(
                name, average_head_p_values(values, samples, self.seed), n_queries
            )

    def _add_kind_by_prompts(
        self, name: str, p_value: Float[Tensor, "layer head"] | None, n_queries: int
    ) -> None:
        """Add the p-values of a score of prompts, or say that they have too few queries: so few
        that no single head could have the kind, and that no several heads have it together.
        """
        kind = PROMPT_KINDS[name]
        n_needed = queries_needed(self.scores[name].mean.numel())
        has_any_head = p_value is not None and bool(discoveries(p_value, RATE).any())
        if p_value is not None and (n_queries >= n_needed or has_any_head):
            self._add_kind(name, kind, p_value)
        elif n_queries < n_needed:
            reason = f"they need {n_needed} prompts with distinct queries, and got {n_queries}"
            self.untested[kind] = reason

    def _add_kind(self, name: str, kind: str, p_value: Float[Tensor, "layer head"]) -> None:
        """Add the kind of a score, and the p-values that decide which heads have it."""
        self.scores[name] = replace(self.scores[name], kind=kind, p_value=p_value)

    def measure_without_task(self, n_sequences: int, text: Sequence[str] | None) -> None:
        """Measure the scores of weights, random tokens and texts."""
        n_tokens = min(N_TOKENS, self.view.model.cfg.n_ctx // 2 - 2)
        self.attempt(ATTENTION_SCORES, lambda: self._random_tokens(n_tokens, n_sequences))
        if set(ATTENTION_SCORES) <= set(self.scores):
            self._add_kinds_by_attention(n_tokens, n_sequences)
        if text is None:
            self.attempt(TEXT_SCORES, lambda: self._texts(token_scores.TEXTS))
        else:
            for name, values in self._texts(text).items():
                self.add(name, values)
        self._weights()

    def _random_tokens(self, n_tokens: int, n_sequences: int) -> dict[str, Values]:
        attention = repeated_token_attention(
            self.view.model, n=n_sequences, n_tokens=n_tokens, seed=self.seed
        )
        return {name: values.numpy() for name, values in attention.items()}

    def _add_kinds_by_attention(self, n_tokens: int, n_sequences: int) -> None:
        """Compare attention to random tokens with that of turned heads."""
        n_turned = min(n_sequences, N_TURNED_SEQUENCES)
        options = {"n": n_turned, "n_tokens": n_tokens, "seed": self.seed}
        sequences = repeated_sequences(self.view.model, **options)
        try:
            turned, by_distance = turned_attention(
                self.view, sequences, n_tokens, N_TURNS, self.seed
            )
        except InputError as error:
            for name in ("previous_token", "duplicate_token", "induction", "first_token"):
                self.untested[TURNED_KINDS[name]] = str(error)
            return
        turned_by_name: dict[str, Tensor] = {}
        for name, turned_score in zip(ATTENTION_SCORES, turned.unbind(-1), strict=True):
            turned_by_name[name] = turned_score
        distances = {"previous_token": 1, "duplicate_token": n_tokens, "induction": n_tokens - 1}
        for name, distance in distances.items():
            by_other_distance = by_distance.clone()
            by_other_distance[..., distance] = 0.0
            elsewhere = AttentionElsewhere(*by_other_distance.max(-1), n_tokens)
            self._add_kind_by_turning(name, turned_by_name[name], elsewhere)
        elsewhere = AttentionElsewhere(*by_distance.max(-1), n_tokens)
        self._add_kind_by_turning("first_token", turned_by_name["first_token"], elsewhere)

    def _add_kind_by_turning(
        self,
        name: str,
        turned: Float[Tensor, "turn layer head"],
        elsewhere: AttentionElsewhere,
    ) -> None:
        """Add the p-values of a score; heads that attend more to another token have 1."""
        p_value = turned_p_values(self.scores[name].mean, turned)
        attends_most = self.scores[name].mean > elsewhere.share
        self._add_kind(name, TURNED_KINDS[name], p_value.masked_fill(~attends_most, 1.0))
        self.scores[name] = replace(self.scores[name], elsewhere=elsewhere)

    def _texts(self, texts: Sequence[str]) -> dict[str, Values]:
        batch = token_scores.tokenized_texts(self.view, texts)
        scores = token_scores.text_scores(self.view, batch)
        return {name: values.numpy() for name, values in scores.items()}

    def _weights(self) -> None:
        circuits = weight_scores.small_circuits(self.view)
        copying = weight_scores.copying_scores(circuits)
        self.scores["copying"] = HeadScore.of(DEFINITIONS["copying"], copying)
        is_promoted = weight_scores.promotes_attended(self.view, self.seed)
        self.add("promotes_attended", is_promoted.double().numpy())
        self._add_kind("promotes_attended", "copying", copying_p_values(is_promoted))

    def measure_task(self, batch: PromptBatch, edited_rows: list[int], run: Run) -> None:
        """Measure the scores of prompts; those that edit heads, on some of the prompts only."""
        tokens = AnswerTokens.from_batch(self.view, batch, None, None)
        self._read(batch, tokens, run)
        edited, edited_tokens = batch[edited_rows], tokens.select(edited_rows)
        queries = edited.queries
        self.attempt(["effect"], lambda: self._effects(edited, edited_tokens, run), queries)
        exchanged = ("exchange", "keys", "values")
        self.attempt(exchanged, lambda: self._exchanges(edited, run), queries)
        if has_labels(batch):
            self.attempt(["indirect_effect"], lambda: self._indirect_effects(edited, run), queries)
        else:
            self.leave_out(["indirect_effect"], NEEDS_DEMONSTRATIONS)

    def _read(self, batch: PromptBatch, tokens: AnswerTokens, run: Run) -> None:
        """Measure the scores that need no edited pass."""
        names, against, has_similarity = ["increase"], None, False
        if tokens.against is None:
            self.leave_out(["contrast"], "the prompts have no other labels to compare with")
        else:
            try:
                _, _, against = choose_tokens(self.view, batch, "contrast", None, None)
                names.append("contrast")
            except InputError as error:
                self.leave_out(["contrast"], str(error))
        of_labels = [name for name in TASK_SCORES if "label" in name or "task" in name]
        if has_labels(batch):
            names += of_labels
            try:
                longest = int(batch.last.argmax())
                check_similarity(self.view, batch[[longest]])
                has_similarity = True
                names.append("similarity")
            except InputError as error:
                self.leave_out(["similarity"], str(error))
        else:
            self.leave_out([*of_labels, "similarity"], NEEDS_DEMONSTRATIONS)
        direct = DirectMeasure.from_batch(
            self.view.model, batch, "increase", None, None, final_norm="frozen", bias=True, run=run
        )
        read = ReadScores(self.view, batch, direct, against, has_similarity)
        plan = read.plan(run)
        self.attempt(
            names, lambda: self._stream("read", read.measure, batch, run, plan), batch.queries
        )

    def _effects(self, batch: PromptBatch, tokens: AnswerTokens, run: Run) -> dict[str, Values]:
        if tokens.against is None:
            measure = EffectMeasure(self.view, batch, tokens, "last", "exact", {})
            return {"effect": self._located(measure, batch, run)["log_prob"]}

        def effects(rows: list[int]) -> dict[str, Tensor]:
            return {"effect": log_odds_lost(self.view, batch[rows], tokens.select(rows)).cpu()}

        return self._stream("effect", effects, batch, run, plan_batches(self.view, batch, run))

    def _exchanges(self, batch: PromptBatch, run: Run) -> dict[str, Values]:
        donors = tower_prompts(self.view.model, batch)
        return self._located(ExchangeMeasure(self.view, donors, run.memory), batch, run)

    def _located(self, measure: HeadMeasure, batch: PromptBatch, run: Run) -> dict[str, Values]:
        """Return what a score of `il.locate` is of each prompt."""
        plan, options = measure.plan(run), measure.options()
        return self._stream(measure.by, measure.measure, batch, run, plan, options)

    def _indirect_effects(self, batch: PromptBatch, run: Run) -> dict[str, Values]:
        shuffled = []
        for row, prompt in enumerate(batch.prompts):
            shuffled.append(with_shuffled_labels(prompt, self.seed + row))
        if shuffled == list(batch.prompts):
            raise InputError("shuffling labels changes no prompt")
        corrupted = tokenizer_like(self.view.model, batch)(shuffled, range(len(batch)))
        means = mean_z(self.view, range(self.view.n_layers), batch, "last")
        to_mean = Ablate([], mode="mean", reference=batch, positions="last", recorded_z=means)

        def effects(rows: list[int]) -> dict[str, Tensor]:
            recovered = recovered_probabilities(self.view, corrupted[rows], to_mean)
            return {"indirect_effect": recovered.double().cpu()}

        plan = plan_batches(self.view, corrupted, run)
        options = {"reference": prompts_digest(batch)}
        return self._stream("indirect_effect", effects, corrupted, run, plan, options)

    def _stream(
        self,
        name: str,
        measure: Callable[[list[int]], Any],
        batch: PromptBatch,
        run: Run,
        plan: Plan,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Values]:
        """Return what `measure` gives for each prompt, in batches that the run's folder stores."""
        title = DEFINITIONS[name].title if name in DEFINITIONS else name
        step, model = run.step(name), self.view.model
        with start(step, model, batch, name, options or {}, plan=plan) as stream:
            return stream.map(title, measure)
