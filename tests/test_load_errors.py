"""Folders of models that are damaged or mistaken, one by one, and what is said of each; weights that do not fit."""

import json
import shutil

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import icl_lens as il
from icl_lens.models.weight_checks import StrictLoader, check_finite

WEIGHTS = "model.safetensors"


def config(**changes):
    """Changes config.json; a value None takes the key out."""

    def spoil(folder):
        path = folder / "config.json"
        there = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in there.items() if value is not None}))

    return spoil


def weights(change):
    """Changes the tensors, `change(state)`."""

    def spoil(folder):
        state = {key: value.clone() for key, value in load_file(folder / WEIGHTS).items()}
        change(state)
        save_file(state, folder / WEIGHTS, {"format": "pt"})

    return spoil


def write(name, content):
    """Writes a file, or with None removes it; bytes may be a function of those there."""

    def spoil(folder):
        path = folder / name
        if content is None:
            return path.unlink()
        data = content(path.read_bytes()) if callable(content) else content
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return spoil


def bin_file(make):
    """Weights as pytorch_model.bin only."""

    def spoil(folder):
        state = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        make(state, folder / "pytorch_model.bin")

    return spoil


def renamed(key):
    return weights(lambda state: state.update({f"{key}_old": state.pop(key)}))


def without(*names):
    def spoil(folder):
        for name in names:
            for path in folder.glob(name):
                path.unlink()

    return spoil


def number(key, value):
    def change(state):
        state[key].view(-1)[0] = value

    return weights(change)


class Evil:
    def __reduce__(self):
        return print, ("run",)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
C_FC = "transformer.h.0.mlp.c_fc.weight"
NOT_FIT = "config.json"
DECODER = "use a decoder-only language model"

FAULTS = [
    # weights that do not fit: transformers would make them random, or drop them, without a word
    ("gpt2", "a key renamed", renamed(C_FC), (NOT_FIT, f"missing {C_FC}", f"unexpected {C_FC}_old")),
    (
        "gpt2",
        "a key gone",
        weights(lambda s: s.pop("transformer.ln_f.weight")),
        (NOT_FIT, "missing ", "ln_f.weight"),
    ),
    ("llama", "no lm_head", weights(lambda s: s.pop("lm_head.weight")), (NOT_FIT, "missing lm_head.weight")),
    ("llama", "more layers asked for", config(num_hidden_layers=5), (NOT_FIT, "missing model.layers.3", "more")),
    ("llama", "fewer layers asked for", config(num_hidden_layers=2), (NOT_FIT, "unexpected model.layers.2")),
    ("gpt2", "fewer layers asked for", config(n_layer=2, num_hidden_layers=None), (NOT_FIT, "unexpected ", "h.2.")),
    (
        "llama",
        "another width",
        config(intermediate_size=20),
        (NOT_FIT, "wrong shape", "expected 20×"),
    ),
    ("llama", "another vocabulary", config(vocab_size=11), (NOT_FIT, "embed_tokens.weight", "11×")),
    (
        "llama",
        "a bias the model lacks",
        weights(lambda s: s.update({"lm_head.bias": torch.ones(9)})),
        ("lm_head.bias",),
    ),
    (
        "llama_bias",
        "biases not asked for",
        config(attention_bias=False),
        (NOT_FIT, "unexpected ", "self_attn", "bias"),
    ),
    ("llama", "biases asked for", config(attention_bias=True), (NOT_FIT, "missing ", "self_attn.k_proj.bias")),
    # asks for seven billion
    (
        "gpt2",
        "of another model",
        config(model_type="llama", architectures=["LlamaForCausalLM"]),
        (NOT_FIT, "hold", "expects"),
    ),
    # numbers that are none
    ("gpt2", "NaN", number(C_FC, float("nan")), ("contain NaN in", "c_fc.weight", "use another")),
    ("llama", "infinity", number("lm_head.weight", float("-inf")), ("contain infinity in", "use another")),
    # quantized, and not said how
    (
        "gpt2",
        "in 8 bits",
        weights(lambda s: s.update({C_FC: s[C_FC].mul(99).to(torch.int8)})),
        ("are integers in", C_FC),
    ),
    (
        "llama",
        "one bit",
        weights(lambda s: s.update({"lm_head.weight": s["lm_head.weight"] > 0})),
        ("are integers in",),
    ),
    # damaged files
    ("gpt2", "cut short", write(WEIGHTS, lambda data: data[:4000]), ("is corrupt or truncated", "4,000 bytes", "copy")),
    ("gpt2", "empty", write(WEIGHTS, b""), (f"'{WEIGHTS}'", "is corrupt")),
    ("gpt2", "a pointer", write(WEIGHTS, POINTER), ("is a Git LFS pointer", "git lfs pull")),
    ("gpt2", "noise", write(WEIGHTS, bytes(range(256)) * 9), ("is corrupt",)),
    ("gpt2", "no weights", write(WEIGHTS, None), ("contains no weights",)),
    (
        "gpt2",
        "a shard that is not there",
        lambda folder: (
            (folder / WEIGHTS).unlink(),
            write(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "model-1.safetensors"}}')(folder),
        ),
        ("lack the file 'model-1.safetensors'",),
    ),
    (
        "gpt2",
        "an index of nothing",
        lambda folder: ((folder / WEIGHTS).unlink(), write(f"{WEIGHTS}.index.json", "[]")(folder)),
        ("not a valid index",),
    ),
    (
        "gpt2",
        "a pickle with code",
        bin_file(lambda _, path: torch.save({"a": Evil()}, path)),
        ("contains more than weights",),
    ),
    ("gpt2", "a pickle cut short", bin_file(lambda _, path: path.write_bytes(b"PK\3\4" + b"x" * 99)), ("is corrupt",)),
    (
        "gpt2",
        "a pickle that is none",
        bin_file(lambda _, path: path.write_bytes(b"hello")),
        ("pytorch_model.bin", "corrupt"),
    ),
    # tokenizers
    ("gpt2", "no tokenizer", without("token*", "special*"), ("has no tokenizer", "tokenizer=")),
    (
        "gpt2",
        "a tokenizer cut short",
        write("tokenizer.json", lambda data: data[:99]),
        ("'tokenizer.json'", "is not valid JSON"),
    ),
    ("gpt2", "a tokenizer of nothing", write("tokenizer.json", "{}"), ("tokenizer", "gpt2")),
    ("gpt2", "a pointer for a tokenizer", write("tokenizer.json", POINTER), ("'tokenizer.json'", "Git LFS pointer")),
    (
        "gpt2",
        "its settings are no JSON",
        write("tokenizer_config.json", "{oops"),
        ("'tokenizer_config.json'", "not valid JSON"),
    ),
    # configurations
    ("gpt2", "no JSON", write("config.json", "{oops"), ("'config.json'", "is not valid JSON")),
    ("gpt2", "a list", write("config.json", "[]"), ("must be a JSON object, got list",)),
    ("gpt2", "not text", write("config.json", b"\xff\xfe\x00"), ("'config.json'", "is not valid JSON")),
    ("gpt2", "no type", config(model_type=None), ("model_type", "config.json")),
    (
        "gpt2",
        "an unknown type",
        config(model_type="gtp2"),
        ("config.json", "gtp2"),
    ),
    (
        "gpt2",
        "an activation",
        config(activation_function="gelu_old"),
        ("'gelu_old'", "config.json"),
    ),
    ("llama", "rotary positions", config(rope_parameters={"rope_type": "twisted"}), ("'twisted'", "config.json")),
    ("llama", "rotary positions of no kind", config(rope_scaling="linear"), ("config.json", "rope_parameters")),
    ("gpt2", "scores that are not scaled", config(scale_attn_weights=False), ("scale_attn_weights=false", "choose")),
    ("gpt2", "a dtype", config(dtype="float17"), ("config.json", "float17")),
    ("gpt2", "heads that do not divide", config(n_head=3), ("gpt2", "config.json")),
    ("gpt2", "a negative size", config(n_head=-8), ("num_attention_heads", "at least 1, got -8")),
    ("gpt2", "no sizes", config(n_embd="wide"), ("config.json", "gpt2")),
    (
        "gpt2",
        "an encoder-decoder",
        config(model_type="t5", is_encoder_decoder=True),
        ("is an encoder-decoder", DECODER),
    ),
    (
        "gpt2",
        "an encoder-decoder by its type",
        config(model_type="bart", architectures=["BartForConditionalGeneration"]),
        ("(BartForConditionalGeneration) is an encoder-decoder", DECODER),
    ),
    (
        "gpt2",
        "a masked model",
        config(model_type="bert", architectures=["BertForMaskedLM"]),
        ("bidirectional", DECODER),
    ),
    ("gpt2", "a vision model", config(model_type="vit", architectures=["ViTModel"]), ("is a vision model", DECODER)),
    (
        "gpt2",
        "images and text",
        config(model_type="llava", architectures=["LlavaForConditionalGeneration"]),
        ("is multimodal", DECODER),
    ),
    ("gpt2", "sound", config(model_type="hubert", architectures=["HubertForCTC"]), ("is an audio model", DECODER)),
    ("gpt2", "code of its own", config(model_type="mine", auto_map={"AutoConfig": "a.B"}), ("trust_remote_code=True",)),
    ("gpt2", "an adapter", lambda f: (f / "config.json").rename(f / "adapter_config.json"), ("it is an adapter",)),
]


@pytest.fixture
def spoilt(family_folder, tmp_path):
    """A copy of a family's folder, spoilt."""

    def copy(family, spoil):
        folder = tmp_path / family
        shutil.copytree(family_folder(family), folder)
        spoil(folder)
        return folder

    return copy


@pytest.mark.parametrize(("family", "label", "spoil", "words"), FAULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_with_a_folder(family, label, spoil, words, spoilt, capfd):
    """One sentence, true of the fault, and no weights that were never trained."""
    folder = spoilt(family, spoil)
    with pytest.raises(il.InputError) as caught:
        il.load_model(str(folder), device="cpu")
    said = str(caught.value)
    for word in words:
        assert word in said
    assert "\n" not in said
    assert "run" not in capfd.readouterr().out
    assert len(said.replace(str(folder), "FOLDER")) < 420


HARMLESS = [
    ("gpt2", "masks", lambda s: s.update({f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(3)})),
    (
        "llama",
        "rotary frequencies",
        lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
    ),
    ("gptj", "masks", lambda s: s.update({"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)})),
    ("neox", "masks", lambda s: s.update({"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4)})),
    ("gpt2", "masks in bits", lambda s: s.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4) > 0})),
    ("llama", "a head beside the model", lambda s: s.update({"v_head.summary.weight": torch.ones(1, 4)})),
    ("gpt2", "no prefix", lambda s: [s.update({k.removeprefix("transformer."): s.pop(k)}) for k in list(s)]),
]


@pytest.mark.parametrize(("family", "label", "change"), HARMLESS, ids=lambda v: v if isinstance(v, str) else "")
def test_buffers_and_heads_beside_the_model_are_no_fault(family, label, change, spoilt, load_tiny):
    folder = spoilt(family, weights(change))
    model = il.load_model(str(folder), device="cpu", tokenizer=families.tokenizer())
    for (key, found), (_, wanted) in zip(
        model.original_model.named_parameters(), load_tiny(family).original_model.named_parameters(), strict=True
    ):
        assert torch.equal(found, wanted), key


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_weights_of_every_family_fit(family, family_folder):
    """What save_pretrained writes is never refused, and is what is loaded."""
    folder = family_folder(family)
    model = StrictLoader(family).from_pretrained(str(folder), config=AutoConfig.from_pretrained(folder))
    wanted = families.build(family).state_dict()
    assert {*wanted} == {*model.state_dict()}
    for key, found in model.state_dict().items():
        assert torch.equal(found, wanted[key]), key


def test_weights_too_large_for_float16(spoilt):
    folder = spoilt("gpt2", number(C_FC, 1e6))
    with pytest.raises(il.InputError, match=r"contain infinity in .*use --dtype float32 or bfloat16"):
        il.load_model(str(folder), device="cpu", dtype="float16")
    il.load_model(str(folder), device="cpu")


def test_models_that_pickle_weights_say_so_once(spoilt, caplog):
    folder = spoilt("gpt2", bin_file(torch.save))
    il.load_model(str(folder), device="cpu")
    (note,) = [record.getMessage() for record in caplog.records if record.name == "icl_lens"]
    assert "pytorch_model.bin without executing code (weights_only)" in note


def test_finite_weights_of_any_kind_pass():
    module = torch.nn.Module()
    module.empty = torch.nn.Parameter(torch.zeros(0))
    module.packed = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    module.absent = torch.nn.Parameter(torch.zeros(3, device="meta"))
    module.largest = torch.nn.Parameter(torch.tensor([torch.finfo(torch.float32).max] * 2))
    check_finite("mine", module, torch.float32)
