"""Loads from the small Hub beside this file, fault by fault, and what must be said: a table for tests/test_hub.py.

Run as a program it goes through one part of the table in one process, since the Hub's address, the cache and whether
there is a network are read from the environment once:  python hub_cases.py PART FOLDER
"""

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS = 24


@dataclass(frozen=True)
class Case:
    """`words` must be in what is said; it begins with "ok" where something was loaded. `kept` files are kept.

    `keep`: the cache of the case before is there.
    """

    label: str
    name: str
    words: tuple[str, ...]
    faults: dict[str, tuple[Any, str, float]] = field(default_factory=dict)
    token: str | None = None
    keep: bool = False
    kept: int | None = None
    requests: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    task: bool = False


EVER = float("inf")
GPT2_FILES = 4
V1 = {"revision": "v1"}

ONLINE = [
    Case("a model", "gpt2", ("ok gpt2 main",), kept=GPT2_FILES),
    Case("again: one question, nothing fetched", "gpt2", ("ok gpt2 main",), keep=True, requests=1),
    Case("a revision beside main", "gpt2", ("ok gpt2 v1",), keep=True, options=V1),
    Case("a commit that is there", "gpt2", ("ok gpt2 v1",), keep=True, requests=0, options={"revision": "@v1"}),
    Case("a revision without main", "gpt2", ("ok gpt2 v1",), options=V1),
    Case("shards", "some/shards", ("ok some/shards main",)),
    Case("no safetensors", "some/bin", ("ok some/bin main", "pytorch_model.bin", "weights_only")),
    Case("no such model", "gpt2-lrage", ("'gpt2-lrage'", "check the spelling", "HF_TOKEN"), kept=0),
    Case("no such model for a token", "no/such", ("no model 'no/such' that you can read",), token="hf_good"),
    Case("private", "some/private", ("'some/private'", "HF_TOKEN")),
    Case("private, with its token", "some/private", ("ok some/private main",), token="hf_good"),
    Case("gated", "some/gated", ("is gated", "accept its license", "HF_TOKEN")),
    Case("gated, with license", "some/gated", ("ok some/gated main",), token="hf_good"),
    Case("expired token", "gpt2", ("Invalid credentials", "valid token"), token="hf_old"),
    Case("no such revision", "gpt2", ("revision 'v9' does not exist", "--revision"), options={"revision": "v9"}),
    Case("no name", "a/b/c", ("got 'a/b/c'",), requests=0),
    Case("forbidden", "gpt2", ("403", "proxy or firewall"), {"status": (403, "", EVER)}),
    Case("too many requests", "gpt2", ("429", "retry"), {"status": (429, "", EVER)}),
    Case("out of order", "gpt2", ("unavailable", "503", "retry later"), {"status": (503, "", EVER)}),
    Case("not a Hub", "gpt2", ("is not from the Hugging Face Hub", "login page"), {"status": (200, "", EVER)}),
    Case("not a Hub for files", "gpt2", ("is not from the Hugging Face Hub",), {"status": (200, "resolve", EVER)}),
    Case("hangs up", "gpt2", ("interrupted", "retry"), {"drop": (1, "", EVER)}),
    Case("never answers", "gpt2", ("did not respond in time", "HF_HUB_ETAG_TIMEOUT"), {"delay": (60, "", EVER)}),
    Case("goes on", "gpt2", ("ok gpt2 main",), keep=True, kept=GPT2_FILES),
    Case("cut in the weights", "gpt2", ("interrupted", "kept"), {"cut": (9, "model.saf", EVER)}, kept=3),
    Case("cut once", "gpt2", ("ok gpt2 main",), {"cut": (1000, "model.safetensors", 1)}),
    Case("never answers, cached", "gpt2", ("ok gpt2 main", "using the cached"), {"delay": (60, "", EVER)}, keep=True),
    Case("no weights", "some/no-weights", ("has no weights as safetensors or PyTorch files",)),
    Case("no tokenizer", "some/no-tokenizer", ("has no tokenizer", "tokenizer=")),
    Case("nothing", "some/empty", ("it has no config.json",)),
    Case("an adapter", "some/adapter", ("an adapter of another model",)),
    Case("a pickle that runs a command", "some/evil", ("some/evil",)),
    Case("a pointer", "some/pointer", ("Git LFS pointer",)),
    Case("cut weights on the Hub", "some/short", ("retry to download it again",)),
    Case("sst2", "sst2", ("ok 24 negative positive",), task=True),
    Case("trec", "trec", ("ok 24 ABBR DESC",), keep=True, task=True),
    Case("agnews", "agnews", ("ok 24 Business Sci/Tech Sports World",), keep=True, task=True),
    Case("ethos", "ethos", ("ok 24 hate speech no hate speech",), keep=True, task=True),
    Case("amazon", "amazon", ("ok 20000 negative positive",), keep=True, task=True, kept=10),
    Case("sst2 again", "sst2", ("ok 24 negative positive",), keep=True, task=True, requests=1),
    Case("no split", "sst2", ("got 'test', 'train'", "path="), keep=True, task=True, options={"split": "nosuch"}),
    Case("data: cut", "trec", ("interrupted", "path="), {"cut": (9, "train", EVER)}, task=True),
    Case("data: never answers", "agnews", ("did not respond", "path="), {"delay": (60, "", EVER)}, task=True),
    # what follows is what the part without a network finds
    Case("fetch sst2", "sst2", ("ok",), task=True),
    Case("fetch gpt2", "gpt2", ("ok gpt2 main",), keep=True),
    Case("fetch shards in part", "some/shards", ("interrupted",), {"cut": (9, "-00002-of-", EVER)}, keep=True),
]

OFFLINE = [
    Case("offline sst2", "sst2", ("ok",), keep=True, task=True),
    Case("offline gpt2", "gpt2", ("ok gpt2 main",), keep=True),
    Case("offline, not fetched", "some/bin", ("'some/bin'", "in the cache", "unset HF_HUB_OFFLINE"), keep=True),
    Case("offline, fetched in part", "some/shards", ("in the cache", "unset HF_HUB_OFFLINE"), keep=True),
    Case("offline, another revision", "gpt2", ("'v1'", "in the cache"), keep=True, options=V1),
    Case("offline, a split", "sst2", ("HF_HUB_OFFLINE",), keep=True, task=True, options={"split": "nosuch"}),
    Case("offline, not fetched data", "amazon", ("in the cache", "path="), task=True),
]

REFUSED = [
    Case("nobody listens", "some/bin", ("cannot reach", "HTTPS_PROXY"), keep=True),
    Case("nobody listens, data", "amazon", ("cannot reach", "path="), keep=True, task=True),
    Case("nobody listens, all in the cache", "gpt2", ("ok gpt2 main", "using the cached"), keep=True),
]

PARTS = {"online": ONLINE, "offline": OFFLINE}


def content(folder: Path) -> dict[str, Any]:
    """What the Hub serves: tiny models of `folder` (see `models`) and rows in the layouts of the real datasets."""
    from importlib import import_module

    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    models = {
        one.name.replace("--", "/"): {
            revision.name: {file.name: file.read_bytes() for file in sorted(revision.iterdir())}
            for revision in sorted(one.iterdir())
        }
        for one in sorted(folder.iterdir())
    }

    def lines(split: str, label: str, kinds: list[str]) -> bytes:
        rows = ({"text": f"{split} {i}", label: kinds[i % len(kinds)], "idx": i} for i in range(ROWS))
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def parquet(split: str, text: str, names: list[str] | None, count: int = ROWS) -> bytes:
        classes = len(names or "01")
        table = pa.table({"label": [i % classes for i in range(count)], text: [f"{split} {i}" for i in range(count)]})
        if names:
            kind = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(kind)})
        sink = io.BytesIO()
        pq.write_table(table, sink)
        return sink.getvalue()

    both = ("train", "test")
    coarse = ["ABBR", "DESC"]
    data = {
        "SetFit/sst2": {f"{s}.jsonl": lines(s, "label_text", ["negative", "positive"]) for s in both},
        "SetFit/TREC-QC": {f"{s}.jsonl": lines(s, "label_coarse_original", coarse) for s in both},
        "SetFit/ethos_binary": {
            f"{s}.jsonl": b"".join(
                b'{"text": "%s\xe2\x80\xa8%d", "label": %d}\n' % (s.encode(), i, i % 2) for i in range(ROWS)
            )
            for s in both
        },
        "fancyzhx/ag_news": {
            f"data/{s}-00000-of-00001.parquet": parquet(s, "text", ["World", "Sports", "Business", "Sci/Tech"])
            for s in both
        },
        "fancyzhx/amazon_polarity": {
            f"amazon_polarity/{s}-{i:05d}-of-00002.parquet": parquet(f"{s} {i}", "content", None, 20_010)
            for s in both
            for i in range(2)
        },
    }
    return {"model": models, "dataset": {name: {"main": {"README.md": b"", **files}} for name, files in data.items()}}


def main(part: str, folder: Path) -> None:
    """Goes through a part and prints, as JSON, what was said, asked and kept, case by case."""
    from hub import Hub

    with Hub(content(folder), private={"some/private"}, gated={"some/gated"}) as hub:
        if part == "online":
            os.environ["HF_ENDPOINT"] = hub.url
        import torch

        from icl_lens.hub import download_bars

        for name in ("huggingface_hub", "transformers"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        download_bars(False)
        told = {case.label: tell(case, hub) for case in PARTS[part]}
    if part == "online":
        told |= {case.label: tell(case, hub) for case in REFUSED}
    print(json.dumps(told))


def tell(case: Case, hub: Any) -> dict[str, Any]:
    """What one case says, and what it asks for and keeps."""
    import icl_lens as il

    home = Path(os.environ["HF_HOME"])
    hub.clear()
    hub.faults |= case.faults
    if not case.keep:
        shutil.rmtree(home, ignore_errors=True)
    os.environ.pop("HF_TOKEN", None)
    if case.token:
        os.environ["HF_TOKEN"] = case.token
    options = dict(case.options)
    if (options.get("revision") or "").startswith("@"):
        options["revision"] = hub.commit("model", case.name, options["revision"][1:])
    notes = logging.StreamHandler(io.StringIO())
    logging.getLogger("icl_lens").addHandler(notes)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            if case.task:
                prompts = il.load_task(il.TextTask(case.name, classes="all", **options), n=4)
                assert all(prompt.query.startswith("test") for prompt in prompts)
                said = "ok"
            else:
                model = il.load_model(case.name, device="cpu", **options)
                said = f"ok {model.cfg.model_name} {_revision(model)}"
    except il.InputError as error:
        said = str(error)
    except BaseException as error:
        said = f"TRACEBACK {type(error).__name__}: {error}"
    found = {
        "asked": [one.path for one in hub.log],
        "kept": sum(len(files) for where, _, files in os.walk(home / "hub") if "snapshots" in where),
        "noted": notes.stream.getvalue(),
    }
    logging.getLogger("icl_lens").removeHandler(notes)
    return found | {"said": f"ok {_classes(case.name)}" if said == "ok" else said}


def _classes(name: str) -> str:
    """The number of rows of the train split and its classes."""
    from icl_lens.prompts.datasets import load_hub_splits

    tables, (_, label) = load_hub_splits(name, ["train"])
    rows, names = tables["train"].rows, tables["train"].class_names[label]
    classes = {names[row[label]] if isinstance(row[label], int) else row[label] for row in rows}
    return f"{len(rows)} {' '.join(sorted(classes))}"


def _revision(model: Any) -> str:
    """Which revision the weights and the tokenizer are of: both are marked with it (see tests/test_hub.py)."""
    bias = "v1" if float(model.blocks[0].attn.b_O[0]) == 1.5 else "main"
    vocabulary = "v1" if "of-v1" in model.tokenizer.get_vocab() else "main"
    return bias if bias == vocabulary else f"weights of {bias}, tokenizer of {vocabulary}"


if __name__ == "__main__":
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # the client waits before it tries again
    main(sys.argv[1], Path(sys.argv[2]))
