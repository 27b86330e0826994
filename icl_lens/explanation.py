"""Explain one prompt: what raises the answer, what those heads encode, and what ablating them does."""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture, last_log_probs
from icl_lens.activations.multi_token_labels import continuation_log_probs, tokenize_labels, whole_label_log_probs
from icl_lens.attribution.attention import attention_to_labels
from icl_lens.attribution.circuits import is_content_word, label_keys, label_values, last_query
from icl_lens.attribution.increases import (
    head_log_prob_increase,
    head_position_increases,
    layer_log_prob_increase,
)
from icl_lens.attribution.reasons import AttentionReasons, attention_reasons
from icl_lens.attribution.search import top_subheads
from icl_lens.attribution.similarity import compared_positions, similarity_in
from icl_lens.display import format_signed
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import ablate_heads_per_row
from icl_lens.interventions.effects import head_effects
from icl_lens.models.attention_scores import RotaryAnglesUnavailable
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model
from icl_lens.models.readout import FinalNorm
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.plain_text import tokenize_text
from icl_lens.prompts.prompt import Prompt, Template, quoted_list
from icl_lens.prompts.token_ids import name_tokens
from icl_lens.prompts.tokenize import tokenize
from icl_lens.report import explanation_json
from icl_lens.report.findings import AblationReport, By, ExplainOptions, Findings, HeadReport, SubheadReport
from icl_lens.report.html.page import explanation_inline, explanation_page, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tokens per ablation pass: many rows for short prompts, one row for long ones.
PASS_TOKENS = 2048
# For plain text: positions stored with every head's attention, and positions described for each located head.
N_ATTENDED_POSITIONS, N_DESCRIBED_POSITIONS = 24, 5


@dataclass(frozen=True)
class Explanation(Findings):
    """The result of `explain`: displays itself in a notebook and exports tables, JSON and a page.

    Log-probabilities and increases are in nats. `labels[i]` belongs to `label_log_probs[i]`; `target` is the label
    whose log-probability is explained (the answer if the prompt has one, else the prediction).
    `label_attention[layer][head][demo]` is every head's attention from the last token to the labels.

    Example:
        >>> explanation = il.explain(model, prompt)
        >>> explanation.label_positions
        (3, 7, 11, 15)
        >>> explanation.to_frame("heads").columns.tolist()
        ['layer', 'head', 'name', 'increase', 'contrast']
    """

    def __repr__(self) -> str:
        by = self.settings.by
        best = ", ".join(f"{report.head} {format_signed(report.scores[by])}" for report in self.heads[:5])
        where = f"{self.model}, {len(self.tokens)} tokens"
        return f"Explanation({where}: {self.headline}; heads by {by} for {self.target!r}, nats: {best})"

    @cached_property
    def figures(self) -> "dict[str, Figure]":
        """Matplotlib figures by name: "layers", "heads", "top_heads"."""
        from icl_lens.report import plots  # import matplotlib only if figures are requested

        return plots.explanation_figures(self)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return the explanation as a self-contained page, or write it to `path` atomically."""
        page = explanation_page(self)
        if path is None:
            return page
        write_page(page, Path(path))
        return None

    def save(self, path: str | Path) -> None:
        """Write all numbers as JSON that `load` reads. Raise InputError if the folder is not writable.

        Example:
            >>> import tempfile
            >>> explanation = il.explain(model, prompt, k=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     explanation.save(f"{folder}/explanation.json")
            ...     loaded = il.Explanation.load(f"{folder}/explanation.json")
            >>> loaded == explanation
            True
        """
        explanation_json.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Explanation":
        """Load an explanation written by `save` or `icl-lens explain --json`, without the model.

        Raises InputError for a file that is missing, damaged, or of another kind or version.
        """
        return explanation_json.load(cls, path)

    def _repr_html_(self) -> str:
        return explanation_inline(self)


@locks_model
def explain(
    model: Any,
    prompt: Prompt | PromptBatch | str,
    *,
    answer: str | int | None = None,
    against: str | int | Sequence[str | int] | None = None,
    plain_text: bool = False,
    template: Template | None = None,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    by: By | None = None,
    why: Head | tuple[int, int] | str | None = None,
    k: int = 10,
    n_ablated: int = 4,
    n_random: int = 20,
    seed: int = 0,
) -> Explanation:
    """Explain one prompt's answer, or the next token of any text.

    `prompt` may be a string for `Prompt.parse`. Log-probability increases are those of the answer's token, or of the
    label that the model predicts if the prompt has no answer. The `k` heads with the largest score are described;
    the first `n_ablated` of them are zeroed jointly and compared with `n_random` random sets of the same size.
    Increases are not additive: those of the parts need not sum to that of the total.

    Each increase comes with a contrast: what the part adds to log p(answer) − log Σ p(`against`), where `against`
    defaults to all other labels. The contrast separates heads that find the answer from heads that raise every label.
    `by` selects the score that ranks heads: "contrast" (default with `against`), "increase" (default without), or
    "effect", the drop of log p(answer), or of the contrast with `against`, if the head is zeroed at the last position.

    Each described head's attention and values are split by what earlier components wrote (`attention_score_parts`,
    `value_parts`). `why` names a head to describe also if it is not among the k.

    Plain text has no demonstrations, and its target is any token, given with its leading space (`answer=" Mary"`,
    `against=" John"`) or as an id; without `answer`, the target is the model's most probable token. A string is plain
    text with `plain_text=True`, or if it has no standalone colon and `answer` or `against` is given. A one-row
    `PromptBatch` from `tokenize_text` holds its own targets. `shared_prefix` is passed to `tokenize`.

    Raises InputError for invalid prompts; warns if a label is scored by a white-space token.

    Example:
        >>> explanation = il.explain(model, prompt, k=4)
        >>> explanation.target, len(explanation.heads)
        ('foo', 4)
        >>> explanation.compared_with
        ('bar',)
        >>> il.explain(model, "love bar love", answer=" bar", k=3).is_plain_text
        True
    """
    options = ExplainOptions(
        final_norm=final_norm,
        bias=bias,
        k=k,
        n_ablated=n_ablated,
        n_random=n_random,
        seed=seed,
        prepend_bos=prepend_bos,
        against=_listed(against),
        shared_prefix=shared_prefix,
    )
    if by is not None:
        check_choice("by", by, get_args(By))
    if isinstance(prompt, PromptBatch):
        given = {"answer": answer, "against": against, "plain_text": plain_text or None}
        _check_single_row(prompt, **given, template=template, labels=labels, prepend_bos=prepend_bos)
        batch = prompt
        if batch.targets is not None:
            others = None if batch.against is None else [token for token in batch.against[0].tolist() if token >= 0]
            target = int(batch.answer_tokens[0])
            options = replace(options, target=None if target < 0 else target, against=_listed(others or None))
    elif isinstance(prompt, str) and (
        plain_text or ((answer is not None or against is not None) and ":" not in prompt.split())
    ):
        if template is not None or labels is not None or shared_prefix != "error":
            raise InputError(
                f"template, labels and shared_prefix do not apply to plain text, and {prompt!r} is read as plain text; "
                "omit these arguments, or write each demonstration as 'text : label'"
            )
        options = replace(options, target=answer)
        others = None if options.against is None else [list(options.against)]
        batch = tokenize_text(model, prompt, targets=answer, against=others, prepend_bos=prepend_bos)
    else:
        if plain_text:
            raise InputError(f"prompt must be a string with plain_text=True, got {type(prompt).__name__}")
        if isinstance(answer, int):
            raise InputError(f"answer must be one of the prompt's labels, got the token id {answer}; pass a label")
        if isinstance(prompt, str):
            prompt = Prompt.parse(prompt, answer=answer)
        elif answer is not None:
            prompt = replace(prompt, answer=answer)
        template = template or Template()
        batch = tokenize(
            model, [prompt], template=template, labels=labels, prepend_bos=prepend_bos, shared_prefix=shared_prefix
        )

    acts = capture(
        model, batch, writers=bool(batch.labels) if batch.prediction_positions is None else compared_positions(batch)
    )
    why = None if why is None else acts.view.check_head(why)
    by = by or ("increase" if options.against is None else "contrast")
    options = replace(
        options, by=by, why=None if why is None else str(why), dtype=str(acts.z.dtype).removeprefix("torch.")
    )
    scored = _ScoredPrompt.of(model, acts, options)
    increases = head_log_prob_increase(acts, scored.targets, **scored.readout_options)[0]
    contrasts = effects = None
    if scored.others:
        contrasts = head_log_prob_increase(acts, scored.targets, against=scored.against, **scored.readout_options)[0]
    if by == "effect":
        others = None if options.against is None else scored.against
        found = head_effects(model, batch, scored.targets, against=others, positions="last")
        effects = (found.log_prob if found.logit_diff is None else found.logit_diff)[0]
    scores = {"increase": increases, "contrast": contrasts, "effect": effects}[by]
    if scores is None:
        raise InputError(
            "by must be 'increase' or 'effect' without tokens to compare with, got 'contrast'; pass against="
        )
    order = scores.flatten().argsort(descending=True)[:k].tolist()
    located = [Head.from_index(index, acts.view.n_heads) for index in order]
    located += [why] if why is not None and why not in located else []
    single, ablation = _ablation(scored, located)
    explanation = Explanation(
        **_prompt(scored),
        **(_plain_text(scored) if scored.is_plain_text else _labels(scored)),
        **_scores(scored),
        **_layers(scored),
        **_positions(scored),
        head_increases=tuple(map(tuple, increases.tolist())),
        head_contrasts=() if contrasts is None else tuple(map(tuple, contrasts.tolist())),
        head_effects=() if effects is None else tuple(map(tuple, effects.tolist())),
        heads=tuple(_head_reports(scored, located, increases, contrasts, effects, single)),
        ablation=ablation,
    )
    # The first remark only states that multi-token labels are scored by one token.
    for remark in () if explanation.is_plain_text else explanation.remarks[1:]:
        warnings.warn(remark, stacklevel=3)
    return explanation


def _listed(against: str | int | Sequence[str | int] | None) -> tuple[str | int, ...] | None:
    if against is None or isinstance(against, (str, int)):
        return None if against is None else (against,)
    if not against:
        raise InputError("against must not be empty; pass labels or tokens to compare the answer with, or omit it")
    return tuple(against)


def _check_single_row(batch: PromptBatch, **given: Any) -> None:
    """Raise InputError unless the batch has one row and no argument duplicates what it holds."""
    if len(batch) != 1:
        raise InputError(f"prompt must be a batch of one row, got {len(batch)} rows; pass one prompt, e.g. batch[0]")
    conflicting = [name for name, value in given.items() if value is not None]
    if conflicting:
        name = conflicting[0]
        raise InputError(f"{name} must be None for a tokenized prompt, got {given[name]!r}; pass it when tokenizing")


@dataclass(frozen=True)
class _ScoredPrompt:
    """The captured prompt, the scored tokens with their names, and which of them are the target and the others."""

    model: Any
    acts: Activations
    options: ExplainOptions
    tokens: Int[Tensor, " label"]
    names: tuple[str, ...]
    target: int
    others: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, acts: Activations, options: ExplainOptions) -> "_ScoredPrompt":
        """Check the options; score the labels of a prompt, or plain text's target and the tokens it is compared with.

        Raise InputError for invalid options.
        """
        batch, device = acts.batch, acts.readout.W_U.device
        most = len(acts.view.heads()) // 2
        if options.k < 1:
            raise InputError(f"k must be at least 1, got {options.k}")
        if not 1 <= options.n_ablated <= most:
            raise InputError(
                f"n_ablated must be between 1 and {most}, half of all heads, got {options.n_ablated}; random sets need "
                "the other half"
            )
        if batch.labels and batch.targets is None:
            target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
            if options.against is None:
                others = [i for i in range(len(batch.labels)) if i != target and bool(batch.label_mask[0, i])]
            else:
                others = [_label(batch, name, batch.labels[target]) for name in dict.fromkeys(options.against)]
            return cls(model, acts, options, batch.label_tokens.to(device), batch.labels, target, tuple(others))
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
    def is_plain_text(self) -> bool:
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
    if name not in batch.labels:
        raise InputError(f"against must be one of the labels {quoted_list(batch.labels)}, got {name!r}; pass a label")
    if name == target:
        raise InputError(f"against must differ from the explained label {name!r}; pass other labels, or omit it")
    return batch.labels.index(name)


# Sections: each returns fields of the explanation.


def _prompt(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return the fields for the model, the settings and the tokens."""
    batch, view = scored.acts.batch, scored.acts.view
    return {
        "model": view.name,
        "source": view.source,
        "quantization": view.quantization,
        "template": batch.template,
        "settings": scored.options,
        "tokens": tuple(batch.token_strings[0][: scored.n_tokens]),
        "token_names": tuple(batch.token_names[0][: scored.n_tokens]),
        "versions": tuple((name, version(name)) for name in ("icl-lens", "torch", "transformers", "transformer-lens")),
    }


def _labels(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return the fields that only prompts with demonstrations have."""
    batch, model = scored.acts.batch, scored.model
    spelled = tokenize_labels(model, batch)
    whole: Sequence[float] = ()
    if any(len(ids) > 1 for ids in spelled.labels):
        whole = whole_label_log_probs(model, batch)[0].tolist()
    predicted = () if batch.prediction_positions is None else tuple(batch.prediction_positions[0].tolist())
    return {
        "prompt": batch.prompts[0],
        "text": batch.texts[0] if batch.texts else "",
        "label_positions": tuple(batch.label_positions[0].tolist()),
        "prediction_positions": predicted,
        "demonstration_labels": tuple(batch.label_index[0].tolist()),
        "label_attention": _nested(attention_to_labels(scored.acts)[0]),
        "label_token_names": tuple(map(tuple, name_tokens(model.tokenizer, [list(ids) for ids in spelled.labels]))),
        "n_shared_tokens": scored.n_tokens - len(spelled.prompt),
        "whole_label_log_probs": tuple(whole),
    }


def _plain_text(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return the fields that only plain text has."""
    batch, tokenizer, n_tokens = scored.acts.batch, scored.model.tokenizer, scored.n_tokens
    pattern = scored.acts.pattern[0, :, :, :n_tokens].float()
    watched = pattern.amax((0, 1)).topk(min(N_ATTENDED_POSITIONS, n_tokens)).indices.sort().values
    text = batch.texts[0] if batch.prompt_index is None and batch.texts else "".join(batch.token_strings[0][:n_tokens])
    spelled = {token: [token] for token in scored.tokens.tolist()}
    for given in (scored.options.target, *(scored.options.against or ())):
        if isinstance(given, str):
            before, after = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (text, text + given))
            spelled[after[len(before)]] = after[len(before) :]
    spellings = list(spelled.values())
    whole: Sequence[float] = ()
    if any(len(ids) > 1 for ids in spellings):
        prompt = batch.tokens[0, :n_tokens].tolist()
        whole = continuation_log_probs(scored.model, [(prompt, ids) for ids in spellings]).tolist()
    return {
        "prompt": None,
        "text": text,
        "label_positions": (),
        "demonstration_labels": (),
        "label_attention": (),
        "attended_positions": tuple(watched.tolist()),
        "attended_attention": _nested(pattern[:, :, watched]),
        "label_token_names": tuple(map(tuple, name_tokens(tokenizer, spellings))),
        "whole_label_log_probs": tuple(whole),
    }


def _nested(values: Float[Tensor, "i j k"]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return tuple(tuple(map(tuple, layer)) for layer in values.tolist())


def _scores(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return the scored tokens' log-probabilities, and the five most probable tokens, with all biases."""
    readout = scored.acts.readout
    log_probs = readout.log_probs(scored.acts.resid_final)[0]
    best = log_probs.exp().topk(5)
    assert readout.decode is not None  # tokenizing required the tokenizer
    names = name_tokens(scored.model.tokenizer, [best.indices.tolist()])[0]
    return {
        "labels": scored.names,
        "label_log_probs": tuple(log_probs[scored.tokens].tolist()),
        "target": scored.names[scored.target],
        "target_token": readout.decode(int(scored.tokens[scored.target])),
        "next_tokens": tuple(zip(names, best.values.tolist(), strict=True)),
        "compared_with": tuple(scored.names[i] for i in scored.others),
        "contrast_adds_up": len(scored.others) == 1 and readout.using(**scored.readout_options).is_affine,
    }


def _layers(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return every layer's increases and contrasts."""
    attn, ffn = layer_log_prob_increase(scored.acts, scored.targets, **scored.readout_options)
    fields = {"layer_attn": tuple(attn[0].tolist()), "layer_ffn": tuple(ffn[0].tolist())}
    if scored.others:
        attn, ffn = layer_log_prob_increase(
            scored.acts, scored.targets, against=scored.against, **scored.readout_options
        )
        fields |= {"layer_attn_contrast": tuple(attn[0].tolist()), "layer_ffn_contrast": tuple(ffn[0].tolist())}
    return fields


def _positions(scored: _ScoredPrompt) -> dict[str, Any]:
    """Return the (head, position) parts with the largest increase, or contrast if heads are ranked by it."""
    acts = scored.acts
    k = min(2 * scored.options.k, len(acts.view.heads()) * scored.n_tokens)
    against, other = None, scored.against
    if scored.options.by == "contrast":
        against, other = other, against
    parts = top_subheads(acts, scored.targets, k=k, against=against, **scored.readout_options)
    heads = sorted({*map(Head, parts.layer[0].tolist(), parts.head[0].tolist())})
    others = _by_position(scored, heads, other) if scored.others else None
    reports = []
    columns = (parts.layer[0], parts.head[0], parts.position[0], parts.value[0])
    for layer, head, position, value in zip(*(column.tolist() for column in columns), strict=True):
        increase, contrast = value, None if others is None else float(others[Head(layer, head)][position])
        if against is not None and contrast is not None:
            increase, contrast = contrast, increase
        token = acts.batch.token_names[0][position]
        reports.append(SubheadReport(Head(layer, head), position, token, increase, contrast))
    return {
        "subheads": tuple(reports),
        "n_parts": int(parts.n_parts[0]),
        "n_exact": int(parts.n_exact[0]),
        "certified": parts.certified,
    }


def _by_position(
    scored: _ScoredPrompt, heads: list[Head], against: Int[Tensor, "1 other"] | None = None
) -> dict[Head, Float[Tensor, " pos"]]:
    """Return the increases, or contrasts, of every position of these heads, nats."""
    increases = head_position_increases(scored.acts, scored.targets, heads, against=against, **scored.readout_options)[
        0
    ]
    return dict(zip(heads, increases[..., : scored.n_tokens], strict=True))


def _ablation(scored: _ScoredPrompt, located: list[Head]) -> tuple[Float[Tensor, "located label"], AblationReport]:
    """Return the scored tokens' log-probabilities (nats) with single heads, the located set and random sets zeroed."""
    model, batch, options = scored.model, scored.acts.batch, scored.options
    removed = located[: options.n_ablated]
    others = [head for head in scored.acts.view.heads() if head not in removed]
    rng = random.Random(options.seed)
    draws = [rng.sample(others, len(removed)) for _ in range(options.n_random)]
    sets = [*[[head] for head in located], removed, *draws]
    rows = max(1, PASS_TOKENS // batch.tokens.shape[1])
    label_log_probs = []
    for sets_of_pass in (sets[start : start + rows] for start in range(0, len(sets), rows)):
        with ablate_heads_per_row(model, sets_of_pass):
            log_probs = last_log_probs(model, batch[[0] * len(sets_of_pass)])
        label_log_probs.append(log_probs[:, scored.tokens.to(log_probs.device)])
    single, joint, random_draws = torch.cat(label_log_probs).split([len(located), 1, len(draws)])
    report = AblationReport(tuple(removed), tuple(joint[0].tolist()), tuple(map(tuple, random_draws.tolist())))
    return single, report


def _head_reports(
    scored: _ScoredPrompt,
    heads: list[Head],
    increases: Float[Tensor, "layer head"],
    contrasts: Float[Tensor, "layer head"] | None,
    effects: Float[Tensor, "layer head"] | None,
    ablated: Float[Tensor, "located label"],
) -> Iterator[HeadReport]:
    """Yield a report per located head; results shared by the heads of a layer are computed once."""
    acts, n_tokens = scored.acts, scored.n_tokens
    by_position = _by_position(scored, heads)
    contrast_by_position = _by_position(scored, heads, scored.against) if scored.others else {}
    similarities, reasons = _similarities(scored, heads), _reasons(scored, heads)
    own_labels = acts.batch.label_tokens[acts.batch.label_index[0]].tolist() if acts.batch.labels else []
    positions, groups, tokens = list[list[int]](), list[Tensor](), list[int]()
    for head in heads:
        if scored.is_plain_text:
            attention = acts.pattern[0, head.layer, head.head, :n_tokens].float()
            positions.append(attention.topk(min(N_DESCRIBED_POSITIONS, n_tokens)).indices.sort().values.tolist())
            v = acts.values(head.layer)[0, positions[-1], acts.view.kv_head(head.head)].to(acts.readout.dtype)
            values, keys = v @ acts.view.W_O(head.layer)[head.head].to(v.dtype), v.new_empty(0, acts.view.d_model)
            own = acts.batch.tokens[0, positions[-1]].tolist()
        else:
            positions.append([])
            values, keys, own = label_values(acts, head)[0], label_keys(acts, head)[0], own_labels
        groups += [last_query(acts, head), values, keys]
        tokens += [-1, *own, *[-1] * len(keys)]
    words = acts.readout.describe(
        torch.cat(groups), torch.tensor(tokens), k=scored.options.n_words, keep=is_content_word
    )
    rows = [slice(end - len(group), end) for group, end in zip(groups, accumulate(map(len, groups)), strict=True)]
    names, standouts = [tuple(one) for one in words.tokens], words.standouts.tolist()
    for i, head in enumerate(heads):
        query, values, keys = rows[3 * i : 3 * i + 3]
        yield HeadReport(
            head=head,
            increase=float(increases[head]),
            attention=tuple(acts.pattern[0, head.layer, head.head, :n_tokens].tolist()),
            position_increases=tuple(by_position[head].tolist()),
            value_words=tuple(names[values]),
            value_ranks=tuple(words.ranks[values].tolist()),
            key_words=tuple(names[keys]),
            query_words=names[query][0],
            value_standouts=tuple(standouts[values]),
            key_standouts=tuple(standouts[keys]),
            query_standout=standouts[query][0],
            ablated=tuple(ablated[i].tolist()),
            contrast=None if contrasts is None else float(contrasts[head]),
            position_contrasts=tuple(contrast_by_position[head].tolist()) if scored.others else (),
            positions=tuple(positions[i]),
            similarity=similarities[i],
            effect=None if effects is None else float(effects[head]),
            why=reasons[i],
        )


def _similarities(scored: _ScoredPrompt, heads: list[Head]) -> list[tuple[tuple[float, ...], ...]]:
    """Return each head's `label_similarity`.

    Empty for plain text, without prediction positions, or if the rotary angles are unavailable.
    """
    if not scored.is_plain_text and scored.acts.batch.prediction_positions is not None:
        with suppress(RotaryAnglesUnavailable):  # the other fields need no angles
            return [tuple(map(tuple, rows)) for rows in similarity_in(scored.acts, heads)[0].tolist()]
    return [()] * len(heads)


def _reasons(scored: _ScoredPrompt, heads: list[Head]) -> list[AttentionReasons | None]:
    """Return why each head attends to the target's labels, or in plain text to its most attended token."""
    batch, acts = scored.acts.batch, scored.acts
    if scored.is_plain_text:
        attended = [acts.pattern[0, head.layer, head.head, : scored.n_tokens].float() for head in heads]
        groups = [[[place] for place in one.topk(min(2, scored.n_tokens)).indices.tolist()] for one in attended]
        acts = capture(
            scored.model, batch, writers=sorted({place for pair in groups for (place,) in pair}), check=False
        )
    else:
        of_target = batch.label_index[0] == scored.target
        groups = [[batch.label_positions[0, mask].tolist() for mask in (of_target, ~of_target)]] * len(heads)
    found: list[AttentionReasons | None] = []
    for head, group in zip(heads, groups, strict=True):
        found.append(None)
        with suppress(InputError):  # the other fields need no split of scores
            if len(group) == 2 and all(group):
                found[-1] = attention_reasons(acts, head, group[0], group[1], scored.targets, scored.against)
    return found
