"""Test whether heads work as two towers by exchanging their queries, keys and values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from icl_lens.analyses.two_towers_result import ExchangeEffects, TwoTowers
from icl_lens.edits.edit_checks import checked_heads
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers
from icl_lens.foundation.defaults import N_LOCATED, N_RANDOM_SETS
from icl_lens.foundation.intervals import MIN_RANDOM_SETS
from icl_lens.foundation.ranking_scores import SCORES, Score
from icl_lens.measures.exchanges import (
    EXCHANGES,
    N_SCANNED,
    Exchange,
    PromptsWithDonors,
    exchange_scores,
    n_exchanged,
    tower_prompts,
)
from icl_lens.measures.locate import locate
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.metrics import is_correct
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest
from icl_lens.prompts.class_labels import Labels
from icl_lens.prompts.donors import partner_label
from icl_lens.prompts.labeled_task import Layout
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts
from icl_lens.prompts.tasks import Task, halves_by_query, named_task
from icl_lens.prompts.tokenize import tokenize
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import plan_in_order, start

N_PROMPTS = 60
SCAN_TABLE = (
    *("head", "query", "low", "high", "selected", "keys", "values"),
    *("rank", "layer", "index"),
)


def two_towers(
    model: Any,
    task: str | Task | Sequence[Prompt | str],
    heads: Sequence[AnyHead] | None = None,
    *,
    k: int = N_LOCATED,
    by: Score = "exchange",
    scan_prompts: Sequence[Prompt] | None = None,
    n: int | None = None,
    demonstrations: int = 2,
    labels: Labels | None = None,
    layout: Layout = "random",
    template: Template = DEFAULT_TEMPLATE,
    prepend_bos: bool | None = None,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    run: Run | None = None,
) -> TwoTowers:
    """Test by interchange interventions whether heads match a query with keys and carry labels as
    values.

    If heads work as two towers, the query at the last position says which class the query text has,
    the key at each label says which class its demonstration's text has, and the value says which
    label stands there. Exchanging one of them, in all `heads` at once and only as the last position
    sees them, for what it is in a donor prompt with the other class then gives the other label, and
    two exchanges cancel:

    - "query": from the same demonstrations with a query of the other class;
    - "keys": with the texts of the two classes exchanged, label by label;
    - "values": with the two labels exchanged;
    - "query+keys", "query+values", "keys+values", "all": several of these;
    - "keys: own text", "keys: other texts": only the text of the key's own demonstration changes
      class, or only the others';
    - "keys: labels", "values: texts", "query: labels", "query: same class": predicted to change
      nothing.

    Labels with the same number of tokens are exchanged token by token, others only at their scored
    tokens.

    The same exchanges in `n_random` sets of other heads from the same layers are the control. Heads
    and sets use the same donors. With more than two labels, the answer is exchanged with the next
    label that is demonstrated.

    `task` is a task (`WordTask`, `TextTask`) or its name, of which `n` prompts (default: 60) with
    these `demonstrations`, `labels`, `layout` and `seed` are drawn, or prompts with answers. The
    text of a query of the other class, or of the same one, comes from the other prompts. For
    prompts of your own, texts with the same label are taken to be of one class unless a task drew
    them; if the same text has different labels in different prompts, classes are derived from the
    texts that prompts share, or a demonstration of the prompt is the query.

    Without `heads`, the `k` heads with the largest effect of exchanging their query alone are found
    by a scan of all heads (`il.locate`) on `scan_prompts`, by default 12 prompts of the task
    with other queries, or those of half of your queries (`TwoTowers.scan`). The default of `k` is
    the paper's number of located heads. With another score as `by`, they are the heads with the
    largest mean contrast, increase or effect on these prompts, without a scan.

    If the prefix cache is supported (see `head_effects`), an exchange of one set costs one token
    per prompt, from the set's first layer on; otherwise, one full forward pass. `template` and
    `prepend_bos` are those of `il.tokenize`. `run` says how the prompts run (see `Run`); the chunks
    of the scan and of the exchanges are in folders of their own, "scan" and "exchanges".

    Raise InputError for unknown heads, prompts that do not demonstrate their answer and another
    label, too few prompts to scan, fewer other heads than `heads`, and families whose attention
    cannot be recomputed.

    Example:
        >>> towers = il.two_towers(model, "sentiment-number", ["L5H0", "L4H1"], n=20, n_random=3)
        >>> towers.to_frame()["exchanged"].tolist()[:4]
        ['query', 'keys', 'values', 'query+keys']
        >>> towers.lost["query"].low > 0
        True
    """
    view = ModelView.of(model)
    k, seed = check_integers(k=k, seed=seed)
    (n_random,) = check_at_least(MIN_RANDOM_SETS, n_random=n_random)
    if isinstance(task, str | Path | Task):
        n = N_PROMPTS if n is None else n
        (n,) = check_integers(n=n)
        drawn = task if isinstance(task, Task) else named_task(task)
        prompts = drawn.prompts(
            n_drawn(n), seed=seed, layout=layout, demonstrations=demonstrations, labels=labels
        )
        scanned, tested = scanned_and_tested(prompts, n)
    else:
        if n is not None:
            raise InputError(f"n must be None for a list of prompts, got {n}; remove it")
        tested = list(as_prompts(task))
        scanned = []
        if heads is None and scan_prompts is None:
            scanned, tested = halves_by_query(tested, len(tested))
    scanned = list(scanned if scan_prompts is None else scan_prompts)

    def prepare(prompts: Sequence[Prompt]) -> PromptBatch:
        return tokenize(model, prompts, template=template, prepend_bos=prepend_bos)

    scan = None
    check_choice("by", by, SCORES)
    n_scanned = len(scanned) if heads is None else 0
    if heads is not None and by != "exchange":
        raise InputError(
            f"by must be 'exchange', its default, if heads are passed, got {by!r}; pass one of them"
        )
    if heads is None:
        if not 1 <= k <= len(view.heads()):
            raise InputError(f"k must be between 1 and {len(view.heads())} (heads), got {k}")
        heads, scan = _located_heads(view, prepare(scanned), k, by, as_run(run).step("scan"))
    distinct_heads = tuple(dict.fromkeys(view.check_heads(heads)))
    if not distinct_heads:
        raise InputError(
            "heads must contain at least one head, got none; omit it to scan for heads"
        )
    prompts = tower_prompts(model, prepare(tested))
    options: dict[str, Any] = {
        "n_random": n_random,
        "seed": seed,
        "run": as_run(run).step("exchanges"),
    }
    (towers,) = exchange_heads(view, prompts, [distinct_heads], **options)
    return replace(towers, scan=scan, n_scanned=n_scanned, by=by)


def _located_heads(
    view: ModelView, batch: PromptBatch, k: int, by: Score, run: Run
) -> tuple[list[Head], pd.DataFrame | None]:
    """Return the k heads with the largest score and, for `by="exchange"`, the table of all heads,
    otherwise None.
    """
    located = locate(view.model, batch, by=by, k=k, other_scores=False, run=run)
    if by != "exchange":
        return located.heads, None
    # the score of "exchange" is what exchanging the query costs
    scan = located.to_frame().rename(columns={"head": "index", "name": "head", "score": "query"})
    return located.heads, scan.reindex(columns=list(SCAN_TABLE))


def exchange_heads(
    view: ModelView,
    prompts: PromptsWithDonors,
    head_sets: Sequence[Sequence[Head]],
    *,
    exchanges: Sequence[Exchange] = EXCHANGES,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    run: Run | None = None,
) -> list[TwoTowers]:
    """Return what `two_towers` returns for each set of heads, without a scan.

    All sets share the donors' passes.
    """
    groups: list[tuple[tuple[Head, ...], ...]] = []
    for heads in head_sets:
        checked_heads(view, heads)
        drawn = random_head_sets(view.model, heads, n_random=n_random, seed=seed)
        groups.append((tuple(heads), *map(tuple, drawn)))
    sets: list[tuple[Exchange, tuple[Head, ...]]] = []
    for group in groups:
        for exchange in exchanges:
            sets += [(exchange, heads) for heads in group]
    named = {
        "heads": [list(map(str, heads)) for heads in head_sets],
        "n_random_sets": n_random,
        "seed": seed,
        "exchanges": [exchange.name for exchange in exchanges],
        "donors": {name: prompts_digest(donor.batch) for name, donor in prompts.donors.items()},
    }

    def compute(rows: list[int]) -> dict[str, torch.Tensor | list[str]]:
        memory = as_run(run).memory
        scores, donors, reason = exchange_scores(view, prompts.select(rows), sets, memory=memory)
        columns: dict[str, torch.Tensor | list[str]] = {
            "log_odds": scores.log_odds,
            "partner_log_odds": scores.partner_log_odds,
            "predicted": scores.predicted,
            "reason": [reason] * len(rows),
        }
        for name, log_probs in donors.items():
            columns[f"donor: {name}"] = log_probs
        return columns

    n_tokens = n_exchanged(view, prompts) * prompts.batch.tokens.shape[1]
    plan = plan_in_order(prompts.batch, run, n_tokens=n_tokens)
    with start(run, view.model, prompts.batch, "two towers", named, plan=plan) as stream:
        scores = stream.map("exchanges", compute)
    effects = _effects_by_group(prompts, exchanges, 1 + n_random, scores)
    answer = prompts.batch.answer.cpu()
    chance = prompts.batch.label_mask.double().sum(-1).reciprocal().mean()
    return [
        TwoTowers(
            model=view.name,
            heads=heads,
            random_sets=tuple(random_sets),
            exchanges=tuple(effects_of_group),
            log_odds=scores["log_odds"][:, 0].astype(np.float64),
            partner_log_odds=scores["partner_log_odds"][:, 0].astype(np.float64),
            correct=scores["predicted"][:, 0] == answer.numpy(),
            queries=tuple(prompt.query for prompt in prompts.batch.prompts),
            answers=tuple(str(prompt.answer) for prompt in prompts.batch.prompts),
            partners=tuple(map(partner_label, prompts.batch.prompts)),
            scan=None,
            n_scanned=0,
            chance=float(chance),
            text=prompts.batch.texts[0],
            fallback_reason=next(filter(None, scores["reason"]), ""),
            edits=active_edits(view),
        )
        for (heads, *random_sets), effects_of_group in zip(groups, effects, strict=True)
    ]


def _effects_by_group(
    prompts: PromptsWithDonors,
    exchanges: Sequence[Exchange],
    n_sets: int,
    scores: Mapping[str, Any],
) -> Iterator[list[ExchangeEffects]]:
    """Yield the effects of each exchange for every group of `n_sets` sets: heads and random heads.

    `scores` has "log_odds", "partner_log_odds" and "predicted" [prompt 1 + group · exchange · set],
    first without an exchange, and the donors' log-probabilities.
    """
    batch = prompts.batch.to("cpu")
    rows, answer, partner = np.arange(len(batch)), batch.answer.numpy(), prompts.partner.numpy()
    donors_correct: dict[str, np.ndarray] = {}
    donors_log_odds: dict[str, np.ndarray] = {}
    for name, answers in prompts.answers.items():
        log_probs = scores.get(f"donor: {name}")
        if log_probs is None:
            continue
        correct = is_correct(torch.from_numpy(log_probs), answers, choices=batch.label_mask)
        donors_correct[name] = correct.double().numpy()
        # A donor's labels are those of its prompt: one of the two is its answer.
        has_answer_of_prompt = answers.numpy() == answer
        difference = log_probs[rows, answer] - log_probs[rows, partner]
        log_odds = np.where(has_answer_of_prompt, difference, -difference)
        donors_log_odds[name] = log_odds.astype(np.float64)
    shape = len(batch), -1, len(exchanges), n_sets
    log_odds = scores["log_odds"]
    lost = (log_odds[:, :1] - log_odds[:, 1:]).astype(np.float64).reshape(shape)
    partner_log_odds = scores["partner_log_odds"][:, 1:].astype(np.float64).reshape(shape)[..., 0]
    predicted = torch.from_numpy(scores["predicted"][:, 1:].reshape(shape)[..., 0])
    for group in range(lost.shape[1]):
        effects = []
        for index, exchange in enumerate(exchanges):
            donors = [name for name in exchange[1:4] if name in donors_correct]
            correct = [donors_correct[name] for name in donors]
            log_odds_of_donors = [donors_log_odds[name] for name in donors]
            label = predicted[:, group, index]
            effects.append(
                ExchangeEffects(
                    name=exchange.name,
                    predicted=exchange.predicted,
                    lost=lost[:, group, index, 0],
                    random_lost=lost[:, group, index, 1:].T,
                    partner_log_odds=partner_log_odds[:, group, index],
                    correct=(label == batch.answer).numpy(),
                    as_predicted=(label == prompts.expected(exchange.predicted)).numpy(),
                    donors_correct=np.mean(correct, axis=0) if donors else None,
                    donors_log_odds=np.mean(log_odds_of_donors, axis=0) if donors else None,
                )
            )
        yield effects


def n_drawn(n: int) -> int:
    """Return how many prompts of a task are drawn to test n: enough for both halves of queries."""
    return 4 * max(n, N_SCANNED)


def scanned_and_tested(prompts: list[Prompt], n: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return prompts to scan and n to test, without a shared query if there are enough."""
    if len({prompt.query for prompt in prompts}) >= 4:
        scanned, _ = halves_by_query(prompts, N_SCANNED)
        _, tested = halves_by_query(prompts, n)
        if (len(scanned), len(tested)) == (N_SCANNED, n):
            return scanned, tested
    return prompts[-N_SCANNED:], prompts[:n]
