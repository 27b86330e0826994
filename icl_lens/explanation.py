"""One prompt explained: what raises the answer, what those heads say, what removing them does."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture, last_log_probs
from icl_lens.attribution.attention import attention_to_labels
from icl_lens.attribution.circuits import is_content_word, label_keys, label_values, last_query, own_label_ranks
from icl_lens.attribution.increases import head_log_prob_increase, layer_log_prob_increase, subhead_log_prob_increase
from icl_lens.attribution.search import TopSubheads, top_subheads
from icl_lens.errors import InputError
from icl_lens.interventions.ablation import ablate_rows
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, tokenize
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.findings import AblationReport, ExplainOptions, Findings, HeadReport, SubheadReport
from icl_lens.report.html.page import explanation_inline, explanation_page, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tokens in one pass of the ablations: enough rows at once for short prompts, one at a time for long ones.
PASS_TOKENS = 2048


@dataclass(frozen=True)
class Explanation(Findings):
    """What `explain` found; shows itself in a notebook, writes tables, JSON and a page.

    Log-probabilities and increases are in nats. `labels[i]` belongs to `label_log_probs[i]`; `target` is the label
    whose log-probability is explained (the answer if the prompt has one, else the model's choice).
    `label_attention[layer][head][demo]` is every head's attention from the last token to the labels.

    Example:
        >>> explanation = il.explain(model, prompt)
        >>> explanation.label_positions
        (2, 5, 8, 11)
        >>> explanation.to_frame("heads").columns.tolist()
        ['layer', 'head', 'name', 'increase']
    """

    @cached_property
    def figures(self) -> "dict[str, Figure]":
        """Matplotlib figures by name: "layers", "heads", "top_heads"."""
        from icl_lens.report import plots  # matplotlib only where a figure is asked for

        return plots.explanation_figures(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The explanation as one self-contained page; written to `path` (beside it first, then moved) if given."""
        page = explanation_page(self)
        if path is not None:
            write_page(page, Path(path))
        return page

    def _repr_html_(self) -> str:
        return explanation_inline(self)


def explain(
    model: Any,
    prompt: Prompt | str,
    *,
    answer: str | None = None,
    template: Template | None = None,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    k: int = 10,
    n_ablated: int = 4,
    n_random: int = 20,
    seed: int = 0,
) -> Explanation:
    """Explains one prompt's answer.

    `prompt` may be text for `Prompt.parse`. Log-probability increases are for the answer's token, or for the model's
    own choice among the labels where the prompt has no answer. The `k` heads of largest increase are described; the
    first `n_ablated` of them are zeroed together, against `n_random` draws of as many other heads.
    Increases do not add up: the parts' need not sum to the whole's. Raises InputError for bad prompts.

    Example:
        >>> explanation = il.explain(model, prompt, k=4)
        >>> explanation.target, len(explanation.heads)
        ('foo', 4)
    """
    template = template or Template()
    if isinstance(prompt, str):
        prompt = Prompt.parse(prompt, answer=answer)
    elif answer is not None:
        prompt = replace(prompt, answer=answer)
    batch = tokenize(model, [prompt], template=template, labels=labels, prepend_bos=prepend_bos)
    acts = capture(model, batch)
    settings = ExplainOptions(
        final_norm=final_norm,
        bias=bias,
        k=k,
        n_ablated=n_ablated,
        n_random=n_random,
        seed=seed,
        prepend_bos=prepend_bos,
        dtype=str(acts.z.dtype).removeprefix("torch."),
    )
    return _explain(model, acts, settings)


def _explain(model: Any, acts: Activations, options: ExplainOptions) -> Explanation:
    batch, view = acts.batch, acts.view
    _check(options, view)
    convention: dict[str, Any] = {"final_norm": options.final_norm, "bias": options.bias}
    target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
    targets = batch.label_tokens[[target]].to(acts.readout.W_U.device)
    n_heads, n_tokens = view.n_layers * view.n_heads, int(batch.last[0]) + 1

    layers = layer_log_prob_increase(acts, targets, **convention)
    increases = head_log_prob_increase(acts, targets, **convention)[0]
    order = increases.flatten().argsort(descending=True)[: min(options.k, n_heads)]
    located = [Head.at(index, view.n_heads) for index in order.tolist()]
    parts = top_subheads(acts, targets, k=min(2 * options.k, n_heads * n_tokens), **convention)

    removed = located[: options.n_ablated]
    draws = _random_sets(view.heads(), removed, options)
    ablated = _ablated_label_scores(model, batch, [*[[head] for head in located], removed, *draws])
    alone, together, random_draws = ablated.split([len(located), 1, len(draws)])
    return Explanation(
        model=view.name,
        source=view.source,
        prompt=batch.prompts[0],
        template=batch.template,
        settings=options,
        tokens=tuple(batch.token_strings[0][:n_tokens]),
        labels=tuple(batch.labels),
        label_positions=tuple(batch.label_positions[0].tolist()),
        demonstration_labels=tuple(batch.label_index[0].tolist()),
        label_log_probs=tuple(acts.label_log_probs[0].tolist()),
        target=batch.labels[target],
        target_token=_decode(acts)(int(targets[0])),
        next_tokens=_next_tokens(acts),
        layer_attn=tuple(layers.attn[0].tolist()),
        layer_ffn=tuple(layers.ffn[0].tolist()),
        head_increases=tuple(tuple(row) for row in increases.tolist()),
        label_attention=tuple(tuple(tuple(head) for head in layer) for layer in attention_to_labels(acts)[0].tolist()),
        heads=tuple(_head_reports(acts, located, increases, targets, alone, options)),
        subheads=tuple(_subhead_reports(acts, parts)),
        n_parts=int(parts.n_parts[0]),
        n_exact=int(parts.n_exact[0]),
        certified=parts.certified,
        ablation=AblationReport(
            heads=tuple(removed),
            located=tuple(together[0].tolist()),
            random=tuple(tuple(row) for row in random_draws.tolist()),
        ),
        versions=tuple((name, version(name)) for name in ("icl-lens", "torch", "transformers", "transformer-lens")),
    )


def _check(options: ExplainOptions, view: ModelView) -> None:
    most = view.n_layers * view.n_heads // 2
    if options.k < 1:
        raise InputError(f"k={options.k} must be at least 1")
    if not 1 <= options.n_ablated <= most:
        raise InputError(f"n_ablated={options.n_ablated} leaves no random heads to compare with: choose 1 to {most}")


def _subhead_reports(acts: Activations, parts: TopSubheads) -> Iterator[SubheadReport]:
    """The one prompt's largest parts, with the token each is moved from."""
    columns = (parts.layer[0], parts.head[0], parts.position[0], parts.value[0])
    for layer, head, position, value in zip(*(column.tolist() for column in columns), strict=True):
        yield SubheadReport(Head(layer, head), position, acts.batch.token_strings[0][position], value)


def _decode(acts: Activations) -> Callable[[int], str]:
    assert acts.readout.decode is not None  # tokenize() needed the tokenizer already
    return acts.readout.decode


def _next_tokens(acts: Activations, k: int = 5) -> tuple[tuple[str, float], ...]:
    best = acts.readout.log_probs(acts.resid_final)[0].exp().topk(k)
    decode = _decode(acts)
    return tuple(
        (decode(token), value) for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


def _random_sets(heads: list[Head], removed: list[Head], settings: ExplainOptions) -> list[list[Head]]:
    """Random sets of as many heads, none of them located."""
    pool = [head for head in heads if head not in removed]
    rng = random.Random(settings.seed)
    return [rng.sample(pool, len(removed)) for _ in range(settings.n_random)]


def _ablated_label_scores(model: Any, batch: PromptBatch, sets: list[list[Head]]) -> Float[Tensor, "set label"]:
    """Label log-probabilities of the one prompt with each set of heads zeroed, many sets a pass."""
    rows = max(1, PASS_TOKENS // batch.tokens.shape[1])
    found = []
    for start in range(0, len(sets), rows):
        some = sets[start : start + rows]
        with ablate_rows(model, some):
            log_probs = last_log_probs(model, batch[[0] * len(some)])
        found.append(log_probs[:, batch.label_tokens.to(log_probs.device)])
    return torch.cat(found)


def _head_reports(
    acts: Activations,
    heads: list[Head],
    increases: Float[Tensor, "layer head"],
    targets: Int[Tensor, " batch"],
    ablated: Float[Tensor, "set label"],
    options: ExplainOptions,
) -> Iterator[HeadReport]:
    """What is told of each located head; what all heads of a layer share is computed once per layer."""
    n_tokens = int(acts.batch.last[0]) + 1
    words: dict[str, Any] = {"k": options.n_words, "keep": is_content_word}
    convention: dict[str, Any] = {"final_norm": options.final_norm, "bias": options.bias}
    by_position, key_words = {}, {}
    for head in heads:
        if head.layer not in by_position:
            parts = subhead_log_prob_increase(acts, targets, layers=[head.layer], **convention)
            by_position[head.layer] = parts[0, 0, :, :n_tokens]
            keys = acts.readout.top_tokens(label_keys(acts, head)[0], **words)
            key_words[head.layer] = tuple(tuple(row) for row in keys)
    for head, without in zip(heads, ablated, strict=True):
        values = acts.readout.top_tokens(label_values(acts, head)[0], **words)
        yield HeadReport(
            head=head,
            increase=float(increases[head]),
            attention=tuple(acts.pattern[0, head.layer, head.head, :n_tokens].tolist()),
            position_increases=tuple(by_position[head.layer][head.head].tolist()),
            value_words=tuple(tuple(row) for row in values),
            value_ranks=tuple(own_label_ranks(acts, head)[0].tolist()),
            key_words=key_words[head.layer],
            query_words=tuple(acts.readout.top_tokens(last_query(acts, head)[0], **words)),
            ablated=tuple(without.tolist()),
        )
