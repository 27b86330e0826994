"""GGUF files: tiny ones of every supported architecture give the numbers of the model they were
written from.
"""

import copy
import json
import types

import faults
import gguf_files
import pytest
import torch
from cases import slow, slow_except
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import icl_lens as il
from icl_lens.models.checkpoints import gguf
from icl_lens.models.checkpoints.gguf_header import ARCHITECTURES
from icl_lens.models.view import ModelView

LAYERS = 7  # of the deepest model; rounding adds up over the layers
WORDS = gguf_files.TEXT[0]


pytestmark = pytest.mark.usefixtures("gguf_cache")


def logits(model, ids):
    with torch.no_grad():
        output = model(ids)
    return getattr(output, "logits", output).float()


def ids_of(name):
    """Two rows of token ids, longer than any window and than the range where Llama 3's frequencies
    are scaled.
    """
    vocabulary = len(gguf_files.tokenizer(gguf_files.ARCHITECTURES[name][1]))
    return torch.randint(vocabulary, (2, 40), generator=torch.Generator().manual_seed(0))


def check_close(ours, theirs):
    """Assert equality up to the rounding of twelve operations in every layer, relative to the
    largest logit.
    """
    tolerance = 12 * LAYERS * torch.finfo(torch.float32).eps * theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert difference <= tolerance, f"logits differ by {difference:.1e}, allowed {tolerance:.1e}"


def test_every_supported_architecture_is_tested():
    assert set(map(gguf_files.arch_of, gguf_files.ARCHITECTURES)) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "name",
    [
        slow(name) if name in ("gemma2", "gemma3_scaled", "llama", "qwen2", "qwen3") else name
        for name in gguf_files.ARCHITECTURES
    ],
)
def test_a_file_gives_the_numbers_of_its_model(name, tmp_path):
    """In full precision those of the original model; quantized, those of the dequantized
    weights.
    """
    original = logits(gguf_files.write(name, tmp_path / "x.gguf"), ids_of(name))
    gguf_files.write(name, tmp_path / "y.gguf", "Q8_0")
    logits_of_files = [
        logits(il.load_model(str(tmp_path / file), device="cpu"), ids_of(name))
        for file in ("x.gguf", "y.gguf")
    ]
    check_close(logits_of_files[0], original)
    check_close(
        logits_of_files[1], logits(gguf_files.restored(name, tmp_path / "y.gguf"), ids_of(name))
    )
    assert (logits_of_files[1] - original).abs().max() > 1e-3


QUANTIZATIONS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]


@pytest.mark.parametrize("quantization", slow_except(["Q4_1", "Q5_0", "BF16"], QUANTIZATIONS))
def test_every_quantization_gives_its_dequantized_weights(quantization, tmp_path):
    original = gguf_files.write("llama", tmp_path / "x.gguf", quantization)
    model = il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    loaded = logits(model, ids_of("llama"))
    check_close(loaded, logits(gguf_files.restored("llama", tmp_path / "x.gguf"), ids_of("llama")))
    assert ((loaded - logits(original, ids_of("llama"))).abs().max() > 1e-4) == (
        quantization != "F32"
    )
    quantized = quantization.startswith("Q")
    assert ModelView(model).quantization == (quantization if quantized else "")
    assert ModelView(model).name == (
        "x.gguf (" + quantization + " weights)" if quantized else "x.gguf"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_dequantized_to_the_requested_dtype(dtype, tmp_path, gguf_cache):
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    loaded = il.load_model(str(tmp_path / "x.gguf"), device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    stored = dtype if dtype != torch.float64 else torch.float32
    expected = gguf_files.restored("llama", tmp_path / "x.gguf").to(stored).to(dtype)
    for name, wanted in expected.named_parameters():  # only copied and rounded
        assert torch.equal(loaded.original_model.get_parameter(name), wanted), name
    (folder,) = (path for path in gguf_cache.iterdir() if path.is_dir())
    assert str(stored).removeprefix("torch.") in folder.name


@pytest.mark.parametrize(
    ("quantization", "dtype"), [("F16", torch.float16), ("Q8_0", torch.float32)]
)
def test_without_a_dtype_weights_keep_the_precision_of_the_file(quantization, dtype, tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", quantization)
    model = il.load_model(str(tmp_path / "x.gguf"), device="cpu", dtype=None)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.slow
def test_a_model_that_transformers_unpacked_from_a_file_is_read(tmp_path):
    """It keeps its quantizer, as models with packed weights do, which are refused."""
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    unpacked = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    bridge = TransformerBridge.boot_transformers(
        "mine", hf_model=unpacked, tokenizer=tokenizer, device="cpu"
    )
    batch = il.tokenize(bridge, [WORDS])
    expected = il.capture(il.load_model(tmp_path / "x.gguf"), batch)
    check_close(il.capture(bridge, batch).label_log_probs, expected.label_log_probs)


def test_a_conversion_that_would_fill_the_disk_is_refused_before_it_begins(
    tmp_path, monkeypatch, gguf_cache
):
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    monkeypatch.setattr(
        gguf.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=gguf.SPACE_LEFT)
    )
    message = r"takes 0\.0 GB in .*, where only 1\.1 GB are free; pass dtype='bfloat16', which takes half, free space"
    with pytest.raises(il.InputError, match=message):
        il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    assert not [path for path in gguf_cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["llama", "llama_pieces", "gpt2", "qwen2", "phi3"])
def test_the_files_own_tokenizer_is_used(name, tmp_path):
    gguf_files.write(name, tmp_path / "x.gguf")
    tokenizer = gguf_files.tokenizer(gguf_files.ARCHITECTURES[name][1])
    loaded = il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    for text in (*gguf_files.TEXT, gguf_files.UNUSUAL):
        ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
    begins = (
        int(il.tokenize(loaded, [il.Prompt.parse(WORDS, answer="foo")]).tokens[0, 0])
        == tokenizer.bos_token_id
    )
    assert begins == (gguf_files.ARCHITECTURES[name][1] == "pieces")  # as add_bos_token says


@pytest.mark.parametrize(("name", "composes"), [("qwen2", True), ("llama", False)])
def test_characters_are_composed_as_the_published_tokenizers_do(name, composes, tmp_path):
    gguf_files.write(name, tmp_path / "x.gguf")
    tokenizer = il.load_model(str(tmp_path / "x.gguf"), device="cpu").tokenizer
    decomposed, composed = (
        tokenizer(text, add_special_tokens=False).input_ids for text in ("e\u0301", "\u00e9")
    )
    assert (decomposed == composed) == composes


SPLITS = {  # GGUF's name -> how the original tokenizer splits text before it is written as bytes
    "gpt-2": ([], True),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True)], True),
    "qwen2": ([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")], True),
}
NUMBERS = "in 1234 and 56 : 7foo"


def byte_level_tokenizer(split):
    """A tokenizer with tokens of several digits, as far as `split` does not separate digits."""
    raw = Tokenizer(models.BPE())
    before, use_regex = SPLITS[split]
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=True)
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        special_tokens=[end], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator([NUMBERS, *gguf_files.TEXT] * 3, trainer)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(False, use_regex=use_regex)]
    )
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=end, eos_token=end)


def write_and_tokenize(path, name, text, **options):
    """Write a file with this tokenizer and return the ids that the loaded model's tokenizer has for
    a text.
    """
    model = gguf_files.build(name)
    if (tokenizer := options.get("own_tokenizer")) is not None:
        with torch.no_grad():
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    gguf_files.write(name, path, model=model, **options)
    loaded = il.load_model(str(path), device="cpu")
    ids = loaded.tokenizer(text, add_special_tokens=False).input_ids
    assert loaded.tokenizer.decode(ids) == text
    return ids


@pytest.mark.parametrize(
    ("name", "pre", "split"),
    [
        ("llama", "smollm", "smollm"),
        ("llama", "gpt-2", "gpt-2"),
        ("qwen2", "gpt-2", "gpt-2"),  # not the split of Qwen's own tokenizers
        ("qwen2", "default", "qwen2"),  # files from before the setting: the architecture's
        ("starcoder2", None, "smollm"),
        ("gpt2", "qwen2", "qwen2"),
    ],
)
def test_text_is_split_as_the_file_says(name, pre, split, tmp_path):
    original = byte_level_tokenizer(split)
    ids = write_and_tokenize(tmp_path / "x.gguf", name, NUMBERS, own_tokenizer=original, pre=pre)
    assert ids == original(NUMBERS).input_ids
    with_other_split = byte_level_tokenizer("gpt-2" if split != "gpt-2" else "smollm")
    assert ids != with_other_split(NUMBERS).input_ids


def test_a_file_that_does_not_say_how_text_is_split_is_warned_of(tmp_path, caplog):
    write_and_tokenize(tmp_path / "x.gguf", "llama", NUMBERS, pre=None)
    assert (
        "x.gguf does not say how its tokenizer splits text (tokenizer.ggml.pre), so it is split like"
        in caplog.text
    )


def test_an_unknown_split_is_refused_unless_a_tokenizer_is_given(tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", pre="brand-new")
    for _ in range(2):  # converted anew, and from the cache
        with pytest.raises(
            il.InputError, match=r"known way, got tokenizer\.ggml\.pre='brand-new'; pass the folder"
        ):
            il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    tokenizer = gguf_files.tokenizer("bytes")
    loaded = il.load_model(str(tmp_path / "x.gguf"), device="cpu", tokenizer=tokenizer)
    check_close(logits(loaded, ids_of("llama")), logits(gguf_files.build("llama"), ids_of("llama")))


@pytest.mark.parametrize("name", ["llama_pieces", "phi3", "gemma2"])
@pytest.mark.parametrize("add_space", [True, False])
def test_a_space_is_put_before_the_text_as_the_file_says(name, add_space, tmp_path):
    """Compared with the original: with the space, "love" is the token of " love" in the middle of a
    text.
    """
    original = copy.deepcopy(gguf_files.tokenizer("pieces"))
    if not add_space:
        original.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    text = gguf_files.TEXT[0]
    ids = write_and_tokenize(
        tmp_path / "x.gguf", name, text, own_tokenizer=original, add_space_prefix=add_space
    )
    assert ids == original(text, add_special_tokens=False).input_ids
    assert original.convert_ids_to_tokens(ids)[0].startswith("▁") == add_space
    loaded = il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    assert il.tokenize(loaded, [WORDS]).label_positions.shape == (1, 4)


def test_a_space_before_the_text_of_a_byte_level_tokenizer(tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", add_space_prefix=True)
    tokenizer = il.load_model(str(tmp_path / "x.gguf"), device="cpu").tokenizer
    reference_tokenizer = gguf_files.tokenizer("bytes")
    assert tokenizer("love : bar").input_ids == reference_tokenizer(" love : bar").input_ids


def test_a_file_without_a_tokenizer_needs_one_given(tmp_path):
    gguf_files.write(
        "llama",
        tmp_path / "x.gguf",
        with_tokenizer=False,
        settings={"vocab_size": len(gguf_files.tokenizer("bytes"))},
    )
    with pytest.raises(
        il.InputError, match=r"x.gguf' must contain a tokenizer, got none; pass .*tokenizer="
    ):
        il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    gguf_files.tokenizer("bytes").save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    loaded = il.load_model(str(tmp_path / "x.gguf"), device="cpu", tokenizer=tokenizer)
    check_close(logits(loaded, ids_of("llama")), logits(gguf_files.build("llama"), ids_of("llama")))


def test_a_gguf_file_in_a_folder_is_loaded_by_its_name(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    original = gguf_files.write("gpt2", folder / "x.gguf")
    (folder / "config.json").write_text(
        '{"model_type": "nothing"}'
    )  # does not apply to the GGUF file next to it
    expected = logits(original, ids_of("gpt2"))
    check_close(
        logits(il.load_model(str(folder), gguf_file="x.gguf", device="cpu"), ids_of("gpt2")),
        expected,
    )
    check_close(logits(il.load_model(f"{folder}/x.gguf", device="cpu"), ids_of("gpt2")), expected)
    (folder / "config.json").unlink()
    with pytest.raises(
        il.InputError, match=r"it has no config.json .*; pass its GGUF file: '.*/models/x.gguf'"
    ):
        il.load_model(str(folder))
    (folder / "y.gguf").touch()
    with pytest.raises(il.InputError, match=r"models/x.gguf' \(or another of its 2 GGUF files\)"):
        il.load_model(str(folder))
    with pytest.raises(
        il.InputError, match=r"gguf_file must be the name of a \.gguf file, got 'x.bin'"
    ):
        il.load_model(str(folder), gguf_file="x.bin")


@pytest.mark.slow
def test_results_state_the_quantization(tmp_path, monkeypatch, capsys):
    gguf_files.write("llama", tmp_path / "x.gguf", "Q4_0")
    model = ["--model", tmp_path / "x.gguf", "--device", "cpu"]
    outputs = ["--json", tmp_path / "x.json", "--html", tmp_path / "x.html"]
    code, out, _ = faults.call(
        monkeypatch, capsys, "explain", WORDS, *model, "--ablate", 1, *outputs
    )
    assert code == 0
    assert "x.gguf (Q4_0 weights)" in out
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["settings"]["quantization"] == "Q4_0"
    assert stored["model"] == "x.gguf (Q4_0 weights)"
    assert stored["settings"]["source"] == str(tmp_path / "x.gguf")
    assert "float32, dequantized from Q4_0" in (tmp_path / "x.html").read_text(encoding="utf-8")
    rows = [f"{text},bar" for text in ("love", "like", "happy", "sad")]
    rows += [f"{text},foo" for text in ("one", "two", "three", "nine")]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    task = ["--path", "rows.csv", "--n", 4]
    monkeypatch.chdir(tmp_path)
    code, _, output = faults.call(
        monkeypatch, capsys, "locate", *task, *model, "--out", tmp_path / "run"
    )
    assert code == 0, output
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["quantization"] == "Q4_0"
