"""One prompt explained: what raises the answer, what those heads say, and what removing them does."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from torch import Tensor

from icl_lens.activations import Activations, capture, last_log_probs
from icl_lens.attention import attention_to_labels
from icl_lens.attribution import head_log_prob_increase, layer_log_prob_increase, subhead_log_prob_increase
from icl_lens.circuits import is_content_word, label_keys, label_values, last_query, own_label_ranks
from icl_lens.errors import InputError
from icl_lens.interventions import ablate_rows
from icl_lens.location import top_subheads
from icl_lens.models import Head
from icl_lens.prompts import Prompt, Template
from icl_lens.readout import FinalNorm
from icl_lens.tokens import PromptBatch, tokenize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Tokens in one pass of the ablations: enough rows at once for short prompts, one at a time for long ones.
PASS_TOKENS = 2048


@dataclass(frozen=True)
class Settings:
    """The conventions an explanation was computed under."""

    final_norm: FinalNorm = "frozen"
    bias: bool = True
    k: int = 10
    n_ablated: int = 4
    n_random: int = 20
    n_words: int = 10
    seed: int = 0
    prepend_bos: bool | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class HeadReport:
    """One located head: increase (nats), attention and increase by token position, words, effect of removing it.

    `value_words`, `key_words`, `value_ranks` have one entry a demonstration; `value_ranks` is the rank of the
    demonstration's own label in its value's projection. `ablated` are the label log-probabilities (nats) with
    only this head zeroed.
    """

    head: Head
    increase: float
    attention: tuple[float, ...]
    position_increases: tuple[float, ...]
    value_words: tuple[tuple[str, ...], ...]
    value_ranks: tuple[int, ...]
    key_words: tuple[tuple[str, ...], ...]
    query_words: tuple[str, ...]
    ablated: tuple[float, ...]

    def label_attention(self, positions: Sequence[int]) -> tuple[float, ...]:
        """Attention to the given (label) positions."""
        return tuple(self.attention[position] for position in positions)


@dataclass(frozen=True)
class SubheadReport:
    """One located (head, position) part and its increase, nats."""

    head: Head
    position: int
    token: str
    increase: float


@dataclass(frozen=True)
class AblationReport:
    """Label log-probabilities (nats) with the located heads zeroed, and with as many random heads, draw by draw."""

    heads: tuple[Head, ...]
    located: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Explanation:
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

    model: str
    prompt: Prompt
    template: Template
    settings: Settings
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    label_positions: tuple[int, ...]
    demonstration_labels: tuple[int, ...]
    label_log_probs: tuple[float, ...]
    target: str
    target_token: str
    next_tokens: tuple[tuple[str, float], ...]
    layer_attn: tuple[float, ...]
    layer_ffn: tuple[float, ...]
    head_increases: tuple[tuple[float, ...], ...]
    label_attention: tuple[tuple[tuple[float, ...], ...], ...]
    heads: tuple[HeadReport, ...]
    subheads: tuple[SubheadReport, ...]
    n_parts: int
    n_exact: int
    certified: bool
    ablation: AblationReport
    versions: tuple[tuple[str, str], ...]

    @property
    def predicted(self) -> str:
        """The label the model finds most probable."""
        return max(zip(self.label_log_probs, self.labels, strict=True))[1]

    @property
    def label_probs(self) -> dict[str, float]:
        """Probability of each label's token, among the whole vocabulary."""
        return {name: math.exp(value) for name, value in zip(self.labels, self.label_log_probs, strict=True)}

    def to_frame(self, table: Literal["heads", "layers", "subheads", "labels", "words"] = "heads") -> pd.DataFrame:
        """One of the explanation's tables, tidy: "heads" (all heads), "layers", "subheads", "labels" or "words"."""
        if table == "heads":
            rows = [
                {"layer": layer, "head": head, "name": str(Head(layer, head)), "increase": value}
                for layer, row in enumerate(self.head_increases)
                for head, value in enumerate(row)
            ]
        elif table == "layers":
            parts = (("attn", self.layer_attn), ("ffn", self.layer_ffn))
            rows = [
                {"layer": layer, "component": component, "increase": value}
                for component, values in parts
                for layer, value in enumerate(values)
            ]
        elif table == "subheads":
            rows = [
                {**asdict(part), "head": part.head.head, "layer": part.head.layer, "name": str(part.head)}
                for part in self.subheads
            ]
        elif table == "labels":
            rows = [
                {
                    "label": label,
                    "log_prob": self.label_log_probs[i],
                    "log_prob_located_zeroed": self.ablation.located[i],
                    # Of the mean probability, as the page and the terminal show it.
                    "log_prob_random_zeroed": _log_mean_probability([draw[i] for draw in self.ablation.random]),
                }
                for i, label in enumerate(self.labels)
            ]
        elif table == "words":
            rows = list(self._word_rows())
        else:
            raise InputError(f"table={table!r} is not known; use 'heads', 'layers', 'subheads', 'labels' or 'words'")
        return pd.DataFrame(rows)

    def _word_rows(self) -> Any:
        for report in self.heads:
            for position, values, keys, rank in zip(
                self.label_positions, report.value_words, report.key_words, report.value_ranks, strict=True
            ):
                token = self.tokens[position]
                yield {
                    "name": str(report.head),
                    "position": position,
                    "token": token,
                    "kind": "value",
                    "words": " ".join(values),
                    "own_label_rank": rank,
                }
                yield {
                    "name": str(report.head),
                    "position": position,
                    "token": token,
                    "kind": "key",
                    "words": " ".join(keys),
                    "own_label_rank": pd.NA,
                }
            yield {
                "name": str(report.head),
                "position": len(self.tokens) - 1,
                "token": self.tokens[-1],
                "kind": "query",
                "words": " ".join(report.query_words),
                "own_label_rank": pd.NA,
            }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings, for JSON. Heads are written `L22H0`."""
        plain = asdict(self)
        for report, entry in zip(self.heads, plain["heads"], strict=True):
            entry["head"] = str(report.head)
        for part, entry in zip(self.subheads, plain["subheads"], strict=True):
            entry["head"] = str(part.head)
        plain["ablation"]["heads"] = [str(head) for head in self.ablation.heads]
        return {
            **plain,
            "predicted": self.predicted,
            "label_probs": self.label_probs,
            "versions": dict(self.versions),
        }

    @cached_property
    def figures(self) -> "dict[str, Figure]":
        """Matplotlib figures by name: "layers", "heads", "top_heads"."""
        from icl_lens import plots

        return plots.explanation_figures(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """The explanation as one self-contained page; written to `path` (beside it first, then moved) if given."""
        from icl_lens import html

        page = html.explanation_page(self)
        if path is not None:
            html.write_page(page, Path(path))
        return page

    def _repr_html_(self) -> str:
        from icl_lens import html

        return html.explanation_inline(self)


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
    settings = Settings(
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


def _explain(model: Any, acts: Activations, settings: Settings) -> Explanation:
    batch, view = acts.batch, acts.view
    n_heads_total = view.n_layers * view.n_heads
    if settings.k < 1:
        raise InputError(f"k={settings.k} must be at least 1")
    if not 1 <= settings.n_ablated <= n_heads_total // 2:
        raise InputError(
            f"n_ablated={settings.n_ablated} leaves no random heads to compare with: choose 1 to {n_heads_total // 2}"
        )
    convention: dict[str, Any] = {"final_norm": settings.final_norm, "bias": settings.bias}
    label_scores = acts.label_log_probs[0]
    target = int(batch.answer[0]) if int(batch.answer[0]) >= 0 else int(acts.predicted[0])
    targets = batch.label_tokens[[target]].to(acts.readout.W_U.device)

    layers = layer_log_prob_increase(acts, targets, **convention)
    increases = head_log_prob_increase(acts, targets, **convention)[0]
    order = increases.flatten().argsort(descending=True)[: min(settings.k, n_heads_total)]
    located = [Head(index // view.n_heads, index % view.n_heads) for index in order.tolist()]
    n_tokens = int(batch.last[0]) + 1
    parts = top_subheads(acts, targets, k=min(2 * settings.k, n_heads_total * n_tokens), **convention)

    removed = located[: settings.n_ablated]
    draws = _random_sets(view.n_layers, view.n_heads, removed, settings)
    ablated = _ablated_label_scores(model, batch, [*[[head] for head in located], removed, *draws])
    strings = tuple(batch.token_strings[0][:n_tokens])
    next_tokens = _next_tokens(acts)
    return Explanation(
        model=view.name,
        prompt=batch.prompts[0],
        template=batch.template,
        settings=settings,
        tokens=strings,
        labels=tuple(batch.labels),
        label_positions=tuple(batch.label_positions[0].tolist()),
        demonstration_labels=tuple(batch.label_index[0].tolist()),
        label_log_probs=tuple(label_scores.tolist()),
        target=batch.labels[target],
        target_token=_decode(acts)(int(targets[0])),
        next_tokens=next_tokens,
        layer_attn=tuple(layers.attn[0].tolist()),
        layer_ffn=tuple(layers.ffn[0].tolist()),
        head_increases=tuple(tuple(row) for row in increases.tolist()),
        label_attention=tuple(tuple(tuple(head) for head in layer) for layer in attention_to_labels(acts)[0].tolist()),
        heads=tuple(
            _head_report(acts, head, float(increases[head]), targets, ablated[i], settings)
            for i, head in enumerate(located)
        ),
        subheads=tuple(
            SubheadReport(Head(layer, head), position, strings[position], value)
            for layer, head, position, value in zip(
                parts.layer[0].tolist(),
                parts.head[0].tolist(),
                parts.position[0].tolist(),
                parts.value[0].tolist(),
                strict=True,
            )
        ),
        n_parts=int(parts.n_parts[0]),
        n_exact=int(parts.n_exact[0]),
        certified=parts.certified,
        ablation=AblationReport(
            heads=tuple(removed),
            located=tuple(ablated[len(located)].tolist()),
            random=tuple(tuple(row) for row in ablated[len(located) + 1 :].tolist()),
        ),
        versions=tuple((name, version(name)) for name in ("icl-lens", "torch", "transformers", "transformer-lens")),
    )


def _decode(acts: Activations) -> Callable[[int], str]:
    assert acts.readout.decode is not None  # tokenize() needed the tokenizer already
    return acts.readout.decode


def _next_tokens(acts: Activations, k: int = 5) -> tuple[tuple[str, float], ...]:
    best = acts.readout.log_probs(acts.resid_final)[0].exp().topk(k)
    decode = _decode(acts)
    return tuple(
        (decode(token), value) for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


def _random_sets(n_layers: int, n_heads: int, removed: list[Head], settings: Settings) -> list[list[Head]]:
    """Random sets of as many heads, none of them located."""
    pool = [Head(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    pool = [head for head in pool if head not in removed]
    rng = random.Random(settings.seed)
    return [rng.sample(pool, len(removed)) for _ in range(settings.n_random)]


def _ablated_label_scores(model: Any, batch: PromptBatch, sets: list[list[Head]]) -> Tensor:
    """[set label] label log-probabilities of the one prompt with each set of heads zeroed, many sets a pass."""
    rows = max(1, PASS_TOKENS // batch.tokens.shape[1])
    found = []
    for start in range(0, len(sets), rows):
        some = sets[start : start + rows]
        with ablate_rows(model, some):
            log_probs = last_log_probs(model, batch[[0] * len(some)])
        found.append(log_probs[:, batch.label_tokens.to(log_probs.device)])
    return torch.cat(found)


def _head_report(
    acts: Activations, head: Head, increase: float, targets: Tensor, ablated: Tensor, settings: Settings
) -> HeadReport:
    n_tokens = int(acts.batch.last[0]) + 1
    top = acts.readout.top_tokens
    by_position = subhead_log_prob_increase(
        acts, targets, layers=[head.layer], final_norm=settings.final_norm, bias=settings.bias
    )[0, 0, head.head]
    words: dict[str, Any] = {"k": settings.n_words, "keep": is_content_word}
    return HeadReport(
        head=head,
        increase=increase,
        attention=tuple(acts.pattern[0, head.layer, head.head, :n_tokens].tolist()),
        position_increases=tuple(by_position[:n_tokens].tolist()),
        value_words=tuple(tuple(row) for row in top(label_values(acts, head)[0], **words)),
        value_ranks=tuple(own_label_ranks(acts, head)[0].tolist()),
        key_words=tuple(tuple(row) for row in top(label_keys(acts, head)[0], **words)),
        query_words=tuple(top(last_query(acts, head)[0], **words)),
        ablated=tuple(ablated.tolist()),
    )


def _log_mean_probability(log_probs: Sequence[float]) -> float:
    largest = max(log_probs)  # taken out, so that no probability is too small to be told from 0
    return largest + math.log(sum(math.exp(value - largest) for value in log_probs) / len(log_probs))
