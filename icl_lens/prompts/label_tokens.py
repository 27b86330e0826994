"""The tokens of labels: where labels that begin alike part, and the columns that stand for them in
a batch.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Span
from icl_lens.prompts.token_alignment import TokenizedText
from icl_lens.prompts.token_ids import decode_tokens

TokenIds = tuple[int, ...]


class LabelTokens:
    """The tokens of each label, which must be the same in every context."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.seen: dict[str, tuple[list[int], str]] = {}
        self.ended: set[str] = set()
        """Labels that end with a token of the template."""

    def add(self, label: str, ids: list[int], where: str) -> None:
        """Record a label's tokens in the context that `where` names; raise InputError if they
        differ from others.
        """
        known, first_place = self.seen.setdefault(label, (ids, where))
        if ids != known:
            raise InputError(
                f"the label {label!r} is {self._quoted_tokens(known)} {first_place} but "
                f"{self._quoted_tokens(ids)} {where}; choose a template with the same text before "
                "every label"
            )

    def end_with(self, token: int | None, label: str) -> None:
        """Let a label end with the token that follows it, because another label continues with
        other tokens.

        Raise InputError if there is none, since the token also covers a text.
        """
        if token is None:
            raise InputError(
                f"the tokens of the label {label!r} begin those of another label, and the template "
                "has no token of its own after it; choose labels that differ, or another template, "
                "such as separator='\\n'"
            )
        known, where = self.seen[label]
        self.seen[label] = [*known, token], where
        self.ended.add(label)

    def decision_starts(self, labels: Sequence[str], answer: str | None) -> list[TokenIds]:
        """Return the starts after which these labels go on with different tokens, the shortest
        first.

        With an answer, only those that the answer begins with. One label has the empty start.
        """
        starts: list[TokenIds] = []
        groups: list[tuple[TokenIds, list[str]]] = [((), list(labels))]
        for start, members in groups:  # grows while it is read
            branches: dict[int, list[str]] = {}
            for label in members:
                branches.setdefault(self.seen[label][0][len(start)], []).append(label)
            if len(branches) > 1 or len(members) == 1:
                starts.append(start)
            for token, branch in branches.items():
                if len(branch) > 1 and (answer is None or answer in branch):
                    groups.append(((*start, token), branch))
        return starts

    def n_shared_and_next_token(self, label: str, start: TokenIds) -> tuple[int, int]:
        """Return the number of tokens that a label shares with a start, and the label's token after
        them.
        """
        ids = self.seen[label][0]
        n_shared = len(start)
        for place, (label_token, start_token) in enumerate(zip(ids, start, strict=False)):
            if label_token != start_token:
                n_shared = place
                break
        return n_shared, ids[n_shared]

    def n_shared_and_has_end(self, label: str, start: TokenIds) -> tuple[int, bool]:
        """Return the number of tokens that a label shares with a start, and whether its end is then
        scored.
        """
        shared, _ = self.n_shared_and_next_token(label, start)
        return shared, label in self.ended and shared == len(self.seen[label][0]) - 1

    def unfinished_labels(self, labels: Sequence[str]) -> list[str]:
        """Return the labels whose tokens are the first tokens of another; raise InputError for
        labels with the same tokens.
        """
        label_of: dict[TokenIds, str] = {}
        for label in labels:
            ids = self.seen[label][0]
            first_label = label_of.setdefault(tuple(ids), label)
            if first_label != label:
                raise InputError(
                    f"labels {first_label!r} and {label!r} have the same tokens "
                    f"{self._quoted_tokens(ids)}; choose labels that differ in more than white "
                    "space"
                )
        starts = set()
        for ids in label_of:
            for n_first in range(1, len(ids)):
                starts.add(ids[:n_first])
        return [label for ids, label in label_of.items() if ids in starts]

    def _quoted_tokens(self, ids: list[int]) -> str:
        return " + ".join(repr(string) for string in decode_tokens(self.tokenizer, [ids])[0])


class LabelPlace(NamedTuple):
    """Where a demonstration's label is, in tokens of its text."""

    scored: int
    tokens: tuple[int, int]
    """The label's first token and the one after its last. White space before the label is its first
    if the label is scored there, and the token that ends the label is its last if that is scored.
    """

    @classmethod
    def from_text(
        cls, text: TokenizedText, span: Span, gap: str, n_shared: int, ends_with_next_token: bool
    ) -> "LabelPlace":
        """Return the place of the label at `span`, which is scored after `n_shared` of its tokens.

        It begins like another label up to there; if it is whole then, the next token is scored.
        """
        start, stop = text.label_range(span, gap)
        scored = start + n_shared
        return cls(scored, (min(scored, text.range_of(span)[0]), stop + ends_with_next_token))


class LabelRow(NamedTuple):
    """The columns of a row: one for each label that its prompt has, and those that it chooses
    between.
    """

    column_of: dict[str, int]
    choices: set[int]


ColumnKey = tuple[tuple[str, ...], int]
"""The labels that a column stands for, and the number of tokens that they share."""


class LabelColumns:
    """The columns of a batch, each with the token that scores it.

    A column stands for a label, or for several labels whose tokens are the same up to a decision.
    `choices` are the sets of labels that prompts choose from, and `alone` labels that are scored by
    their first token.
    """

    def __init__(
        self,
        labels: Sequence[str],
        tokens: LabelTokens,
        choices: Iterable[tuple[str, ...]],
        alone: Iterable[str],
    ) -> None:
        self._tokens = tokens
        self._order = {label: index for index, label in enumerate(labels)}
        keys: dict[ColumnKey, None] = {((label,), 0): None for label in alone}
        for label_set in choices:
            for start in tokens.decision_starts(label_set, None):
                keys |= dict.fromkeys(self._keys(label_set, start).values())
        ordered = sorted(keys, key=self._place)
        self._index = {key: index for index, key in enumerate(ordered)}
        self.names: tuple[str, ...] = self._names(ordered)
        self.groups = tuple(members for members, _ in ordered)
        self.tokens = [tokens.seen[members[0]][0][n_shared] for members, n_shared in ordered]

    def __len__(self) -> int:
        return len(self.names)

    def of_row(
        self, labels: Sequence[str], choices: Sequence[str], start: TokenIds | None
    ) -> LabelRow:
        """Return the columns of labels after a start; None if each is scored by its first token.

        In the latter case, the first of `choices` with the same token is the choice, so that all
        choices differ.
        """
        if start is None:
            column_of = {label: self._index[(label,), 0] for label in labels}
            choice_of_token: dict[int, int] = {}
            for label in choices:
                column = column_of[label]
                choice_of_token.setdefault(self.tokens[column], column)
            return LabelRow(column_of, set(choice_of_token.values()))
        keys = self._keys(labels, start)
        column_of = {label: self._index[key] for label, key in keys.items()}
        decided = [label for label in choices if keys[label][1] == len(start)]
        return LabelRow(column_of, {column_of[label] for label in decided})

    def _place(self, key: ColumnKey) -> tuple[int, int]:
        """Return what columns are sorted by: the place of their first label, and the token."""
        members, n_shared = key
        return self._order[members[0]], n_shared

    def _keys(self, labels: Sequence[str], start: TokenIds) -> dict[str, ColumnKey]:
        """Return the column of each label: the labels that share its tokens up to the one after
        which it parts from `start`, and the number of tokens that it shares with `start`.
        """
        ordered = sorted(labels, key=self._order.__getitem__)
        members_of: dict[tuple[int, int], list[str]] = {}
        for label in ordered:
            members_of.setdefault(self._tokens.n_shared_and_next_token(label, start), []).append(
                label
            )
        keys = {}
        for (n_shared, _), members in members_of.items():
            keys |= dict.fromkeys(members, (tuple(members), n_shared))
        return keys

    @staticmethod
    def _names(keys: Sequence[ColumnKey]) -> tuple[str, ...]:
        """Return unique names: a label, or what several begin with, such as "very…"."""
        names: list[str] = []
        for members, n_shared in keys:
            name = members[0]
            if len(members) > 1:
                name = f"{_common_beginning(members).strip()}…"
            if name in names:
                name = f"{name} (token {n_shared + 1})"
            names.append(name)
        return tuple(names)


def _common_beginning(texts: Sequence[str]) -> str:
    """Return the characters with which all texts begin."""
    columns = takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)
