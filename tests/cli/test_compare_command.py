"""`icl-lens compare` and `--open`: what is printed, written and opened."""

import io
import shutil
import webbrowser
from dataclasses import replace

import families
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from cases import slow
from matplotlib.collections import PathCollection
from rich.console import Console
from tolerance import assert_close

import icl_lens as il
from icl_lens.analyses.model_comparison import ModelComparison

OTHER = families.PROMPT.replace("one :", "hate :")


def test_two_prompts_are_compared(run, tiny, tmp_path):
    file = tmp_path / "both.html"
    code, out, _ = run(
        "compare",
        families.PROMPT,
        OTHER,
        "-m",
        tiny,
        "-a",
        "foo",
        "--answer-b",
        "bar",
        "--html",
        file,
    )
    assert code == 0
    assert "Probability of each label" in out
    assert "contrast changed most, nats (A: foo, B: bar)" in out
    assert "increase" in out
    assert "to explain foo in both, pass --answer foo --answer-b foo." in " ".join(out.split())
    assert "A explains" in file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["increase", "effect", "exchange"])
def test_a_model_does_not_differ_from_itself_on_the_default_prompt(run, tiny, family_folder, by):
    code, out, _ = run("compare", "-m", tiny, "--model-b", family_folder("gpt2"), "--by", by)
    assert code == 0
    assert f"whose {by} changed most, nats (A: foo, B: foo)" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("L")]
    for row in rows:
        assert set(row[3::3]) == {"+0.000"}


@pytest.fixture(scope="module")
def noised(tiny, tmp_path_factory):
    """The folder of the same model with noise on its weights."""
    folder = tmp_path_factory.mktemp("noised")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    model.save_pretrained(folder)
    return folder


TASK = ("-t", "sentiment-number", "--demonstrations", 1, "-n", 6, "--no-check")


@pytest.mark.slow
def test_two_models_explain_the_same_answer(run, tiny, noised):
    """Both explain A's prediction, even if B predicts another label, unless --answer-b is given."""
    models = [il.load_model(str(folder), device="cpu") for folder in (tiny, noised)]
    prompts = [
        families.PROMPT.replace("one :", f"{query} :")
        for query in ("love", "like", "hate", "eight", "two")
    ]
    batch = il.tokenize(models[0], prompts)
    says = (
        [batch.labels[label] for label in il.capture(model, batch).predicted] for model in models
    )
    prompt, first, second = next(
        row for row in zip(prompts, *says, strict=True) if row[1] != row[2]
    )
    models = ("-m", tiny, "--model-b", noised)
    assert f"(A: {first}, B: {first})" in run("compare", prompt, *models)[1]
    assert f"(A: {first}, B: {second})" in run("compare", prompt, *models, "--answer-b", second)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    [
        None,
        slow("effect"),
        slow("increase"),
        slow("exchange"),
    ],
)
def test_two_models_over_a_task_are_compare_models(run, tiny, noised, words, tmp_path, by):
    """Means are those of the functions, intervals those of paired differences; page and figure show
    all heads.
    """
    page = tmp_path / "both.html"
    ranked = () if by is None else ("--by", by)
    code, out, err = run(
        "compare", *TASK, "--path", words, "-m", tiny, "--model-b", noised, *ranked, "--html", page
    )
    by = by or "contrast"
    assert code == 0, err
    models = [il.load_model(str(folder), device="cpu") for folder in (tiny, noised)]
    prompts = il.load_task("sentiment-number", path=words, demonstrations=1, n=6, layout="random")
    comparison = il.compare_models(*models, prompts, by=by)
    frame = comparison.to_frame()
    for model, side, column in zip(models, (comparison.a, comparison.b), "ab", strict=True):
        batch = il.tokenize(model, prompts)
        expected = mean_score(model, batch, by).flatten()
        assert_close(frame.sort_values(["layer", "head"])[column].to_numpy(), expected)
        assert_close(side["log p"], il.score(model, batch).gather(1, batch.answer[:, None])[:, 0])
    first = frame.iloc[0]
    differences = (comparison.b[by] - comparison.a[by])[:, first.layer, first["head"]]
    queries = [prompt.query for prompt in prompts]
    interval = il.metrics.bootstrap_interval(differences, clusters=queries)
    assert (first.change, first.low, first.high) == pytest.approx(tuple(interval))
    assert frame["change"].abs().is_monotonic_decreasing
    cells = f"{first['name']} {first.a:+z.3f} {first.b:+z.3f} {first.change:+z.3f}"
    assert cells.replace("-", "−") in " ".join(out.split())
    assert "mean contrast changed most" in out
    check_page_and_figure(comparison, page)


def mean_score(model, batch, by):
    """The mean score of every head, [layer head]."""
    if by == "effect":
        return il.head_effects(model, batch).log_odds.mean(0)
    return il.locate(model, batch, by=by).score.mean


def check_page_and_figure(comparison, page):
    frame = comparison.to_frame()
    first = frame.iloc[0]
    (figure,) = comparison.figures.values()
    collections = figure.axes[0].collections
    (points,) = (points for points in collections if isinstance(points, PathCollection))
    assert points.get_offsets().tolist() == frame[["a", "b"]].to_numpy().tolist()
    assert page.read_text() == comparison.to_html()
    assert page.read_text().count("data:image/png") == 1  # the figure
    twin = comparison._repr_html_().partition('<div class="icl-lens-twin">')[2]
    assert f"{first['name']}</td>" in twin
    assert first["name"] in repr(comparison)


def test_prompts_that_share_a_query_count_once_and_one_query_has_no_interval():
    """Copies of every prompt do not narrow the intervals of a comparison."""
    rng, n = np.random.default_rng(0), 12
    scores = {
        "accuracy": (n,),
        "log p": (n,),
        "log-odds": (n,),
        "increase": (n, 2, 2),
        "contrast": (n, 2, 2),
    }
    a, b = ({name: rng.normal(size=shape) for name, shape in scores.items()} for _ in "ab")
    queries = tuple(f"query {i}" for i in range(n))

    def compared(copies, queries):
        sides = ({name: x.repeat(copies, axis=0) for name, x in side.items()} for side in (a, b))
        return ModelComparison(
            ("A", "B"), "contrast", *sides, queries=tuple(np.repeat(queries, copies).tolist())
        )

    once, copied = compared(1, queries), compared(4, queries)
    for frame, expected in (
        (copied.to_frame(), once.to_frame()),
        (copied.summary(), once.summary()),
    ):
        pd.testing.assert_frame_equal(frame, expected, rtol=1e-9)
        assert (frame["high"] - frame["low"] > 0.1).all()
    single = compared(1, ["one"] * n)
    assert single.to_frame()["low"].isna().all()
    assert "nan" not in single.to_html()
    console = Console(file=io.StringIO())
    console.print(single)
    assert "nan" not in console.file.getvalue()


def test_other_shapes_have_no_table_and_prompts_without_answers_are_refused(gpt2, words):
    prompts = il.load_task("sentiment-number", path=words, demonstrations=1, n=2)
    comparison = il.compare_models(gpt2, gpt2, prompts)
    narrow = replace(comparison, b={**comparison.b, "increase": comparison.b["increase"][:, :2]})
    assert not narrow.same_heads
    assert "do not correspond" in narrow.to_html()
    with pytest.raises(il.InputError, match=r"same \(layers, heads\)"):
        narrow.to_frame()
    for wrong in (prompts[:1], [il.Prompt.parse(families.PROMPT)] * 2):
        with pytest.raises(il.InputError, match="at least two prompts with answers"):
            il.compare_models(gpt2, gpt2, wrong)


@pytest.mark.parametrize("is_browser", [True, False])
def test_a_page_is_written_and_opened_if_there_is_a_browser(
    run, tiny, tmp_path, monkeypatch, is_browser
):
    opened = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or is_browser)
    file = () if is_browser else ("--html", tmp_path / "page.html")
    code, out, _ = run("explain", families.PROMPT, "-m", tiny, "--open", "-k", 2, *file)
    assert code == 0
    (page,) = tmp_path.rglob("page.html")
    assert opened == [page.as_uri()]
    assert f"Page: {page}" in out
    assert ("open the page manually" in out) == (not is_browser)
