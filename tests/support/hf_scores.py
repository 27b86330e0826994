"""Attention scores and what components wrote, computed with Hugging Face's GPT-2, Llama and Qwen 3 alone."""

import torch


def hf_writers(hf, ids, position, layer):
    """Name -> vector of everything written at a position of a GPT-2 or Llama, from hooks on Hugging Face's modules."""
    gpt2 = hf.config.model_type == "gpt2"
    layers = hf.transformer.h if gpt2 else hf.model.layers
    seen, found = {}, {}
    handles = []
    for number, block in enumerate(layers):
        out = block.attn.c_proj if gpt2 else block.self_attn.o_proj
        handles.append(out.register_forward_pre_hook(lambda m, a, n=number: seen.__setitem__(("z", n), a[0])))
        handles.append(block.mlp.register_forward_hook(lambda m, a, o, n=number: seen.__setitem__(("mlp", n), o)))
    with torch.no_grad():
        states = hf(ids[None], output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    found["embed"] = states[0][0, position]
    if gpt2:
        found["pos_embed"] = hf.transformer.wpe.weight[position]
        found["embed"] = found["embed"] - found["pos_embed"]
    bias = torch.zeros_like(found["embed"])
    for number, block in enumerate(layers[:layer]):
        out = block.attn.c_proj if gpt2 else block.self_attn.o_proj
        weight = (out.weight if gpt2 else out.weight.T).detach()
        z = seen["z", number][0, position].unflatten(-1, (hf.config.num_attention_heads, -1))
        for head, one in enumerate(z):
            found[f"L{number}H{head}"] = one @ weight.unflatten(0, z.shape)[head]
        found[f"F{number}"] = seen["mlp", number][0, position]
        bias = bias if getattr(out, "bias", None) is None else bias + out.bias.detach()
    return found | {"bias": bias}, states[layer][0]


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
