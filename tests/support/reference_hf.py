"""Log-probability increases of any family, read off Hugging Face modules with plain forward hooks.

One unpadded prompt at a time, no batching, no einsum tricks, no code shared with the package: a
second opinion whose only job is to be right. Every call checks that what it read adds up to the
model's residual stream and to the model's own logits, so a family wired differently from the table
fails instead of misleading.

Units: nats for increases; vectors are in residual-stream units, that is, after everything the
family does between a head's output and the residual stream (post-norm, residual multiplier).
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import families
import torch
from tolerance import assert_close
from torch import Tensor, nn
from transformers import PreTrainedModel

FinalNorm = Literal["frozen", "own"]
PARTS = ("attn", "ffn", "heads", "subheads", "neurons")


class _Wiring(NamedTuple):
    """Where one Hugging Face model type keeps what the reference reads; from `values` on, inside a
    layer.
    """

    layers: str
    final_norm: str
    values: str  # the projection that produces the values, alone or fused with queries and keys
    layout: str  # how the values lie in its output: "values", "last", "grouped" or "pieces"
    out: str  # the attention's output projection
    down: str  # the FFN's last projection, or the whole of a mixture of experts
    attn_post_norm: str | None = None
    ffn_post_norm: str | None = None


# Each string names the fields of `_Wiring`, in their order:
#     layers final_norm values layout out down [attn_post_norm ffn_post_norm]
# The last two are there only if the model normalizes what attention and the FFN write. All words but
# `layout` are paths of Hugging Face modules, which `print(hf_model)` shows.
_LLAMA = "model.layers model.norm self_attn.v_proj values self_attn.o_proj mlp.down_proj"
_POST_NORMED = f"{_LLAMA} post_attention_layernorm post_feedforward_layernorm"
_MIXTURE = "model.layers model.norm self_attn.v_proj values self_attn.o_proj mlp"
_BLOOM = "transformer.h transformer.ln_f self_attention.query_key_value grouped self_attention.dense mlp.dense_4h_to_h"
_PATHS = {
    "gpt2": "transformer.h transformer.ln_f attn.c_attn last attn.c_proj mlp.c_proj",
    "gptj": "transformer.h transformer.ln_f attn.v_proj values attn.out_proj mlp.fc_out",
    "gpt_neo": "transformer.h transformer.ln_f attn.attention.v_proj values attn.attention.out_proj mlp.c_proj",
    "gpt_neox": "gpt_neox.layers gpt_neox.final_layer_norm attention.query_key_value grouped attention.dense "
    "mlp.dense_4h_to_h",
    "opt": "model.decoder.layers model.decoder.final_layer_norm self_attn.v_proj values self_attn.out_proj fc2",
    "phi": "model.layers model.final_layernorm self_attn.v_proj values self_attn.dense mlp.fc2",
    "phi3": "model.layers model.norm self_attn.qkv_proj last self_attn.o_proj mlp.down_proj",
    "starcoder2": "model.layers model.norm self_attn.v_proj values self_attn.o_proj mlp.c_proj",
    **dict.fromkeys(
        ["llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "cohere", "stablelm"], _LLAMA
    ),
    **dict.fromkeys(
        [
            "cohere2",
            "smollm3",
            "glm",
            "apertus",
            "seed_oss",
            "nemotron",
            "arcee",
            "hunyuan_v1_dense",
        ],
        _LLAMA,
    ),
    **dict.fromkeys(["gemma2", "gemma3_text", "olmo2", "olmo3"], _POST_NORMED),
    "glm4": f"{_LLAMA} post_self_attn_layernorm post_mlp_layernorm",
    "mpt": "transformer.blocks transformer.norm_f attn.Wqkv last attn.out_proj ffn.down_proj",
    "codegen": "transformer.h transformer.ln_f attn.qkv_proj pieces attn.out_proj mlp.fc_out",
    **dict.fromkeys(["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"], _MIXTURE),
    "granitemoe": _MIXTURE.removesuffix("mlp") + "block_sparse_moe",
    **dict.fromkeys(["falcon", "bloom"], _BLOOM),
}
"""Model type (not family) -> its string."""
_WIRING = {kind: _Wiring(*paths.split()) for kind, paths in _PATHS.items()}


def _setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` that the configuration has and that is not None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def is_parallel(config: Any) -> bool:
    """Whether attention and FFN read the same residual, so that the FFN's increase is relative to
    x.
    """
    if config.model_type in {"gptj", "phi", "cohere", "cohere2", "codegen"}:
        return True
    if config.model_type in {"gpt_neox", "stablelm"}:
        return config.use_parallel_residual
    if config.model_type == "falcon":
        return config.new_decoder_architecture or config.parallel_attn
    return False


def _layers(hf_model: PreTrainedModel) -> nn.ModuleList:
    layers = hf_model.get_submodule(_WIRING[hf_model.config.model_type].layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


class _Norm:
    """A LayerNorm or RMSNorm in its parts: centering, scale, gain, bias."""

    def __init__(self, module: Any) -> None:
        kind = type(module).__name__
        self.centered = "LayerNorm" in kind
        self.eps = _setting(module, "eps", "variance_epsilon")
        self.gain = module.weight.detach() + (
            1.0 if kind.startswith("Gemma") or kind.endswith("1P") else 0.0
        )
        bias = getattr(module, "bias", None)
        self.bias = torch.zeros_like(self.gain) if bias is None else bias.detach()

    def center(self, y: Tensor) -> Tensor:
        return y - y.mean(-1, keepdim=True) if self.centered else y

    def scale(self, y: Tensor) -> Tensor:
        return 1.0 / (self.center(y).pow(2).mean(-1, keepdim=True) + self.eps).sqrt()


def _weight_in_out(module: Any) -> Tensor:
    """Return a projection's weight as [in, out]: GPT-2's Conv1D stores it so, nn.Linear as [out,
    in].
    """
    weight = module.weight.detach()
    return weight if type(module).__name__ == "Conv1D" else weight.T


def _bias(module: Any, output: Tensor) -> Tensor:
    bias = getattr(module, "bias", None)
    return torch.zeros_like(output) if bias is None else bias.detach()


def _split_values(output: Tensor, layout: str, n_kv: int, d_head: int) -> Tensor:
    """Values [pos, kv head, d_head] out of the projection's output [pos, anything]."""
    n_pos = output.shape[0]
    if layout == "grouped":  # for each group: its queries, its key, its value
        return output.reshape(n_pos, n_kv, -1, d_head)[:, :, -1]
    if (
        layout == "pieces"
    ):  # CodeGen: four pieces, each with queries, values and keys of a quarter of the heads
        return output.reshape(n_pos, 4, 3, -1)[:, :, 1].reshape(n_pos, n_kv, d_head)
    return output[:, -n_kv * d_head :].reshape(n_pos, n_kv, d_head)


def _n_kv_heads(config: Any, n_heads: int) -> int:
    if config.model_type == "falcon":
        if config.new_decoder_architecture:
            return config.num_kv_heads
        return 1 if config.multi_query else n_heads
    return _setting(config, "num_key_value_heads", default=n_heads)


def capture(hf_model: PreTrainedModel, token_ids: Tensor) -> SimpleNamespace:
    """Run one prompt and return, per layer, what plain hooks saw.

    `x`, `attn_raw`, `ffn_raw` [layer, pos, d_model] (layer input, outputs of attention's and FFN's
    last projection), `z` [layer, pos, head, d_head], `v` [layer, pos, kv, d_head], `m` [layer, pos,
    d_mlp], `pattern` [layer, head, query, key], `final` [pos, d_model] (input of the final norm),
    `logits` [pos, vocab].
    """
    config = hf_model.config
    wiring = _WIRING[config.model_type]
    if config.model_type == "opt" and not config.do_layer_norm_before:
        raise ValueError(
            "post-norm OPT (do_layer_norm_before=False) normalizes the residual stream itself"
        )
    layers = _layers(hf_model)
    n_heads = _setting(config, "num_attention_heads", "num_heads", "n_head")
    seen: dict[str, list[Tensor]] = {
        name: [] for name in ("x", "v", "z", "attn_raw", "m", "ffn_raw", "final")
    }

    # Everything is copied immediately: some families add to these tensors in place afterwards.
    def keep_input(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            tensor = args[0] if args else kwargs["hidden_states"]
            seen[name].append(tensor.detach().clone().reshape(len(token_ids), -1))

        return hook

    def keep_output(name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            output = (
                output[0] if isinstance(output, tuple) else output
            )  # mixtures of experts: and the router's scores
            seen[name].append(output.detach().clone().reshape(len(token_ids), -1))

        return hook

    handles = [
        hf_model.get_submodule(wiring.final_norm).register_forward_pre_hook(
            keep_input("final"), with_kwargs=True
        )
    ]
    for layer in layers:
        out, down = layer.get_submodule(wiring.out), layer.get_submodule(wiring.down)
        handles += [
            layer.register_forward_pre_hook(keep_input("x"), with_kwargs=True),
            layer.get_submodule(wiring.values).register_forward_hook(keep_output("v")),
            out.register_forward_pre_hook(keep_input("z"), with_kwargs=True),
            out.register_forward_hook(keep_output("attn_raw")),
            down.register_forward_pre_hook(keep_input("m"), with_kwargs=True),
            down.register_forward_hook(keep_output("ffn_raw")),
        ]
    try:
        with torch.no_grad():
            output = hf_model(token_ids[None], output_attentions=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()

    z = torch.stack(seen["z"])
    d_head = z.shape[-1] // n_heads
    n_kv = _n_kv_heads(config, n_heads)
    return SimpleNamespace(
        x=torch.stack(seen["x"]),
        attn_raw=torch.stack(seen["attn_raw"]),
        ffn_raw=torch.stack(seen["ffn_raw"]),
        z=z.reshape(*z.shape[:2], n_heads, d_head),
        v=torch.stack([_split_values(v, wiring.layout, n_kv, d_head) for v in seen["v"]]),
        m=torch.stack(seen["m"]),
        pattern=torch.stack([attention[0] for attention in output.attentions]),
        final=seen["final"][0],
        logits=output.logits[0],
    )


class _Readout:
    """Residual vector -> logits, with the final norm's scale frozen at `final` or each vector's
    own.
    """

    def __init__(self, hf_model: PreTrainedModel, final: Tensor) -> None:
        config = hf_model.config
        unembed = hf_model.get_output_embeddings()
        self.norm = _Norm(hf_model.get_submodule(_WIRING[config.model_type].final_norm))
        self.W_U = _weight_in_out(unembed)
        self.b_U = _bias(unembed, self.W_U[0])
        self.multiplier = _setting(config, "logit_scale", default=1.0) / _setting(
            config, "logits_scaling", default=1.0
        )
        self.soft_cap = _setting(config, "final_logit_softcapping")
        self.frozen_scale = self.norm.scale(final)

    def logits(self, y: Tensor, final_norm: FinalNorm, bias: bool) -> Tensor:
        scale = self.frozen_scale if final_norm == "frozen" else self.norm.scale(y)
        normed = self.norm.center(y) * scale * self.norm.gain
        if bias:
            logits = ((normed + self.norm.bias) @ self.W_U + self.b_U) * self.multiplier
        else:
            logits = (normed @ self.W_U) * self.multiplier
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def score(
        self, y: Tensor, target: int, against: Sequence[int], final_norm: FinalNorm, bias: bool
    ) -> Tensor:
        """log p(target), or log p(target) − log Σ p(against), by softmax over the whole
        vocabulary.
        """
        log_probs = torch.log_softmax(self.logits(y, final_norm, bias), dim=-1)
        if not against:
            return log_probs[..., target]
        return log_probs[..., target] - log_probs[..., list(against)].exp().sum(-1).log()


def _check(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise if the reference misreads the model; some norms run in float32 whatever the model's
    dtype.
    """
    assert_close(actual.float(), expected, msg=f"{name}: the reference differs from the model")


class Reference:
    """What one prompt's last position reads and writes, and what each part of it does to a token's
    log-probability.

    Vectors: `x`, `attn_out`, `ffn_out`, `ffn_input` [layer, d_model], `head_outputs` [layer, head,
    d_model], `subhead_outputs` [layer, head, pos, d_model], `neuron_outputs(layer)` [d_mlp,
    d_model], `final` [d_model]. `attn_bias` and `ffn_bias` [layer, d_model] are the shares of b_O
    and b_out, which belong to no head and no neuron. `attention` is [layer, head, pos],
    `label_values` [layer, head, pos, d_model] is not weighted by it, and `log_probs` [vocab] are
    the model's own. Post-norms have the scales of the actual attention (FFN) output at the last
    position.
    """

    def __init__(self, hf_model: PreTrainedModel, token_ids: Tensor) -> None:
        config, layers = hf_model.config, _layers(hf_model)
        wiring = _WIRING[config.model_type]
        seen = capture(hf_model, token_ids)
        n_layers, _, n_heads, d_head = seen.z.shape
        values = seen.v.repeat_interleave(n_heads // seen.v.shape[2], dim=2)
        self.x, self.final, self.attention = seen.x[:, -1], seen.final[-1], seen.pattern[:, :, -1]
        self.readout = _Readout(hf_model, self.final)

        def to_stream(post_norm: str | None, layer: int, raw: Tensor) -> Tensor:
            """Return the factor [d_model] that parts of `raw` [d_model] get on their way into the
            residual stream.
            """
            factor = torch.full_like(raw, _setting(config, "residual_multiplier", default=1.0))
            if post_norm is None:
                return factor
            norm = _Norm(layers[layer].get_submodule(post_norm))
            assert (
                not norm.centered
            )  # all post-norms met so far are RMSNorms, hence linear once their scale is fixed
            return factor * norm.scale(raw) * norm.gain

        heads, label_values, attn_factors, ffn_factors, biases, self._down = [], [], [], [], [], []
        for layer in range(n_layers):
            out, down = (layers[layer].get_submodule(path) for path in (wiring.out, wiring.down))
            attn_factors.append(to_stream(wiring.attn_post_norm, layer, seen.attn_raw[layer, -1]))
            ffn_factors.append(to_stream(wiring.ffn_post_norm, layer, seen.ffn_raw[layer, -1]))
            W_O = _weight_in_out(out).reshape(n_heads, d_head, -1) * attn_factors[layer]
            heads.append(
                torch.stack([seen.z[layer, -1, head] @ W_O[head] for head in range(n_heads)])
            )
            label_values.append(
                torch.stack([values[layer, :, head] @ W_O[head] for head in range(n_heads)])
            )
            biases.append((_bias(out, self.final), _bias(down, self.final)))
            if hasattr(down, "weight"):
                self._down.append((seen.m[layer, -1], _weight_in_out(down), ffn_factors[layer]))
        attn_factor, ffn_factor = torch.stack(attn_factors), torch.stack(ffn_factors)
        self.attn_out, self.ffn_out = (
            seen.attn_raw[:, -1] * attn_factor,
            seen.ffn_raw[:, -1] * ffn_factor,
        )
        attn_bias, ffn_bias = (torch.stack(bias) for bias in zip(*biases, strict=True))
        self.attn_bias, self.ffn_bias = attn_bias * attn_factor, ffn_bias * ffn_factor
        self.head_outputs, self.label_values = torch.stack(heads), torch.stack(label_values)
        self.subhead_outputs = self.attention[..., None] * self.label_values
        self.ffn_input = self.x if is_parallel(config) else self.x + self.attn_out

        following = torch.cat([self.x[1:], self.final[None]])
        for layer in range(n_layers):
            after = self.x[layer] + self.attn_out[layer] + self.ffn_out[layer]
            _check(f"layer {layer}: x + attention + FFN", after, following[layer])
        logits = self.readout.logits(self.final, "own", bias=True)
        _check("logits", logits, seen.logits[-1])
        self.log_probs = torch.log_softmax(logits, dim=-1)

    def neuron_outputs(self, layer: int) -> Tensor:
        activations, weight, factor = self._down[layer]
        return activations[:, None] * weight * factor

    def increase(
        self,
        part: str,
        target: int,
        against: Sequence[int] = (),
        *,
        final_norm: FinalNorm = "frozen",
        bias: bool = True,
    ) -> Tensor:
        """Return one of `PARTS`, nats: [layer] (attn, ffn), [layer, head], [layer, head, pos] or
        [layer, d_mlp].
        """
        outputs = {
            "attn": self.attn_out.__getitem__,
            "ffn": self.ffn_out.__getitem__,
            "heads": self.head_outputs.__getitem__,
            "subheads": self.subhead_outputs.__getitem__,
            "neurons": self.neuron_outputs,
        }
        increases = []
        for layer in range(len(self.x)):
            base = self.ffn_input[layer] if part in ("ffn", "neurons") else self.x[layer]
            added = outputs[part](layer)
            before, after = (
                self.readout.score(y, target, against, final_norm, bias)
                for y in (base, base + added)
            )
            increases.append(after - before)
        return torch.stack(increases)


def reference(
    hf_model: PreTrainedModel, token_ids: Tensor, target: int, against: Sequence[int] = ()
) -> Any:
    """A `Reference` that has every part's increase (or contrast) as an attribute: `attn`, `ffn`,
    `heads`, …
    """
    increases_of_parts = Reference(hf_model, token_ids)
    for part in PARTS:
        setattr(increases_of_parts, part, increases_of_parts.increase(part, target, against))
    return increases_of_parts


def output_weights(hf: Any, layer: int) -> Tensor:
    """Return a layer's W_O [head d_head d_model]."""
    out = _layers(hf)[layer].get_submodule(_WIRING[hf.config.model_type].out)
    return _weight_in_out(out).unflatten(0, (families.N_HEADS, -1))
