"""Mean score parts: means of each prompt's parts, planted writers first; resumed runs write the
same bytes.
"""

import io
import itertools
import json

import numpy as np
import pandas as pd
import pytest
from cases import slow
from launches import contents, undisturbed
from planted_study import planted_study
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.reading.writer_groups import GROUPS, group_of

TASK = "sentiment-number"


def sample(model, words, n):
    return il.tokenize(model, il.load_task(TASK, n=n, layout="random", path=words))


@pytest.mark.parametrize("name", ["llama_gqa", slow("gpt2")])
def test_means_and_intervals_of_each_prompts_parts(load_tiny, words, name):
    """The sweep compares the parts of a prompt with Hugging Face's."""
    model = load_tiny(name)
    many = sample(model, words, 14)
    mean_parts = il.mean_score_parts(model, many, ["L2H3"], n_strongest=3, run=il.Run(batch_size=5))
    queries = [prompt.query for prompt in many.prompts]
    assert (mean_parts.n_prompts, mean_parts.n_queries) == (14, len(set(queries)))
    assert mean_parts.n_queries < 14
    rows = {"query": [], "key": [], "pair": []}
    for row in range(len(many)):
        parts = il.attention_score_parts(il.capture(model, many[row], writers=True), "L2H3")
        why = parts.contrast(parts.of_label(many[row].answer))
        names = {"query": why.writers, "key": why.writers}
        pairs = itertools.product(why.writers, repeat=2)
        names["pair"] = [f"{query_writer} × {key_writer}" for query_writer, key_writer in pairs]
        for side, values in (
            ("query", why.query_side),
            ("key", why.key_side),
            ("pair", why.pairs.flatten(1)),
        ):
            rows[side].append(dict(zip(names[side], values[0].tolist(), strict=True)))
    table = mean_parts.to_frame()
    for side, of_side in rows.items():
        expected = pd.DataFrame(of_side)
        rows_of_side = table[table["side"] == side].set_index("writer")
        assert len(rows_of_side) == (len(expected.columns) if side != "pair" else 9)
        for writer, line in rows_of_side.iterrows():
            interval = il.metrics.bootstrap_interval(expected[writer].to_numpy(), clusters=queries)
            scale = float(expected.abs().to_numpy().max()) * 4
            assert_close(
                list(line[["value", "low", "high"]]),
                list(interval),
                scale=scale,
                msg=f"{side} {writer}",
            )
        assert rows_of_side["value"].abs().is_monotonic_decreasing


@pytest.mark.slow
def test_values_groups_and_totals(load_tiny, words):
    """Values by role sum `value_parts` over labels of one kind, prompt by prompt; groups and totals
    sum writers.
    """
    model = load_tiny("llama_gqa")
    many = sample(model, words, 10)
    heads = [il.Head(2, 0), il.Head(1, 3)]
    mean_parts = il.mean_score_parts(model, many, heads, run=il.Run(batch_size=3))
    table, groups = mean_parts.to_frame(), mean_parts.to_frame("groups")
    for head in heads:
        values = {True: [], False: []}
        for row, prompt in enumerate(many.prompts):
            prompt_row = many[row]
            acts = il.capture(model, prompt_row, writers=True)
            parts = il.value_parts(
                acts, head, prompt_row.answer_tokens, against=prompt_row.other_label_tokens
            )
            labels = np.array(
                [demonstration.label == prompt.answer for demonstration in prompt.demonstrations]
            )
            for role in values:
                values[role].append(parts.parts[0, labels == role].sum(0).numpy())
        for role, name in ((True, "value of true labels"), (False, "value of false labels")):
            mine = table[(table["name"] == str(head)) & (table["side"] == name)].set_index(
                "writer"
            )["value"]
            means = np.mean(values[role], axis=0)
            assert_close(mine[list(parts.writers)].to_numpy(), means)
            assert_close(mean_parts.total(head, name)[0], means.sum())
            by_group = groups[(groups["name"] == str(head)) & (groups["side"] == name)].set_index(
                "writer"
            )["value"]
            for group in GROUPS:
                expected = sum(
                    value
                    for writer, value in zip(parts.writers, means, strict=True)
                    if group_of(writer, 3) == group
                )
                assert_close(by_group[group], expected)
        for side in ("query", "key"):
            of_side = table[(table["name"] == str(head)) & (table["side"] == side)]
            assert_close(
                of_side["value"].sum(),
                mean_parts.total(head)[0],
                scale=float(of_side["value"].abs().max()) * 8,
            )
    assert mean_parts.values_are_exact
    assert "L2H0" in repr(mean_parts)
    assert mean_parts.to_dict()["sentences"].keys() == {"L2H0", "L1H3"}


def test_models_with_a_soft_cap_have_scores_only(load_tiny, words):
    model = load_tiny("gemma2")
    mean_parts = il.mean_score_parts(model, sample(model, words, 4), ["L2H0"])
    assert set(mean_parts.to_frame()["side"]) == {"total", "query", "key", "pair"}
    assert not mean_parts.to_frame()["value"].isna().any()


def test_one_query_has_no_interval(gpt2, words):
    assert (
        il.mean_score_parts(gpt2, sample(gpt2, words, 1), ["L2H1"]).to_frame()["low"].isna().all()
    )


# Planted models


def of_planted(kind, folder):
    study = planted_study(kind, folder)
    return study, il.mean_score_parts(study.model, study.testing, study.located_heads("contrast"))


@pytest.mark.slow
def test_the_planted_writer_is_first_on_both_sides(tmp_path):
    study, mean_parts = of_planted("two-tower", tmp_path)
    for head in study.located_heads("contrast"):
        low = mean_parts.total(head)[1]
        assert low > 0
        for side in ("query", "key"):
            first, second = mean_parts.strongest(head, side, 2).to_dict("records")
            assert first["writer"].startswith("L1H")  # the mover's layer
            assert first["value"] > 10 * abs(second["value"])
            assert first["low"] > 0
        mover = mean_parts.strongest(head, "query", 1)["writer"].item()
        assert mean_parts.strongest(head, "pair", 1)["writer"].item() == f"{mover} × {mover}"
        assert (
            f"scores true labels above false labels: difference +{mean_parts.total(head)[0]:.2f}"
            in mean_parts.sentence(head)
        )
        assert mover in mean_parts.sentence(head)


@pytest.mark.parametrize("kind", ["last-label", slow("untrained")])
@pytest.mark.slow
def test_models_that_compare_nothing_show_none(tmp_path, kind):
    study, mean_parts = of_planted(kind, tmp_path)
    located = study.located_heads("contrast")
    alike = [head for head in located if "is not shown to score" in mean_parts.sentence(head)]
    assert len(alike) >= len(located) - 1  # one of four 95% intervals may exclude zero by chance
    table = mean_parts.to_frame()
    sides = table[table["side"].isin(["query", "key"])]
    assert ((sides["low"] > 0.05) | (sides["high"] < -0.05)).mean() < 0.05


# The command


@pytest.fixture(scope="module")
def inputs(words, tiny):
    task = [
        "explain",
        "--task",
        TASK,
        "--path",
        words,
        "-n",
        150,
        "--why",
        "L2H0,L1H1",
        "--no-check",
    ]
    return [*task, "--model", tiny, "--device", "cpu"]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", *inputs, "--out", out], out)


@pytest.mark.slow
def test_files_and_text(run, gpt2, inputs, unbroken, words, tmp_path):
    """From the chunks that are there."""
    for name, data in unbroken.items():
        (tmp_path / name).write_bytes(data)
    code, printed, _ = run(*inputs, "--out", tmp_path, "--json", tmp_path.parent / "why.json")
    assert code == 0
    assert contents(tmp_path) == unbroken
    mean_parts = il.mean_score_parts(gpt2, sample(gpt2, words, 150), ["L2H0", "L1H1"])
    table = pd.read_parquet(io.BytesIO(unbroken["writers.parquet"]))
    pd.testing.assert_frame_equal(table, pd.read_csv(io.BytesIO(unbroken["writers.csv"])))
    ours = mean_parts.to_frame().set_index(["name", "side", "writer"])["value"]
    theirs = table.set_index(["name", "side", "writer"])["value"]
    assert_close(theirs, ours[theirs.index], scale=float(ours.abs().max()) * 8)
    stored = json.loads((tmp_path.parent / "why.json").read_text())["summary"]
    assert (
        pd.DataFrame(stored["groups"])["writer"].tolist()
        == mean_parts.to_frame("groups")["writer"].tolist()
    )
    assert "Means over 150 prompts" in printed
    for head in ("L2H0", "L1H1"):
        assert mean_parts.strongest(head, "key", 1)["writer"].item() in printed
        assert stored["sentences"][head].split(":")[0] in " ".join(printed.split())


@pytest.mark.parametrize(
    ("has_task", "arguments", "says"),
    [
        (True, ["--html", "page.html"], "--html has no effect with -n"),
        (True, ["--no-bias"], "--bias has no effect here"),
        (True, ["a : foo b :"], "have no effect with a task"),
        (False, ["-n", 3], "-n requires a task"),
        (False, ["-n", 3, "-t", TASK], "-n requires --why"),
        (False, ["--out", "folder"], "--out requires -n"),
    ],
)
def test_options_without_effect_are_refused_and_missing_ones_named(
    run, inputs, has_task, arguments, says
):
    code, _, output = run(*(inputs if has_task else ["explain"]), *arguments)
    assert (code, output.count("\n")) == (2, 1)
    assert says in output
