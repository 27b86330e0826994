"""Compute the sections of an explanation: one function per section, for one captured prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate, takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.activations.multi_token_labels import continuation_log_probs, tokenize_labels, whole_label_log_probs
from icl_lens.analyses.sections import (
    AblationReport,
    AllHeadsReport,
    DemonstrationsReport,
    Grid,
    HeadReport,
    InputReport,
    LayerReport,
    LeftOut,
    ScoreReport,
    Settings,
    SubheadReport,
    SubheadsReport,
)
from icl_lens.attribution.increases import head_position_increases, layer_log_prob_increase
from icl_lens.attribution.reasons import SIDES, AttentionReasons, Side, attention_reasons
from icl_lens.attribution.search import subhead_scores_at, top_subheads
from icl_lens.attribution.similarity import similarity_in
from icl_lens.edits.ablate import Ablate
from icl_lens.engine.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.engine.score import score_sets
from icl_lens.errors import InputError, check_at_least, short_repr
from icl_lens.head_scores import SCORES, Score, score_of_parts
from icl_lens.locate.exchanges import SINGLE, single_exchanges, tower_prompts
from icl_lens.measures.controlled_ablation import random_head_sets
from icl_lens.measures.demonstration_effects import effects_of_demonstrations
from icl_lens.models.head import Head
from icl_lens.prompts.batch import PromptBatch, with_answers
from icl_lens.prompts.prompt import quoted_list
from icl_lens.prompts.token_ids import name_tokens
from icl_lens.result.stored import PACKAGES

# For plain text: positions stored with every head's attention, and positions described for each located head.
N_ATTENDED_POSITIONS, N_DESCRIBED_POSITIONS = 24, 5
# Top words of each value, key and query.
N_WORDS = 10


@dataclass(frozen=True)
class ScoredPrompt:
    """The captured prompt, and the scored tokens with their names; `target` and `others` are indices into these."""

    model: Any
    acts: Activations
    options: Settings
    tokens: Int[Tensor, " label"]
    names: tuple[str, ...]
    target: int
    others: tuple[int, ...]

    @classmethod
    def from_activations(cls, model: Any, acts: Activations, options: Settings) -> "ScoredPrompt":
        """Check the options; score the labels of a prompt, or plain text's target and the tokens it is compared with.

        Raise InputError for invalid options.
        """
        batch, device = acts.batch, acts.readout.W_U.device
        max_ablated = len(acts.view.heads()) // 2
        check_at_least(0, n_random=options.n_random)
        check_at_least(1, k=options.k)
        if not 1 <= options.n_ablated <= max_ablated:
            raise InputError(
                f"n_ablated must be between 1 and {max_ablated}, half of all heads, got {options.n_ablated}; random "
                "sets need the other half"
            )
        if batch.labels and batch.targets is None:
            target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
            if options.against is None:
                others = [i for i in range(len(batch.labels)) if i != target and bool(batch.label_mask[0, i])]
            else:
                others = [_label(batch, name, batch.labels[target]) for name in dict.fromkeys(options.against)]
            tokens = batch.label_tokens.to(device)
            return cls(model, acts, options, tokens, batch.labels, target, tuple(others))
        target_id = int(batch.answer_tokens[0])
        if target_id < 0:
            target_id = int(acts.readout.logits(acts.resid_final)[0].argmax())
        others = [] if batch.against is None else [token for token in batch.against[0].tolist() if token >= 0]
        ids = list(dict.fromkeys([target_id, *others]))
        names = tuple(name_tokens(model.tokenizer, [ids])[0])
        if target_id in others:
            raise InputError(
                f"against must not contain the target {names[0]!r}, which is the model's most probable token; pass "
                "answer="
            )
        return cls(model, acts, options, torch.tensor(ids, device=device), names, 0, tuple(range(1, len(ids))))

    @property
    def scores_tokens(self) -> bool:
        """Whether tokens are scored instead of labels: text without labels, or a batch with its own targets."""
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


def _label(batch: PromptBatch, name: str | int, target: str) -> int:
    """Return the index of a label to compare with; raise InputError if it is unknown or the target."""
    if name not in batch.labels:
        raise InputError(
            f"against must be one of the labels {quoted_list(batch.labels)}, got {short_repr(name)}; pass a label"
        )
    if name == target:
        raise InputError(f"against must differ from the explained label {name!r}; pass other labels, or omit it")
    return batch.labels.index(name)


def settings(scored: ScoredPrompt) -> Settings:
    """Return the options with the weights and the versions of packages behind the numbers."""
    view = scored.acts.view
    versions = tuple((name, version(name)) for name in PACKAGES)
    return replace(scored.options, source=view.source, quantization=view.quantization, versions=versions)


def inputs(scored: ScoredPrompt) -> InputReport:
    """Return what the model reads; plain text has no demonstrations."""
    batch, n = scored.acts.batch, scored.n_tokens
    text = batch.texts[0] if batch.texts else ""
    if scored.scores_tokens and (batch.prompt_index is not None or not batch.texts):
        text = "".join(batch.token_strings[0][:n])
    found = InputReport(
        prompt=None,
        template=batch.template,
        text=text,
        tokens=tuple(batch.token_strings[0][:n]),
        token_names=tuple(batch.token_names[0][:n]),
    )
    if scored.scores_tokens:
        return found
    prompt, _ = tokenize_labels(scored.model, batch)
    return replace(
        found,
        prompt=batch.prompts[0],
        label_positions=tuple(batch.label_positions[0].tolist()),
        label_ranges=tuple(map(tuple, batch.label_ranges[0].tolist())),
        prediction_positions=tuple(batch.prediction_positions[0].tolist()),
        demonstration_labels=tuple(batch.label_index[0].tolist()),
        n_shared_tokens=n - len(prompt),
    )


def scores(scored: ScoredPrompt, found: InputReport) -> ScoreReport:
    """Return the scored tokens' log-probabilities, and the five most probable tokens; biases are always included."""
    readout, tokenizer = scored.acts.readout, scored.model.tokenizer
    log_probs = readout.log_probs(scored.acts.resid_final)[0]
    best = log_probs.exp().topk(5)
    assert readout.decode is not None  # tokenizing required the tokenizer
    names = name_tokens(tokenizer, [best.indices.tolist()])[0]
    ids, whole = (_token_answers if scored.scores_tokens else _label_answers)(scored, found)
    spellings = tuple(map(tuple, name_tokens(tokenizer, ids)))
    return ScoreReport(
        labels=scored.names,
        log_probs=tuple(log_probs[scored.tokens].tolist()),
        target=scored.names[scored.target],
        target_token=readout.decode(int(scored.tokens[scored.target])),
        next_tokens=tuple(zip(names, best.values.tolist(), strict=True)),
        compared_with=tuple(scored.names[i] for i in scored.others),
        contrast_adds_up=len(scored.others) == 1 and readout.using(**scored.readout_options).is_affine,
        spellings=spellings,
        scored_tokens=tuple(name for (name,) in name_tokens(tokenizer, [[token] for token in scored.tokens.tolist()])),
        whole_log_probs=tuple(whole),
    )


def _label_answers(scored: ScoredPrompt, found: InputReport) -> tuple[list[list[int]], Sequence[float]]:
    """Return the labels' token ids in context, and log p of whole labels unless each is a single token.

    Those of labels that agree up to the decision are the tokens in which they agree, and log of the summed p.
    """
    batch = scored.acts.batch
    ids = dict(zip(batch.whole_labels, tokenize_labels(scored.model, batch)[1], strict=True))
    labels = []
    for group in batch.label_groups:
        columns = zip(*(ids[label] for label in group), strict=False)
        labels.append([tokens[0] for tokens in takewhile(lambda tokens: len({*tokens}) == 1, columns)])
    if not any(len(one) > 1 for one in ids.values()):
        return labels, ()
    whole = whole_label_log_probs(scored.model, batch)[0]
    groups = [[batch.whole_labels.index(label) for label in group] for group in batch.label_groups]
    return labels, [float(whole[group].logsumexp(0)) for group in groups]


def _token_answers(scored: ScoredPrompt, found: InputReport) -> tuple[list[list[int]], Sequence[float]]:
    """Return the token ids of plain text's target and of what it is compared with, as `_label_answers` does."""
    batch, tokenizer, text = scored.acts.batch, scored.model.tokenizer, found.text
    ids_by_first = {token: [token] for token in scored.tokens.tolist()}
    for answer in (scored.options.target, *(scored.options.against or ())):
        if isinstance(answer, str):
            before, after = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (text, text + answer))
            ids_by_first[after[len(before)]] = after[len(before) :]
    answers = list(ids_by_first.values())
    if not any(len(ids) > 1 for ids in answers):
        return answers, ()
    prompt = batch.tokens[0, : scored.n_tokens].tolist()
    return answers, continuation_log_probs(scored.model, [(prompt, ids) for ids in answers]).tolist()


@dataclass
class Attempts:
    """Sections that were left out because the model's family does not support them, with the reasons."""

    reasons: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def at(self, section: str) -> Iterator[None]:
        """Leave out a section whose computation raises InputError in the `with` block, and keep the first reason."""
        try:
            yield
        except InputError as error:
            self.reasons.setdefault(section, str(error))

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(section, reason) for section, reason in self.reasons.items())


def row_cache(scored: ScoredPrompt) -> PrefixCache | None:
    """Return the cache that ablations and hidden demonstrations share; None if the model does not support it."""
    try:
        return PrefixCache.of(scored.acts.view, scored.acts.batch)
    except torch.OutOfMemoryError:
        raise
    except (PrefixCacheUnsupported, InputError, RuntimeError):
        return None


def demonstrations(scored: ScoredPrompt, attempts: Attempts, cached: PrefixCache | None) -> DemonstrationsReport | None:
    """Return what the explained label loses without each demonstration; None for plain text, and if it is left out."""
    if scored.scores_tokens or not scored.acts.batch.has_demonstrations:
        return None
    with attempts.at("effects of demonstrations"):
        found = effects_of_demonstrations(
            scored.model, scored.acts.batch, scored.targets, against=scored.against, cached=cached
        )
        each, whole = found.of()
        hidden, keys, values = torch.cat([each[0], whole]).T.tolist()
        return DemonstrationsReport(tuple(hidden), tuple(keys), tuple(values), found.begins_text)


def layers(scored: ScoredPrompt) -> LayerReport:
    """Return every layer's increases and contrasts."""
    found: list[tuple[float, ...]] = []
    for against in (None, scored.against) if scored.others else (None,):
        increases = layer_log_prob_increase(scored.acts, scored.targets, against=against, **scored.readout_options)
        found += [tuple(values[0].tolist()) for values in increases]
    return LayerReport(*found)


def all_heads(
    scored: ScoredPrompt, found: Mapping[Score, Float[Tensor, "layer head"]], other_query: str
) -> AllHeadsReport:
    """Return every head's scores, and its attention from the last token to labels or, in plain text, to some tokens."""
    grids: dict[Score, Grid] = {by: tuple(map(tuple, values.tolist())) for by, values in found.items()}
    attended: tuple[int, ...] = ()
    if scored.scores_tokens:
        pattern = scored.acts.pattern[0, :, :, : scored.n_tokens].float()
        strongest = pattern.amax((0, 1)).topk(min(N_ATTENDED_POSITIONS, scored.n_tokens)).indices.sort().values
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
    """Return the (head, position) parts with the largest contrast, or increase if heads are ranked by it."""
    acts = scored.acts
    k = min(2 * scored.options.k, len(acts.view.heads()) * scored.n_tokens)
    by = score_of_parts(scored.options.by, comparable=bool(scored.others))
    by_contrast, against = by == "contrast", scored.against if by == "contrast" else None
    parts = top_subheads(acts, scored.targets, k=k, by=by, against=against, **scored.readout_options)
    other_scores: list[float | None] = [None] * k
    if scored.others:
        other_against = None if by_contrast else scored.against
        options = scored.readout_options
        other_scores = [*subhead_scores_at(acts, parts, scored.targets, against=other_against, **options)[0].tolist()]
    reports = []
    columns = (parts.layer[0], parts.head[0], parts.position[0], parts.value[0])
    rows = zip(*(column.tolist() for column in columns), other_scores, strict=True)
    for layer, head, position, value, other in rows:
        increase, contrast = (other, value) if by_contrast and other is not None else (value, other)
        token = acts.batch.token_names[0][position]
        reports.append(SubheadReport(Head(layer, head), position, token, increase, contrast))
    return SubheadsReport(tuple(reports), int(parts.n_parts[0]), int(parts.n_exact[0]), parts.certified)


def _by_position(
    scored: ScoredPrompt, heads: list[Head], against: Int[Tensor, "1 other"] | None = None
) -> dict[Head, Float[Tensor, " pos"]]:
    """Return these heads' increase, or contrast with `against`, of every position, nats."""
    increases = head_position_increases(scored.acts, scored.targets, heads, against=against, **scored.readout_options)
    return dict(zip(heads, increases[0, ..., : scored.n_tokens], strict=True))


def query_exchanges(scored: ScoredPrompt) -> tuple[Float[Tensor, "layer head"], str]:
    """Return the log-odds that exchanging each head's query costs the explained label, nats, and the other query.

    Raise InputError for text without demonstrations, prompts that do not demonstrate the label and another one, and
    `against` other than all other labels.
    """
    batch = scored.acts.batch
    if scored.scores_tokens:
        raise InputError(
            "by must be 'increase', 'contrast' or 'effect' for text without demonstrations, got 'towers', which "
            "exchanges a demonstrated class for another; pass a prompt with demonstrations"
        )
    if len(scored.others) < int(batch.label_mask[0].sum()) - 1:
        raise InputError(
            f"against must be all other labels with by='towers', got "
            f"{short_repr(list(scored.options.against or ()))}; omit it"
        )
    target = torch.tensor([scored.target], device=batch.answer.device)
    prompts = tower_prompts(scored.model, with_answers(batch, target), own_texts=False)
    lost, _ = single_exchanges(scored.acts.view, prompts, SINGLE[:1])
    return lost[0, 0], prompts.donors["query"].batch.prompts[0].query


def ablation(
    scored: ScoredPrompt, located: list[Head], cached: PrefixCache | None
) -> tuple[Float[Tensor, "located label"], AblationReport]:
    """Return the scored tokens' log-probabilities (nats) with single heads, the located set and random sets zeroed.

    Heads are zeroed at the last position, as for effects, which costs one token for each set of them.
    """
    batch, options = scored.acts.batch, scored.options
    removed = located[: options.n_ablated]
    draws = random_head_sets(scored.model, removed, draws=options.n_random, seed=options.seed, same_layers=False)
    sets = [[Ablate(heads, positions="last")] for heads in [*[[head] for head in located], removed, *draws]]
    log_probs, _ = score_sets(
        scored.acts.view,
        batch,
        sets,
        lambda log_probs, _: log_probs[:, scored.tokens.to(log_probs.device)],
        cached=cached,
    )
    single, joint, random_draws = log_probs[0].split([len(located), 1, len(draws)])
    report = AblationReport(tuple(removed), tuple(joint[0].tolist()), tuple(map(tuple, random_draws.tolist())))
    return single, report


def head_reports(
    scored: ScoredPrompt,
    heads: list[Head],
    scores: Mapping[Score, Float[Tensor, "layer head"]],
    ablated: Float[Tensor, "located label"],
    attempts: Attempts,
) -> Iterator[HeadReport]:
    """Yield a report per located head; results shared by the heads of a layer are computed once.

    `attempts` records the sections that the model's family does not support.
    """
    acts, n_tokens = scored.acts, scored.n_tokens
    by_position = _by_position(scored, heads)
    contrast_by_position = _by_position(scored, heads, scored.against) if scored.others else {}
    similarities, reasons = _similarities(scored, heads, attempts), _reasons(scored, heads, attempts)
    own_labels = acts.batch.label_tokens[acts.batch.label_index[0]].tolist() if acts.batch.labels else []
    positions, groups, tokens = list[list[int]](), list[Tensor](), list[int]()
    for head in heads:
        if scored.scores_tokens:
            attention = acts.pattern[0, head.layer, head.head, :n_tokens].float()
            positions.append(attention.topk(min(N_DESCRIBED_POSITIONS, n_tokens)).indices.sort().values.tolist())
            v = acts.values(head.layer)[0, positions[-1], acts.view.kv_head(head.head)].to(acts.readout.dtype)
            values, keys = v @ acts.view.W_O(head.layer)[head.head].to(v.dtype), v.new_empty(0, acts.view.d_model)
            own = acts.batch.tokens[0, positions[-1]].tolist()
        else:
            positions.append([])
            values, keys, own = acts.label_values(head)[0], acts.label_keys(head)[0], own_labels
        _, written = reasons[len(positions) - 1]
        of_writers = [written.get(side, keys[:0]) for side in SIDES]
        query = values[:0]
        with attempts.at("top words of queries"):
            query = acts.last_query(head)
        groups += [query, values, keys, *of_writers]
        tokens += [*[-1] * len(query), *own, *[-1] * (len(keys) + sum(map(len, of_writers)))]
    words = acts.readout.describe(torch.cat(groups), torch.tensor(tokens), k=N_WORDS, keep="words")
    rows = [slice(end - len(group), end) for group, end in zip(groups, accumulate(map(len, groups)), strict=True)]
    names, standouts = [tuple(one) for one in words.tokens], words.standouts.tolist()
    for i, head in enumerate(heads):
        query, values, keys, *of_writers = rows[6 * i : 6 * i + 6]
        why, _ = reasons[i]
        if why is not None:
            side_words = {f"{side}_words": tuple(names[own]) for side, own in zip(SIDES, of_writers, strict=True)}
            side_standouts = {
                f"{side}_standouts": tuple(standouts[own]) for side, own in zip(SIDES, of_writers, strict=True)
            }
            why = replace(why, **side_words, **side_standouts)
        yield HeadReport(
            head=head,
            **{by: float(values[head]) for by, values in scores.items()},
            attention=tuple(acts.pattern[0, head.layer, head.head, :n_tokens].tolist()),
            position_increases=tuple(by_position[head].tolist()),
            value_words=tuple(names[values]),
            value_ranks=tuple(words.ranks[values].tolist()),
            key_words=tuple(names[keys]),
            query_words=names[query][0] if names[query] else (),
            value_standouts=tuple(standouts[values]),
            key_standouts=tuple(standouts[keys]),
            query_standout=standouts[query][0] if names[query] else None,
            ablated=tuple(ablated[i].tolist()),
            position_contrasts=tuple(contrast_by_position[head].tolist()) if scored.others else (),
            positions=tuple(positions[i]),
            similarity=similarities[i],
            why=why,
        )


def _similarities(scored: ScoredPrompt, heads: list[Head], attempts: Attempts) -> list[tuple[tuple[float, ...], ...]]:
    """Return each head's `label_similarity`.

    Empty for plain text, or if it is left out.
    """
    if not scored.scores_tokens:
        with attempts.at("attention scores without positions"):
            return [tuple(map(tuple, rows)) for rows in similarity_in(scored.acts, heads)[0].tolist()]
    return [()] * len(heads)


def _reasons(
    scored: ScoredPrompt, heads: list[Head], attempts: Attempts
) -> list[tuple[AttentionReasons | None, dict[Side, Float[Tensor, "n d_model"]]]]:
    """Return why each head attends to the target's labels rather than other labels, and its strongest writers' vectors.

    For plain text, compare its most attended token with the next. A head whose scores cannot be split has None.
    """
    batch, acts = scored.acts.batch, scored.acts
    if scored.scores_tokens:
        attended = [acts.pattern[0, head.layer, head.head, : scored.n_tokens].float() for head in heads]
        groups = [[[position] for position in one.topk(min(2, scored.n_tokens)).indices.tolist()] for one in attended]
        positions = sorted({position for pair in groups for (position,) in pair})
        acts = capture(scored.model, batch, writers=positions, check=False)
        read = None
    else:
        of_target = batch.label_index[0] == scored.target
        groups = [[batch.label_positions[0, mask].tolist() for mask in (of_target, ~of_target)]] * len(heads)
        read = [position for position in batch.label_token_positions[0, of_target].flatten().tolist() if position >= 0]
    found: list[tuple[AttentionReasons | None, dict[Side, Tensor]]] = []
    for head, group in zip(heads, groups, strict=True):
        found.append((None, {}))
        with attempts.at("why heads attend where they do"):
            if len(group) == 2 and all(group):
                found[-1] = attention_reasons(acts, head, group[0], group[1], scored.targets, scored.against, read=read)
    return found
