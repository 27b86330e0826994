"""Two lists of heads are compared with random lists, whose numbers are counted here draw by
draw.
"""

from itertools import combinations, product

import numpy as np
import pytest

import icl_lens as il

FIRST = ["L0H0", "L0H1", "L1H2", "L1H3"]


def every_draw(n_heads, first, second):
    """How many heads each pair of random lists shares: the first list stays, the second is each of
    its layers' sets.
    """
    layers = sorted({il.Head.parse(name).layer for name in second})
    layers_of_heads = [il.Head.parse(name).layer for name in second]
    sets = []
    for layer in layers:
        heads_of_layer = [il.Head(layer, head) for head in range(n_heads)]
        draws = combinations(heads_of_layer, layers_of_heads.count(layer))
        sets.append(list(map(set, draws)))
    fixed = {il.Head.parse(name) for name in first}
    return np.array([len(fixed & set().union(*draw)) for draw in product(*sets)])


@pytest.mark.parametrize(
    "second", [["L0H0", "L0H1", "L1H2"], ["L0H2", "L1H0", "L1H1"], ["L1H2", "L1H3", "L1H0"], FIRST]
)
def test_numbers_are_those_of_all_random_lists(second, gpt2):
    n_heads = gpt2.cfg.n_heads
    draws = every_draw(n_heads, FIRST, second)
    overlap = il.head_overlap(gpt2, FIRST, second)
    n_common = len(set(FIRST) & set(second))
    assert [str(head) for head in overlap.common] == [name for name in FIRST if name in second]
    assert overlap.expected == pytest.approx(draws.mean())
    assert overlap.p_value == pytest.approx((draws >= n_common).mean())
    lower, upper = overlap.interval
    assert (draws < lower).mean() <= 0.025 < (draws <= lower).mean()
    assert (draws > upper).mean() <= 0.025 < (draws >= upper).mean()


def test_lists_without_a_common_layer_share_nothing(gpt2):
    overlap = il.head_overlap(gpt2, ["L0H0", "L0H0"], ["L1H0"])
    assert (
        overlap.common,
        overlap.n_first,
        overlap.expected,
        overlap.interval,
        overlap.p_value,
    ) == (
        (),
        1,
        0,
        (0, 0),
        1,
    )
    assert overlap.finding == "0 heads are in both lists."


def test_what_is_printed_has_the_numbers_and_a_file_keeps_them(gpt2, tmp_path):
    overlap = il.head_overlap(gpt2, FIRST, ["L0H1", "L1H3", "L1H0"])
    assert overlap.finding == "2 heads are in both lists: L0H1 and L1H3."
    assert il.head_overlap(gpt2, FIRST, ["L0H1"]).finding == "1 head is in both lists: L0H1."
    low, high = overlap.interval
    printed = str(overlap)
    assert printed.startswith(overlap.finding)
    for text in (f"{overlap.expected:.2f}", f"{low} … {high}", f"{overlap.p_value:.2g}"):
        assert text in printed
    (row,) = overlap.to_frame().itertuples(index=False)
    assert (row.common, row.low, row.high, row.heads) == (2, low, high, "L0H1 L1H3")
    overlap.save(tmp_path / "overlap.json")
    assert il.results.load(tmp_path / "overlap.json") == overlap


@pytest.mark.parametrize(
    ("first", "message"), [([], "first must contain at least one head"), (["L9H9"], "head must be")]
)
def test_lists_that_are_no_heads_are_refused(first, message, gpt2):
    with pytest.raises(il.InputError, match=message):
        il.head_overlap(gpt2, first, ["L0H0"])
