"""Passes of our own: what runs otherwise for their time, and that nothing of it is left."""

import pytest
import torch
from tolerance import assert_close
from transformers.activations import NewGELUActivation

import icl_lens as il
from icl_lens.models.view import ModelView


@pytest.fixture
def written_out(monkeypatch):
    """Dtypes that the GELU which Hugging Face writes out was called with."""
    called = []
    own = NewGELUActivation.forward

    def forward(self, x):
        called.append(x.dtype)
        return own(self, x)

    monkeypatch.setattr(NewGELUActivation, "forward", forward)
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_is_one_kernel_in_passes_of_our_own(load_tiny, gpt2_batch, written_out, dtype):
    """The same numbers as the model's own pass, within rounding; afterwards the model's own pass is as it was."""
    model = load_tiny("gpt2", dtype=dtype)
    layers = ModelView.of(model).n_layers
    tokens, mask = gpt2_batch.tokens, gpt2_batch.attention_mask
    plain = model(tokens, attention_mask=mask).detach()
    assert written_out == [dtype] * layers
    ours = il.last_log_probs(model, gpt2_batch)
    assert len(written_out) == layers
    rows = torch.arange(len(gpt2_batch))
    theirs = plain[rows, gpt2_batch.last].log_softmax(-1)
    assert_close(ours, theirs)
    assert torch.equal(model(tokens, attention_mask=mask), plain)
    assert len(written_out) == 2 * layers
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_half_precision_is_rounded_as_the_model_rounds_it(load_tiny, gpt2_batch, written_out):
    model = load_tiny("gpt2", dtype=torch.bfloat16)
    il.last_log_probs(model, gpt2_batch)
    assert written_out == [torch.bfloat16] * ModelView.of(model).n_layers


def test_an_error_in_a_pass_leaves_the_models_own(load_tiny, gpt2_batch, written_out):
    model = load_tiny("gpt2")
    view = ModelView.of(model)
    with pytest.raises(ZeroDivisionError), view.inference_pass():
        raise ZeroDivisionError
    model(gpt2_batch.tokens)
    assert len(written_out) == view.n_layers
