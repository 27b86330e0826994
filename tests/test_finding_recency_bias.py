"""Recency bias: models with known answers, some of them without a recency bias, and queries exchanged by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_study import labels_of, tiny_study

import icl_lens as il
from experiments.findings.recency_bias import exchange_texts, query_effects
from experiments.framework.arrangements import orders_by_label
from experiments.framework.label_bias import gap_rows
from experiments.framework.study import Scores
from experiments.framework.tasks import PAPER_TASKS


@pytest.mark.parametrize("place", [-1, 0])
def test_two_orders_of_the_same_demonstrations(place):
    prompts = replace(PAPER_TASKS[0], demonstrations=3).prompts(40)
    for prompt, *both in zip(prompts, *orders_by_label(prompts, place, 0), strict=True):
        assert prompt in both
        for one, is_favored in zip(both, (True, False), strict=True):
            assert (labels_of(one)[place] == one.answer) == is_favored
            assert sorted(map(str, one.demonstrations)) == sorted(map(str, prompt.demonstrations))
            assert one.demonstrations[-1 - place] == prompt.demonstrations[-1 - place]  # the other end
        moved = [a != b for a, b in zip(both[0].demonstrations, both[1].demonstrations, strict=True)]
        assert (sum(moved), moved[place]) == (2, True)


@pytest.mark.parametrize(
    ("rule", "gap", "control"),
    [
        pytest.param(lambda labels: labels[-1], 100, 0, id="copies the last label"),
        pytest.param(lambda labels: labels[0], 0, 100, id="copies the first label"),
        pytest.param(lambda labels: "foo", 0, 0, id="one label"),
        pytest.param(lambda labels: max(("foo", "bar"), key=labels.count), 0, 0, id="counts"),
    ],
)
def test_models_that_look_at_labels_only(rule, gap, control):
    prompts = PAPER_TASKS[0].prompts(40)
    scores = []
    for place in (-1, 0):
        right = [
            np.array([[float(rule(labels_of(one)) == one.answer)] for one in some])
            for some in orders_by_label(prompts, place, 0)
        ]
        scores.append(tuple(Scores(2 * one - 1, one) for one in right))
    row = gap_rows(*scores, np.arange(40) // 2)[0]
    assert (100 * row.quantity, 100 * row.control) == (gap, control)
    assert (row.low <= 0 <= row.high) == (gap == control)


def test_one_text_is_exchanged_for_one_of_the_other_class():
    prompts = replace(PAPER_TASKS[0], demonstrations=3).prompts(20)
    classes = {(prompt, one.text): one.label for prompt in prompts for one in prompt.demonstrations}
    classes |= {(prompt, prompt.query): prompt.answer for prompt in prompts}
    texts = exchange_texts(prompts, 0)
    for row, prompt in enumerate(prompts):
        intact = texts.intact[row]
        assert sorted(labels_of(intact)) == ["bar", "bar", "foo", "foo"]
        others = [texts.query[row], texts.last[row], texts.before_last[row]]
        for other, expected in zip(others, (-1, 3, 2), strict=True):
            assert (labels_of(other), other.answer) == (labels_of(intact), intact.answer)
            pairs = enumerate(zip(texts_of(intact), texts_of(other), strict=True))
            changed = [(i, a, b) for i, (a, b) in pairs if a != b]
            assert [i for i, _, _ in changed] == [expected % 5]
            assert {classes[prompt, text] for text in changed[0][1:]} == {"foo", "bar"}


def texts_of(prompt):
    return [*(one.text for one in prompt.demonstrations), prompt.query]


def test_queries_by_hand(load_tiny, tmp_path, monkeypatch):
    """Heads get the other prompt's last query vector; drops count if the text had the answer's class, else gains."""
    monkeypatch.setattr("experiments.framework.study.MAX_ROWS", 1)
    model = load_tiny("llama_gqa")
    study, heads = tiny_study(model, tmp_path, n=4), [il.Head(1, 0), il.Head(2, 2)]
    texts = exchange_texts(study.prompts_with(3)[1], 0)
    ours, intact = query_effects(study, texts, heads), study.tokenize(texts.intact)
    before = il.metrics.label_log_odds(il.score(model, intact), intact.answer)
    for column, some in enumerate((texts.query, texts.last, texts.before_last)):
        with il.patch_heads(model, heads, study.tokenize(some), activation="q", positions="last"):
            after = il.metrics.label_log_odds(il.score(model, intact), intact.answer)
        follows = [column == 0 or labels_of(prompt)[-column] == prompt.answer for prompt in texts.intact]
        expected = (before - after) * (2 * torch.tensor(follows) - 1)
        assert ours[:, column] == pytest.approx(expected.numpy(), abs=1e-5)
    assert np.abs(ours).max() > 1e-3
