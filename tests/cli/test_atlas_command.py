"""`icl-lens atlas`: with and without a task, its files, and its errors."""

import shlex
from dataclasses import replace

import pandas as pd
import pytest

import icl_lens as il
from icl_lens.analyses.atlas import duration
from icl_lens.cli.atlas import AtlasTask
from icl_lens.cli.atlas_start import (
    duration_sentence,
    few_queries_warning,
    prompts_with_enough_queries,
)
from icl_lens.cli.console import duration_in_words
from icl_lens.cli.locate import atlas_command
from icl_lens.cli.options import ModelOptions, TokenOptions
from icl_lens.cli.task_options import SplitTask


def test_without_a_task_the_scores_need_no_prompts(run, tmp_path):
    out = tmp_path / "out"
    code, printed, errors = run(
        "atlas", "--sequences", "3", "--out", out, "--json", tmp_path / "atlas.json"
    )
    assert code == 0, errors
    assert "of 48 heads of icl-mini" in printed
    atlas = il.results.HeadAtlas.load(tmp_path / "atlas.json")
    assert "contrast" in atlas.left_out
    assert atlas["induction"].n == 3
    table = pd.read_csv(out / "heads.csv")
    assert table["induction"].to_numpy() == pytest.approx(atlas["induction"].mean.flatten().numpy())


@pytest.mark.slow
def test_with_a_task_the_command_says_what_python_says(run, tmp_path, icl_mini):
    arguments = "-t sentiment-number -n 4 --edited 3 --sequences 3 --no-check".split()
    page, numbers, out = tmp_path / "page.html", tmp_path / "atlas.json", tmp_path / "out"
    files = ["--html", page, "--json", numbers, "--out", out]
    code, printed, errors = run("atlas", *arguments, *files)
    assert code == 0, errors
    assert "no head will have these kinds: writes the answer, needed" in errors
    atlas = il.results.HeadAtlas.load(numbers)
    prompts = il.load_task("sentiment-number", n=4)
    expected = il.head_atlas(icl_mini, prompts, n_sequences=3, n_edited=3)
    assert list(atlas.scores) == list(expected.scores)
    assert atlas["exchange"].mean.allclose(expected["exchange"].mean)
    n_prompts = {name: atlas[name].n for name in ("contrast", "effect", "keys", "indirect_effect")}
    assert n_prompts == {"contrast": 4, "effect": 3, "keys": 3, "indirect_effect": 3}
    assert atlas.finding in " ".join(printed.split())
    assert '"exchange"' in page.read_text(encoding="utf-8")
    assert not atlas.removals
    code, printed, errors = run("atlas", *arguments, "--judge", "--json", numbers)
    assert code == 0, errors
    judged = il.results.HeadAtlas.load(numbers)
    assert (judged.n_held_out, judged.n_shared_queries) == (3, 0)
    assert judged.removal_finding in " ".join(printed.split())
    for name in ("read", "exchange", "effect", "indirect_effect"):
        assert list((out / name).glob("*.parquet")), name


def test_task_options_need_a_task(run):
    for option, reason in (
        (("--demonstrations", "4"), "it requires --task or --path"),
        (("--edited", "4"), "heads are edited with --task only"),
        (("--judge",), "heads are edited with --task only"),
    ):
        code, _, errors = run("atlas", *option)
        assert code == 2
        assert reason in errors


@pytest.mark.slow
def test_the_answer_is_about_the_heads_that_are_asked_about(run, tmp_path):
    numbers = tmp_path / "atlas.json"
    few = ("--sequences", "3")
    code, printed, errors = run("atlas", *few, "--heads", "L2H0, l5h0", "--json", numbers)
    assert code == 0, errors
    atlas = il.results.HeadAtlas.load(numbers)
    assert atlas.heads == (il.Head(2, 0), il.Head(5, 0))
    assert printed.startswith(" ".join(atlas.heads_finding.split()[:6]))
    assert "Kinds of these heads" in printed
    assert "Heads with a kind" not in printed
    (tmp_path / "heads.csv").write_text("name,score\nL2H0,0.5\nL5H0,0.4\n", encoding="utf-8")
    _, of_file, _ = run("atlas", *few, "--heads", tmp_path / "heads.csv")
    assert of_file == printed.replace(f"JSON: {numbers}\n", "")
    for heads, reason in (("L9H0", "head must be in layers 0–7"), (",", "at least one head")):
        code, _, errors = run("atlas", *few, "--heads", heads)
        assert code == 2
        assert reason in errors


@pytest.mark.slow
def test_top_lists_as_many_heads_of_each_score(run):
    _, printed, _ = run("atlas", "--sequences", "2", "-k", "1")
    assert "second" not in printed
    _, printed, _ = run("atlas", "--sequences", "2", "-k", "6")
    assert "score: its first 6 heads" in printed


@pytest.mark.slow
def test_the_last_line_is_a_command_that_says_what_kind_of_heads_they_are(run):
    """It names the same task and model, and the heads that were located."""
    options = ["-t", "animal-country", "-n", "8", "--demonstrations", "1", "--separator", "\\n"]
    options += ["--no-check", "--no-bos", "--seed", "3", "--final-norm", "own"]
    code, printed, errors = run("locate", *options, "-k", "2", "--by", "contrast")
    assert code == 0, errors
    (line,) = [line for line in printed.splitlines() if line.startswith("What kind of heads")]
    _, _, command = line.partition(": ")
    program, *words = shlex.split(command)
    assert program == "icl-lens"
    expected = ["atlas", "-t", "animal-country", "--demonstrations", "1", "--no-check", "-n", "8"]
    expected += ["--separator", "\\n", "--no-bos", "--seed", "3", "--heads"]
    assert words[:-1] == expected
    heads = words[-1].split(",")
    assert all(f" {head} " in printed for head in heads)
    code, printed, errors = run(*words, "--sequences", "2", "--edited", "1")
    assert code == 0, errors
    assert "Of these 2 heads, " in printed


def test_the_command_has_no_more_prompts_than_the_atlas_takes_by_default():
    for n, words in ((59, ["-n", "59"]), (60, []), (200, [])):
        task = SplitTask(task="antonyms", n=n)
        heads = [il.Head(1, 2), il.Head(3, 0)]
        command = atlas_command(task, TokenOptions(), ModelOptions(model="a b"), heads, seed=0)
        expected = [
            "icl-lens",
            "atlas",
            "-m",
            "a b",
            "-t",
            "antonyms",
            *words,
            "--heads",
            "L1H2,L3H0",
        ]
        assert shlex.split(command) == expected


def test_too_few_queries_are_said_before_the_run_with_what_gives_enough(monkeypatch):
    """The kinds that need them are named; with enough queries, nothing is said."""
    task = AtlasTask(task="sentiment-number", n=20)
    prompts = task.prompts(n=20, seed=0)
    queries = [prompt.query for prompt in prompts]
    enough = prompts_with_enough_queries(queries, 48)
    assert len(set(queries[:enough])) == 10 > len(set(queries[: enough - 1]))
    assert few_queries_warning(task, prompts, seed=0, n_edited=enough, n_heads=48) == ""
    assert few_queries_warning(task, prompts, seed=0, n_edited=enough, n_heads=336)
    few_edited = few_queries_warning(task, prompts, seed=0, n_edited=5, n_heads=48)
    n_queries = len(set(queries[:5]))
    assert few_edited == (
        "no head will have these kinds: needed, compares, carries labels and function vector. "
        "They need 10 prompts with different queries, and the first 5 prompts, on which heads are "
        f"edited, have {n_queries}; --edited {enough} has enough."
    )
    few = few_queries_warning(replace(task, n=4), prompts[:4], seed=0, n_edited=24, n_heads=48)
    assert "writes the answer, needed, compares" in few
    assert few.endswith(f"and the 4 prompts have {len(set(queries[:4]))}; -n 16 has enough.")
    repeated = [prompts[0]] * 4
    monkeypatch.setattr(AtlasTask, "prompts", lambda self, n, seed: repeated * n)
    assert few_queries_warning(
        replace(task, n=4), repeated, seed=0, n_edited=4, n_heads=48
    ).endswith("and the 4 prompts have 1; more rows with other texts give more.")


def test_the_duration_is_said_where_it_is_long(monkeypatch, icl_mini):
    """With fewer edited prompts, which are enough for kinds, it is shorter."""
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=20))
    counts = {"n_sequences": 40, "n_edited": 18, "n_held_out": 0}
    monkeypatch.setattr(duration, "seconds_per_token", lambda model, batch: 0.05)
    sentence = duration_sentence(icl_mini, batch, **counts)
    least = prompts_with_enough_queries(batch.queries, 48)
    words = []
    for n_edited in (18, least):
        seconds = duration.expected_seconds(
            icl_mini, batch, 0.05, **counts | {"n_edited": n_edited}
        )
        words.append(duration_in_words(seconds))
    assert sentence == (
        f"This takes about {words[0]} on this machine; with --edited {least}, {words[1]}, and kinds "
        "are surer with more."
    )
    few = duration_sentence(icl_mini, batch, **counts | {"n_edited": least})
    assert few == f"This takes about {words[1]} on this machine."
    assert duration_sentence(icl_mini, None, **counts).endswith(" on this machine.")
    monkeypatch.setattr(duration, "seconds_per_token", lambda model, batch: 1e-5)
    assert duration_sentence(icl_mini, batch, **counts) == ""
