"""Each intervention against attention written out by hand on Hugging Face, on padded batches; none leaves a trace."""

import copy
import itertools
import warnings
from contextlib import ExitStack
from functools import cache

import families
import pytest
import reference_attention
import reference_hf
import torch
from conftest import PROMPTS
from family_tables import EXACT, PARTLY_REFUSED
from passes import watched
from test_effects import hf_twin, remains
from tolerance import assert_close

import icl_lens as il
from icl_lens.activations.passes import last_log_probs
from icl_lens.edits.pattern import recompute_pattern
from icl_lens.engine import edit_checks as check
from icl_lens.engine.prefix_cache import RowEdits
from icl_lens.models.view import ModelView

BY_HAND = ("gpt2", "gptj", "llama_gqa", "llama_bias")
HEADS = [il.Head(0, 1), il.Head(1, 0), il.Head(1, 3), il.Head(2, 2)]
OTHERS = [
    il.Prompt.parse("two : bar one : bar cat : foo dog : foo hate :", answer="foo"),
    il.Prompt.parse("good : foo bad : foo love : bar like :", answer="foo"),
    il.Prompt.parse("red : bar the dog : foo a cat :", answer="bar"),
]
"""Each has as many tokens as the prompt of PROMPTS with the same index."""

# In float64, so that a difference is the edit and not rounding.
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def run(load_tiny, family_folder):
    """(model, batch, other prompts of the same lengths, Hugging Face twin) of a family."""

    @cache
    def get(name):
        model = load_tiny(name, dtype=torch.float64)
        batch, other = (il.tokenize(model, p, prepend_bos=False, labels=("foo", "bar")) for p in (PROMPTS, OTHERS))
        assert torch.equal(batch.last, other.last)
        return model, batch, other, hf_twin(family_folder, name)

    return get


def ids_of(batch, row):
    return batch.tokens[row, : int(batch.last[row]) + 1]


def assert_same(model, batch, hf, heads, edit_of_row):
    """Assert that log-probabilities are those of the hand-edited Hugging Face model, and differ from the unedited."""
    ours = last_log_probs(model, batch)
    plain = []
    for row in range(len(batch)):
        theirs = reference_attention.edited_run(hf, ids_of(batch, row), heads, edit_of_row(row))[0]
        assert_close(ours[row], theirs)
        plain.append(reference_attention.edited_run(hf, ids_of(batch, row), [], lambda hand: None)[0])
    assert (ours - torch.stack(plain)).abs().max() > 1e-3  # and it is an edit


def rows_edited(change):
    """Return an `edit_of_row` that replaces patterns by `change(row, head, pattern)`, which may overwrite `pattern`."""

    def edit_of(row):
        def edit(hand):
            hand.row_edits = lambda head, pattern: change(row, head, pattern.clone())

        return edit

    return edit_of


@pytest.mark.parametrize("name", BY_HAND)
def test_the_reference_is_the_model(run, name):
    _, batch, _, hf = run(name)
    everything = list(itertools.product(range(families.N_LAYERS), range(families.N_HEADS)))
    ours = reference_attention.edited_run(hf, ids_of(batch, 0), everything, lambda hand: None)[0]
    theirs = torch.log_softmax(hf(ids_of(batch, 0)[None]).logits[0, -1], dim=-1)
    assert_close(ours, theirs)


# One by one


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("positions", ["all", "last"])
def test_ablated_heads_are_the_references(run, name, positions):
    """To zero, or to the mean over another batch's real tokens, whether this is given as one batch or several."""
    model, batch, other, hf = run(name)
    z = [reference_hf.capture(hf, ids_of(other, row)).z for row in range(len(other))]
    mean = torch.cat(z, dim=1).mean(1) if positions == "all" else torch.stack([one[:, -1] for one in z]).mean(0)

    def edit_to(value):
        def edit(hand):
            hand.z = hand.own_z()
            hand.z[slice(None) if positions == "all" else -1] = value[hand.layer]

        return lambda row: edit

    with il.ablate_heads(model, HEADS, positions=positions):
        assert_same(model, batch, hf, HEADS, edit_to(torch.zeros_like(mean)))
    for reference in (other, list(other.split(2))):
        with il.ablate_heads(model, HEADS, mode="mean", reference=reference, positions=positions):
            assert_same(model, batch, hf, HEADS, edit_to(mean))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("renormalize", [True, False])
def test_scaled_label_attention_is_the_references(run, name, renormalize):
    model, batch, _, hf = run(name)
    weights = torch.tensor([[0.0, 0.5, 2.0, 1.0], [3.0, 0.2, 1.0, 1.0], [0.7, 0.0, 1.0, 1.0]])

    def scale(row, head, pattern):
        for demo, position in enumerate(batch.label_positions[row].tolist()):
            if position >= 0:
                pattern[-1, position] *= float(weights[row, demo])
        if renormalize:
            pattern[-1] /= pattern[-1].sum()
        return pattern

    with il.edited(model, il.Reweight(HEADS, weights, renormalize=renormalize), batch=batch):
        assert_same(model, batch, hf, HEADS, rows_edited(scale))


@pytest.mark.parametrize("name", BY_HAND)
def test_blocked_edges_are_the_references(run, name):
    """Attention on blocked edges moves to the query's other keys; a query without other keys attends to nothing."""
    model, batch, _, hf = run(name)
    width = batch.tokens.shape[1]
    edges = torch.rand(len(batch), width, width, generator=torch.Generator().manual_seed(0)) < 0.3
    edges[:, 3] = True

    def block(row, head, pattern):
        for query in range(len(pattern)):
            for key in range(len(pattern)):
                if edges[row, query, key]:
                    pattern[query, key] = 0
            if pattern[query].any():
                pattern[query] /= pattern[query].sum()
        return pattern

    with il.edited(model, il.Block(HEADS, edges)):
        assert_same(model, batch, hf, HEADS, rows_edited(block))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("positions", ["all", "last"])
def test_removed_positions_are_the_references(run, name, positions):
    model, batch, _, hf = run(name)

    def edit(hand):
        hand.flat = set(range(families.N_HEADS))
        hand.flat_from = 0 if positions == "all" else -1

    with il.edited(model, il.RemovePosition(HEADS, positions=positions)):
        assert_same(model, batch, hf, HEADS, lambda row: edit)


PATCHES = [(what, "all") for what in ("q", "k", "v", "pattern", "z")] + [
    (what, "last") for what in ("q", "pattern", "z")
]


def patch_by_hand(hand, source, what, ours, theirs):
    """Give a hand-made layer the queries, keys, values or z of another at these positions."""
    if what == "z":
        for one in (hand, source):
            one.z = one.own_z()
        hand.z[ours] = source.z[theirs]
    else:
        getattr(hand, what)[:, ours] = getattr(source, what)[:, theirs]


STRETCHED = [
    il.Prompt.parse("two the : bar one : bar a cat : foo dog : foo hate the :", answer="foo"),
    il.Prompt.parse("good a bad : foo bad : foo love : bar like the a :", answer="foo"),
    il.Prompt.parse("red : bar dog : foo cat :", answer="bar"),
]
"""Each has as many demonstrations as the prompt of PROMPTS with the same index, and another length."""


@pytest.mark.parametrize(
    ("name", "aligned"), [*((name, False) for name in BY_HAND), ("gpt2", True), ("llama_gqa", True)]
)
@pytest.mark.parametrize(("what", "positions"), PATCHES)
def test_heads_patched_from_another_prompt_are_the_references(run, name, what, positions, aligned):
    """Sources of the same length align by position, those of other lengths by labels and the last position."""
    model, batch, other, hf = run(name)
    if aligned:
        other = il.tokenize(model, STRETCHED, prepend_bos=False, labels=("foo", "bar"))
        assert not (other.last == batch.last).any()

    def places(one, row):
        labels = one.label_positions[row][one.label_positions[row] >= 0].tolist()
        return [*labels, int(one.last[row])] if aligned else [*range(int(one.last[row]) + 1)]

    def edit_of(row):
        _, source = reference_attention.edited_run(hf, ids_of(other, row), HEADS, lambda hand: None)
        ours, theirs = places(batch, row), places(other, row)
        some = slice(None) if positions == "all" else slice(-1, None)

        def edit(hand):
            there = source[hand.layer]
            if what != "pattern":
                patch_by_hand(hand, there, what, ours[some], theirs[some])
                return

            def rows(head, pattern):
                pattern, found = pattern.clone(), there.pattern(head)
                for q_ours, q_theirs in list(zip(ours, theirs, strict=True))[some]:
                    new, old = pattern[q_ours].clone(), pattern[q_ours]
                    rest = [s for s in range(len(new)) if s not in ours]
                    for s_ours, s_theirs in zip(ours, theirs, strict=True):
                        new[s_ours] = found[q_theirs, s_theirs]
                    new[rest] = old[rest] * (1 - found[q_theirs, theirs].sum()) / old[rest].sum()
                    pattern[q_ours] = new
                return pattern

            hand.row_edits = rows

        return edit

    how = {"align": "labels", "batch": batch} if aligned else {}
    with il.patch_heads(model, HEADS, other, activation=what, positions=positions, **how):
        assert_same(model, batch, hf, HEADS, edit_of)


def test_queries_and_z_at_the_last_position_may_come_from_a_longer_prompt(run):
    model, batch, _, hf = run("llama_gqa")
    short, long = batch[[1]], batch[[0]]
    _, source = reference_attention.edited_run(hf, ids_of(long, 0), HEADS, lambda hand: None)

    def edit(hand):
        hand.q[:, -1] = source[hand.layer].q[:, -1]

    with il.patch_heads(model, HEADS, long, activation="q", positions="last"):
        assert_same(model, short, hf, HEADS, lambda row: edit)
    with il.patch_heads(model, HEADS, long, activation="q"), pytest.raises(il.InputError, match="14 and 11"):
        last_log_probs(model, short)


def test_one_source_serves_all_rows(run):
    model, batch, other, _ = run("gpt2")
    same = batch[[0, 0]]
    with il.patch_heads(model, HEADS, other[0], activation="v"):
        both = last_log_probs(model, same)
    with il.patch_heads(model, HEADS, other[[0, 0]], activation="v"):
        assert_close(last_log_probs(model, same), both)


# Every family


def all_heads(model):
    view = ModelView.of(model)
    return [il.Head(*pair) for pair in itertools.product(range(view.n_layers), range(view.n_heads))]


RECOMPUTED = sorted(set(EXACT) - PARTLY_REFUSED["patch_heads"].keys())


@pytest.mark.parametrize("name", RECOMPUTED)
def test_nothing_changes_where_the_edit_changes_nothing(run, name):
    """Strength zero, factors of one and patches from the same batch leave log-probabilities as they are."""
    model, batch, _, _ = run(name)
    plain = last_log_probs(model, batch)
    heads = all_heads(model)
    ones = torch.ones(len(batch), batch.label_positions.shape[1])
    edits = [
        il.edited(model, il.RemovePosition(heads, strength=0.0)),
        il.edited(model, il.Reweight(heads, ones, renormalize=True), batch=batch),
        *[il.patch_heads(model, heads, batch, activation=what) for what in ("q", "k", "v", "pattern", "z")],
    ]
    for edit in edits:
        with edit:
            assert_close(last_log_probs(model, batch), plain)


ROTARY_OR_ALIBI = sorted(set(RECOMPUTED) - {"gpt2", "gpt_neo", "opt"})


@pytest.mark.parametrize("name", ROTARY_OR_ALIBI)
def test_without_position_everywhere_is_the_model_with_all_tokens_in_one_place(run, name, monkeypatch):
    """Rotary: position_ids all zero. ALiBi: slopes zero."""
    model, batch, _, hf = run(name)
    module = __import__(type(hf).__module__, fromlist=["PreTrainedModel"])
    with il.edited(model, il.RemovePosition(all_heads(model))):
        ours = last_log_probs(model, batch)
    builder = {"bloom": "build_alibi_tensor", "falcon_alibi": "build_alibi_tensor", "mpt": "build_mpt_alibi_tensor"}
    is_alibi = name in builder
    if is_alibi:
        build = getattr(module, builder[name])
        monkeypatch.setattr(module, builder[name], lambda *args, **kwargs: 0 * build(*args, **kwargs))
    for row in range(len(batch)):
        ids = ids_of(batch, row)[None]
        where = {} if is_alibi else {"position_ids": torch.zeros_like(ids)}
        logits = hf(ids, attention_mask=torch.ones_like(ids), **where).logits[0, -1]
        assert_close(ours[row], torch.log_softmax(logits, dim=-1))


@pytest.mark.parametrize("name", ["opt", "gpt_neo"])
def test_learned_positions_share_is_linear_in_the_embedding(run, name):
    """With position embeddings of zero there is no share to remove; with real ones there is."""
    model, batch, _, _ = run(name)
    plain = last_log_probs(model, batch)
    with il.edited(model, il.RemovePosition(HEADS)):
        assert (last_log_probs(model, batch) - plain).abs().max() > 1e-2
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.pos_embed.weight.zero_()
    plain = last_log_probs(silent, batch)
    with il.edited(silent, il.RemovePosition(HEADS)):
        assert_close(last_log_probs(silent, batch), plain)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "opt"])
def test_capture_sees_the_edited_attention(run, name):
    model, batch, _, _ = run(name)
    hidden = torch.ones(len(batch), batch.label_positions.shape[1])
    hidden[:, 1] = 0
    with il.edited(model, il.Reweight(HEADS, hidden, renormalize=True), batch=batch):
        acts = il.capture(model, batch)
    for layer, head in HEADS:
        assert (acts.attention_to_labels()[:, layer, head, 1] == 0).all()
        assert_close(acts.pattern[:, layer, head].sum(-1), torch.ones(len(batch), dtype=torch.float64))
        z = torch.einsum("bk,bkd->bd", acts.pattern[:, layer, head], acts.head_values(layer)[:, :, head])
        assert_close(acts.z[:, layer, head], z)
    untouched = il.capture(model, batch)
    assert torch.equal(acts.pattern[:, 0, 0], untouched.pattern[:, 0, 0])


# Together


def blocks(model, batch, other):
    """Return {name: function that makes an edit}: one edit of each kind, on overlapping heads."""
    weights = torch.full((len(batch), batch.label_positions.shape[1]), 0.3, dtype=torch.float64)
    return {
        "patch": lambda: il.patch_heads(model, HEADS[1:3], other, activation="k"),
        "position": lambda: il.edited(model, il.RemovePosition(HEADS[:3])),
        "scale": lambda: il.edited(model, il.Reweight(HEADS[1:], weights, renormalize=True), batch=batch),
        "ablate": lambda: il.ablate_heads(model, HEADS[2:3]),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_nesting_in_any_order_is_the_same_edit(run, name):
    model, batch, other, hf = run(name)
    made = blocks(model, batch, other)

    def edit_of(row):
        _, source = reference_attention.edited_run(hf, ids_of(other, row), HEADS, lambda hand: None)

        def edit(hand):
            for layer, head in HEADS[1:3]:
                if layer == hand.layer:
                    hand.k[head] = source[layer].k[head]
                    hand.k_flat[head] = source[layer].k_flat[head]
            hand.flat = {head for layer, head in HEADS[:3] if layer == hand.layer}

            def rows(head, pattern):
                if il.Head(hand.layer, head) in HEADS[1:]:
                    pattern = pattern.clone()
                    where = [p for p in batch.label_positions[row].tolist() if p >= 0]
                    pattern[-1, where] *= 0.3
                    pattern[-1] /= pattern[-1].sum()
                return pattern

            hand.row_edits = rows
            hand.z = hand.own_z()
            for layer, head in HEADS[2:3]:
                if layer == hand.layer:
                    hand.z[:, head] = 0

        return edit

    first = None
    names = list(made)
    turned = [names[start:] + names[:start] for start in range(4)]
    for order in (*turned, *(one[::-1] for one in turned)):  # each of any two comes first, and each has every place
        with ExitStack() as stack:
            for key in order:
                stack.enter_context(made[key]())
            if first is None:
                assert_same(model, batch, hf, HEADS, edit_of)
                first = last_log_probs(model, batch)
            assert_close(last_log_probs(model, batch), first)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_nothing_is_left_behind(run, name):
    """Neither numbers nor hooks, after leaving, after an error inside, after an error on entering."""
    model, batch, other, _ = run(name)
    plain = last_log_probs(model, batch)

    before = remains(model)
    made = blocks(model, batch, other)
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
    (first, batch, _, _), (second, _, _, _) = run("gpt2"), run("llama_gqa")
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

    def wrong_in_layer_2(values, *rest):
        return recompute_pattern(values, *rest) * (0.9 if values.layer == 2 else 1.0)

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


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_generation_is_edited_without_a_key_value_cache_and_refused_with_one(run, name):
    model, batch, _, _ = run(name)
    one = batch[[0]]
    hidden = torch.zeros(1, 4)
    options = {"max_new_tokens": 2, "do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
    with il.edited(model, il.Reweight(all_heads(model), hidden, renormalize=True), batch=one):
        edited = model.generate(one.tokens, use_past_kv_cache=False, **options)
        first = int(last_log_probs(model, one).argmax())
        with pytest.raises(il.InputError, match="use_past_kv_cache=False"):
            model.generate(one.tokens, **options)
    assert int(edited[0, 14]) == first


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "gemma2", "bloom"])
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("q", {"positions": "last"}),
        ("k", {"align": "labels", "positions": "last"}),
        ("v", {"align": "labels", "positions": "last"}),
        ("k", {}),
        ("pattern", {"align": "labels"}),
        ("z", {}),
        ("z", {"positions": "last"}),
    ],
)
def test_sets_are_patched_one_after_the_other(run, name, what, options):
    """Sets give what their own blocks give; the source is run once, and so is the batch if only its end changes."""
    model, batch, other, _ = run(name)
    sets = [HEADS, HEADS[1:2], HEADS[::-1], [(2, 3), (0, 0)]]
    into = {"batch": batch} if options.get("align") == "labels" else {}
    expected = []
    for heads in sets:
        with il.patch_heads(model, heads, other, activation=what, **options, **into):
            expected.append(il.score(model, batch))
    passes = []
    with watched(lambda *_: passes.append(1), model.blocks[0]):
        found = il.score(model, batch, [[il.Patch(heads, other, activation=what, **options)] for heads in sets])
    by_rows = "last" in options.values() or what == "z"  # z restarts: the source, the batch, and its rows
    assert len(passes) == (3 if by_rows else len(sets) + 1)  # the source, the batch, and rows of it
    assert_close(found, torch.stack(expected, dim=1))
    assert (found[:, :1] - found[:, 1:2]).abs().max() > 1e-4
    with pytest.raises(il.InputError, match="sets must contain at least one"):
        il.score(model, batch, [])


def test_an_error_while_making_edits_is_not_a_reason_to_fall_back(run, monkeypatch):
    model, batch, other, _ = run("gpt2")

    def fail(*_):
        raise RuntimeError("this edit is wrong")

    monkeypatch.setattr(RowEdits, "__init__", fail)
    with pytest.raises(RuntimeError, match="this edit is wrong"):
        il.score(model, batch, [[il.Patch(HEADS, other, activation="z", positions="last")]])


def test_what_cannot_be_aligned_is_said(run):
    model, batch, other, _ = run("gpt2")
    with (
        il.patch_heads(model, HEADS, other[[0, 2, 1]], activation="v"),
        pytest.raises(il.InputError, match=r"got 10 and 11 in row 1.*or align='labels'"),
    ):
        last_log_probs(model, batch)
    with (
        il.patch_heads(model, HEADS, other, activation="v", align="labels", batch=batch),
        pytest.raises(il.InputError, match="row 1 is a different prompt"),
    ):
        last_log_probs(model, batch[[0, 2, 1]])
