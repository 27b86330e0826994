"""Models and datasets of the Hub against a small imitation of it on 127.0.0.1: what is said, asked for and kept."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
from hub_cases import OFFLINE, ONLINE, REFUSED
from transformers import AutoModelForCausalLM

from icl_lens.hub import download_bars, explain_hub_error

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parent / "support"


class Evil:
    """Unpickled, it would leave a file behind."""

    def __reduce__(self):
        return os.system, ("touch icl_lens_evil_ran",)


def _saved(name: str, folder: Path, revision: str, **how: object) -> Path:
    """A family's tiny model, marked as `revision` in one bias of the weights and one word of the tokenizer."""
    there = folder / revision
    model = families.build(name)
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.bias[0] = 1.5 if revision == "v1" else 2.5
    model.save_pretrained(there, **how)
    tokenizer = families.tokenizer()
    tokenizer.add_tokens([f"of-{revision}"])
    tokenizer.save_pretrained(there)
    for extra in there.glob("generation_config.json"):
        extra.unlink()
    return there


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folders of models that the Hub serves, called owner--name/revision."""
    root = tmp_path_factory.mktemp("served")
    main = _saved("gpt2", root / "gpt2", "main")
    _saved("gpt2", root / "gpt2", "v1")
    (main / "README.md").write_text("# not needed")
    for name in ("private", "gated"):
        shutil.copytree(main, root / f"some--{name}" / "main")
    _saved("gpt2", root / "some--shards", "main", max_shard_size="40KB")
    for name in ("bin", "evil", "no-weights", "no-tokenizer", "pointer", "short"):
        there = root / f"some--{name}" / "main"
        shutil.copytree(main, there)
        weights = there / "model.safetensors"
        if name == "bin":
            state = AutoModelForCausalLM.from_pretrained(there).state_dict()
            torch.save(
                {key: value for key, value in state.items() if key != "lm_head.weight"}, there / "pytorch_model.bin"
            )
        if name == "evil":
            torch.save({"wte.weight": Evil()}, there / "pytorch_model.bin")
        if name == "pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        elif name == "short":
            weights.write_bytes(weights.read_bytes()[:5000])
        elif name == "no-tokenizer":
            for file in there.glob("*token*"):
                file.unlink()
        else:
            weights.unlink()
    for name, file in (("empty", "README.md"), ("adapter", "adapter_config.json")):
        (root / f"some--{name}" / "main").mkdir(parents=True)
        (root / f"some--{name}" / "main" / file).write_text("{}")
    return root


def _run(part: str, served: Path, home: Path, **environment: str) -> dict:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "TRANSFORMERS_", "HUGGING")) and "proxy" not in key.lower()
    }
    package = str(Path(__file__).parent.parent)
    limits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "hub_cases.py"), part, str(served)],
        env=inherited | limits | {"HF_HOME": str(home), "PYTHONPATH": package, "OMP_NUM_THREADS": "1"} | environment,
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told(served, tmp_path_factory):
    """What each case said: with a Hub; after it has closed; and, from the same cache, without a network."""
    home = tmp_path_factory.mktemp("hub") / "home"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: a connection is refused
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        found = _run("online", served, home)
        found |= _run("offline", served, home, HF_HUB_OFFLINE="1", HF_ENDPOINT=nobody)
    assert not (home.parent / "icl_lens_evil_ran").exists()
    return found


@pytest.mark.parametrize("case", [*ONLINE, *OFFLINE, *REFUSED], ids=lambda case: case.label)
def test_what_the_hub_does_and_what_is_said(case, told):
    """One sentence with the cause and the remedy; what was fetched is kept, and not asked for again."""
    found = told[case.label]
    said = found["said"]
    for words in case.words:
        assert words in said + found["noted"]
    assert said.startswith("ok ") == case.words[0].startswith("ok")
    assert "TRACEBACK" not in said
    assert "\n" not in said
    if case.kept is not None:
        assert found["kept"] == case.kept
    if case.requests is not None:
        assert len(found["asked"]) == case.requests, found["asked"]


def test_nothing_but_the_hub_is_asked(told):
    """No conversion of weights is looked for or asked for, and the token goes nowhere else."""
    for label, found in told.items():
        for path in found["asked"]:
            if path == "/api/agent-harnesses":  # huggingface_hub's own, once a process
                continue
            assert path.startswith(("/api/models/", "/api/datasets/")) or "/resolve/" in path, f"{label}: {path}"
            assert "discussions" not in path


# Faults that need no Hub


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (type("ProxyError", (type("TransportError", (Exception,), {}),), {})("407"), ("cannot reach", "407")),
        (type("TransportError", (Exception,), {})("CERTIFICATE_VERIFY_FAILED"), ("CERTIFICATE_VERIFY_FAILED", "SSL_")),
        (OSError(28, "No space left on device"), ("No space left", "free space", "HF_HOME")),
        (PermissionError(13, "Permission denied", "/cache"), ("/cache", "HF_HOME to a writable folder")),
        (OSError("Consistency check failed"), ("Consistency check failed", "retry")),
        (RuntimeError("something new. (Request ID: 1)\nmore"), ("model 'a/b'", ": something new; retry")),
    ],
    ids=str,
)
def test_reasons_of_the_network_and_the_disk(error, words):
    sentence = explain_hub_error(error, "a/b", "model")
    for one in words:
        assert one in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_downloads_in_a_terminal_only(terminal, monkeypatch):
    """Also where everything has been imported before, and although transformers switches them off."""
    from huggingface_hub.utils import are_progress_bars_disabled

    from icl_lens.cli.program import quiet_libraries

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.simplefilter", lambda *_: None)
        quiet_libraries()
    assert are_progress_bars_disabled() is not terminal
    download_bars(True)
