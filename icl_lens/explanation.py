"""Explain one prompt: what raises the answer, what those heads encode, and what ablating them does."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture, last_log_probs
from icl_lens.activations.multi_token_labels import continuation_log_probs, tokenize_labels, whole_label_log_probs
from icl_lens.attribution.attention import attention_to_labels
from icl_lens.attribution.circuits import is_content_word, label_keys, label_values, last_query, own_label_ranks
from icl_lens.attribution.increases import (
    LayerIncreases,
    head_log_prob_increase,
    layer_log_prob_increase,
    subhead_log_prob_increase,
)
from icl_lens.attribution.search import TopSubheads, top_subheads
from icl_lens.attribution.similarity import label_similarity
from icl_lens.display import format_signed
from icl_lens.errors import InputError
from icl_lens.interventions.ablation import ablate_heads_per_row
from icl_lens.models.attention_scores import RotaryAnglesUnavailable
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.plain_text import tokenize_text
from icl_lens.prompts.prompt import Prompt, Template, quoted_list
from icl_lens.prompts.token_ids import name_tokens
from icl_lens.prompts.tokenize import tokenize
from icl_lens.report import explanation_json
from icl_lens.report.findings import AblationReport, ExplainOptions, Findings, HeadReport, SubheadReport
from icl_lens.report.html.page import explanation_inline, explanation_page, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tokens per ablation pass: many rows for short prompts, one row for long ones.
PASS_TOKENS = 2048
# For plain text: positions stored with every head's attention, and positions described for each located head.
WATCHED, DESCRIBED = 24, 5


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
        best = ", ".join(f"{report.head} {format_signed(report.increase)}" for report in self.heads[:5])
        where = f"{self.model}, {len(self.tokens)} tokens"
        return f"Explanation({where}: {self.headline}; heads that raise {self.target!r} most, nats: {best})"

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
    template: Template | None = None,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    k: int = 10,
    n_ablated: int = 4,
    n_random: int = 20,
    seed: int = 0,
) -> Explanation:
    """Explain one prompt's answer, or the next token of any text.

    `prompt` may be a string for `Prompt.parse`. Log-probability increases are those of the answer's token, or of the
    label that the model predicts if the prompt has no answer. The `k` heads with the largest increase are described;
    the first `n_ablated` of them are zeroed jointly and compared with `n_random` random sets of the same size.
    Increases are not additive: those of the parts need not sum to the whole's.

    Each increase comes with a contrast: what the part adds to log p(answer) − log Σ p(`against`), where `against`
    defaults to all other labels. The contrast separates heads that find the answer from heads that raise every label.

    A string without a standalone colon is plain text if `answer` or `against` is given. Plain text has no
    demonstrations, and its target is any token, given with its leading space (`answer=" Mary", against=" John"`) or as
    an id; without `answer`, the target is the model's most probable token. For plain text that contains a colon, pass a
    one-row `PromptBatch` from `tokenize_text`, which holds its own targets. `shared_prefix` is passed to `tokenize`.

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
    if isinstance(prompt, PromptBatch):
        _check_alone(prompt, answer=answer, against=against, template=template, labels=labels, prepend_bos=prepend_bos)
        batch = prompt
        if batch.targets is not None:
            others = None if batch.against is None else [token for token in batch.against[0].tolist() if token >= 0]
            target = int(batch.answer_tokens[0])
            options = replace(options, target=None if target < 0 else target, against=_listed(others or None))
    elif isinstance(prompt, str) and (answer is not None or against is not None) and ":" not in prompt.split():
        if template is not None or labels is not None or shared_prefix != "error":
            raise InputError(
                f"template, labels and shared_prefix must be omitted for plain text, got the prompt {prompt!r} without "
                "a ' : ' separator; omit them, or write 'text : label' for each demonstration"
            )
        return explain_text(model, prompt, replace(options, target=answer))
    else:
        if isinstance(answer, int):
            raise InputError(f"answer must be one of the prompt's labels, got the token id {answer}; pass a label")
        if isinstance(prompt, str):
            prompt = Prompt.parse(prompt, answer=answer)
        elif answer is not None:
            prompt = replace(prompt, answer=answer)
        batch = tokenize(
            model,
            [prompt],
            template=template or Template(),
            labels=labels,
            prepend_bos=prepend_bos,
            shared_prefix=shared_prefix,
        )
    explanation = _capture_and_explain(model, batch, options)
    for remark in () if explanation.is_plain_text else explanation.remarks[1:]:
        warnings.warn(remark, stacklevel=2)
    return explanation


def explain_text(model: Any, text: str, options: ExplainOptions) -> Explanation:
    """Explain the next token of a text, without parsing demonstrations.

    Raises InputError like `tokenize_text`.
    """
    others = None if options.against is None else [list(options.against)]
    batch = tokenize_text(model, text, targets=options.target, against=others, prepend_bos=options.prepend_bos)
    return _capture_and_explain(model, batch, options)


def _capture_and_explain(model: Any, batch: PromptBatch, options: ExplainOptions) -> Explanation:
    acts = capture(model, batch)
    return _explain(model, acts, replace(options, dtype=str(acts.z.dtype).removeprefix("torch.")))


def _listed(against: str | int | Sequence[str | int] | None) -> tuple[str | int, ...] | None:
    if against is None or isinstance(against, (str, int)):
        return None if against is None else (against,)
    if not against:
        raise InputError("against must not be empty; pass labels or tokens to compare the answer with, or omit it")
    return tuple(against)


def _check_alone(batch: PromptBatch, **given: Any) -> None:
    """Raise InputError unless the batch has one row and no argument duplicates what it holds."""
    if len(batch) != 1:
        raise InputError(f"prompt must be a batch of one row, got {len(batch)} rows; pass one prompt, e.g. batch[0]")
    conflicting = [name for name, value in given.items() if value is not None]
    if conflicting:
        name = conflicting[0]
        raise InputError(f"{name} must be None for a tokenized prompt, got {given[name]!r}; pass it when tokenizing")


@dataclass(frozen=True)
class _ScoredTokens:
    """Scored token ids and their names, the index of the target, and the indices it is compared with."""

    tokens: Int[Tensor, " label"]
    names: tuple[str, ...]
    target: int
    others: tuple[int, ...]
    free: bool

    @property
    def targets(self) -> Int[Tensor, " 1"]:
        return self.tokens[[self.target]]

    @property
    def against(self) -> Int[Tensor, "1 other"] | None:
        return self.tokens[list(self.others)][None] if self.others else None


def _asked(acts: Activations, options: ExplainOptions, tokenizer: Any) -> _ScoredTokens:
    """Return the labels of a prompt, or, for plain text, the target and the tokens it is compared with."""
    batch, device = acts.batch, acts.readout.W_U.device
    if batch.labels and batch.targets is None:
        target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
        if options.against is None:
            others = [i for i in range(len(batch.labels)) if i != target and bool(batch.label_mask[0, i])]
        else:
            others = [_label(batch, one, batch.labels[target]) for one in dict.fromkeys(options.against)]
        return _ScoredTokens(batch.label_tokens.to(device), batch.labels, target, tuple(others), free=False)
    scored = int(batch.answer_tokens[0])
    if scored < 0:
        scored = int(acts.readout.using(final_norm="frozen", bias=True).logits(acts.resid_final)[0].argmax())
    others = [] if batch.against is None else [token for token in batch.against[0].tolist() if token >= 0]
    if scored in others:
        raise InputError(
            f"against must not contain the target {name_tokens(tokenizer, [[scored]])[0][0]!r}, which is the model's "
            "most probable token; pass answer="
        )
    ids = list(dict.fromkeys([scored, *others]))
    names = tuple(name_tokens(tokenizer, [ids])[0])
    return _ScoredTokens(torch.tensor(ids, device=device), names, 0, tuple(range(1, len(ids))), free=True)


def _label(batch: PromptBatch, name: str | int, target: str) -> int:
    if name not in batch.labels:
        raise InputError(f"against must be one of the labels {quoted_list(batch.labels)}, got {name!r}; pass a label")
    if name == target:
        raise InputError(f"against must differ from the explained label {name!r}; pass other labels, or omit it")
    return batch.labels.index(name)


def _explain(model: Any, acts: Activations, options: ExplainOptions) -> Explanation:
    batch, view = acts.batch, acts.view
    _check(options, view)
    scored = _asked(acts, options, model.tokenizer)
    targets, against = scored.targets, scored.against
    convention: dict[str, Any] = {"final_norm": options.final_norm, "bias": options.bias}
    n_heads, n_tokens = view.n_layers * view.n_heads, int(batch.last[0]) + 1

    layers = layer_log_prob_increase(acts, targets, **convention)
    increases = head_log_prob_increase(acts, targets, **convention)[0]
    order = increases.flatten().argsort(descending=True)[: min(options.k, n_heads)]
    located = [Head.from_index(index, view.n_heads) for index in order.tolist()]
    parts = top_subheads(acts, targets, k=min(2 * options.k, n_heads * n_tokens), **convention)
    contrasts = None
    if against is not None:
        contrasts = _Contrasts(
            layer_log_prob_increase(acts, targets, against=against, **convention),
            head_log_prob_increase(acts, targets, against=against, **convention)[0],
            {
                layer: subhead_log_prob_increase(acts, targets, layers=[layer], against=against, **convention)[0, 0]
                for layer in {*parts.layer[0].tolist(), *(head.layer for head in located)}
            },
        )

    single, ablation = _ablation_results(model, acts, located, scored, options)
    described = _in_free(model, acts, scored, options) if scored.free else _in_labels(model, acts)
    reports = list(_head_reports(acts, located, increases, targets, single, options, contrasts, scored.free))
    log_probs = acts.readout.using(final_norm="frozen", bias=True).log_probs(acts.resid_final)[0, scored.tokens]
    return Explanation(
        model=view.name,
        source=view.source,
        quantization=view.quantization,
        template=batch.template,
        settings=options,
        tokens=tuple(batch.token_strings[0][:n_tokens]),
        token_names=tuple(batch.token_names[0][:n_tokens]),
        labels=scored.names,
        label_log_probs=tuple(log_probs.tolist()),
        target=scored.names[scored.target],
        target_token=_decode(acts)(int(targets[0])),
        next_tokens=_next_tokens(acts, model.tokenizer if scored.free else None),
        layer_attn=tuple(layers.attn[0].tolist()),
        layer_ffn=tuple(layers.ffn[0].tolist()),
        head_increases=tuple(tuple(row) for row in increases.tolist()),
        heads=tuple(_with_similarity(model, batch, reports)),
        subheads=tuple(_subhead_reports(acts, parts, contrasts)),
        n_parts=int(parts.n_parts[0]),
        n_exact=int(parts.n_exact[0]),
        certified=parts.certified,
        ablation=ablation,
        versions=tuple((name, version(name)) for name in ("icl-lens", "torch", "transformers", "transformer-lens")),
        **({} if contrasts is None else contrasts.described()),
        compared_with=tuple(scored.names[i] for i in scored.others),
        contrast_adds_up=len(scored.others) == 1 and acts.readout.using(**convention).is_affine,
        **described,
    )


@dataclass(frozen=True)
class _Contrasts:
    """Contrasts of layers, heads, and (head, position) parts of the described layers, nats."""

    layers: LayerIncreases
    heads: Float[Tensor, "layer head"]
    parts: dict[int, Float[Tensor, "head pos"]]

    def described(self) -> dict[str, Any]:
        return {
            "head_contrasts": tuple(tuple(row) for row in self.heads.tolist()),
            "layer_attn_contrast": tuple(self.layers.attn[0].tolist()),
            "layer_ffn_contrast": tuple(self.layers.ffn[0].tolist()),
        }


def _in_labels(model: Any, acts: Activations) -> dict[str, Any]:
    """Return the fields of an explanation that only prompts with demonstrations have."""
    batch = acts.batch
    spelled = tokenize_labels(model, batch)
    n_shared = int(batch.last[0]) + 1 - len(spelled.prompt)
    whole: Sequence[float] = ()
    if any(len(ids) > 1 for ids in spelled.labels):
        whole = whole_label_log_probs(model, batch)[0].tolist()
    return {
        "prompt": batch.prompts[0],
        "text": batch.texts[0] if batch.texts else "",
        "label_positions": tuple(batch.label_positions[0].tolist()),
        "prediction_positions": ()
        if batch.prediction_positions is None
        else tuple(batch.prediction_positions[0].tolist()),
        "demonstration_labels": tuple(batch.label_index[0].tolist()),
        "label_attention": tuple(
            tuple(tuple(head) for head in layer) for layer in attention_to_labels(acts)[0].tolist()
        ),
        "label_token_names": tuple(
            tuple(names) for names in name_tokens(model.tokenizer, [list(x) for x in spelled.labels])
        ),
        "n_shared_tokens": n_shared,
        "whole_label_log_probs": tuple(whole),
    }


def _in_free(model: Any, acts: Activations, asked: _ScoredTokens, options: ExplainOptions) -> dict[str, Any]:
    """Return the fields of an explanation that only plain text has."""
    batch, n_tokens = acts.batch, int(acts.batch.last[0]) + 1
    pattern = acts.pattern[0, :, :, :n_tokens].float()
    watched = pattern.amax((0, 1)).topk(min(WATCHED, n_tokens)).indices.sort().values
    text = batch.texts[0] if batch.prompt_index is None and batch.texts else "".join(batch.token_strings[0][:n_tokens])
    spelled = {token: [token] for token in asked.tokens.tolist()}
    for given in (options.target, *(options.against or ())):
        if isinstance(given, str):
            before, after = (model.tokenizer(x, add_special_tokens=False)["input_ids"] for x in (text, text + given))
            spelled[after[len(before)]] = after[len(before) :]
    spellings = list(spelled.values())
    whole: Sequence[float] = ()
    if any(len(ids) > 1 for ids in spellings):
        prompt = batch.tokens[0, :n_tokens].tolist()
        whole = continuation_log_probs(model, [(prompt, ids) for ids in spellings]).tolist()
    return {
        "prompt": None,
        "text": text,
        "label_positions": (),
        "demonstration_labels": (),
        "label_attention": (),
        "attended_positions": tuple(watched.tolist()),
        "attended_attention": tuple(tuple(tuple(head) for head in layer) for layer in pattern[:, :, watched].tolist()),
        "label_token_names": tuple(tuple(names) for names in name_tokens(model.tokenizer, spellings)),
        "whole_label_log_probs": tuple(whole),
    }


def _check(options: ExplainOptions, view: ModelView) -> None:
    most = view.n_layers * view.n_heads // 2
    if options.k < 1:
        raise InputError(f"k must be at least 1, got {options.k}")
    if not 1 <= options.n_ablated <= most:
        raise InputError(
            f"n_ablated must be between 1 and {most}, half of all heads, got {options.n_ablated}; random sets need the "
            "other half"
        )


def _subhead_reports(acts: Activations, parts: TopSubheads, contrasts: _Contrasts | None) -> Iterator[SubheadReport]:
    """Yield the prompt's largest parts with the token at each position."""
    columns = (parts.layer[0], parts.head[0], parts.position[0], parts.value[0])
    for layer, head, position, value in zip(*(column.tolist() for column in columns), strict=True):
        contrast = None if contrasts is None else float(contrasts.parts[layer][head, position])
        yield SubheadReport(Head(layer, head), position, acts.batch.token_strings[0][position], value, contrast)


def _decode(acts: Activations) -> Callable[[int], str]:
    assert acts.readout.decode is not None  # tokenize() already required the tokenizer
    return acts.readout.decode


def _next_tokens(acts: Activations, tokenizer: Any, k: int = 5) -> tuple[tuple[str, float], ...]:
    """Return the most probable tokens with their probabilities, named if a tokenizer is given, else decoded."""
    best = acts.readout.log_probs(acts.resid_final)[0].exp().topk(k)
    ids, decode = best.indices.tolist(), _decode(acts)
    names = [decode(token) for token in ids] if tokenizer is None else name_tokens(tokenizer, [ids])[0]
    return tuple(zip(names, best.values.tolist(), strict=True))


def _random_sets(heads: list[Head], removed: list[Head], settings: ExplainOptions) -> list[list[Head]]:
    """Return random sets of heads disjoint from `removed`, each of the same size."""
    pool = [head for head in heads if head not in removed]
    rng = random.Random(settings.seed)
    return [rng.sample(pool, len(removed)) for _ in range(settings.n_random)]


def _ablation_results(
    model: Any, acts: Activations, located: list[Head], asked: _ScoredTokens, options: ExplainOptions
) -> tuple[Float[Tensor, "head label"], AblationReport]:
    """Return the scored tokens' log-probabilities (nats) with single heads, the located set and random sets zeroed."""
    removed = located[: options.n_ablated]
    draws = _random_sets(acts.view.heads(), removed, options)
    scores = _ablated_scores(model, acts.batch, [*[[head] for head in located], removed, *draws], asked.tokens)
    single, joint, random_draws = scores.split([len(located), 1, len(draws)])
    return single, AblationReport(
        heads=tuple(removed),
        located=tuple(joint[0].tolist()),
        random=tuple(tuple(row) for row in random_draws.tolist()),
    )


def _ablated_scores(
    model: Any, batch: PromptBatch, sets: list[list[Head]], tokens: Int[Tensor, " label"]
) -> Float[Tensor, "set label"]:
    """Return the tokens' log-probabilities with each set of heads zeroed, several sets per pass."""
    rows = max(1, PASS_TOKENS // batch.tokens.shape[1])
    found = []
    for start in range(0, len(sets), rows):
        some = sets[start : start + rows]
        with ablate_heads_per_row(model, some):
            log_probs = last_log_probs(model, batch[[0] * len(some)])
        found.append(log_probs[:, tokens.to(log_probs.device)])
    return torch.cat(found)


def _head_reports(
    acts: Activations,
    heads: list[Head],
    increases: Float[Tensor, "layer head"],
    targets: Int[Tensor, " batch"],
    ablated: Float[Tensor, "set label"],
    options: ExplainOptions,
    contrasts: _Contrasts | None,
    free: bool,
) -> Iterator[HeadReport]:
    """Yield a report per located head; results shared by the heads of a layer are computed once."""
    n_tokens = int(acts.batch.last[0]) + 1
    words: dict[str, Any] = {"k": options.n_words, "keep": is_content_word}
    convention: dict[str, Any] = {"final_norm": options.final_norm, "bias": options.bias}
    by_position, key_words = {}, {}
    for head in heads:
        if head.layer not in by_position:
            parts = subhead_log_prob_increase(acts, targets, layers=[head.layer], **convention)
            by_position[head.layer] = parts[0, 0, :, :n_tokens]
            if not free:
                keys = acts.readout.top_tokens(label_keys(acts, head)[0], **words)
                key_words[head.layer] = tuple(tuple(row) for row in keys)
    for head, without in zip(heads, ablated, strict=True):
        attention = acts.pattern[0, head.layer, head.head, :n_tokens]
        positions: list[int] = []
        if free:
            positions = attention.float().topk(min(DESCRIBED, n_tokens)).indices.sort().values.tolist()
            vectors = _values_at(acts, head, positions)
            ranks = acts.readout.ranks(vectors, acts.batch.tokens[0, positions].to(vectors.device))
        else:
            vectors, ranks = label_values(acts, head)[0], own_label_ranks(acts, head)[0]
        in_positions: tuple[float, ...] = ()
        if contrasts is not None:
            in_positions = tuple(contrasts.parts[head.layer][head.head, :n_tokens].tolist())
        yield HeadReport(
            head=head,
            increase=float(increases[head]),
            attention=tuple(attention.tolist()),
            position_increases=tuple(by_position[head.layer][head.head].tolist()),
            value_words=tuple(tuple(row) for row in acts.readout.top_tokens(vectors, **words)),
            value_ranks=tuple(ranks.tolist()),
            key_words=key_words.get(head.layer, ()),
            query_words=tuple(acts.readout.top_tokens(last_query(acts, head)[0], **words)),
            ablated=tuple(without.tolist()),
            contrast=None if contrasts is None else float(contrasts.heads[head]),
            position_contrasts=in_positions,
            positions=tuple(positions),
        )


def _with_similarity(model: Any, batch: PromptBatch, reports: Sequence[HeadReport]) -> Sequence[HeadReport]:
    """Add `similarity` to the reports if the prompt has labels and the model exposes its rotary angles."""
    if not batch.labels or batch.targets is not None or batch.prediction_positions is None:
        return reports
    try:
        found = label_similarity(model, batch, [report.head for report in reports])[0].tolist()
    except RotaryAnglesUnavailable:  # the other fields need no angles
        return reports
    return [replace(report, similarity=tuple(map(tuple, rows))) for report, rows in zip(reports, found, strict=True)]


def _values_at(acts: Activations, head: Head, positions: list[int]) -> Float[Tensor, "position d_model"]:
    """Return a head's values at given positions of the prompt through W_O, like `label_values` at any position."""
    v = acts.values(head.layer)[0, positions, acts.view.kv_head(head.head)].to(acts.readout.dtype)
    return v @ acts.view.W_O(head.layer)[head.head].to(v.dtype)
