"""Scores carry their labels, errors give advice that works, and results print as tables."""

import copy
import pickle

import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli.spelling import shell_spelling
from icl_lens.errors import InputError
from icl_lens.reading.last_logits import last_log_probs

SHOWN = [("love", "yes"), ("sad", "no"), ("happy", "yes"), ("bad", "no")]
OTHER = {"yes": "no", "no": "yes"}


def prompts_of(pairs, **options):
    """Return two prompts with these demonstrations, in this order and reversed."""
    demonstrations = [il.Demonstration(*pair) for pair in pairs]
    return [
        il.Prompt(order, "good", "yes", **options)
        for order in (demonstrations, demonstrations[::-1])
    ]


def test_a_set_of_labels_has_one_order_in_every_batch(gpt2):
    exchanged = [(text, OTHER[label]) for text, label in SHOWN]
    batches = [il.tokenize(gpt2, prompts_of(pairs)) for pairs in (SHOWN, exchanged, SHOWN[::-1])]
    assert {batch.labels for batch in batches} == {("no", "yes")}
    in_order, two = (il.score(gpt2, batch) for batch in batches[:2])
    yes = gpt2.tokenizer.convert_tokens_to_ids("yes")
    expected = last_log_probs(gpt2, batches[0])[:, yes] - last_log_probs(gpt2, batches[1])[:, yes]
    assert_close((in_order - two)[:, in_order.labels.index("yes")], expected)
    tokenized = il.tokenize(gpt2, prompts_of(SHOWN, labels=("yes", "no")))
    assert tokenized.labels == ("yes", "no"), "an order that is given is kept"
    assert il.tokenize(gpt2, prompts_of(SHOWN), labels=("yes", "no")).labels == ("yes", "no")
    numbers = [il.Prompt([il.Demonstration("a", str(n)) for n in (10, 9, 2)], "b")]
    assert numbers[0].labels == ("2", "9", "10")


def test_columns_of_other_words_are_not_subtracted(gpt2):
    first, second = (
        il.score(gpt2, il.tokenize(gpt2, prompts_of(SHOWN), labels=labels))
        for labels in (("yes", "no"), ("no", "yes"))
    )
    for subtract in (
        lambda: first - second,
        lambda: first.exp() - second,
        lambda: first.mean(0) - second.mean(0),
        lambda: first[:1] - second[1:],
        lambda: torch.cat([first, second]),
    ):
        with pytest.raises(
            InputError,
            match=r"same labels in the same order, got .*'yes', 'no'.* and .*'no', 'yes'",
        ):
            subtract()
    same = second[:, [second.labels.index(label) for label in first.labels]]
    assert_close(first - same, torch.zeros(2, 2))
    assert type(first.argmax(-1)) is type(first[:, 0]) is torch.Tensor
    frame = first.to_frame()
    assert frame.columns.tolist() == ["yes", "no"]
    assert frame["no"].tolist() == pytest.approx(first[:, 1].tolist())


def test_every_function_that_scores_labels_names_them(gpt2):
    batch, head = il.tokenize(gpt2, prompts_of(SHOWN)), il.Head(1, 2)
    acts = il.capture(gpt2, batch)
    for scores in (
        il.score(gpt2, batch),
        acts.label_log_probs,
        il.whole_label_log_probs(gpt2, batch),
        il.score(gpt2, batch, [[il.Ablate([head])]]),
        il.score(gpt2, batch, [[il.Patch([head], batch, activation="z")]]),
        il.score(gpt2, batch, [[]]),
        il.score(gpt2, batch, [il.debias_edits(batch, [head], majority=1.0)]),
    ):
        assert scores.labels == ("no", "yes")
        assert len(scores.to_frame()) == 2


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("pass prepend_bos=True or False (--bos or --no-bos)", "pass --bos or --no-bos"),
        ("omit prepend_bos (--bos)", "omit --bos"),
        (
            "write labels={'0': 'a', '1': 'b'} (--labels '0=a,1=b') or",
            "write --labels '0=a,1=b' or",
        ),
        ("or pass a local copy with path=", "or pass a local copy with --path"),
        (
            "there is no file 'path=x'; labels must be 2 words",
            "there is no file 'path=x'; labels must be 2 words",
        ),
    ],
)
def test_commands_speak_the_words_of_the_shell(python, shell):
    assert shell_spelling(python) == shell


def test_copies_and_files_of_scores_keep_their_labels(gpt2, tmp_path):
    scores = il.score(gpt2, il.tokenize(gpt2, prompts_of(SHOWN)))
    torch.save(scores, tmp_path / "scores.pt")
    shared = copy.deepcopy([scores, scores])
    assert shared[0] is shared[1]
    assert shared[0].data_ptr() != scores.data_ptr()
    for same in (
        shared[0],
        copy.copy(scores),
        pickle.loads(pickle.dumps(scores)),
        torch.load(tmp_path / "scores.pt"),
    ):
        assert same.labels == ("no", "yes")
        assert torch.equal(same, scores)
