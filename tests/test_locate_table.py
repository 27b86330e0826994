"""A located run as a table: per-prompt values from its chunks, intervals, sentence, files, configuration."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.locate import locate as dataset
from icl_lens.locate.chunk import increase_columns
from icl_lens.locate.configuration import configuration, prepare_run_folder
from icl_lens.locate.run_folder import CorruptChunk, RunFolder
from icl_lens.locate.stream import plan_batches
from icl_lens.locate.table import heads_result, heads_table, per_prompt, write_run
from icl_lens.metrics import bootstrap_interval
from icl_lens.models.view import ModelView

PROMPTS = [
    il.Prompt.parse(text, answer="foo")
    for text in (
        "love : bar like : bar eight : foo two : foo one :",
        "happy : bar sad : bar three : foo nine :",
        "cat : foo the red : bar a blue :",
        "one : foo two :",
        "love : foo a : bar the :",
        "sad : bar eight : foo dog :",
        "like : bar one two : foo three :",
    )
]
ASKED = {"model": "tiny", "task": "sentiment-number", "n": 7, "seed": 0, "by": "increase"}
OPTIONS = {"k": 2, "final_norm": "frozen", "batch_size": 2}


@pytest.fixture(scope="module")
def batch(gpt2):
    return il.tokenize(gpt2, PROMPTS)


@pytest.fixture
def ran(gpt2, batch, tmp_path, monkeypatch):
    """A run in a folder, with a second pass."""
    monkeypatch.setattr(dataset, "MARGIN", 0)
    folder = prepare_run_folder(tmp_path, gpt2, batch, OPTIONS, ASKED)
    top = il.locate_heads(gpt2, batch, k=2, by="increase", batch_size=2, slack=1e6, folder=folder)
    assert list(tmp_path.glob("refined-*.parquet"))
    return top, folder


def test_every_prompts_own_values(gpt2, batch, ran):
    top, folder = ran
    every = il.head_log_prob_increase(il.capture(gpt2, batch), batch.answer_tokens)
    expected = every[:, top.layer, top.head]
    assert_close(per_prompt(top, folder), expected)
    queries = batch.queries
    table = heads_table(top, folder, queries)
    assert list(table.columns) == ["rank", "layer", "head", "name", "increase", "low", "high", "share_evaluated"]
    assert table["name"].tolist() == [str(head) for head in top.heads]
    assert_close(table["increase"], expected.mean(0))
    interval = bootstrap_interval(expected[:, 1].double().numpy(), clusters=queries)
    assert_close((table["low"][1], table["high"][1]), (interval.low, interval.high))
    for without in (heads_table(top), heads_table(top, folder, ["one"] * len(queries))):
        assert "low" not in without


def test_prompts_that_share_a_query_count_once(gpt2, tmp_path):
    """Copies of every prompt add nothing: the interval stays that of one copy, not 1/√4 of it."""
    copies = [il.tokenize(gpt2, [prompt for prompt in PROMPTS for _ in range(n)]) for n in (1, 4)]
    tables = []
    for number, batch in enumerate(copies):
        path = tmp_path / str(number)
        path.mkdir()
        folder = prepare_run_folder(path, gpt2, batch, OPTIONS, ASKED | {"n": len(batch)})
        top = il.locate_heads(gpt2, batch, k=2, by="increase", batch_size=2, folder=folder)
        tables.append(heads_table(top, folder, batch.queries))
    widths = [(table["high"] - table["low"]).to_numpy() for table in tables]
    assert_close(widths[1], widths[0])
    assert (widths[0] > 1e-3).all()


def test_a_missing_chunk_and_a_damaged_one(ran):
    top, folder = ran
    path = folder.path / "part-00001.parquet"
    whole = path.read_bytes()
    path.unlink()
    (folder.path / "refined-00001.parquet").unlink()
    assert np.isnan(per_prompt(top, folder)).all(1).sum() == 2
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptChunk, match="part-00001"):
        per_prompt(top, folder)


TOP = il.TopHeads(
    value=torch.tensor([0.5, 0.25], dtype=torch.float64),
    layer=torch.tensor([1, 0]),
    head=torch.tensor([2, 3]),
    n_exact=3,
    n_parts=12,
    unevaluated_bound=0.125,
    certified=True,
    n_evaluations=6000,
    n_prompts=2000,
)


def test_values_of_both_passes(tmp_path):
    """If a located head led in some batches only, its other values come from the second pass."""
    folder = RunFolder(tmp_path, {"batches": 2})
    bound = np.ones((2, 12), np.float32)
    chunks = {
        ("part", 0): (np.array([2, 0]), bound, np.array([3, 6]), np.array([[1, 2], [3, 4]], np.float32)),
        ("part", 1): (np.array([1, 3]), bound, np.array([5, 6]), np.array([[0, 5], [0, 6]], np.float32)),
        ("refined", 1): (np.array([1, 3]), None, np.array([3]), np.array([[7], [8]], np.float32)),
    }
    for (kind, number), chunk in chunks.items():
        folder.write(f"{kind}-{number:05d}.parquet", pa.table(increase_columns(*chunk, 4)))
    # L1H2 is head 6, L0H3 is head 3.
    found = per_prompt(replace(TOP, n_prompts=4), folder)
    np.testing.assert_array_equal(found, [[4, 3], [5, 7], [2, 1], [6, 8]])


def test_result_files_hold_the_result(tmp_path):
    folder = RunFolder(tmp_path, {"batches": 0})
    table = heads_table(TOP)
    write_run(folder, {"heads": table}, heads_result(TOP))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "heads.csv"), table)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "heads.parquet"), table)
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "certified": True,
        "n_prompts": 2000,
        "n_heads": 12,
        "heads_evaluated_on_all_prompts": 3,
        "share_evaluated": 0.25,
        "largest_unevaluated_bound": 0.125,
    }
    assert heads_result(replace(TOP, n_exact=12))["largest_unevaluated_bound"] is None


def test_the_configuration_names_what_changes_a_run(gpt2, batch):
    found = configuration(gpt2, batch, OPTIONS, ASKED)
    given = {"model": "tiny", "task": "sentiment-number", "n": 7, "seed": 0, "k": 2, "final_norm": "frozen"}
    assert found | given == found
    assert {"weights", "labels", "prompts", "device", "batches", "plan", "versions"} < set(found)
    assert found["batches"] == len(plan_batches(ModelView.of(gpt2), batch, batch_size=2)) == 4
    assert found["labels"] == list(batch.labels)
    json.dumps(found)
    for options, asked, rows, changed in (
        (OPTIONS | {"k": 3}, ASKED, batch, {"k"}),
        (OPTIONS | {"batch_size": 3}, ASKED, batch, {"batches", "plan"}),
        (OPTIONS, ASKED | {"seed": 1}, batch, {"seed"}),
        (OPTIONS, ASKED, batch[[1, 0, 2, 3, 4, 5, 6]], {"prompts", "plan"}),
    ):
        other = configuration(gpt2, rows, options, asked)
        assert {name for name in found if found[name] != other[name]} == changed
    with pytest.raises(il.InputError, match="at least 1"):
        configuration(gpt2, batch, OPTIONS | {"batch_size": 0}, ASKED)


def test_runs_on_labels_of_several_tokens_do_not_resume_older_ones(gpt2, batch):
    """Older versions stored what such labels have at their last tokens only."""
    shown = [il.Demonstration("love", "bar eight"), il.Demonstration("one", "foo")]
    longer = il.tokenize(gpt2, [il.Prompt(shown, query="two", answer="foo")])
    assert "labels_are" not in configuration(gpt2, batch, OPTIONS, ASKED)
    assert "labels_are" in configuration(gpt2, longer, OPTIONS, ASKED)
