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
    arguments = ["-t", "sentiment-number", "-n", "4", "--sequences", "3", "--no-check"]
    files = [
        "--html",
        tmp_path / "page.html",
        "--json",
        tmp_path / "atlas.json",
        "--out",
        tmp_path / "out",
    ]
    code, printed, errors = run("atlas", *arguments, *files)
    assert code == 0, errors
    atlas = il.results.HeadAtlas.load(tmp_path / "atlas.json")
    expected = il.head_atlas(icl_mini, il.load_task("sentiment-number", n=4), n_sequences=3)
    assert list(atlas.scores) == list(expected.scores)
    assert atlas["exchange"].mean.allclose(expected["exchange"].mean)
    assert atlas.finding in " ".join(printed.split())
    assert '"exchange"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    for name in ("exchange", "effect", "indirect_effect"):
        assert list((tmp_path / "out" / name).glob("*.parquet")), name


def test_task_options_need_a_task(run):
    code, _, errors = run("atlas", "--demonstrations", "4")
    assert code == 2
    assert "it requires --task or --path" in errors
