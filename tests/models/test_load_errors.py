"""Damaged or wrong model folders are refused in one sentence each; harmless differences are
accepted.
"""

import itertools
import json
import shutil

import families
import pytest
import torch
from faults import assert_refused
from safetensors.torch import load_file, save_file

import icl_lens as il
from icl_lens.models.loading.weight_checks import check_finite

WEIGHTS = "model.safetensors"


def config(**changes):
    """Return a function that changes config.json in a folder; the value None removes a key."""

    def spoil(folder):
        path = folder / "config.json"
        there = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({key: value for key, value in there.items() if value is not None})
        )

    return spoil


def weights(change):
    """Return a function that changes the stored tensors in a folder by `change(state)`."""

    def spoil(folder):
        state = {key: value.clone() for key, value in load_file(folder / WEIGHTS).items()}
        change(state)
        save_file(state, folder / WEIGHTS, {"format": "pt"})

    return spoil


def write(name, content):
    """Return a function that writes a file in a folder; `content` may be a function of its present
    bytes.
    """

    def spoil(folder):
        data = content((folder / name).read_bytes()) if callable(content) else content
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return spoil


def without(*names, then=lambda folder: None):
    """Return a function that removes files from a folder, then calls `then(folder)`."""

    def spoil(folder):
        for path in itertools.chain.from_iterable(list(folder.glob(name)) for name in names):
            path.unlink()
        then(folder)

    return spoil


class Evil:
    def __reduce__(self):
        return print, ("run",)


def pickled(content):
    """Return a function that replaces the weights in a folder by a pytorch_model.bin with this
    content.
    """
    return without(WEIGHTS, then=lambda folder: torch.save(content, folder / "pytorch_model.bin"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
INDEX = f"{WEIGHTS}.index.json"
BIN = "pytorch_model.bin"
C_FC = "transformer.h.0.mlp.c_fc.weight"
NOT_DECODER = "is not a decoder-only language model"
NOT_FIT = "do not match config.json"

FAULTS = {
    # weights that do not fit: transformers would silently make them random or drop them
    "gpt2 renamed": (
        weights(lambda s: s.update({f"{C_FC}_old": s.pop(C_FC)})),
        f"unexpected {C_FC}_old",
    ),
    "llama_gqa no lm_head": (
        weights(lambda s: s.pop("lm_head.weight")),
        f"{NOT_FIT} (missing lm_head.weight",
    ),
    "llama_gqa more layers asked for": (config(num_hidden_layers=5), "missing model.layers.3"),
    "llama_gqa biases asked for": (config(attention_bias=True), "self_attn.k_proj.bias"),
    # asks for seven billion parameters
    "gpt2 of another model": (
        config(model_type="llama", architectures=["LlamaForCausalLM"]),
        "hold",
    ),
    # weights that are not finite, and integers without a scale
    "gpt2 NaN": (weights(lambda s: s[C_FC][0].fill_(float("nan"))), "contain NaN in"),
    "gpt2 infinity": (weights(lambda s: s[C_FC][0].fill_(float("-inf"))), "contain infinity in"),
    "gpt2 in 8 bits": (
        weights(lambda s: s.update({C_FC: s[C_FC].to(torch.int8)})),
        f"are integers in {C_FC}",
    ),
    # damaged files
    "gpt2 cut short": (
        write(WEIGHTS, lambda data: data[:4000]),
        "is corrupt or truncated (4,000 bytes",
    ),
    "gpt2 a pointer": (write(WEIGHTS, POINTER), "git lfs pull"),
    "gpt2 no weights": (without(WEIGHTS), "contains no weights"),
    "gpt2 a missing shard": (
        without(WEIGHTS, then=write(INDEX, '{"weight_map": {"a": "1.safetensors"}}')),
        "lack",
    ),
    "gpt2 an index of nothing": (without(WEIGHTS, then=write(INDEX, "[]")), "not a valid index"),
    "gpt2 a pickle with code": (pickled({"a": Evil()}), "contains more than weights"),
    "gpt2 a pickle cut short": (
        without(WEIGHTS, then=write(BIN, b"PK\3\4" + b"x" * 99)),
        "is corrupt",
    ),
    # tokenizers
    "gpt2 no tokenizer": (without("token*", "special*"), "tokenizer="),
    "gpt2 a tokenizer cut short": (
        write("tokenizer.json", lambda data: data[:99]),
        "'tokenizer.json'",
    ),
    "gpt2 a tokenizer of nothing": (
        write("tokenizer.json", "{}"),
        "tokenizer belong to its weights",
    ),
    # configurations
    "gpt2 a list": (write("config.json", "[]"), "cannot use the config.json"),
    "gpt2 no type": (config(model_type=None), "model_type"),
    "gpt2 an unknown type": (config(model_type="gtp2"), "gtp2"),
    "gpt2 an activation": (config(activation_function="gelu_old"), "'gelu_old'"),
    "llama_gqa rotary positions": (config(rope_parameters={"rope_type": "twisted"}), "'twisted'"),
    "gpt2 scores that are not scaled": (
        config(scale_attn_weights=False),
        "scale_attn_weights=false",
    ),
    "gpt2 heads that do not divide": (config(n_head=3), "config.json"),
    "gpt2 an encoder-decoder": (config(model_type="t5", is_encoder_decoder=True), NOT_DECODER),
    "gpt2 a masked model": (
        config(model_type="bert", architectures=["BertForMaskedLM"]),
        NOT_DECODER,
    ),
    "gpt2 a vision model": (config(model_type="vit", architectures=["ViTModel"]), NOT_DECODER),
    "gpt2 images": (
        config(model_type="llava", architectures=["LlavaForConditionalGeneration"]),
        NOT_DECODER,
    ),
    "gpt2 images, no class": (config(model_type="llava", architectures=None), NOT_DECODER),
    "gpt2 code of its own": (
        config(model_type="mine", auto_map={"AutoConfig": "a.B"}),
        "trust_remote_code=True",
    ),
    "gpt2 an adapter": (
        without("config.json", then=write("adapter_config.json", "{}")),
        "is an adapter",
    ),
}


@pytest.fixture
def spoilt(family_folder, tmp_path):
    """Return a function that copies a family's folder and spoils the copy."""

    def copy(family, spoil):
        shutil.copytree(family_folder(family), tmp_path / family)
        spoil(tmp_path / family)
        return str(tmp_path / family)

    return copy


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_folder_is_refused_in_one_sentence(fault, spoilt, capfd):
    """The sentence names the cause, no weights are made up, and nothing in a pickle runs."""
    spoil, words = FAULTS[fault]
    folder = spoilt(fault.split()[0], spoil)
    assert_refused(words, il.load_model, folder, device="cpu")
    assert "run" not in capfd.readouterr().out


HARMLESS = {
    "gpt2": lambda s: {
        **{key.removeprefix("transformer."): value for key, value in s.items()},
        "h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "h.1.attn.bias": torch.ones(1, 1, 4, 4) > 0,
        "v_head.summary.weight": torch.ones(1, 4),
    },
    "gptj": lambda s: s | {"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)},
    "llama_gqa": lambda s: s | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    "neox": lambda s: s | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4)},
}


@pytest.mark.parametrize("family", HARMLESS)
def test_buffers_and_extra_heads_are_no_fault(family, spoilt, load_tiny):
    def change(state):
        changed = HARMLESS[family](state)
        state.clear()
        state.update(changed)

    model = il.load_model(
        spoilt(family, weights(change)), device="cpu", tokenizer=families.tokenizer()
    )
    for (key, loaded_tensor), (_, wanted) in zip(
        model.original_model.named_parameters(),
        load_tiny(family).original_model.named_parameters(),
        strict=True,
    ):
        assert torch.equal(loaded_tensor, wanted), key


def test_weights_too_large_for_float16_are_refused(spoilt):
    folder = spoilt("gpt2", weights(lambda s: s[C_FC][0].fill_(1e6)))
    with pytest.raises(
        il.InputError, match=r"contain infinity in .*use --dtype float32 or bfloat16"
    ):
        il.load_model(folder, device="cpu", dtype="float16")
    il.load_model(folder, device="cpu")


def test_models_that_pickle_weights_say_so_once(spoilt, family_folder, caplog):
    folder = spoilt("gpt2", pickled(load_file(family_folder("gpt2") / WEIGHTS)))
    il.load_model(folder, device="cpu")
    (note,) = [record.getMessage() for record in caplog.records if record.name == "icl_lens"]
    assert "pytorch_model.bin without executing code (weights_only)" in note


def test_finite_weights_of_any_kind_pass():
    module = torch.nn.Module()
    module.empty = torch.nn.Parameter(torch.zeros(0))
    module.packed = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    module.absent = torch.nn.Parameter(torch.zeros(3, device="meta"))
    module.largest = torch.nn.Parameter(torch.tensor([torch.finfo(torch.float32).max] * 2))
    check_finite("mine", module, torch.float32)
