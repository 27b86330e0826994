"""Heads ranked by what exchanging their query costs: over many prompts, resumed and distributed,
and for one prompt.
"""

import io
import json
from dataclasses import replace

import families
import pandas as pd
import pytest
from launches import contents, undisturbed
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.engine import prefix_cache
from icl_lens.locate.exchanges import EXCHANGES, exchange_scores, tower_prompts
from icl_lens.locate.locate import top_heads_by
from icl_lens.models.view import ModelView
from icl_lens.prompts.tasks import load_task

N, BATCH = 8, 2
TASK = "sentiment-number"
PARTS = ("query", "keys", "values")


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, load_task(TASK, n=N, layout="random", path=words))


@pytest.fixture(scope="module")
def expected(gpt2, many):
    """Log-odds lost [prompt part layer head] in each exchange, which the sweep compares with
    Hugging Face.
    """
    view = ModelView.of(gpt2)
    parts = [next(exchange for exchange in EXCHANGES if exchange.name == part) for part in PARTS]
    scores, _, _ = exchange_scores(
        view, tower_prompts(gpt2, many), [(part, [head]) for part in parts for head in view.heads()]
    )
    lost = scores.log_odds[:, :1] - scores.log_odds[:, 1:]
    return lost.double().unflatten(1, (len(parts), view.n_layers, view.n_heads))


def test_means_and_intervals_are_those_of_single_exchanges(gpt2, many, expected):
    exchanges = il.locate_towers(gpt2, many, run=il.Run(batch_size=5))
    assert (exchanges.n_prompts, exchanges.n_queries, exchanges.fallback_reason) == (N, len(set(many.queries)), "")
    assert expected[:, 0, 1:].abs().mean(0).min() > 1e-3  # the first layer's queries are those of the same last token
    for part, name in enumerate(PARTS):
        assert_close(getattr(exchanges, name).mean.float(), expected[:, part].mean(0), msg=name)
    interval = il.metrics.bootstrap_interval(expected[:, 0, 1, 2], clusters=many.queries)
    assert_close(exchanges.query.low[1, 2].float(), interval.low)
    assert_close(exchanges.query.high[1, 2].float(), interval.high)
    best = [il.Head.from_index(i, 4) for i in expected[:, 0].mean(0).flatten().argsort(descending=True).tolist()]
    assert [head for head in exchanges.top(12) if head.layer] == [head for head in best if head.layer]
    frame = exchanges.to_frame()
    names = ["name", "query", "low", "high", "selected", "keys", "values", "rank", "layer", "head"]
    assert frame.columns.tolist() == names
    assert frame["name"].tolist() == list(map(str, exchanges.top(12)))
    assert_close(frame["values"], [expected[:, 2, layer, head].mean() for layer, head in exchanges.top(12)])
    assert top_heads_by(gpt2, many, 3, by="towers") == best[:3]


def test_the_scan_of_two_towers_is_the_same_table(gpt2, many):
    scan = il.two_towers(gpt2, many.prompts, k=2, scan_prompts=many.prompts, n_random=3).scan
    frame = il.locate_towers(gpt2, many.prompts, k=2).to_frame()
    pd.testing.assert_frame_equal(scan.drop(columns=["index", "head"]), frame.drop(columns=["head", "name"]))
    assert scan["head"].tolist() == frame["name"].tolist()


@pytest.mark.parametrize("prompt", ["love : bar like : bar one :", "love : bar one : foo two :"])
def test_prompts_without_a_class_to_exchange_are_refused(gpt2, many, prompt):
    parsed = il.Prompt.parse(prompt, answer="bar" if "foo" not in prompt else None)
    with pytest.raises(il.InputError, match="must demonstrate its answer and another label"):
        il.locate_towers(gpt2, [*many.prompts, parsed])


# One prompt


@pytest.mark.slow
def test_explain_ranks_heads_by_the_exchange_of_their_query(gpt2, run, tiny, tmp_path):
    """The score is in tables, figures, page, terminal and JSON; the other query is a
    demonstration's.
    """
    prompt = il.Prompt.parse(families.PROMPT, answer="foo")
    explanation = il.explain(gpt2, prompt, by="towers", k=4)
    texts_of_other_class = {
        demonstration.text for demonstration in prompt.demonstrations if demonstration.label != "foo"
    }
    assert explanation.all_heads.other_query in texts_of_other_class
    expected = il.locate_towers(gpt2, [prompt]).query.mean
    assert_close(explanation.all_heads.towers, expected)
    best = [il.Head.from_index(i, 4) for i in expected.flatten().topk(4).indices.tolist()]
    assert [report.head for report in explanation.heads] == best
    assert_close([report.scores["towers"] for report in explanation.heads], [expected[head] for head in best])
    assert_close(explanation.to_frame("heads")["towers"], expected.flatten())
    assert explanation.figures["heads"].axes[1].get_ylabel() == "effect of exchanging the query (nats)"
    html, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    options = ("-m", tiny, "--device", "cpu", "-a", "foo", "--by", "towers", "-k", 4, "--html", html, "--json", numbers)
    code, out, _ = run("explain", families.PROMPT, *options)
    assert code == 0
    loaded = il.results.Explanation.load(numbers)
    assert loaded.all_heads.towers == explanation.all_heads.towers
    assert [report.towers for report in loaded.heads] == [report.towers for report in explanation.heads]
    assert "--by towers" in html.read_text()
    for text in (out, html.read_text()):
        assert explanation.all_heads.other_query in text.partition("Towers: ")[2][:250]
        assert f"{expected[best[0]]:+.3f}" in text
    plain = il.explain(gpt2, str(prompt), by="towers", k=1)  # without an answer, the prediction is explained
    answered = il.locate_towers(gpt2, [replace(prompt, answer=plain.target)])
    assert_close(plain.all_heads.towers, answered.query.mean)
    assert top_heads_by(gpt2, il.tokenize(gpt2, [str(prompt)]), 1, by="towers") == [plain.heads[0].head]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (il.Text("love like", answer=" foo"), {}, "for text without demonstrations, got 'towers'"),
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
        il.explain(gpt2, prompt, by="towers", k=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("locate", [il.locate_effects, il.locate_towers])
def test_result_json_counts_and_names_the_fallback(gpt2, many, locate, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise prefix_cache.PrefixCacheUnsupported("not now")

    monkeypatch.setattr(prefix_cache.PrefixCache, "of", fail)
    located = locate(gpt2, many, k=3, run=il.Run(tmp_path / "out", batch_size=BATCH))
    assert "not now" in located.fallback_reason
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    counts = {"n_prompts": N, "n_queries": len(set(many.queries)), "n_heads": 12, "expected_selected": 3 / 12}
    assert {name: stored[name] for name in counts} == counts
    assert stored["fallback_reason"] == located.fallback_reason


# The command


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = ["locate", "--by", "towers", "--task", TASK, "--path", words, "-n", N, "--top", "3"]
    return [*task, "--model", tiny, "--device", "cpu", "--batch-size", BATCH]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "--no-check", "--out", out], out)


@pytest.mark.slow
def test_the_command_prints_the_table(run, inputs, unbroken, tmp_path):
    """From the chunks that are there."""
    out = tmp_path / "out"
    out.mkdir()
    for name, data in unbroken.items():
        (out / name).write_bytes(data)
    code, output, _ = run(*inputs, "--no-check", "--out", out)
    assert code == 0
    assert contents(out) == unbroken
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    assert all(
        f"{value:.4f}" in output for value in table.loc[:2, ["query", "low", "high", "keys", "values"]].to_numpy().flat
    )
    assert "takes its query from the prompt with a query of the other class" in " ".join(output.split())


def test_files_hold_every_prompts_values(unbroken, expected):
    table = pd.read_csv(io.BytesIO(unbroken["heads.csv"]))
    parts = [pd.read_parquet(io.BytesIO(data)) for name, data in unbroken.items() if name.startswith("part-")]
    chunks = pd.concat(parts)
    assert (len(table), len(parts)) == (12, N // BATCH)
    assert sorted(chunks["prompt"].unique()) == list(range(N))
    index = [chunks[name].to_numpy() for name in ("layer", "head")]
    for part, name in enumerate(PARTS):
        assert_close(table[name], expected[:, part].mean(0)[table["layer"], table["head"]])
        assert_close(chunks[name], expected[chunks["prompt"].to_numpy(), part, *index])


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
    code, _, output = run(*inputs, *option)
    assert (code, output.count("\n")) == (2, 1)
    assert fragment in output


def test_prompts_are_refused_before_the_folder_is_initialized(run, tiny, tmp_path):
    """The answers of pairs are words of their own."""
    path, out = tmp_path / "pairs.csv", tmp_path / "out"
    path.write_text(
        "input,output\n"
        + "".join(f"{a},{b}\n" for a, b in zip("one two cat dog".split(), "red love foo bar".split(), strict=True))
    )
    code, _, output = run("locate", "--by", "towers", "--path", path, "--pairs", "-n", 2, "-m", tiny, "--out", out)
    assert (code, output.count("\n")) == (2, 1)
    assert "must demonstrate its answer and another label" in output
    assert contents(out) == {}
