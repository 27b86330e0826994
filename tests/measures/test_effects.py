"""Effects of ablating heads, exact and as first-order estimates; agreement of rankings."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from passes import remains
from shared import PROMPTS, ragged
from tolerance import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import icl_lens as il
from icl_lens.edits import restarts
from icl_lens.edits.one_token_rows import layer_attention, prefix_cache
from icl_lens.edits.one_token_rows.layer_attention import LayerKVCache
from icl_lens.models.attention_scores import AttentionScoring
from icl_lens.models.passes.inference import replace_forwards
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs


def scores(model, batch, against=None):
    """Return [batch, 2]: log p(answer), and its log-odds against the other label or `against`."""
    log_probs = last_log_probs(model, batch)
    rows = torch.arange(len(batch))
    labels = log_probs[:, batch.label_tokens]
    answer_log_prob = labels[rows, batch.answer]
    compared_log_prob = labels[rows, 1 - batch.answer]
    if against is not None:
        compared_log_prob = log_probs.gather(1, against.reshape(len(batch), -1)).logsumexp(-1)
    return torch.stack([answer_log_prob, answer_log_prob - compared_log_prob], dim=-1)


def one_by_one(model, batch, *, positions="last", against=None):
    """Return every head's effects, from one full forward pass per head under `ablate_heads`."""
    view = ModelView.of(model)
    clean = scores(model, batch, against)
    drops = clean.new_empty(len(batch), view.n_layers, view.n_heads, clean.shape[-1])
    for layer in range(view.n_layers):
        for head in range(view.n_heads):
            with il.ablate_heads(model, [(layer, head)], positions=positions):
                drops[:, layer, head] = clean - scores(model, batch, against)
    return drops.unbind(-1)


@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("several", [False, True])
def test_log_odds_are_those_of_one_head_at_a_time(load_tiny, positions, several):
    model = load_tiny("qwen2")
    batch = ragged(model)
    against = batch.label_tokens[1 - batch.answer]
    if several:
        against = torch.stack([against, torch.tensor([40, 50, 60])], dim=1)
    effects = il.head_effects(model, batch, positions=positions, against=against)
    log_prob, log_odds = one_by_one(model, batch, positions=positions, against=against)
    assert_close(effects.log_prob, log_prob)
    assert_close(effects.log_odds, log_odds)
    default = il.head_effects(model, batch, positions=positions)
    if several:
        assert (default.log_odds - log_odds).abs().max() > 1e-2
    else:
        assert_close(default.log_odds, log_odds)
    for outcome, values in (("log_odds", log_odds), ("log_prob", log_prob)):
        best = int(values.mean(0).argmax())
        assert effects.top(1, outcome=outcome) == [il.Head(best // 4, best % 4)]
    assert effects.top(3) == effects.top(3, outcome="log_odds")
    frame = effects.to_frame()
    assert_close(torch.tensor(frame["log_odds"]).view_as(log_odds), log_odds)


@pytest.mark.parametrize("positions", ["last", "all"])
def test_within_another_intervention_prompts_are_run_whole(load_tiny, positions):
    model = load_tiny("gptj")
    batch = ragged(model)
    with il.edited(model, il.RemovePosition([(0, 0), (2, 1)])):
        effects = il.head_effects(model, batch, positions=positions)
        assert_close(effects.log_prob, one_by_one(model, batch, positions=positions)[0])
    assert effects.algorithm == "partial_forward"
    assert ("edits are active" in effects.fallback_reason) == (positions == "last")


def test_prompts_with_nothing_to_compare_have_no_log_odds(load_tiny):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, [il.Prompt.parse("love : bar eight : foo one :")])
    with pytest.raises(il.InputError, match="without an answer"):
        il.head_effects(model, batch)
    effects = il.head_effects(model, batch, batch.label_tokens[[0]])
    assert_close(
        effects.log_odds,
        il.head_effects(
            model, batch, batch.label_tokens[[0]], against=batch.label_tokens[[1]]
        ).log_odds,
    )
    single = il.Prompt.parse("love : bar eight :", answer="bar")
    batch = il.tokenize(model, [PROMPTS[0], single], prepend_bos=False)
    for method in ("exact", "gradient"):
        effects = il.head_effects(model, batch[[1]], method=method)
        assert effects.log_odds.isnan().all()
        assert effects.log_prob.isfinite().all()
        with pytest.raises(
            il.InputError, match="'log_odds' requires tokens to compare with; pass against="
        ):
            effects.top(1, outcome="log_odds")
        assert effects.top(3) == effects.top(3, outcome="log_prob")
        effects = il.head_effects(model, batch, method=method)
        assert effects.log_odds.isnan().flatten(1).all(1).tolist() == [False, True]
        assert_close(
            effects.log_odds[0], il.head_effects(model, batch[[0]], method=method).log_odds[0]
        )
        best = effects.log_odds[0].flatten().argsort(descending=True)[:3].tolist()
        assert effects.top(3) == [il.Head(index // 4, index % 4) for index in best]


def other_scores(**how):
    """Return a change after which the package assumes wrong attention scores for the model."""

    def change(patch, request, model):
        right = layer_attention.attention_scores.attention_scoring
        patch.setattr(
            layer_attention.attention_scores,
            "attention_scoring",
            lambda view, layer: right(view, layer)._replace(**how),
        )

    return change


def shifted_rows(layer):
    """Return a change that shifts the output of an MLP in single-token passes, which z of that
    layer does not show.
    """

    def changed(forward, *args, **kwargs):
        output = forward(*args, **kwargs)
        return output + 0.1 * torch.arange(output.shape[-1]) if output.shape[1] == 1 else output

    def change(patch, request, model):
        mlp = model.blocks[layer].mlp
        stack = ExitStack()
        stack.enter_context(replace_forwards([(mlp, partial(changed, mlp.forward))]))
        request.addfinalizer(stack.close)

    return change


def failing_rows(error):
    def fail(*args):
        raise error

    return lambda patch, request, model: patch.setattr(LayerKVCache, "attend", fail)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        pytest.param(other_scores(scale=0.1), "in layer 0 of LlamaForCausalLM", id="scale"),
        pytest.param(other_scores(position="none"), "differs from the model's", id="position"),
        pytest.param(other_scores(window=5), "differs from the model's", id="window"),
        pytest.param(shifted_rows(1), "residual stream", id="shifted within"),
        pytest.param(shifted_rows(2), "deviate", id="shifted at the end"),
        pytest.param(
            failing_rows(RuntimeError("sizes do not match")),
            "sizes do not match",
            id="RuntimeError",
        ),
        pytest.param(
            failing_rows(il.InputError("it has no hook")), "it has no hook", id="InputError"
        ),
    ],
)
def test_where_rows_do_not_fit_the_long_way_gives_the_same(
    load_tiny, monkeypatch, request, change, because
):
    model = load_tiny("llama_gqa")
    batch = ragged(model)
    expected = il.head_effects(model, batch, positions="last")
    assert expected.algorithm == "prefix_cache"
    change(monkeypatch, request, model)
    before = remains(model)
    effects = il.head_effects(model, batch, positions="last")
    assert effects.algorithm == "partial_forward"
    assert because in effects.fallback_reason
    assert_close(effects.log_prob, expected.log_prob)
    assert remains(model) == before


def test_memory_that_is_not_there_is_not_hidden(load_tiny, monkeypatch):
    model = load_tiny("gpt2")

    def fail(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(LayerKVCache, "attend", fail)
    with pytest.raises(torch.OutOfMemoryError):
        il.head_effects(model, ragged(model), positions="last")


@pytest.mark.parametrize(
    ("options", "failing"),
    [
        ({"positions": "last"}, (LayerKVCache, "attend")),
        ({"positions": "all"}, (restarts, "_hooks")),
        ({"method": "gradient"}, (torch.autograd, "grad")),
    ],
)
def test_nothing_is_left_behind(load_tiny, monkeypatch, options, failing):
    """Hooks, forwards, gradients: after the work, and after an error in the middle of it."""
    model = load_tiny("opt")
    batch = ragged(model)
    plain = last_log_probs(model, batch)
    il.head_effects(model, batch, **options)  # at first use TransformerLens adds hooks of its own
    before = remains(model)
    assert not any(before[3].values())
    weights = list(model.parameters())
    weights[1].requires_grad_(True)  # as a user would have left it
    try:
        mixed = remains(model)
        il.head_effects(model, batch, **options)
        assert remains(model) == mixed

        def fail(*args, **kwargs):
            raise ZeroDivisionError

        monkeypatch.setattr(*failing, fail)
        with pytest.raises(ZeroDivisionError):
            il.head_effects(model, batch, **options)
        assert remains(model) == mixed
        assert weights[1].grad is None
    finally:
        weights[1].requires_grad_(False)
    assert remains(model) == before
    assert torch.is_grad_enabled()
    assert torch.equal(last_log_probs(model, batch), plain)


class Largest(TorchDispatchMode):
    """Records the largest storage, in bytes, of a tensor that an operation in the block makes,
    except `known` ones.
    """

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_keys_are_shared_not_copied():
    """For 60 rows over 200 keys of width 64, no tensor is a tenth as large as one copy of the keys
    per row.
    """
    n_rows, n_keys, heads, groups, width = 60, 200, 4, 2, 64
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    keys = LayerKVCache(
        k=draw(1, groups, n_keys, width),
        v=draw(1, groups, n_keys, width),
        visible_keys=torch.ones(1, n_keys, dtype=torch.bool),
        alibi=None,
        rotation=None,
        last=torch.tensor([n_keys - 1]),
        scoring=AttentionScoring(0.1, None, None, "standard", False),
    )
    rows = (
        draw(1, n_rows, heads, width),
        draw(1, n_rows, groups, width),
        draw(1, n_rows, groups, width),
    )
    with Largest([keys.k, keys.v]) as made:
        keys.attend(*rows)
    score_bytes, copied = 4 * n_rows * heads * n_keys, 4 * n_rows * groups * n_keys * width
    assert score_bytes <= made.bytes < copied / 10


def test_memory_bounds_what_runs_together(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    view, batch = ModelView.of(model), ragged(model)
    keys = 2 * 3 * 4 * 8 * 14 * 4  # keys and values, layers, heads, width, positions, bytes
    sizes = {"n_rows": 12, "attention": False}
    for count in (1, 2, 3):
        monkeypatch.setattr(prefix_cache, "KEY_BYTES", count * keys + 1)
        assert prefix_cache.max_prompts(view, batch, pass_tokens=4096, **sizes) == count
    assert prefix_cache.max_prompts(view, batch, pass_tokens=28, **sizes) == 2
    monkeypatch.setattr(prefix_cache, "ROW_BYTES", 4 * 26 * max(97, 3 * 48))
    assert prefix_cache.max_prompts(view, batch, pass_tokens=4096, **sizes) == 2


def test_estimates_of_differences(load_tiny):
    """log p(target) − log p(against) is linear in both terms: its estimate is the difference of
    their estimates.
    """
    model = load_tiny("qwen2")
    batch = ragged(model)
    other_label = batch.label_tokens[1 - batch.answer]
    difference = il.head_effects(model, batch, against=other_label, method="gradient")
    alone = il.head_effects(model, batch, other_label, method="gradient")
    assert_close(difference.log_odds, difference.log_prob - alone.log_prob)
    assert_close(il.head_effects(model, batch, method="gradient").log_odds, difference.log_odds)


def test_a_title_says_what_was_done_to_heads(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    for options, words in (
        ({}, "each head zeroed alone"),
        ({"mode": "mean", "reference": batch}, "each head alone set to its mean"),
        ({"method": "gradient"}, "each head zeroed alone (first-order estimates)"),
    ):
        assert il.head_effects(model, batch, **options).to_view().title.endswith(words)
    for method in ("exact", "gradient"):
        edges = il.head_to_head_effects(model, batch, ["L2H1"], part="q", method=method)
        is_estimate = edges.to_view().title.endswith(", first-order estimates")
        assert is_estimate == (method == "gradient")


def test_estimates_within_contexts_without_gradients(gpt2, gpt2_batch):
    expected = il.head_effects(gpt2, gpt2_batch, method="gradient").log_prob
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_close(il.head_effects(gpt2, gpt2_batch, method="gradient").log_prob, expected)
    assert not expected.requires_grad


def test_agreement_by_hand():
    causal = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    static = torch.tensor([[0.0, 2.0, 1.0], [3.0, 50.0, 40.0]])
    agreement = il.metrics.agreement(causal, static, k=2)
    # Two neighboring pairs exchanged: 1 - 6 * (1 + 1 + 1 + 1) / (6 * 35)
    assert agreement.spearman == pytest.approx(1 - 24 / 210)
    assert (agreement.overlap, agreement.expected_overlap) == (2, pytest.approx(4 / 6))
    assert il.metrics.agreement(causal, -static, k=3).spearman == pytest.approx(-(1 - 24 / 210))
    assert il.metrics.agreement(causal, -static, k=3).overlap == 0
    tied = il.metrics.agreement(
        torch.tensor([[1.0, 1.0, 3.0]]), torch.tensor([[1.0, 2.0, 3.0]]), k=1
    )
    assert tied.spearman == pytest.approx(1.5 / 3**0.5)  # ranks ½ ½ 2 against 0 1 2
    with pytest.raises(il.InputError, match=r"between 1 and 6 .* got 7"):
        il.metrics.agreement(causal, static, k=7)
