"""Tokenize prompts into a `PromptBatch`."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from typing import Any, Literal

import torch
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.prompts.batch import PromptBatch, row_fields
from icl_lens.prompts.plain_text import Text, tokenize_plain
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, as_prompts, check_unicode, in_order, quoted_list
from icl_lens.prompts.token_alignment import LabelTokens, require_fast_tokenizer, special_prefixes, tokenize_texts
from icl_lens.prompts.token_ids import check_context_length


def tokenize(
    model: Any,
    prompts: Prompt | str | Text | Sequence[Prompt | str] | Sequence[Text],
    *,
    template: Template = DEFAULT_TEMPLATE,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
) -> PromptBatch:
    """Tokenize prompts, or plain text (`Text`), for a model, on the model's device.

    Strings are parsed by `Prompt.parse`. A batch of `Text` has no labels: each row is scored by its own answer, and
    `PromptBatch.at` selects other positions, which are scored by the next token; `template`, `labels` and
    `shared_prefix` do not apply. `model` needs a fast Hugging Face `tokenizer` and a `cfg` with `n_ctx`.
    `labels` fixes the order of `PromptBatch.labels` and may include more labels than the prompts. The default is the
    order of `Prompt.labels` if it is the same in all prompts, else numbers by value and words alphabetically, so that a
    set of labels has the same columns in every batch. Prompts may have different labels; only those of one prompt are
    its choices. `prepend_bos=None` prepends what the model's published tokenizer prepends (nothing for GPT-2, <s> for
    Llama), even if TransformerLens loaded it with `add_bos_token=True`; nothing is appended, and
    nothing is prepended to a text that already begins with it, such as chat text. Use
    `shared_prefix="append"` for labels that begin with the same tokens: the shared tokens are appended to every row, so
    that the next token discriminates the labels, and `last` is the last shared token.

    Raise InputError if prompts are empty or mixed with `Text`, a prompt is longer than the context, the tokenizer is
    slow or lacks a word, a label or text has no separate tokens, a label's token does not directly follow the query or
    differs between contexts, the answer of a `Text` does not begin where it ends or equals a comparison, or two labels
    of a prompt are scored by the same token. If its answer is a word of its own, which no demonstration shows, the
    latter is raised where labels are compared, since the answer alone can be scored.
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
        if template != DEFAULT_TEMPLATE or labels is not None or shared_prefix != "error":
            raise InputError("template, labels and shared_prefix do not apply to il.Text; omit them")
        return tokenize_plain(model, plain, prepend_bos=prepend_bos)
    prompts = as_prompts(given)
    if not isinstance(template, Template):
        raise InputError(f"template must be an il.Template(demonstration, query), got {template!r}")
    check_choice("shared_prefix", shared_prefix, ("error", "append"))
    if not prompts:
        raise InputError("prompts must contain at least one prompt, got none")
    every_label = _every_label(prompts, labels)
    tokenizer = require_fast_tokenizer(model)
    texts = tokenize_texts(tokenizer, [template.render(prompt) for prompt in prompts])
    # Tokenize each label after each query that has it as a choice, and a label of no prompt after the first query.
    own_labels = [tuple(dict.fromkeys([*(d.label for d in p.demonstrations), *p.labels])) for p in prompts]
    pairs = [(row, label) for row, labels_of_row in enumerate(own_labels) for label in labels_of_row]
    choices = {label for _, label in pairs}
    pairs += [(0, label) for label in every_label if label not in choices]
    continuations = tokenize_texts(tokenizer, [template.continuation(prompts[row], label) for row, label in pairs])

    label_ranges = [[text.label_range(span, template.gap) for span in text.rendered.label_spans] for text in texts]
    label_tokens = LabelTokens(tokenizer)
    for (row, label), text in zip(pairs, continuations, strict=True):
        label_tokens.add(label, text.continuation_tokens(texts[row], template.gap), f"after the query of prompt {row}")
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for demonstration, (start, stop) in zip(prompt.demonstrations, label_ranges[row], strict=True):
            label_tokens.add(demonstration.label, text.ids[start:stop], f"in a demonstration of prompt {row}")
    sets: dict[tuple[str, ...], bool] = {}  # choices, and whether they are compared
    for prompt, own in zip(prompts, own_labels, strict=True):
        sets[own] = sets.get(own, False) or not prompt.has_own_answer
    if not choices.issuperset(every_label):
        sets[every_label] = True
    compared = [own for own, is_compared in sets.items() if is_compared]
    uncompared = [own for own, is_compared in sets.items() if not is_compared]
    shared, scored = label_tokens.scored(every_label, compared, shared_prefix, uncompared)

    fronts = special_prefixes(tokenizer, texts, prepend_bos)
    rows = [[*front, *text.ids, *shared] for front, text in zip(fronts, texts, strict=True)]
    check_context_length(model, rows)
    shifts = list(map(len, fronts))
    demos = max(len(prompt.demonstrations) for prompt in prompts)
    index_of = {label: index for index, label in enumerate(every_label)}

    def by_demo(values: list[list[Any]], missing: Any) -> Tensor:
        """Return values [batch demo], with `missing` for demonstrations that a prompt lacks."""
        padded = [[*row, *[missing] * (demos - len(row))] for row in values]
        return torch.tensor(padded, dtype=torch.long).reshape(len(values), demos, *torch.tensor(missing).shape)

    batch = PromptBatch(
        **row_fields(tokenizer, rows),
        label_positions=by_demo(
            [
                [shift + start + len(shared) for start, _ in row]
                for shift, row in zip(shifts, label_ranges, strict=True)
            ],
            -1,
        ),
        label_ranges=by_demo(
            [
                [
                    (shift + min(start + len(shared), text.range_of(span)[0]), shift + stop)
                    for span, (start, stop) in zip(text.rendered.label_spans, row, strict=True)
                ]
                for shift, text, row in zip(shifts, texts, label_ranges, strict=True)
            ],
            (-1, -1),
        ),
        label_index=by_demo([[index_of[d.label] for d in p.demonstrations] for p in prompts], -1),
        label_mask=torch.tensor([[label in prompt.labels for label in every_label] for prompt in prompts]),
        label_tokens=torch.tensor(scored),
        answer=torch.tensor([-1 if p.answer is None else index_of[p.answer] for p in prompts]),
        text_ranges=by_demo(
            [
                [text.range_of(span, shift) for span in text.rendered.text_spans]
                for shift, text in zip(shifts, texts, strict=True)
            ],
            (-1, -1),
        ),
        demonstration_ranges=by_demo(
            [list(pairwise(text.starts_of_parts(shift))) for shift, text in zip(shifts, texts, strict=True)], (-1, -1)
        ),
        query_range=torch.tensor(
            [text.range_of(text.rendered.query_span, shift) for shift, text in zip(shifts, texts, strict=True)]
        ),
        labels=every_label,
        prompts=prompts,
        template=template,
        texts=tuple(text.rendered.text for text in texts),
    )
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def tokenizer_like(model: Any, batch: PromptBatch) -> Callable[[Sequence[Prompt]], PromptBatch]:
    """Return a function that tokenizes prompts with the batch's template, labels, start of text and shared prefix.

    Labels that none of its prompts has are left out of a batch without shared prefix. Raise InputError unless
    `tokenize` gives `batch` for its own prompts, which it does not if `at` has selected positions.
    """
    for shared_prefix, prepend_bos in product(("error", "append"), (None, True, False)):
        given: dict[str, Any] = {"shared_prefix": shared_prefix, "prepend_bos": prepend_bos, "template": batch.template}
        try:
            same = tokenize(model, batch.prompts, labels=batch.labels, **given)
        except InputError:
            continue
        if torch.equal(same.tokens, batch.tokens) and torch.equal(same.last, batch.last):
            break
    else:
        raise InputError(
            "batch must have the tokens of its own prompts, as il.tokenize returns it, so that other prompts can be "
            "tokenized alike; pass il.tokenize(model, batch.prompts, template=batch.template)"
        )

    def tokenized(prompts: Sequence[Prompt]) -> PromptBatch:
        used = {label for prompt in prompts for label in (*prompt.labels, *(d.label for d in prompt.demonstrations))}
        labels = [label for label in batch.labels if label in used or shared_prefix == "append"]
        return tokenize(model, prompts, labels=labels, **given)

    return tokenized


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
