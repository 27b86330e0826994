"""Tokenize prompts into a `PromptBatch`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch, row_fields
from icl_lens.prompts.label_tokens import Ids, LabelColumns, LabelPlace, LabelRow, LabelTokens
from icl_lens.prompts.plain_text import Text, tokenize_plain
from icl_lens.prompts.prompt import (
    DEFAULT_TEMPLATE,
    Demonstration,
    Prompt,
    Span,
    Template,
    as_prompts,
    check_unicode,
    in_order,
    quoted_list,
)
from icl_lens.prompts.token_alignment import (
    TokenizedText,
    require_fast_tokenizer,
    special_prefixes,
    tokenize_texts,
)
from icl_lens.prompts.token_ids import check_context_length, check_text_length


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
    appended, and nothing is prepended to a text that already begins with it, such as chat text.

    Labels may begin with the same tokens. They are compared at the first token in which they
    differ, and a prompt has one row for each such decision between its answer and other labels:
    "very good" is compared with "bad" at "very", and with "very bad" in another row, to which
    "very" is appended. In the first, "very good" and "very bad" are one label, "very…"
    (`PromptBatch.labels`, `whole_labels`). A prompt without answer has a row for every decision
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
    given = (
        (prompts,)
        if isinstance(prompts, str) or not isinstance(prompts, Iterable)
        else tuple(prompts)
    )
    plain = [one for one in given if isinstance(one, Text)]
    if plain:
        if len(plain) < len(given):
            raise InputError(
                "prompts must be all il.Text or all il.Prompt, got both; tokenize them separately"
            )
        if template != DEFAULT_TEMPLATE or labels is not None:
            raise InputError("template and labels do not apply to il.Text; omit them")
        return tokenize_plain(model, plain, prepend_bos=prepend_bos)
    prompts = as_prompts(given)
    if not isinstance(template, Template):
        raise InputError(f"template must be an il.Template(demonstration, query), got {template!r}")
    if not prompts:
        raise InputError("prompts must contain at least one prompt, got none")
    return _tokenize(
        model,
        prompts,
        template=template,
        labels=_every_label(prompts, labels),
        prepend_bos=prepend_bos,
    )


@dataclass(frozen=True)
class _Row:
    """A prompt and the label tokens that are appended to it, up to a decision between its
    labels.
    """

    prompt: Prompt
    text: TokenizedText
    front: list[int]
    """The special tokens before the text."""
    start: Ids
    columns: LabelRow
    labels: list[LabelPlace]
    """Where each demonstration's label is, in tokens of the text."""

    @property
    def ids(self) -> list[int]:
        return [*self.front, *self.text.ids, *self.start]

    def ranges(self, spans: Iterable[Span]) -> list[tuple[int, int]]:
        """Return the token ranges of spans in the row."""
        return [self.text.range_of(span, len(self.front)) for span in spans]


def _tokenize(
    model: Any,
    prompts: tuple[Prompt, ...],
    *,
    template: Template,
    labels: tuple[str, ...],
    prepend_bos: bool | None,
    starts: Sequence[Ids] | None = None,
) -> PromptBatch:
    """Return one row per prompt and decision between its labels or, with `starts`, one row per
    prompt and start.
    """
    tokenizer = require_fast_tokenizer(model)
    rendered = [template.render(prompt) for prompt in prompts]
    check_text_length(model, tokenizer, [prompt.text for prompt in rendered])
    texts = tokenize_texts(tokenizer, rendered)
    tokens = _label_tokens(tokenizer, template, prompts, texts, labels)
    alone = {
        label: None for prompt in prompts if _is_own_word(prompt) for label in prompt.every_label
    }
    compared = {prompt.every_label: None for prompt in prompts if not _is_own_word(prompt)}
    used = {label for prompt in prompts for label in prompt.every_label}
    columns = LabelColumns(
        labels, tokens, compared, [*alone, *(label for label in labels if label not in used)]
    )

    fronts = special_prefixes(tokenizer, texts, prepend_bos)
    rows: list[_Row] = []
    numbers: list[int] = []
    for number, (prompt, text, front) in enumerate(zip(prompts, texts, fronts, strict=True)):
        own = prompt.every_label
        if starts is not None:
            decisions = [starts[number]]
        else:
            decisions = [()] if _is_own_word(prompt) else tokens.decisions(own, prompt.answer)
        for start in decisions:
            choices = sorted(
                prompt.labels, key=lambda label, prompt=prompt: label != prompt.answer
            )  # the answer first
            row_columns = columns.of_row(own, choices, None if _is_own_word(prompt) else start)
            rendered = text.rendered.label_spans
            places = [
                LabelPlace.of(text, span, template.gap, *tokens.parted(shown.label, start))
                for span, shown in zip(rendered, prompt.demonstrations, strict=True)
            ]
            rows.append(_Row(prompt, text, front, start, row_columns, places))
            numbers.append(number)
    check_context_length(model, [row.ids for row in rows])
    demos = max(len(prompt.demonstrations) for prompt in prompts)

    def by_demo(values: Iterable[list[Any]], missing: Any) -> Tensor:
        """Return values [batch demo], with `missing` for demonstrations that a prompt lacks."""
        padded = [[*row, *[missing] * (demos - len(row))] for row in values]
        return torch.tensor(padded, dtype=torch.long).reshape(
            len(padded), demos, *torch.tensor(missing).shape
        )

    batch = PromptBatch(
        **row_fields(tokenizer, [row.ids for row in rows]),
        label_positions=by_demo(
            ([len(row.front) + one.scored for one in row.labels] for row in rows), -1
        ),
        label_ranges=by_demo(
            (
                [tuple(len(row.front) + end for end in one.range) for one in row.labels]
                for row in rows
            ),
            (-1, -1),
        ),
        label_index=by_demo(
            ([row.columns.of[d.label] for d in row.prompt.demonstrations] for row in rows), -1
        ),
        label_mask=torch.tensor(
            [[column in row.columns.choices for column in range(len(columns))] for row in rows]
        ),
        label_tokens=torch.tensor(columns.tokens),
        answer=torch.tensor(
            [-1 if (name := row.prompt.answer) is None else row.columns.of[name] for row in rows]
        ),
        text_ranges=by_demo((row.ranges(row.text.rendered.text_spans) for row in rows), (-1, -1)),
        demonstration_ranges=by_demo(
            (list(pairwise(row.text.starts_of_parts(len(row.front)))) for row in rows), (-1, -1)
        ),
        query_range=torch.tensor([row.ranges([row.text.rendered.query_span])[0] for row in rows]),
        labels=columns.names,
        prompts=tuple(row.prompt for row in rows),
        template=template,
        texts=tuple(row.text.rendered.text for row in rows),
        whole_labels=labels,
        label_groups=columns.groups,
        n_appended=torch.tensor([len(row.start) for row in rows]),
        decision_index=None if len(rows) == len(prompts) else torch.tensor(numbers),
    )
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


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
    found = LabelTokens(tokenizer)
    pairs = [(row, label) for row, prompt in enumerate(prompts) for label in prompt.every_label]
    choices = {label for _, label in pairs}
    pairs += [
        (0, label) for label in labels if label not in choices
    ]  # of no prompt: after the first query
    continuations = tokenize_texts(
        tokenizer, [template.continuation(prompts[row], label) for row, label in pairs]
    )
    for (row, label), text in zip(pairs, continuations, strict=True):
        found.add(
            label,
            text.continuation_tokens(texts[row], template.gap),
            f"after the query of prompt {row}",
        )
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for shown, span in zip(prompt.demonstrations, text.rendered.label_spans, strict=True):
            start, stop = text.label_range(span, template.gap)
            found.add(shown.label, text.ids[start:stop], f"in a demonstration of prompt {row}")
    compared = dict.fromkeys(prompt.every_label for prompt in prompts if not _is_own_word(prompt))
    unfinished = list({label: None for own in compared for label in found.check_different(own)})
    if (
        unfinished
    ):  # another label begins with the tokens of these, which end with the template's next token
        query = next((prompt.query for prompt in prompts if prompt.query), "1")
        shown_alone = [
            template.render(Prompt([Demonstration(query, label)], query, label))
            for label in unfinished
        ]
        for label, text in zip(unfinished, tokenize_texts(tokenizer, shown_alone), strict=True):
            found.end_with(text.token_after_label(template.gap), label)
    return found


def _is_own_word(prompt: Prompt) -> bool:
    """Whether the answer is a word of its own, after demonstrations with others, so that it can be
    scored alone.
    """
    return prompt.has_own_answer and bool(prompt.demonstrations)


TokenizeLike = Callable[[Sequence[Prompt], Sequence[int]], PromptBatch]
"""Tokenizes prompts for rows of a batch."""


def tokenizer_like(model: Any, batch: PromptBatch) -> TokenizeLike:
    """Return a function that tokenizes a prompt for each of some rows, with the row's template,
    labels and ends.

    Raise InputError unless `tokenize` gives `batch` for its own prompts, which it does not if `at`
    has selected positions.
    """
    assert batch.n_appended is not None  # prompts have it
    ends = zip(batch.tokens.tolist(), batch.last.tolist(), batch.n_appended.tolist(), strict=True)
    starts = [tuple(row[last + 1 - n : last + 1]) for row, last, n in ends]

    def tokenized(
        prompts: Sequence[Prompt], rows: Sequence[int], prepend_bos: bool | None
    ) -> PromptBatch:
        used = {label for prompt in prompts for label in prompt.every_label}
        labels = tuple(label for label in batch.whole_labels if label in used)
        given: dict[str, Any] = {
            "template": batch.template,
            "labels": labels,
            "prepend_bos": prepend_bos,
        }
        return _tokenize(model, tuple(prompts), starts=[starts[row] for row in rows], **given)

    for prepend_bos in (None, True, False):
        try:
            same = tokenized(batch.prompts, range(len(batch)), prepend_bos)
        except InputError:
            continue
        if torch.equal(same.tokens, batch.tokens) and torch.equal(same.last, batch.last):
            return partial(tokenized, prepend_bos=prepend_bos)
    raise InputError(
        "batch must have the tokens of its own prompts, as il.tokenize returns it, so that other "
        "prompts can be tokenized alike; pass il.tokenize(model, batch.prompts, "
        "template=batch.template)"
    )


def _every_label(prompts: tuple[Prompt, ...], labels: Sequence[str] | None) -> tuple[str, ...]:
    """Return `labels`, which must contain those of all prompts, or by default these in an order of
    their own.
    """
    used = in_order(label for prompt in prompts for label in prompt.labels)
    if labels is None:
        return prompts[0].labels if len({prompt.labels for prompt in prompts}) == 1 else used
    labels = tuple(labels)
    check_unicode(*labels, what="label")
    missing = [label for label in used if label not in labels]
    if missing or len(set(labels)) != len(labels):
        raise InputError(
            f"labels must contain every label of the prompts ({quoted_list(used)}) once, got "
            f"{labels!r}"
            + (f"; add {quoted_list(missing)}" if missing else "; remove the duplicates")
        )
    return labels
