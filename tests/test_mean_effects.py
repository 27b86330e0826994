"""Mean effects over many prompts are those of heads one by one, also if runs are interrupted or distributed."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from launches import contents, undisturbed
from test_effects import one_by_one
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.measures.effects import exact_effects
from icl_lens.prompts.tasks import load_task

N, BATCH = 30, 2
TASK = "sentiment-number"


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, load_task(TASK, n=N, layout="random", path=words))


def test_means_and_intervals_are_those_of_effects_one_by_one(gpt2, many):
    """Means of effects one by one; intervals from draws that repeat each prompt as often as its query."""
    found = il.locate_effects(gpt2, many, run=il.Run(batch_size=7))
    expected = torch.stack(one_by_one(gpt2, many)).double()
    queries = [prompt.query for prompt in many.prompts]
    assert (found.n_prompts, found.n_queries, found.algorithms) == (N, len(set(queries)), {"prefix_cache": N})
    assert found.n_queries < N
    distinct = sorted(set(queries))
    drawn = np.random.default_rng(0).multinomial(len(distinct) - 1, [1 / len(distinct)] * len(distinct), size=2000)
    draws = []
    for counts in drawn:
        often = dict(zip(distinct, counts, strict=True))
        rows = [row for row, query in enumerate(queries) for _ in range(often[query])]
        draws.append(expected[:, rows].mean(1))
    low, high = torch.stack(draws).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    for i, score in enumerate((found.log_prob, found.log_odds)):
        assert_close(score.mean.float(), expected[i].mean(0))
        assert_close(score.low.float(), low[i])
        assert_close(score.high.float(), high[i])
    best = expected[1].mean(0).flatten().argsort(descending=True)
    assert [layer * 4 + head for layer, head in found.top(12)] == best.tolist()
    frame = found.to_frame()
    assert frame["name"].tolist() == list(map(str, found.top(12)))
    assert_close(frame["effect"], expected[1].mean(0).flatten()[best])
    assert_close(frame["log_prob"], expected[0].mean(0).flatten()[best])


@pytest.mark.parametrize("options", [{"positions": "all"}, {"method": "gradient"}])
def test_other_effects_stream_too(gpt2, many, options):
    found = il.locate_effects(gpt2, many, run=il.Run(batch_size=11), **options)
    whole = il.head_effects(gpt2, many, **options)
    assert_close(found.log_prob.mean, whole.log_prob.mean(0))
    assert found.exact == ("method" not in options)
    assert_close(found.log_odds.mean, whole.log_odds.mean(0))


def test_one_query_has_no_interval(gpt2, many):
    assert bool(il.locate_effects(gpt2, many[0]).log_prob.low.isnan().all())


def test_effects_that_are_not_finite_are_named(gpt2, many, monkeypatch):
    effects = exact_effects

    def broken(*given, **options):
        found = effects(*given, **options)
        found.log_prob[0, 1, 2] = torch.inf
        return found

    monkeypatch.setattr("icl_lens.locate.mean_effects.exact_effects", broken)
    with pytest.raises(il.InputError, match=r"mean effect of L1H2 \(log_prob\) is NaN or infinite"):
        il.locate_effects(gpt2, many)


# The command


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = ["locate", "--by", "effect", "--task", TASK, "--path", words, "-n", N, "--top", "3"]
    return [*task, "--model", tiny, "--device", "cpu", "--batch-size", BATCH]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "--no-check", "--out", out], out)


def test_files_and_table_hold_the_effects(run, gpt2, many, inputs, unbroken, tmp_path):
    """From the chunks that are there."""
    for name, data in unbroken.items():
        (tmp_path / name).write_bytes(data)
    code, said, _ = run(*inputs, "--no-check", "--out", tmp_path)
    assert code == 0
    assert contents(tmp_path) == unbroken
    assert "Exact: every head zeroed at the last position of 30 prompts" in said
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    assert len(table) == 12
    expected = torch.stack(one_by_one(gpt2, many)).double()
    assert_close(table["effect"], expected[1].mean(0)[table["layer"], table["head"]])
    parts = [pd.read_parquet(io.BytesIO(data)) for name, data in unbroken.items() if name.startswith("part-")]
    chunks = pd.concat(parts)
    assert len(parts) == N // BATCH
    assert sorted(chunks["prompt"].unique()) == list(range(N))
    every = expected[1][chunks["prompt"].to_numpy(), chunks["layer"].to_numpy(), chunks["head"].to_numpy()]
    assert_close(chunks["log_odds"], every)
