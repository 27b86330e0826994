"""Compute the reports of an explanation: one function per report, for one captured prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.analyses.explanation.reports import (
    AblationReport,
    AllHeadsReport,
    DemonstrationsReport,
    Grid,
    InputReport,
    LayerReport,
    LeftOut,
    ScoreReport,
    Settings,
    SubheadReport,
    SubheadsReport,
)
from icl_lens.edits.ablate import Ablate
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError, check_at_least, quoted_list, short_repr
from icl_lens.foundation.ranking_scores import SCORES, Score, score_of_parts
from icl_lens.measures.demonstration_effects import effects_of_demonstrations
from icl_lens.measures.exchanges import SINGLE, single_exchanges, tower_prompts
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.head import Head
from icl_lens.prompts.batch import PromptBatch, with_answers
from icl_lens.prompts.token_ids import name_tokens
from icl_lens.reading.activations import Activations
from icl_lens.reading.increases import layer_log_prob_increase
from icl_lens.reading.multi_token_labels import (
    continuation_log_probs,
    tokenize_labels,
    whole_label_log_probs,
)
from icl_lens.reading.search import subhead_scores_at, top_subheads
from icl_lens.result.stored import PACKAGES

# For plain text: positions stored with every head's attention.
N_ATTENDED_POSITIONS = 24
# The most probable next tokens.
N_NEXT_TOKENS = 5


@dataclass(frozen=True)
class ScoredPrompt:
    """The captured prompt, and the scored tokens with their names.

    `target` and `others` are indices into these tokens.
    """

    model: Any
    acts: Activations
    options: Settings
    tokens: Int[Tensor, " label"]
    names: tuple[str, ...]
    target: int
    others: tuple[int, ...]

    @classmethod
    def from_activations(cls, model: Any, acts: Activations, options: Settings) -> "ScoredPrompt":
        """Check the options, and score labels, or the target of text and the compared tokens.

        Raise InputError for invalid options.
        """
        batch, device = acts.batch, acts.readout.W_U.device
        max_ablated = len(acts.view.heads()) // 2
        check_at_least(0, n_random=options.n_random)
        check_at_least(1, k=options.k)
        if not 1 <= options.n_ablated <= max_ablated:
            raise InputError(
                f"n_ablated must be between 1 and {max_ablated}, half of all heads, got "
                f"{options.n_ablated}; random sets need the other half"
            )
        if batch.labels and batch.targets is None:
            target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
            compared = _compared_labels(batch, target, options.against)
            tokens = batch.label_tokens.to(device)
            return cls(model, acts, options, tokens, batch.labels, target, compared)
        target_id = int(batch.answer_tokens[0])
        if target_id < 0:
            target_id = int(acts.readout.logits(acts.resid_final)[0].argmax())
        compared_ids = []
        if batch.against is not None:
            compared_ids = [token for token in batch.against[0].tolist() if token >= 0]
        ids = list(dict.fromkeys([target_id, *compared_ids]))
        names = tuple(name_tokens(model.tokenizer, [ids])[0])
        if target_id in compared_ids:
            raise InputError(
                f"against must not contain the target {names[0]!r}, which is the model's most "
                "probable token; pass answer="
            )
        tokens = torch.tensor(ids, device=device)
        return cls(model, acts, options, tokens, names, 0, tuple(range(1, len(ids))))

    @property
    def scores_tokens(self) -> bool:
        """Whether tokens are scored, not labels: for text, and for batches with targets."""
        return not self.acts.batch.labels or self.acts.batch.targets is not None

    @property
    def n_tokens(self) -> int:
        return int(self.acts.batch.last[0]) + 1

    @property
    def targets(self) -> Int[Tensor, " 1"]:
        return self.tokens[[self.target]]

    @property
    def against(self) -> Int[Tensor, "1 other"] | None:
        return self.tokens[list(self.others)][None] if self.others else None

    @property
    def readout_options(self) -> dict[str, Any]:
        return {"final_norm": self.options.final_norm, "bias": self.options.bias}


def _compared_labels(
    batch: PromptBatch, target: int, against: Sequence[str | int] | None
) -> tuple[int, ...]:
    """Return the indices of the labels to compare with, by default all others of the prompt."""
    if against is not None:
        names = dict.fromkeys(against)
        return tuple(_label(batch, name, batch.labels[target]) for name in names)
    indices = batch.label_mask[0].nonzero().flatten().tolist()
    return tuple(index for index in indices if index != target)


def _label(batch: PromptBatch, name: str | int, target: str) -> int:
    """Return the index of a label to compare with; raise InputError for others and the target."""
    if name not in batch.labels:
        raise InputError(
            f"against must be one of the labels {quoted_list(batch.labels)}, got "
            f"{short_repr(name)}; pass a label"
        )
    if name == target:
        raise InputError(
            f"against must differ from the explained label {name!r}; pass other labels, or omit it"
        )
    return batch.labels.index(name)


def settings(scored: ScoredPrompt) -> Settings:
    """Return the options with the weights and the versions of packages behind the numbers."""
    view = scored.acts.view
    versions = tuple((name, version(name)) for name in PACKAGES)
    return replace(
        scored.options, source=view.source, quantization=view.quantization, versions=versions
    )


def inputs(scored: ScoredPrompt) -> InputReport:
    """Return what the model reads; plain text has no demonstrations."""
    batch, n = scored.acts.batch, scored.n_tokens
    text = batch.texts[0] if batch.texts else ""
    if scored.scores_tokens and (batch.prompt_index is not None or not batch.texts):
        text = "".join(batch.token_strings[0][:n])
    report = InputReport(
        prompt=None,
        template=batch.template,
        text=text,
        tokens=tuple(batch.token_strings[0][:n]),
        token_names=tuple(batch.token_names[0][:n]),
    )
    if scored.scores_tokens:
        return report
    prompt, _ = tokenize_labels(scored.model, batch)
    return replace(
        report,
        prompt=batch.prompts[0],
        label_positions=tuple(batch.label_positions[0].tolist()),
        label_ranges=tuple(map(tuple, batch.label_ranges[0].tolist())),
        prediction_positions=tuple(batch.prediction_positions[0].tolist()),
        demonstration_labels=tuple(batch.label_index[0].tolist()),
        n_shared_tokens=n - len(prompt),
    )


def score_report(scored: ScoredPrompt, model_input: InputReport) -> ScoreReport:
    """Return the log-probabilities of the scored tokens, and the most probable next tokens."""
    readout, tokenizer = scored.acts.readout, scored.model.tokenizer
    log_probs = readout.log_probs(scored.acts.resid_final)[0]
    most_probable = log_probs.exp().topk(N_NEXT_TOKENS)
    assert readout.decode is not None  # tokenizing required the tokenizer
    next_names = name_tokens(tokenizer, [most_probable.indices.tolist()])[0]
    if scored.scores_tokens:
        answer_ids, whole_log_probs = _token_answers(scored, model_input)
    else:
        answer_ids, whole_log_probs = _label_answers(scored)
    spellings = tuple(map(tuple, name_tokens(tokenizer, answer_ids)))
    scored_names = name_tokens(tokenizer, [[token] for token in scored.tokens.tolist()])
    is_affine = readout.using(**scored.readout_options).is_affine
    return ScoreReport(
        labels=scored.names,
        log_probs=tuple(log_probs[scored.tokens].tolist()),
        target=scored.names[scored.target],
        target_token=readout.decode(int(scored.tokens[scored.target])),
        next_tokens=tuple(zip(next_names, most_probable.values.tolist(), strict=True)),
        compared_with=tuple(scored.names[i] for i in scored.others),
        contrast_adds_up=len(scored.others) == 1 and is_affine,
        spellings=spellings,
        scored_tokens=tuple(name for (name,) in scored_names),
        whole_log_probs=tuple(whole_log_probs),
    )


def _label_answers(scored: ScoredPrompt) -> tuple[list[list[int]], Sequence[float]]:
    """Return the labels' token ids in context, and log p of whole labels unless all have one token.

    Labels that begin with the same tokens up to the decision are one group. It has the ids of these
    tokens, and the log of the labels' summed p.
    """
    batch = scored.acts.batch
    decisions = batch.decisions
    ids = dict(zip(decisions.whole_labels, tokenize_labels(scored.model, batch)[1], strict=True))
    labels = [_shared_beginning([ids[label] for label in group]) for group in decisions.groups]
    if not any(len(label_ids) > 1 for label_ids in ids.values()):
        return labels, ()
    whole = whole_label_log_probs(scored.model, batch)[0]
    group_log_probs = []
    for group in decisions.groups:
        members = [decisions.whole_labels.index(label) for label in group]
        group_log_probs.append(float(whole[members].logsumexp(0)))
    return labels, group_log_probs


def _shared_beginning(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all sequences begin."""
    shared = []
    for first, *further in zip(*sequences, strict=False):
        if any(token != first for token in further):
            break
        shared.append(first)
    return shared


def _token_answers(
    scored: ScoredPrompt, model_input: InputReport
) -> tuple[list[list[int]], Sequence[float]]:
    """Return the token ids of plain text's target and compared tokens, and log p of each.

    Without any of several tokens, there is no log p of wholes.
    """
    batch, tokenizer, text = scored.acts.batch, scored.model.tokenizer, model_input.text
    ids_by_first = {token: [token] for token in scored.tokens.tolist()}
    for answer in (scored.options.target, *(scored.options.against or ())):
        if isinstance(answer, str):
            before = tokenizer(text, add_special_tokens=False)["input_ids"]
            after = tokenizer(text + answer, add_special_tokens=False)["input_ids"]
            ids_by_first[after[len(before)]] = after[len(before) :]
    answers = list(ids_by_first.values())
    if not any(len(ids) > 1 for ids in answers):
        return answers, ()
    prompt = batch.tokens[0, : scored.n_tokens].tolist()
    continuations = [(prompt, ids) for ids in answers]
    return answers, continuation_log_probs(scored.model, continuations).tolist()


@dataclass
class Attempts:
    """Sections that were left out because the family does not support them, with the reasons."""

    reasons: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def at(self, section: str) -> Iterator[None]:
        """Leave out a section if the `with` block raises InputError; keep its first reason."""
        try:
            yield
        except InputError as error:
            self.reasons.setdefault(section, str(error))

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(section, reason) for section, reason in self.reasons.items())


def row_cache(scored: ScoredPrompt) -> PrefixCache | None:
    """Return the cache that ablations and hidden demonstrations share; None if unsupported."""
    try:
        return PrefixCache.of(scored.acts.view, scored.acts.batch)
    except torch.OutOfMemoryError:
        raise
    except (PrefixCacheUnsupported, InputError, RuntimeError):
        return None


def demonstrations(
    scored: ScoredPrompt, attempts: Attempts, cached: PrefixCache | None
) -> DemonstrationsReport | None:
    """Return what the explained label loses without each demonstration.

    None for plain text, and if the section is left out.
    """
    if scored.scores_tokens or not scored.acts.batch.has_demonstrations:
        return None
    with attempts.at("effects of demonstrations"):
        effects = effects_of_demonstrations(
            scored.model, scored.acts.batch, scored.targets, against=scored.against, cached=cached
        )
        by_demonstration, all_at_once = effects.of()
        hidden, keys, values = torch.cat([by_demonstration[0], all_at_once]).T.tolist()
        return DemonstrationsReport(tuple(hidden), tuple(keys), tuple(values), effects.begins_text)


def layers(scored: ScoredPrompt) -> LayerReport:
    """Return every layer's increases and contrasts."""
    attn, ffn = _layer_increases(scored, None)
    if not scored.others:
        return LayerReport(attn, ffn)
    attn_contrast, ffn_contrast = _layer_increases(scored, scored.against)
    return LayerReport(attn, ffn, attn_contrast, ffn_contrast)


def _layer_increases(
    scored: ScoredPrompt, against: Int[Tensor, "1 other"] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what each layer's attention and FFN add to log p, or to the contrast."""
    attn, ffn = layer_log_prob_increase(
        scored.acts, scored.targets, against=against, **scored.readout_options
    )
    return tuple(attn[0].tolist()), tuple(ffn[0].tolist())


def all_heads(
    scored: ScoredPrompt, head_scores: Mapping[Score, Float[Tensor, "layer head"]], other_query: str
) -> AllHeadsReport:
    """Return every head's scores, and its attention from the last token.

    This is attention to labels or, in plain text, to the tokens that any head attends to most.
    """
    grids: dict[Score, Grid] = {}
    for by, scores_of_heads in head_scores.items():
        grids[by] = tuple(map(tuple, scores_of_heads.tolist()))
    attended: tuple[int, ...] = ()
    if scored.scores_tokens:
        pattern = scored.acts.pattern[0, :, :, : scored.n_tokens].float()
        n_attended = min(N_ATTENDED_POSITIONS, scored.n_tokens)
        strongest = pattern.amax((0, 1)).topk(n_attended).indices.sort().values
        attention, attended = pattern[:, :, strongest], tuple(strongest.tolist())
    else:
        attention = scored.acts.attention_to_labels()[0]
    return AllHeadsReport(
        **{by: grids.get(by, ()) for by in SCORES},
        other_query=other_query,
        attention=tuple(tuple(map(tuple, layer)) for layer in attention.tolist()),
        positions=attended,
    )


def subheads(scored: ScoredPrompt) -> SubheadsReport:
    """Return the largest (head, position) parts, by contrast or else by increase."""
    acts, options = scored.acts, scored.readout_options
    k = min(2 * scored.options.k, len(acts.view.heads()) * scored.n_tokens)
    by = score_of_parts(scored.options.by, comparable=bool(scored.others))
    against = scored.against if by == "contrast" else None
    parts = top_subheads(acts, scored.targets, k=k, by=by, against=against, **options)
    ranking_scores = parts.value[0].tolist()
    increases: list[float] = ranking_scores
    contrasts: list[float | None] = [None] * k
    if scored.others and by == "contrast":
        contrasts = [*ranking_scores]
        scores_of_parts = subhead_scores_at(acts, parts, scored.targets, against=None, **options)
        increases = scores_of_parts[0].tolist()
    elif scored.others:
        scores_of_parts = subhead_scores_at(
            acts, parts, scored.targets, against=scored.against, **options
        )
        contrasts = [*scores_of_parts[0].tolist()]
    layers_and_heads = zip(parts.layer[0].tolist(), parts.head[0].tolist(), strict=True)
    heads = [Head(layer, head) for layer, head in layers_and_heads]
    positions = parts.position[0].tolist()
    names = acts.batch.token_names[0]
    reports = []
    for head, position, increase, contrast in zip(
        heads, positions, increases, contrasts, strict=True
    ):
        reports.append(SubheadReport(head, position, names[position], increase, contrast))
    return SubheadsReport(
        tuple(reports), int(parts.n_parts[0]), int(parts.n_exact[0]), parts.certified
    )


def query_exchanges(scored: ScoredPrompt) -> tuple[Float[Tensor, "layer head"], str]:
    """Return the log-odds that exchanging each head's query costs, nats, and the other query.

    Raise InputError for text without demonstrations, prompts that do not demonstrate the label and
    another one, and `against` other than all other labels.
    """
    batch = scored.acts.batch
    if scored.scores_tokens:
        raise InputError(
            "by must be 'increase', 'contrast' or 'effect' for text without demonstrations, got "
            "'exchange', which exchanges a demonstrated class for another; pass a prompt with "
            "demonstrations"
        )
    if len(scored.others) < int(batch.label_mask[0].sum()) - 1:
        raise InputError(
            f"against must be all other labels with by='exchange', got "
            f"{short_repr(list(scored.options.against or ()))}; omit it"
        )
    target = torch.tensor([scored.target], device=batch.answer.device)
    prompts = tower_prompts(scored.model, with_answers(batch, target))
    lost, _ = single_exchanges(scored.acts.view, prompts, SINGLE[:1])
    return lost[0, 0], prompts.donors["query"].batch.prompts[0].query


def ablation(
    scored: ScoredPrompt, located: list[Head], cached: PrefixCache | None
) -> tuple[Float[Tensor, "located label"], AblationReport]:
    """Return the scored tokens' log-probabilities with heads zeroed at the last position, nats.

    Each located head is zeroed alone; the first of them and random sets are zeroed jointly. As for
    effects, this costs one token for each set of heads.
    """
    batch, options = scored.acts.batch, scored.options
    removed = located[: options.n_ablated]
    draws = random_head_sets(
        scored.model, removed, n_random=options.n_random, seed=options.seed, same_layers=False
    )
    head_sets = [[head] for head in located]
    head_sets += [removed, *map(list, draws)]
    sets = [[Ablate(heads, positions="last")] for heads in head_sets]
    log_probs, _ = score_sets(
        scored.acts.view,
        batch,
        sets,
        lambda log_probs, _: log_probs[:, scored.tokens.to(log_probs.device)],
        cached=cached,
    )
    single, joint, random_draws = log_probs[0].split([len(located), 1, len(draws)])
    report = AblationReport(
        heads=tuple(removed),
        located=tuple(joint[0].tolist()),
        random=tuple(map(tuple, random_draws.tolist())),
    )
    return single, report
