"""Contrasts, log p(target) − log Σ p(against): parts, identities, bounds and searches against plain references.

The references take the softmax of the whole vocabulary before and after adding a part; the package never does.
"""

from types import SimpleNamespace

import families
import pytest
import reference_hf
import torch
from conftest import PROMPTS
from family_tables import EXACT, SOFT_CAPPED
from tolerance import assert_close, tolerance
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.attribution.increases import check_against_ids
from icl_lens.attribution.search import SLACK, head_bounds, layer_gradients, subhead_bounds
from icl_lens.models.readout import Readout

SEVERAL = torch.tensor([[7, -1, 12, 40], [-1, 4, -1, -1], [96, 3, -1, 0]])
"""Three, one and three tokens: rows of different lengths, with gaps."""


def contrasts(batch):
    """What `against` may look like: one token a prompt, and several."""
    return {"one": batch.other_label_tokens, "several": SEVERAL}


@pytest.fixture(scope="module")
def run(load_tiny, family_folder):
    """(batch, activations, one Hugging Face reference a prompt in float64) of a family, computed once."""
    done = {}

    def get(name):
        if name not in done:
            batch = il.tokenize(load_tiny(name), PROMPTS, prepend_bos=False)
            hf = AutoModelForCausalLM.from_pretrained(family_folder(name), attn_implementation="eager").double().eval()
            rows = [batch.tokens[i, : int(batch.last[i]) + 1] for i in range(len(batch))]
            theirs = [reference_hf.reference(hf, row, 0) for row in rows]
            done[name] = (batch, il.capture(load_tiny(name), batch), hf, theirs)
        return done[name]

    return get


def log_odds(hf, run, y, target, against, final_norm="frozen", bias=True):
    """log p(target) − log Σ p(against) at vectors of a reference's prompt, by softmax over the whole vocabulary."""
    log_probs = torch.log_softmax(reference_hf._Readout(hf, run.final).logits(y, final_norm, bias), dim=-1)
    others = [int(token) for token in against if token >= 0]
    return log_probs[..., target] - log_probs[..., others].exp().sum(-1).log()


def expected(hf, run, target, against, **convention):
    """Every part's contrast: after minus before."""

    def odds(y):
        return log_odds(hf, run, y, target, against, **convention)

    x = run.x
    mid = x if reference_hf.is_parallel(hf.config) else x + run.attn_out
    return SimpleNamespace(
        attn=odds(x + run.attn_out) - odds(x),
        ffn=odds(mid + run.ffn_out) - odds(mid),
        heads=torch.stack([odds(x[i] + run.head_outputs[i]) - odds(x[i]) for i in range(len(x))]),
        subheads=torch.stack([odds(x[i] + run.subhead_outputs[i]) - odds(x[i]) for i in range(len(x))]),
        neurons=torch.stack([odds(mid[i] + run.neuron_outputs[i]) - odds(mid[i]) for i in range(len(x))]),
    )


def close(ours, theirs):
    assert_close(ours.float(), theirs)


def row_of(against, i):
    return against.reshape(len(against), -1)[i].tolist()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("final_norm", "bias"), [("frozen", True), ("frozen", False), ("own", True)])
@pytest.mark.parametrize("which", ["one", "several"])
def test_contrasts_agree_with_hugging_face(run, name, final_norm, bias, which):
    """Layers, heads, subheads, neurons; ragged and padded here, alone and unpadded there."""
    batch, acts, hf, references = run(name)
    convention = {"final_norm": final_norm, "bias": bias}
    targets, against = batch.answer_tokens, contrasts(batch)[which]
    layers = il.layer_log_prob_increase(acts, targets, against=against, **convention)
    heads = il.head_log_prob_increase(acts, targets, against=against, **convention)
    subheads = il.subhead_log_prob_increase(acts, targets, against=against, **convention)
    neurons = [
        il.neuron_log_prob_increase(acts, targets, layer, against=against, **convention)
        for layer in range(families.N_LAYERS)
    ]
    for i, reference in enumerate(references):
        n_tokens = int(batch.last[i]) + 1
        theirs = expected(hf, reference, int(targets[i]), row_of(against, i), **convention)
        close(layers.attn[i], theirs.attn)
        close(layers.ffn[i], theirs.ffn)
        close(heads[i], theirs.heads)
        close(subheads[i, :, :, :n_tokens], theirs.subheads)
        assert (subheads[i, :, :, n_tokens:] == 0).all()
        close(torch.stack([neuron[i] for neuron in neurons]), theirs.neurons)


@pytest.mark.parametrize("name", sorted(set(EXACT) - SOFT_CAPPED))
def test_parts_of_a_linear_contrast_add_up(run, name):
    """Positions to heads, heads and b_O to attention, neurons and b_out to FFN, layers to the model's answer."""
    batch, acts, hf, references = run(name)
    targets, against = batch.answer_tokens, batch.other_label_tokens
    layers = il.layer_log_prob_increase(acts, targets, against=against)
    heads = il.head_log_prob_increase(acts, targets, against=against)
    subheads = il.subhead_log_prob_increase(acts, targets, against=against)
    neurons = torch.stack(
        [il.neuron_log_prob_increase(acts, targets, layer, against=against) for layer in range(families.N_LAYERS)], 1
    )
    close(subheads.sum(-1), heads)
    for i, reference in enumerate(references):
        target, (other,) = int(targets[i]), row_of(against, i)

        def odds(y, reference=reference, target=target, other=other):
            return log_odds(hf, reference, y, target, [other])

        nothing = odds(torch.zeros_like(reference.final))  # the final norm's shift and b_U
        close(heads[i].sum(-1) + odds(reference.attn_bias) - nothing, layers.attn[i])
        close(neurons[i].sum(-1) + odds(reference.ffn_bias) - nothing, layers.ffn[i])
        total = layers.attn[i].sum() + layers.ffn[i].sum()
        model_says = reference.log_probs[target] - reference.log_probs[other]
        close(odds(reference.x[0]) + total, model_says)
        embedding = odds(reference.x[0]) - nothing
        close(embedding + total + nothing, model_says)
        assert acts.readout.shift is None or abs(float(nothing)) > 1e-3


def test_several_do_not_add_up(gpt2_acts, gpt2_batch):
    """What the page about numbers says: only a contrast with one other token is linear."""
    targets = gpt2_batch.answer_tokens
    heads = il.head_log_prob_increase(gpt2_acts, targets, against=SEVERAL)
    subheads = il.subhead_log_prob_increase(gpt2_acts, targets, against=SEVERAL)
    gap = (subheads.sum(-1) - heads).abs().amax((1, 2))
    assert gap[1] < tolerance(), "one token of the second prompt is compared with: linear there"
    assert gap[0] > 1e-2
    own = il.subhead_log_prob_increase(gpt2_acts, targets, against=gpt2_batch.other_label_tokens, final_norm="own")
    whole = il.head_log_prob_increase(gpt2_acts, targets, against=gpt2_batch.other_label_tokens, final_norm="own")
    assert (own.sum(-1) - whole).abs().max() > 1e-2


def test_a_head_that_raises_every_label_alike():
    """By log p(w) a large increase; against the other label, nothing."""
    readout = Readout(
        W_U=torch.eye(4), b_U=None, gain=None, shift=None, scale=torch.ones(1), eps=0.0, center=False, normalize=False
    )
    x, both, reader = torch.zeros(1, 4), torch.tensor([[2.0, 2.0, 0, 0]]), torch.tensor([[2.0, 0, 0, 0]])
    foo, bar = torch.tensor([0]), torch.tensor([[1]])

    def rise(u, against=None):
        after, before = (readout.token_log_probs(y[:, None], foo, against=against) for y in (x + u, x))
        return (after - before).item()

    assert rise(both) > 0.5
    assert rise(both, bar) == 0.0
    assert rise(reader, bar) == 2.0
    assert float((reader * readout.contrast_direction(foo, bar[:, 0])).sum()) == 2.0


@pytest.mark.parametrize("name", EXACT)
def test_searches_find_what_trying_everything_finds(run, name):
    batch, acts, hf, references = run(name)
    targets = batch.answer_tokens
    for which, against in contrasts(batch).items():
        top = il.top_subheads(acts, targets, k=9, against=against)
        assert top.certified == (name not in SOFT_CAPPED)
        best = il.top_heads(acts, targets, k=5, against=against)
        assert best.certified == (name not in SOFT_CAPPED)
        if which == "one" or name in SOFT_CAPPED:
            assert torch.equal(top.n_exact, top.n_parts)
            assert (top.unevaluated_bound == -torch.inf).all()
            assert (best.n_exact, best.unevaluated_bound, best.share_evaluated) == (12, -float("inf"), 1.0)
        else:
            assert (top.n_exact < top.n_parts).all()
        heads = []
        for i, reference in enumerate(references):
            theirs = expected(hf, reference, int(targets[i]), row_of(against, i))
            close(top.value[i], theirs.subheads.flatten().topk(9).values)
            close(top.value[i], theirs.subheads[top.layer[i], top.head[i], top.position[i]])
            heads.append(theirs.heads)
        close(best.value, torch.stack(heads).mean(0).flatten().topk(5).values)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "gptj", "gemma3", "granite"])
def test_bounds_hold(run, name, bias):
    """Bound ≥ exact for every part and head, within the slack; equality for one token, a gap for several."""
    batch, acts, _, _ = run(name)
    targets = batch.answer_tokens
    readout = acts.readout.using(final_norm="frozen", bias=bias)
    for which, against in contrasts(batch).items():
        others = check_against_ids(acts.view, targets, against)
        gradients = layer_gradients(acts, targets, readout, against=others)
        bound = subhead_bounds(acts, gradients)
        gap = (bound - il.subhead_log_prob_increase(acts, targets, against=against, bias=bias))[torch.isfinite(bound)]
        heads = il.head_log_prob_increase(acts, targets, against=against, bias=bias)
        head_gap = head_bounds(acts, gradients) - heads
        for found in (gap, head_gap):
            assert found.min() >= -SLACK / 10
            assert found.abs().max() < tolerance() if which == "one" else found.max() > 1e-3
        close(gradients.base, readout.token_log_probs(acts.resid_pre, targets, against=others))


def test_float32_bounds_stay_within_the_slack_of_float64(load_tiny):
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = load_tiny("gpt2", dtype=dtype)
        batch = il.tokenize(model, PROMPTS)
        acts = il.capture(model, batch)
        others = check_against_ids(acts.view, batch.answer_tokens, SEVERAL)
        found[dtype] = (
            acts,
            head_bounds(acts, layer_gradients(acts, batch.answer_tokens, acts.readout, against=others)),
        )
    exact = il.head_log_prob_increase(found[torch.float64][0], batch.answer_tokens, against=SEVERAL)
    assert (exact - found[torch.float32][1]).max() < SLACK / 10


@pytest.mark.parametrize("which", ["one", "several"])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "gemma2"])
def test_alone_is_in_the_batch(load_tiny, run, name, which):
    """Each prompt alone, without the padding and without the others' wider rows of `against`, gives the same."""
    batch, acts, _, _ = run(name)
    against = contrasts(batch)[which]
    many = il.subhead_log_prob_increase(acts, batch.answer_tokens, against=against)
    top = il.top_subheads(acts, batch.answer_tokens, k=6, against=against)
    for i in range(len(batch)):
        alone = il.capture(load_tiny(name), batch[i])
        target, its = batch[i].answer_tokens, against[i : i + 1]
        ours = il.subhead_log_prob_increase(alone, target, against=its)
        close(ours[0], many[i, :, :, : ours.shape[-1]])
        close(il.top_subheads(alone, target, k=6, against=its).value[0], top.value[i])


def test_one_token_has_two_spellings(gpt2_acts, gpt2_batch):
    """[batch], [batch 1] and [batch n] padded with -1 are the same question."""
    targets, other = gpt2_batch.answer_tokens, gpt2_batch.other_label_tokens
    padded = torch.full((3, 4), -1)
    padded[:, 2] = other[:, 0]
    found = [il.head_log_prob_increase(gpt2_acts, targets, against=one) for one in (other[:, 0], other, padded)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert il.top_heads(gpt2_acts, targets, k=3, against=padded).n_exact == 12


def test_the_vocabulary_is_never_projected_on(gpt2_acts, gpt2_batch, monkeypatch):
    """Neither one nor several tokens, whatever the norm, need more than their own columns of W_U."""

    def refuse(*_):
        raise AssertionError("the whole vocabulary")

    for name in ("_unembed", "logits", "pieces", "pull_back"):
        monkeypatch.setattr(Readout, name, refuse)
    targets = gpt2_batch.answer_tokens
    for against in contrasts(gpt2_batch).values():
        for norm in ("frozen", "own"):
            il.layer_log_prob_increase(gpt2_acts, targets, against=against, final_norm=norm)
            il.head_log_prob_increase(gpt2_acts, targets, against=against, final_norm=norm)
            il.subhead_log_prob_increase(gpt2_acts, targets, against=against, final_norm=norm)
            il.neuron_log_prob_increase(gpt2_acts, targets, 1, against=against, final_norm=norm)
            il.top_subheads(gpt2_acts, targets, k=5, against=against, final_norm=norm)
            il.top_heads(gpt2_acts, targets, k=5, against=against, final_norm=norm)


def test_a_linear_contrast_makes_no_vectors(gpt2_acts, gpt2_batch, monkeypatch):
    """Parts are products with g in the heads' own space: no [batch, part, d_model]."""

    def refuse(*_):
        raise AssertionError("a vector for each part")

    for name in ("head_outputs", "subhead_values", "neuron_values"):
        monkeypatch.setattr(f"icl_lens.attribution.increases.{name}", refuse)
    monkeypatch.setattr("icl_lens.attribution.search.head_outputs", refuse)
    targets, against = gpt2_batch.answer_tokens, gpt2_batch.other_label_tokens
    il.head_log_prob_increase(gpt2_acts, targets, against=against)
    il.subhead_log_prob_increase(gpt2_acts, targets, against=against)
    il.neuron_log_prob_increase(gpt2_acts, targets, 1, against=against)
    il.top_heads(gpt2_acts, targets, k=5, against=against)


def test_small_pieces_change_nothing(gpt2_acts, gpt2_batch, monkeypatch):
    """The byte budgets only cut the work, between prompts and within one."""
    targets = gpt2_batch.answer_tokens

    def everything():
        return (
            *il.layer_log_prob_increase(gpt2_acts, targets, against=SEVERAL),
            il.head_log_prob_increase(gpt2_acts, targets, against=SEVERAL),
            il.subhead_log_prob_increase(gpt2_acts, targets, against=SEVERAL),
            il.neuron_log_prob_increase(gpt2_acts, targets, 1, against=SEVERAL),
            il.top_subheads(gpt2_acts, targets, k=7, against=SEVERAL).value,
            il.top_heads(gpt2_acts, targets, k=7, against=SEVERAL).value,
        )

    before = everything()
    for logit_bytes, part_bytes in ((1, 1), ((32 + 3) * 4 * 2, 32 * 4 * 5), ((32 + 3) * 4 * 20, 32 * 4 * 50)):
        monkeypatch.setattr("icl_lens.models.readout.LOGIT_BYTES", logit_bytes)
        monkeypatch.setattr("icl_lens.attribution.increases.PART_BYTES", part_bytes)
        for first, second in zip(before, everything(), strict=True):
            close(second, first)


@pytest.mark.parametrize(
    ("against", "message"),
    [
        (torch.tensor([7, 8]), r"shape \(3,\)"),
        (torch.tensor([[7, 8, 9]]), r"shape \(3,\)"),
        (torch.tensor([7.0, 8.0, 9.0]), "float32"),
        (torch.tensor([7, 97, 8]), "between 0 and 96"),
        (torch.tensor([7, -2, 8]), "between 0 and 96"),
        (torch.tensor([7, -1, 8]), "got none for prompt 1"),
        (torch.tensor([[7, 8], [9, 10], [-1, -1]]), "got none for prompt 2"),
        (torch.zeros(3, 0, dtype=torch.long), "got none for prompt 0"),
        (torch.tensor([[7, 8], [9, families.WORDS.index("foo")], [9, -1]]), "token 3 for both in prompt 1"),
        (torch.tensor([[7, 8, 7], [9, -1, -1], [9, 10, -1]]), "duplicate in prompt 0"),
    ],
)
def test_bad_against_is_refused(gpt2, gpt2_acts, gpt2_batch, no_type_checks, against, message):
    targets = gpt2_batch.answer_tokens
    for ask in (
        lambda: il.layer_log_prob_increase(gpt2_acts, targets, against=against),
        lambda: il.head_log_prob_increase(gpt2_acts, targets, against=against),
        lambda: il.subhead_log_prob_increase(gpt2_acts, targets, against=against),
        lambda: il.neuron_log_prob_increase(gpt2_acts, targets, 0, against=against),
        lambda: il.top_subheads(gpt2_acts, targets, k=2, against=against),
        lambda: il.top_heads(gpt2_acts, targets, k=2, against=against),
        lambda: il.locate_heads(gpt2, gpt2_batch, k=2, against=against),
        lambda: il.mean_head_increases(gpt2, gpt2_batch, against=against),
    ):
        with pytest.raises(il.InputError, match=message):
            ask()


def test_other_labels(gpt2):
    """Each prompt's own labels but its answer, whatever the batch's other prompts offer; -1 fills up."""
    words = ("foo", "bar", "red", "yes")
    ids = dict(zip(words, map(families.WORDS.index, words), strict=True))
    prompts = [
        il.Prompt([il.Demonstration("cat", "foo"), il.Demonstration("dog", "bar")], "one", "bar"),
        il.Prompt([il.Demonstration("cat", word) for word in words[:3]], "two", "bar", words[:3]),
        il.Prompt([il.Demonstration("cat", "red"), il.Demonstration("dog", "yes")], "two"),
        il.Prompt([il.Demonstration("cat", "yes")], "two", "yes"),
    ]
    batch = il.tokenize(gpt2, prompts)
    expected = [[ids["foo"], -1], [ids["foo"], ids["red"]], [-1, -1], [-1, -1]]
    assert batch.other_label_tokens.tolist() == expected
    assert batch[[1, 0]].other_label_tokens.tolist() == [expected[1], expected[0]]
    assert batch[[0]].other_label_tokens.tolist() == [[ids["foo"]]]
    assert batch[[3]].other_label_tokens.tolist() == [[-1]]
    predicted = torch.tensor([batch.labels.index(word) for word in ("foo", "red", "yes", "yes")])
    assert batch.label_tokens_except(predicted).tolist() == [
        [ids["bar"], -1],
        [ids["foo"], ids["bar"]],
        [ids["red"], -1],
        [-1, -1],
    ]
    some = batch[[0, 3]]
    with pytest.raises(il.InputError, match="got none for prompt 1"):
        il.locate_heads(gpt2, some, k=2, against=some.other_label_tokens)
