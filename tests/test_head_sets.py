"""Sets of heads removed together, at the last position or at all: against whole passes and Hugging Face's modules."""

from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from passes import watched
from test_effects import ragged
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits import kv_cache
from icl_lens.engine import prefix_cache, restart, rows

EVERY = [(layer, head) for layer in range(3) for head in range(4)]
SETS = [[], [(2, 3)], [(0, 1), (0, 2), (2, 0)], [(1, 0), (2, 0)], [(1, 0)], [(1, 0), (2, 1)], EVERY]


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", pytest.param("bloom", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mode", "positions"), [("mean", "last"), ("mean", "all"), ("zero", "all")])
def test_rows_are_whole_passes(load_tiny, monkeypatch, name, mode, positions):
    """Also in the smallest pieces, and if keys and values cannot be shared; the sweep compares with Hugging Face."""
    model = load_tiny(name)
    batch = ragged(model)
    reference = batch if mode == "mean" else None
    options = {"positions": positions, "mode": mode, "reference": reference}
    found = il.score(model, batch, [[il.Ablate(heads, **options)] for heads in SETS])
    whole = []
    for heads in SETS:
        with il.ablate_heads(model, heads, **options) if heads else nullcontext():
            whole.append(il.score(model, batch))
    whole = torch.stack(whole, dim=1)
    assert_close(found, whole)
    monkeypatch.setattr(prefix_cache, "ROW_BYTES", 1)
    monkeypatch.setattr(prefix_cache, "KEY_BYTES", 1)
    monkeypatch.setattr(kv_cache, "SCORE_BYTES", 1)
    monkeypatch.setattr(restart, "STREAM_BYTES", 1)
    monkeypatch.setattr(restart, "MIN_PASS_TOKENS", 1)
    assert_close(il.score(model, batch, [[il.Ablate(heads, **options)] for heads in SETS]), whole)
    if positions == "last":

        def unsupported(*_):
            raise prefix_cache.PrefixCacheUnsupported("tried")

        monkeypatch.setattr(rows, "run_rows", unsupported)
        assert_close(il.score(model, batch, [[il.Ablate(heads, **options)] for heads in SETS]), whole)


def attention_run(model, ran):
    """Collect (layer, number of rows) of every attention that runs in the block."""
    attention = [block.attn for block in model.blocks]
    return watched(lambda layer, x: ran.append((layer, len(x))), *attention)


@pytest.mark.parametrize("sets", [*permutations([[(1, 0)], [(0, 2)], [(1, 0), (2, 1)]])])
def test_rows_enter_where_their_sets_begin(gpt2, gpt2_batch, sets):
    """One set begins in layer 0, two share an edit in layer 1 and split in layer 2; each prompt has an unedited row."""
    ran = []
    with attention_run(gpt2, ran):
        il.score(gpt2, gpt2_batch, [[il.Ablate(heads, positions="last")] for heads in sets])
    assert ran[-3:] == [(0, 6), (1, 9), (2, 12)]


def test_at_all_positions_a_pass_begins_where_its_sets_do(gpt2, gpt2_batch):
    """Blocks before the first layer that a set edits are not run; three prompts and two sets share a pass."""
    ran = []
    with attention_run(gpt2, ran):
        il.score(gpt2, gpt2_batch, [[il.Ablate([(1, 0)])], [], [il.Ablate([(1, 3), (2, 1)])]])
    assert ran[-5:] == [(0, 3), (1, 3), (2, 3), (1, 6), (2, 6)]
