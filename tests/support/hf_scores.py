"""Attention scores, and vectors that components write, computed from Hugging Face's GPT-2, Llama and Qwen 3 only."""

import reference_hf
import torch


def hf_writers(hf, ids, position, layer):
    """Return {name: vector} of what is written at a position before a layer, and the layer's inputs [pos, d_model]."""
    seen, found = reference_hf.capture(hf, ids), {}
    found["embed"] = seen.x[0, position]
    if hf.config.model_type == "gpt2":
        found["pos_embed"] = hf.transformer.wpe.weight[position].detach()
        found["embed"] = found["embed"] - found["pos_embed"]
    bias = torch.zeros_like(found["embed"])
    for number, block in enumerate(reference_hf._layers(hf)[:layer]):
        out = block.get_submodule(reference_hf._WIRING[hf.config.model_type].out)
        z = seen.z[number, position]
        for head, weight in enumerate(reference_hf._weight_in_out(out).unflatten(0, z.shape)):
            found[f"L{number}H{head}"] = z[head] @ weight
        found[f"F{number}"] = seen.ffn_raw[number, position]
        bias = bias + reference_hf._bias(out, bias)
    return found | {"bias": bias}, seen.x[layer]


def hf_score(hf, layer, head, x_query, x_key, i, j):
    """A head's score before softmax as a function of two residual streams, with the scales of all norms detached."""

    def norm(x, module, center, eps):
        x = x - x.mean(-1, keepdim=True) if center else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps).detach() * module.weight

    gpt2 = hf.config.model_type == "gpt2"
    d_head = getattr(hf.config, "head_dim", None) or hf.config.hidden_size // hf.config.num_attention_heads
    if gpt2:
        block = hf.transformer.h[layer]
        (q, _, _), (_, k, _) = (
            block.attn.c_attn(norm(x, block.ln_1, True, block.ln_1.eps) + block.ln_1.bias).chunk(3, -1)
            for x in (x_query, x_key)
        )
        return (q.unflatten(-1, (-1, d_head))[head] * k.unflatten(-1, (-1, d_head))[head]).sum() / d_head**0.5
    block, group = hf.model.layers[layer], hf.config.num_attention_heads // hf.config.num_key_value_heads
    eps = hf.config.rms_norm_eps
    q = block.self_attn.q_proj(norm(x_query, block.input_layernorm, False, eps)).unflatten(-1, (-1, d_head))[head]
    k = block.self_attn.k_proj(norm(x_key, block.input_layernorm, False, eps)).unflatten(-1, (-1, d_head))
    k = k[head // group]
    if hf.config.model_type == "qwen3":
        q, k = norm(q, block.self_attn.q_norm, False, eps), norm(k, block.self_attn.k_norm, False, eps)
    cos, sin = hf.model.rotary_emb(q, torch.tensor([[i, j]]))

    def rotate(x, c, s):
        return x * c + torch.cat([-x[d_head // 2 :], x[: d_head // 2]]) * s

    return (rotate(q, cos[0, 0], sin[0, 0]) * rotate(k, cos[0, 1], sin[0, 1])).sum() / d_head**0.5
