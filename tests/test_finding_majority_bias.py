"""Majority bias: models with known answers, and softmax's prediction by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from shared import PROMPTS
from tiny_study import labels_of

import icl_lens as il
from experiments.findings.majority_bias import FINDING
from experiments.framework.arrangements import prompts_by_frequency, without_last_true
from experiments.framework.label_attention import attention_by_class, last_true_tokens
from experiments.framework.label_bias import gap_rows
from experiments.framework.study import Scores, Study
from experiments.framework.tasks import PAPER_TASKS

KINDS = ("majority", "minority", "majority balanced", "minority balanced")


def drawn(shown, n=40):
    """The prompts that `measure` takes its demonstrations from."""
    return replace(PAPER_TASKS[0], demonstrations=2 * shown - max(1, shown // 2)).prompts(n)


@pytest.mark.parametrize("shown", [2, 3, 8])
def test_prompts_differ_in_frequency_only(shown):
    prompts, few = drawn(shown), max(1, shown // 2)
    found = prompts_by_frequency(prompts, shown, 0)
    for kind, count in zip(KINDS, (2 * shown - few, few, shown, shown), strict=True):
        for row, (prompt, one) in enumerate(zip(prompts, found[kind], strict=True)):
            is_own = [label == one.answer for label in labels_of(one)]
            assert (sum(is_own), len(is_own), is_own[-1]) == (count, 2 * shown, row % 2 == 0)
            assert (one.query, one.answer) == (prompt.query, prompt.answer)
            assert len({*one.demonstrations} & {*prompt.demonstrations}) == 2 * shown  # none is shown twice
            uneven = labels_of(found[kind.split()[0]][row])
            assert (uneven[0], uneven[-1]) == (labels_of(one)[0], labels_of(one)[-1])
    if shown == 2:  # in random order
        orders = {tuple(label == one.answer for label in labels_of(one)) for one in found["majority"]}
        assert len(orders) == 4


@pytest.mark.parametrize(
    ("rule", "gap", "difference"),
    [
        pytest.param(lambda labels: labels[-1], 0, 0, id="copies the last label"),
        pytest.param(lambda labels: "foo", 0, 0, id="one label"),
        pytest.param(lambda labels: labels[0], None, 0, id="copies the first label"),
        pytest.param(lambda labels: max(("foo", "bar"), key=labels.count), 100, None, id="counts"),
    ],
)
def test_models_that_look_at_labels_only(rule, gap, difference):
    found = prompts_by_frequency(drawn(2), 2, 0)
    right = [np.array([[float(rule(labels_of(one)) == one.answer)] for one in found[kind]]) for kind in KINDS]
    scores = [Scores(2 * one - 1, one) for one in right]
    row = gap_rows((scores[0], scores[1]), (scores[2], scores[3]), np.arange(40) // 2)[0]
    assert gap is None or 100 * row.quantity == gap
    assert difference is None or 100 * (row.quantity - row.control) == difference
    assert (row.low > 0.5) == (gap == 100)  # only the model that counts labels differs from the control
    assert gap is not None or row.quantity > 0.3  # the quantity alone would not show that


def test_prompts_without_a_majority_are_refused(icl_mini):
    with pytest.raises(il.InputError, match="one demonstration of each class"):
        FINDING.measure(Study(icl_mini, replace(PAPER_TASKS[1], demonstrations=1), 12))


def test_no_query_is_in_both_halves(icl_mini):
    study = Study(icl_mini, PAPER_TASKS[1], 20)
    for same_length in (False, True):
        halves = [{one.query for one in half} for half in study.prompts_with(3, same_length=same_length)]
        for own, other in ((0, 1), (1, 0)):
            assert halves[own]
            assert not halves[own] & (halves[other] | {one.query for one in study.halves()[other].prompts})


def test_what_softmax_alone_predicts(gpt2):
    """`last_true_tokens` marks what the shorter prompt lacks; attention is the softmax of the other scores."""
    prompts = [PROMPTS[0], il.Prompt.parse("two : foo one : bar cat : foo dog : bar hate :", answer="bar")]
    whole = il.tokenize(gpt2, prompts, labels=("foo", "bar"))
    fewer = il.tokenize(gpt2, [without_last_true(prompt) for prompt in prompts], labels=("foo", "bar"))
    gone, acts = last_true_tokens(whole), il.capture(gpt2, whole)
    for row, prompt in enumerate(prompts):
        assert whole.tokens[row][~gone[row]].tolist() == fewer.tokens[row].tolist()
        scores = acts.pattern[row].double().log()
        for place in gone[row].nonzero().flatten().tolist():
            scores[..., place] = -torch.inf
        by_hand = torch.zeros(*scores.shape[:2], 2, dtype=torch.float64)
        for label, place in zip(labels_of(prompt), whole.label_positions[row].tolist(), strict=True):
            by_hand[..., int(label != prompt.answer)] += scores.softmax(-1)[..., place]
        torch.testing.assert_close(attention_by_class(acts, gone)[row].double(), by_hand, atol=1e-6, rtol=0)
