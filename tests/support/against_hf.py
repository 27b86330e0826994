"""Compares activations of any model class with the plain Hugging Face reference, on raw or on processed weights.

TransformerLens' weight processing folds norms into the next matrices, centers what writes into the stream and
moves the part of each value that does not depend on the input, `κ = (b_V + β W_V) W_O` (β: the shift of the norm
before attention), from the heads into b_O. Centring and folding leave logits as they were up to one number for the
whole vocabulary. So layers, neurons and label log-probabilities stay, while a head loses κ and a subhead its
attention weight times κ. `constants` computes κ from Hugging Face's weights; nothing here reads the package's code.
"""

import copy
from contextlib import contextmanager

import reference_hf
import torch
from tolerance import assert_close

import icl_lens as il

CONVENTIONS = [("frozen", True), ("frozen", False), ("own", True), ("own", False)]
_NORMS_BEFORE_ATTENTION = ("ln_1", "input_layernorm", "self_attn_layer_norm")


def constant_values(hf, layer):
    """[head, d_head]: the part of every value in a layer that does not depend on the input."""
    wiring = reference_hf._WIRING[hf.config.model_type]
    block = reference_hf._layers(hf)[layer]
    norm = next((getattr(block, name) for name in _NORMS_BEFORE_ATTENTION if hasattr(block, name)), None)
    shift = torch.zeros(hf.config.hidden_size, dtype=hf.dtype)
    if getattr(norm, "bias", None) is not None:
        shift = norm.bias.detach()
    setting = reference_hf._setting
    n_heads = setting(hf.config, "num_attention_heads", "num_heads", "n_head")
    n_kv = reference_hf._n_kv_heads(hf.config, n_heads)
    out = block.get_submodule(wiring.out)
    d_head = reference_hf._weight_in_out(out).shape[0] // n_heads
    with torch.no_grad():
        projected = block.get_submodule(wiring.values)(shift[None])
    values = reference_hf._split_values(projected, wiring.layout, n_kv, d_head)[0]
    return values.repeat_interleave(n_heads // n_kv, dim=0)


def constants(hf, layer):
    """κ [head, d_model] of a layer, before any norm or multiplier that follows attention."""
    out = reference_hf._layers(hf)[layer].get_submodule(reference_hf._WIRING[hf.config.model_type].out)
    values = constant_values(hf, layer)
    weight = reference_hf._weight_in_out(out).reshape(*values.shape, -1)
    return torch.einsum("hd,hdm->hm", values, weight)


def expected(hf, tokens, target, *, folded, final_norm, bias):
    """The reference's answer; with `folded`, its heads and subheads without their constant part."""
    theirs = reference_hf.reference(hf, tokens, target, final_norm=final_norm, bias=bias)
    if not folded:
        return theirs
    readout = reference_hf._Readout(hf, theirs.final)
    multiplier = reference_hf._setting(hf.config, "residual_multiplier", default=1.0)
    for layer, x in enumerate(theirs.x):
        kappa = constants(hf, layer) * multiplier  # families with a norm after attention have no constant part
        parts = theirs.subhead_outputs[layer] - theirs.attention[layer][..., None] * kappa[:, None]

        def log_prob(y):
            return readout.log_prob(y, target, final_norm, bias)

        theirs.heads[layer] = log_prob(x + theirs.head_outputs[layer] - kappa) - log_prob(x)
        theirs.subheads[layer] = log_prob(x + parts) - log_prob(x)
    return theirs


def check_increases(acts, batch, hf, *, folded, conventions=CONVENTIONS):
    """Layers, heads, subheads, neurons, label log-probabilities and attention rows of a batch, prompt by prompt."""
    targets = batch.answer_tokens
    layers = range(acts.resid_pre.shape[1])
    for final_norm, bias in conventions:
        convention = {"final_norm": final_norm, "bias": bias}
        of_layers = il.layer_log_prob_increase(acts, targets, **convention)
        heads = il.head_log_prob_increase(acts, targets, **convention)
        subheads = il.subhead_log_prob_increase(acts, targets, **convention)
        neurons = [il.neuron_log_prob_increase(acts, targets, layer, **convention) for layer in layers]
        for i in range(len(batch)):
            n_tokens = int(batch.last[i]) + 1
            theirs = expected(hf, batch.tokens[i, :n_tokens], int(targets[i]), folded=folded, **convention)
            for what, ours, other in [
                ("attention layers", of_layers.attn[i], theirs.attn),
                ("FFN layers", of_layers.ffn[i], theirs.ffn),
                ("heads", heads[i], theirs.heads),
                ("subheads", subheads[i, :, :, :n_tokens], theirs.subheads),
                ("padding", subheads[i, :, :, n_tokens:], torch.zeros_like(subheads[i, :, :, n_tokens:])),
                ("label log-probabilities", acts.label_log_probs[i], theirs.log_probs[batch.label_tokens]),
                ("attention", acts.pattern[i, :, :, :n_tokens], theirs.attention),
                *[(f"neurons of layer {layer}", neurons[layer][i], theirs.neurons[layer]) for layer in layers],
            ]:
                assert_close(ours, other, msg=f"{what} of prompt {i}, {convention}")


def check_search(acts, batch, *, certified, k=9):
    """The certified search finds what trying everything finds."""
    top = il.top_subheads(acts, batch.answer_tokens, k=k)
    assert top.certified == certified
    everything = il.subhead_log_prob_increase(acts, batch.answer_tokens)
    keys = torch.arange(everything.shape[-1])
    everything = everything.masked_fill((keys > batch.last[:, None])[:, None, None], -torch.inf)
    assert_close(top.value, everything.flatten(1).topk(k).values)
    rows = torch.arange(len(batch))[:, None]
    assert_close(everything[rows, top.layer, top.head, top.position], top.value)


def check_cache(model, batch, acts):
    """A cache from a plain run_with_cache gives the same activations, tensor by tensor."""
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    again = il.Activations.from_cache(model, cache, batch)
    for field, value in vars(acts).items():
        if isinstance(value, torch.Tensor):
            assert_close(getattr(again, field), value, msg=field)


def check_ablation(model, batch, hf, heads, *, folded):
    """Zeroing heads in the model = zeroing, or with `folded` making constant, the heads' z in Hugging Face's."""
    with il.ablate_heads(model, heads):
        ours = il.label_log_probs(model, batch)
    with _replaced_z(hf, heads, constant=folded):
        for i in range(len(batch)):
            n_tokens = int(batch.last[i]) + 1
            with torch.no_grad():
                log_probs = torch.log_softmax(hf(batch.tokens[i : i + 1, :n_tokens]).logits[0, -1], dim=-1)
            assert_close(ours[i], log_probs[batch.label_tokens], msg=f"prompt {i}")


def without_heads(hf, heads):
    """A copy whose output matrices have zeros where these heads' z goes in."""
    edited = copy.deepcopy(hf)
    for layer, head in heads:
        out = reference_hf._layers(edited)[layer].get_submodule(reference_hf._WIRING[hf.config.model_type].out)
        weight = reference_hf._weight_in_out(out)  # a view
        width = len(weight) // hf.config.num_attention_heads
        weight[head * width : (head + 1) * width] = 0
    return edited


@contextmanager
def _replaced_z(hf, heads, *, constant):
    wiring = reference_hf._WIRING[hf.config.model_type]
    handles = []
    for layer, head in heads:
        values = constant_values(hf, layer)

        def replace(module, args, head=head, values=values):
            z = args[0].clone().unflatten(-1, tuple(values.shape))
            z[..., head, :] = values[head] if constant else 0.0
            return (z.flatten(-2), *args[1:])

        out = reference_hf._layers(hf)[layer].get_submodule(wiring.out)
        handles.append(out.register_forward_pre_hook(replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
