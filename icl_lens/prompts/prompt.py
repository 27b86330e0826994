"""Prompts as data, and the text they become, with the character span of every part.

Spans are counted while the text is put together and never searched for, so a text may contain the label word,
braces or a colon.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from icl_lens.errors import InputError

Span = tuple[int, int]

# A colon that is a word of its own; "Warning: bad" holds none.
_COLON = re.compile(r"(?<!\S):(?!\S)")


def check_unicode(*texts: object) -> None:
    """Raises InputError for what is no text, or holds half a surrogate pair, which no tokenizer reads."""
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{text!r} is no text; give a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{text[:60]!r} is no valid Unicode text at character {error.start} (its bytes were not UTF-8, or a "
                "surrogate stands alone); write it anew as UTF-8"
            ) from None


@dataclass(frozen=True)
class Demonstration:
    """One example the prompt shows: a text and the label it has.

    Raises InputError when either is empty or white space only.

    Example:
        >>> il.Demonstration("a sad love", "bar")
        Demonstration(text='a sad love', label='bar')
    """

    text: str
    label: str

    def __post_init__(self) -> None:
        check_unicode(self.text, self.label)
        if not self.text.strip():
            raise InputError(f"the demonstration with label {self.label!r} has an empty text; give it a text")
        if not self.label.strip():
            raise InputError(f"the demonstration {self.text!r} has an empty label; give it a label")


@dataclass(frozen=True, init=False)
class Prompt:
    """An in-context classification prompt: demonstrations, then the query whose label is asked for.

    `answer` is the right label where one is known. `labels` are the choices; left out, they are the
    demonstrations' labels in order of first appearance. The text itself is made by a `Template`;
    `str(prompt)` uses the default one.

    Raises InputError for a prompt without demonstrations or query, an empty or repeated label, a
    demonstration's label that is not among `labels`, and an answer that is no label.

    Example:
        >>> shown = [il.Demonstration("love", "bar"), il.Demonstration("two", "foo")]
        >>> il.Prompt(shown, query="one", answer="foo").labels
        ('bar', 'foo')
        >>> il.Prompt(shown, query="one") == il.Prompt.parse("love : bar two : foo one :")
        True
    """

    demonstrations: tuple[Demonstration, ...]
    query: str
    answer: str | None
    labels: tuple[str, ...]

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        query: str,
        answer: str | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        if isinstance(labels, str):
            raise InputError(f"labels={labels!r} is one string; give a sequence such as ({labels!r},)")
        shown = tuple(dict.fromkeys(demonstration.label for demonstration in demonstrations))
        # Past the frozen __setattr__: sequences become tuples, so that prompts can be compared and hashed.
        object.__setattr__(self, "demonstrations", tuple(demonstrations))
        object.__setattr__(self, "query", query)
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "labels", shown if labels is None else tuple(labels))
        self._check(shown)

    def _check(self, shown: tuple[str, ...]) -> None:
        check_unicode(self.query, *self.labels, *(() if self.answer is None else (self.answer,)))
        if not self.demonstrations:
            raise InputError(
                f"the prompt with query {self.query!r} has no demonstration; "
                "in-context learning needs at least one text with its label before the query"
            )
        if not self.query.strip():
            raise InputError("the prompt has no query; put the text whose label is asked for after the last label")
        if not all(label.strip() for label in self.labels):
            raise InputError(f"the labels {quoted_list(self.labels)} contain an empty one; leave it out")
        if len(set(self.labels)) != len(self.labels):
            raise InputError(f"the labels {quoted_list(self.labels)} repeat one; name each once")
        missing = [label for label in shown if label not in self.labels]
        if missing:
            raise InputError(
                f"the demonstrations use {quoted_list(missing)}, not among the labels {quoted_list(self.labels)}; "
                "add what is missing, or leave labels out to take those of the demonstrations"
            )
        if self.answer is not None and self.answer not in self.labels:
            raise InputError(
                f"the answer {self.answer!r} is not one of the labels {quoted_list(self.labels)}; "
                "answer with a label, or leave the answer out"
            )

    @classmethod
    def parse(cls, text: str, answer: str | None = None) -> "Prompt":
        """Read "love : bar like : bar eight : foo two : foo one :".

        Texts and labels alternate around colons that stand alone: the first word after a colon is the label,
        the rest up to the next colon is the next text, and the last text is the query. The colon after the
        query may be left out. Labels of several words, and texts that hold a colon standing alone, need the
        constructor.

        Raises InputError when there is no demonstration or no query.
        """
        check_unicode(text)
        pieces = [piece.strip() for piece in _COLON.split(text)]
        if len(pieces) == 1:
            raise InputError(
                f"{text!r} has no colon standing alone, so no demonstration; write 'text : label' for each, "
                "with a space on both sides of the colon, then the query, as in 'love : bar one : foo two :'"
            )
        if not pieces[-1]:
            pieces.pop()  # nothing after the query's own colon
        elif pieces[-1].endswith(":"):
            raise InputError(
                f"{text!r} ends in a colon that is part of a word; "
                "put a space on both sides of every colon between a text and its label"
            )
        demonstrations = []
        current = pieces[0]
        for piece in pieces[1:]:
            label, *rest = piece.split(maxsplit=1) or [""]
            demonstrations.append(Demonstration(current, label))
            current = rest[0] if rest else ""
        if not current:
            raise InputError(
                f"{text!r} ends in a label and has no query; add the text whose label is asked for, "
                "as in 'love : bar one : foo two :'"
            )
        return cls(demonstrations, current, answer)

    def __str__(self) -> str:
        return Template().render(self).text


@dataclass(frozen=True)
class Rendered:
    """A prompt's text and where its parts lie in it.

    Spans are (start, end) in characters, end exclusive, without the template's own characters. `text_spans`
    and `label_spans` follow the demonstrations; a continuation has one label span more, that of the label it
    ends in.
    """

    text: str
    label_spans: tuple[Span, ...]
    text_spans: tuple[Span, ...]
    query_span: Span


@dataclass(frozen=True)
class Template:
    """How a prompt is written: `prefix`, the demonstrations and the query, joined by `separator`.

    `demonstration` and `query` hold `{text}`, and `demonstration` also `{label}`, once each and nothing else
    that is replaced: other braces stay as they are. The query must be the demonstration cut before its label
    and without the spaces there, because most tokenizers make " foo" one token: a query that ends in that
    space would be followed by a token no demonstration holds. `prefix=" "` does the same for the very first
    word, which such tokenizers may otherwise cut differently from the same word further on.

    Raises InputError for a field that is missing, repeated or out of order, and for a query that is not that
    cut.

    Example:
        >>> template = il.Template("{text} -> {label}", "{text} ->", separator="; ")
        >>> template.render(prompt).text
        'love -> bar; like -> bar; eight -> foo; two -> foo; one ->'
    """

    demonstration: str = "{text} : {label}"
    query: str = "{text} :"
    separator: str = " "
    prefix: str = ""

    def __post_init__(self) -> None:
        for field, count in (
            ("{text}", self.demonstration.count("{text}")),
            ("{label}", self.demonstration.count("{label}")),
        ):
            if count != 1:
                raise InputError(
                    f"the template's demonstration {self.demonstration!r} holds {field} {count} times; "
                    "write it once, as in '{text} : {label}'"
                )
        if self.demonstration.index("{label}") < self.demonstration.index("{text}"):
            raise InputError(
                f"the template's demonstration {self.demonstration!r} has {{label}} before {{text}}; "
                "the model is asked to continue with the label, so put it after the text"
            )
        before, between, _ = self._pieces
        wanted = f"{before}{{text}}{between.rstrip(' ')}"
        if self.query != wanted:
            raise InputError(
                f"the template's query {self.query!r} is not its demonstration {self.demonstration!r} "
                f"cut before the label, spaces there left out; write query={wanted!r}"
            )

    @property
    def gap(self) -> str:
        """The spaces a demonstration has before its label; the query ends before them."""
        between = self._pieces[1]
        return between[len(between.rstrip(" ")) :]

    @property
    def _pieces(self) -> tuple[str, str, str]:
        before, _, rest = self.demonstration.partition("{text}")
        between, _, after = rest.partition("{label}")
        return before, between, after

    def render(self, prompt: Prompt) -> Rendered:
        """The prompt's text up to where its label is asked for."""
        return self._write(prompt, None)

    def continuation(self, prompt: Prompt, label: str) -> Rendered:
        """The prompt's text with `label` after the query, written just as a demonstration's.

        The last of `label_spans` is that label's. This is how a label is seen in the context in which the
        model is to produce it.
        """
        return self._write(prompt, label)

    def _write(self, prompt: Prompt, answer: str | None) -> Rendered:
        before, between, after = self._pieces
        parts: list[str] = []
        length = 0

        def add(part: str) -> Span:
            nonlocal length
            parts.append(part)
            length += len(part)
            return length - len(part), length

        text_spans, label_spans = [], []
        add(self.prefix)
        for demonstration in prompt.demonstrations:
            add(before)
            text_spans.append(add(demonstration.text))
            add(between)
            label_spans.append(add(demonstration.label))
            add(after + self.separator)
        add(before)
        query_span = add(prompt.query)
        if answer is None:
            add(between.rstrip(" "))
        else:
            add(between)
            label_spans.append(add(answer))
            add(after)
        return Rendered("".join(parts), tuple(label_spans), tuple(text_spans), query_span)


def as_prompts(prompts: Any) -> tuple[Prompt, ...]:
    """One prompt or several, of which strings are read as `Prompt.parse` does; raises InputError for anything else."""
    given: tuple[Any, ...] = (prompts,)
    if isinstance(prompts, Iterable) and not isinstance(prompts, str):
        given = tuple(prompts)
    several = tuple(Prompt.parse(one) if isinstance(one, str) else one for one in given)
    for one in several:
        if not isinstance(one, Prompt):
            raise InputError(f"{one!r} is no prompt; give an il.Prompt, or a text such as 'love : bar one : foo two :'")
    return several


def quoted_list(labels: Sequence[str]) -> str:
    """Labels as an error names them: quoted, with commas."""
    return ", ".join(repr(label) for label in labels)
