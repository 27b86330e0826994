"""A located run as a table: per-prompt values from its chunks, intervals, sentence, files,
configuration.
"""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.intervals import bootstrap_interval
from icl_lens.locate import locate as dataset
from icl_lens.locate.located_heads import heads_result, heads_table
from icl_lens.models.view import ModelView
from icl_lens.runs.configuration import configuration
from icl_lens.runs.folder import RunFolder
from icl_lens.runs.stream import plan_batches

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
OPTIONS = {"k": 2, "final_norm": "frozen"}


@pytest.fixture(scope="module")
def batch(gpt2):
    return il.tokenize(gpt2, PROMPTS)


@pytest.mark.parametrize("by", ["increase", "contrast"])
def test_intervals_are_those_of_every_prompts_own_values(gpt2, batch, monkeypatch, by):
    """Also if heads are evaluated in a second pass, and without a folder."""
    monkeypatch.setattr(dataset, "MARGIN", 0)
    if by == "contrast":
        batch = batch[[0, 1, 2, 4, 5]]  # with another label
    against = None if by == "increase" else batch.other_label_tokens
    increases = il.head_log_prob_increase(il.capture(gpt2, batch), batch.answer_tokens, against=against)
    refined = []
    second_pass = dataset._Search.second_pass
    monkeypatch.setattr(dataset._Search, "second_pass", lambda *args: refined.append(args[1]) or second_pass(*args))
    top = il.locate_heads(gpt2, batch, k=2, by=by, run=il.Run(batch_size=2), slack=1e6)
    assert bool(refined) == (by == "increase")
    expected = increases[:, top.layer, top.head].double().numpy()
    table = heads_table(top)
    assert list(table.columns) == ["name", by, "low", "high", "selected", "rank", "layer", "head", "share_evaluated"]
    assert table["name"].tolist() == [str(head) for head in top.heads]
    assert_close(table[by], expected.mean(0))
    for column in range(2):
        interval = bootstrap_interval(expected[:, column], clusters=batch.queries)
        assert_close((table["low"][column], table["high"][column]), (interval.low, interval.high))
    assert "95% interval" in repr(top)
    located = il.locate_heads(gpt2, batch[[0, 0]], k=2, by=by)
    assert located.low is None
    assert "low" not in heads_table(located)
    assert "interval" not in repr(located)


def test_prompts_that_share_a_query_count_once(gpt2):
    """Copies of every prompt add nothing: the interval stays that of one copy, not 1/√4 of it."""
    copies = [il.tokenize(gpt2, [prompt for prompt in PROMPTS for _ in range(n)]) for n in (1, 4)]
    tables = [
        heads_table(il.locate_heads(gpt2, batch, k=2, by="increase", run=il.Run(batch_size=2))) for batch in copies
    ]
    widths = [(table["high"] - table["low"]).to_numpy() for table in tables]
    assert_close(widths[1], widths[0])
    assert (widths[0] > 1e-3).all()


TOP = il.results.TopHeads(
    value=torch.tensor([0.5, 0.25], dtype=torch.float64),
    layer=torch.tensor([1, 0]),
    head=torch.tensor([2, 3]),
    n_exact=3,
    n_parts=12,
    unevaluated_bound=0.125,
    certified=True,
    share_evaluated=0.25,
    n_prompts=2000,
)


def test_result_files_hold_the_result(tmp_path):
    folder = RunFolder(tmp_path, {"batches": 0})
    table = heads_table(TOP)
    folder.write_result({"heads": table}, heads_result(TOP))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "heads.csv"), table)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "heads.parquet"), table)
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "finding": "Nothing is shown about the 2 heads in the table: without several queries, the mean contrast has no "
        "interval.",
        "certified": True,
        "n_prompts": 2000,
        "n_heads": 12,
        "heads_evaluated_on_all_prompts": 3,
        "share_evaluated": 0.25,
        "expected_selected": 2 / 12,
        "largest_unevaluated_bound": 0.125,
    }
    assert heads_result(replace(TOP, n_exact=12))["largest_unevaluated_bound"] is None


def test_the_configuration_names_what_changes_a_run(gpt2, batch):
    def configured(rows, options, asked, batch_size=2):
        plan = plan_batches(ModelView.of(gpt2), rows, il.Run(batch_size=batch_size))
        return configuration(gpt2, rows, plan, options, asked)

    run_configuration = configured(batch, OPTIONS, ASKED)
    settings = {"model": "tiny", "task": "sentiment-number", "n": 7, "seed": 0, "k": 2, "final_norm": "frozen"}
    assert run_configuration | settings == run_configuration
    assert {"weights", "labels", "prompts", "device", "batches", "plan", "versions"} < set(run_configuration)
    assert run_configuration["batches"] == 4
    assert run_configuration["labels"] == list(batch.labels)
    json.dumps(run_configuration)
    for other_configuration, changed in (
        (configured(batch, OPTIONS | {"k": 3}, ASKED), {"k"}),
        (configured(batch, OPTIONS, ASKED, 3), {"batches", "plan"}),
        (configured(batch, OPTIONS, ASKED | {"seed": 1}), {"seed"}),
        (configured(batch[[1, 0, 2, 3, 4, 5, 6]], OPTIONS, ASKED), {"prompts", "plan"}),
    ):
        assert {name for name in run_configuration if run_configuration[name] != other_configuration[name]} == changed


def test_runs_on_labels_of_several_tokens_do_not_resume_older_ones(gpt2, batch):
    """Older versions stored what such labels have at their last tokens only."""
    demonstrations = [il.Demonstration("love", "bar eight"), il.Demonstration("one", "foo")]
    longer = il.tokenize(gpt2, [il.Prompt(demonstrations, query="two", answer="foo")])
    assert "labels_are" not in configuration(gpt2, batch, [[0]], OPTIONS, ASKED)
    assert "labels_are" in configuration(gpt2, longer, [[0]], OPTIONS, ASKED)
