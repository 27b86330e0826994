"""Heads ranked by what exchanging their query costs: over many prompts, resumed and distributed,
and for one prompt.
"""

import io
import itertools
import json
from dataclasses import replace

import families
import numpy as np
import pandas as pd
import pytest
from launches import contents, locating_half, restore, undisturbed
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.edits.one_token_rows import prefix_cache
from icl_lens.measures.exchanges import EXCHANGES, exchange_scores, tower_prompts
from icl_lens.measures.locate import with_predicted_answers
from icl_lens.models.view import ModelView

N, BATCH = 8, 2
TASK = "sentiment-number"
PARTS = ("exchange", "keys", "values")


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, locating_half(TASK, words, N))


@pytest.fixture(scope="module")
def expected(gpt2, many):
    """Log-odds lost [prompt part layer head] in each exchange, which the sweep compares with
    Hugging Face.
    """
    view = ModelView.of(gpt2)
    exchange_of_name = {exchange.name: exchange for exchange in EXCHANGES}
    parts = [exchange_of_name[name] for name in ("query", "keys", "values")]
    scores, _, _ = exchange_scores(
        view,
        tower_prompts(gpt2, many),
        [(part, [head]) for part, head in itertools.product(parts, view.heads())],
    )
    lost = scores.log_odds[:, :1] - scores.log_odds[:, 1:]
    return lost.double().unflatten(1, (len(parts), view.n_layers, view.n_heads))


def test_means_and_intervals_are_those_of_single_exchanges(gpt2, many, expected):
    measured = il.locate(gpt2, many, by="exchange", run=il.Run(batch_size=5))
    assert (measured.n_prompts, measured.n_queries, measured.fallback_reason) == (
        N,
        len(set(many.queries)),
        "",
    )
    assert (
        expected[:, 0, 1:].abs().mean(0).min() > 1e-3
    )  # the first layer's queries are those of the same last token
    for part, name in enumerate(PARTS):
        assert_close(measured.scores[name].mean.float(), expected[:, part].mean(0), msg=name)
    interval = il.metrics.bootstrap_interval(expected[:, 0, 1, 2], clusters=many.queries)
    assert_close(measured.score.low[1, 2].float(), interval.low)
    assert_close(measured.score.high[1, 2].float(), interval.high)
    best = [
        il.Head.from_index(i, 4)
        for i in expected[:, 0].mean(0).flatten().argsort(descending=True).tolist()
    ]
    assert [head for head in measured.top(12) if head.layer] == [
        head for head in best if head.layer
    ]
    frame = measured.to_frame()
    names = ["name", "score", "low", "high", "selected"]
    for name in (
        "contrast",
        "increase",
        "effect",
        "keys",
        "values",
        "true_label_attention",
        "false_label_attention",
    ):
        names += [name, f"{name}_low", f"{name}_high"]
    assert frame.columns.tolist() == [*names, "rank", "layer", "head"]
    assert frame["name"].tolist() == list(map(str, measured.top(12)))
    assert_close(
        frame["values"], [expected[:, 2, layer, head].mean() for layer, head in measured.top(12)]
    )
    assert measured.top(3) == best[:3]


def test_the_scan_of_two_towers_is_the_same_table(gpt2, many):
    scan = il.two_towers(gpt2, many.prompts, k=2, scan_prompts=many.prompts, n_random=3).scan
    frame = il.locate(gpt2, many.prompts, by="exchange", k=2).to_frame()
    columns = ["low", "high", "selected", "keys", "values", "rank", "layer"]
    pd.testing.assert_frame_equal(scan[columns], frame[columns])
    assert scan["query"].tolist() == frame["score"].tolist()
    assert scan["head"].tolist() == frame["name"].tolist()


@pytest.mark.parametrize("prompt", ["love : bar like : bar one :", "love : bar one : foo two :"])
def test_prompts_without_a_class_to_exchange_are_refused(gpt2, many, prompt):
    parsed = il.Prompt.parse(prompt, answer="bar" if "foo" not in prompt else None)
    with pytest.raises(il.InputError, match="must demonstrate its answer and another label"):
        il.locate(gpt2, [*many.prompts, parsed], by="exchange")


# One prompt


@pytest.mark.slow
def test_explain_ranks_heads_by_the_exchange_of_their_query(gpt2, run, tiny, tmp_path):
    """The score is in tables, figures, page, terminal and JSON; the other query is a
    demonstration's.
    """
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    measured = il.explain(gpt2, prompt, by="exchange", k=4)
    of_other_class = [pair.text for pair in prompt.demonstrations if pair.label != "foo"]
    assert measured.all_heads.other_query in of_other_class
    expected = il.locate(gpt2, [prompt], by="exchange").score.mean
    assert_close(measured.all_heads.exchange, expected)
    best = [il.Head.from_index(i, 4) for i in expected.flatten().topk(4).indices.tolist()]
    assert [report.head for report in measured.heads] == best
    assert_close(
        [report.scores["exchange"] for report in measured.heads], [expected[head] for head in best]
    )
    assert_close(measured.to_frame("heads")["exchange"], expected.flatten())
    assert measured.figures["heads"].axes[1].get_ylabel() == "effect of exchanging the query (nats)"
    check_command(run, tiny, tmp_path, measured)
    # Without an answer, the prediction is explained.
    plain = il.explain(gpt2, str(prompt), by="exchange", k=1)
    answered = il.locate(gpt2, [replace(prompt, answer=plain.target)], by="exchange")
    assert_close(plain.all_heads.exchange, answered.score.mean)
    predicted = with_predicted_answers(gpt2, il.tokenize(gpt2, [str(prompt)]))
    assert il.locate(gpt2, predicted, by="exchange", k=1).heads == [plain.heads[0].head]


def check_command(run, tiny, tmp_path, measured):
    """The command explains the same; page and terminal have the other query and the best score."""
    html, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    options = ("-m", tiny, "--device", "cpu", "-a", "foo", "--by", "exchange", "-k", 4)
    options += ("--html", html, "--json", numbers)
    code, out, _ = run("explain", families.PROMPT, *options)
    assert code == 0
    loaded = il.results.Explanation.load(numbers)
    assert loaded.all_heads.exchange == measured.all_heads.exchange
    largest = measured.heads[0].exchange
    exchanges = [report.exchange for report in measured.heads]
    assert [report.exchange for report in loaded.heads] == exchanges
    assert "--by exchange" in html.read_text()
    for text in (out, html.read_text()):
        assert measured.all_heads.other_query in text.partition("Exchange: ")[2][:250]
        assert f"{largest:+.3f}" in text


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (
            il.Text("love like", answer=" foo"),
            {},
            "for text without demonstrations, got 'exchange'",
        ),
        ("love : bar like : bar one :", {}, "must demonstrate its answer and another label"),
        (
            il.Prompt.parse("love : bar one : foo cat : dog two :", answer="foo"),
            {"against": "bar"},
            "against must be all other",
        ),
    ],
)
def test_explain_refuses_what_has_no_other_class(gpt2, prompt, options, message):
    with pytest.raises(il.InputError, match=message):
        il.explain(gpt2, prompt, by="exchange", k=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["effect", "exchange"])
def test_result_json_counts_and_names_the_fallback(gpt2, many, by, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise prefix_cache.PrefixCacheUnsupported("not now")

    monkeypatch.setattr(prefix_cache.PrefixCache, "of", fail)
    measured = il.locate(gpt2, many, by=by, k=3, run=il.Run(tmp_path / "out", batch_size=BATCH))
    assert "not now" in measured.fallback_reason
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    counts = {
        "n_prompts": N,
        "n_queries": len(set(many.queries)),
        "n_heads": 12,
        "expected_selected": 3 / 12,
    }
    assert {name: stored[name] for name in counts} == counts
    assert stored["fallback_reason"] == measured.fallback_reason


# The command


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = ["locate", "--by", "exchange", "--task", TASK, "--path", words, "-n", N, "--top", "3"]
    return [*task, "--anyway", "--model", tiny, "--device", "cpu", "--batch-size", BATCH]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "--no-check", "--out", out], out)


@pytest.mark.slow
def test_the_command_prints_the_table(run, inputs, unbroken, tmp_path):
    """From the chunks that are there."""
    out = tmp_path / "out"
    restore(unbroken, out)
    code, stdout, _ = run(*inputs, "--no-check", "--out", out)
    assert code == 0
    assert contents(out) == unbroken
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    stdout = stdout.replace("−", "-")
    assert all(
        f"{value:+.3f}" in stdout
        for value in table.loc[:2, ["score", "keys", "values"]].to_numpy().flat
    )
    assert "takes its query from the prompt with a query of the other class" in " ".join(
        stdout.split()
    )


def test_files_hold_every_prompts_values(unbroken, expected):
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    parts = [
        pd.read_parquet(io.BytesIO(data))
        for name, data in unbroken.items()
        if name.startswith("part-")
    ]
    chunks = pd.concat(parts).sort_values("prompt")
    assert (len(table), len(parts)) == (12, N // BATCH)
    assert chunks["prompt"].tolist() == list(range(N))
    for part, name in enumerate(PARTS):
        column = "score" if name == "exchange" else name
        assert_close(table[column], expected[:, part].mean(0)[table["layer"], table["head"]])
        assert_close(np.stack(chunks[name]), expected[:, part].flatten(1))


@pytest.mark.parametrize(
    ("option", "fragment"),
    [
        (("--final-norm", "own"), "--final-norm has no effect"),
        (("--no-bias",), "--bias has no effect"),
        (("--positions", "all"), "only --by effect ablates"),
        (("--method", "gradient"), "only --by effect ablates"),
    ],
)
def test_options_of_other_scores_are_refused(run, inputs, option, fragment):
    code, _, stdout = run(*inputs, *option)
    assert (code, stdout.count("\n")) == (2, 1)
    assert fragment in stdout


def test_prompts_are_refused_before_the_folder_is_initialized(run, tiny, tmp_path):
    """The answers of pairs are words of their own."""
    path, out = tmp_path / "pairs.csv", tmp_path / "out"
    path.write_text(
        "input,output\n"
        + "".join(
            f"{a},{b}\n"
            for a, b in zip("one two cat dog".split(), "red love foo bar".split(), strict=True)
        )
    )
    code, _, stdout = run(
        "locate", "--by", "exchange", "--path", path, "--pairs", "-n", 2, "-m", tiny, "--out", out
    )
    assert (code, stdout.count("\n")) == (2, 1)
    assert "must demonstrate its answer and another label" in stdout
    assert contents(out) == {}
