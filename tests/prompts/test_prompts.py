"""Prompts and templates: parsing, validation, and spans that are counted, not searched for."""

import re

import pytest

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Demonstration, Prompt, RenderedPrompt, Template

PAPER = "love : bar like : bar eight : foo two : foo one :"


def cut(rendered: RenderedPrompt, spans):
    return [rendered.text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("text", "demonstrations", "query"),
    [
        ("love : bar one :", [("love", "bar")], "one"),
        (
            "happy : bar a sad love : bar three the : foo nine :",
            [("happy", "bar"), ("a sad love", "bar"), ("three the", "foo")],
            "nine",
        ),
        ("a\nb : bar\tc  d :", [("a\nb", "bar")], "c  d"),
        ("love : bar\na two : foo\none :", [("love", "bar"), ("a two", "foo")], "one"),
        ("love : bar\r\ntwo : foo\r\none", [("love", "bar"), ("two", "foo")], "one"),
        ("love : bar  two : foo  one :", [("love", "bar"), ("two", "foo")], "one"),
        (
            "Warning: bad : bar at 10:30 : foo ratio 1:2 :",
            [("Warning: bad", "bar"), ("at 10:30", "foo")],
            "ratio 1:2",
        ),
        ("foo : bar bar : foo foo :", [("foo", "bar"), ("bar", "foo")], "foo"),
    ],
)
def test_parse_splits_texts_from_labels(text, demonstrations, query):
    prompt = Prompt.parse(text)
    assert [(d.text, d.label) for d in prompt.demonstrations] == demonstrations
    assert prompt.query == query
    assert prompt.answer is None
    # What a model reads is the text itself, with its final colon.
    assert Template().render(prompt).text == text.removesuffix(" :") + " :"


def test_parse_reads_what_str_writes():
    prompt = Prompt(
        [Demonstration("a very sad day", "foo"), Demonstration("10:30", "bar")], "x", "bar"
    )
    assert Prompt.parse(str(prompt), answer="bar") == prompt


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("love bar one", r"no ' : ' separator .* pass il.Text\(\.\.\.\)"),
        ("animal-country", r"not a prompt; .* pass il.load_task\('animal-country'\)"),
        ("reviews.csv", r"not a prompt; .* pass il.load_task\('reviews.csv'\)"),
        ("love : bar", "no query"),
        (": bar one :", "empty text"),
        ("love : bar : foo one :", "empty text"),
        ("love : : one :", "empty label"),
        ("love : bar like: bar eight: foo one:", "part of a word"),
        ("love : bar two : foo one : ", r"got white space \(' '\)"),
        ("\nlove : bar two : foo one :\n", r"got white space \('\\n\\n'\)"),
        ("love : bar\nlike : bar two : foo\none :", r"separated alike, got '\\n', ' '"),
        ("love  : bar two : foo one :", "each side of a colon .*, got 'love  : bar'"),
        ("love :\tbar two : foo one :", r"each side of a colon .*, got 'love :\\tbar'"),
        ("love : bar two : foo one  :", "each side of a colon .*, got 'one  :'"),
        (r"love : bar\ntwo : foo\none :", "a backslash and an n"),
        ("happy : very good\nsad : very bad\nnine :", "'good\\\\nsad' goes over a line break"),
        (r"love : bar\nmore than two : foo\nabout one :", "a backslash and an n"),
    ],
)
def test_parse_refuses_prompts_that_are_incomplete_or_would_be_read_otherwise(text, complaint):
    with pytest.raises(InputError, match=complaint):
        Prompt.parse(text)


def test_a_template_has_the_separator_of_its_prompts():
    spaced, broken = Prompt.parse(PAPER), Prompt.parse("love : bar\ntwo : foo\none :")
    assert Template("{text} = {label}").for_prompts([broken, broken]).separator == "\n"
    with pytest.raises(
        InputError, match=r"alike, got ' ', '\\n'; pass template=il.Template\(separator=' '\)"
    ):
        Template().for_prompts([spaced, broken])
    assert Template(separator="; ").for_prompts([spaced, broken]).separator == "; "


def test_spans_where_searching_would_go_wrong():
    """Texts that hold the label word, a colon, braces, or another text."""
    texts = ["foo : foo", "{text} {label}", "bar", "a bar : b", "{0}{"]
    labels = ["foo", "{text}", "bar", "{label}", "foo"]
    prompt = Prompt([Demonstration(*pair) for pair in zip(texts, labels, strict=True)], "foo : bar")
    template = Template(
        "<{text}> is : {label}!", "<{text}> is :", separator="\n{label}\n", prefix="{text} foo:\n"
    )
    rendered = template.render(prompt)
    assert cut(rendered, rendered.text_spans) == texts
    assert cut(rendered, rendered.label_spans) == labels
    assert cut(rendered, [rendered.query_span]) == ["foo : bar"]
    assert rendered.text == (
        "{text} foo:\n<foo : foo> is : foo!\n{label}\n<{text} {label}> is : {text}!\n{label}\n"
        "<bar> is : bar!\n{label}\n<a bar : b> is : {label}!\n{label}\n<{0}{> is : foo!\n{label}\n"
        "<foo : bar> is :"
    )
    assert rendered.text_spans[0] == (13, 22)


@pytest.mark.parametrize(
    "template",
    [
        Template(),
        Template("Q: {text}\nA: {label}\n", "Q: {text}\nA:", separator="\n", prefix="Answer.\n\n"),
        Template("{text}\n{label}", "{text}\n", separator="\n"),
        Template("{text}->{label}", "{text}->"),
        Template("{text}{label}.", "{text}"),
    ],
)
def test_a_continuation_is_the_prompt_and_then_a_demonstration(template):
    prompt = Prompt.parse(PAPER)
    asked = template.render(prompt)
    continued = template.continuation(prompt, "foo")
    assert continued.text.startswith(asked.text + template.gap)
    assert continued.label_spans[:-1] == asked.label_spans
    assert continued.label_spans[-1] == (
        len(asked.text + template.gap),
        len(asked.text + template.gap) + 3,
    )
    assert (continued.text_spans, continued.query_span) == (asked.text_spans, asked.query_span)
    # The text is as if the query were one more demonstration before another query.
    longer = Prompt([*prompt.demonstrations, Demonstration(prompt.query, "foo")], "x")
    rendered = template.render(longer)
    assert rendered.text.startswith(continued.text + (template.separator or " "))
    assert rendered.label_spans == continued.label_spans


def test_labels_before_texts_are_asked_at_the_end():
    """Each label follows the same words and spaces, in a demonstration and after the query."""
    assert Template("Label: {label} -{text}", "{text} Label:").gap == " ", (
        "before the label, not before the text"
    )
    prompt = Prompt([Demonstration("love", "bar"), Demonstration("a two", "foo")], "one", "foo")
    for template, text, gap in (
        (
            Template("{label}: {text}", "{text} ->", ", ", prefix=" "),
            " bar: love, foo: a two, one ->",
            " ",
        ),
        (
            Template("L: {label}|T: {text}", "T: {text}|L:", "\n"),
            "L: bar|T: love\nL: foo|T: a two\nT: one|L:",
            " ",
        ),
        (Template("{label}|{text}", "{text}|", "\n"), "bar|love\nfoo|a two\none|", ""),
    ):
        for rendered, answer in (
            (template.render(prompt), ()),
            (template.continuation(prompt, "foo"), ("foo",)),
        ):
            assert rendered.text == text + "".join(
                gap + part_of_answer for part_of_answer in answer
            )
            read = [
                rendered.text[slice(*span)]
                for span in (*rendered.label_spans, *rendered.text_spans, rendered.query_span)
            ]
            assert read == ["bar", "foo", *answer, "love", "a two", "one"]
            assert [
                rendered.text[start:].split(template.separator or " ")[0]
                for start in rendered.starts
            ][:2] == [
                template.demonstration.format(
                    text=part_of_answer.text, label=part_of_answer.label
                ).split(template.separator or " ")[0]
                for part_of_answer in prompt.demonstrations
            ]
        assert template.gap == gap


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"demonstration": "{text} : foo"}, "must contain {label} once"),
        ({"demonstration": "{text} {text} : {label}"}, "must contain {text} once"),
        (
            {"demonstration": "Label: {label} Text: {text}"},
            "query must contain {text} once and then end in 'Label:'",
        ),
        (
            {"demonstration": "{label} : {text}", "query": "Label:"},
            "query must contain {text} once",
        ),
        (
            {"demonstration": "A: {label} {text}", "query": "{text} A: "},
            "once and then end in 'A:'",
        ),
        ({"demonstration": "{label} {text}", "query": "{text} : "}, "query='{text} :'"),
        ({"query": "{text} ->"}, "write query='{text} :'"),
        (
            {"demonstration": "{text} ->  {label}", "query": "{text} ->  "},
            "write query='{text} ->'",
        ),
        ({"demonstration": "{text}\n{label}", "query": "{text}"}, "write query='{text}\\n'"),
    ],
)
def test_templates_that_cannot_be_asked(fields, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        Template(**fields)
