"""Folders of runs: nothing stale is used, what is there is read, and what cannot be is said in one
sentence.
"""

import errno
import json
import os
import shutil
import warnings

import faults
import pandas as pd
import pytest
import torch

import icl_lens as il
from icl_lens.measures.other_scores import OtherScores
from icl_lens.runs import folder as run_folder
from icl_lens.runs.folder import CorruptChunk, RunFolder


@pytest.fixture(scope="module")
def prompts(gpt2, words):
    return il.tokenize(gpt2, il.load_task("sentiment-number", n=8, path=words))


@pytest.fixture(scope="module")
def finished(gpt2, prompts, tmp_path_factory):
    """The folder and the result of a run."""
    out = tmp_path_factory.mktemp("finished") / "out"
    return out, locate(gpt2, prompts, out)


@pytest.fixture
def out(finished, tmp_path):
    """A copy of the finished run's folder."""
    return shutil.copytree(finished[0], tmp_path / "out")


def locate(model, prompts, out):
    return il.locate(model, prompts, k=3, run=il.Run(out, batch_size=2, processes=1))


def assert_same(located, whole):
    pd.testing.assert_frame_equal(located.to_frame(), whole.to_frame())


@pytest.fixture
def read_only(monkeypatch):
    """A disk on which nothing can be created, as the superuser, who may write everywhere, sees it
    too.
    """

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    def refuse_new_files(path, flags, *args, **kwargs):
        return refuse() if flags & os.O_CREAT else open_file(path, flags, *args, **kwargs)

    open_file = os.open
    monkeypatch.setattr(run_folder.FileLock, "acquire", refuse)
    monkeypatch.setattr(os, "open", refuse_new_files)


def test_a_chunk_copied_to_another_number_is_computed_again(gpt2, prompts, finished, out):
    shutil.copy(out / "part-00003.parquet", out / "part-00001.parquet")
    with pytest.warns(
        CorruptChunk, match=r"part-00001\.parquet is corrupt \(it is the chunk of other prompts\)"
    ):
        assert_same(locate(gpt2, prompts, out), finished[1])
    assert (out / "part-00001.parquet").read_bytes() == (
        finished[0] / "part-00001.parquet"
    ).read_bytes()


def test_a_folder_in_place_of_a_chunk_is_one_sentence(gpt2, prompts, out):
    (out / "part-00001.parquet").unlink()
    (out / "part-00001.parquet").mkdir()
    faults.assert_refused(
        "part-00001.parquet': Is a directory; remove it", locate, gpt2, prompts, out
    )


def test_a_finished_run_is_read_from_a_read_only_disk(gpt2, prompts, finished, out, read_only):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(locate(gpt2, prompts, out), finished[1])


@pytest.mark.parametrize("name", ["part-00001.parquet", "result.json", "manifest.json"])
def test_what_is_missing_on_a_read_only_disk_is_one_sentence(gpt2, prompts, out, read_only, name):
    (out / name).unlink()
    faults.assert_refused("cannot write to folder", locate, gpt2, prompts, out)


@pytest.mark.parametrize(
    ("version", "sentence"), [(None, "got format 1 of another version"), (4, "got format 4")]
)
def test_folders_of_other_formats_are_refused(gpt2, prompts, out, version, sentence):
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["format"]
    if version is not None:
        manifest["format"] = version
    (out / "manifest.json").write_text(json.dumps(manifest))
    faults.assert_refused(sentence, locate, gpt2, prompts, out)


def test_a_key_that_a_manifest_has_twice_is_noticed(tmp_path):
    """Python's reader keeps the last one, whichever the run was begun with."""
    RunFolder(tmp_path, {"k": 1}).initialize()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"k": 1', '"k": 2, "k": 1'))
    faults.assert_refused("cannot read", RunFolder(tmp_path, {"k": 1}).initialize)


def test_a_difference_names_the_package(tmp_path):
    RunFolder(tmp_path, {"versions": {"torch": "2.5", "pyarrow": "21"}}).initialize()
    newer = RunFolder(tmp_path, {"versions": {"torch": "2.6", "pyarrow": "21"}})
    faults.assert_refused("versions.torch='2.5', got versions.torch='2.6';", newer.initialize)


def test_a_long_difference_is_shortened(tmp_path):
    RunFolder(tmp_path, {"labels": ["foo"] * 1000}).initialize()
    with pytest.raises(il.InputError) as caught:
        RunFolder(tmp_path, {"labels": ["bar"] * 1000}).initialize()
    assert len(str(caught.value)) < 600


def test_texts_are_no_formulas_in_a_spreadsheet(tmp_path):
    """Parquet has them as they are."""
    run = RunFolder(tmp_path, {"a": 1})
    table = pd.DataFrame(
        {
            "text": ["=1+1", "+x", "-y", "@z", "\tq", "\rr", "L1H2"],
            "value": [-1.0, 0, 1, 2, 3, 4, 5],
            "=name": 1,
        }
    )
    run.write_result({"table": table}, {})
    cells = pd.read_csv(tmp_path / "table.csv")
    assert cells["text"].tolist() == ["'=1+1", "'+x", "'-y", "'@z", "'\tq", "'\rr", "L1H2"]
    assert cells.columns[-1] == "'=name"
    assert cells["value"].tolist() == table["value"].tolist()
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_chunks_of_a_version_with_other_columns_are_refused(gpt2, prompts, out, monkeypatch):
    """A column that only some chunks have would be dropped, or be an error of the file format."""
    (out / "other-scores-of-3-00001.parquet").unlink()
    measure = OtherScores.measure
    monkeypatch.setattr(
        OtherScores,
        "measure",
        lambda self, rows: measure(self, rows) | {"new": torch.zeros(len(rows), 3)},
    )
    with pytest.raises(
        il.InputError, match="differ in new; the folder was begun by another version"
    ):
        locate(gpt2, prompts, out)
