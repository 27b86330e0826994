"""Donor batches of interchange interventions on a task, and the scores of exchanges with them.

1. `tower_prompts` tokenizes the donors of every prompt (see `prompts.donors`) like the prompts
   themselves.
2. `exchange_scores` exchanges queries, keys or values in sets of heads, as `EXCHANGES` names them,
   and returns the answer's log-odds without and with each exchange.
3. `single_exchanges` makes them in one head at a time; `il.locate` averages what they cost over
   many prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import PARTS, Part
from icl_lens.edits.interchange import DonorRecording, Interchange
from icl_lens.edits.interchange_donors import Donor, Prefixes, record
from icl_lens.edits.one_token_rows.prefix_cache import max_prompts
from icl_lens.edits.read import ReadAmong
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError
from icl_lens.metrics import label_log_odds, most_probable
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import BUDGET, PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.donors import (
    Queries,
    donor_prompts,
    other_queries,
    partner_label,
    with_other_texts,
    with_own_text,
)
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import TokenizeLike, tokenizer_like

DonorName = Literal["query", "same class", "texts", "labels", "own text", "other texts"]
Predicted = Literal["other", "same"]

# Prompts that a scan runs on.
N_SCANNED = 12


class Exchange(NamedTuple):
    """What is exchanged, the donors of queries, keys and values, and the label that two towers
    predict.
    """

    name: str
    q: DonorName | None
    k: DonorName | None
    v: DonorName | None
    predicted: Predicted
    """The partner's label ("other") or the answer ("same")."""


EXCHANGES = (
    Exchange("query", "query", None, None, "other"),
    Exchange("keys", None, "texts", None, "other"),
    Exchange("values", None, None, "labels", "other"),
    Exchange("query+keys", "query", "texts", None, "same"),
    Exchange("query+values", "query", None, "labels", "same"),
    Exchange("keys+values", None, "texts", "labels", "same"),
    Exchange("all", "query", "texts", "labels", "other"),
    Exchange("keys: own text", None, "own text", None, "other"),
    Exchange("keys: other texts", None, "other texts", None, "same"),
    Exchange("keys: labels", None, "labels", None, "same"),
    Exchange("values: texts", None, None, "texts", "same"),
    Exchange("query: labels", "labels", None, None, "same"),
    Exchange("query: same class", "same class", None, None, "same"),
)
SINGLE = EXCHANGES[:3]
# Donors that begin like "texts", which runs first, and those that begin like the prompts. Rows of
# "own text" differ in length, so that passes that continue a cache are tested once.
LIKE_TEXTS: tuple[DonorName, ...] = ("texts", "other texts")
LIKE_PROMPTS: tuple[DonorName, ...] = ("own text", "query", "same class", "labels")

ExchangeSets = Sequence[tuple[Exchange, Sequence[Head]]]
"""Exchanges, each with the heads in which it is made."""


@dataclass(frozen=True)
class ExchangeScores:
    """Log-odds of the answer (nats) and label predicted, without exchange (set 0) and with each
    one.
    """

    log_odds: Float[Tensor, "prompt set"]
    """Of the answer against all other labels of the prompt."""
    partner_log_odds: Float[Tensor, "prompt set"]
    """Of the answer against its partner, the label that it is exchanged with; the same with two
    labels.
    """
    predicted: Int[Tensor, "prompt set"]
    """The most probable of the prompt's labels, as an index."""


@dataclass(frozen=True, eq=False)
class PromptsWithDonors:
    """Prompts and their donors, tokenized."""

    batch: PromptBatch
    positions: Int[Tensor, "prompt token"]
    """The tokens of the labels, demonstration by demonstration; -1 where a label has fewer tokens
    than the longest.
    """
    partner: Int[Tensor, " prompt"]
    """The label that each prompt's answer is exchanged with, as an index."""
    donors: dict[str, Donor]
    """Donors with one row per prompt; `donor` also gives those with one row per demonstration."""
    answers: dict[str, Int[Tensor, " prompt"]]
    """The answers of `donors`."""
    queries: tuple[Queries, ...]
    """Texts of each prompt's two classes that its demonstrations do not show."""
    tokenized_like: TokenizeLike
    """Tokenizes prompts for rows of the batch that these prompts were selected from."""
    rows: list[int]
    """The rows of these prompts in that batch."""

    def donor(self, name: DonorName) -> Donor:
        """Return the donor of a name.

        "own text" and "other texts" have a row for each demonstration of each prompt, so that their
        tokens take far more memory than the prompts': they are tokenized when they are asked for.
        """
        if name in self.donors:
            return self.donors[name]
        change = with_own_text if name == "own text" else with_other_texts
        changed: list[list[Prompt | None]] = []
        for prompt, queries in zip(self.batch.prompts, self.queries, strict=True):
            exchanged_labels = prompt.answer, partner_label(prompt)
            donors_of_prompt: list[Prompt | None] = []
            for index, demonstration in enumerate(prompt.demonstrations):
                is_exchanged = demonstration.label in exchanged_labels
                donors_of_prompt.append(change(prompt, index, queries) if is_exchanged else None)
            changed.append(donors_of_prompt)
        return _per_label(self.tokenized_like, self.batch, changed, self.rows)

    def expected(self, predicted: Predicted) -> Int[Tensor, " prompt"]:
        """Return the label that two towers predict for each prompt."""
        return self.partner if predicted == "other" else self.batch.answer.cpu()

    def select(self, rows: Sequence[int]) -> "PromptsWithDonors":
        """Return some of the prompts, with their donors."""
        index = list(rows)
        donors = {name: donor.select(index) for name, donor in self.donors.items()}
        answers = {name: answer[index] for name, answer in self.answers.items()}
        return replace(
            self,
            batch=self.batch[index],
            positions=self.positions[index],
            partner=self.partner[index],
            donors=donors,
            answers=answers,
            queries=tuple(self.queries[row] for row in index),
            rows=[self.rows[row] for row in index],
        )


def tower_prompts(model: Any, batch: PromptBatch) -> PromptsWithDonors:
    """Return a batch with the donors of its prompts.

    Raise InputError for texts without demonstrations, and for prompts that do not show their answer
    and another label.
    """
    prompts = batch.prompts
    if not prompts:
        raise InputError(
            "batch must contain in-context prompts, got texts without demonstrations; use "
            "il.tokenize"
        )
    partners = list(map(partner_label, prompts))
    if batch.decisions.prompt_index is not None:
        raise InputError(
            "prompts must have labels that part at one token, got some that begin alike and others "
            "that do not; draw two classes per prompt (classes='binary')"
        )
    tokenized_like = tokenizer_like(model, batch)
    n_prompts, n_demos = batch.label_positions.shape
    rows_of_demonstrations = torch.arange(n_prompts)[:, None].expand(n_prompts, n_demos)
    donors: dict[str, Donor] = {}
    answers: dict[str, Tensor] = {}
    for name, exchanged_prompts in donor_prompts(prompts).items():
        donor = tokenized_like(exchanged_prompts, range(n_prompts))
        donors[name] = _align(batch, donor, rows_of_demonstrations)
        answers[name] = donor.answer.cpu()
    return PromptsWithDonors(
        batch,
        batch.all_label_positions.cpu().flatten(1),
        _columns_of(batch, partners).cpu(),
        donors,
        answers,
        queries=tuple(other_queries(prompts)),
        tokenized_like=tokenized_like,
        rows=list(range(n_prompts)),
    )


def _columns_of(batch: PromptBatch, names: Sequence[str]) -> Int[Tensor, " batch"]:
    """Return the index in `batch.labels` of what stands for a whole label in each row, which must
    be one of its choices.
    """
    columns = []
    for is_choice, name in zip(batch.label_mask.tolist(), names, strict=True):
        choices = compress(enumerate(batch.decisions.groups), is_choice)
        columns.append(next(column for column, group in choices if name in group))
    return torch.tensor(columns, device=batch.answer.device)


def _per_label(
    tokenized_like: TokenizeLike,
    batch: PromptBatch,
    changed: Sequence[Sequence[Prompt | None]],
    rows_to_be_like: Sequence[int],
) -> Donor:
    """Return donors that end at the last label of each prompt.

    `changed` has a prompt for each demonstration of each prompt of the batch, None where the label
    keeps its own keys and values; they are tokenized like the rows `rows_to_be_like`.
    """
    rows = torch.full(batch.label_positions.shape, -1)
    prompts_changed: list[Prompt] = []
    like_rows: list[int] = []
    for row, of_prompt in enumerate(changed):
        for index, prompt in enumerate(of_prompt):
            if prompt is not None:
                rows[row, index] = len(prompts_changed)
                prompts_changed.append(prompt)
                like_rows.append(rows_to_be_like[row])
    donor = tokenized_like(prompts_changed, like_rows)
    ends = [[end - 1] for end in donor.label_ranges[..., 1].amax(1).tolist()]
    return _align(batch, donor.at(ends), rows, has_queries=False)


def _align(
    batch: PromptBatch,
    donor: PromptBatch,
    rows: Int[Tensor, "prompt demo"],
    *,
    has_queries: bool = True,
) -> Donor:
    """Return the donor of each demonstration's label: row `rows` of `donor`, at the same place.

    The place is that among demonstrations. Labels with the same number of tokens are aligned token
    by token, others only at the token that scores them.
    """
    tokens = batch.all_label_positions.cpu()
    n_prompts, n_demos, width = tokens.shape
    last_demo = donor.label_positions.shape[1] - 1
    demos = torch.arange(n_demos).clamp(max=last_demo).expand(n_prompts, -1)
    donor_rows = rows.clamp(min=0)
    donor_start, donor_end = donor.label_ranges.cpu()[donor_rows, demos].split(1, dim=-1)
    donor_scored = donor.label_positions.cpu()[donor_rows, demos][..., None]
    start, end = batch.label_ranges.cpu().split(1, dim=-1)
    is_scored = tokens == batch.label_positions.cpu()[..., None]
    is_same_length = donor_end - donor_start == end - start
    places = torch.where(is_same_length, donor_start + torch.arange(width), donor_scored)
    has_donor = (tokens >= 0) & (rows >= 0)[..., None] & (is_same_length | is_scored)
    return Donor(
        donor,
        torch.where(has_donor, rows[..., None], -1).flatten(1),
        torch.where(has_donor, places, -1).flatten(1),
        has_queries,
    )


def exchange_scores(
    view: ModelView,
    prompts: PromptsWithDonors,
    sets: ExchangeSets,
    *,
    memory: int = BUDGET,
) -> tuple[ExchangeScores, dict[str, Float[Tensor, "prompt label"]], str]:
    """Return the scores without exchange, followed by those of each exchange in a set of heads.

    Also return the donors' own log-probabilities of the labels, and why full forward passes were
    used, if they were. `memory` limits the keys and values that are cached at a time, bytes; one
    prompt runs at least.
    """
    n_prompts, size = len(prompts.batch), n_exchanged(view, prompts, memory)
    pieces: list[ExchangeScores] = []
    donor_pieces: dict[str, list[Tensor]] = {}
    first_reason = ""
    for start in range(0, n_prompts, size):
        piece = prompts.select(range(start, min(start + size, n_prompts)))
        recordings = _recordings(view, piece, sets, LIKE_TEXTS, Prefixes.empty(view))
        prefixes = Prefixes.of(view, piece.batch)
        recordings |= _recordings(view, piece, sets, LIKE_PROMPTS, prefixes)
        for name, recording in recordings.items():
            if recording.log_probs is not None:
                donor_pieces.setdefault(name, []).append(recording.log_probs.cpu())
        log_probs, reason = score_sets(
            view,
            piece.batch,
            _interchanges(piece, sets, recordings),
            ReadAmong(piece.batch.label_tokens),
            cached=prefixes.prefix_cache if prefixes.is_usable else None,
        )
        pieces.append(_piece_scores(piece, log_probs.cpu()))
        first_reason = first_reason or reason
    scores = ExchangeScores(
        log_odds=torch.cat([piece.log_odds for piece in pieces]),
        partner_log_odds=torch.cat([piece.partner_log_odds for piece in pieces]),
        predicted=torch.cat([piece.predicted for piece in pieces]),
    )
    donors = {name: torch.cat(log_probs) for name, log_probs in donor_pieces.items()}
    return scores, donors, first_reason


def _recordings(
    view: ModelView,
    prompts: PromptsWithDonors,
    sets: ExchangeSets,
    names: Sequence[DonorName],
    prefixes: Prefixes,
) -> dict[str, DonorRecording]:
    """Run the donors of these names that exchanges need, and return what they give, by donor."""
    layers: set[int] = set()
    for _, heads in sets:
        layers |= {head.layer for head in heads}
    parts_of_donor: dict[DonorName, list[Part]] = {}
    for part in PARTS:
        for name in dict.fromkeys(getattr(exchange, part) for exchange, _ in sets):
            if name is not None:
                parts_of_donor.setdefault(name, []).append(part)
    recordings: dict[str, DonorRecording] = {}
    for name in names:
        if name in parts_of_donor:
            parts = parts_of_donor[name]
            is_kept = name == "texts" and "other texts" in parts_of_donor
            recordings[name] = record(
                view, prompts.donor(name), sorted(layers), parts, prefixes, keep=is_kept
            )
    return recordings


def _interchanges(
    prompts: PromptsWithDonors, sets: ExchangeSets, recordings: dict[str, DonorRecording]
) -> list[list[Interchange]]:
    """Return the edit of no exchange, and of each one."""
    interchanges = [[Interchange((), prompts.positions)]]
    for exchange, heads in sets:
        by_part: dict[Part, DonorRecording | None] = {}
        for part in PARTS:
            name = getattr(exchange, part)
            by_part[part] = None if name is None else recordings[name]
        interchanges.append([Interchange(tuple(heads), prompts.positions, **by_part)])
    return interchanges


def _piece_scores(
    prompts: PromptsWithDonors, log_probs: Float[Tensor, "prompt set label"]
) -> ExchangeScores:
    """Return the scores of labels' log-probabilities under each set."""
    batch = prompts.batch.to("cpu")
    log_odds = []
    for of_set in log_probs.unbind(1):
        log_odds.append(label_log_odds(of_set, batch.answer, choices=batch.label_mask))
    rows = torch.arange(len(batch))
    answer, partner = log_probs[rows, :, batch.answer], log_probs[rows, :, prompts.partner]
    return ExchangeScores(
        log_odds=torch.stack(log_odds, dim=1),
        partner_log_odds=answer - partner,
        predicted=most_probable(log_probs, batch.label_mask[:, None]),
    )


def n_exchanged(view: ModelView, prompts: PromptsWithDonors, memory: int = BUDGET) -> int:
    """Return how many of the prompts `exchange_scores` runs at a time.

    Their keys take half of the memory, because some models need two caches of them: Hugging Face's
    and that of single-token rows.
    """
    options: dict[str, Any] = {"pass_tokens": PASS_TOKENS, "n_rows": 1, "attention": False}
    return max_prompts(view, prompts.batch, memory=memory // 2, **options)


def single_exchanges(
    view: ModelView,
    prompts: PromptsWithDonors,
    exchanges: Sequence[Exchange] = SINGLE,
    *,
    memory: int = BUDGET,
) -> tuple[Float[Tensor, "prompt exchange layer head"], str]:
    """Return the log-odds (nats) that each exchange costs the answer if it is made in one head
    alone.

    The second value is the reason why full forward passes were used, "" if the prefix cache was
    used.
    """
    sets: list[tuple[Exchange, list[Head]]] = []
    for exchange in exchanges:
        sets += [(exchange, [head]) for head in view.heads()]
    scores, _, reason = exchange_scores(view, prompts, sets, memory=memory)
    lost = scores.log_odds[:, :1] - scores.log_odds[:, 1:]
    return lost.unflatten(1, (len(exchanges), view.n_layers, view.n_heads)), reason
