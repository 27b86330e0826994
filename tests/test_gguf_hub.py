"""GGUF files of the Hub, against a small imitation of it on 127.0.0.1: fetched once, found again without a network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import faults
import gguf_files
import pytest
import torch
from gguf_hub import CASES

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each case says with a Hub, and then in another process from the same cache without a network."""
    root = tmp_path_factory.mktemp("gguf hub")
    for revision, mark in (("main", 1.0), ("v1", 100.0)):
        (root / "served" / revision / "more").mkdir(parents=True)
        model = gguf_files.build("llama")
        with torch.no_grad():
            model.lm_head.weight[0] = mark
        gguf_files.write("llama", root / "served" / revision / "x.gguf", "Q8_0", model=model)
        gguf_files.write("llama", root / "served" / revision / "more" / "y.gguf", "Q4_0", model=model)
        (root / "served" / revision / "README.md").write_text("# Quantized\n")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: a connection is refused
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        return {
            "online": run(root, "online"),
            "offline": run(root, "offline", HF_HUB_OFFLINE="1", HF_ENDPOINT=nobody),
        }


def run(root, part, **environment):
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "TRANSFORMERS_", "HUGGING")) and "proxy" not in key.lower()
    }
    folders = {"HF_HOME": str(root / "home"), "XDG_CACHE_HOME": str(root / "cache"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "gguf_hub.py"), str(root / "served"), part],
        env=inherited | folders | {"PYTHONPATH": str(SUPPORT.parent.parent), "OMP_NUM_THREADS": "1"} | environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


LOADED = {
    "by path": "some/quantized/x.gguf of main",
    "by gguf_file": "some/quantized/x.gguf of main",
    "a revision": "some/quantized/x.gguf of v1",
    "in a folder": "some/quantized/more/y.gguf of main",
}
REFUSED = {
    "no such file": "has no file 'z.gguf'; pass its GGUF file: 'some/quantized/more/y.gguf' (or another of its 2",
    "the repository": "it has no config.json",
    "no such repository": "'some/nothing'",
}


@pytest.mark.parametrize("label", LOADED)
@pytest.mark.parametrize("part", ["online", "offline"])
def test_a_file_of_the_hub(part, label, told):
    assert told[part][label]["said"] == LOADED[label]


def test_every_case_is_checked():
    assert {*LOADED, *REFUSED} == {*CASES}


def test_only_the_named_file_is_fetched_and_only_once(told):
    online = {label: found["sent"] for label, found in told["online"].items()}
    assert [path.rpartition("/")[2] for path in online["by path"]] == ["x.gguf"]
    assert online["by gguf_file"] == []
    assert [path.rpartition("/")[2] for path in online["a revision"]] == ["x.gguf"]
    assert not any(found["sent"] for found in told["offline"].values())


@pytest.mark.parametrize("label", REFUSED)
def test_what_the_hub_does_not_have(label, told):
    faults.assert_sentence(told["online"][label]["said"], REFUSED[label])
    faults.assert_sentence(told["offline"][label]["said"], "some/")
    if label == "the repository":
        assert "pass its GGUF file: 'some/quantized/more/y.gguf'" in told["online"][label]["said"]
