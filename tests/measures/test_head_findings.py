"""The first sentence about heads follows from the numbers beside it, for numbers of all kinds."""

import math

import pandas as pd
import pytest

from icl_lens.foundation.intervals import Interval, beside_random_sets
from icl_lens.measures.head_findings import (
    heads_in_words,
    heads_matter,
    list_finding,
    removal_finding,
)
from icl_lens.result.number_format import decimal, interval_text, signed, whole_percent

REMOVED = {
    "unit": "nats of log-odds",
    "where": "zeroed at the last position",
    "random": "random heads",
}


@pytest.mark.parametrize(
    ("difference", "says"),
    [
        (Interval(1.0, 0.4, 1.6), "L5H0 and L4H1 matter: jointly zeroed"),
        (
            Interval(1.0, -0.1, 2.1),
            "It is not shown that L5H0 and L4H1 matter more than random heads: jointly zeroed",
        ),
        (
            Interval(-1.0, -1.6, -0.4),
            "L5H0 and L4H1 cost the answer less than random heads do: jointly zeroed",
        ),
        (
            Interval(-0.5, -1.6, 0.4),
            "It is not shown that L5H0 and L4H1 matter more than random heads: jointly zeroed",
        ),
        (Interval(0.0, 0.0, 0.0), "It is not shown that"),
    ],
)
def test_heads_matter_if_the_interval_is_above_zero(difference, says):
    text = removal_finding(["L5H0", "L4H1"], difference, lost=1.2, n_random_sets=10, **REMOVED)
    assert text.startswith(says)
    assert "they cost the answer +1.20 nats of log-odds" in text
    compared = f"{interval_text(*difference)} more than random heads do"
    if difference.value < 0:
        compared = f"and the difference from random heads is {interval_text(*difference)}"
    assert text.count(compared) == 1
    options = {"lost": 1.2, "n_random_sets": 10, "over": "random sets", **REMOVED}
    over_sets = interval_text(*difference)[:-1] + " over random sets)"
    assert over_sets in removal_finding(["L5H0"], difference, **options)
    assert ("which includes zero" in text) == (difference.low <= 0 <= difference.high)


@pytest.mark.parametrize(
    ("lost", "gain"),
    [
        (0.8, " With random heads removed instead, the answer gains +0.20."),
        (1.2, ""),
        (0.9999, ""),
        (-0.1, ""),
    ],
)
def test_a_difference_above_the_loss_is_explained_by_what_random_heads_gain(lost, gain):
    for difference in (Interval(1.0, 0.4, 1.6), Interval(1.0, -0.1, 2.1)):
        text = removal_finding(["L5H0"], difference, lost=lost, n_random_sets=10, **REMOVED)
        assert text.endswith(gain)
        assert ("removed instead, the answer gains" in text) == bool(gain)


@pytest.mark.parametrize(
    ("n_sets", "reason"),
    [(2, "at least 3 random sets, got 2"), (0, "got 0"), (10, "at least 4 different queries")],
)
def test_without_an_interval_the_reason_is_given(n_sets, reason):
    difference = Interval(1.0, math.nan, math.nan)
    text = removal_finding(["L5H0"], difference, lost=1.0, n_random_sets=n_sets, **REMOVED)
    assert text.startswith(
        "L5H0: zeroed at the last position, it costs the answer +1.00 nats of log-odds. "
    )
    assert "It is not compared with random heads" in text
    two = removal_finding(["L5H0", "L4H1"], difference, lost=1.0, n_random_sets=n_sets, **REMOVED)
    assert "They are not compared with random heads" in two
    assert reason in text
    assert "matter" not in text


def table_of(ends, effects=()):
    table = pd.DataFrame(ends, columns=["low", "high"]).assign(
        name=[f"L{row}H0" for row in range(len(ends))]
    )
    return (
        table.assign(**pd.DataFrame(effects, columns=["effect_low", "effect_high"]))
        if effects
        else table
    )


def test_a_list_counts_heads_whose_interval_is_above_zero():
    ends = [(0.1, 0.3), (0.01, 0.2), (-0.1, 0.2), (-0.3, -0.1)]
    several = list_finding(table_of(ends), 3, "contrast", n_heads=200)
    assert several.startswith(
        "2 of the 3 heads in the table have a mean contrast above zero (whole 95% interval)."
    )
    assert "The table lists the 3 of all 200 heads whose mean is largest." in several
    assert list_finding(table_of(ends[1:]), 3, "effect", n_heads=200).startswith(
        "1 of the 3 heads in the table has a"
    )
    none = list_finding(table_of(ends[2:]), 2, "contrast", n_heads=200)
    assert none.startswith(
        "None of the 2 heads in the table has a mean contrast above zero (whole 95% interval)."
    )
    assert "not shown that any of them helps" in none
    for text in (several, none):
        assert "icl-lens ablate (il.ablate_with_controls) measures it" in text
    joint = list_finding(
        table_of([(0.1, 0.3)]), 1, "contrast", n_heads=200, joint_removal="The joint test."
    )
    assert joint.endswith("The joint test.")
    assert joint.startswith(
        "The head in the table has a mean contrast above zero (whole 95% interval). Its mean is the"
    )
    assert list_finding(table_of([(-0.1, 0.3)]), 1, "effect", n_heads=200).startswith(
        "It is not shown that the head in the table has a mean effect above zero (whole 95% interval). "
        "It is not shown that zeroing it alone costs the answer anything."
    )


@pytest.mark.parametrize(
    ("n_heads", "by_chance"),
    [
        (2, "fewer than 1 would"),
        (29, "fewer than 1 would"),
        (48, "about 1 would"),
        (270, "about 7 would"),
    ],
)
def test_a_list_says_how_many_of_all_heads_chance_puts_above_zero(n_heads, by_chance):
    """1 of 40 intervals lies above zero by chance."""
    text = list_finding(table_of([(0.1, 0.3), (-0.1, 0.2)]), 2, "contrast", n_heads=n_heads)
    assert f"heads, 1 is above zero; if no head did anything, {by_chance} be by chance." in text
    several = list_finding(table_of([(0.1, 0.3)] * 3), 2, "contrast", n_heads=n_heads)
    assert (
        f"Of all {n_heads} heads, 3 are above zero; if no" in several
    )  # also those that are not listed
    assert ("The table lists all heads." in text) == (n_heads == 2)
    assert "by chance" not in list_finding(
        table_of([(-0.1, 0.3)] * 2), 2, "contrast", n_heads=n_heads
    )


def test_a_list_counts_heads_whose_removal_helps():
    effects = [(0.2, 0.4), (-0.1, 0.1), (-0.9, -0.2), (-0.8, -0.3)]
    text = list_finding(table_of([(0.1, 0.3)] * 4, effects), 4, "contrast", n_heads=48)
    assert (
        "makes the answer less likely for L0H0 and more likely for L2H0 and L3H0; for the other one, the"
        in text
    )
    unclear = list_finding(table_of([(0.1, 0.3)] * 2, [(-0.1, 0.1)] * 2), 2, "contrast", n_heads=48)
    assert (
        "makes the answer less likely is not shown for any of them: each 95% interval includes zero."
        in unclear
    )
    many = list_finding(table_of([(0.1, 0.3)] * 8, [(0.2, 0.4)] * 8), 8, "contrast", n_heads=48)
    assert many.startswith("All 8 heads in the table have a mean contrast above zero")
    assert "makes the answer less likely for 8 of them and more likely for none. " in many


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((0.2, 0.4), "Zeroing it alone makes the answer less likely"),
        ((-0.4, -0.2), "Zeroing it alone makes the answer more likely"),
        ((-0.1, 0.1), "Whether zeroing it alone makes the answer less likely is not shown"),
    ],
)
def test_the_removal_of_a_single_head_is_told_by_its_interval(ends, says):
    assert says in list_finding(table_of([(0.1, 0.3)], [ends]), 1, "contrast", n_heads=48)


def test_a_single_query_shows_nothing():
    text = list_finding(table_of([(math.nan, math.nan)] * 2), 2, "effect", n_heads=48)
    assert text.startswith("Nothing is shown about the 2 heads in the table")
    assert list_finding(pd.DataFrame({"effect": [1.0]}), 1, "effect", n_heads=48).startswith(
        "Nothing is shown"
    )


def test_a_value_matters_if_it_is_outside_of_what_random_sets_have():
    """A mean over many sets is known well, but another set may still have the value."""
    sets = [0.0, 0.2, -0.2, 0.1, -0.1] * 4
    assert beside_random_sets(0.6, sets).excludes_zero
    assert not beside_random_sets(0.2, sets).excludes_zero
    assert beside_random_sets(-0.6, sets).high < 0
    assert math.isnan(beside_random_sets(0.6, sets[:2]).low)
    assert math.isnan(beside_random_sets(0.6, []).value)


def test_no_number_is_a_negative_zero_and_small_ones_have_digits():
    assert signed(-0.0001, 2) == "+0.00"
    assert interval_text(-0.001, -0.004, -0.0003) == "−0.0010 (95% interval −0.0040 … −0.0003)"
    assert interval_text(-1.26, -30.0, 20.0) == "−1.26 (95% interval −30.00 … +20.00)"
    assert interval_text(0.021, -0.057, 0.111, times=100) == "+2.1 (95% interval −5.7 … +11.1)"
    assert interval_text(0.5) == "+0.50"
    assert [decimal(value, 2) for value in (-0.001, -0.5, 0.5, math.nan)] == [
        "0.00",
        "−0.50",
        "0.50",
        "–",
    ]
    assert [whole_percent(value) for value in (-0.001, -0.031, 0.97, math.nan)] == [
        "0%",
        "−3%",
        "97%",
        "–",
    ]
    assert interval_text(0.0, 0.0, 0.0) == "+0.00 (95% interval +0.00 … +0.00)"


def test_many_heads_are_counted_instead_of_named():
    assert heads_in_words(["L0H1"]) == "L0H1"
    assert heads_in_words(["L0H1", "L0H2", "L0H3"]) == "L0H1, L0H2 and L0H3"
    assert heads_in_words([f"L0H{i}" for i in range(7)]) == "the 7 heads"


@pytest.mark.parametrize(
    ("score", "is_suggested"), [("contrast", True), ("increase", True), ("effect", False)]
)
def test_lists_without_a_head_that_adds_name_the_score_that_removes_heads(score, is_suggested):
    none_above = pd.DataFrame({"low": [-0.1, -0.2], "high": [0.1, 0.2]})
    text = list_finding(none_above, 2, score, n_heads=40)
    assert ("--by effect (il.locate with by='effect')" in text) == is_suggested
    above = pd.DataFrame({"low": [0.1, -0.2], "high": [0.3, 0.2]})
    assert "--by effect" not in list_finding(above, 2, score, n_heads=40)


@pytest.mark.parametrize(
    ("difference", "says", "ends"),
    [
        (Interval(0.5, 0.2, 0.8), "It is not shown that the answer needs L5H0", "."),
        (
            Interval(-0.3, -0.7, 0.1),
            "It is not shown that L5H0 matters more than random heads",
            ", which includes zero.",
        ),
        (Interval(-0.3, -0.5, -0.1), "L5H0 costs the answer less than random heads do", "."),
    ],
)
def test_heads_whose_removal_helps_take_nothing_from_the_answer(difference, says, ends):
    """Not even if removing random heads helps more."""
    text = removal_finding(["L5H0"], difference, lost=-0.5, n_random_sets=10, **REMOVED)
    assert text == (
        f"{says}: zeroed at the last position, it takes nothing from the answer, which gains +0.50 "
        f"nats of log-odds, and the difference from random heads is {interval_text(*difference)}{ends}"
    )


def test_a_gain_that_rounds_to_zero_is_no_gain():
    for lost in (-0.001, 0.001):
        text = removal_finding(
            ["L5H0"], Interval(0.1, -0.2, 0.4), lost=lost, n_random_sets=10, **REMOVED
        )
        assert "it costs the answer +0.00 nats of log-odds" in text


@pytest.mark.parametrize(("lost", "matters"), [(-0.2, False), (0.004, False), (0.02, True)])
def test_heads_matter_only_if_the_answer_loses_something_without_them(lost, matters):
    """Not if only random heads help: a difference from them is no loss."""
    difference = Interval(0.5, 0.2, 0.8)
    assert heads_matter(lost, difference) == matters
    text = removal_finding(["L5H0"], difference, lost=lost, n_random_sets=10, **REMOVED)
    assert text.startswith("L5H0 matters: ") == matters
    assert text.startswith("It is not shown that the answer needs L5H0") != matters


@pytest.mark.parametrize(
    ("effects", "is_denied"),
    [([(0.2, 0.4), (-0.1, 0.1)], False), ([(-0.2, 0.4), (-0.3, -0.1)], True)],
)
def test_a_list_does_not_deny_that_a_head_helps_whose_removal_costs_the_answer(effects, is_denied):
    text = list_finding(table_of([(-0.1, 0.3)] * 2, effects), 2, "contrast", n_heads=48)
    assert text.startswith("None of the 2 heads in the table has a mean contrast above zero")
    assert ("It is not shown that any of them helps the answer." in text) == is_denied
    assert ("--by effect" in text) == is_denied
    assert ("less likely for L0H0" in text) != is_denied
