"""Prompts as data, and their rendered text with the character span of every part.

Spans are counted while the text is assembled and never searched for, so a text may contain the
label word, braces or a colon.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from icl_lens.errors import InputError, quoted_list, short_repr
from icl_lens.foundation.printable import escape_control_characters
from icl_lens.prompts.chat_turns import chat_format
from icl_lens.prompts.name_order import in_order

Span = tuple[int, int]

# A colon surrounded by white space; "Warning: bad" has none.
_COLON = re.compile(r"(?<!\S):(?!\S)")

# Such a colon with other white space than " : " or, at the end, " :" has, and the words around it.
_WIDE_COLON = re.compile(r"\S*(?! : | :\Z)\s+:(?!\S)\s*\S*|\S* :(?! \S|\Z)\s+\S*")


SPACE, NEWLINE = " ", "\n"
"""Separators of demonstrations."""


def check_unicode(*texts: object, what: str = "text") -> None:
    """Raise InputError for values that are not strings, and for unpaired surrogates, which no
    tokenizer reads.
    """
    for text in texts:
        if not isinstance(text, str):
            remedy = f"; write {str(text)!r}" if isinstance(text, int | float) else ""
            raise InputError(f"{what} must be a string, got {short_repr(text)}{remedy}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{what} must be valid Unicode, got an unpaired surrogate at character "
                f"{error.start} of {text[:60]!r}; re-encode it as UTF-8"
            ) from None


@dataclass(frozen=True)
class Demonstration:
    """An example in the prompt: a text and its label.

    Raise InputError if either is empty or only white space.

    Example:
        >>> il.Demonstration("a sad love", "bar")
        Demonstration(text='a sad love', label='bar')
    """

    text: str
    label: str

    def __post_init__(self) -> None:
        check_unicode(self.text)
        check_unicode(self.label, what="label")
        if not self.text.strip():
            raise InputError(
                f"the demonstration with label {self.label!r} has an empty text; add the text"
            )
        if not self.label.strip():
            raise InputError(f"the demonstration {self.text!r} has an empty label; add the label")


def _as_demonstration(demonstration: object) -> Demonstration:
    """Return a demonstration or a pair of a text and its label as a demonstration; raise InputError
    for others.
    """
    if isinstance(demonstration, Demonstration):
        return demonstration
    if isinstance(demonstration, tuple | list) and len(demonstration) == 2:
        return Demonstration(*demonstration)
    raise InputError(
        "each demonstration must be a pair (text, label) or an il.Demonstration, got "
        f"{short_repr(demonstration)}; write (text, label)"
    )


@dataclass(frozen=True, init=False)
class Prompt:
    """An in-context prompt: demonstrations followed by a query whose label is predicted.

    `answer` is the correct label, if known. `labels` are the choices; the default is the
    demonstrations' labels in an order that depends only on their set: numbers by value, words
    alphabetically. Labels that no demonstration shows are choices, too: the answer may be a word of
    its own (a capital), and a prompt without demonstrations asks for one of `labels`. The query ""
    is an input without content, by which a model's preference for labels is measured. A `Template`
    renders the text; `str(prompt)` uses the default template and writes control characters out. A
    demonstration may be given as a pair of a text and its label.

    Raise InputError for a prompt without labels, a query of white space, an empty or repeated
    label, and a demonstration's label or an answer that is not among `labels`.

    Example:
        >>> shown = [il.Demonstration("love", "bar"), il.Demonstration("two", "foo")]
        >>> il.Prompt(shown, query="one", answer="foo").labels
        ('bar', 'foo')
        >>> il.Prompt(shown, query="one") == il.Prompt.parse("love : bar two : foo one :")
        True
        >>> pairs = [("love", "bar"), ("two", "foo")]
        >>> il.Prompt(pairs, query="one") == il.Prompt(shown, query="one")
        True
    """

    demonstrations: tuple[Demonstration, ...]
    query: str
    answer: str | None
    labels: tuple[str, ...]
    classes: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """The class of each label's texts, as a task knows it; None if unknown. Prompts compare equal
    without it.
    """
    other_query: Demonstration | None = field(default=None, compare=False, repr=False)
    """A text of another class that no demonstration shows, with its label, as a task knows it."""
    separator: str = field(default=SPACE, compare=False, repr=False)
    """What is written between demonstrations if the template does not say it: a space; in a parsed
    prompt, what its text has there; if a task of your own data has texts or labels of several
    words, a newline.
    """

    def __init__(
        self,
        demonstrations: Sequence[Demonstration | tuple[str, str]],
        query: str,
        answer: str | None = None,
        labels: Sequence[str] | None = None,
        *,
        classes: Mapping[str, str] | None = None,
        other_query: Demonstration | None = None,
        separator: str = SPACE,
    ) -> None:
        if isinstance(labels, str):
            raise InputError(
                f"labels must be a sequence of strings, got {labels!r}; write ({labels!r},)"
            )
        pairs = tuple(map(_as_demonstration, demonstrations))
        demonstrated = in_order(demonstration.label for demonstration in pairs)
        # Bypass the frozen __setattr__. Sequences become tuples, so that prompts can be compared
        # and hashed.
        object.__setattr__(self, "demonstrations", pairs)
        object.__setattr__(self, "query", query)
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "labels", demonstrated if labels is None else tuple(labels))
        object.__setattr__(self, "classes", classes)
        object.__setattr__(self, "other_query", other_query)
        object.__setattr__(self, "separator", separator)
        self._check_query()
        self._check_labels(demonstrated)

    def _check_query(self) -> None:
        """Raise InputError for texts of another type, for a prompt without labels, and for a query
        of white space.
        """
        check_unicode(self.query, what="query")
        check_unicode(*self.labels, what="label")
        if self.answer is not None:
            check_unicode(self.answer, what="answer")
        if not self.labels:
            raise InputError(
                f"the prompt with query {self.query!r} has no demonstration; "
                "add at least one text with its label before the query, or pass labels= to choose "
                "from"
            )
        if self.query and not self.query.strip():
            raise InputError(
                f"the prompt has no query, only white space ({self.query!r}); add the text to "
                "classify, or pass '' for a query without content"
            )

    def _check_labels(self, demonstrated: Sequence[str]) -> None:
        """Raise InputError for an empty or repeated label, and for demonstrated labels and an
        answer that are not among `labels`.
        """
        if not all(label.strip() for label in self.labels):
            raise InputError(
                f"the labels {quoted_list(self.labels)} contain an empty one; remove it"
            )
        if len(set(self.labels)) != len(self.labels):
            raise InputError(
                f"the labels {quoted_list(self.labels)} contain a duplicate; list each once"
            )
        missing = [label for label in demonstrated if label not in self.labels]
        if missing:
            raise InputError(
                f"the demonstrations use {quoted_list(missing)}, not among the labels "
                f"{quoted_list(self.labels)}; add what is missing, or omit labels= to use those of "
                "the demonstrations"
            )
        if self.answer is not None and self.answer not in self.labels:
            raise InputError(
                f"the answer {self.answer!r} is not one of the labels {quoted_list(self.labels)}; "
                "use one of them, omit the answer, or add it to labels= if it is a word of its own"
            )

    @property
    def has_own_answer(self) -> bool:
        """Whether the answer is a word that no demonstration shows, such as a capital."""
        if self.answer is None:
            return False
        return all(shot.label != self.answer for shot in self.demonstrations)

    @property
    def every_label(self) -> tuple[str, ...]:
        """The labels of the demonstrations and the choices, in the order in which they appear."""
        demonstrated = [shot.label for shot in self.demonstrations]
        return tuple(dict.fromkeys([*demonstrated, *self.labels]))

    def with_other_query(self) -> "Prompt":
        """Return the same demonstrations with the query of another class, `other_query`, and its
        label as the answer.

        Raise InputError for a prompt that knows no such query, because no task has drawn it or all
        texts are shown.

        Example:
            >>> drawn = il.load_task("animal-country", n=1)[0]
            >>> other = drawn.with_other_query()
            >>> drawn.answer, other.answer, other.with_other_query() == drawn
            ('foo', 'bar', True)
        """
        if self.other_query is None or self.answer is None:
            raise InputError(
                f"the prompt with query {self.query!r} has no query of another class; use a prompt "
                "of a task, with fewer demonstrations or more texts"
            )
        asked = Demonstration(self.query, self.answer)
        query, answer = self.other_query.text, self.other_query.label
        return Prompt(
            self.demonstrations,
            query,
            answer,
            self.labels,
            classes=self.classes,
            other_query=asked,
            separator=self.separator,
        )

    @classmethod
    def parse(cls, text: str, answer: str | None = None) -> "Prompt":
        """Parse "love : bar like : bar eight : foo two : foo one :".

        Texts and labels alternate around " : " separators: the first word after a separator is the
        label, the words after it up to the next separator are the next text, and the last text is
        the query. The final colon is optional. What separates the demonstrations, such as a space
        or a line break, becomes `separator`, so that the text of the prompt is `text` itself. Use
        the constructor for labels of several words and for texts that contain " : ".

        Raise InputError if there is no demonstration or no query, for a text over a line break
        after a label that a space ends, and for a text that a prompt
        would not repeat: with white space at its ends, other white space than " : " has around a
        colon, or demonstrations that are separated differently.

        Example:
            >>> il.Prompt.parse("love : bar\\neight : foo\\none :").separator
            '\\n'
        """
        check_unicode(text)
        pieces = [piece.strip() for piece in _COLON.split(text)]
        if len(pieces) == 1 and len(text.split()) == 1:
            raise InputError(
                f"no ' : ' separator in {text!r}, which is not a prompt; for the prompts of a task or a "
                f"file of data, pass il.load_task({text!r}) (--task)"
            )
        if len(pieces) == 1:
            raise InputError(
                f"no ' : ' separator in {text!r}; write 'text : label' pairs, then the query, e.g. "
                "'love : bar one : foo two :', or for plain text pass il.Text(...) (--text)"
            )
        if not pieces[-1]:
            pieces.pop()  # nothing after the query's own colon
        elif pieces[-1].endswith(":"):
            raise InputError(
                f"the last colon of {text!r} is part of a word; put a space on both sides of every "
                "colon between a text and its label"
            )
        demonstrations, current_text, separators = _demonstrations_of(pieces)
        if not current_text:
            raise InputError(
                f"{text!r} ends in a label and has no query; add the text to classify, e.g. 'love "
                ": bar one : foo two :', or for plain text pass il.Text(...) (--text)"
            )
        if not demonstrations:
            raise InputError(
                f"the prompt with query {current_text!r} has no demonstration; add at least one "
                "text with its label before the query, or for plain text pass il.Text(...) (--text)"
            )
        labels = {demonstration.label for demonstration in demonstrations}
        if answer is not None and answer not in labels:
            check_unicode(answer, what="answer")
            raise InputError(
                f"the answer {answer!r} is not one of the labels {quoted_list(in_order(labels))}; "
                "use one of them, or omit the answer"
            )
        _check_one_word_labels(demonstrations, current_text, separators[0])
        prompt = cls(demonstrations, current_text, answer, separator=separators[0])
        _check_round_trip(text, prompt)
        return prompt

    def __str__(self) -> str:
        return escape_control_characters(Template().render(self).text)


def _demonstrations_of(pieces: Sequence[str]) -> tuple[list[Demonstration], str, list[str]]:
    """Return the demonstrations of a text that was cut at its colons, the query, and what stands
    between the demonstrations.

    Raise InputError for an empty text or label, and if they are separated differently.
    """
    demonstrations: list[Demonstration] = []
    separators: list[str] = []
    current_text = pieces[0]
    for piece in pieces[1:]:
        words = piece.split(maxsplit=1)
        label = words[0] if words else ""
        next_text = words[1] if len(words) == 2 else ""
        if "\\n" in label:
            raise InputError(
                f"the label {label!r} has a backslash and an n, which are no line break; write a "
                "line break itself, in a shell with $'…\\n…'"
            )
        demonstrations.append(Demonstration(current_text, label))
        separators.append(piece[len(label) : len(piece) - len(next_text)])
        current_text = next_text
    different = [separator for separator in dict.fromkeys(separators) if separator]
    if len(different) > 1:
        raise InputError(
            "the demonstrations of a prompt must be separated alike, got "
            f"{quoted_list(different[:4])}; separate all of them by {different[0]!r}"
        )
    return demonstrations, current_text, separators


def _check_one_word_labels(
    demonstrations: Sequence[Demonstration], query: str, separator: str
) -> None:
    """Raise InputError if a text goes over a line break although a space separates demonstrations:
    its first words belong to a label of several words.
    """
    texts = [demonstration.text for demonstration in demonstrations] + [query]
    for text in texts[1:]:
        if "\n" in text and "\n" not in separator:
            raise InputError(
                f"a label has one word here, but the text {text!r} goes over a line break; for "
                "labels of several words or such texts, pass il.Prompt([(text, label), …], query)"
            )


def _check_round_trip(text: str, prompt: Prompt) -> None:
    """Raise InputError unless a prompt's own text is the text from which it was parsed, apart from
    a final colon.
    """
    outer = text[: len(text) - len(text.lstrip())] + text[len(text.rstrip()) :]
    if outer:
        raise InputError(
            f"the prompt must begin with a text and end with a colon, got white space ({outer!r}) "
            "before or after it, with which the model reads another prompt; remove it (a label "
            "follows the last colon with its own space)"
        )
    repeated = Template().render(prompt).text
    if text == repeated or f"{text} :" == repeated:
        return
    wide = _WIDE_COLON.search(text)
    unusual = text if wide is None else wide[0]
    raise InputError(
        "the prompt must have one space on each side of a colon between a text and its label, got "
        f"{unusual!r}; write ' : ', or for another format il.Prompt(pairs, query) with an "
        "il.Template"
    )


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt's text and the spans of its parts.

    Spans are (start, end) in characters, end exclusive, and exclude the template's characters.
    `text_spans` and `label_spans` have one span per demonstration; a continuation has an additional
    label span for its final label.
    """

    text: str
    label_spans: tuple[Span, ...]
    text_spans: tuple[Span, ...]
    query_span: Span
    starts: tuple[int, ...] = ()
    """Where each demonstration and the query begin, with the template's characters."""


@dataclass(frozen=True)
class Template:
    """The format of a prompt: `prefix`, then the demonstrations and the query, joined by
    `separator`.

    `demonstration` contains `{text}` and `{label}` once each, and `query` contains `{text}`; other
    braces are kept. The query is the demonstration cut before its label, without the spaces there:
    most tokenizers make " foo" one token, so a query that ends in a space would be followed by a
    token that no demonstration contains. `prefix=" "` likewise puts a space before the first word,
    which such tokenizers may otherwise split differently.

    A demonstration may have its label before its text. The query then has words of its own, which
    must be given, and ends as the demonstration does before its label: "label: {label}, text:
    {text}" and "text: {text}, label:". Since a token reads only what comes before it, such a label
    knows nothing of its own text.

    Raise InputError for a field that is missing or repeated, and for a query that differs from this
    cut or end.

    Example:
        >>> template = il.Template("{text} -> {label}", separator="; ")
        >>> template.render(prompt).text
        'love -> bar; like -> bar; eight -> foo; two -> foo; one ->'
    """

    demonstration: str = "{text} : {label}"
    query: str = ""
    """By default, the demonstration cut before its label."""
    separator: str | None = None
    """By default, that of the prompts (`Prompt.separator`): a space, what a parsed prompt has, or a
    newline if a task of your own data has texts or labels of several words.
    """
    prefix: str = ""

    def __post_init__(self) -> None:
        check_unicode(self.demonstration, self.query, self.separator or "", self.prefix)
        for name in ("{text}", "{label}"):
            if (count := self.demonstration.count(name)) != 1:
                raise InputError(
                    f"demonstration must contain {name} once, got {self.demonstration!r} with "
                    f"{count}; write e.g. '{{text}} : {{label}}'"
                )
        before, between, _ = self._pieces
        wanted = f"{before}{{text}}{between.rstrip(' ')}"
        if not self.query and not self._is_label_first:
            object.__setattr__(self, "query", wanted)
        if self._is_label_first:
            end = before.rstrip(" ")
            example = "{text}\n" + (end or "Label:")
            if self.query.count("{text}") != 1 or not self.query.partition("{text}")[2].endswith(
                end
            ):
                raise InputError(
                    f"query must contain {{text}} once and then end in {end!r}, as "
                    f"{self.demonstration!r} has before its label, got {self.query!r}; write e.g. "
                    f"query={example!r}"
                )
            if self.query.endswith(" "):
                raise InputError(
                    f"query must not end in a space, got {self.query!r}; the label is written "
                    "after the spaces that demonstrations have before it, "
                    f"query={self.query.rstrip(' ')!r}"
                )
            return
        if self.query != wanted:
            raise InputError(
                f"query must be the demonstration {self.demonstration!r} cut before the label and "
                f"its spaces, got {self.query!r}; write query={wanted!r}"
            )

    @classmethod
    def chat(
        cls, model: Any, *, text: str = "{text}", label: str = "{label}", system: str | None = None
    ) -> "Template":
        """Return the tokenizer's own chat template: each demonstration is a turn of the user and
        one of the model.

        The user says `text`, such as "Review: {text}", and the model answers `label`; what this has
        before {label} is written for the model at the query, too. The rendered text is that of the
        tokenizer's `apply_chat_template` with `add_generation_prompt=True`. Without `system`, a
        default system message of the template's own is used.

        The template is a program that comes with the model; it runs in a process of its own, for at
        most 5 seconds.

        Raise InputError for a tokenizer without a chat template, one that refuses the messages
        (some have no role "system"), takes longer or writes over a million characters, and one in
        which the turns of a conversation are not written alike.

        Example:
            >>> instruct = il.load_model("smollm2-135m")  # doctest: +SKIP
            >>> template = il.Template.chat(instruct, text="Text: {text}")  # doctest: +SKIP
            >>> prompts = il.load_task("sentiment-number")
            >>> batch = il.tokenize(instruct, prompts, template=template)  # doctest: +SKIP
        """
        tokenizer: Any = getattr(model, "tokenizer", None)
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "model must have a tokenizer with a chat template; use an instruction-tuned model"
            )
        if text.count("{text}") != 1 or label.count("{label}") != 1:
            raise InputError(
                f"text must contain {{text}} and label {{label}} once, got {text!r} and {label!r}"
            )
        turns = chat_format(tokenizer, text=text, label=label, system=system)
        return cls(turns.demonstration, turns.query, separator="", prefix=turns.prefix)

    @property
    def gap(self) -> str:
        """The spaces before a demonstration's label; the query ends before them."""
        before, between, _ = self._pieces
        separator = SPACE if self.separator is None else self.separator
        lead = separator + before if self._is_label_first else between
        return lead[len(lead.rstrip(" ")) :]

    def for_prompts(self, prompts: Iterable[Prompt]) -> "Template":
        """Return the template with a separator: its own, or that of the prompts.

        Raise InputError if it has none and those of the prompts differ.

        Example:
            >>> il.Template().for_prompts([prompt]).separator
            ' '
        """
        if self.separator is not None:
            return self
        separators = list(dict.fromkeys(prompt.separator for prompt in prompts))
        if len(separators) > 1:
            raise InputError(
                "all prompts must separate their demonstrations alike, got "
                f"{quoted_list(separators[:4])}; pass template=il.Template(separator="
                f"{separators[0]!r}), or tokenize them separately"
            )
        return self.separated_by(separators[0] if separators else SPACE)

    def separated_by(self, separator: str) -> "Template":
        """Return the template with this separator, unless it has its own."""
        return replace(self, separator=separator) if self.separator is None else self

    @property
    def _is_label_first(self) -> bool:
        """Whether a demonstration has its label before its text."""
        return self.demonstration.index("{label}") < self.demonstration.index("{text}")

    @property
    def _pieces(self) -> tuple[str, str, str]:
        """What a demonstration has before, between and after its text and label, in whichever
        order.
        """
        before, between, after = re.split(r"{text}|{label}", self.demonstration)
        return before, between, after

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """Return the prompt's text up to where its label is predicted."""
        return self._write(prompt, None)

    def check_labels(self, labels: Iterable[str]) -> None:
        """Raise InputError for a label that begins with a space where the template has one, too."""
        for label in labels:
            if self.gap and label.startswith(" "):
                raise InputError(
                    f"label {label!r} begins with a space, which the template "
                    f"{self.demonstration!r} writes already; write {label.strip()!r}"
                )

    def continuation(self, prompt: Prompt, label: str) -> RenderedPrompt:
        """Return the prompt's text with `label` after the query, formatted like a demonstration.

        The last of `label_spans` is that of `label`: the label in the context in which the model
        predicts it.
        """
        return self._write(prompt, label)

    def _write(self, prompt: Prompt, answer: str | None) -> RenderedPrompt:
        """Render the prompt up to its answer or, if that is None, up to where it is predicted."""
        separator = prompt.separator if self.separator is None else self.separator
        before, between, after = self._pieces
        before_query, _, after_query = self.query.partition("{text}")
        parts: list[str] = []
        length = 0

        def add(part: str) -> Span:
            nonlocal length
            parts.append(part)
            length += len(part)
            return length - len(part), length

        text_spans, label_spans, starts = [], [], []
        add(self.prefix)
        for demonstration in prompt.demonstrations:
            starts.append(add(before)[0])
            if self._is_label_first:
                label_spans.append(add(demonstration.label))
                add(between)
                text_spans.append(add(demonstration.text))
            else:
                text_spans.append(add(demonstration.text))
                add(between)
                label_spans.append(add(demonstration.label))
            add(after + separator)
        starts.append(add(before_query)[0])
        query_span = add(prompt.query)
        add(after_query)
        if answer is not None:
            add(self.gap)
            label_spans.append(add(answer))
            if not self._is_label_first:
                add(after)
        return RenderedPrompt(
            "".join(parts), tuple(label_spans), tuple(text_spans), query_span, tuple(starts)
        )


DEFAULT_TEMPLATE = Template()


def as_prompts(prompts: Any) -> tuple[Prompt, ...]:
    """Return prompts as a tuple, parsing strings with `Prompt.parse`; raise InputError for anything
    else.
    """
    check_no_table(prompts)
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        prompts = (prompts,)
    parsed = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = Prompt.parse(prompt)
        if not isinstance(prompt, Prompt):
            raise InputError(
                "prompts must be il.Prompt or texts like 'love : bar one : foo two :', got "
                f"{short_repr(prompt)}"
            )
        parsed.append(prompt)
    return tuple(parsed)


def check_no_table(value: object) -> None:
    """Raise InputError for a table of pandas, with the call that reads its rows."""
    if type(value).__name__ != "DataFrame":
        return
    names = [str(name) for name in getattr(value, "columns", ())]
    columns = repr(tuple(names[:2])) if len(names) > 1 else "('text', 'label')"
    raise InputError(
        "prompts must be il.Prompt, got a DataFrame; write frame.to_csv('rows.csv', index=False) "
        f"and il.load_task('rows.csv', columns={columns})"
    )
