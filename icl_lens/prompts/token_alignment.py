"""Align texts and labels with tokens, using the character offsets of the full prompt.

A label tokenized alone may have other tokens than the same label in context ("foo" and " foo").
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoTokenizer

from icl_lens.errors import InputError, not_a_model_error, quoted_list
from icl_lens.prompts.prompt import RenderedPrompt, Span


def require_fast_tokenizer(model: Any) -> Any:
    """Return the model's tokenizer; raise InputError if it is slow or missing."""
    if getattr(model, "cfg", None) is None:
        raise not_a_model_error(model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InputError(
            f"model must have a tokenizer, got {type(model).__name__}; load one with "
            "il.load_model(name)"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "the model's tokenizer must be a fast tokenizer with character offsets, got "
            f"{type(tokenizer).__name__}; load the fast tokenizer of the model (use_fast=True)"
        )
    return tokenizer


@dataclass(frozen=True)
class TokenizedText:
    """A rendered prompt and its tokens, without special tokens, with the character range of
    each.
    """

    rendered: RenderedPrompt
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def range_of(self, span: Span, shift: int = 0) -> tuple[int, int]:
        """Return the range of tokens that overlap `span`, shifted by `shift`; for an empty span, an
        empty range.

        Raise InputError if no token overlaps other spans.
        """
        if span[0] == span[1]:
            start = bisect_left(self.starts, span[0]) + shift
            return start, start
        # Offsets never decrease. A zero-width token (white space whose offsets were trimmed)
        # overlaps the span that contains it.
        start, stop = bisect_right(self.ends, span[0]), bisect_left(self.starts, span[1])
        if start >= stop:
            raise InputError(
                f"the tokenizer produces no token for {self._at(*span)!r} in "
                f"{self._around(span)!r}; use other words or remove the prompt"
            )
        return start + shift, stop + shift

    def segment_starts(self, shift: int = 0) -> list[int]:
        """Return the first tokens of the demonstrations and of the query, shifted by `shift`.

        A token that also covers what comes before belongs to the one that it begins, such as "
        like" after a space.
        """
        return [bisect_right(self.ends, start) + shift for start in self.rendered.starts]

    def label_range(self, span: Span, gap: str) -> tuple[int, int]:
        """Return the token range of the label at `span`, including the `gap` before it, which a
        query omits.

        Raise InputError if one of the tokens also covers other characters.
        """
        self.range_of(span)
        start, stop = self.range_of((span[0] - len(gap), span[1]))
        outside = self._at(self.starts[start], span[0]).strip() + self._at(
            span[1], self.ends[stop - 1]
        )
        if outside:
            raise InputError(
                f"the label {self._at(*span)!r} shares a token with the adjacent {outside!r} in "
                f"{self._around(span)!r}; choose a template that separates them"
            )
        return start, stop

    def token_after_label(self, gap: str) -> int | None:
        """Return the token after the first demonstration's label; None if it is also a text's, or
        there is none.
        """
        span, (text, *_) = self.rendered.label_spans[0], self.rendered.text_spans
        _, stop = self.label_range(span, gap)
        texts_begin = min(start for start in (text[0], self.rendered.starts[1]) if start >= span[1])
        return self.ids[stop] if stop < len(self.ids) and self.ends[stop] <= texts_begin else None

    def continuation_tokens(self, query: "TokenizedText", gap: str) -> list[int]:
        """Return the tokens of the label with which this text continues `query`.

        Raise InputError if they do not directly follow the tokens of `query`.
        """
        span = self.rendered.label_spans[-1]
        _, stop = self.label_range(span, gap)
        if self.ids[: len(query.ids)] != query.ids:
            raise InputError(
                f"the end of {query.rendered.text[-30:]!r} is tokenized differently when the label "
                f"{self._at(*span)!r} follows; choose a template whose query ends at a token "
                "boundary"
            )
        return self.ids[len(query.ids) : stop]

    def _at(self, start: int, end: int) -> str:
        return self.rendered.text[start:end]

    def _around(self, span: Span) -> str:
        return self._at(max(0, span[0] - 20), span[1] + 20)


def tokenize_texts(tokenizer: Any, rendered: list[RenderedPrompt]) -> list[TokenizedText]:
    """Tokenize texts in one call. Raise InputError that lists unknown words."""
    encoded = tokenizer(
        [prompt.text for prompt in rendered],
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    texts = []
    unknown: dict[str, None] = {}
    for prompt, ids, offsets in zip(
        rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        text = TokenizedText(prompt, ids, starts, ends)
        texts.append(text)
        unknown.update(dict.fromkeys(unknown_words(tokenizer, text)))
    if unknown:
        words = quoted_list(tuple(unknown)[:10])
        if len(unknown) > 10:
            words += f" and {len(unknown) - 10} more"
        raise InputError(
            f"words must be in the tokenizer's vocabulary, got {words}; use other words, or another "
            "model: the bundled small models know only the words that they were trained on"
        )
    return texts


def unknown_words(tokenizer: Any, text: TokenizedText, start: int = 0) -> list[str]:
    """Return the words, from token `start` on, that have the unknown token.

    The unknown token itself, written out, is a known word: GPT-2's "<|endoftext|>" is also its
    unknown token.
    """
    unknown_id, unknown = tokenizer.unk_token_id, tokenizer.unk_token
    pieces = zip(text.ids[start:], text.starts[start:], text.ends[start:], strict=True)
    return [
        word_around(text.rendered.text, first, end)
        for token, first, end in pieces
        if token == unknown_id and text.rendered.text[first:end].strip() != unknown
    ]


def word_around(text: str, start: int, end: int) -> str:
    """Return the word around the characters from `start` to `end`, or only these if it is over 30
    characters longer.
    """
    piece = text[start:end].strip()
    if text[start:end] != piece:
        return piece
    before, after = re.findall(r"\S*\Z", text[:start])[0], re.findall(r"\A\S*", text[end:])[0]
    return f"{before}{piece}{after}" if len(before) + len(after) <= 30 else piece


def special_prefixes(
    tokenizer: Any, texts: Sequence[TokenizedText], prepend_bos: bool | None
) -> list[list[int]]:
    """Return the tokens to prepend to each text: those of `special_prefix`, or none if a text
    begins with them.
    """
    front = special_prefix(tokenizer, texts[0], prepend_bos)
    return [[] if text.ids[: len(front)] == front else front for text in texts]


def special_prefix(tokenizer: Any, text: TokenizedText, prepend_bos: bool | None) -> list[int]:
    """Return the tokens to prepend to every row; raise InputError for an invalid `prepend_bos`."""
    if prepend_bos not in (None, True, False):
        raise InputError(
            "prepend_bos must be True, False or None (the tokenizer's default), got "
            f"{prepend_bos!r}"
        )
    if prepend_bos is None:
        if not _may_be_forced_to_add_bos(tokenizer):
            return _tokens_added_before(tokenizer, text.rendered.text)
        published = _published_tokenizer(tokenizer)
        added = _tokens_added_before(published, text.rendered.text)
        # Tokens by name, since the tokenizer may have another vocabulary than the published one.
        return tokenizer.convert_tokens_to_ids(published.convert_ids_to_tokens(added))
    if not prepend_bos:
        return []
    # TransformerLens sets a BOS token for every tokenizer; if the vocabulary lacks it, its id is
    # the unknown token's.
    if (
        tokenizer.bos_token_id is None
        or tokenizer.decode([tokenizer.bos_token_id]) != tokenizer.bos_token
    ):
        raise InputError(
            "the model's tokenizer has no beginning-of-sequence token; omit prepend_bos (--bos)"
        )
    return [tokenizer.bos_token_id]


def _tokens_added_before(tokenizer: Any, text: str) -> list[int]:
    """Return the special tokens that a tokenizer adds before a text; raise InputError if it splits
    it differently.
    """
    bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[:start]
    raise InputError(
        f"the tokenizer splits {text[:40]!r} differently with special tokens; pass "
        "prepend_bos=True or False (--bos or --no-bos)"
    )


_TRUSTED = "_icl_lens_trusts_special_tokens"


def trust_special_tokens(tokenizer: Any) -> None:
    """Record that a tokenizer itself, not the one published in its folder, says which special
    tokens it adds.
    """
    setattr(tokenizer, _TRUSTED, True)


def _may_be_forced_to_add_bos(tokenizer: Any) -> bool:
    """Return whether TransformerLens may have replaced the published tokenizer with one that has
    add_bos_token=True.
    """
    return tokenizer.init_kwargs.get("add_bos_token") is True and not getattr(
        tokenizer, _TRUSTED, False
    )


_PUBLISHED: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def _published_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer in the folder or repository from which `tokenizer` was read."""
    if tokenizer not in _PUBLISHED:
        try:
            _PUBLISHED[tokenizer] = AutoTokenizer.from_pretrained(
                tokenizer.name_or_path, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read the published tokenizer of {tokenizer.name_or_path!r}, and the "
                "loaded copy has add_bos_token=True; pass prepend_bos=True or False (--bos or "
                "--no-bos)"
            ) from error
    return _PUBLISHED[tokenizer]
