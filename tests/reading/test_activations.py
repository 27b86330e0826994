"""Capture: one pass that leaves the model unchanged, caches that do not fit the batch, other
precisions.
"""

import numpy as np
import pytest
import torch
from cases import slow
from shared import PROMPTS
from tolerance import assert_close, tolerance
from transformers.activations import NewGELUActivation

import icl_lens as il
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs


def test_capture_runs_the_model_once_and_leaves_nothing(gpt2, gpt2_batch):
    calls = []
    handle = gpt2.blocks[0].register_forward_hook(lambda *args: calls.append(1))
    hooks_before = sum(len(point.fwd_hooks) for point in gpt2.hook_dict.values())
    il.capture(gpt2, gpt2_batch)
    handle.remove()
    assert len(calls) == 1
    assert sum(len(point.fwd_hooks) for point in gpt2.hook_dict.values()) == hooks_before


@pytest.mark.parametrize(
    "index", [-1, 1, np.int64(1), torch.tensor(1), (0, 2), range(2), slice(None, None, -1)], ids=str
)
def test_an_index_selects_the_rows_of_the_batch(gpt2_acts, index):
    rows = list(range(3))[index] if isinstance(index, slice) else index
    rows = rows if isinstance(rows, list | tuple | range) else [int(rows) % 3]
    selected = gpt2_acts[index]
    assert selected.batch.prompts == tuple(gpt2_acts.batch.prompts[row] for row in rows)
    for name in ("resid_final", "z", "q"):
        assert torch.equal(getattr(selected, name), getattr(gpt2_acts, name)[list(rows)]), name
    width = selected.batch.tokens.shape[1]
    of_rows = gpt2_acts.values.of_layer(1)[list(rows)]
    assert torch.equal(selected.values.of_layer(1), of_rows[:, :width])
    assert_close(selected.label_log_probs, gpt2_acts.label_log_probs[list(rows)])


def test_an_edit_of_the_stream_itself_needs_check_off(gpt2, gpt2_batch):
    with gpt2.hooks(fwd_hooks=[("blocks.1.hook_out", lambda x, hook: x + 1)]):
        with pytest.raises(il.InputError, match="do not add up"):
            il.capture(gpt2, gpt2_batch)
        il.capture(gpt2, gpt2_batch, check=False)


def test_predicted_looks_at_the_prompts_own_labels(gpt2):
    prompts = [
        il.Prompt.parse("love : bar eight : foo one :", answer="foo"),
        il.Prompt.parse("cat : yes dog : no one :", answer="no"),
    ]
    batch = il.tokenize(gpt2, prompts)
    acts = il.capture(gpt2, batch)
    assert batch.labels == ("bar", "foo", "no", "yes")
    assert int(acts.predicted[0]) in (0, 1)
    assert int(acts.predicted[1]) in (2, 3)
    choice_log_probs = acts.label_log_probs[1, 2:]
    assert int(acts.predicted[1]) == 2 + int(choice_log_probs.argmax())


@pytest.mark.parametrize(
    ("rows", "how", "message"),
    [
        (
            slice(None),
            {"names_filter": lambda name: "attn" not in name},
            "must contain 'blocks.0.attn.hook_q'",
        ),
        (slice(2), {}, "must have 3 rows"),
        (slice(1), {"remove_batch_dim": True}, "keep the batch axis"),
        ([1, 0, 2], {}, "other embeddings"),
    ],
)
def test_caches_that_do_not_fit_are_refused(gpt2, gpt2_batch, rows, how, message):
    _, cache = gpt2.run_with_cache(gpt2_batch.tokens[rows], **how)
    with pytest.raises(il.InputError, match=message):
        il.Activations.from_cache(
            gpt2, cache, gpt2_batch[:1] if "remove_batch_dim" in how else gpt2_batch
        )


def test_caches_of_shorter_or_longer_prompts_are_refused(gpt2, gpt2_batch):
    for tokens in (
        torch.cat([gpt2_batch.tokens[:, :1], gpt2_batch.tokens], dim=1),
        gpt2_batch.tokens[:, :-1],
    ):
        _, cache = gpt2.run_with_cache(tokens)
        with pytest.raises(il.InputError, match="must be of tokens of shape"):
            il.Activations.from_cache(gpt2, cache, gpt2_batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_increases_in_other_precisions_are_those_in_float32(load_tiny, name, dtype):
    """Half precision is captured in half and read out in float32, close to float32's numbers;
    float64 stays float64.
    """
    single, model = load_tiny(name), load_tiny(name, dtype=dtype)
    batch = il.tokenize(single, PROMPTS, prepend_bos=False)
    acts, exact = il.capture(model, batch), il.capture(single, batch)
    assert acts.resid_pre.dtype == dtype
    assert acts.readout.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    increases = il.head_log_prob_increase(acts, batch.answer_tokens)
    expected = il.head_log_prob_increase(exact, batch.answer_tokens)
    assert increases.dtype == acts.readout.dtype
    rounding = max(
        tolerance(), tolerance(dtype, n_terms=1, scale=0.5)
    )  # increases here are around a half
    torch.testing.assert_close(increases.float(), expected, atol=rounding, rtol=0)
    top = il.top_subheads(acts, k=5, by="increase")
    everything = il.subhead_log_prob_increase(acts, batch.answer_tokens)
    assert top.certified
    keys = torch.arange(everything.shape[-1])
    live = everything.masked_fill((keys > batch.last[:, None])[:, None, None], -torch.inf)
    assert_close(top.value, live.flatten(1).topk(5).values)


@pytest.mark.parametrize(
    "name",
    ["icl-mini", slow("icl-mini-llama"), slow("icl-mini-gptj")],
)
def test_half_precision_finds_the_same_heads(name):
    """At least 18 of the 20 heads of largest mean increase are the same in bfloat16."""
    heads_by_dtype = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = il.load_model(name, device="cpu", dtype=dtype)
        batch = il.tokenize(model, il.load_task("sentiment-number", n=64))
        top = il.top_heads(il.capture(model, batch), k=20, by="increase")
        heads_by_dtype[dtype] = set(top.heads)
    assert len(heads_by_dtype[torch.float32] & heads_by_dtype[torch.bfloat16]) >= 18


@pytest.fixture
def written_out(monkeypatch):
    """Return a list that collects the dtypes with which Hugging Face's written-out GELU is
    called.
    """
    called = []
    original_forward = NewGELUActivation.forward

    def forward(self, x):
        called.append(x.dtype)
        return original_forward(self, x)

    monkeypatch.setattr(NewGELUActivation, "forward", forward)
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_is_one_kernel_in_passes_of_our_own(load_tiny, gpt2_batch, written_out, dtype):
    """Numbers equal those of the model's own pass up to rounding; that pass stays unchanged, also
    after an error.
    """
    model = load_tiny("gpt2", dtype=dtype)
    layers = ModelView.of(model).n_layers
    tokens, mask = gpt2_batch.tokens, gpt2_batch.attention_mask
    last_log_probs(
        model, gpt2_batch
    )  # loading, and the first batch, also run the model itself for comparison
    written_out.clear()
    plain = model(tokens, attention_mask=mask).detach()
    assert written_out == [dtype] * layers
    ours = last_log_probs(model, gpt2_batch)
    assert len(written_out) == layers
    rows = torch.arange(len(gpt2_batch))
    theirs = plain[rows, gpt2_batch.last].log_softmax(-1)
    assert_close(ours, theirs)
    with pytest.raises(ZeroDivisionError), ModelView.of(model).inference_pass():
        raise ZeroDivisionError
    assert torch.equal(model(tokens, attention_mask=mask), plain)
    assert len(written_out) == 2 * layers
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_half_precision_is_rounded_as_the_model_rounds_it(load_tiny, gpt2_batch, written_out):
    model = load_tiny("gpt2", dtype=torch.bfloat16)
    last_log_probs(
        model, gpt2_batch
    )  # loading, and the first batch, also run the model itself for comparison
    written_out.clear()
    ours = last_log_probs(model, gpt2_batch)
    assert written_out == [torch.bfloat16] * ModelView.of(model).n_layers
    plain = model(gpt2_batch.tokens, attention_mask=gpt2_batch.attention_mask)
    theirs = plain[torch.arange(len(gpt2_batch)), gpt2_batch.last].float().log_softmax(-1)
    assert_close(ours, theirs)
