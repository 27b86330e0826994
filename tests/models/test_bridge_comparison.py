"""What is measured is what the given model computes, or there is one InputError with the cause.

Each case changes a model in a way that public code does. The reference is the changed model itself.
"""

import copy
import json
import types
from concurrent.futures import ThreadPoolExecutor

import families
import pytest
import torch
from cases import slow_except
from tolerance import assert_close
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.models.loading import bridge_comparison
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.loading.shared_weights import unbridged
from icl_lens.models.view import ModelView

PROMPT = il.Prompt.parse(families.PROMPT, answer="foo")
MUCH_LONGER = il.Prompt.parse(
    f"{families.PROMPT[:-5].rstrip()} red : bar blue : foo red : bar one :", answer="foo"
)
LONGER = il.Prompt.parse(
    f"{families.PROMPT[:-5].rstrip()} red : bar blue : foo one :", answer="foo"
)


class Scaled(nn.Module):
    """A projection with half its output, which has the `weight` of the projection."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, getattr(base, "bias", None)
        self.in_features, self.out_features = (
            getattr(base, "in_features", 0),
            getattr(base, "out_features", 0),
        )

    def forward(self, x):
        return 0.5 * self.base(x)


def halve_attention(attention):
    """Replace `forward` of one attention module by one that returns half its output."""
    before = attention.forward

    def forward(self, *args, **kwargs):
        output, *weights = before(*args, **kwargs)
        return (0.5 * output, *weights)

    attention.forward = types.MethodType(forward, attention)


def wrap(owner, name):
    setattr(owner, name, Scaled(getattr(owner, name)))


def hook_half(module):
    module.register_forward_hook(lambda module, args, output: (0.5 * output[0], *output[1:]))


def own_class(module):
    """Give one module a class of the user, with the module's own weights."""

    class Own(type(module)):
        def forward(self, *args, **kwargs):
            output, *further_outputs = super().forward(*args, **kwargs)
            return (2 * output, *further_outputs)

    module.__class__ = Own


def reverse_positions(hf):
    before = hf.forward

    def forward(self, input_ids=None, **kwargs):
        positions = torch.arange(input_ids.shape[1]).flip(0)[None]
        return before(input_ids=input_ids, position_ids=positions, **kwargs)

    hf.forward = types.MethodType(forward, hf)


def scale_scores(hf):
    """A scale that attention of transformers ignores in its attribute, but not in a subclass."""
    for layer in hf.model.layers:
        layer.self_attn.scaling *= 2


WAYS = {
    "llama: attention is not causal": (
        "llama",
        lambda hf: setattr(hf.config, "is_causal", False),
        "not causal",
    ),
    "qwen3: attention is not causal": (
        "qwen3",
        lambda hf: setattr(hf.config, "is_causal", False),
        "not causal",
    ),
    "llama: a forward of attention": (
        "llama_gqa",
        lambda hf: halve_attention(hf.model.layers[2].self_attn),
        r"layers\.2\.self_attn",
    ),
    "gpt2: a forward of attention": (
        "gpt2",
        lambda hf: halve_attention(hf.transformer.h[1].attn),
        r"h\.1\.attn",
    ),
    "neox: a forward of attention": (
        "neox",
        lambda hf: halve_attention(hf.gpt_neox.layers[1].attention),
        "layers.1",
    ),
    "phi3: a class of one's own": (
        "phi3",
        lambda hf: own_class(hf.model.layers[1].self_attn),
        "is a Own",
    ),
    "gpt2: a joint projection": (
        "gpt2",
        lambda hf: wrap(hf.transformer.h[1].attn, "c_attn"),
        "is a Scaled",
    ),
    "neox: a joint projection": (
        "neox",
        lambda hf: wrap(hf.gpt_neox.layers[0].attention, "query_key_value"),
        "is a Scaled",
    ),
    "mistral: a hook on attention": (
        "mistral",
        lambda hf: hook_half(hf.model.layers[1].self_attn),
        "forward hook",
    ),
    "qwen2: positions of one's own": ("qwen2", reverse_positions, "forward of the model"),
    "llama: a projection": ("llama", lambda hf: wrap(hf.model.layers[1].mlp, "down_proj"), None),
    "gpt2: an output projection": (
        "gpt2",
        lambda hf: wrap(hf.transformer.h[1].attn, "c_proj"),
        None,
    ),
    "qwen2: the unembedding": ("qwen2", lambda hf: wrap(hf, "lm_head"), None),
    "llama: a scale of scores": ("llama", scale_scores, None),
    "opt: a projection": (
        "opt",
        lambda hf: wrap(hf.model.decoder.layers[1].self_attn, "v_proj"),
        None,
    ),
}
"""Family, change, and what the error says; None for changes that the bridge follows."""


def changed(family, change):
    hf = families.build(family)
    change(hf)
    return hf


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_model_is_measured_as_it_is_or_refused(way):
    family, change, cause = WAYS[way]
    hf = changed(family, change)
    if cause is not None:
        with pytest.raises(
            il.InputError, match=r"computes other log-prob|must run its own modules"
        ) as error:
            il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
        error.match(cause)
        return
    model = il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    batch = il.tokenize(model, [PROMPT], prepend_bos=False)
    with torch.no_grad():
        expected = hf(batch.tokens).logits[:, -1].log_softmax(-1)[:, batch.label_tokens]
    assert_close(il.score(model, batch).as_subclass(torch.Tensor), expected)


def test_half_precision_is_compared_too():
    hf = changed("llama", lambda hf: setattr(hf.config, "is_causal", False)).to(torch.bfloat16)
    with pytest.raises(il.InputError, match="not causal"):
        il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")


def bridge_of(hf):
    """Return a bridge that was not built by `load_model`."""
    hf.config.architectures = [type(hf).__name__]
    return TransformerBridge.boot_transformers(
        "mine", hf_model=hf, tokenizer=families.tokenizer(), device="cpu"
    )


def test_a_bridge_of_the_user_is_compared_on_its_first_batch():
    model = bridge_of(
        changed("llama_gqa", lambda hf: halve_attention(hf.model.layers[2].self_attn))
    )
    with pytest.raises(
        il.InputError, match=r"after prompt 0, more than .*layers\.2\.self_attn was replaced"
    ):
        il.score(model, il.tokenize(model, [PROMPT], prepend_bos=False))


def test_a_difference_in_longer_texts_is_found_in_the_first_longer_batch():
    """A forward that differs from 13 tokens on agrees on the tokens of loading and on a shorter
    prompt.
    """

    def change(hf):
        attention = hf.model.layers[1].self_attn
        before = attention.forward

        def forward(self, hidden_states, *args, **kwargs):
            output, *weights = before(hidden_states, *args, **kwargs)
            return (output * (0.5 if hidden_states.shape[1] > 16 else 1.0), *weights)

        attention.forward = types.MethodType(forward, attention)

    model = il.load_model(
        hf_model=changed("llama", change), tokenizer=families.tokenizer(), device="cpu"
    )
    batch = il.tokenize(model, [PROMPT], prepend_bos=False)
    assert il.score(model, batch).isfinite().all()
    longer = il.tokenize(model, [PROMPT, LONGER], prepend_bos=False)
    assert longer.tokens.shape[1] > 16
    for _ in range(2):  # and again, if it is measured again
        with pytest.raises(il.InputError, match="after prompt 1"):
            il.score(model, longer)
    assert il.score(model, batch).isfinite().all()


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa", "bloom"])
def test_weights_that_are_edited_after_loading_are_measured(family):
    """Also where the bridge has copies of the model's weights, as of BLOOM's joint matrix."""
    hf = families.build(family)
    for model in (
        il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu"),
        bridge_of(hf),
    ):
        clean = il.load_model(
            hf_model=families.build(family), tokenizer=families.tokenizer(), device="cpu"
        )
        with torch.no_grad():
            model.blocks[1].attn.v.original_component.weight.mul_(0.5)
        batch = il.tokenize(model, [PROMPT], prepend_bos=False)
        assert (il.score(model, batch) - il.score(clean, batch)).abs().max() > 1e-2


@pytest.fixture(scope="module")
def folder_not_causal(tmp_path_factory):
    """A folder whose config.json says that attention is not causal, which TransformerLens does not
    follow.
    """
    folder = tmp_path_factory.mktemp("not causal")
    hf = families.build("llama_gqa")
    hf.config.is_causal = False
    hf.save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


def batch_of(model):
    return il.tokenize(model, [PROMPT], prepend_bos=False)


def score_with_a_hook(model):
    model.blocks[1].attn.hook_z.add_hook(lambda z, hook: 0.5 * z)
    return il.score(model, batch_of(model))


def score_with_a_hook_on_a_module(model):
    model.original_model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: 0.5 * output
    )
    return il.score(model, batch_of(model))


def score_inside_an_edit(model):
    with il.edited(model, il.Ablate(["L1H0"])):
        return il.score(model, batch_of(model))


def score_processed_weights(model):
    model.enable_compatibility_mode(disable_warnings=True)
    return il.score(model, batch_of(model))


FIRST_CALLS = {
    "a batch": lambda model: il.score(model, batch_of(model)),
    "a batch of a copy": lambda model: il.score(copy.deepcopy(model), batch_of(model)),
    "edits": lambda model: il.score(
        model, batch_of(model), [[il.Ablate(["L1H0"], positions="last")]]
    ),
    "inside an edit": score_inside_an_edit,
    "a hook": score_with_a_hook,
    "a hook on a module": score_with_a_hook_on_a_module,
    "processed weights": score_processed_weights,
    "weights": lambda model: ModelView.of(model).W_O(1),
    "a pass of TransformerLens": lambda model: model.run_with_cache(
        torch.tensor([families.PROMPT_IDS])
    ),
}
"""Each is the first use of a model from files, which was not compared on loading."""
QUICK_CALLS = ("a batch", "a hook", "a pass of TransformerLens", "inside an edit")


@pytest.mark.parametrize(
    "first",
    slow_except(QUICK_CALLS, FIRST_CALLS),
)
def test_a_model_from_files_is_compared_before_its_first_numbers(first, folder_not_causal):
    model = il.load_model(folder_not_causal, tokenizer=families.tokenizer(), device="cpu")
    for _ in range(2):  # and again, if it is used again
        with pytest.raises(
            il.InputError, match=r"more than rounding explains; .*attention is not causal"
        ):
            FIRST_CALLS[first](model)


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_a_model_from_files_that_its_bridge_follows_is_compared_once(
    first, family_folder, monkeypatch
):
    compared = []
    run = bridge_comparison.hugging_face_log_probs
    monkeypatch.setattr(
        bridge_comparison,
        "hugging_face_log_probs",
        lambda hf, tokens: compared.append(tokens.shape) or run(hf, tokens),
    )
    model = il.load_model(family_folder("llama_gqa"), tokenizer=families.tokenizer(), device="cpu")
    assert not compared  # on loading
    FIRST_CALLS[first](model)
    assert len(compared) == 1
    ModelView.of(model).W_O(1)
    model(torch.tensor([families.PROMPT_IDS]))
    assert len(compared) == (2 if first == "a batch of a copy" else 1)


def test_hooks_that_transformer_lens_sets_at_the_first_pass_outlive_the_comparison(family_folder):
    model = il.load_model(family_folder("granite"), tokenizer=families.tokenizer(), device="cpu")
    FIRST_CALLS["edits"](model)  # the comparison makes the first pass
    assert il.capture(model, batch_of(model)).mlp_out.any()


def test_a_model_that_transformer_lens_cannot_run_is_refused(family_folder, monkeypatch):
    model = il.load_model(family_folder("llama_gqa"), tokenizer=families.tokenizer(), device="cpu")

    def forward(*args, **kwargs):
        raise ValueError("sizes do not match")

    monkeypatch.setattr(type(model.blocks[1].attn), "forward", forward)
    message = r"TransformerLens cannot run LlamaForCausalLM, which runs without it \(ValueError: sizes do not match\)"
    with pytest.raises(il.InputError, match=message):
        il.score(model, batch_of(model))


def test_a_copy_has_the_models_own_modules_and_the_memory_of_its_weights(load_tiny):
    model = load_tiny("gpt2")
    modules = [(id(module), type(module)) for module in model.original_model.modules()]
    original = unbridged(model)
    assert not any(
        type(module).__module__.startswith("transformer_lens") for module in original.modules()
    )
    addresses = {tensor.data_ptr() for tensor in model.original_model.state_dict().values()}
    assert {tensor.data_ptr() for tensor in original.state_dict().values()} <= addresses
    assert [(id(module), type(module)) for module in model.original_model.modules()] == modules


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
def test_threads_read_weights_while_a_batch_is_compared(load_tiny, monkeypatch, family):
    model = load_tiny(family)
    view, run = ModelView.of(model), bridge_comparison.hugging_face_log_probs
    monkeypatch.setattr(bridge_comparison, "_COMPARED", type(bridge_comparison._COMPARED)())
    expected = view.W_O(1)
    read = []

    def read_in_a_thread_and_run(hf, tokens):
        with ThreadPoolExecutor(1) as pool:
            read.append(pool.submit(view.W_O, 1).result())
        return run(hf, tokens)

    monkeypatch.setattr(bridge_comparison, "hugging_face_log_probs", read_in_a_thread_and_run)
    il.score(model, il.tokenize(model, [PROMPT], prepend_bos=False))
    assert len(read) == 1
    assert torch.equal(read[0], expected)


def test_every_kind_of_batch_is_compared_once(load_tiny, monkeypatch):
    model = load_tiny("llama_gqa")
    compared = []
    run = bridge_comparison.hugging_face_log_probs
    monkeypatch.setattr(bridge_comparison, "_COMPARED", type(bridge_comparison._COMPARED)())
    monkeypatch.setattr(
        bridge_comparison,
        "hugging_face_log_probs",
        lambda hf, tokens: compared.append(tokens.shape) or run(hf, tokens),
    )
    alone, padded, alike = (
        il.tokenize(model, prompts, prepend_bos=False)
        for prompts in ([PROMPT], [PROMPT, MUCH_LONGER], [LONGER, MUCH_LONGER])
    )
    short, longer, longest = (int(n) + 1 for n in (alone.last[0], alike.last[0], padded.last[1]))
    assert short <= 16 < longer < longest <= 32  # the last two are rows of one kind
    for batch in (alone, alone, padded, padded, alone):
        il.score(model, batch)
    assert compared == [(1, short), (1, short), (1, longest)]
    bridge_comparison._COMPARED.clear()
    compared.clear()
    il.score(model, alike)
    assert compared == [(1, longer)]


def test_one_token_rows_are_not_used_where_tokens_read_later_ones():
    """The bridge follows Gemma 3's two-way attention, in which an edit of the last token reaches
    earlier ones.
    """
    hf = families.build("gemma3")
    hf.config.use_bidirectional_attention = True
    for layer in hf.model.layers:
        layer.self_attn.is_causal = False
    model = il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    assert not reads_only_earlier_tokens(model)
    batch = il.tokenize(model, [PROMPT], prepend_bos=False)
    edit = il.Ablate(["L1H0"], positions="last")
    with il.edited(model, edit):
        whole = il.score(model, batch)
    assert_close(
        il.score(model, batch, [[edit]])[:, 0].as_subclass(torch.Tensor),
        whole.as_subclass(torch.Tensor),
    )


def test_a_causal_model_is_found_to_be_causal(load_tiny):
    assert reads_only_earlier_tokens(load_tiny("gpt2"))


def test_models_in_memory_have_a_name_and_need_no_architectures():
    hf = families.build("granite")
    hf.config.architectures = None
    model = il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    assert ModelView.of(model).name == "GraniteForCausalLM"
    assert hf.config.architectures is None
    hf.config.name_or_path = "ibm-granite/tiny"
    named = il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    assert ModelView.of(named).name == "ibm-granite/tiny"


@pytest.mark.parametrize(
    ("family", "setting", "reason"),
    [
        ("opt", "_remove_final_layer_norm", "it has no final norm"),
        ("gpt2", "add_cross_attention", "cross attention"),
    ],
)
def test_configurations_that_no_function_can_explain_are_refused_in_one_sentence(
    family, setting, reason
):
    config = copy.deepcopy(families.build(family).config)
    setattr(config, setting, True)
    hf = AutoModelForCausalLM.from_config(config).eval()
    model = il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")
    with pytest.raises(il.InputError, match=f"is not supported: .*{reason}"):
        il.score(model, il.tokenize(model, [PROMPT], prepend_bos=False))


@pytest.mark.filterwarnings("ignore")
def test_quantized_modules_are_refused_in_one_sentence():
    hf = torch.ao.quantization.quantize_dynamic(
        families.build("llama"), {nn.Linear}, dtype=torch.qint8
    )
    with pytest.raises(
        il.InputError,
        match=r"with quantized modules \(Linear of .*quantized.*before it is quantized",
    ):
        il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")


def test_an_adapter_beside_a_model_needs_peft_and_no_positions_of_its_own(tmp_path, monkeypatch):
    families.build("llama").save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    adapter = tmp_path / "adapter_config.json"
    monkeypatch.setattr("icl_lens.models.loading.load_errors.find_spec", lambda name: None)
    for kind, reason in (
        ("LORA", "pip install peft"),
        ("PREFIX_TUNING", "puts learned positions before every text"),
    ):
        adapter.write_text(json.dumps({"peft_type": kind}))
        with pytest.raises(il.InputError, match=reason):
            il.load_model(tmp_path, device="cpu")


def test_weights_are_read_only_where_modules_compute_with_them():
    """A projection of the user that has the `weight` of another one; passes see what it
    computes.
    """
    hf = families.build("llama_gqa")
    plain = copy.deepcopy(hf)
    wrap(hf.model.layers[1].mlp, "down_proj")
    wrap(hf.model.layers[1].self_attn, "q_proj")
    plain.model.layers[1].mlp.down_proj.weight.data.mul_(0.5)
    plain.model.layers[1].self_attn.q_proj.weight.data.mul_(0.5)
    wrapped, halved = (
        il.load_model(hf_model=hf_model, tokenizer=families.tokenizer(), device="cpu")
        for hf_model in (hf, plain)
    )
    batch = il.tokenize(wrapped, [PROMPT], prepend_bos=False)
    acts, same = il.capture(wrapped, batch), il.capture(halved, batch)
    assert_close(il.head_log_prob_increase(acts), il.head_log_prob_increase(same))
    assert_close(acts.last_query("L1H0"), same.last_query("L1H0"))  # reads W_K
    assert_close(il.neuron_log_prob_increase(acts, 0), il.neuron_log_prob_increase(same, 0))
    for read in (
        lambda: il.neuron_log_prob_increase(acts, 1),
        lambda: il.query_key_metric(wrapped, "L1H0"),
    ):
        with pytest.raises(
            il.InputError, match=r"(down|q)_proj computes something else .*Scaled.*merge_and_unload"
        ):
            read()
    assert acts.view.fingerprint() != same.view.fingerprint()
