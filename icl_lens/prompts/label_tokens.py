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

Ids = tuple[int, ...]


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
                f"the label {label!r} is {self._shown(known)} {first_place} but {self._shown(ids)} "
                f"{where}; choose a template with the same text before every label"
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

    def decisions(self, labels: Sequence[str], answer: str | None) -> list[Ids]:
        """Return the starts after which these labels go on with different tokens, the shortest
        first.

        With an answer, only those that the answer begins with. One label has the empty start.
        """
        found: list[Ids] = []
        groups: list[tuple[Ids, list[str]]] = [((), list(labels))]
        for start, members in groups:
            branches: dict[int, list[str]] = {}
            for label in members:
                branches.setdefault(self.seen[label][0][len(start)], []).append(label)
            if len(branches) > 1 or len(members) == 1:
                found.append(start)
            groups += [
                ((*start, token), own)
                for token, own in branches.items()
                if len(own) > 1 and (answer is None or answer in own)
            ]
        return found

    def parting(self, label: str, start: Ids) -> tuple[int, int]:
        """Return the number of tokens that a label shares with a start, and the label's token after
        them.
        """
        ids = self.seen[label][0]
        shared = next(
            (i for i, (own, other) in enumerate(zip(ids, start, strict=False)) if own != other),
            len(start),
        )
        return shared, ids[shared]

    def parted(self, label: str, start: Ids) -> tuple[int, bool]:
        """Return the number of tokens that a label shares with a start, and whether its end is then
        scored.
        """
        shared, _ = self.parting(label, start)
        return shared, label in self.ended and shared == len(self.seen[label][0]) - 1

    def check_different(self, labels: Sequence[str]) -> list[str]:
        """Return the labels whose tokens begin those of another; raise InputError for labels with
        the same tokens.
        """
        first: dict[Ids, str] = {}
        for label in labels:
            if (other := first.setdefault(tuple(self.seen[label][0]), label)) != label:
                raise InputError(
                    f"labels {other!r} and {label!r} have the same tokens "
                    f"{self._shown(self.seen[label][0])}; choose labels that differ in more than "
                    "white space"
                )
        starts = {ids[:n] for ids in first for n in range(1, len(ids))}
        return [label for ids, label in first.items() if ids in starts]

    def _shown(self, ids: list[int]) -> str:
        return " + ".join(repr(string) for string in decode_tokens(self.tokenizer, [ids])[0])


class LabelPlace(NamedTuple):
    """Where a demonstration's label is, in tokens of its text."""

    scored: int
    range: tuple[int, int]
    """White space before the label belongs to it only if it is scored, as does what follows it."""

    @classmethod
    def of(
        cls, text: TokenizedText, span: Span, gap: str, shared: int, is_ended: bool
    ) -> "LabelPlace":
        """Return the place of a label after `shared` tokens; if it `is_ended`, the token after it
        is scored.
        """
        start, stop = text.label_range(span, gap)
        return cls(start + shared, (min(start + shared, text.range_of(span)[0]), stop + is_ended))


class LabelRow(NamedTuple):
    """The columns of a row: one for each label that its prompt has, and those that it chooses
    between.
    """

    of: dict[str, int]
    choices: set[int]


class LabelColumns:
    """The columns of a batch: each is a label or several labels that still agree, and the token
    that they go on with.

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
        self._order = order = {label: index for index, label in enumerate(labels)}
        keys = {((label,), 0): None for label in alone}
        for own in choices:
            for start in tokens.decisions(own, None):
                keys |= dict.fromkeys(self._keys(own, start).values())
        ordered = sorted(keys, key=lambda key: (order[key[0][0]], key[1]))
        self._index = {key: index for index, key in enumerate(ordered)}
        self.names: tuple[str, ...] = self._names(ordered)
        self.groups = tuple(members for members, _ in ordered)
        self.tokens = [tokens.seen[members[0]][0][shared] for members, shared in ordered]

    def __len__(self) -> int:
        return len(self.names)

    def of_row(self, labels: Sequence[str], choices: Sequence[str], start: Ids | None) -> LabelRow:
        """Return the columns of labels after a start; None if each is scored by its first token.

        In the latter case, the first of `choices` with the same token is the choice, so that all
        choices differ.
        """
        if start is None:
            of = {label: self._index[(label,), 0] for label in labels}
            first = {self.tokens[of[label]]: of[label] for label in reversed(choices)}
            return LabelRow(of, {*first.values()})
        keys = self._keys(labels, start)
        of = {label: self._index[key] for label, key in keys.items()}
        return LabelRow(of, {of[label] for label in choices if keys[label][1] == len(start)})

    def _keys(self, labels: Sequence[str], start: Ids) -> dict[str, tuple[tuple[str, ...], int]]:
        """Return for each label those that agree with it up to the token after which it parts from
        `start`.
        """
        ordered = sorted(labels, key=self._order.__getitem__)
        parted = {label: self._tokens.parting(label, start) for label in ordered}
        return {
            label: (tuple(other for other, theirs in parted.items() if theirs == own), own[0])
            for label, own in parted.items()
        }

    @staticmethod
    def _names(keys: Sequence[tuple[tuple[str, ...], int]]) -> tuple[str, ...]:
        """Return unique names: a label, or what several begin with, such as "very…"."""
        names: list[str] = []
        for members, shared in keys:
            columns = takewhile(lambda chars: len({*chars}) == 1, zip(*members, strict=False))
            alike = "".join(chars[0] for chars in columns).strip()
            name = members[0] if len(members) == 1 else f"{alike}…"
            names.append(name if name not in names else f"{name} (token {shared + 1})")
        return tuple(names)
