"""Prompts as token tensors, with the position of every part and the token each label is scored by.

Everything is read off the tokens of the whole prompt by character offsets: a label tokenized alone may come
out as other tokens than the same label in its place (" foo" and "foo").
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AutoTokenizer

from icl_lens.digest import json_digest
from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Prompt, Rendered, Span, Template, listed

_DEFAULT_TEMPLATE = Template()

# Padding is masked, never read and never shown, so any id of the vocabulary will do; a tokenizer's own pad
# token may lie outside it (TransformerLens adds one where there is none).
_PAD = 0


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokenized prompts, padded on the right, and where in them everything is.

    Positions count tokens from the row's start, a beginning-of-sequence token included. -1 stands where a row
    has fewer demonstrations than another, or no answer. All tensors lie on one device. `batch[2:5]` and
    `batch[[0, 3]]` are smaller batches with the same labels, without the padding that none of their rows
    needs.

    Made by `tokenize`. Source: docs/howto/own_dataset.md.

    Example:
        >>> [batch.token_strings[0][position] for position in batch.label_positions[0]]
        ['bar', 'bar', 'foo', 'foo']
        >>> batch.tokens.shape, batch.last
        (torch.Size([1, 14]), tensor([13]))
    """

    tokens: Int[Tensor, "batch pos"]
    """Token ids; what lies beyond `attention_mask` is padding."""
    attention_mask: Int[Tensor, "batch pos"]
    """1 on tokens, 0 on padding."""
    last: Int[Tensor, " batch"]
    """Each row's last token, at which the label is predicted."""
    label_positions: Int[Tensor, "batch demo"]
    """The last token of each demonstration's label."""
    label_index: Int[Tensor, "batch demo"]
    """Each demonstration's label, as an index into `labels`."""
    label_mask: Bool[Tensor, "batch label"]
    """Which labels are choices in each row: the prompt's own."""
    label_tokens: Int[Tensor, " label"]
    """The token each label is scored by: the first with which it continues a prompt."""
    answer: Int[Tensor, " batch"]
    """The right label, as an index into `labels`."""
    text_ranges: Int[Tensor, "batch demo 2"]
    """The first token of each demonstration's text, and the one after its last."""
    query_range: Int[Tensor, "batch 2"]
    """The first token of the query's text, and the one after its last."""
    labels: tuple[str, ...]
    """The labels of all prompts together."""
    prompts: tuple[Prompt, ...]
    template: Template
    token_strings: list[list[str]]
    """Each row's tokens without padding, each decoded alone: for display, not for putting together again."""

    @property
    def answer_tokens(self) -> Int[Tensor, " batch"]:
        """The token by which each row's answer is scored; -1 where the prompt has none."""
        return torch.where(self.answer < 0, -1, self.label_tokens[self.answer])

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "PromptBatch":
        """The rows named, as a batch: an integer gives a batch of one.

        Raises IndexError for a row that is not there, InputError when no row is left.
        """
        everything = range(len(self))
        if isinstance(index, slice):
            rows = list(everything[index])
        elif isinstance(index, Tensor):
            if index.dtype == torch.bool and len(index) != len(self):
                raise IndexError(f"a mask of {len(index)} rows does not fit a batch of {len(self)}")
            kept = index.nonzero().flatten() if index.dtype == torch.bool else index.flatten()
            rows = [everything[row] for row in kept.tolist()]
        else:
            rows = [everything[row] for row in ([index] if isinstance(index, int) else index)]
        if not rows:
            raise InputError(f"{index!r} picks no row of a batch of {len(self)}; name at least one")
        at = torch.tensor(rows, device=self.tokens.device)
        width = int(self.last[at].max()) + 1
        by_row = {name: getattr(self, name)[at] for name in _BY_ROW}
        by_row["tokens"] = by_row["tokens"][:, :width]
        by_row["attention_mask"] = by_row["attention_mask"][:, :width]
        return replace(
            self,
            **by_row,
            prompts=tuple(self.prompts[row] for row in rows),
            token_strings=[self.token_strings[row] for row in rows],
        )

    def split(self, size: int) -> Iterator["PromptBatch"]:
        """The batch in pieces of `size` rows, the last perhaps smaller. Raises InputError if `size` < 1."""
        if size < 1:
            raise InputError(f"cannot split into pieces of {size} rows; give a size of at least 1")
        return (self[start : start + size] for start in range(0, len(self), size))

    def to(self, device: torch.device | str) -> "PromptBatch":
        """The same batch with its tensors on `device`."""
        tensors = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


def prompts_digest(batch: PromptBatch) -> str:
    """Sixteen hexadecimal digits that tell prompts apart by what the model reads, padding left out, and is asked."""
    tokens = [row[: last + 1] for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)]
    return json_digest([tokens, batch.answer_tokens.tolist()])


_BY_ROW = (
    "tokens",
    "attention_mask",
    "last",
    "label_positions",
    "label_index",
    "label_mask",
    "answer",
    "text_ranges",
    "query_range",
)


def tokenize(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    *,
    template: Template = _DEFAULT_TEMPLATE,
    labels: Sequence[str] | None = None,
    prepend_bos: bool | None = None,
    shared_prefix: Literal["error", "append"] = "error",
) -> PromptBatch:
    """Tokenize prompts for a model, on the model's device.

    Strings are read by `Prompt.parse`. `model` is anything with a fast Hugging Face `tokenizer` and a `cfg` with
    `n_ctx`. `labels` fixes the order of `PromptBatch.labels` and may name more than the prompts do; left out, they come
    in the order in which the prompts name them. `prepend_bos=None` puts in front what the model's published tokenizer
    does (nothing for GPT-2, <s> for Llama), even where TransformerLens has loaded it with `add_bos_token=True`; nothing
    is ever put at the end. `shared_prefix="append"` is for labels that begin with the same tokens: those are appended
    to every row, so that the token after them tells the labels apart, and `last` is the last of them.

    Raises InputError when there is no prompt, a prompt is longer than the context, the tokenizer is slow or
    does not know a word, a label or text has no tokens of its own, a label's token does not directly follow
    the query or is not the same everywhere, or two labels are scored by the same token.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> batch = il.tokenize(model, [prompt])
        >>> batch.label_positions
        tensor([[ 2,  5,  8, 11]])
    """
    several = (prompts,) if isinstance(prompts, (Prompt, str)) else tuple(prompts)
    prompts = tuple(Prompt.parse(prompt) if isinstance(prompt, str) else prompt for prompt in several)
    if not prompts:
        raise InputError("there is no prompt to tokenize; give at least one")
    every_label = _every_label(prompts, labels)
    tokenizer = getattr(model, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the model's tokenizer ({type(tokenizer).__name__}) gives no character offsets, by which "
            "labels are found; load the fast tokenizer of the model (use_fast=True)"
        )

    texts = _read(tokenizer, [template.render(prompt) for prompt in prompts])
    # Each label after each query that offers it; a label no prompt offers, after the first.
    asked = [(row, label) for row, prompt in enumerate(prompts) for label in prompt.labels]
    offered = {label for _, label in asked}
    asked += [(0, label) for label in every_label if label not in offered]
    continued = _read(tokenizer, [template.continuation(prompts[row], label) for row, label in asked])

    label_ranges = [[text.label_range(span, template.gap) for span in text.rendered.label_spans] for text in texts]
    spellings = _Spellings(tokenizer)
    for (row, label), text in zip(asked, continued, strict=True):
        spellings.add(label, text.after(texts[row], template.gap), f"after the query of prompt {row}")
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for demonstration, (start, stop) in zip(prompt.demonstrations, label_ranges[row], strict=True):
            spellings.add(demonstration.label, text.ids[start:stop], f"in a demonstration of prompt {row}")
    shared, scored = spellings.scored(every_label, shared_prefix)

    front = _front(tokenizer, texts[0], prepend_bos)
    rows = [[*front, *text.ids, *shared] for text in texts]
    _check_fit(model, rows)
    shift = len(front)
    longest, demos = max(map(len, rows)), max(len(prompt.demonstrations) for prompt in prompts)

    def by_demo(values: list[list[Any]], missing: Any) -> Tensor:
        return torch.tensor([[*row, *[missing] * (demos - len(row))] for row in values])

    batch = PromptBatch(
        tokens=torch.tensor([[*row, *[_PAD] * (longest - len(row))] for row in rows]),
        attention_mask=torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        last=torch.tensor([len(row) - 1 for row in rows]),
        label_positions=by_demo([[shift + stop - 1 for _, stop in row] for row in label_ranges], -1),
        label_index=by_demo([[every_label.index(d.label) for d in p.demonstrations] for p in prompts], -1),
        label_mask=torch.tensor([[label in prompt.labels for label in every_label] for prompt in prompts]),
        label_tokens=torch.tensor(scored),
        answer=torch.tensor([-1 if p.answer is None else every_label.index(p.answer) for p in prompts]),
        text_ranges=by_demo(
            [[text.range_of(span, shift) for span in text.rendered.text_spans] for text in texts], (-1, -1)
        ),
        query_range=torch.tensor([text.range_of(text.rendered.query_span, shift) for text in texts]),
        labels=every_label,
        prompts=prompts,
        template=template,
        token_strings=_decoded(tokenizer, rows),
    )
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _every_label(prompts: tuple[Prompt, ...], labels: Sequence[str] | None) -> tuple[str, ...]:
    used = tuple(dict.fromkeys(label for prompt in prompts for label in prompt.labels))
    if labels is None:
        return used
    labels = tuple(labels)
    missing = [label for label in used if label not in labels]
    if missing or len(set(labels)) != len(labels):
        raise InputError(
            f"labels={labels!r} must name every label of the prompts, {listed(used)}, once"
            + (f"; add {listed(missing)}" if missing else "; leave out the repeated ones")
        )
    return labels


@dataclass(frozen=True)
class _Text:
    """A rendered prompt and its tokens, without special tokens, each with the characters it covers."""

    rendered: Rendered
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def range_of(self, span: Span, shift: int = 0) -> tuple[int, int]:
        """The tokens that overlap `span`, `shift` positions on. Raises InputError if there is none."""
        # Offsets never run backwards. A token of no width (white space whose offsets were trimmed away)
        # overlaps what it lies inside of.
        start, stop = bisect_right(self.ends, span[0]), bisect_left(self.starts, span[1])
        if start >= stop:
            raise InputError(
                f"the tokenizer makes no token of {self._at(*span)!r}, in {self._around(span)!r}; "
                "use other words, or leave the prompt out"
            )
        return start + shift, stop + shift

    def label_range(self, span: Span, gap: str) -> tuple[int, int]:
        """The tokens of the label at `span`, with those of the `gap` before it, which a query leaves out.

        Raises InputError if one of them also covers other characters.
        """
        self.range_of(span)
        start, stop = self.range_of((span[0] - len(gap), span[1]))
        outside = self._at(self.starts[start], span[0]).strip() + self._at(span[1], self.ends[stop - 1])
        if outside:
            raise InputError(
                f"the label {self._at(*span)!r} shares a token with the {outside!r} beside it, in "
                f"{self._around(span)!r}; choose a template that keeps them apart"
            )
        return start, stop

    def after(self, asked: "_Text", gap: str) -> list[int]:
        """The tokens of the label with which this text continues `asked`.

        Raises InputError if they do not directly follow the tokens of `asked`.
        """
        span = self.rendered.label_spans[-1]
        _, stop = self.label_range(span, gap)
        if self.ids[: len(asked.ids)] != asked.ids:
            raise InputError(
                f"the end of {asked.rendered.text[-30:]!r} becomes other tokens when the label "
                f"{self._at(*span)!r} follows, so the label's first token is not what is predicted there; "
                "choose a template whose query ends where a token ends"
            )
        return self.ids[len(asked.ids) : stop]

    def _at(self, start: int, end: int) -> str:
        return self.rendered.text[start:end]

    def _around(self, span: Span) -> str:
        return self._at(max(0, span[0] - 20), span[1] + 20)


def _read(tokenizer: Any, rendered: list[Rendered]) -> list[_Text]:
    """Tokenize texts in one call. Raises InputError naming the words the tokenizer does not know."""
    encoded = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    texts = [
        _Text(one, ids, [start for start, _ in offsets], [end for _, end in offsets])
        for one, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    unknown = tokenizer.unk_token_id
    words = dict.fromkeys(
        text.rendered.text[start:end].strip()
        for text in texts
        for token, start, end in zip(text.ids, text.starts, text.ends, strict=True)
        if token == unknown  # never, where no token stands for unknown words
    )
    if words:
        shown = listed(tuple(words)[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
        raise InputError(
            f"the model's tokenizer does not know {shown}, so any answer would mean nothing; "
            "use words of its vocabulary, or another model"
        )
    return texts


class _Spellings:
    """The tokens of each label, which must be the same wherever it stands."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.seen: dict[str, tuple[list[int], str]] = {}

    def add(self, label: str, ids: list[int], where: str) -> None:
        known, there = self.seen.setdefault(label, (ids, where))
        if ids != known:
            raise InputError(
                f"the label {label!r} is {self._shown(known)} {there} but {self._shown(ids)} {where}; "
                "choose a template in which what stands before a label is always the same"
            )

    def scored(self, labels: tuple[str, ...], shared_prefix: str) -> tuple[list[int], list[int]]:
        """The tokens to append to every row, and the token that each label is scored by after them.

        Raises InputError if two labels are scored by the same token.
        """
        spelled = {label: self.seen[label][0] for label in labels}
        columns = zip(*spelled.values(), strict=False) if len(labels) > 1 else ()
        common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
        shared = common if shared_prefix == "append" else []
        scored: dict[int, str] = {}
        for label, ids in spelled.items():
            same = [other for other in labels if other != label and spelled[other] == ids]
            if same:
                raise InputError(
                    f"labels {label!r} and {same[0]!r} are both {self._shown(ids)} to the model's tokenizer; "
                    "choose labels that differ in more than white space"
                )
            if len(ids) == len(shared):
                raise InputError(
                    f"label {label!r} is {self._shown(ids)}, with which all of {listed(labels)} begin, so no "
                    "token of its own tells it apart; choose labels none of which begins another"
                )
            other = scored.setdefault(ids[len(shared)], label)
            if other != label:
                which = f"{len(shared) + 1}th" if shared else "first"
                remedy = "choose labels that differ there"
                if common and not shared:
                    remedy += ', or pass shared_prefix="append"'
                elif shared_prefix == "append":
                    remedy += f", since not all of {listed(labels)} begin with it"
                token = ids[len(shared)]
                raise InputError(
                    f"labels {other!r} and {label!r} share their {which} token {self._shown([token])} "
                    f"(id {token}); {remedy}"
                )
        return shared, list(scored)

    def _shown(self, ids: list[int]) -> str:
        return " + ".join(repr(string) for string in _decoded(self.tokenizer, [ids])[0])


def _front(tokenizer: Any, text: _Text, prepend_bos: bool | None) -> list[int]:
    """The tokens in front of every row."""
    if prepend_bos is None:
        published = _as_published(tokenizer)
        whole = published(text.rendered.text, add_special_tokens=True, verbose=False)["input_ids"]
        for start in range(len(whole) - len(text.ids) + 1):
            if whole[start : start + len(text.ids)] == text.ids:
                return whole[:start]
        raise InputError(
            f"the tokenizer cuts {text.rendered.text[:40]!r} differently with special tokens around it; "
            "pass prepend_bos=True or False"
        )
    if not prepend_bos:
        return []
    # TransformerLens names one for every tokenizer; where the vocabulary lacks it, its id is that of unknown words.
    if tokenizer.bos_token_id is None or tokenizer.decode([tokenizer.bos_token_id]) != tokenizer.bos_token:
        raise InputError("the model's tokenizer has no beginning-of-sequence token to prepend; leave prepend_bos out")
    return [tokenizer.bos_token_id]


def _as_published(tokenizer: Any) -> Any:
    """The tokenizer before TransformerLens, which gives every model a copy made with add_bos_token=True."""
    if tokenizer.init_kwargs.get("add_bos_token") is not True:
        return tokenizer
    try:
        return _stored(tokenizer.name_or_path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"the model's tokenizer was made with add_bos_token=True, and whether {tokenizer.name_or_path!r} has "
            "that by itself cannot be read any more; pass prepend_bos=True or False"
        ) from error


@lru_cache(maxsize=8)
def _stored(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name, local_files_only=True)


def _check_fit(model: Any, rows: list[list[int]]) -> None:
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    if len(rows[longest]) > model.cfg.n_ctx:
        raise InputError(
            f"prompt {longest} has {len(rows[longest])} tokens, more than the {model.cfg.n_ctx} of the "
            "model's context; shorten its texts, or show fewer demonstrations"
        )
    size = getattr(model.cfg, "d_vocab", None)
    largest = max(map(max, rows))
    if size is not None and largest >= size:
        raise InputError(
            f"token id {largest} lies outside the model's vocabulary of {size}: the tokenizer is another "
            "model's, or its beginning-of-sequence token is one the model never had; use the model's own "
            "tokenizer, or prepend_bos=False"
        )


def _decoded(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    distinct = sorted({token for row in rows for token in row})
    strings = tokenizer.batch_decode([[token] for token in distinct], clean_up_tokenization_spaces=False)
    string = dict(zip(distinct, strings, strict=True))
    return [[string[token] for token in row] for row in rows]
