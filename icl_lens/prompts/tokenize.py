"""Tokenize prompts into a `PromptBatch`."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError, quoted_list, short_repr
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.beginning import warn_of_other_beginning
from icl_lens.prompts.decisions import Decisions
from icl_lens.prompts.label_tokens import LabelColumns, LabelPlace, LabelRow, LabelTokens, TokenIds
from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.plain_text import Text, tokenize_plain
from icl_lens.prompts.prompt import (
    DEFAULT_TEMPLATE,
    Demonstration,
    Prompt,
    Span,
    Template,
    as_prompts,
    check_no_table,
    check_unicode,
)
from icl_lens.prompts.token_alignment import (
    TokenizedText,
    require_fast_tokenizer,
    special_prefixes,
    tokenize_texts,
)
from icl_lens.prompts.token_ids import check_context_length, check_text_length
from icl_lens.prompts.token_rows import row_fields


def tokenize(
    model: Any,
    prompts: Prompt | str | Text | Sequence[Prompt | str] | Sequence[Text],
    *,
    template: Template = DEFAULT_TEMPLATE,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
) -> PromptBatch:
    """Tokenize prompts, or plain text (`Text`), for a model, on the model's device.

    Strings are parsed by `Prompt.parse`. A batch of `Text` has no labels: each row is scored by its
    own answer, and `PromptBatch.at` selects other positions, which are scored by the next token;
    `template` and `labels` do not apply. `model` needs a fast Hugging Face `tokenizer` and a `cfg`
    with `n_ctx`. `labels` fixes the order of `PromptBatch.labels` and may include more labels than
    the prompts. The default is the order of `Prompt.labels` if it is the same in all prompts, else
    numbers by value and words alphabetically, so that a set of labels has the same columns in every
    batch. Prompts may have different labels; only those of one prompt are its choices.
    `prepend_bos=None` prepends what the model's published tokenizer prepends (nothing for GPT-2,
    <s> for Llama), even if TransformerLens loaded it with `add_bos_token=True`; nothing is
    appended, and nothing is prepended to a text that already begins with it, such as chat text. A
    bridge or HookedTransformer of your own that reads other tokens in front of `model(text)` is
    warned of, once.

    Labels may begin with the same tokens. They are compared at the first token in which they
    differ, and a prompt has one row for each such decision between its answer and other labels:
    "very good" is compared with "bad" at "very", and with "very bad" in another row, to which
    "very" is appended. In the first, "very good" and "very bad" are one label, "very…"
    (`PromptBatch.labels`, `decisions`). A prompt without answer has a row for every decision
    between its labels. If its answer is a word of its own, which no demonstration shows, it has one
    row: the answer's first token is compared with those of the other labels that differ from it.

    Raise InputError if prompts are empty or mixed with `Text`, a prompt is longer than the context,
    the tokenizer is slow or lacks a word, a label or text has no separate tokens, a label's token
    does not directly follow the query or differs between contexts, the answer of a `Text` does not
    begin where it ends or equals a comparison, two labels of a prompt have the same tokens, or
    those of one begin another and the template has no token of its own after it. Source:
    docs/howto/own_dataset.md.

    Example:
        >>> batch = il.tokenize(model, [prompt])
        >>> batch.label_positions
        tensor([[ 3,  7, 11, 15]])
        >>> plain = [il.Text("love like bar", answer=" foo"), il.Text("one two", answer=" bar")]
        >>> texts = il.tokenize(model, plain)
        >>> il.head_log_prob_increase(il.capture(model, texts), texts.answer_tokens).shape
        torch.Size([2, 8, 6])
    """
    check_no_table(prompts)
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        inputs = (prompts,)
    else:
        inputs = tuple(prompts)
    texts = [text for text in inputs if isinstance(text, Text)]
    if texts:
        if len(texts) < len(inputs):
            raise InputError(
                "prompts must be all il.Text or all il.Prompt, got both; tokenize them separately"
            )
        if template != DEFAULT_TEMPLATE or labels is not None:
            raise InputError("template and labels do not apply to il.Text; omit them")
        return tokenize_plain(model, texts, prepend_bos=prepend_bos)
    prompts = as_prompts(inputs)
    if not isinstance(template, Template):
        raise InputError(
            f"template must be an il.Template(demonstration, query), got {short_repr(template)}"
        )
    if not prompts:
        raise InputError("prompts must contain at least one prompt, got none")
    template = template.for_prompts(prompts)
    every_label = _every_label(prompts, labels)
    template.check_labels(every_label)
    return _tokenize(
        model,
        prompts,
        template=template,
        labels=every_label,
        prepend_bos=prepend_bos,
    )


@dataclass(frozen=True)
class _Row:
    """A prompt and the label tokens that are appended to it, up to a decision between its
    labels.
    """

    prompt: Prompt
    text: TokenizedText
    prefix: list[int]
    """The special tokens before the text."""
    start: TokenIds
    columns: LabelRow
    label_places: list[LabelPlace]
    """Where each demonstration's label is, in tokens of the text."""

    @property
    def ids(self) -> list[int]:
        return [*self.prefix, *self.text.ids, *self.start]

    @property
    def label_positions(self) -> list[int]:
        """The position of each demonstration's scored token."""
        return [len(self.prefix) + place.scored for place in self.label_places]

    @property
    def label_ranges(self) -> list[tuple[int, int]]:
        """The token range of each demonstration's label."""
        ranges = []
        for place in self.label_places:
            first, end = place.tokens
            ranges.append((len(self.prefix) + first, len(self.prefix) + end))
        return ranges

    @property
    def label_columns(self) -> list[int]:
        """The column of each demonstration's label."""
        column_of = self.columns.column_of
        return [column_of[demonstration.label] for demonstration in self.prompt.demonstrations]

    @property
    def answer_column(self) -> int:
        """The column of the answer; -1 without an answer."""
        if self.prompt.answer is None:
            return -1
        return self.columns.column_of[self.prompt.answer]

    @property
    def demonstration_ranges(self) -> list[tuple[int, int]]:
        """The token range of each demonstration with the template's words."""
        return list(pairwise(self.text.segment_starts(len(self.prefix))))

    def ranges(self, spans: Iterable[Span]) -> list[tuple[int, int]]:
        """Return the token ranges of spans in the row."""
        return [self.text.range_of(span, len(self.prefix)) for span in spans]


def _tokenize(
    model: Any,
    prompts: tuple[Prompt, ...],
    *,
    template: Template,
    labels: tuple[str, ...],
    prepend_bos: bool | None,
    starts: Sequence[TokenIds] | None = None,
) -> PromptBatch:
    """Return one row per prompt and decision between its labels or, with `starts`, one row per
    prompt and start.

    A start is the ids of label tokens that are appended to a prompt: those up to which the labels
    of a decision agree.
    """
    tokenizer = require_fast_tokenizer(model)
    rendered_prompts = [template.render(prompt) for prompt in prompts]
    check_text_length(model, tokenizer, [rendered.text for rendered in rendered_prompts])
    texts = tokenize_texts(tokenizer, rendered_prompts)
    label_tokens = _label_tokens(tokenizer, template, prompts, texts, labels)
    columns = _label_columns(prompts, labels, label_tokens)

    prefixes = special_prefixes(tokenizer, texts, prepend_bos)
    first_ids = [*prefixes[0], *texts[0].ids]
    warn_of_other_beginning(model, texts[0].rendered.text, first_ids, prepend_bos=prepend_bos)
    rows: list[_Row] = []
    prompt_numbers: list[int] = []
    for number, (prompt, text, prefix) in enumerate(zip(prompts, texts, prefixes, strict=True)):
        if starts is None:
            prompt_starts = _starts_of_decisions(prompt, label_tokens)
        else:
            prompt_starts = [starts[number]]
        for start in prompt_starts:
            places = _label_places(prompt, text, start, label_tokens, template.gap)
            row_columns = _row_columns(prompt, start, columns)
            rows.append(_Row(prompt, text, prefix, start, row_columns, places))
            prompt_numbers.append(number)
    check_context_length(model, [row.ids for row in rows])
    decisions = Decisions(
        whole_labels=labels,
        groups=columns.groups,
        n_appended=torch.tensor([len(row.start) for row in rows]),
        prompt_index=None if len(rows) == len(prompts) else torch.tensor(prompt_numbers),
    )
    batch = _batch_of_rows(tokenizer, rows, columns, decisions)
    batch = replace(batch, template=template, prepend_bos=prepend_bos)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _starts_of_decisions(prompt: Prompt, label_tokens: LabelTokens) -> Sequence[TokenIds]:
    """Return what is appended to a prompt for each decision between its labels; an answer that no
    demonstration shows is scored alone, after the prompt itself.
    """
    if _is_own_word(prompt):
        return [()]
    return label_tokens.decision_starts(prompt.every_label, prompt.answer)


def _label_columns(
    prompts: Sequence[Prompt], labels: Sequence[str], label_tokens: LabelTokens
) -> LabelColumns:
    """Return the columns of a batch: for each set of labels that prompts choose between, and for
    the labels that are scored by their first token.
    """
    # Dictionaries, because the order of what is first seen matters.
    label_sets: dict[tuple[str, ...], None] = {}
    scored_alone: dict[str, None] = {}
    used = set()
    for prompt in prompts:
        used.update(prompt.every_label)
        if _is_own_word(prompt):
            scored_alone.update(dict.fromkeys(prompt.every_label))
        else:
            label_sets[prompt.every_label] = None
    unused = [label for label in labels if label not in used]
    return LabelColumns(labels, label_tokens, label_sets, [*scored_alone, *unused])


def _row_columns(prompt: Prompt, start: TokenIds, columns: LabelColumns) -> LabelRow:
    """Return the columns of a prompt's labels after a start; the answer counts first."""
    choices = sorted(prompt.labels, key=lambda label: label != prompt.answer)
    if _is_own_word(prompt):
        return columns.of_row(prompt.every_label, choices, None)
    return columns.of_row(prompt.every_label, choices, start)


def _label_places(
    prompt: Prompt, text: TokenizedText, start: TokenIds, label_tokens: LabelTokens, gap: str
) -> list[LabelPlace]:
    """Return where each demonstration's label is scored after a start."""
    places = []
    spans = text.rendered.label_spans
    for span, demonstration in zip(spans, prompt.demonstrations, strict=True):
        n_shared, ends_with_next_token = label_tokens.n_shared_and_has_end(
            demonstration.label, start
        )
        places.append(LabelPlace.from_text(text, span, gap, n_shared, ends_with_next_token))
    return places


def _batch_of_rows(
    tokenizer: Any, rows: Sequence[_Row], columns: LabelColumns, decisions: Decisions
) -> PromptBatch:
    """Return the rows as a batch, with the default template."""
    n_demonstrations = max(len(row.prompt.demonstrations) for row in rows)
    no_range = (-1, -1)
    text_ranges = [row.ranges(row.text.rendered.text_spans) for row in rows]
    label_mask = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for number, row in enumerate(rows):
        label_mask[number, list(row.columns.choices)] = True

    def padded(values_of_rows: Sequence[Sequence[Any]], missing: Any) -> Tensor:
        return _by_demonstration(values_of_rows, n_demonstrations, missing)

    return PromptBatch(
        **row_fields(tokenizer, [row.ids for row in rows]),
        label_positions=padded([row.label_positions for row in rows], -1),
        label_ranges=padded([row.label_ranges for row in rows], no_range),
        label_index=padded([row.label_columns for row in rows], -1),
        label_mask=label_mask,
        label_tokens=torch.tensor(columns.tokens),
        answer=torch.tensor([row.answer_column for row in rows]),
        text_ranges=padded(text_ranges, no_range),
        demonstration_ranges=padded([row.demonstration_ranges for row in rows], no_range),
        query_range=torch.tensor([row.ranges([row.text.rendered.query_span])[0] for row in rows]),
        labels=columns.names,
        prompts=tuple(row.prompt for row in rows),
        template=DEFAULT_TEMPLATE,
        texts=tuple(row.text.rendered.text for row in rows),
        decisions=decisions,
    )


def _by_demonstration(
    values_of_rows: Sequence[Sequence[Any]], n_demonstrations: int, missing: Any
) -> Int[Tensor, "row demo *value"]:
    """Return values by demonstration, with `missing` for demonstrations that a prompt lacks."""
    padded_rows = []
    for values in values_of_rows:
        padded_rows.append([*values, *[missing] * (n_demonstrations - len(values))])
    value_shape = torch.tensor(missing).shape
    padded = torch.tensor(padded_rows, dtype=torch.long)
    return padded.reshape(len(padded_rows), n_demonstrations, *value_shape)


def _label_tokens(
    tokenizer: Any,
    template: Template,
    prompts: Sequence[Prompt],
    texts: Sequence[TokenizedText],
    labels: Sequence[str],
) -> LabelTokens:
    """Return the tokens of each label, which must be the same after every query and in every
    demonstration.
    """
    label_tokens = LabelTokens(tokenizer)
    _add_labels_after_queries(label_tokens, template, prompts, texts, labels)
    _add_labels_in_demonstrations(label_tokens, template, prompts, texts)
    label_sets: dict[tuple[str, ...], None] = {}
    for prompt in prompts:
        if not _is_own_word(prompt):
            label_sets[prompt.every_label] = None
    # Labels whose tokens are the beginning of another label's.
    unfinished: dict[str, None] = {}
    for label_set in label_sets:
        unfinished.update(dict.fromkeys(label_tokens.unfinished_labels(label_set)))
    if unfinished:
        query = next((prompt.query for prompt in prompts if prompt.query), "1")
        _end_with_next_tokens(label_tokens, template, list(unfinished), query)
    return label_tokens


def _add_labels_after_queries(
    label_tokens: LabelTokens,
    template: Template,
    prompts: Sequence[Prompt],
    texts: Sequence[TokenizedText],
    labels: Sequence[str],
) -> None:
    """Record the tokens of every prompt's labels after its query.

    Labels that no prompt has are read after the first query.
    """
    used = set()
    continued: list[tuple[int, str]] = []
    for number, prompt in enumerate(prompts):
        used.update(prompt.every_label)
        continued += [(number, label) for label in prompt.every_label]
    continued += [(0, label) for label in labels if label not in used]
    rendered = [template.continuation(prompts[number], label) for number, label in continued]
    continuations = tokenize_texts(label_tokens.tokenizer, rendered)
    for (number, label), continuation in zip(continued, continuations, strict=True):
        ids = continuation.continuation_tokens(texts[number], template.gap)
        label_tokens.add(label, ids, f"after the query of prompt {number}")


def _add_labels_in_demonstrations(
    label_tokens: LabelTokens,
    template: Template,
    prompts: Sequence[Prompt],
    texts: Sequence[TokenizedText],
) -> None:
    """Record the tokens of the label of every demonstration."""
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        spans = text.rendered.label_spans
        for demonstration, span in zip(prompt.demonstrations, spans, strict=True):
            start, stop = text.label_range(span, template.gap)
            where = f"in a demonstration of prompt {number}"
            label_tokens.add(demonstration.label, text.ids[start:stop], where)


def _end_with_next_tokens(
    label_tokens: LabelTokens, template: Template, labels: Sequence[str], query: str
) -> None:
    """Let labels end with the template's next token, because other labels begin with theirs."""
    rendered = []
    for label in labels:
        rendered.append(template.render(Prompt([Demonstration(query, label)], query, label)))
    texts = tokenize_texts(label_tokens.tokenizer, rendered)
    for label, text in zip(labels, texts, strict=True):
        label_tokens.end_with(text.token_after_label(template.gap), label)


def _is_own_word(prompt: Prompt) -> bool:
    """Whether the answer is a word that none of its demonstrations shows, so that it can be scored
    alone.
    """
    return prompt.has_own_answer and bool(prompt.demonstrations)


TokenizeLike = Callable[[Sequence[Prompt], Sequence[int]], PromptBatch]
"""Tokenizes prompts for rows of a batch."""


def tokenizer_like(model: Any, batch: PromptBatch) -> TokenizeLike:
    """Return a function that tokenizes a prompt for each of some rows of a batch.

    A prompt gets the template, the labels and the appended label tokens of its row.

    Raise InputError unless `tokenize` gives `batch` for its own prompts, which it does not if `at`
    has selected positions.
    """
    decisions, starts = batch.decisions, []
    for ids, last, n_appended in zip(
        batch.tokens.tolist(), batch.last.tolist(), decisions.n_appended.tolist(), strict=True
    ):
        starts.append(tuple(ids[last + 1 - n_appended : last + 1]))

    def tokenize_rows(prompts: Sequence[Prompt], rows: Sequence[int]) -> PromptBatch:
        used = set()
        for prompt in prompts:
            used.update(prompt.every_label)
        return _tokenize(
            model,
            tuple(prompts),
            template=batch.template,
            labels=tuple(label for label in decisions.whole_labels if label in used),
            prepend_bos=batch.prepend_bos,
            starts=[starts[row] for row in rows],
        )

    with suppress(InputError):
        again = tokenize_rows(batch.prompts, range(len(batch)))
        if torch.equal(again.tokens, batch.tokens) and torch.equal(again.last, batch.last):
            return tokenize_rows
    raise InputError(
        "batch must have the tokens of its own prompts, as il.tokenize returns it, so that other "
        "prompts can be tokenized alike; pass il.tokenize(model, batch.prompts, "
        "template=batch.template)"
    )


def _every_label(prompts: tuple[Prompt, ...], labels: Sequence[str] | None) -> tuple[str, ...]:
    """Return `labels`, which must contain those of all prompts, or by default the labels of the
    prompts.

    The default keeps the order of `Prompt.labels` if it is the same in all prompts.
    """
    used = in_order(chain.from_iterable(prompt.labels for prompt in prompts))
    if labels is None:
        if len({prompt.labels for prompt in prompts}) == 1:
            return prompts[0].labels
        return used
    labels = tuple(labels)
    check_unicode(*labels, what="label")
    missing = [label for label in used if label not in labels]
    if missing or len(set(labels)) != len(labels):
        remedy = f"add {quoted_list(missing)}" if missing else "remove the duplicates"
        raise InputError(
            f"labels must contain every label of the prompts ({quoted_list(used)}) once, got "
            f"{labels!r}; {remedy}"
        )
    return labels
