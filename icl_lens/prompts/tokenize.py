"""Tokenize prompts into a `PromptBatch`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch, row_fields
from icl_lens.prompts.label_tokens import Ids, LabelColumns, LabelTokens
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
from icl_lens.prompts.token_ids import check_context_length


def tokenize(
    model: Any,
    prompts: Prompt | str | Text | Sequence[Prompt | str] | Sequence[Text],
    *,
    template: Template = DEFAULT_TEMPLATE,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
) -> PromptBatch:
    """Tokenize prompts, or plain text (`Text`), for a model, on the model's device.

    Strings are parsed by `Prompt.parse`. A batch of `Text` has no labels: each row is scored by its own answer, and
    `PromptBatch.at` selects other positions, which are scored by the next token; `template` and `labels` do not apply.
    `model` needs a fast Hugging Face `tokenizer` and a `cfg` with `n_ctx`.
    `labels` fixes the order of `PromptBatch.labels` and may include more labels than the prompts. The default is the
    order of `Prompt.labels` if it is the same in all prompts, else numbers by value and words alphabetically, so that a
    set of labels has the same columns in every batch. Prompts may have different labels; only those of one prompt are
    its choices. `prepend_bos=None` prepends what the model's published tokenizer prepends (nothing for GPT-2, <s> for
    Llama), even if TransformerLens loaded it with `add_bos_token=True`; nothing is appended, and
    nothing is prepended to a text that already begins with it, such as chat text.

    Labels may begin with the same tokens. They are compared at the first token in which they differ, and a prompt has
    one row for each such decision between its answer and other labels: "very good" is compared with "bad" at "very",
    and with "very bad" in another row, to which "very" is appended. In the first, "very good" and "very bad" are one
    label, "very…" (`PromptBatch.labels`, `whole_labels`). A prompt without answer has a row for every decision between
    its labels. If its answer is a word of its own, which no demonstration shows, it has one row: the answer's first
    token is compared with those of the other labels that differ from it.

    Raise InputError if prompts are empty or mixed with `Text`, a prompt is longer than the context, the tokenizer is
    slow or lacks a word, a label or text has no separate tokens, a label's token does not directly follow the query or
    differs between contexts, the answer of a `Text` does not begin where it ends or equals a comparison, two labels
    of a prompt have the same tokens, or those of one begin another and different tokens follow it.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> batch = il.tokenize(model, [prompt])
        >>> batch.label_positions
        tensor([[ 3,  7, 11, 15]])
        >>> texts = il.tokenize(model, [il.Text("love like bar", answer=" foo"), il.Text("one two", answer=" bar")])
        >>> il.head_log_prob_increase(il.capture(model, texts), texts.answer_tokens).shape
        torch.Size([2, 8, 6])
    """
    given = (prompts,) if isinstance(prompts, str) or not isinstance(prompts, Iterable) else tuple(prompts)
    plain = [one for one in given if isinstance(one, Text)]
    if plain:
        if len(plain) < len(given):
            raise InputError("prompts must be all il.Text or all il.Prompt, got both; tokenize them separately")
        if template != DEFAULT_TEMPLATE or labels is not None:
            raise InputError("template and labels do not apply to il.Text; omit them")
        return tokenize_plain(model, plain, prepend_bos=prepend_bos)
    prompts = as_prompts(given)
    if not isinstance(template, Template):
        raise InputError(f"template must be an il.Template(demonstration, query), got {template!r}")
    if not prompts:
        raise InputError("prompts must contain at least one prompt, got none")
    return _tokenize(model, prompts, template=template, labels=_every_label(prompts, labels), prepend_bos=prepend_bos)


def _tokenize(
    model: Any,
    prompts: tuple[Prompt, ...],
    *,
    template: Template,
    labels: tuple[str, ...],
    prepend_bos: bool | None,
    starts: Sequence[Ids] | None = None,
) -> PromptBatch:
    """Return one row per prompt and decision between its labels or, with `starts`, one row per prompt and start."""
    tokenizer = require_fast_tokenizer(model)
    texts = tokenize_texts(tokenizer, [template.render(prompt) for prompt in prompts])
    # Tokenize each label after each query that has it as a choice, and a label of no prompt after the first query.
    own_labels = [tuple(dict.fromkeys([*(d.label for d in p.demonstrations), *p.labels])) for p in prompts]
    pairs = [(row, label) for row, labels_of_row in enumerate(own_labels) for label in labels_of_row]
    choices = {label for _, label in pairs}
    pairs += [(0, label) for label in labels if label not in choices]
    continuations = tokenize_texts(tokenizer, [template.continuation(prompts[row], label) for row, label in pairs])

    label_ranges = [[text.label_range(span, template.gap) for span in text.rendered.label_spans] for text in texts]
    label_tokens = LabelTokens(tokenizer)
    for (row, label), text in zip(pairs, continuations, strict=True):
        label_tokens.add(label, text.continuation_tokens(texts[row], template.gap), f"after the query of prompt {row}")
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for demonstration, (start, stop) in zip(prompt.demonstrations, label_ranges[row], strict=True):
            label_tokens.add(demonstration.label, text.ids[start:stop], f"in a demonstration of prompt {row}")
    compared = {own: None for prompt, own in zip(prompts, own_labels, strict=True) if not _is_own_word(prompt)}
    unfinished = {label: None for own in compared for label in label_tokens.check_different(own)}
    n_tokens = {label: len(ids) for label, (ids, _) in label_tokens.seen.items()}
    if unfinished:  # another label begins with the tokens of these, which end with the template's next token
        query = next((prompt.query for prompt in prompts if prompt.query), "1")
        shown = [template.render(Prompt([Demonstration(query, label)], query, label)) for label in unfinished]
        for label, text in zip(unfinished, tokenize_texts(tokenizer, shown), strict=True):
            _, stop = text.label_range(text.rendered.label_spans[0], template.gap)
            span, texts_begin = text.rendered.label_spans[0], (text.rendered.text_spans[0][0], text.rendered.starts[1])
            is_own = text.ends[stop] <= min(start for start in texts_begin if start >= span[1])  # and no text's
            label_tokens.end_with(text.ids[stop] if is_own else None, label)

    if starts is None:
        found = [
            [()] if _is_own_word(prompt) else label_tokens.decisions(own, prompt.answer)
            for prompt, own in zip(prompts, own_labels, strict=True)
        ]
        numbers = [number for number, own in enumerate(found) for _ in own]
        starts = [start for own in found for start in own]
    else:
        numbers = [*range(len(prompts))]
    own_words = [own for prompt, own in zip(prompts, own_labels, strict=True) if _is_own_word(prompt)]
    alone = {label: None for own in own_words for label in own} | dict.fromkeys(
        label for label in labels if label not in choices
    )
    columns = LabelColumns(labels, label_tokens, compared, alone)
    rows = [(prompts[number], texts[number], label_ranges[number]) for number in numbers]
    at = []
    for number, start in zip(numbers, starts, strict=True):
        prompt = prompts[number]
        own = sorted(prompt.labels, key=lambda label: label != prompt.answer)  # the answer first
        at.append(columns.of_row(own_labels[number], own, None if _is_own_word(prompt) else start))

    fronts = special_prefixes(tokenizer, texts, prepend_bos)
    ids = [[*fronts[number], *texts[number].ids, *start] for number, start in zip(numbers, starts, strict=True)]
    check_context_length(model, ids)
    shifts = [len(fronts[number]) for number in numbers]
    demos = max(len(prompt.demonstrations) for prompt in prompts)

    def by_demo(values: list[list[Any]], missing: Any) -> Tensor:
        """Return values [batch demo], with `missing` for demonstrations that a prompt lacks."""
        padded = [[*row, *[missing] * (demos - len(row))] for row in values]
        return torch.tensor(padded, dtype=torch.long).reshape(len(values), demos, *torch.tensor(missing).shape)

    def label_range(text: TokenizedText, span: Span, tokens: tuple[int, int], label: str, shared: int) -> list[int]:
        """Return the range of a label; white space before it belongs to it only if it is scored by this token."""
        start, stop = tokens
        is_ended = shared == n_tokens[label]  # it is scored by the token that follows it
        return [min(start + shared, text.range_of(span)[0]), stop + is_ended]

    parted = [
        [label_tokens.parting(d.label, start)[0] for d in prompt.demonstrations]
        for (prompt, _, _), start in zip(rows, starts, strict=True)
    ]
    each = list(zip(rows, shifts, parted, strict=True))
    batch = PromptBatch(
        **row_fields(tokenizer, ids),
        label_positions=by_demo(
            [
                [shift + start + n for (start, _), n in zip(ranges, shared, strict=True)]
                for (_, _, ranges), shift, shared in each
            ],
            -1,
        ),
        label_ranges=by_demo(
            [
                [
                    tuple(shift + one for one in label_range(text, span, tokens, shown.label, n))
                    for span, tokens, shown, n in zip(
                        text.rendered.label_spans, ranges, prompt.demonstrations, shared, strict=True
                    )
                ]
                for (prompt, text, ranges), shift, shared in each
            ],
            (-1, -1),
        ),
        label_index=by_demo(
            [[one.of[d.label] for d in row[0].demonstrations] for row, one in zip(rows, at, strict=True)], -1
        ),
        label_mask=torch.tensor([[column in one.choices for column in range(len(columns))] for one in at]),
        label_tokens=torch.tensor(columns.tokens),
        answer=torch.tensor(
            [
                -1 if prompt.answer is None else one.of[prompt.answer]
                for (prompt, _, _), one in zip(rows, at, strict=True)
            ]
        ),
        text_ranges=by_demo(
            [[text.range_of(span, shift) for span in text.rendered.text_spans] for (_, text, _), shift, _ in each],
            (-1, -1),
        ),
        demonstration_ranges=by_demo(
            [list(pairwise(text.starts_of_parts(shift))) for (_, text, _), shift, _ in each], (-1, -1)
        ),
        query_range=torch.tensor([text.range_of(text.rendered.query_span, shift) for (_, text, _), shift, _ in each]),
        labels=columns.names,
        prompts=tuple(prompt for prompt, _, _ in rows),
        template=template,
        texts=tuple(text.rendered.text for _, text, _ in rows),
        whole_labels=labels,
        label_groups=columns.groups,
        n_appended=torch.tensor(list(map(len, starts))),
        decision_index=None if numbers == [*range(len(prompts))] else torch.tensor(numbers),
    )
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _is_own_word(prompt: Prompt) -> bool:
    """Whether the answer is a word of its own, after demonstrations with others, so that it can be scored alone."""
    return prompt.has_own_answer and bool(prompt.demonstrations)


TokenizeLike = Callable[[Sequence[Prompt], Sequence[int]], PromptBatch]
"""Tokenizes prompts for rows of a batch."""


def tokenizer_like(model: Any, batch: PromptBatch) -> TokenizeLike:
    """Return a function that tokenizes a prompt for each of some rows, with the row's template, labels and ends.

    Raise InputError unless `tokenize` gives `batch` for its own prompts, which it does not if `at` has selected
    positions.
    """
    assert batch.n_appended is not None  # prompts have it
    ends = zip(batch.tokens.tolist(), batch.last.tolist(), batch.n_appended.tolist(), strict=True)
    starts = [tuple(row[last + 1 - n : last + 1]) for row, last, n in ends]

    def tokenized(prompts: Sequence[Prompt], rows: Sequence[int], prepend_bos: bool | None) -> PromptBatch:
        used = {label for prompt in prompts for label in (*prompt.labels, *(d.label for d in prompt.demonstrations))}
        labels = tuple(label for label in batch.whole_labels if label in used)
        given: dict[str, Any] = {"template": batch.template, "labels": labels, "prepend_bos": prepend_bos}
        return _tokenize(model, tuple(prompts), starts=[starts[row] for row in rows], **given)

    for prepend_bos in (None, True, False):
        try:
            same = tokenized(batch.prompts, range(len(batch)), prepend_bos)
        except InputError:
            continue
        if torch.equal(same.tokens, batch.tokens) and torch.equal(same.last, batch.last):
            return partial(tokenized, prepend_bos=prepend_bos)
    raise InputError(
        "batch must have the tokens of its own prompts, as il.tokenize returns it, so that other prompts can be "
        "tokenized alike; pass il.tokenize(model, batch.prompts, template=batch.template)"
    )


def _every_label(prompts: tuple[Prompt, ...], labels: Sequence[str] | None) -> tuple[str, ...]:
    """Return `labels`, which must contain those of all prompts, or by default these in an order of their own."""
    used = in_order(label for prompt in prompts for label in prompt.labels)
    if labels is None:
        return prompts[0].labels if len({prompt.labels for prompt in prompts}) == 1 else used
    labels = tuple(labels)
    check_unicode(*labels, what="label")
    missing = [label for label in used if label not in labels]
    if missing or len(set(labels)) != len(labels):
        raise InputError(
            f"labels must contain every label of the prompts ({quoted_list(used)}) once, got {labels!r}"
            + (f"; add {quoted_list(missing)}" if missing else "; remove the duplicates")
        )
    return labels
