"""Rendered prompts as tokens: which of them each text and label has, by the character offsets of the whole prompt.

A label tokenized alone may come out as other tokens than the same label in its place (" foo" and "foo").
"""

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any

from transformers import AutoTokenizer

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Rendered, Span, quoted_list
from icl_lens.prompts.token_ids import decode_tokens


def require_fast_tokenizer(model: Any) -> Any:
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


@dataclass(frozen=True)
class TokenizedText:
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

    def continuation_tokens(self, asked: "TokenizedText", gap: str) -> list[int]:
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


def tokenize_texts(tokenizer: Any, rendered: list[Rendered]) -> list[TokenizedText]:
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
        TokenizedText(one, ids, [start for start, _ in offsets], [end for _, end in offsets])
        for one, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    unknown = tokenizer.unk_token_id
    words = dict.fromkeys(
        word_around(text.rendered.text, start, end)
        for text in texts
        for token, start, end in zip(text.ids, text.starts, text.ends, strict=True)
        if token == unknown  # never, where no token stands for unknown words
    )
    if words:
        shown = quoted_list(tuple(words)[:10]) + (f" and {len(words) - 10} more" if len(words) > 10 else "")
        raise InputError(
            f"the model's tokenizer does not know {shown}, so any answer would mean nothing; "
            "use words of its vocabulary, or another model"
        )
    return texts


def word_around(text: str, start: int, end: int) -> str:
    """The word that the characters from `start` to `end` are in; only they, where no white space is near."""
    piece = text[start:end].strip()
    if text[start:end] != piece:
        return piece
    before, after = re.findall(r"\S*\Z", text[:start])[0], re.findall(r"\A\S*", text[end:])[0]
    return f"{before}{piece}{after}" if len(before) + len(after) <= 30 else piece


class LabelTokens:
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
                    f"label {label!r} is {self._shown(ids)}, with which all of {quoted_list(labels)} begin, so no "
                    "token of its own tells it apart; choose labels none of which begins another"
                )
            other = scored.setdefault(ids[len(shared)], label)
            if other != label:
                which = f"{len(shared) + 1}th" if shared else "first"
                remedy = "choose labels that differ there"
                if common and not shared:
                    remedy += ', or pass shared_prefix="append"'
                elif shared_prefix == "append":
                    remedy += f", since not all of {quoted_list(labels)} begin with it"
                token = ids[len(shared)]
                raise InputError(
                    f"labels {other!r} and {label!r} share their {which} token {self._shown([token])} "
                    f"(id {token}); {remedy}"
                )
        return shared, list(scored)

    def _shown(self, ids: list[int]) -> str:
        return " + ".join(repr(string) for string in decode_tokens(self.tokenizer, [ids])[0])


def special_prefix(tokenizer: Any, text: TokenizedText, prepend_bos: bool | None) -> list[int]:
    """The tokens in front of every row; raises InputError for what `prepend_bos` cannot be."""
    if prepend_bos not in (None, True, False):
        raise InputError(f"prepend_bos={prepend_bos!r} must be True, False, or None for what the tokenizer itself does")
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
