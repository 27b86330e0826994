"""HookedTransformer of TransformerLens 3.9, raw and processed: exact against plain Hugging Face, as
the bridge is.
"""

from functools import cache

import against_hf
import families
import pytest
import torch
from same_values import tensors_of
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.loading.supported import tl_version
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs

if tl_version() >= (4, 0):
    pytest.skip("TransformerLens 4 has no HookedTransformer", allow_module_level=True)

from family_tables import HOOKED_EXACT, NOT_HOOKED, SOFT_CAPPED
from hooked import hooked

HEADS = [il.Head(0, 1), il.Head(2, 3)]
MODES = ["raw", "processed"]
OTHER_MODELS = [name for name, reason in NOT_HOOKED.items() if "another model" in reason]


def factors(batch):
    return torch.linspace(0, 2, batch.label_positions.numel()).reshape(batch.label_positions.shape)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(model, batch, activations, Hugging Face twin in float64) of a family in one mode, computed
    once.
    """
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def get(name, mode):
        folder = root / str(sorted(families.CONFIGS).index(name))  # no official name in the path
        hf = families.save(name, folder)
        model = hooked(hf, folder, families.tokenizer(), processed=mode == "processed")
        batch = il.tokenize(model, PROMPTS, prepend_bos=False)
        return model, batch, il.capture(model, batch), families.build(name).double()

    return get


@pytest.mark.parametrize("name", HOOKED_EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_increases_agree_with_hugging_face(run, name, mode):
    _, batch, acts, hf = run(name, mode)
    against_hf.check_increases(acts, batch, hf, folded=mode == "processed")


@pytest.mark.parametrize("name", HOOKED_EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_search_caches_and_ablation_agree_with_hugging_face(run, name, mode):
    model, batch, acts, hf = run(name, mode)
    against_hf.check_search(acts, batch, certified=name not in SOFT_CAPPED)
    against_hf.check_ablation(model, batch, hf, HEADS, folded=mode == "processed")
    against_hf.check_cache(model, batch, acts)


@pytest.mark.parametrize("name", HOOKED_EXACT)
def test_raw_is_the_bridge(run, load_tiny, name):
    """Raw HookedTransformer and raw bridge: the same activations, weights and projections, tensor
    by tensor.
    """
    _, batch, acts, _ = run(name, "raw")
    bridge = il.capture(load_tiny(name), batch)
    padding = (batch.attention_mask == 0)[
        :, None, :, None, None
    ]  # values at padding are not used, and may differ
    theirs = tensors_of(bridge)
    assert "values.pass_v" in theirs
    for field, ours in tensors_of(acts).items():
        if field == "values.pass_v":
            ours, theirs[field] = (x.masked_fill(padding, 0) for x in (ours, theirs[field]))
        assert_close(ours, theirs[field], msg=field)
    for layer in range(families.N_LAYERS):
        for weight in (
            "W_O",
            "W_Q",
            "W_K",
            "W_V",
            *(() if name in families.MIXTURES else ("W_out",)),
        ):
            theirs = getattr(bridge.view, weight)(layer)
            assert_close(getattr(acts.view, weight)(layer), theirs, msg=weight)
    for head in HEADS:
        for project in (
            il.Activations.label_values,
            il.Activations.label_keys,
            il.Activations.last_query,
        ):
            ours, theirs = project(acts, head), project(bridge, head)
            assert_close(ours, theirs, msg=project.__name__)
    assert ModelView.of(acts.view.model).architecture == bridge.view.architecture


@pytest.mark.parametrize("name", HOOKED_EXACT)
@pytest.mark.parametrize(
    "edit",
    [
        lambda model, batch: il.ablate_heads(model, HEADS),
        lambda model, batch: il.ablate_heads(
            model, HEADS, mode="mean", reference=batch, positions="last"
        ),
        lambda model, batch: il.edited(
            model, il.Reweight(HEADS, factors(batch), renormalize=False), batch=batch
        ),
        lambda model, batch: il.edited(
            model, il.Block(HEADS, torch.eye(batch.tokens.shape[1])[None].bool())
        ),
        lambda model, batch: il.edited(model, il.RemovePosition(HEADS, strength=0.7)),
        lambda model, batch: il.patch_heads(
            model, HEADS, batch[1:2], activation="q", positions="last"
        ),
        lambda model, batch: il.patch_heads(
            model, HEADS, batch[1:2], activation="z", positions="last"
        ),
    ],
    ids=["zero", "mean", "scale", "block", "position", "patch q", "patch z"],
)
def test_raw_interventions_are_the_bridges(run, load_tiny, name, edit):
    """The same answers under each edit on both, or the same refusal."""
    model, batch, _, _ = run(name, "raw")
    bridge = load_tiny(name)
    answers = []
    for tested_model in (model, bridge):
        try:
            with edit(tested_model, batch):
                answers.append(last_log_probs(tested_model, batch))
        except il.InputError:
            answers.append(None)
    ours, theirs = answers
    assert (ours is None) == (theirs is None)
    if theirs is not None:
        assert_close(ours, theirs)
        assert (theirs - last_log_probs(bridge, batch)).abs().max() > 1e-4  # and it is an edit


@pytest.mark.parametrize("name", HOOKED_EXACT)
def test_raw_effects_are_the_bridges(run, load_tiny, name):
    model, batch, _, _ = run(name, "raw")
    ours, theirs = (
        il.head_effects(tested_model, batch).log_prob for tested_model in (model, load_tiny(name))
    )
    assert_close(ours, theirs)


# `stack_head_results` and `stack_neuron_results` ignore a norm that follows attention or the FFN.
@pytest.mark.parametrize("name", sorted(set(HOOKED_EXACT) - SOFT_CAPPED - {"gemma3"}))
def test_contrasts_are_logit_attrs(run, name):
    """Contrasts are TransformerLens' direct logit attribution of heads, layers and neurons, for
    each prompt alone.
    """
    model, batch, acts, _ = run(name, "processed")
    targets, against = batch.answer_tokens, batch.other_label_tokens
    heads = il.head_log_prob_increase(acts, targets, against=against)
    layers = il.layer_log_prob_increase(acts, targets, against=against)
    neurons = None
    if name not in families.MIXTURES:
        neurons = torch.stack(
            [il.neuron_log_prob_increase(acts, i, targets, against=against) for i in range(3)], 1
        )
    for i in range(len(batch)):
        _, cache = model.run_with_cache(batch.tokens[i : i + 1, : int(batch.last[i]) + 1])

        def attrs(stack, i=i, cache=cache):
            pair = {"tokens": targets[i : i + 1], "incorrect_tokens": against[i]}
            return cache.logit_attrs(stack, **pair, pos_slice=-1)[:, 0]

        assert_close(heads[i].flatten(), attrs(cache.stack_head_results(layer=-1, pos_slice=-1)))
        if neurons is not None:
            assert_close(
                neurons[i].flatten(), attrs(cache.stack_neuron_results(layer=-1, pos_slice=-1))
            )
        parts, labels = cache.decompose_resid(
            layer=-1, mode="all", return_labels=True, pos_slice=-1
        )
        attributions = dict(zip(labels, attrs(parts), strict=True))
        for kind, ours in (("attn", layers.attn), ("mlp", layers.ffn)):
            assert_close(
                ours[i], torch.stack([attributions[f"{layer}_{kind}_out"] for layer in range(3)])
            )


def test_capture_leaves_no_gradients(run):
    """HookedTransformer's parameters require gradients; no tensor that the analysis keeps or
    returns does.
    """
    model, batch, acts, _ = run("gpt2", "processed")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(value.requires_grad for value in tensors_of(acts).values())
    assert not il.head_log_prob_increase(acts, batch.answer_tokens).requires_grad
    assert not acts.last_query(il.Head(1, 1)).requires_grad


@pytest.mark.parametrize("processed", [False, True])
def test_olmo2_without_grouped_queries(tmp_path, monkeypatch, processed):
    """The one OLMo-2 that TransformerLens 3.9 converts; it calls the norms after the sublayers ln1
    and ln2.
    """
    kind, options = families.CONFIGS["olmo2"]
    monkeypatch.setitem(
        families.CONFIGS, "olmo2", (kind, options | {"num_key_value_heads": families.N_HEADS})
    )
    hf = families.save("olmo2", tmp_path / "tiny")
    model = hooked(hf, tmp_path / "tiny", families.tokenizer(), processed=processed)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    against_hf.check_increases(il.capture(model, batch), batch, hf.double(), folded=False)


@pytest.mark.parametrize("name", sorted(name for name in NOT_HOOKED if name not in OTHER_MODELS))
def test_families_without_conversion_raise_transformer_lens_own_error(tmp_path, name):
    errors = {
        "olmo2": (ValueError, "missing weight matrices"),
        "opt_post_norm": (
            AttributeError,
            "has no attribute 'weight'",
        ),  # of the final norm, which it lacks
    }
    error, message = errors.get(
        name, (NotImplementedError, "ForCausalLM is not currently supported")
    )
    hf = families.save(name, tmp_path / "tiny")
    with pytest.raises(error, match=message):
        hooked(hf, tmp_path / "tiny", families.tokenizer(), processed=False)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_families_converted_into_another_model_are_captured_as_that_model(tmp_path, name):
    hf = families.save(name, tmp_path / "tiny")
    model = hooked(
        hf, tmp_path / "tiny", families.tokenizer(), processed="processing" in NOT_HOOKED[name]
    )
    batch = il.tokenize(model, PROMPTS[0], prepend_bos=False)
    with torch.no_grad():
        converted_log_probs, theirs = (
            logits.log_softmax(-1)
            for logits in (model(batch.tokens)[0, -1], hf(batch.tokens).logits[0, -1])
        )
    assert (converted_log_probs - theirs).abs().max() > 0.05
    assert_close(
        il.capture(model, batch).label_log_probs[0], converted_log_probs[batch.label_tokens]
    )
