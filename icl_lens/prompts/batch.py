"""Tokenized prompts (`PromptBatch`) and the positions of their labels and texts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from icl_lens.errors import InputError, check_at_least, quoted_list, short_repr
from icl_lens.foundation.digest import json_digest
from icl_lens.prompts.decisions import Decisions
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.token_ids import (
    PAD,
    TokenPositions,
    check_context_length,
    check_ids,
    ids_per_row,
    padded_ids,
    resolve_positions,
)
from icl_lens.prompts.token_rows import fields_without_labels, rows_of_ids

Role = Literal["text", "true label", "false label", "query", "last", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokenized prompts, padded on the right, with the positions of their labels and texts.

    Positions count tokens from the start of the row, including a beginning-of-sequence token. -1
    marks a missing demonstration or answer. All tensors are on one device. `batch[2:5]` and
    `batch[[0, 3]]` are smaller batches with the same labels, cropped to their longest row.

    `tokenize` creates batches of in-context prompts and of plain text (`Text`), `from_tokens` of
    token ids. Plain text and token ids have no labels, their `prompts` is empty, and `targets` has
    the token that each row is scored by. `at` returns rows that end at other positions of the same
    prompts.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> [batch.token_strings[0][position] for position in batch.label_positions[0]]
        ['bar', 'bar', 'foo', 'foo']
        >>> batch.tokens.shape, batch.last
        (torch.Size([1, 19]), tensor([18]))
    """

    # Rows of tokens
    tokens: Int[Tensor, "batch pos"]
    """Token ids, padded on the right where `attention_mask` is 0; `left_padded` has them as
    `model.generate` needs.
    """
    attention_mask: Int[Tensor, "batch pos"]
    """1 on tokens, 0 on padding."""
    last: Int[Tensor, " batch"]
    """Position of each row's last token, where the label is predicted."""
    token_strings: list[list[str]]
    """Each row's tokens without padding, decoded one by one; for display only, since joining them
    loses white space.
    """
    token_names: list[list[str]]
    """`token_strings` with visible white space: "␣to", line breaks as "⏎"."""
    texts: tuple[str, ...]
    """The full text of each row."""

    # Labels, and the token that scores each
    labels: tuple[str, ...]
    """The labels of all prompts, without duplicates; the prompts may have different ones
    (`label_mask`).
    """
    label_tokens: Int[Tensor, " label"]
    """The token each label is scored by: its first after the query, or the first that tells it from
    the others.
    """
    label_mask: Bool[Tensor, "batch label"]
    """Which labels each row chooses between; they are scored by different tokens."""
    answer: Int[Tensor, " batch"]
    """The correct label, as an index into `labels`."""
    decisions: Decisions
    """The whole labels that `labels` stand for, and the decision between them that each row ends
    at. Only labels that begin alike need it.
    """

    # Where demonstrations and the query are
    label_index: Int[Tensor, "batch demo"]
    """Each demonstration's label, as an index into `labels`."""
    label_positions: Int[Tensor, "batch demo"]
    """Position of the token that each demonstration's label is scored by: the first that tells the
    labels apart; -1 if missing.
    """
    label_ranges: Int[Tensor, "batch demo 2"]
    """The token range of each demonstration's label: start and end, end exclusive.

    A token of white space before the label belongs to it only if the label is scored by this token.
    """
    text_ranges: Int[Tensor, "batch demo 2"]
    """The token range of each demonstration's text: start and end, end exclusive."""
    demonstration_ranges: Int[Tensor, "batch demo 2"]
    """The token range of each demonstration, with the template's words, up to the next one or the
    query.
    """
    query_range: Int[Tensor, "batch 2"]
    """The token range of the query's text: start and end, end exclusive."""

    # What was tokenized, and how
    prompts: tuple[Prompt, ...]
    """One per row; empty for plain text and token ids."""
    template: Template
    """What the prompts were written with."""
    vocabulary: str = ""
    """A digest of the tokenizer's vocabulary, to reject models with another one; empty if
    unknown.
    """
    prepend_bos: bool | None = None
    """What `tokenize` was told about a beginning-of-sequence token; None for the tokenizer's
    default.
    """

    # Rows that are scored by other tokens than labels, and rows of one prompt
    targets: Int[Tensor, " batch"] | None = None
    """The token each row is scored by, if it is not the answer's label token; -1 for none."""
    against: Int[Tensor, "batch other"] | None = None
    """Tokens to compare each row's target with, padded with -1; None for no comparison."""
    prompt_index: Int[Tensor, " batch"] | None = None
    """The index of each row's prompt, if several rows are prefixes of one prompt (see `at`)."""

    @property
    def prediction_positions(self) -> Int[Tensor, "batch demo"]:
        """Where each demonstration's label is predicted: the position just before its scored token;
        -1 if missing.
        """
        return (self.label_positions - 1).clamp(min=-1)

    @property
    def all_label_positions(self) -> Int[Tensor, "batch demo token"]:
        """Positions of all tokens of each demonstration's label, -1 where it has fewer.

        Attention to a label is summed over them; its keys and values are read at `label_positions`.
        """
        start, end = self.label_ranges[..., :1], self.label_ranges[..., 1:]
        width = int((end - start).max()) if start.numel() else 0
        positions = start + torch.arange(max(1, width), device=start.device)
        return positions.masked_fill((positions >= end) | (start < 0), -1)

    @property
    def token_roles(self) -> list[list[Role]]:
        """The role of every token of every prompt.

        - "text": a demonstration's text.
        - "true label", "false label": all tokens of a label that equals the answer, or of one that
          does not. Without an answer, all labels are "false label".
        - "query": the query's text. In plain text, all tokens but the last have this role.
        - "last": the prompt's last token, whatever it is.
        - "other": everything else, such as separators, label tokens appended to the query
          (`Decisions.n_appended`), and a prompt's beginning-of-sequence token.

        Example:
            >>> batch.token_roles[0][-4:]
            ['true label', 'query', 'query', 'last']
        """
        return [[ROLES[role] for role in row if role >= 0] for row in role_indices(self).tolist()]

    @property
    def answer_tokens(self) -> Int[Tensor, " batch"]:
        """The token each row is scored by: its target or its answer's label token; -1 if it has
        neither.
        """
        if self.targets is not None:
            return self.targets
        return torch.where(self.answer < 0, -1, self.label_tokens[self.answer])

    @property
    def other_label_tokens(self) -> Int[Tensor, "batch other"]:
        """The tokens of each prompt's labels except its answer, padded with -1; all -1 without an
        answer.

        As `against`, they give the components that favor the answer over the other labels.
        """
        is_other = torch.arange(len(self.labels), device=self.answer.device) != self.answer[:, None]
        return tokens_of_labels(self, is_other & (self.answer >= 0)[:, None])

    @property
    def queries(self) -> tuple[str, ...]:
        """What each row asks: rows with the same query are not independent, so intervals resample
        queries.

        Plain text is its own query; rows of one prompt (see `at`) have one query.
        """
        if self.prompt_index is not None:
            return tuple(map(str, self.prompt_index.tolist()))
        texts = self.texts or tuple(map("".join, self.token_strings))
        if not self.prompts:
            return texts
        return tuple(prompt.query or text for prompt, text in zip(self.prompts, texts, strict=True))

    @property
    def has_demonstrations(self) -> bool:
        """Whether any prompt shows labels; without, a batch may still have `labels` to choose
        from.
        """
        return self.label_positions.shape[1] > 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        contents = "no demonstrations"
        if self.labels:
            n_demonstrations = (self.label_index >= 0).sum(1)
            fewest, most = int(n_demonstrations.min()), int(n_demonstrations.max())
            number = f"{most}" if fewest == most else f"{fewest} to {most}"
            contents = f"{number} demonstration{'s' * (most != 1)}, "
            contents += f"labels {quoted_list(self.labels)}"
        beginning = ""
        first_names = {names[0] for names in self.token_names}
        if len(first_names) == 1:
            beginning = f", all beginning with {first_names.pop()!r}"
        return f"PromptBatch({size_in_words(self)}{beginning}, {contents})"

    @classmethod
    def from_tokens(
        cls,
        tokens: Tensor | Sequence[Sequence[int]],
        *,
        model: Any = None,
        attention_mask: Tensor | Sequence[Sequence[int]] | None = None,
        targets: int | Sequence[int] | Tensor | None = None,
        against: int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
        positions: TokenPositions | None = None,
    ) -> "PromptBatch":
        """Create a batch without demonstrations from token ids [batch pos] or from rows of
        different lengths.

        `attention_mask` [batch pos] is 1 on tokens and 0 on padding, as your tokenizer returns it;
        padding on either side is removed. No beginning-of-sequence token is added. With `model`,
        ids are checked against its vocabulary and context length, tokens get names, and the batch
        is on the model's device.

        `targets` is one id for all rows or one per row; by default, each position is scored by the
        next token, and the last one has no target. `against` contains the ids to compare the
        targets with: one for all rows, one per row, or a list per row. `positions` selects
        positions other than the last; see `at`.

        Raise InputError for empty rows, ids outside the model's vocabulary, rows longer than its
        context, and targets, positions or a mask that do not match the rows. With `model` but no
        mask, also raise it for rows that begin or end with the model's padding token.

        Example:
            >>> ids = [[5, 8, 13, 5, 8, 13]]
            >>> random = il.PromptBatch.from_tokens(ids, model=model, positions="all")
            >>> random.answer_tokens
            tensor([ 8, 13,  5,  8, 13, -1])
        """
        rows = rows_of_ids(tokens, attention_mask, model)
        device = tokens.device if isinstance(tokens, Tensor) else None
        if model is not None:
            check_context_length(model, rows)
            device = getattr(model.cfg, "device", None)
        batch = cls(**fields_without_labels(getattr(model, "tokenizer", None), rows, texts=None))
        if device is not None:
            batch = batch.to(device)
        target_ids = ids_per_row(targets, len(rows), "targets")
        against_ids = ids_per_row(against, len(rows), "against", lists=True)
        for ids in (target_ids or []) + (against_ids or []):
            check_ids(model, ids)
        selected = batch.at("last" if positions is None else positions)
        prompt_index = selected.prompt_index
        assert prompt_index is not None
        if target_ids is not None:
            target_column = torch.tensor(target_ids, device=device)[:, 0]
            selected = replace(selected, targets=target_column[prompt_index])
        if against_ids is not None:
            padded = padded_ids(against_ids).to(selected.tokens.device)
            selected = replace(selected, against=padded[prompt_index])
        check_against_differs(selected)
        return selected if positions is not None else replace(selected, prompt_index=None)

    def at(self, positions: TokenPositions) -> "PromptBatch":
        """Return one row per prompt and position, ending at that position.

        `positions` is one position for all rows, several for all rows, a list per row, or "all";
        negative positions count from the end of the row. A row that ends before its prompt does is
        scored by the next token (`answer_tokens`) and has no answer; labels after its end are
        dropped. `prompt_index` contains the index of each row's prompt; `capture` runs all rows of
        a prompt in one pass. Raise InputError for a position outside a row.

        Example:
            >>> first = int(batch.label_positions[0, 0])
            >>> early = batch.at([first, int(batch.last)])
            >>> early.token_strings[0][-2:]
            [':', 'bar']
            >>> early.answer_tokens[0] == batch.tokens[0, first + 1]
            tensor(True)
        """
        selected = resolve_positions(positions, (self.last + 1).tolist())
        row_ends = [(row, end) for row, ends in enumerate(selected) for end in ends]
        rows, end = torch.tensor(row_ends, device=self.tokens.device).unbind(-1)
        full = self[rows]
        is_early = end < full.last
        is_kept = torch.arange(int(end.max()) + 1, device=end.device) <= end[:, None]
        next_token = full.tokens.gather(1, (end + 1).clamp(max=full.tokens.shape[1] - 1)[:, None])[
            :, 0
        ]
        no_label = full.label_ranges[..., 1] > end[:, None] + 1
        no_text = (full.text_ranges[..., 1] > end[:, None] + 1)[..., None]
        no_demonstration = (full.demonstration_ranges[..., 1] > end[:, None] + 1)[..., None]
        has_query = (full.query_range[:, 1] <= end + 1)[:, None]
        against = None if full.against is None else full.against.masked_fill(is_early[:, None], -1)
        return replace(
            full,
            tokens=torch.where(is_kept, full.tokens[:, : is_kept.shape[1]], PAD),
            attention_mask=is_kept.to(full.attention_mask.dtype),
            last=end,
            label_positions=full.label_positions.masked_fill(no_label, -1),
            label_ranges=full.label_ranges.masked_fill(no_label[..., None], -1),
            label_index=full.label_index.masked_fill(no_label, -1),
            answer=full.answer.masked_fill(is_early, -1),
            text_ranges=full.text_ranges.masked_fill(no_text, -1),
            demonstration_ranges=full.demonstration_ranges.masked_fill(no_demonstration, -1),
            query_range=torch.where(has_query, full.query_range, -1),
            token_strings=[
                row[: last + 1] for row, (_, last) in zip(full.token_strings, row_ends, strict=True)
            ],
            token_names=[
                row[: last + 1] for row, (_, last) in zip(full.token_names, row_ends, strict=True)
            ],
            targets=torch.where(is_early, next_token, full.answer_tokens),
            against=None if against is None or not bool((against >= 0).any()) else against,
            prompt_index=rows if self.prompt_index is None else full.prompt_index,
        )

    def __getitem__(self, index: SupportsIndex | slice | Sequence[int] | Tensor) -> "PromptBatch":
        """Return the selected rows as a batch; an integer selects a batch of one row.

        Raise IndexError for a row out of range, and InputError if no row is selected.
        """
        rows = selected_rows(len(self), index)
        tensors = {
            name: value[rows] for name, value in self._tensors().items() if name != "label_tokens"
        }
        width = int(tensors["last"].max()) + 1
        tensors |= {name: tensors[name][:, :width] for name in ("tokens", "attention_mask")}
        return replace(
            self,
            **tensors,
            decisions=self.decisions.select(rows),
            prompts=tuple(self.prompts[row] for row in rows) if self.prompts else (),
            token_strings=[self.token_strings[row] for row in rows],
            token_names=[self.token_names[row] for row in rows],
            texts=tuple(self.texts[row] for row in rows) if self.texts else (),
        )

    def left_padded(self) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Return tokens and attention mask padded on the left, for generation, which continues the
        end of each row.

        `model.generate(batch.tokens)` would continue the padding of all but the longest prompts.

        Example:
            >>> prompts = ["love : bar one :", "eight : foo two : foo one :"]
            >>> tokens, mask = il.tokenize(model, prompts).left_padded()
            >>> settings = {"max_new_tokens": 2, "verbose": False}
            >>> generated = model.generate(tokens, attention_mask=mask, **settings)
            >>> generated.shape[1] - tokens.shape[1]
            2
        """
        width = self.tokens.shape[1]
        shift = width - 1 - self.last[:, None]
        source = torch.arange(width, device=self.last.device) - shift
        mask = (source >= 0).to(self.attention_mask.dtype)
        return torch.where(mask.bool(), self.tokens.gather(1, source.clamp(min=0)), PAD), mask

    def split(self, size: int) -> Iterator["PromptBatch"]:
        """Split the batch into pieces of `size` rows; the last may be smaller. Raise InputError if
        `size` < 1.
        """
        check_at_least(1, size=size)
        return (self[start : start + size] for start in range(0, len(self), size))

    def to(self, device: torch.device | str) -> "PromptBatch":
        """Return the batch with its tensors on `device`."""
        tensors = {name: value.to(device) for name, value in self._tensors().items()}
        return replace(self, decisions=self.decisions.to(device), **tensors)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def role_indices(batch: PromptBatch) -> Int[Tensor, "batch pos"]:
    """Return each token's role as an index into `ROLES`, -1 at padding."""
    n, width = batch.tokens.shape
    position = torch.arange(width, device=batch.tokens.device)
    roles = torch.full((n, width), ROLES.index("other"), device=position.device)
    for name, ranges in (("text", batch.text_ranges), ("query", batch.query_range[:, None])):
        start, end = ranges[..., :1], ranges[..., 1:]
        inside = (position >= start) & (position < end) & (start >= 0)
        roles[inside.any(1)] = ROLES.index(name)
    of_labels = batch.all_label_positions
    is_true = batch.label_index == batch.answer[:, None]
    for name, is_kind in (("true label", is_true), ("false label", ~is_true)):
        row, demonstration, token = ((of_labels >= 0) & is_kind[..., None]).nonzero().unbind(1)
        roles[row, of_labels[row, demonstration, token]] = ROLES.index(name)
    roles[torch.arange(n), batch.last] = ROLES.index("last")
    return roles.masked_fill(position > batch.last[:, None], -1)


def tokens_of_labels(
    batch: PromptBatch, is_selected: Bool[Tensor, "batch label"]
) -> Int[Tensor, "batch selected"]:
    """Return the tokens of selected labels of each prompt, padded with -1 on the right; at least
    one column.
    """
    is_selected = is_selected & batch.label_mask
    width = max(1, int(is_selected.sum(1).max()))
    # Selected labels come first.
    order = is_selected.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    return torch.where(is_selected.gather(1, order), batch.label_tokens[order], -1)


def selected_rows(n_rows: int, index: Any) -> list[int]:
    """Return the numbers of the rows that an index of a batch selects; raise the errors of
    `batch[index]`.
    """
    if isinstance(index, Tensor):
        index = index.cpu().numpy()
    elif isinstance(index, Iterable) and not isinstance(index, np.ndarray):
        index = list(index)
    rows = np.arange(n_rows)[index].reshape(-1).tolist()
    if not rows:
        raise InputError(
            f"index must select at least one of {n_rows} rows, got {short_repr(index)}"
        )
    return rows


def count_prompts(batch: PromptBatch) -> int:
    """Return the number of prompts, which is smaller than that of rows if these are several
    positions or decisions.
    """
    index = batch.decisions.prompt_index if batch.prompt_index is None else batch.prompt_index
    return len(batch) if index is None else len(index.unique())


def count_in_words(batch: PromptBatch) -> str:
    """Return the number of prompts and, if it is another, that of rows, such as "20 prompts at 35
    decisions".
    """
    n_prompts = count_prompts(batch)
    prompts = f"{n_prompts:,} prompt" + "s" * (n_prompts != 1)
    if n_prompts == len(batch):
        return prompts
    rows = "decisions" if batch.prompt_index is None else "positions"
    return f"{prompts} at {len(batch):,} {rows}"


def size_in_words(batch: PromptBatch) -> str:
    """Return the number of prompts and tokens, such as "100 prompts × 14 tokens"."""
    lengths = (batch.last + 1).tolist()
    shortest, longest = min(lengths), max(lengths)
    n_tokens = f"{shortest}–{longest}" if shortest < longest else f"{longest}"
    return f"{count_in_words(batch)} × {n_tokens} token" + "s" * (n_tokens != "1")


def with_answers(batch: PromptBatch, answer: Int[Tensor, " batch"]) -> PromptBatch:
    """Return the batch with these answers, as indices into its labels."""
    names = [batch.labels[label] for label in answer.tolist()]
    prompts = tuple(
        replace(prompt, answer=name) for prompt, name in zip(batch.prompts, names, strict=False)
    )
    return replace(batch, answer=answer, prompts=prompts)


def prompts_digest(batch: PromptBatch) -> str:
    """Return a 16-digit hexadecimal digest of the unpadded token ids and the scored tokens."""
    unpadded = []
    for ids, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True):
        unpadded.append(ids[: last + 1])
    return json_digest([unpadded, batch.answer_tokens.tolist()])


def check_against_differs(batch: PromptBatch) -> None:
    """Raise InputError if a row's target is also one of its `against` tokens."""
    if batch.targets is None or batch.against is None:
        return
    same = ((batch.against == batch.targets[:, None]) & (batch.against >= 0)).any(-1)
    if bool(same.any()):
        row = int(same.nonzero()[0])
        raise InputError(
            f"targets and against must differ, got token {int(batch.targets[row])} in both for row "
            f"{row}"
        )
