"""Sets of heads removed together: which rows and layers run. Their numbers: the sweep."""

from itertools import permutations

import pytest
from passes import watched

import icl_lens as il


def attention_run(model, ran):
    """Collect (layer, number of rows) of every attention that runs in the block."""
    attention = [block.attn for block in model.blocks]
    return watched(lambda layer, x: ran.append((layer, len(x))), *attention)


@pytest.mark.parametrize("sets", [*permutations([[(1, 0)], [(0, 2)], [(1, 0), (2, 1)]])])
def test_rows_enter_where_their_sets_begin(gpt2, gpt2_batch, sets):
    """One set begins in layer 0, two share an edit in layer 1 and split in layer 2; each prompt has
    an unedited row.
    """
    ran = []
    with attention_run(gpt2, ran):
        il.score(gpt2, gpt2_batch, [[il.Ablate(heads, positions="last")] for heads in sets])
    assert ran[-3:] == [(0, 6), (1, 9), (2, 12)]


def test_at_all_positions_a_pass_begins_where_its_sets_do(gpt2, gpt2_batch):
    """Blocks before the first layer that a set edits are not run; three prompts and two sets share
    a pass.
    """
    ran = []
    with attention_run(gpt2, ran):
        il.score(gpt2, gpt2_batch, [[il.Ablate([(1, 0)])], [], [il.Ablate([(1, 3), (2, 1)])]])
    assert ran[-5:] == [(0, 3), (1, 3), (2, 3), (1, 6), (2, 6)]
