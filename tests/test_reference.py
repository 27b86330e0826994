"""The reference is worth something only if it agrees with the models themselves."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import families
import pytest
import reference_hf
import torch
from tolerance import assert_close
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

TOKENS = torch.tensor(families.PROMPT_IDS)
TARGET = families.WORDS.index("foo")
EXACT = sorted(set(families.FAMILIES) - {"opt_post_norm"})


@contextmanager
def _hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _model_reads(model: PreTrainedModel, vectors: Tensor) -> Tensor:
    """What the model itself makes of residual vectors [n, d_model]: log-probabilities [n, vocab].

    The vectors take the place of the final norm's input in a real forward pass, so norm, unembedding,
    multipliers and soft-caps are the model's, each vector with its own scale.
    """
    norm = model.get_submodule(reference_hf._WIRING[model.config.model_type].final_norm)
    n_rows = -(-len(vectors) // len(TOKENS))
    filled = torch.zeros(n_rows * len(TOKENS), vectors.shape[-1], dtype=vectors.dtype)
    filled[: len(vectors)] = vectors
    filled = filled.reshape(n_rows, len(TOKENS), -1)
    hook = norm.register_forward_pre_hook(lambda module, args: (filled,))
    with _hooked(hook), torch.no_grad():
        logits = model(TOKENS.repeat(n_rows, 1)).logits
    return torch.log_softmax(logits.reshape(n_rows * len(TOKENS), -1)[: len(vectors)], dim=-1)


@pytest.mark.parametrize("name", EXACT)
def test_parts_sum_to_what_the_model_adds(float64, name):
    model = families.build(name, dtype=torch.float64)
    found = reference_hf.reference(model, TOKENS, TARGET)
    with torch.no_grad():
        model_log_probs = torch.log_softmax(model(TOKENS[None]).logits[0, -1], dim=-1)
    assert_close(found.log_probs, model_log_probs)
    assert_close(found.subhead_outputs.sum(2), found.head_outputs)
    assert_close(found.head_outputs.sum(1) + found.attn_bias, found.attn_out)
    for layer in range(families.N_LAYERS):
        neurons = found.neuron_outputs[layer].sum(0) + found.ffn_bias[layer]
        assert_close(neurons, found.ffn_out[layer])
    after = torch.cat([found.x[1:], found.final[None]])
    assert_close(found.x + found.attn_out + found.ffn_out, after)


@pytest.mark.parametrize("name", EXACT)
def test_label_values_weighted_by_attention_are_the_subheads(name):
    found = reference_hf.reference(families.build(name), TOKENS, TARGET)
    values = [
        found.label_value(layer, head, position)
        for layer, head, position in product(range(families.N_LAYERS), range(families.N_HEADS), range(len(TOKENS)))
    ]
    values = torch.stack(values).reshape(found.subhead_outputs.shape)
    assert_close(found.attention[..., None] * values, found.subhead_outputs)


@pytest.mark.parametrize("name", EXACT)
def test_increases_are_differences_of_the_models_own_readings(float64, name):
    """With each vector's own scale, reading a vector needs no formula: the model can be asked."""
    model = families.build(name, dtype=torch.float64)
    found = reference_hf.reference(model, TOKENS, TARGET, final_norm="own")

    def increase(parts: Tensor, base: Tensor) -> Tensor:
        read = _model_reads(model, torch.cat([(base + parts).reshape(-1, base.shape[-1]), base[None]]))
        return (read[:-1, TARGET] - read[-1, TARGET]).reshape(parts.shape[:-1])

    parallel = _ffn_ignores_attention(model)
    for layer in range(families.N_LAYERS):
        x = found.x[layer]
        ffn_input = x if parallel else x + found.attn_out[layer]
        expected = [
            (found.attn[layer], increase(found.attn_out[layer], x)),
            (found.ffn[layer], increase(found.ffn_out[layer], ffn_input)),
            (found.heads[layer], increase(found.head_outputs[layer], x)),
            (found.subheads[layer], increase(found.subhead_outputs[layer], x)),
            (found.neurons[layer], increase(found.neuron_outputs[layer], ffn_input)),
        ]
        for ours, models in expected:
            assert_close(ours, models)


def _ffn_ignores_attention(model: PreTrainedModel) -> bool:
    """Whether the last layer's FFN gives the same when that layer's attention writes nothing."""
    wiring = reference_hf._WIRING[model.config.model_type]
    last = reference_hf._layers(model)[-1]
    with_attention = reference_hf.capture(model, TOKENS).ffn_raw[-1]

    def silence(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    hook = last.get_submodule(wiring.out).register_forward_hook(silence, prepend=True)
    with _hooked(hook):
        return torch.equal(reference_hf.capture(model, TOKENS).ffn_raw[-1], with_attention)


def test_parallel_blocks_are_known_as_such():
    models = {name: families.build(name) for name in EXACT}
    parallel = {name for name, model in models.items() if _ffn_ignores_attention(model)}
    assert parallel == {"gptj", "neox", "phi", "cohere", "falcon", "falcon_new"}
    assert parallel == {name for name, model in models.items() if reference_hf.is_parallel(model.config)}


def _norm_and_unembedding(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Final norm weight and bias, W_U and b_U, as stored, in float64."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    if model.config.model_type == "gptj":
        names = ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight", "lm_head.bias"]
        return tuple(weights[name] for name in names)
    gain, W_U = weights["model.norm.weight"], weights["lm_head.weight"]
    return gain, torch.zeros_like(gain), W_U, torch.zeros(len(W_U), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["gptj", "llama_gqa", "gemma2"])
def test_frozen_increases_written_out(float64, name, bias):
    """GPT-J: centring and b_U. Llama: a root mean square. Gemma-2: gain 1 + w, logits capped at 4."""
    model = families.build(name, dtype=torch.float64)
    found = reference_hf.reference(model, TOKENS, TARGET, bias=bias)
    gain, norm_bias, W_U, b_U = _norm_and_unembedding(model)

    def log_prob(y: Tensor) -> Tensor:
        final = found.final
        if name == "gptj":
            y, final = y - y.mean(), final - final.mean()
        eps = 1e-5 if name == "gptj" else 1e-6
        normed = y / (final.pow(2).mean() + eps).sqrt() * (1 + gain if name == "gemma2" else gain)
        logits = W_U @ (normed + norm_bias) + b_U if bias else W_U @ normed
        if name == "gemma2":
            logits = 4 * torch.tanh(logits / 4)
        return torch.log_softmax(logits, dim=-1)[TARGET]

    for layer in range(families.N_LAYERS):
        x, attn_out, ffn_out = found.x[layer], found.attn_out[layer], found.ffn_out[layer]
        ffn_input = x if name == "gptj" else x + attn_out
        assert_close(found.attn[layer], log_prob(x + attn_out) - log_prob(x))
        assert_close(found.ffn[layer], log_prob(ffn_input + ffn_out) - log_prob(ffn_input))
        for head in range(families.N_HEADS):
            part = found.head_outputs[layer, head]
            assert_close(found.heads[layer, head], log_prob(x + part) - log_prob(x))


@pytest.mark.parametrize("name", EXACT)
def test_float32_and_float64_agree(name):
    single = reference_hf.reference(families.build(name), TOKENS, TARGET)
    double = reference_hf.reference(families.build(name, dtype=torch.float64), TOKENS, TARGET)
    for quantity in ("attn", "ffn", "heads", "subheads", "log_probs"):
        assert_close(getattr(single, quantity), getattr(double, quantity))


def test_a_misread_model_raises_instead_of_misleading():
    granite = families.build("granite")
    granite.config.residual_multiplier = 1.0  # the blocks keep the 0.7 they were built with
    with pytest.raises(AssertionError, match="layer 0"):
        reference_hf.reference(granite, TOKENS, TARGET)
    cohere = families.build("cohere")
    cohere.config.logit_scale = 1.0
    with pytest.raises(AssertionError, match="logits"):
        reference_hf.reference(cohere, TOKENS, TARGET)


def test_post_norm_opt_is_refused():
    with pytest.raises(ValueError, match="do_layer_norm_before=False"):
        reference_hf.reference(families.build("opt_post_norm"), TOKENS, TARGET)


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_tiny_models_hide_nothing(name):
    """Biases are not zero, gains not one, attention and predictions neither uniform nor saturated."""
    model = families.FAMILIES[name]()
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            assert 0.1 < parameter.std() < 0.4, path
        elif parameter.ndim == 1:
            gain = parameter + 1 if "gemma" in model.config.model_type else parameter
            assert 0.7 < gain.mean() < 1.3, path
            assert gain.std() > 0.1, path
    with torch.no_grad():
        output = model(TOKENS[None], output_attentions=True)
    row = torch.stack([attention[0, :, -1] for attention in output.attentions])
    torch.testing.assert_close(row.sum(-1), torch.ones_like(row[..., 0]))
    assert row.max() > 2 / len(TOKENS)
    assert 0.05 < output.logits[0, -1].softmax(-1).max() < 0.9
    again = families.build(name)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_sliding_windows_cut():
    for name, layer in [("mistral", 0), ("gemma2", 0), ("gemma3", 0), ("gpt_neo", 1)]:
        row = reference_hf.capture(families.build(name), TOKENS).pattern[layer, :, -1]
        assert (row[:, : -families.WINDOW] == 0).all(), name
        assert (row[:, -families.WINDOW :] > 0).all(), name


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_saved_models_load_as_they_were(name, tmp_path):
    model = families.save(name, tmp_path)
    assert (tmp_path / "config.json").exists()
    assert list(tmp_path.glob("*.safetensors"))
    # AutoTokenizer gives every Qwen2 folder a byte-level tokenizer, whatever the folder says.
    loader = PreTrainedTokenizerFast if name == "qwen2" else AutoTokenizer
    tokenizer = loader.from_pretrained(tmp_path)
    assert tokenizer(families.PROMPT)["input_ids"] == families.PROMPT_IDS
    assert len(tokenizer) == families.VOCAB_SIZE
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert_close(loaded(TOKENS[None]).logits, model(TOKENS[None]).logits)


@pytest.mark.parametrize("module", [families, reference_hf], ids=lambda module: module.__name__)
def test_references_are_independent(module):
    imported = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"icl_lens", "transformer_lens"}
