"""`icl-lens atlas`: with and without a task, its files, and its errors."""

import pandas as pd
import pytest

import icl_lens as il


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
