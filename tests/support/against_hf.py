"""Compares activations of any model class with the plain Hugging Face reference, on raw or on
processed weights.

TransformerLens' weight processing folds norms into the next matrices, centers what writes into the
stream and moves the part of each value that does not depend on the input, `κ = (b_V + β W_V) W_O`
(β: the shift of the norm before attention), from the heads into b_O. Centering and folding at most
add one number to all logits. Therefore increases of layers and neurons and label log-probabilities
do not change, while a head's output loses κ and a subhead's loses its attention weight times κ.
`constants` computes κ from Hugging Face's weights alone.
"""

from itertools import product

import families
import reference_hf
import reference_passes
import torch
from same_values import tensors_of
from tolerance import assert_close, tolerance

import icl_lens as il

CONVENTIONS = [("frozen", True), ("frozen", False), ("own", True), ("own", False)]
MIXTURE_TYPES = {families.CONFIGS[name][0] for name in families.MIXTURES}
_NOT_FOLDED = {"nemotron"}  # TransformerLens' processing leaves their norms where they are
_NORMS_BEFORE_ATTENTION = ("ln_1", "input_layernorm", "self_attn_layer_norm")


def constant_values(hf, layer, *, unfolded=False):
    """Return [head, d_head]: the part of a layer's values that does not depend on the input.

    `unfolded` includes the bias of a norm that TransformerLens does not fold into the weights.
    """
    wiring = reference_hf._WIRING[hf.config.model_type]
    block = reference_hf._layers(hf)[layer]
    norm = next(
        (getattr(block, name) for name in _NORMS_BEFORE_ATTENTION if hasattr(block, name)), None
    )
    shift = torch.zeros(hf.config.hidden_size, dtype=hf.dtype)
    if getattr(norm, "bias", None) is not None and (
        unfolded or hf.config.model_type not in _NOT_FOLDED
    ):
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
    """Return κ [head, d_model] of a layer, before any norm or multiplier that follows attention."""
    out = reference_hf._layers(hf)[layer].get_submodule(
        reference_hf._WIRING[hf.config.model_type].out
    )
    values = constant_values(hf, layer)
    weight = reference_hf._weight_in_out(out).reshape(*values.shape, -1)
    return torch.einsum("hd,hdm->hm", values, weight)


def references_of(batch, hf, *, folded=False):
    """Return each prompt's reference, unpadded; if `folded`, without the constant parts of heads
    and subheads.
    """
    rows = zip(batch.tokens, batch.last.tolist(), strict=True)
    references = [reference_hf.Reference(hf, tokens[: last + 1]) for tokens, last in rows]
    if folded:
        # κ is zero in families with a norm after attention, so only the multiplier remains to be
        # applied.
        multiplier = reference_hf._setting(hf.config, "residual_multiplier", default=1.0)
        kappa = (
            torch.stack([constants(hf, layer) for layer in range(len(references[0].x))])
            * multiplier
        )
        for theirs in references:
            theirs.head_outputs = theirs.head_outputs - kappa
            theirs.subhead_outputs = (
                theirs.subhead_outputs - theirs.attention[..., None] * kappa[:, :, None]
            )
    return references


def check_increases(acts, batch, hf, *, folded=False, against=(None,), conventions=CONVENTIONS):
    """Assert that increases, contrasts, label log-probabilities and attention rows equal each
    prompt's reference.
    """
    targets, references = batch.answer_tokens, references_of(batch, hf, folded=folded)
    for compared_ids, (final_norm, bias) in product(against, conventions):
        asked = {"against": compared_ids, "final_norm": final_norm, "bias": bias}
        layers = il.layer_log_prob_increase(acts, targets, **asked)
        ours = {
            "attn": layers.attn,
            "ffn": layers.ffn,
            "heads": il.head_log_prob_increase(acts, targets, **asked),
            "subheads": il.subhead_log_prob_increase(acts, targets, **asked),
        }
        if hf.config.model_type not in MIXTURE_TYPES:
            layer_numbers = range(acts.view.n_layers)
            neurons = [
                il.neuron_log_prob_increase(acts, layer, targets, **asked)
                for layer in layer_numbers
            ]
            ours["neurons"] = torch.stack(neurons, dim=1)
        for row, theirs in enumerate(references):
            its = (
                []
                if compared_ids is None
                else [token for token in compared_ids[row].tolist() if token >= 0]
            )
            for part, increases in ours.items():
                expected = theirs.increase(
                    part, int(targets[row]), its, final_norm=final_norm, bias=bias
                )
                if part == "subheads":
                    expected = _padded(expected, increases)
                    assert (increases[row, ..., int(batch.last[row]) + 1 :] == 0).all(), (
                        "padding, without rounding"
                    )
                assert_close(increases[row], expected, msg=f"{part} of prompt {row}, {asked}")
    for row, theirs in enumerate(references):
        assert_close(acts.token_log_probs(targets)[row], theirs.log_probs[targets[row]])
        if len(batch.label_tokens):
            assert_close(acts.label_log_probs[row], theirs.log_probs[batch.label_tokens])
        assert_close(acts.pattern[row], _padded(theirs.attention, acts.pattern))


def _padded(theirs, ours):
    return torch.nn.functional.pad(theirs, (0, ours.shape[-1] - theirs.shape[-1]))


def check_search(acts, batch, *, certified, k=9, **convention):
    """Assert that `top_subheads` finds what evaluating all subheads finds, in order; return its
    result.
    """
    by = "increase" if convention.get("against") is None else "contrast"
    top = il.top_subheads(acts, k=k, by=by, **convention)
    assert top.by == by
    assert top.certified == certified
    everything = il.subhead_log_prob_increase(acts, batch.answer_tokens, **convention)
    assert torch.equal(top.n_parts, (batch.last + 1) * everything.shape[1] * everything.shape[2])
    assert ((top.n_exact >= k) & (top.n_exact <= top.n_parts)).all()
    assert (top.unevaluated_bound <= top.value[:, -1] + tolerance()).all()
    keys = torch.arange(everything.shape[-1])
    everything = everything.masked_fill((keys > batch.last[:, None])[:, None, None], -torch.inf)
    assert_close(top.value, everything.flatten(1).topk(k).values)
    rows = torch.arange(len(batch))[:, None]
    assert_close(everything[rows, top.layer, top.head, top.position], top.value)
    return top


def check_cache(model, batch, acts):
    """Assert that a cache from run_with_cache gives the same activations, tensor by tensor."""
    _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
    again = il.Activations.from_cache(model, cache, batch)
    theirs = tensors_of(again)
    for field, value in tensors_of(acts).items():
        assert_close(theirs[field], value, msg=field)


def check_ablation(model, batch, hf, heads, *, folded):
    """Assert that ablating heads equals zeroing their z (if `folded`: keeping its constant part) in
    Hugging Face's.
    """
    with il.ablate_heads(model, heads):
        ours = il.score(model, batch)

    def edit(what, layer, z):
        if what != "z":
            return None
        z = z.clone()
        for head in (head for where, head in heads if where == layer):
            z[:, head] = constant_values(hf, layer)[head] if folded else 0.0
        return z

    for i, (tokens, last) in enumerate(zip(batch.tokens, batch.last.tolist(), strict=True)):
        seen = reference_passes.run(hf, tokens[: last + 1], edit)
        assert_close(ours[i], seen.log_probs[batch.label_tokens], msg=f"prompt {i}")
