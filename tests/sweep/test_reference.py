"""The reference agrees with the models themselves, and refuses what it would misread."""

import ast
from itertools import product
from pathlib import Path

import families
import pytest
import reference_hf
import torch
from tolerance import assert_close
from torch import Tensor
from transformers import PreTrainedModel

TOKENS = torch.tensor(families.PROMPT_IDS)
TARGET = families.WORDS.index("foo")
READ = families.CONFIGS.keys() - families.OTHER_LAYOUTS
EXACT = sorted(READ - {"opt_post_norm"})
SUPPORT = Path(families.__file__).parent
REFERENCES = ["families", "tolerance", *sorted(path.stem for path in SUPPORT.glob("reference*.py"))]


def _model_reads(model: PreTrainedModel, vectors: Tensor) -> Tensor:
    """Return the log-probabilities [n, vocab] that the model itself reads from residual vectors [n,
    d_model].

    The vectors take the place of the final norm's input in a real forward pass, so norm,
    unembedding, multipliers and soft-caps are the model's, each vector with its own scale.
    """
    norm = model.get_submodule(reference_hf._WIRING[model.config.model_type].final_norm)
    with norm.register_forward_pre_hook(lambda module, args: (vectors[None],)), torch.no_grad():
        logits = model(torch.zeros(1, len(vectors), dtype=torch.long)).logits[0]
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("name", EXACT)
def test_parts_add_up_and_are_read_as_the_model_reads_them(float64, name):
    """With each vector's own scale, the model itself reads the vectors, without any formula."""
    model = families.build(name, dtype=torch.float64)
    reference = reference_hf.Reference(model, TOKENS)
    with torch.no_grad():
        assert_close(
            reference.log_probs, torch.log_softmax(model(TOKENS[None]).logits[0, -1], dim=-1)
        )
    assert_close(reference.subhead_outputs.sum(2), reference.head_outputs)
    assert_close(reference.head_outputs.sum(1) + reference.attn_bias, reference.attn_out)
    neurons = None
    if name not in families.MIXTURES:
        neurons = torch.stack(
            [reference.neuron_outputs(layer) for layer in range(families.N_LAYERS)]
        )
        assert_close(neurons.sum(1) + reference.ffn_bias, reference.ffn_out)
    assert_close(
        reference.x + reference.attn_out + reference.ffn_out,
        torch.cat([reference.x[1:], reference.final[None]]),
    )

    mid = reference.x if _ffn_ignores_attention(model) else reference.x + reference.attn_out
    for part, base, added in [
        ("attn", reference.x, reference.attn_out),
        ("ffn", mid, reference.ffn_out),
        ("heads", reference.x, reference.head_outputs),
        ("subheads", reference.x, reference.subhead_outputs),
        ("neurons", mid, neurons),
    ]:
        if added is None:  # neurons of a mixture of experts
            continue
        before = base.reshape(len(base), *[1] * (added.ndim - 2), -1)
        rows = torch.cat(
            [before.expand_as(added).reshape(-1, families.D_MODEL), (before + added).flatten(0, -2)]
        )
        read = torch.cat([_model_reads(model, piece) for piece in rows.split(families.N_CTX)])
        for against in ([], [7], [7, 12]):
            score = read[:, TARGET] - (read[:, against].exp().sum(-1).log() if against else 0)
            expected = (score[len(score) // 2 :] - score[: len(score) // 2]).reshape(
                added.shape[:-1]
            )
            assert_close(
                reference.increase(part, TARGET, against, final_norm="own"), expected, msg=part
            )


def _ffn_ignores_attention(model: PreTrainedModel) -> bool:
    """Whether the last layer's FFN gives the same when that layer's attention writes nothing."""
    out = reference_hf._layers(model)[-1].get_submodule(
        reference_hf._WIRING[model.config.model_type].out
    )
    with_attention = reference_hf.capture(model, TOKENS).ffn_raw[-1]
    with out.register_forward_hook(
        lambda module, args, output: torch.zeros_like(output), prepend=True
    ):
        return torch.equal(reference_hf.capture(model, TOKENS).ffn_raw[-1], with_attention)


@pytest.mark.parametrize("name", ["gptj", "llama_gqa", "gemma2"])
def test_frozen_increases_written_out(float64, name):
    """GPT-J: centering and b_U. Llama: a root mean square. Gemma-2: gain 1 + w, logits capped at
    4.
    """
    model = families.build(name, dtype=torch.float64)
    reference, weights = reference_hf.Reference(model, TOKENS), model.state_dict()
    norm, shift, b_U = "model.norm", 0.0, 0.0
    if name == "gptj":
        norm, shift, b_U = (
            "transformer.ln_f",
            weights["transformer.ln_f.bias"],
            weights["lm_head.bias"],
        )
    gain = weights[f"{norm}.weight"] + (name == "gemma2")

    def log_prob(y: Tensor, bias: bool) -> Tensor:
        final = reference.final
        if name == "gptj":
            y, final = y - y.mean(), final - final.mean()
        normed = y / (final.pow(2).mean() + (1e-5 if name == "gptj" else 1e-6)).sqrt() * gain
        logits = weights["lm_head.weight"] @ (normed + bias * shift) + bias * b_U
        if name == "gemma2":
            logits = 4 * torch.tanh(logits / 4)
        return torch.log_softmax(logits, dim=-1)[TARGET]

    for bias, layer in product((True, False), range(families.N_LAYERS)):
        x, attn_out, ffn_out = (
            reference.x[layer],
            reference.attn_out[layer],
            reference.ffn_out[layer],
        )
        mid = x if name == "gptj" else x + attn_out
        attn, ffn, heads = (
            reference.increase(part, TARGET, bias=bias)[layer] for part in ("attn", "ffn", "heads")
        )
        assert_close(attn, log_prob(x + attn_out, bias) - log_prob(x, bias))
        assert_close(ffn, log_prob(mid + ffn_out, bias) - log_prob(mid, bias))
        for head, output in enumerate(reference.head_outputs[layer]):
            assert_close(heads[head], log_prob(x + output, bias) - log_prob(x, bias))


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [("granite", "residual_multiplier", "layer 0"), ("cohere", "logit_scale", "logits")],
)
def test_a_misread_model_raises_instead_of_misleading(name, setting, message):
    model = families.build(name)
    setattr(model.config, setting, 1.0)  # the blocks keep what they were built with
    with pytest.raises(AssertionError, match=message):
        reference_hf.Reference(model, TOKENS)


def test_post_norm_opt_is_refused():
    with pytest.raises(ValueError, match="do_layer_norm_before=False"):
        reference_hf.Reference(families.build("opt_post_norm"), TOKENS)


@pytest.mark.parametrize("name", sorted(READ))
def test_tiny_models_hide_nothing(name):
    """Attention and predictions are neither uniform nor saturated."""
    model = families.build(name)
    check_biases_and_gains(model)
    with torch.no_grad():
        output = model(TOKENS[None], output_attentions=True)
    row = torch.stack([attention[0, :, -1] for attention in output.attentions])
    if name != "gpt_oss":  # part of its attention goes to no position
        torch.testing.assert_close(row.sum(-1), torch.ones_like(row[..., 0]))
    assert row.max() > 2 / len(TOKENS)
    assert 0.05 < output.logits[0, -1].softmax(-1).max() < 0.9


def check_biases_and_gains(model):
    """Biases are not zero, and gains not one."""
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            assert 0.1 < parameter.std() < 0.4, path
        elif "norm" in path or "ln" in path:
            gain = parameter + 1 if "gemma" in model.config.model_type else parameter
            assert 0.7 < gain.mean() < 1.3, path
            assert gain.std() > (0.1 if len(gain) > 8 else 0.04), path


@pytest.mark.parametrize("name", sorted(READ))
def test_tiny_models_are_the_same_each_time(name):
    first, second = families.build(name).parameters(), families.build(name).parameters()
    for parameter, again in zip(first, second, strict=True):
        assert torch.equal(parameter, again)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_import_neither_the_package_nor_other_modules_that_do(name):
    imported = set()
    for node in ast.walk(ast.parse((SUPPORT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert "torch" in imported
    assert not imported & {"icl_lens", "experiments", "transformer_lens"}
    assert imported & {path.stem for path in SUPPORT.glob("*.py")} <= set(REFERENCES)
