"""Interventions together: in any order, on two models, in generation; none leaves a trace. Their
numbers: the sweep.
"""

import copy
import warnings
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from passes import remains, watched
from sweep import OTHERS, PROMPTS, tokenized
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits import edit_checks as check
from icl_lens.edits.one_token_rows.run_rows import RowEdits
from icl_lens.edits.recomputed_patterns import recompute_pattern
from icl_lens.reading.head_parts import head_values
from icl_lens.reading.last_logits import last_log_probs

HEADS = [il.Head(0, 1), il.Head(1, 0), il.Head(1, 3), il.Head(2, 2)]
# In float64, so that a difference is the edit and not rounding.
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def run(load_tiny):
    """(model, batch, other prompts of the same lengths) of a family."""

    @cache
    def get(name):
        model = load_tiny(name, dtype=torch.float64)
        return model, *(tokenized(model, prompts) for prompts in (PROMPTS, OTHERS))

    return get


def test_one_source_serves_all_rows(run):
    model, batch, donors = run("gpt2")
    same = batch[[0, 0]]
    with il.patch_heads(model, HEADS, donors[0], activation="v"):
        with_two_donors = last_log_probs(model, same)
    with il.patch_heads(model, HEADS, donors[[0, 0]], activation="v"):
        assert_close(last_log_probs(model, same), with_two_donors)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_capture_sees_the_edited_attention(run, name):
    model, batch, _ = run(name)
    hidden = torch.ones(len(batch), batch.label_positions.shape[1])
    hidden[:, 1] = 0
    with il.edited(model, il.Reweight(HEADS, hidden, renormalize=True), batch=batch):
        acts = il.capture(model, batch)
    for layer, head in HEADS:
        assert (acts.attention_to_labels()[:, layer, head, 1] == 0).all()
        assert_close(
            acts.pattern[:, layer, head].sum(-1), torch.ones(len(batch), dtype=torch.float64)
        )
        z = torch.einsum(
            "bk,bkd->bd", acts.pattern[:, layer, head], head_values(acts, layer)[:, :, head]
        )
        assert_close(acts.z[:, layer, head], z)
    untouched = il.capture(model, batch)
    assert torch.equal(acts.pattern[:, 0, 0], untouched.pattern[:, 0, 0])


# Together


def blocks(model, batch, donors):
    """Return {name: function that makes an edit}: one edit of each kind, on overlapping heads."""
    weights = torch.full((len(batch), batch.label_positions.shape[1]), 0.3, dtype=torch.float64)
    return {
        "patch": lambda: il.patch_heads(model, HEADS[1:3], donors, activation="k"),
        "position": lambda: il.edited(model, il.RemovePosition(HEADS[:3])),
        "scale": lambda: il.edited(
            model, il.Reweight(HEADS[1:], weights, renormalize=True), batch=batch
        ),
        "ablate": lambda: il.ablate_heads(model, HEADS[2:3]),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_nesting_in_any_order_is_the_same_edit(run, name):
    """Each of any two edits comes first, and each has every place."""
    model, batch, donors = run(name)
    made = blocks(model, batch, donors)
    names = list(made)
    turned = [names[start:] + names[:start] for start in range(4)]
    log_probs = []
    for order in (*turned, *(order[::-1] for order in turned)):
        with ExitStack() as stack:
            for key in order:
                stack.enter_context(made[key]())
            log_probs.append(last_log_probs(model, batch))
    for log_probs_in_order in log_probs[1:]:
        assert_close(log_probs_in_order, log_probs[0])
    assert (log_probs[0] - last_log_probs(model, batch)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_nothing_is_left_behind(run, name):
    """Neither numbers nor hooks, after leaving, after an error inside, after an error on
    entering.
    """
    model, batch, donors = run(name)
    plain = last_log_probs(model, batch)

    before = remains(model)
    made = blocks(model, batch, donors)
    with ExitStack() as stack:
        for make in made.values():
            stack.enter_context(make())
        assert remains(model) != before
    assert remains(model) == before
    assert torch.equal(last_log_probs(model, batch), plain)
    for make in made.values():
        with pytest.raises(ZeroDivisionError), make():
            _ = last_log_probs(model, batch).argmax().item() / 0
        assert remains(model) == before
        assert torch.equal(last_log_probs(model, batch), plain)
    # An error inside the forward pass itself, then another block.
    with made["scale"](), pytest.raises(il.InputError, match="run the same batch"):
        last_log_probs(model, batch[[0, 1]])
    with pytest.raises(il.InputError), made["ablate"](), il.ablate_heads(model, [il.Head(9, 9)]):
        pass
    assert remains(model) == before
    assert torch.equal(last_log_probs(model, batch), plain)


def test_blocks_on_two_models_do_not_mix(run):
    (first, batch, _), (second, _, _) = run("gpt2"), run("llama_gqa")
    plain = last_log_probs(second, batch)
    with il.ablate_heads(first, HEADS):
        assert torch.equal(last_log_probs(second, batch), plain)
        with il.ablate_heads(second, HEADS):
            assert not torch.equal(last_log_probs(second, batch), plain)
        assert torch.equal(last_log_probs(second, batch), plain)


# Warnings and errors


def test_a_head_that_does_not_reach_the_logits_is_named_once(run):
    model = copy.deepcopy(run("gpt2")[0])
    batch = il.tokenize(model, PROMPTS)
    out = model.original_model.transformer.h[1].attn.c_proj
    out = getattr(out, "original_component", out)
    with torch.no_grad():
        out.weight[8:16] = 0
    with (
        pytest.warns(UserWarning, match=r"editing L1H1 does not change the logits") as caught,
        il.ablate_heads(model, [(1, 1), (0, 0)]),
    ):
        last_log_probs(model, batch)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with il.edited(model, il.RemovePosition([(1, 1)])):
            pass


def test_a_layer_that_is_not_understood_counts_where_it_is_edited(run, monkeypatch):
    model = copy.deepcopy(run("gpt2")[0])

    def wrong_in_layer_2(values, *arguments):
        return recompute_pattern(values, *arguments) * (0.9 if values.layer == 2 else 1.0)

    monkeypatch.setattr(check, "recompute_pattern", wrong_in_layer_2)
    for _ in range(2):
        with il.edited(model, il.RemovePosition([(1, 1)])):
            pass
        with (
            pytest.raises(il.InputError, match=r"GPT2LMHeadModel is not supported .* in layer 2"),
            il.edited(model, il.RemovePosition([(2, 0)])),
        ):
            pass
        with il.ablate_heads(model, [(2, 0)]):
            pass


@pytest.mark.parametrize(
    ("what", "options", "n_passes"),
    [
        (
            "k",
            {"align": "labels", "positions": "last"},
            3,
        ),  # the source, the batch, and rows of one token
        ("z", {}, 3),  # the source, the batch, and restarts at the first layer
        ("k", {}, 5),  # the source, and one for each set
    ],
)
def test_sets_are_patched_with_few_passes(run, what, options, n_passes):
    model, batch, donors = run("gpt2")
    sets = [HEADS, HEADS[1:2], HEADS[::-1], [(2, 3), (0, 0)]]
    sets = [[il.Patch(heads, donors, activation=what, **options)] for heads in sets]
    il.score(model, batch, sets)  # checks of heads run once per model
    passes = []
    with watched(lambda *_: passes.append(1), model.blocks[0]):
        il.score(model, batch, sets)
    assert len(passes) == n_passes


def test_an_error_while_making_edits_is_not_a_reason_to_fall_back(run, monkeypatch):
    model, batch, donors = run("gpt2")

    def fail(*_):
        raise RuntimeError("this edit is wrong")

    monkeypatch.setattr(RowEdits, "__init__", fail)
    with pytest.raises(RuntimeError, match="this edit is wrong"):
        il.score(model, batch, [[il.Patch(HEADS, donors, activation="z", positions="last")]])


def test_what_cannot_be_aligned_is_said(run):
    model, batch, donors = run("gpt2")
    with (
        il.patch_heads(model, HEADS, donors[[0, 2, 1]], activation="v"),
        pytest.raises(il.InputError, match=r"got 26 and 10 in row 1.*or align='labels'"),
    ):
        last_log_probs(model, batch)
    with (
        il.patch_heads(model, HEADS, donors, activation="v", align="labels", batch=batch),
        pytest.raises(il.InputError, match="row 1 is a different prompt"),
    ):
        last_log_probs(model, batch[[0, 2, 1]])
