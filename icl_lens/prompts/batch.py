"""Prompts as token tensors, with the position of every part and the token each label is scored by.

Everything is read off the tokens of the whole prompt by character offsets: a label tokenized alone may come
out as other tokens than the same label in its place (" foo" and "foo").
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import AutoTokenizer

from icl_lens.digest import json_digest
from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Demonstration, Prompt, Rendered, Span, Template, listed, several_prompts
from icl_lens.prompts.token_ids import (
    TokenPositions,
    check_ids,
    chosen_positions,
    decoded,
    named,
    one_a_row,
    padded_ids,
    several_a_row,
    vocabulary_digest,
)

_DEFAULT_TEMPLATE = Template()


# Padding is masked, never read and never shown, so any id of the vocabulary will do; a tokenizer's own pad
# token may lie outside it (TransformerLens adds one where there is none).
PAD = 0


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokenized prompts, padded on the right, and where in them everything is.

    Positions count tokens from the row's start, a beginning-of-sequence token included. -1 stands where a row
    has fewer demonstrations than another, or no answer. All tensors lie on one device. `batch[2:5]` and
    `batch[[0, 3]]` are smaller batches with the same labels, without the padding that none of their rows
    needs.

    Made by `tokenize`; by `tokenize_text` and `from_tokens` without demonstrations: no label then, `prompts` is empty
    and `targets` says what each row is scored by. `at` gives rows that end at other positions of the same prompts.
    Source: docs/howto/own_dataset.md.

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
    """One a row; empty for texts without demonstrations."""
    template: Template
    token_strings: list[list[str]]
    """Each row's tokens without padding, each decoded alone: for display, not for putting together again."""
    token_names: list[list[str]] = field(default_factory=list)
    """The same with white space visible: "▁to" where the vocabulary writes it so, else "␣to"; line breaks as "⏎"."""
    texts: tuple[str, ...] = ()
    """The whole text each row was made of."""
    targets: Int[Tensor, " batch"] | None = None
    """The token each row is scored by where that is not its answer's label; -1 where there is none."""
    against: Int[Tensor, "batch other"] | None = None
    """Tokens to compare each row's with; -1 where a row has fewer. None: with none."""
    prompt_index: Int[Tensor, " batch"] | None = None
    """Where rows are positions of prompts: which prompt each is of. Rows of one prompt begin with the same tokens."""
    vocabulary: str = ""
    """A digest of the tokenizer's vocabulary, so that no other model is run on these ids; empty where none is known."""

    def __post_init__(self) -> None:
        if not self.token_names:
            object.__setattr__(self, "token_names", self.token_strings)

    @property
    def answer_tokens(self) -> Int[Tensor, " batch"]:
        """The token each row is scored by: its target, or its answer's; -1 where it has neither."""
        if self.targets is not None:
            return self.targets
        return torch.where(self.answer < 0, -1, self.label_tokens[self.answer])

    @property
    def other_label_tokens(self) -> Int[Tensor, "batch other"]:
        """The tokens of each prompt's labels but its answer, -1 where a prompt has fewer than another, or no answer.

        What to give as `against`, to ask which parts tell the answer from the other labels.
        """
        return self.label_tokens_but(self.answer)

    def label_tokens_but(self, label: Int[Tensor, " batch"]) -> Int[Tensor, "batch other"]:
        """The tokens of each prompt's labels but one, an index into `labels` (-1: no row of tokens), in their order.

        -1 on the right where a prompt has fewer than another. The axis has a place even if no prompt has another label.
        """
        label = label.to(self.label_mask.device)
        wanted = self.label_mask & (label >= 0)[:, None]
        wanted = wanted & (torch.arange(len(self.labels), device=wanted.device) != label[:, None])
        order = wanted.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(wanted.sum(1).max()))]
        return torch.where(wanted.gather(1, order), self.label_tokens[order], -1)

    def check_labels(self, what: str, instead: str) -> None:
        """Raises InputError where there is no label at all, so that `what` means nothing; `instead` is the remedy."""
        if not self.labels:
            raise InputError(f"these prompts have no demonstrations, so there is no {what}; {instead}")

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        what = f"{self.label_positions.shape[1]} demonstrations, labels {listed(self.labels)}"
        return f"PromptBatch({self.extent}, {what if self.labels else 'no demonstrations'})"

    @property
    def extent(self) -> str:
        """How many prompts of how many tokens, in words: "100 prompts × 14 tokens"."""
        lengths = (self.last + 1).tolist()
        tokens = f"{min(lengths)}–{max(lengths)}" if min(lengths) < max(lengths) else f"{max(lengths)}"
        n = len(self) if self.prompt_index is None else len(self.prompt_index.unique())
        prompts = f"{n} prompt" + "s" * (n != 1)
        if n < len(self):
            prompts += f" at {len(self)} positions"
        return f"{prompts} × {tokens} token" + "s" * (tokens != "1")

    @classmethod
    def from_tokens(
        cls,
        tokens: Tensor | Sequence[Sequence[int]],
        *,
        model: Any = None,
        targets: int | Sequence[int] | Tensor | None = None,
        against: int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
        positions: TokenPositions | None = None,
    ) -> "PromptBatch":
        """Token ids [batch pos], or rows of different lengths, as prompts without demonstrations.

        Nothing is put in front. With the `model`, ids are checked against its vocabulary and context, tokens have
        names, and the batch lies on its device. `targets`: one id, or one a row; left out, each position is scored by
        the token that follows it, and the last by none. `against`: ids to compare the targets with, one for all, one a
        row, or a list a row. `positions` picks others than the last, see `at`.

        Raises InputError for no tokens, for ids the model does not have, rows longer than its context, and targets or
        positions that do not fit.

        Example:
            >>> random = il.PromptBatch.from_tokens([[5, 8, 13, 5, 8, 13]], model=model, positions="all")
            >>> random.answer_tokens
            tensor([ 8, 13,  5,  8, 13, -1])
        """
        try:
            rows = [list(map(int, row)) for row in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
        except (TypeError, ValueError):
            raise InputError(f"{tokens!r} are no rows of token ids; give one list of integers a prompt") from None
        check_ids(None, [id for row in rows for id in row])
        if not rows or not all(rows):
            raise InputError("there are no tokens in some row; give each prompt at least one")
        device = tokens.device if isinstance(tokens, Tensor) else None
        if model is not None:
            check_fit(model, rows)
            device = getattr(model.cfg, "device", None)
        batch = without_demonstrations(getattr(model, "tokenizer", None), rows, texts=None)
        batch = batch if device is None else batch.to(device)
        scored = one_a_row(targets, len(rows), "targets")
        others = several_a_row(against, len(rows))
        check_ids(model, [*(scored or []), *(id for row in others or [] for id in row)])
        picked = batch.at("last" if positions is None else positions)
        assert picked.prompt_index is not None
        if scored is not None:
            picked = replace(picked, targets=torch.tensor(scored, device=device)[picked.prompt_index])
        if others is not None:
            picked = replace(picked, against=padded_ids(others).to(picked.tokens.device)[picked.prompt_index])
        check_not_against_itself(picked)
        return picked if positions is not None else replace(picked, prompt_index=None)

    def at(self, positions: TokenPositions) -> "PromptBatch":
        """The same prompts read at other positions: one row for each prompt and position, ending there.

        `positions` is one for every row, several for every row, or a list for each; negative ones count from the row's
        end; "all" is every position. A row that ends before its prompt does is scored by the token that follows
        (`answer_tokens`), has no answer, and no label beyond its end. `prompt_index` says which prompt each row is of;
        `capture` runs the rows of a prompt as one. Raises InputError for a position that a row does not have.

        Example:
            >>> early = batch.at([2, 13])
            >>> early.token_strings[0], early.answer_tokens.tolist() == [batch.tokens[0, 3], batch.answer_tokens[0]]
            (['love', ':', 'bar'], True)
        """
        device = self.tokens.device
        chosen = chosen_positions(positions, (self.last + 1).tolist())
        ends = [(row, place) for row, places in enumerate(chosen) for place in places]
        index = [row for row, _ in ends]
        rows, place = torch.tensor(ends, device=device).unbind(-1)
        early = place < self.last[rows]
        columns = torch.arange(int(place.max()) + 1, device=device)
        real = columns <= place[:, None]
        following = self.tokens[rows, (place + 1).clamp(max=self.tokens.shape[1] - 1)]
        hidden = self.label_positions[rows] > place[:, None]
        unread = (self.text_ranges[rows, :, 1] > place[:, None] + 1)[..., None]
        asked = (self.query_range[rows, 1] <= place + 1)[:, None]
        against = None if self.against is None else self.against[rows].masked_fill(early[:, None], -1)
        return replace(
            self,
            tokens=torch.where(real, self.tokens[rows][:, : len(columns)], PAD),
            attention_mask=real.to(self.attention_mask.dtype),
            last=place,
            label_positions=self.label_positions[rows].masked_fill(hidden, -1),
            label_index=self.label_index[rows].masked_fill(hidden, -1),
            label_mask=self.label_mask[rows],
            answer=self.answer[rows].masked_fill(early, -1),
            text_ranges=self.text_ranges[rows].masked_fill(unread, -1),
            query_range=torch.where(asked, self.query_range[rows], -1),
            prompts=tuple(self.prompts[row] for row in index) if self.prompts else (),
            token_strings=[self.token_strings[row][: end + 1] for row, end in ends],
            token_names=[self.token_names[row][: end + 1] for row, end in ends],
            texts=tuple(self.texts[row] for row in index) if self.texts else (),
            targets=torch.where(early, following, self.answer_tokens[rows]),
            against=None if against is None or not bool((against >= 0).any()) else against,
            prompt_index=rows if self.prompt_index is None else self.prompt_index[rows],
        )

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
        by_row = {name: getattr(self, name)[at] for name in _BY_ROW if getattr(self, name) is not None}
        by_row["tokens"] = by_row["tokens"][:, :width]
        by_row["attention_mask"] = by_row["attention_mask"][:, :width]
        return replace(
            self,
            **by_row,
            prompts=tuple(self.prompts[row] for row in rows) if self.prompts else (),
            token_strings=[self.token_strings[row] for row in rows],
            token_names=[self.token_names[row] for row in rows],
            texts=tuple(self.texts[row] for row in rows) if self.texts else (),
        )

    def split(self, size: int) -> Iterator["PromptBatch"]:
        """The batch in pieces of `size` rows, the last perhaps smaller. Raises InputError if `size` < 1."""
        if size < 1:
            raise InputError(f"cannot split into pieces of {size} rows; give a size of at least 1")
        return (self[start : start + size] for start in range(0, len(self), size))

    def described(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The batch as tensors and plain data, for files; `from_described` is the way back."""
        tensors = {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}
        prompts = [
            [[[one.text, one.label] for one in prompt.demonstrations], prompt.query, prompt.answer, prompt.labels]
            for prompt in self.prompts
        ]
        names = ("labels", "token_strings", "token_names", "texts", "vocabulary")
        plain = {name: getattr(self, name) for name in names}
        return tensors, {**plain, "prompts": prompts, "template": asdict(self.template)}

    @classmethod
    def from_described(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> "PromptBatch":
        """The batch that `described` made tensors and plain data of."""
        prompts = tuple(
            Prompt([Demonstration(*one) for one in shown], query, answer, labels)
            for shown, query, answer, labels in about["prompts"]
        )
        return cls(
            **tensors,
            labels=tuple(about["labels"]),
            prompts=prompts,
            template=Template(**about["template"]),
            token_strings=about["token_strings"],
            token_names=about["token_names"],
            texts=tuple(about["texts"]),
            vocabulary=about.get("vocabulary", ""),
        )

    def to(self, device: torch.device | str) -> "PromptBatch":
        """The same batch with its tensors on `device`."""
        tensors = {
            one.name: value.to(device) for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)
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
    "targets",
    "against",
    "prompt_index",
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
    prompts = several_prompts(prompts)
    if not isinstance(template, Template):
        raise InputError(f"template={template!r} is no template; write il.Template(demonstration, query)")
    if not prompts:
        raise InputError("there is no prompt to tokenize; give at least one")
    every_label = _every_label(prompts, labels)
    tokenizer = check_fast(model)
    texts = read_texts(tokenizer, [template.render(prompt) for prompt in prompts])
    # Each label after each query that offers it; a label no prompt offers, after the first.
    asked = [(row, label) for row, prompt in enumerate(prompts) for label in prompt.labels]
    offered = {label for _, label in asked}
    asked += [(0, label) for label in every_label if label not in offered]
    continued = read_texts(tokenizer, [template.continuation(prompts[row], label) for row, label in asked])

    label_ranges = [[text.label_range(span, template.gap) for span in text.rendered.label_spans] for text in texts]
    spellings = _Spellings(tokenizer)
    for (row, label), text in zip(asked, continued, strict=True):
        spellings.add(label, text.after(texts[row], template.gap), f"after the query of prompt {row}")
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for demonstration, (start, stop) in zip(prompt.demonstrations, label_ranges[row], strict=True):
            spellings.add(demonstration.label, text.ids[start:stop], f"in a demonstration of prompt {row}")
    shared, scored = spellings.scored(every_label, shared_prefix)

    front = front_tokens(tokenizer, texts[0], prepend_bos)
    rows = [[*front, *text.ids, *shared] for text in texts]
    check_fit(model, rows)
    shift = len(front)
    longest, demos = max(map(len, rows)), max(len(prompt.demonstrations) for prompt in prompts)

    def by_demo(values: list[list[Any]], missing: Any) -> Tensor:
        return torch.tensor([[*row, *[missing] * (demos - len(row))] for row in values])

    batch = PromptBatch(
        tokens=torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows]),
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
        token_strings=decoded(tokenizer, rows),
        token_names=named(tokenizer, rows),
        texts=tuple(text.rendered.text for text in texts),
        vocabulary=vocabulary_digest(tokenizer),
    )
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def check_fast(model: Any) -> Any:
    """The model's tokenizer; raises InputError for a slow one, or none."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InputError(f"{type(model).__name__} is no model with a tokenizer; give what il.load_model(name) returns")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the model's tokenizer ({type(tokenizer).__name__}) gives no character offsets, by which "
            "labels are found; load the fast tokenizer of the model (use_fast=True)"
        )
    return tokenizer


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


def read_texts(tokenizer: Any, rendered: list[Rendered]) -> list[_Text]:
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
        return " + ".join(repr(string) for string in decoded(self.tokenizer, [ids])[0])


def front_tokens(tokenizer: Any, text: _Text, prepend_bos: bool | None) -> list[int]:
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


def check_fit(model: Any, rows: list[list[int]]) -> None:
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


def check_vocabulary(model: Any, batch: PromptBatch, what: str) -> None:
    """Raises InputError where a batch's ids are those of another tokenizer than the model's, or none of its own."""
    size = getattr(model.cfg, "d_vocab", None)
    largest = int(batch.tokens.max())
    if size is not None and largest >= size:
        raise InputError(
            f"the {what} holds token id {largest}, and the model's vocabulary is {size}: it was tokenized for another "
            "model; tokenize the prompts for this one"
        )
    tokenizer = getattr(model, "tokenizer", None)
    if batch.vocabulary and tokenizer is not None and vocabulary_digest(tokenizer) != batch.vocabulary:
        raise InputError(
            f"the {what} was tokenized with another vocabulary than the model's, where the same ids are other words; "
            "tokenize the prompts for this model"
        )


def check_not_against_itself(batch: PromptBatch) -> None:
    """Raises InputError where a row's target is also among what it is compared with."""
    if batch.targets is None or batch.against is None:
        return
    same = ((batch.against == batch.targets[:, None]) & (batch.against >= 0)).any(-1)
    if bool(same.any()):
        row = int(same.nonzero()[0])
        raise InputError(
            f"row {row} has token {int(batch.targets[row])} both as its target and against it, so there is nothing to "
            "compare; choose tokens that differ"
        )


def without_demonstrations(tokenizer: Any, rows: list[list[int]], texts: Sequence[str] | None) -> PromptBatch:
    """Rows of ids as a batch without labels; without a tokenizer, ids are their own names."""
    n, longest = len(rows), max(map(len, rows))
    strings = names = [[str(token) for token in row] for row in rows]
    if tokenizer is not None:
        strings, names = decoded(tokenizer, rows), named(tokenizer, rows)
        texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False) if texts is None else texts
    none = torch.full((n, 0), -1)
    return PromptBatch(
        tokens=torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows]),
        attention_mask=torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        last=torch.tensor([len(row) - 1 for row in rows]),
        label_positions=none,
        label_index=none,
        label_mask=none.bool(),
        label_tokens=none.new_empty(0),
        answer=torch.full((n,), -1),
        text_ranges=none.new_empty((n, 0, 2)),
        query_range=torch.tensor([[0, len(row)] for row in rows]),
        labels=(),
        prompts=(),
        template=_DEFAULT_TEMPLATE,
        token_strings=strings,
        token_names=names,
        texts=tuple(" ".join(row) for row in names) if texts is None else tuple(texts),
        vocabulary="" if tokenizer is None else vocabulary_digest(tokenizer),
        targets=torch.full((n,), -1),
    )
