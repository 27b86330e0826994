"""Several lists of heads removed in one run cost what each of them costs when it is removed alone."""

import pytest

import icl_lens as il
from icl_lens.measures.joint_removal import ListRemoval, remove_lists
from icl_lens.models.view import ModelView

LISTS = {"late": [il.Head(5, 0), il.Head(4, 1)], "early": [il.Head(0, 2)]}


def test_lists_cost_what_ablation_with_controls_says(icl_mini):
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=8))
    removals = remove_lists(ModelView.of(icl_mini), batch, LISTS, n_random=3, seed=1)
    assert list(removals) == list(LISTS)
    for name, heads in LISTS.items():
        alone = il.ablate_with_controls(
            icl_mini, batch, heads, n_random=3, all_layers=False, seed=1
        )
        removal, expected = removals[name], ListRemoval.from_ablation(alone)
        assert removal.heads == tuple(heads)
        assert removal.unit == "nats"
        assert removal.intact == pytest.approx(
            alone.per_prompt("no ablation", "log_odds").mean(), abs=1e-5
        )
        for field in ("lost", "lost_by_random", "difference"):
            ours, theirs = tuple(getattr(removal, field)), tuple(getattr(expected, field))
            assert ours == pytest.approx(theirs, abs=1e-4), (name, field)
        lost = removal.intact - alone.per_prompt("heads", "log_odds").mean()
        assert removal.lost.value == pytest.approx(lost, abs=1e-5)
        assert removal.difference.value == pytest.approx(
            removal.lost.value - removal.lost_by_random.value, abs=1e-5
        )
    assert abs(removals["late"].lost.value - removals["early"].lost.value) > 0.01
