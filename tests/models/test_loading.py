"""Loading, head names, inferred norms, and messages for models that cannot be loaded."""

import families
import pytest
import torch
from family_tables import EXACT
from tolerance import assert_close
from torch import nn

import icl_lens as il
from icl_lens.models.norms import infer_norm
from icl_lens.models.passes.modules import all_modules
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs


def test_heads_print_and_parse():
    assert str(il.Head(22, 0)) == "L22H0"
    assert f"{il.Head(3, 11)}" == "L3H11"
    assert il.Head.parse("L22H0") == (22, 0)
    assert il.Head.parse(" l3h11 ") == il.Head(3, 11)
    for text in ("22,0", "L22", "LH", "22-0"):
        with pytest.raises(il.InputError, match="like 'L2H0'"):
            il.Head.parse(text)


def test_loaded_models_are_raw_and_quiet(gpt2):
    """Raw weights, eval mode, no gradients; the name of a local model is its folder's, not its
    path.
    """
    assert not gpt2.training
    assert not any(parameter.requires_grad for parameter in gpt2.parameters())
    assert gpt2.blocks[0].attn.b_V.abs().max() > 0, "b_V must not have been folded away"
    assert ModelView.of(gpt2).name == "gpt2"


def test_all_modules_are_those_of_the_model_and_of_the_model_that_it_wraps(gpt2):
    outer_modules, wrapped = (
        list(gpt2.modules()),
        list(getattr(gpt2, "original_model", gpt2).modules()),
    )
    modules = all_modules(gpt2)
    assert len(modules) == len({*map(id, modules)})
    assert {*map(id, modules)} == {*map(id, [*outer_modules, *wrapped])}
    assert all_modules(gpt2.blocks[1]) == list(gpt2.blocks[1].modules())


@pytest.mark.parametrize("name", EXACT)
def test_probed_norms_are_the_norms(load_tiny, name):
    """The final norm as inferred (gain, shift, eps, centering) gives what the module gives, on
    fresh vectors.
    """
    model = load_tiny(name)
    x = torch.randn(1, 5, families.D_MODEL, generator=torch.Generator().manual_seed(0)) * 3 + 1
    norm = infer_norm(model.ln_final, families.D_MODEL, x.device, default_eps=1e-5)
    for size in (1.0, 1e-3):  # small enough for eps to show
        assert_close(norm(size * x), model.ln_final(size * x))


def test_a_norm_is_read_again_when_its_weights_have_changed(gpt2):
    """Also by `data`, which leaves no trace in the version of a tensor."""
    view, module = ModelView.of(gpt2), gpt2.blocks[1].ln1
    x = torch.randn(1, 5, gpt2.cfg.d_model, generator=torch.Generator().manual_seed(0))
    before = view.attn_input_norm(1)
    assert view.attn_input_norm(1) is before
    weight = next(module.parameters())
    weight.data.mul_(2)
    try:
        assert_close(view.attn_input_norm(1)(x), module(x))
    finally:
        weight.data.div_(2)
    assert_close(view.attn_input_norm(1)(x), before(x))


def test_what_is_no_norm_is_refused():
    class Tanh(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    with pytest.raises(il.InputError, match="must be a LayerNorm or an RMSNorm"):
        infer_norm(Tanh(), 8, torch.device("cpu"), default_eps=1e-5)
    identity = infer_norm(nn.Identity(), 8, torch.device("cpu"), default_eps=1e-5)
    assert not identity.normalize


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(il.InputError, match=r"not a Hugging Face model: it has no config.json"):
        il.load_model(str(tmp_path))
    with pytest.raises(il.InputError, match="there is no folder"):
        il.load_model(str(tmp_path / "nowhere"))


def test_a_revision_is_for_models_of_the_hub(tmp_path):
    with pytest.raises(il.InputError, match=r"'icl-mini' is not .* has no revision 'v1'"):
        il.load_model("icl-mini", revision="v1")
    with pytest.raises(il.InputError, match=r"choose one of .*icl-mini-llama"):
        il.load_model("icl-mini-lama")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(il.InputError, match=r"must be a \.gguf file"):
        il.load_model(str(tmp_path / "config.json"))


def test_what_is_asked_for_reaches_the_loader(monkeypatch, family_folder):
    """The loader gets the folder that was found, and every keyword unchanged."""
    from transformer_lens.model_bridge import TransformerBridge

    seen = {}

    def boot(name, **kwargs):
        seen.update(name=name, **kwargs)
        raise OSError("enough")

    monkeypatch.setattr(TransformerBridge, "boot_transformers", boot)
    folder = str(family_folder("gpt2"))
    with pytest.raises(il.InputError, match=r"could not load .*: enough"):
        il.load_model(folder, device_map="auto", dtype=torch.bfloat16, n_ctx=16)
    assert seen["name"] == folder
    assert (seen["device_map"], seen["dtype"], seen["n_ctx"]) == ("auto", torch.bfloat16, 16)
    assert "device" not in seen
    assert seen["trust_remote_code"] is False


def test_bundled_models_load_without_bars_and_leave_the_setting(capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    il.load_model("icl-mini")
    assert "Loading" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_dtypes_by_name_or_as_stored_and_models_without_a_tokenizer(tmp_path):
    assert il.load_model("icl-mini", dtype="bfloat16").W_U.dtype == torch.bfloat16
    families.build("gpt2", dtype=torch.float16).save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    assert il.load_model(str(tmp_path)).W_U.dtype == torch.float32
    assert il.load_model(tmp_path, dtype=None).W_U.dtype == torch.float16
    with pytest.raises(il.InputError, match="needs its tokenizer"):
        il.load_model("mine", hf_model=nn.Linear(1, 1))


def test_a_tokenizer_that_is_passed_is_not_changed(family_folder):
    tokenizer = families.tokenizer()

    def state():
        plain = {
            name: value
            for name, value in vars(tokenizer).items()
            if not name.startswith("_tokenizer")
        }
        return (
            repr(plain),
            tokenizer.backend_tokenizer.to_str(),
            len(tokenizer),
            repr(tokenizer.special_tokens_map),
        )

    before = state()
    for name in ("gpt2", "llama_gqa"):
        model = il.load_model(str(family_folder(name)), tokenizer=tokenizer)
        assert il.score(model, il.tokenize(model, families.PROMPT)).isfinite().all()
        assert state() == before


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_hugging_face_model_that_is_passed_is_not_changed(name):
    """It keeps its modules, attention, training mode and gradients; its weights are in memory
    once.
    """
    hf = families.build(name)
    hf.set_attn_implementation("sdpa")
    hf.config.architectures = [type(hf).__name__]
    hf.train()
    modules = [(key, type(module), module.training) for key, module in hf.named_modules()]
    config, ids = hf.config.to_dict(), torch.tensor([families.PROMPT_IDS])
    with torch.no_grad():
        want = hf.eval()(ids).logits
        hf.train()
    model = il.load_model("mine", hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    batch = il.tokenize(model, families.PROMPT, prepend_bos=False)
    assert_close(last_log_probs(model, batch), want[:, -1].log_softmax(-1))
    assert il.capture(model, batch).pattern.isfinite().all()
    assert [(key, type(module), module.training) for key, module in hf.named_modules()] == modules
    assert hf.config._attn_implementation == "sdpa"
    assert hf.config.to_dict() == config
    assert all(parameter.requires_grad for parameter in hf.parameters())
    assert {parameter.data_ptr() for parameter in hf.parameters()} <= {
        parameter.data_ptr() for parameter in model.original_model.parameters()
    }
