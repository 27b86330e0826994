"""`icl-lens ablate`: the printed and written numbers are those of Python; bad input is refused."""

import json
import math
import re
from collections import Counter
from html import unescape

import families
import pytest
from cases import slow
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli.ablate import ablate
from icl_lens.cli.check import check
from icl_lens.cli.task_options import SplitTask, shared_queries_remedy
from icl_lens.prompts.word_task import word_list
from icl_lens.result.number_format import percent, signed

TASK = {"task": "sentiment-number", "n": 6, "random_sets": 2, "device": "cpu"}


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_ablating_one_prompt_is_ablate_heads(family_folder, load_tiny, capsys, tmp_path):
    """Without --answer, the answer is the model's prediction."""
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    options = {
        "heads": "L0H1,L2H3",
        "random_sets": 3,
        "html": page,
        "json_file": numbers,
        "device": "cpu",
    }
    ablate(families.PROMPT, model=str(family_folder("gpt2")), **options)
    out = shown(capsys)
    model = load_tiny("gpt2")
    batch = il.tokenize(model, [il.Prompt.parse(families.PROMPT)])
    before = il.score(model, batch)[0]
    with il.ablate_heads(model, [(0, 1), (2, 3)], positions="last"):
        after = il.score(model, batch)[0]
    assert "L0H1, L2H3, named in --heads" in out
    for log_probs in (before, after):
        assert all(percent(float(log_prob.exp())) in out for log_prob in log_probs)
    assert "random, same" in out
    assert (
        json.loads(numbers.read_text())["summary"]["prompts"][0]["answer"]
        == batch.labels[int(before.argmax())]
    )
    (scores,) = il.results.ControlledAblation.load(numbers).conditions["heads"].scores
    assert_close(scores.label_log_probs[0], after)
    assert percent(float(after.max().exp())) in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "by", "layout"),
    [
        ({}, "effect", "random"),
        pytest.param(
            {"by": "increase", "layout": "last", "check": False},
            "increase",
            "last",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"by": "contrast", "check": False}, "contrast", "random", marks=pytest.mark.slow
        ),
        pytest.param(
            {"by": "exchange", "check": False}, "exchange", "random", marks=pytest.mark.slow
        ),
        slow({"mode": "mean", "check": False}, "effect", "random"),
    ],
)
def test_ablating_a_task_is_ablate_with_controls(icl_mini, capsys, tmp_path, options, by, layout):
    """Heads are located on other prompts, whose classes and labels are balanced as well."""
    numbers, page = tmp_path / "numbers.json", tmp_path / "page.html"
    if "check" not in options:  # the check of few prompts is one that was stored before
        check(task=TASK["task"], device=TASK["device"])
        capsys.readouterr()
    ablate(**TASK, **options, k=2, positions="last", json_file=numbers, html=page)
    out = shown(capsys)
    prompts = il.load_task("sentiment-number", n=32, layout=layout)
    locating, testing = il.split_by_query(prompts, 8)[0], il.split_by_query(prompts, 6)[1]
    top = il.locate(icl_mini, locating, k=2, by=by).heads
    batch = il.tokenize(icl_mini, testing)
    mean = {}
    if "mode" in options:
        mean = {"mode": "mean", "reference": il.tokenize(icl_mini, locating)}
    ablation = il.ablate_with_controls(icl_mini, batch, top, n_random=2, positions="last", **mean)
    heads = ", ".join(map(str, top))
    assert f"{heads}, located by {by} on 8 other prompts (with other queries)" in out
    loaded = json.loads(numbers.read_text())["summary"]
    html = unescape(" ".join(page.read_text().split()))
    for text in (out, html):
        assert f"2 heads {'mean-ablated' if mean else 'zeroed'}" in text
        check_numbers(ablation, text)
    assert "One prompt" not in html
    if "check" not in options:
        sentence = str(il.task_check(icl_mini, "sentiment-number"))
        assert sentence in out
        assert sentence.split(":")[0] in html
        assert loaded["task_check"]["sentence"] == sentence
    answers = [prompt["answer"] for prompt in loaded["prompts"]]
    assert answers == [prompt.answer for prompt in testing]
    check_conditions(ablation, loaded["conditions"])


def check_conditions(ablation, conditions):
    """The stored row of each condition is that of the table; null stands for NaN."""
    for name, row in ablation.to_frame().to_dict("index").items():
        stored = dict.fromkeys(row, math.nan)
        for key in row:
            if conditions[name][key] is not None:
                stored[key] = conditions[name][key]
        assert stored == pytest.approx(row, nan_ok=True)


def check_numbers(ablation, text):
    """A text has the accuracies, the ends of intervals, and the difference from random heads."""
    assert "2 random, same layers" in text
    for name in ablation.conditions:
        assert percent(ablation.interval(name, "accuracy").value) in text
        assert signed(ablation.interval(name, "log_odds").low, 2) in text
    assert signed(ablation.difference("heads", "same layers", "log_odds").high, 2) in text


@pytest.mark.parametrize(
    ("options", "n"), [({"task": "sentiment-number"}, 30), ({"task": "animal-country"}, 201)]
)
def test_no_query_recurs(options, n):
    task = SplitTask(**options, n=n)
    locating, testing = task.split_prompts(0)
    assert not {prompt.query for prompt in locating} & {prompt.query for prompt in testing}
    assert len(testing) == n
    for prompts in (locating, testing):
        counts = Counter(prompt.answer for prompt in prompts)
        assert abs(counts["foo"] - counts["bar"]) <= 1 + (prompts is testing)
        classes = Counter(
            prompt.query in word_list()[task.task.partition("-")[0]] for prompt in prompts
        )
        assert abs(classes[True] - classes[False]) <= 1


def test_a_task_with_few_queries_uses_them_twice(tmp_path, capsys):
    """With fewer than eight queries per half, the halves share queries, and the command reports how
    many.
    """
    path = tmp_path / "words.json"
    for n, is_few in ((7, True), (9, False)):
        categories = {
            name: words[:n] for name, words in word_list().items() if name in ("animal", "country")
        }
        path.write_text(json.dumps({"categories": categories}))
        locating, testing = SplitTask(task="animal-country", path=path, n=40).split_prompts(0)
        assert (
            bool({prompt.query for prompt in locating} & {prompt.query for prompt in testing})
            == is_few
        )
        if is_few:
            remedy = shared_queries_remedy(SplitTask(task="animal-country", path=path, n=40), 0)
            n_fewer = int(re.search(r"-n (\d+)", remedy)[1])
            fewer = SplitTask(task="animal-country", path=path, n=n_fewer)
            halves = [{prompt.query for prompt in half} for half in fewer.split_prompts(0)]
            assert halves[0].isdisjoint(halves[1])
            ablate(
                task="animal-country",
                path=path,
                n=8,
                k=1,
                random_sets=1,
                check=False,
                positions="last",
            )
            assert re.search(r"[1-9] of their [1-9] queries also occurs? here", shown(capsys))


@pytest.mark.slow
def test_progress_is_shown_in_a_terminal_only(capsys, monkeypatch):
    stages = ("loading icl-mini", "checking the task", "locating heads", "ablating heads")
    monkeypatch.setattr("icl_lens.analyses.task_check.N_PROMPTS", 20)
    for terminal in (False, True):
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        ablate(**TASK | {"n": 20, "seed": int(terminal)}, k=1, positions="last")
        err = capsys.readouterr().err
        assert [stage in err for stage in stages] == [terminal] * 4


def test_heads_named_twice_count_once_and_one_query_has_no_interval(capsys):
    """One query has no interval."""
    ablate(**TASK | {"n": 1}, check=False, heads="L1H2,L1H2", positions="last")
    out = shown(capsys)
    assert ": L1H2, named in --heads" in out
    assert "nan" not in out
    assert "The model" not in out
