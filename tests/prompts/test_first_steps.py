"""What newcomers write first: pairs, names and templates in their shortest form, an answer without
its space.
"""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

import icl_lens as il
from icl_lens.errors import InputError
from icl_lens.reading.answer_spacing import other_spacing, warn_of_answer_spacing

PAIRS = [("love", "bar"), ("two", "foo")]


@pytest.mark.usefixtures("no_type_checks")
def test_pairs_are_demonstrations():
    prompt = il.Prompt(PAIRS, query="one", answer="foo")
    assert prompt == il.Prompt(
        [il.Demonstration(*pair) for pair in PAIRS], query="one", answer="foo"
    )
    with pytest.raises(
        InputError, match=r"must be a pair \(text, label\) or an il.Demonstration, got 'love'"
    ):
        il.Prompt(["love", "bar"], query="one")


def test_a_template_derives_its_query():
    for demonstration, query in (
        ("{text} -> {label}", "{text} ->"),
        ("Q: {text}\nA: {label}.", "Q: {text}\nA:"),
    ):
        template = il.Template(demonstration)
        assert template.query == query
        assert template == il.Template(demonstration, query)
    assert il.Template() == il.Template("{text} : {label}", "{text} :")
    with pytest.raises(InputError, match="query must contain"):
        il.Template("{label}: {text}")


def test_a_head_is_made_by_its_name():
    assert il.Head("L3H1") == il.Head(3, 1) == (3, 1)
    assert [il.Head("l3h1")] == [il.Head.parse("3H1")]
    head = il.Head(3, 1)
    for copied_head in (
        pickle.loads(pickle.dumps(head)),
        copy.deepcopy(head),
        head._replace(layer=3),
    ):
        assert (copied_head, type(copied_head), str(copied_head)) == (head, il.Head, "L3H1")
    with pytest.raises(InputError, match="invalid head 'three'"):
        il.Head("three")


def test_a_printed_prompt_has_no_escape_characters():
    prompt = il.Prompt([("a \x1b[2Jred", "b\x07")], query="\u202ec")
    assert str(prompt) == "a \\x1b[2Jred : b\\x07 \\u202ec :"
    assert str(il.Prompt([("a\tb\nc", "d")], query="e")) == "a\tb\nc : d e :"


def test_scores_print_their_labels(gpt2):
    scores = il.score(gpt2, il.tokenize(gpt2, [il.Prompt(PAIRS, query="one")]))
    plain = repr(scores.as_subclass(torch.Tensor))
    assert str(scores) == f"{plain[:-1]}, labels=('bar', 'foo'))"
    many = il.results.LabelScores.from_tensor(torch.zeros(1, 30), [str(i) for i in range(30)])
    assert "'11', … 30 labels))" in str(many)


def test_accuracy_takes_label_words(gpt2):
    batch = il.tokenize(gpt2, [il.Prompt(PAIRS, query=query) for query in ("one", "like", "nine")])
    scores = il.score(gpt2, batch)
    for words in (["foo", "bar", "foo"], ("bar", "bar", "bar")):
        indices = torch.tensor([batch.labels.index(word) for word in words])
        assert il.metrics.accuracy(scores, words) == il.metrics.accuracy(scores, indices)
    with pytest.raises(InputError, match=r"labels of the scores \('bar', 'foo'\), got 'baz'"):
        il.metrics.accuracy(scores, ["foo", "baz", "foo"])
    with pytest.raises(InputError, match="these scores carry no labels"):
        il.metrics.accuracy(torch.zeros(3, 2), ["foo", "bar", "foo"])


def test_a_batch_lets_each_prompt_choose_among_its_own_labels():
    """A label that only other prompts have makes no answer wrong, however probable it is."""
    is_choice = torch.tensor([[True, True, False], [False, True, True]])
    batch = SimpleNamespace(answer=torch.tensor([0, 1]), label_mask=is_choice)
    scores = torch.tensor([[-1.0, -2.0, -0.1], [-0.1, -2.0, -1.0]])
    assert il.metrics.is_correct(scores, batch).tolist() == [True, False]
    assert il.metrics.is_correct(scores, batch.answer).tolist() == [False, False]
    log_odds = il.metrics.label_log_odds(scores, batch)
    torch.testing.assert_close(log_odds, torch.tensor([1.0, -1.0]))


class Words:
    """A vocabulary with a word with and without its space, and one without another form."""

    names = ("<unk>", "Paris", "\u0120Paris", "\u0120Lima", "Rome", "\u2581Rome")
    unk_token_id = 0

    def convert_ids_to_tokens(self, token):
        return self.names[token]

    def convert_tokens_to_ids(self, name):
        return self.names.index(name) if name in self.names else 0

    def decode(self, ids):
        return (
            "".join(self.names[token] for token in ids)
            .replace("\u0120", " ")
            .replace("\u2581", " ")
        )


def test_tokens_have_another_form_with_or_without_their_space():
    assert [other_spacing(Words(), token) for token in (-1, 0, 1, 2, 3, 4, 5)] == [
        -1,
        -1,
        2,
        1,
        -1,
        5,
        4,
    ]


@pytest.mark.parametrize(
    ("answer", "bare", "spaced", "is_warned"),
    [
        (1, 0.0005, 0.77, True),
        (2, 0.0005, 0.77, False),
        (2, 0.9, 0.01, True),
        (1, 0.001, 0.04, False),
        (1, 0.1, 0.8, False),
    ],
)
def test_an_answer_whose_other_form_is_likely_is_warned_of(gpt2, answer, bare, spaced, is_warned):
    """It is far more probable, and the probability is considerable."""
    batch = il.PromptBatch.from_tokens([[3, 4]], model=gpt2, targets=answer)
    probability = {1: bare, 2: spaced}
    log_probs_of = lambda ids: torch.tensor([probability[token] for token in ids.tolist()]).log()  # noqa: E731
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_answer_spacing(Words(), batch, log_probs_of)
    assert len(seen) == is_warned
    if is_warned:
        likely = " Paris" if answer == 1 else "Paris"
        assert (
            f"and {likely!r}, which differs in the space before it, {max(bare, spaced):.1%}"
            in str(seen[0].message)
        )
        assert f"pass answer={likely!r}" in str(seen[0].message)


def test_a_text_far_beyond_the_context_is_refused_before_all_of_it_is_tokenized(gpt2, monkeypatch):
    lengths = []
    tokenizer = gpt2.tokenizer
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, text, **_: lengths.append(len(text)) or {"input_ids": text.split()},
    )
    words = "love " * 200_000
    for prompt in (il.Text(words), il.Prompt(PAIRS, query=words)):
        lengths.clear()
        with pytest.raises(InputError, match="tokens, more than the model's context length of"):
            il.tokenize(gpt2, prompt)
        assert sum(lengths) <= 8 * gpt2.cfg.n_ctx
