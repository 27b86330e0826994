"""Models and datasets of the Hub against a small imitation of it on 127.0.0.1: what is said, asked for and kept."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import families
import pytest
import torch
from hub_cases import OFFLINE, ONLINE, REFUSED
from transformers import AutoModelForCausalLM

from icl_lens.hub import download_bars, explain_hub_error, first_line
from icl_lens.hub.errors import close_matches
from icl_lens.hub.timeouts import HubTimeout, run_with_timeout

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
    """One sentence with the cause and the remedy, soon; what was fetched is kept, and not asked for again."""
    found = told[case.label]
    said = found["said"]
    assert "TRACEBACK" not in said
    for words in case.words:
        assert words in said + found["noted"]
    for words in case.never:
        assert not [path for path in found["asked"] if words in path]
    assert said.startswith("ok ") == case.words[0].startswith("ok")
    assert "\n" not in said
    assert found["noted"].count("\n") <= 1
    assert len(said) < 420
    assert found["seconds"] < case.seconds
    if case.kept is not None:
        assert found["kept"] == case.kept
    if case.requests is not None:
        assert len(found["asked"]) == case.requests, found["asked"]


def test_labels_of_cases_are_their_own():
    labels = [case.label for case in (*ONLINE, *OFFLINE, *REFUSED)]
    assert len(labels) == len(set(labels))


def test_of_a_large_dataset_no_more_is_fetched_than_is_used(told):
    """20,000 of the 40,000 rows of one file for each of two splits, of three files in all; no byte of them twice."""
    sizes = {path: sent for path, _, sent in told["data: whole files only"]["sent"]}
    fetched = told["amazon"]["sent"]
    assert {path for path, *_ in fetched} == {*sizes}
    assert len(sizes) == 2
    for path, size in sizes.items():
        ranges = sorted(asked for one, asked, _ in fetched if one == path)
        assert 0 < sum(stop + 1 - start for start, stop in ranges) < 0.6 * size
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))


def test_nothing_but_the_hub_is_asked(told):
    """No conversion of weights is looked for or asked for, and the token goes nowhere else."""
    for label, found in told.items():
        for path in found["asked"]:
            if path == "/api/agent-harnesses":  # huggingface_hub's own, once a process
                continue
            assert path.startswith(("/api/models/", "/api/datasets/")) or "/resolve/" in path, f"{label}: {path}"
            assert "discussions" not in path


# Faults that need no Hub


def _wrapped(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


def _named(name: str, *bases: str) -> type[Exception]:
    kind: type[Exception] = Exception
    for base in reversed(bases):
        kind = type(base, (kind,), {})
    return type(name, (kind,), {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            _wrapped(
                _named("ConnectError")("tls"), ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED: self-signed")
            ),
            ("certificate", "is not trusted", "self-signed", "SSL_CERT_FILE"),
        ),
        (_named("ConnectError")("[SSL: WRONG_VERSION_NUMBER]"), ("cannot connect securely", "HF_ENDPOINT")),
        (
            _wrapped(_named("ConnectError")("all"), socket.gaierror(-2, "Name or service not known")),
            ("cannot resolve", "network connection"),
        ),
        (_named("ProxyError")("407 Proxy Authentication Required"), ("the proxy refused", "407", "HTTPS_PROXY")),
        (
            _named("ReadTimeout", "TimeoutException")("read"),
            ("did not respond within 10 seconds", "HF_HUB_ETAG_TIMEOUT"),
        ),
        (
            _named("FileMetadataError", "OSError")("no 'X-Repo-Commit' header; a proxy's certificate may be missing"),
            ("is not from the Hugging Face Hub", "login page"),
        ),
        (
            NotADirectoryError(20, "Not a directory", "/cache/hub"),
            ("cannot write to the cache", "/cache/hub", "HF_HOME"),
        ),
        (FileNotFoundError(2, "No such file or directory", "/proc/x"), ("cannot write to the cache", "HF_HOME")),
        (FileNotFoundError(2, "No such file or directory"), ("could not query",)),
        (OSError(28, "No space left on device"), ("disk is full", "HF_HOME")),
        (PermissionError(13, "Permission denied", "/cache"), ("cannot write", "HF_HOME")),
        (_named("UnsupportedProtocol")("no scheme"), ("HF_ENDPOINT must be a URL",)),
        (RuntimeError("something new\nmore"), ("for model 'a/b': something new; retry",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_reasons_of_the_network_and_the_disk(error, words):
    sentence = explain_hub_error(error, "a/b", "model")
    for one in words:
        assert one in sentence
    assert "\n" not in sentence


def test_reasons_in_the_environment(monkeypatch):
    """A file of certificates that is not there, and a proxy whose name nobody knows."""
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such.pem")
    assert "got '/no/such.pem'" in explain_hub_error(FileNotFoundError(2, "No such file"), "a/b", "model")
    for proxy in ("http://user:secret@nowhere:8080", "nowhere"):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        said = explain_hub_error(socket.gaierror(-2, "Name or service not known"), "a/b", "model")
        assert "or the proxy nowhere from HTTPS_PROXY" in said
        assert "secret" not in said


def test_one_line_of_an_error():
    assert first_line(ValueError("\n\n  the reason. (Request ID: Root=1)\nmore")) == "the reason"
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpt2-lage", "gpt2-large"),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b"),
        ("elutherai/pythia-410m", "EleutherAI/pythia-410m"),
        ("llama-7b", "huggyllama/llama-7b"),
    ],
)
def test_names_that_are_close(typed, meant):
    names = ["gpt2", "gpt2-large", "EleutherAI/gpt-j-6b", "EleutherAI/pythia-410m", "huggyllama/llama-7b"]
    assert meant in close_matches(typed, names)
    assert close_matches("something/else-entirely", names) == []


def test_a_call_that_takes_too_long_is_left():
    assert run_with_timeout(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(5.0, lambda: 1 // 0)
    with pytest.raises(HubTimeout):
        run_with_timeout(0.05, lambda: __import__("time").sleep(0.5))


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_downloads_in_a_terminal_only(terminal, monkeypatch):
    """Also where everything has been imported before, and although transformers switches them off."""
    from huggingface_hub.utils import are_progress_bars_disabled

    from icl_lens.cli import quiet_libraries

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.simplefilter", lambda *_: None)
        quiet_libraries()
    assert are_progress_bars_disabled() is not terminal
    download_bars(True)
