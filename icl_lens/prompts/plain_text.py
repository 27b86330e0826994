"""Any text as a prompt: no demonstrations, any token as the target, read at any position.

1. The text is tokenized as the model's own tokenizer does it.
2. A target (or what it is compared with) given as a string is tokenized in its place, behind the text up to its
   position: the ids must begin with those of the text, and the next one is the token that is scored.
3. Every position asked for becomes a row that ends there (`PromptBatch.at`).
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch, check_against_differs, text_batch
from icl_lens.prompts.prompt import Prompt, Rendered, check_unicode
from icl_lens.prompts.token_alignment import require_fast_tokenizer, special_prefix, tokenize_texts
from icl_lens.prompts.token_ids import TokenPositions, check_context_length, check_ids, name_tokens, padded_ids

TokenSpec = str | int
"""A token by its text, in its place ("␣Mary" with its blank), or by its id."""


def tokenize_text(
    model: Any,
    texts: str | Sequence[str],
    *,
    targets: TokenSpec | Sequence[TokenSpec | Sequence[TokenSpec]] | Tensor | None = None,
    against: TokenSpec | Sequence[TokenSpec | Sequence[TokenSpec]] | Tensor | None = None,
    positions: TokenPositions | None = None,
    prepend_bos: bool | None = None,
) -> PromptBatch:
    """Texts as prompts without demonstrations, on the model's device: any target token, any position.

    `targets` are strings, with the white space that separates them from the text (" Mary"), or token ids: one for all,
    or one a text (also as a tensor [text]); in place of one, a list with one for each of a text's positions. A string
    that is several tokens is scored by its first, with a warning that names them. Left out, each position is scored by
    the token that follows in the text; the last has no target then. `against` names what to compare targets with: one
    for all, or for each text one or a list of several. For a single text given as a string, lists are its own.

    `positions`: left out, the last; one or several for every text, a list for each, or "all" (`PromptBatch.at`); they
    count from the row's start with what stands in front. A position is a row: `capture` runs the rows of a text as one.
    `prepend_bos` is that of `tokenize`.

    Raises InputError for no text or an empty one, a text longer than the context, words or ids the model does not have,
    a target that does not begin where the text ends, a target that is compared with itself, and a slow tokenizer.

    Example:
        >>> free = il.tokenize_text(model, "love : bar one : foo two :", targets=" foo", against=" bar")
        >>> il.head_log_prob_increase(il.capture(model, free), free.answer_tokens).shape
        torch.Size([1, 8, 6])
    """
    single = isinstance(texts, str)
    several = tuple(texts) if isinstance(texts, Iterable) and not single else (texts,)
    if not several:
        raise InputError("there is no text to tokenize; give at least one")
    for number, text in enumerate(several):
        if isinstance(text, Prompt):
            raise InputError("tokenize_text reads plain texts; for prompts with demonstrations use il.tokenize")
        check_unicode(text)
        if not text.strip():
            raise InputError(f"text {number} is empty; give it words")
    tokenizer = require_fast_tokenizer(model)
    read = tokenize_texts(tokenizer, [Rendered(text, (), (), (0, len(text))) for text in several])
    front = special_prefix(tokenizer, read[0], prepend_bos)
    rows = [[*front, *text.ids] for text in read]
    check_context_length(model, rows)
    whole = text_batch(tokenizer, rows, several)
    batch = whole.at("last" if positions is None else positions)
    assert batch.prompt_index is not None
    of, places = batch.prompt_index.tolist(), batch.last.tolist()

    spell = _TokenFinder(model, tokenizer, [(text.rendered.text, text.ids, text.ends) for text in read], len(front))
    if targets is not None:
        by_text = _by_text(targets, len(several), single, "targets")
        ids, seen = [], [0] * len(several)
        for number, place in zip(of, places, strict=True):
            given, count = by_text[number], of.count(number)
            if not isinstance(given, (str, int)):
                if len(given) != count:
                    raise InputError(
                        f"{len(given)} targets do not fit the {count} positions of text {number}; give one for each"
                    )
                given = given[seen[number]]
            seen[number] += 1
            ids.append(spell(given, number, place, "target"))
        batch = replace(batch, targets=torch.tensor(ids))
    if against is not None:
        by_text = _by_text(against, len(several), single, "against")
        others = []
        for number, place in zip(of, places, strict=True):
            given = by_text[number]
            listed = [given] if isinstance(given, (str, int)) else given
            if not listed:
                raise InputError(f"against names nothing to compare text {number} with; give at least one token")
            others.append([spell(one, number, place, "comparison") for one in listed])
        batch = replace(batch, against=padded_ids(others))
    spell.warn()
    check_against_differs(batch)
    if positions is None:
        batch = replace(batch, prompt_index=None)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _by_text(given: Any, n: int, single: bool, what: str) -> list[Any]:
    """What is given for each text: one for all, or one each; of a single text, a list is its own."""
    if isinstance(given, Tensor):
        given = given.tolist()
    if isinstance(given, (str, int)):
        return [given] * n
    given = list(given)
    if single and not any(isinstance(one, (list, tuple)) for one in given):
        return [given]
    if len(given) != n:
        raise InputError(f"{what}={given!r} do not fit {n} texts; give one for all, or one for each")
    return given


@dataclass(frozen=True)
class _TokenFinder:
    """Finds the token by which a string is scored in its place."""

    model: Any
    tokenizer: Any
    texts: list[tuple[str, list[int], list[int]]]
    """Each text, its token ids, and where in the text each ends."""
    shift: int
    """Tokens in front of every text."""

    known: dict[tuple[str, int, int], int] = field(default_factory=dict)
    long: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, given: TokenSpec, number: int, place: int, what: str) -> int:
        """The id; raises InputError for a string that does not begin where the text ends, or is not known."""
        if isinstance(given, int):
            check_ids(self.model, [given])
            return given
        if not isinstance(given, str):
            raise InputError(f"{given!r} is no {what}; give a string or a token id")
        key = (given, number, place)
        if key not in self.known:
            self.known[key] = self._found(given, number, place - self.shift, what)
        return self.known[key]

    def _found(self, given: str, number: int, place: int, what: str) -> int:
        text, ids, ends = self.texts[number]
        before = text if place + 1 >= len(ids) else text[: ends[place] if place >= 0 else 0]
        shown = repr(before[-30:])
        if not given:
            raise InputError(f"the {what} is an empty string; give the token that may follow {shown}")
        wanted = ids[: place + 1] if place >= 0 else []
        found = self.tokenizer(before + given, add_special_tokens=False, verbose=False)["input_ids"]
        if found[: len(wanted)] != wanted or len(found) == len(wanted):
            raise InputError(
                f"the {what} {given!r} does not follow {shown} as a token of its own; begin it with the white space "
                f"that separates it from the text, end the text without white space, or give a token id"
            )
        own = found[len(wanted) :]
        if self.tokenizer.unk_token_id in own:
            raise InputError(
                f"the model's tokenizer does not know the {what} {given!r}; use words of its vocabulary, or a token id"
            )
        if len(own) > 1:
            self.long.setdefault(given, own)
        return own[0]

    def warn(self) -> None:
        """Names strings of several tokens, of which only the first is scored."""
        for given, ids in self.long.items():
            names = name_tokens(self.tokenizer, [ids])[0]
            bare = " (white space only)" if not self.tokenizer.decode(ids[:1]).strip() else ""
            warnings.warn(
                f"{given!r} is {len(ids)} tokens, {' + '.join(map(repr, names))}: the first, {names[0]!r}{bare}, is "
                "scored",
                stacklevel=3,
            )
