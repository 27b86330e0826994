"""Models, GGUF files and datasets of the Hub, against a small imitation of it: messages, requests,
cached files.
"""

import io
import json
import re
import time

import families
import faults
import gguf_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faults import assert_refused
from hub import Hub
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

import icl_lens as il
from icl_lens.foundation.hub import explain_hub_error, show_download_bars
from icl_lens.prompts.datasets import load_hub_splits

ROWS = 24
SPLITS = ("train", "test")
COARSE = ["ABBR", "DESC"]


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def saved(folder, revision, **how):
    """A tiny GPT-2, marked as `revision` in one bias of the weights and one word of the
    tokenizer.
    """
    model, tokenizer = families.build("gpt2"), families.tokenizer()
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.bias[0] = 1.5 if revision == "v1" else 2.5
    model.save_pretrained(folder / revision, **how)
    tokenizer.add_tokens([f"of-{revision}"])
    tokenizer.save_pretrained(folder / revision)
    (folder / revision / "generation_config.json").unlink(missing_ok=True)
    return files_of(folder / revision)


def quantized(folder, mark):
    model = gguf_files.build("llama")
    with torch.no_grad():
        model.lm_head.weight[0] = mark
    (folder / "more").mkdir(parents=True)
    gguf_files.write("llama", folder / "x.gguf", "Q8_0", model=model)
    gguf_files.write("llama", folder / "more" / "y.gguf", "Q4_0", model=model)
    return files_of(folder)


def lines(split, label, kinds):
    rows = ({"text": f"{split}\u2028{i}", label: kinds[i % len(kinds)]} for i in range(ROWS))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(split, text, names=None, count=ROWS):
    labels = [i % len(names or "01") for i in range(count)]
    table = pa.table({"label": labels, text: [f"{split} {i}" for i in range(count)]})
    if names:
        kind = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(kind)})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """What the Hub serves: tiny models, and rows in the layouts of the real datasets."""
    root = tmp_path_factory.mktemp("served")
    main = saved(root, "main")
    bare = {name: data for name, data in main.items() if name != "model.safetensors"}
    pickled = io.BytesIO()
    torch.save(families.build("gpt2").state_dict(), pickled)
    models = {
        **dict.fromkeys(("some/private", "some/gated"), main),
        "some/shards": saved(root / "shards", "main", max_shard_size="40KB"),
        "some/bin": bare | {"pytorch_model.bin": pickled.getvalue()},
        "some/no-weights": bare,
        "some/no-tokenizer": {name: data for name, data in main.items() if "token" not in name},
        "some/short": main | {"model.safetensors": main["model.safetensors"][:5000]},
        "some/empty": {"README.md": b"{}"},
        "some/adapter": {"adapter_config.json": b"{}"},
    }
    news = ["World", "Sports", "Business", "Sci/Tech"]
    amazon = []
    for split in SPLITS:
        amazon.append((f"amazon_polarity/{split}-00000-of-00002.parquet", f"{split} 0"))
        amazon.append((f"amazon_polarity/{split}-00001-of-00002.parquet", f"{split} 1"))
    data = {
        "SetFit/sst2": {
            f"{s}.jsonl": lines(s, "label_text", ["negative", "positive"]) for s in SPLITS
        },
        "SetFit/TREC-QC": {f"{s}.jsonl": lines(s, "label_coarse_original", COARSE) for s in SPLITS},
        "SetFit/ethos_binary": {f"{s}.jsonl": lines(s, "label", [0, 1]) for s in SPLITS},
        "fancyzhx/ag_news": {
            f"data/{s}-00000-of-00001.parquet": parquet(s, "text", news) for s in SPLITS
        },
        "fancyzhx/amazon_polarity": {
            file: parquet(split, "content", count=20_010) for file, split in amazon
        },
    }
    return {name: {"main": files} for name, files in (models | data).items()} | {
        "gpt2": {"main": main | {"README.md": b"# not needed"}, "v1": saved(root, "v1")},
        "some/quantized": {
            "main": quantized(root / "one", 1.0),
            "v1": quantized(root / "two", 100.0),
        },
    }


GPT2_FILES = 4


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "converted"))
    return tmp_path / "hub"


@pytest.fixture
def hub(content, cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        time, "sleep", lambda seconds: None
    )  # the client waits before it tries again
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub(content, private="some/private", gated="some/gated") as hub:
        yield hub
    for path in hub.asked:  # no request looks for converted weights or asks for a conversion
        assert re.match("/api/(models|datasets)/|.*/resolve/|/api/agent-harnesses", path), path
        assert "discussions" not in path


def load(name, **options):
    """Load a model; return the revision of its weights, after asserting that its tokenizer is of
    the same.
    """
    model = il.load_model(name, device="cpu", **options)
    assert model.cfg.model_name == name
    weights = "v1" if float(model.blocks[0].attn.b_O[0]) == 1.5 else "main"
    assert f"of-{weights}" in model.tokenizer.get_vocab() or name == "some/bin"
    return weights


def load_task(name, **options):
    prompts = il.TextTask(name, classes="all", **options).prompts(4)
    assert all(prompt.query.startswith("test") for prompt in prompts)


def kept(cache):
    """Return the number of files in the cache."""
    return sum(path.is_file() for path in cache.glob("*/snapshots/*/**/*"))


@pytest.mark.parametrize(
    ("name", "options", "revision"),
    [
        ("gpt2", {"revision": "v1"}, "v1"),
        ("some/shards", {}, "main"),
        ("some/private", {"token": "hf_good"}, "main"),
        ("some/gated", {"token": "hf_good"}, "main"),
    ],
)
def test_models_of_the_hub_are_loaded_at_their_revision(hub, monkeypatch, name, options, revision):
    if token := options.pop("token", ""):
        monkeypatch.setenv("HF_TOKEN", token)
    assert load(name, **options) == revision


def test_a_model_is_fetched_once_at_one_commit(hub, cache):
    assert load("gpt2") == "main"
    assert kept(cache) == GPT2_FILES
    hub.asked.clear()
    assert load("gpt2") == "main"
    assert len(hub.asked) == 1, "only whether the revision has moved"
    assert load("gpt2", revision="v1") == "v1"
    hub.asked.clear()
    assert load("gpt2", revision=hub.commit("gpt2", "v1")) == "v1"
    assert hub.asked == [], "a commit never moves"


REFUSED = {
    "no such model": ("gpt2-lrage", {}, "'gpt2-lrage' that you can read; check the spelling"),
    "private": ("some/private", {}, "HF_TOKEN"),
    "gated": ("some/gated", {}, "is gated; accept its license"),
    "expired token": ("gpt2", {"token": "hf_old"}, "401 Unauthorized"),
    "no such revision": ("gpt2", {"revision": "v9"}, "at revision 'v9' does not exist"),
    "no name": ("a/b/c", {}, "got 'a/b/c'"),
    "too many requests": ("gpt2", {"fault": (429, "")}, "429 Too Many Requests"),
    "not a Hub": ("gpt2", {"fault": (200, "")}, "HF_ENDPOINT"),
    "hangs up": (
        "gpt2",
        {"fault": ("RemoteProtocolError", "")},
        "(RemoteProtocolError: the cause); retry",
    ),
    "never answers": ("gpt2", {"fault": ("ReadTimeout", "")}, "(ReadTimeout: the cause); retry"),
    "cannot be reached": ("gpt2", {"fault": ("ConnectError", "")}, "check the network connection"),
    "no weights": ("some/no-weights", {}, "has no weights as safetensors or PyTorch files"),
    "nothing": ("some/empty", {}, "it has no config.json"),
    "an adapter": ("some/adapter", {}, "an adapter of another model"),
    "cut weights": ("some/short", {}, "retry to download it again"),
    "a GGUF repository": ("some/quantized", {}, "pass its GGUF file: 'some/quantized/more/y.gguf'"),
    "no such GGUF file": ("some/quantized/z.gguf", {}, "has no file 'z.gguf'; pass its GGUF file"),
}


@pytest.mark.parametrize("label", REFUSED)
def test_refusals_of_the_hub_are_explained(hub, monkeypatch, label):
    name, options, words = REFUSED[label]
    monkeypatch.setenv("HF_TOKEN", options.get("token", ""))
    hub.fault = options.get("fault")
    assert_refused(words, il.load_model, name, device="cpu", revision=options.get("revision"))


def test_an_interrupted_download_goes_on(hub, cache):
    hub.fault = ("cut", "model.safetensors")
    assert_refused("(at model.safetensors; complete files are kept)", load, "gpt2")
    assert kept(cache) == GPT2_FILES - 1
    hub.fault = None
    hub.asked.clear()
    assert load("gpt2") == "main"
    assert {path.rpartition("/")[2] for path in hub.asked} == {"gpt2", "model.safetensors"}


@pytest.mark.parametrize("fault", [503, "ReadTimeout", "ConnectError"])
def test_the_cache_is_used_while_the_hub_is_away(hub, caplog, fault):
    load("gpt2")
    hub.fault = (fault, "")
    assert load("gpt2") == "main"
    assert "using the cached" in caplog.text
    assert_refused("'some/bin'", load, "some/bin")


def test_offline(hub, monkeypatch):
    """Cached models and data load without a request; those that are missing or incomplete are
    refused by name.
    """
    load("gpt2")
    load_task("sst2")
    il.load_model("some/quantized/x.gguf", device="cpu")
    hub.fault = ("cut", "-00002-of-")
    assert_refused("(RemoteProtocolError", load, "some/shards")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.fault = None
    hub.asked.clear()
    assert load("gpt2") == "main"
    load_task("sst2")
    il.load_model("some/quantized/x.gguf", device="cpu")
    for call, name, options in [
        (load, "some/bin", {}),
        (load, "some/shards", {}),
        (load, "gpt2", {"revision": "v1"}),
        (load, "some/quantized/more/y.gguf", {}),
        (load_task, "sst2", {"split": "nosuch"}),
        (load_task, "amazon", {}),
    ]:
        assert_refused("unset HF_HUB_OFFLINE", call, name, **options)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "options", "mark"),
    [
        ("some/quantized/x.gguf", {}, 1.0),
        ("some/quantized", {"gguf_file": "x.gguf"}, 1.0),
        ("some/quantized", {"gguf_file": "x.gguf", "revision": "v1"}, 100.0),
        ("some/quantized/more/y.gguf", {}, 1.0),
    ],
)
def test_only_the_named_gguf_file_is_fetched(hub, name, options, mark):
    model = il.load_model(name, device="cpu", **options)
    file = "/".join([name, *filter(None, [options.get("gguf_file")])])
    assert model.cfg.model_name == file
    assert float(model.original_model.lm_head.weight[0, 0]) == pytest.approx(mark, rel=0.01)
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {file.rpartition("/")[2]}


DATASETS = {
    "sst2": ["negative", "positive"],
    "trec": COARSE,
    "agnews": ["Business", "Sci/Tech", "Sports", "World"],
    "ethos": ["hate speech", "no hate speech"],
    "amazon": ["negative", "positive"],
}


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_are_fetched_once_with_their_classes(hub, cache, name):
    load_task(name)
    assert kept(cache) == 2  # of Amazon's files, the first of each split
    hub.asked.clear()
    tables, (_, label) = load_hub_splits(name, ["train"])
    assert len(hub.asked) == 1
    rows, names = tables["train"].rows, tables["train"].class_names[label]
    assert len(rows) == (20_000 if name == "amazon" else ROWS)
    assert (
        sorted({names[row[label]] if isinstance(row[label], int) else row[label] for row in rows})
        == DATASETS[name]
    )
    assert_refused(
        "got 'test', 'train'; choose another; or pass a local copy with path=",
        load_task,
        name,
        split="no",
    )


@pytest.mark.parametrize(
    ("fault", "words"), [("cut", "RemoteProtocolError"), ("ReadTimeout", "ReadTimeout")]
)
def test_datasets_that_cannot_be_fetched(hub, fault, words):
    hub.fault = (fault, "")
    assert_refused(words, load_task, "trec")
    assert_refused("path=", load_task, "trec")


def not_located(cause):
    """Return what huggingface_hub raises if a request for a file fails."""
    error = LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            not_located(OfflineModeIsEnabled("offline")),
            "is not in the cache, or only partly; unset HF_HUB_OFFLINE",
        ),
        (not_located(TimeoutError("timed out")), "(TimeoutError: timed out); retry later"),
        (
            type("TransportError", (Exception,), {})("CERTIFICATE_VERIFY_FAILED"),
            "CERTIFICATE_VERIFY_FAILED",
        ),
        (
            OSError(28, "No space left on device"),
            "No space left on device); free space or set HF_HOME",
        ),
        (PermissionError(13, "Permission denied", "/cache"), "HF_HOME to a writable folder"),
        (OSError("Consistency check failed"), "Consistency check failed); retry"),
        (RuntimeError("something new. (Request ID: 1)\nmore"), ": something new); retry"),
    ],
    ids=str,
)
def test_reasons_of_the_network_and_the_disk(error, words):
    faults.assert_sentence(explain_hub_error(error, "a/b", "model"), words)


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_downloads_in_a_terminal_only(terminal, monkeypatch):
    """This holds even if all libraries are already imported, and although transformers switches
    bars off.
    """
    from huggingface_hub.utils import are_progress_bars_disabled

    from icl_lens.cli.program import quiet_libraries

    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.simplefilter", lambda *_: None)
        quiet_libraries()
    assert are_progress_bars_disabled() is not terminal
    show_download_bars(True)


def test_a_cache_folder_that_is_a_file_is_called_so(cache):
    cache.write_text("")
    with pytest.raises(
        il.InputError, match=r"the cache of huggingface_hub must be a folder, but '.*hub' is a file"
    ):
        il.load_model("gpt2")
