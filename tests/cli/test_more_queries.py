"""Where an interval includes zero, commands say how many queries there are and what gives more."""

import math
from types import SimpleNamespace

import pytest

import icl_lens as il
from icl_lens.cli.console import PlainConsole
from icl_lens.cli.more_queries import more_queries_sentence
from icl_lens.cli.options import TokenOptions
from icl_lens.cli.task_options import TaskOptions
from icl_lens.foundation.intervals import Interval

ANIMALS = il.WordTask("animal-country")


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("ends", "is_undecided"),
    [
        ((0.5, -0.1, 1.1), True),
        ((0.5, 0.0, 1.0), True),
        ((0.5, math.nan, math.nan), True),
        ((0.5, 0.1, 0.9), False),
        ((-0.5, -0.9, -0.1), False),
        ((0.0, 0.0, 0.0), False),
        ((math.nan, math.nan, math.nan), False),
    ],
)
def test_more_queries_help_an_interval_with_zero_inside_or_without_ends(ends, is_undecided):
    assert Interval(*ends).is_undecided == is_undecided


def test_a_number_of_prompts_with_fewer_queries_is_not_named():
    """Halves may have fewer queries of more prompts, if these are in both of them otherwise."""
    prompts = ANIMALS.prompts(8)
    of_more = {16: ANIMALS.prompts(16), 32: prompts}
    n_queries = len({prompt.query for prompt in of_more[16]})
    sentence = more_queries_sentence(ANIMALS, prompts, of_more.__getitem__, n=8)
    assert sentence.endswith(f": -n 16 has {n_queries}.")


@pytest.mark.parametrize(
    ("texts_per_class", "n", "ending"),
    [
        (30, 8, ": -n 32 has 30, and rows with other texts in {path} give more."),
        (10, 8, ". A larger -n has hardly more; rows with other texts in {path} give more."),
        (8, 20, ". A larger -n has no more; rows with other texts in {path} give more."),
    ],
)
def test_the_remedy_is_what_gives_more_queries(tmp_path, texts_per_class, n, ending):
    path = tmp_path / "texts.csv"
    rows = [f"text {number} of good,good" for number in range(texts_per_class)]
    rows += [f"text {number} of bad,bad" for number in range(texts_per_class)]
    path.write_text("\n".join(["text,label", *rows]))
    task = il.TextTask("texts", path)
    prompts = task.prompts(n)
    n_queries = min(n, texts_per_class)  # half of the rows
    sentence = more_queries_sentence(task, prompts, task.prompts, n=n)
    start = (
        f"These {n} prompts have {n_queries} different queries; intervals over more are narrower"
    )
    assert sentence == start + ending.format(path=path)


def test_a_bundled_task_that_has_shown_all_its_words_has_no_more():
    few, many = ANIMALS.prompts(8), ANIMALS.prompts(600)
    assert more_queries_sentence(ANIMALS, few, ANIMALS.prompts, n=8).endswith(
        "are narrower: -n 32 has 30."
    )
    n_queries = len({prompt.query for prompt in many})
    sentence = more_queries_sentence(ANIMALS, many, lambda n: many, n=600)
    assert f"have {n_queries} different queries" in sentence
    assert sentence.endswith("are narrower, but the task has no more.")


def test_a_check_of_other_prompts_than_those_measured_is_said_to_be(capsys, monkeypatch):
    behavior = SimpleNamespace(n_prompts=20)
    monkeypatch.setattr(TaskOptions, "behavior", lambda *_, **__: behavior)
    task, tokens = TaskOptions(task="animal-country"), TokenOptions()
    for measured, is_said in (
        (task.prompts(n=20, seed=0), False),
        (task.prompts(n=12, seed=1), True),
        (None, False),
    ):
        task.print_behavior(PlainConsole(), None, tokens, n=20, seed=0, measured=measured)
        assert ("numbers below are of another sample" in printed(capsys)) == is_said
