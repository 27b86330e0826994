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
    """`words` must all be in what is said, or in "ok" and what was loaded; `never` must not. `kept` files are kept."""

    label: str
    name: str
    words: tuple[str, ...]
    faults: dict[str, tuple[Any, str, float]] = field(default_factory=dict)
    token: str | None = None
    keep: bool = False
    kept: int | None = None
    never: tuple[str, ...] = ()
    seconds: float = 9.0
    requests: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    task: bool = False


EVER = float("inf")
GPT2_FILES = 4

ONLINE = [
    Case("a model", "gpt2", ("ok gpt2 main",), kept=GPT2_FILES),
    Case("again: one question, nothing fetched", "gpt2", ("ok gpt2 main",), keep=True, requests=1),
    Case("a revision beside main", "gpt2", ("ok gpt2 v1",), keep=True, options={"revision": "v1"}),
    Case("a revision without main", "gpt2", ("ok gpt2 v1",), options={"revision": "v1"}),
    Case(
        "a commit that is there: no question",
        "gpt2",
        ("ok gpt2 v1",),
        keep=True,
        requests=0,
        options={"revision": "@v1"},
    ),
    Case("shards", "some/shards", ("ok some/shards main",)),
    Case(
        "no safetensors: no conversion",
        "some/bin",
        ("ok some/bin main", "has no safetensors", "pytorch_model.bin", "weights_only"),
        never=("discussions",),
    ),
    Case(
        "no such model", "gpt2-lrage", ("no public model 'gpt2-lrage'", "did you mean 'gpt2-large'", "HF_TOKEN"), kept=0
    ),
    Case("no such model for a token", "no/such", ("no model 'no/such' that your token can read",), token="hf_good"),
    Case("private", "some/private", ("no public model 'some/private'", "if it is private, log in")),
    Case("private, with its token", "some/private", ("ok some/private main",), token="hf_good"),
    Case("gated", "some/gated", ("is gated; accept its license at https://huggingface.co/some/gated", "HF_TOKEN")),
    Case("gated, no license", "some/gated", ("is gated, and your token's account",), token="hf_nogrant"),
    Case("gated, with license", "some/gated", ("ok some/gated main",), token="hf_good"),
    Case("expired token", "gpt2", ("rejected your token", "expired or mistyped", "hf auth logout"), token="hf_old"),
    Case("no such revision", "gpt2", ("no revision 'v9'", "'main', 'v1'", "--revision"), options={"revision": "v9"}),
    Case("no name", "a/b/c", ("got 'a/b/c'",), requests=0),
    Case("forbidden", "gpt2", ("403 Forbidden", "proxy or firewall"), {"status": (403, "", EVER)}),
    Case(
        "too many requests",
        "gpt2",
        ("429", "retry after 60 seconds"),
        {"status": (429, "", EVER), "retry": (60, "", 0)},
    ),
    Case("busy once", "gpt2", ("ok gpt2 main",), {"status": (429, "api", 1)}),
    Case("out of order", "gpt2", ("unavailable (503", "retry later"), {"status": (503, "", EVER)}),
    Case("out of order once", "gpt2", ("ok gpt2 main",), {"status": (500, "api", 1)}),
    Case("not a Hub", "gpt2", ("is not from the Hugging Face Hub", "login page"), {"status": (200, "", EVER)}),
    Case(
        "not a Hub for files",
        "gpt2",
        ("is not from the Hugging Face Hub", "login page"),
        {"status": (200, "resolve", EVER)},
    ),
    Case("hangs up", "gpt2", ("interrupted", "retry"), {"drop": (1, "", EVER)}),
    Case(
        "never answers", "gpt2", ("did not respond within 1 seconds", "HF_HUB_ETAG_TIMEOUT"), {"delay": (30, "", EVER)}
    ),
    Case(
        "never answers for the weights",
        "gpt2",
        ("did not respond within 1 seconds", "3 of 4 files downloaded", "resume at model.safetensors"),
        {"delay": (30, "model.safetensors", EVER)},
        kept=3,
    ),
    Case("goes on", "gpt2", ("ok gpt2 main",), keep=True, kept=GPT2_FILES),
    Case(
        "cut in the weights",
        "gpt2",
        ("interrupted", "3 of 4 files downloaded"),
        {"cut": (9, "model.saf", EVER)},
        kept=3,
    ),
    Case("cut once", "gpt2", ("ok gpt2 main",), {"cut": (1000, "model.safetensors", 1)}),
    Case(
        "never answers, all in the cache",
        "gpt2",
        ("ok gpt2 main", "using the cached", "did not respond"),
        {"delay": (30, "", EVER)},
        keep=True,
    ),
    Case(
        "out of order, all in the cache",
        "gpt2",
        ("ok gpt2 main", "using the cached", "503"),
        {"status": (503, "", EVER)},
        keep=True,
        requests=1,
    ),
    Case("no weights", "some/no-weights", ("has no weights as safetensors or PyTorch files",)),
    Case("no tokenizer", "some/no-tokenizer", ("has no tokenizer", "tokenizer=")),
    Case("nothing", "some/empty", ("not a transformers model: it has no config.json",)),
    Case("an adapter", "some/adapter", ("an adapter of another model",)),
    Case("a pickle that runs a command", "some/evil", ("contains more than weights", "(weights_only)")),
    Case("a pointer", "some/pointer", ("is a Git LFS pointer", "git lfs pull")),
    Case("cut weights on the Hub", "some/short", ("is corrupt or truncated", "retry to download it again")),
    Case("sst2", "sst2", ("ok negative positive",), task=True),
    Case("trec", "trec", ("ok ABBR DESC",), keep=True, task=True),
    Case("agnews", "agnews", ("ok Business Sci/Tech Sports World",), keep=True, task=True),
    Case("ethos", "ethos", ("ok hate speech no hate speech",), keep=True, task=True),
    Case("amazon", "amazon", ("ok negative positive",), keep=True, task=True, never=("train-00001", "data/whole")),
    Case("sst2 again", "sst2", ("ok negative positive",), keep=True, task=True, requests=1),
    Case("amazon again", "amazon", ("ok negative positive",), keep=True, task=True, requests=0),
    Case(
        "no such split",
        "sst2",
        ("no split 'nosuch', only 'test', 'train'",),
        keep=True,
        task=True,
        options={"split": "nosuch"},
    ),
    Case("data: cut", "trec", ("interrupted", "path="), {"cut": (9, "train", EVER)}, task=True),
    Case("data: never answers", "agnews", ("did not respond", "path="), {"delay": (30, "", EVER)}, task=True),
    Case("data: out of order", "ethos", ("unavailable (503", "path="), {"status": (503, "", EVER)}, task=True),
    Case(
        "data: cut in a part",
        "amazon",
        ("interrupted", "none were kept"),
        {"cut": (9, "train", EVER)},
        task=True,
    ),
    Case("data: whole files only", "amazon", ("ok negative positive",), {"whole": (1, "", EVER)}, task=True),
    # what follows is what the part without a network finds
    *(Case(f"fetch {name}", name, ("ok",), keep=True, task=True) for name in ("sst2", "trec", "agnews", "ethos")),
    Case("fetch gpt2", "gpt2", ("ok gpt2 main",), keep=True),
    Case("fetch shards in part", "some/shards", ("interrupted",), {"cut": (9, "-00002-of-", EVER)}, keep=True),
]

OFFLINE = [
    *(
        Case(f"offline {name}", name, ("ok",), keep=True, task=True, requests=0)
        for name in ("sst2", "trec", "agnews", "ethos", "amazon")
    ),
    Case("offline gpt2", "gpt2", ("ok gpt2 main",), keep=True, requests=0),
    Case("offline, not fetched", "some/bin", ("not in the cache", "unset HF_HUB_OFFLINE"), keep=True, requests=0),
    Case("offline, mistyped", "gpt2-lrage", ("did you mean 'gpt2-large'", "HF_HUB_OFFLINE"), keep=True, requests=0),
    Case("offline, another revision", "gpt2", ("'v1' is not in the cache",), keep=True, options={"revision": "v1"}),
    Case("offline, a split", "sst2", ("HF_HUB_OFFLINE",), keep=True, task=True, options={"split": "nosuch"}),
    Case("offline, not fetched data", "amazon", ("not in the cache", "path="), task=True, requests=0),
]

REFUSED = [
    Case("nobody listens", "some/bin", ("cannot reach", "HTTPS_PROXY"), keep=True),
    Case("nobody listens, data", "sst2", ("cannot reach", "path="), keep=True, task=True, options={"split": "dev"}),
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

    def parquet(split: str, text: str, count: int, kinds: int, names: list[str] | None, rows: int = ROWS) -> bytes:
        table = pa.table(
            {
                "label": pa.array([i % kinds for i in range(count)], pa.int64()),
                text: [f"{split} {i} {i * 7919 % 104729}" for i in range(count)],
                "title": [f"{i * 31337 % 99991} not read {i}" * 5 for i in range(count)],
            }
        )
        if names:
            kind = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(kind)})
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=rows)
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
            f"data/{s}-00000-of-00001.parquet": parquet(s, "text", ROWS, 4, ["World", "Sports", "Business", "Sci/Tech"])
            for s in both
        },
        "fancyzhx/amazon_polarity": {
            **{
                f"amazon_polarity/train-{i:05d}-of-00002.parquet": parquet(
                    f"train {i}", "content", 40_000, 2, None, 1000
                )
                for i in range(2)
            },
            "amazon_polarity/test-00000-of-00001.parquet": parquet("test", "content", 40_000, 2, None, 1000),
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

        from icl_lens import hub as own

        for name in ("huggingface_hub", "transformers"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        own.download_bars(False)
        import icl_lens as il

        il.load_model("icl-mini", device="cpu")  # what is imported on the way is not what is timed
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
    hub.headers |= {"Retry-After": "60"} if "retry" in case.faults else {}
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
    start = time.monotonic()
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
        "seconds": time.monotonic() - start,
        "asked": [one.path for one in hub.log],
        "sent": [(one.path, one.range, one.sent) for one in hub.log if one.sent and "/resolve/" in one.path],
        "kept": sum(len(files) for where, _, files in os.walk(home / "hub") if "snapshots" in where),
        "noted": notes.stream.getvalue(),
    }
    logging.getLogger("icl_lens").removeHandler(notes)
    return found | {"said": f"ok {' '.join(_classes(case.name))}" if said == "ok" else said}


def _classes(name: str) -> list[str]:
    from icl_lens.prompts.datasets import load_hub_splits

    tables, (_, label) = load_hub_splits(name, ["train"])
    names = tables["train"].class_names.get(label)
    labels = {row[label] for row in tables["train"].rows}
    return sorted(names[one] if names and isinstance(one, int) else str(one) for one in labels)


def _revision(model: Any) -> str:
    """Which revision the weights and the tokenizer are of: both are marked with it (see tests/test_hub.py)."""
    bias = "v1" if float(model.blocks[0].attn.b_O[0]) == 1.5 else "main"
    vocabulary = "v1" if "of-v1" in model.tokenizer.get_vocab() else "main"
    return bias if bias == vocabulary else f"weights of {bias}, tokenizer of {vocabulary}"


if __name__ == "__main__":
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # the client waits before it tries again
    main(sys.argv[1], Path(sys.argv[2]))
