"""Mean effects over many prompts are those of heads one by one, also if runs are interrupted or
distributed.
"""

import io
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from cases import slow
from launches import contents, locating_half, restore, undisturbed
from test_effects import one_by_one
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.foundation.intervals import student_quantile
from icl_lens.measures.effects import exact_effects

N, BATCH = 32, 2
TASK = "sentiment-number"


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, locating_half(TASK, words, N))


def studentized_by_draws(values, queries):
    """Return the ends of the studentized intervals of means over axis 1, draw by draw."""
    distinct = sorted(set(queries))
    rows_of = [np.flatnonzero(np.array(queries) == query).tolist() for query in distinct]
    n, total = len(distinct), len(queries)

    def mean_and_error(numbers):
        """Return the mean over some queries, which may repeat, and its jackknife error with the
        weights of the data.
        """
        rows = list(itertools.chain.from_iterable(rows_of[number] for number in numbers))
        mean, squares = values[:, rows].mean(1), 0
        for number in numbers:
            deviation = (values[:, rows_of[number]] - mean[:, None]).sum(1)
            squares = (
                squares + (deviation * total / (total - len(rows_of[number])) / len(rows)) ** 2
            )
        return mean, (squares * (n - 1) / n).sqrt()

    mean, error = mean_and_error(range(n))
    without = [np.delete(values, rows, axis=1).mean(1) for rows in rows_of]
    assert_close(
        error,
        (sum((distinct_query - mean) ** 2 for distinct_query in without) * (n - 1) / n).sqrt(),
    )
    most = 2 * student_quantile(
        0.975, n - 1
    )  # an end is at most twice as far as that of Student's t interval
    draws = []
    for counts in np.random.default_rng(0).multinomial(n, [1 / n] * n, size=2000):
        drawn, its_error = mean_and_error(np.repeat(range(n), counts))
        draws.append(((drawn - mean) / its_error).clamp(-most, most))
    low, high = torch.stack(draws).quantile(
        torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0
    )
    return mean - high * error, mean - low * error


@pytest.mark.slow
def test_means_and_intervals_are_those_of_effects_one_by_one(gpt2, many):
    """Means of effects one by one; intervals from draws of queries, each with a jackknife error of
    its own.
    """
    located = il.locate(gpt2, many, by="effect", run=il.Run(batch_size=7))
    expected = torch.stack(one_by_one(gpt2, many)).double()
    queries = [prompt.query for prompt in many.prompts]
    assert (located.n_prompts, located.n_queries, located.algorithms) == (
        N,
        len(set(queries)),
        {"prefix_cache": N},
    )
    assert located.n_queries < N
    low, high = studentized_by_draws(expected, queries)
    for i, score in enumerate((located.scores["log_prob"], located.score)):
        assert_close(score.mean.float(), expected[i].mean(0))
        assert_close(score.low.float(), low[i])
        assert_close(score.high.float(), high[i])
    best = expected[1].mean(0).flatten().argsort(descending=True)
    assert [layer * 4 + head for layer, head in located.top(12)] == best.tolist()
    frame = located.to_frame()
    assert frame["name"].tolist() == list(map(str, located.top(12)))
    assert_close(frame["score"], expected[1].mean(0).flatten()[best])
    assert_close(frame["log_prob"], expected[0].mean(0).flatten()[best])


@pytest.mark.parametrize(
    "options",
    [slow({"positions": "all"}), {"method": "gradient"}],
)
def test_other_effects_stream_too(gpt2, many, options):
    located = il.locate(gpt2, many, by="effect", run=il.Run(batch_size=11), **options)
    whole = il.head_effects(gpt2, many, **options)
    assert_close(located.scores["log_prob"].mean, whole.log_prob.mean(0))
    assert located.is_exact == ("method" not in options)
    assert_close(located.score.mean, whole.log_odds.mean(0))


def test_one_query_has_no_interval(gpt2, many):
    assert bool(il.locate(gpt2, many[0], by="effect").score.low.isnan().all())


def test_effects_that_are_not_finite_are_named(gpt2, many, monkeypatch):
    effects = exact_effects

    def broken(*arguments, **options):
        located = effects(*arguments, **options)
        located.log_prob[0, 1, 2] = torch.inf
        return located

    monkeypatch.setattr("icl_lens.measures.head_measures.exact_effects", broken)
    with pytest.raises(il.InputError, match=r"mean log_prob of L1H2 is NaN or infinite"):
        il.locate(gpt2, many, by="effect")


# The command


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = ["locate", "--by", "effect", "--task", TASK, "--path", words, "-n", N, "--top", "3"]
    return [*task, "--anyway", "--model", tiny, "--device", "cpu", "--batch-size", BATCH]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "--no-check", "--out", out], out)


@pytest.mark.slow
def test_files_and_table_hold_the_effects(run, gpt2, many, inputs, unbroken, tmp_path):
    """From the chunks that are there."""
    restore(unbroken, tmp_path)
    code, stdout, _ = run(*inputs, "--no-check", "--out", tmp_path)
    assert code == 0
    assert contents(tmp_path) == unbroken
    assert (
        "lost if the head alone is zeroed at the last position. Means over 32 prompts"
        in " ".join(stdout.split())
    )
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    assert len(table) == 12
    expected = torch.stack(one_by_one(gpt2, many)).double()
    assert_close(table["score"], expected[1].mean(0)[table["layer"], table["head"]])
    parts = [
        pd.read_parquet(io.BytesIO(data))
        for name, data in unbroken.items()
        if name.startswith("part-")
    ]
    chunks = pd.concat(parts).sort_values("prompt")
    assert len(parts) == N // BATCH
    assert chunks["prompt"].tolist() == list(range(N))
    assert_close(np.stack(chunks["log_odds"]), expected[1].flatten(1))
