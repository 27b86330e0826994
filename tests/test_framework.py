"""What findings share: balanced prompts, disjoint halves, intervals that cover, resumable runs, sentences from rows."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments.catalogue import IDS, find
from experiments.framework import claims, overview, pages, run, sentences
from experiments.framework.estimate import compare, compare_heads
from experiments.framework.finding import Finding, Measure, Measured, Row
from experiments.framework.models import QWEN, SMOLLM2
from experiments.framework.study import Study, clusters_of
from experiments.framework.tasks import WORDS, Task
from icl_lens.models.head import Head

TASK = Task("animal-country", "animal-country")
NATURAL = Task("natural", "positive-negative", ("positive", "negative"), path=str(WORDS))


@pytest.mark.parametrize("task", [TASK, NATURAL], ids=lambda task: task.name)
def test_every_class_and_label_is_the_answer_equally_often(task):
    prompts = task.prompts(80)
    assert Counter(prompt.answer for prompt in prompts) == dict.fromkeys(task.labels, 40)
    by_class = Counter((shown_class(task, prompt), prompt.answer) for prompt in prompts)
    expected = 40 if task.natural else 20
    assert all(count == expected for count in by_class.values())
    last = sum(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts)
    assert 20 <= last <= 60  # copying the last label is no better than guessing


def shown_class(task: Task, prompt) -> str:
    """Return the class of a prompt's query, after asserting that a demonstration with its answer has the same class."""
    from icl_lens.prompts.word_task import word_list

    words = word_list(task.path)
    (kind,) = (kind for kind in task.data.split("-") if prompt.query in words[kind])
    shown = next(one.text for one in prompt.demonstrations if one.label == prompt.answer)
    assert shown in words[kind]
    return kind


@pytest.mark.parametrize("task", [TASK, NATURAL], ids=lambda task: task.name)
def test_exchanged_labels_demonstrate_the_opposite(task):
    other = dict(zip(task.labels, task.labels[::-1], strict=True))
    for prompt, exchanged in zip(task.prompts(40), task.prompts(40, exchanged=True), strict=True):
        assert [one.text for one in prompt.demonstrations] == [one.text for one in exchanged.demonstrations]
        assert [other[one.label] for one in prompt.demonstrations] == [one.label for one in exchanged.demonstrations]
        assert exchanged.answer == other[prompt.answer]


def test_the_interval_covers_the_difference_of_clustered_numbers():
    """It covers in about 19 of 20 made-up data sets, where numbers within a cluster are alike."""
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(20), 10)
    covered = widths = 0
    for _ in range(200):
        shared = rng.normal(size=20)[clusters]
        quantity, control = 1.0 + shared + rng.normal(size=200), rng.normal(size=200)
        found = compare(quantity, control, clusters)
        covered += found.low <= 1.0 <= found.high
        widths += found.high - found.low
        assert found.quantity - found.control == pytest.approx((quantity - control).mean())
    assert 180 <= covered <= 199
    independent = compare(quantity, control, np.arange(200))
    assert independent.high - independent.low < 0.7 * widths / 200  # too narrow, as it ignores clusters


def test_a_share_that_never_varies_has_an_interval():
    found = compare(np.ones(40), np.full(40, 0.5), np.repeat(np.arange(10), 4), bounds=(0, 1))
    assert (found.quantity, found.control) == (1, 0.5)
    assert found.high - found.low > 0.25


def test_located_heads_are_compared_with_their_own_layer():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(60, 3, 8)) + np.array([0.0, 5.0, -5.0])[None, :, None]  # layers differ, heads do not
    values[:, 1, 2] += 1.0
    clusters = np.arange(60) // 3
    controls = {layer: [Head(layer, head) for head in range(4, 8)] for layer in (1, 2)}
    located = [Head(1, 2), Head(2, 0)]
    found = compare_heads(values, located, controls, clusters)
    means = values.mean(0)
    assert found.quantity == pytest.approx((means[1, 2] + means[2, 0]) / 2)
    assert found.control == pytest.approx((means[1, 4:].mean() + means[2, 4:].mean()) / 2)
    nothing = compare_heads(values, [Head(1, head) for head in (0, 1, 3)], controls, clusters)
    assert nothing.low < 0 < nothing.high
    planted = compare_heads(values + 2 * (np.arange(8) < 4), [Head(1, head) for head in (0, 1, 3)], controls, clusters)
    assert planted.low > 1


def test_located_heads_are_those_of_largest_mean_contrast_on_the_other_half(icl_mini):
    study = Study(icl_mini, TASK, 24)
    first, second = study.halves()
    assert not {prompt.query for prompt in first.prompts} & {prompt.query for prompt in second.prompts}
    scores = study.head_scores().mean(0)
    best = scores.flatten().topk(study.n_located).indices.tolist()
    assert study.located == [Head(*divmod(index, study.view.n_heads)) for index in best]
    located = set(study.located)
    assert study.controls.keys() == {head.layer for head in located}
    for layer, heads in study.controls.items():
        assert not located & set(heads)
        assert {head.layer for head in heads} == {layer}
    for drawn in study.random_sets(study.located, n=5):
        assert sorted(head.layer for head in drawn) == sorted(head.layer for head in study.located)
        assert len(set(drawn)) == len(drawn)
        assert not located & set(drawn)
    other = study.ranked_by("increase")
    assert other.located != study.located
    assert other.halves() is study.halves()
    assert len(clusters_of(second)) == 24


MEASURE = Measure("mean", "quantity", "control", "nats")


def made_up(values: dict[str, tuple[float, float, float, float]]) -> Finding:
    """A finding whose row depends on the task's name only."""

    def measure(study: Study) -> Measured:
        return Measured([Row("mean", *values[study.task.name], n_prompts=study.n)])

    return Finding(
        id="made-up",
        title="Title?",
        question="Question?",
        answer=lambda cells: "The answer is made up.",
        claim="Claim.",
        covers="Table 0",
        measures=(MEASURE,),
        measure=measure,
        look_for="Dots.",
        method="Made up.",
        draw=lambda details: Figure(),
    )


def cells(finding: Finding, names):
    return [run.Cell(finding, "icl-mini", replace(TASK, name=name), 8, "icl-mini") for name in names]


def test_done_cells_are_not_computed_again_but_changed_ones_are(tmp_path, icl_mini):
    finding = made_up({"a": (1.0, 0.0, 0.5, 1.5), "b": (0.0, 0.0, -1.0, 1.0)})
    loads = []

    def load(name):
        loads.append(name)
        return icl_mini

    lines: list[str] = []
    assert run.run(cells(finding, "ab"), tmp_path, load=load, report=lines.append) == 2
    assert len(lines) == 2
    assert "1.00 vs. 0.00, difference 0.50 … 1.50 nats" in lines[0]
    assert run.run(cells(finding, "ab"), tmp_path, load=load, report=lines.append) == 0
    changed = [replace(cell, n=12) for cell in cells(finding, "a")]
    assert run.run(changed, tmp_path, load=load, report=lines.append) == 1
    assert loads == ["icl-mini"] * 2
    assert not list(tmp_path.rglob("*.lock"))


COMMAND = [sys.executable, "-m", "experiments", "run", "behavior", "ablation", "label-attention", "-n", "24", "--out"]


KILLED = """
import os, runpy, signal, sys
from experiments.framework import run

store = run.store
run.store = lambda *given: (store(*given), os.kill(os.getpid(), signal.SIGKILL))
sys.argv = sys.argv[1:]
runpy.run_module("experiments", run_name="__main__")
"""


def start(out: Path, command: Sequence[str] = COMMAND) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, str(out)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stored(out: Path) -> dict[str, dict]:
    found = {path.name: json.loads(path.read_text()) for path in sorted(out.rglob("*.json"))}
    return {name: {key: value for key, value in one.items() if key != "seconds"} for name, one in found.items()}


@pytest.mark.slow
def test_a_killed_run_resumes_and_two_processes_share(tmp_path):
    whole, killed, shared = (tmp_path / name for name in ("whole", "killed", "shared"))
    assert start(whole).wait() == 0
    assert start(killed, [COMMAND[0], "-c", KILLED, *COMMAND[2:]]).wait() == -signal.SIGKILL
    (first,) = killed.rglob("behavior.json")
    written = first.stat().st_mtime_ns
    assert list(stored(killed)) == ["behavior.json"]
    assert start(killed).wait() == 0
    assert first.stat().st_mtime_ns == written
    assert stored(killed) == stored(whole)

    both = [start(shared), start(shared)]
    assert both[0].pid != both[1].pid
    lines = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(line.split()[0].rpartition("/")[2] for some in lines for line in some) == sorted(stored(whole))
    assert stored(shared) == stored(whole)


def test_pages_say_what_the_intervals_say(tmp_path, icl_mini):
    nan = float("nan")
    values = {"a": (1.0, 0.0, 0.5, 1.5), "b": (0.0, 0.1, -1.0, 1.0), "c": (0.0, 2.0, -2.5, -1.5), "d": (nan,) * 4}
    finding, docs = made_up(values), tmp_path / "docs"
    run.run(cells(finding, values), tmp_path / "results", load=lambda name: icl_mini, report=lambda line: None)
    ((_, stored),) = pages.write_pages(tmp_path / "results", docs, [finding])
    page = (docs / "made-up.md").read_text()
    assert "**The answer is made up.**" in page
    counts = "above the control in 1 of 3 pairs, below the control in 1, not distinguishable from the control in 1"
    assert f"| small models | 3 pairs | 0.00–1.00 | 0.00–2.00 | {counts} | 8 |" in page
    real = [replace(one, model=SMOLLM2) for one in stored]
    page = pages.page(1, finding, real)
    assert f"| {SMOLLM2} | a | 1.00 | 0.00 | 1.00 [0.50, 1.50] | 8 |" in page
    assert f"| {SMOLLM2} | c | 0.00 | 2.00 | −2.00 [−2.50, −1.50] | 8 |" in page
    assert f"Not applicable: {SMOLLM2} on d" in page


def test_cells_are_computed_again_where_the_prompts_change(monkeypatch, tmp_path):
    """The words of the list stay, so only a digest of what is drawn from it notices."""
    finding = made_up({"a": (1.0, 0.0, 0.5, 1.5)})
    (cell,) = cells(finding, "a")
    before = cell.configuration()["prompts"]
    draw = Task.prompts
    monkeypatch.setattr(Task, "prompts", lambda task, n, **how: draw(task, n, **how | {"seed": 1}))
    run._drawn_digest.cache_clear()
    assert cell.configuration()["prompts"] != before
    run._drawn_digest.cache_clear()


def test_intervals_against_a_constant_respect_the_bounds():
    shares = np.r_[np.ones(19), 0.0]
    found = compare(shares, 0.5, np.arange(20), bounds=(0, 1))
    assert found.control + found.high == 1.0
    assert compare(shares, 0.5, np.arange(20)).high > 0.5


def cell(finding_id: str, task: str, *rows: Row, model: str = SMOLLM2) -> pages.Stored:
    """A stored cell of a real model, made by hand."""
    located = {"contrast": ("L1H2", "L3H0"), "increase": ("L0H0",)}
    return pages.Stored(find(finding_id), model, 0, task, "", 200, rows, pd.DataFrame(), located)


def row(measure: str, quantity: float, control: float = 0.0, *, ranking: str = "contrast") -> Row:
    return Row(measure, quantity, control, quantity - control - 0.2, quantity - control + 0.2, ranking, n_heads=2)


def test_the_index_states_the_exchanges_with_their_control():
    names = {"query": 2.7, "keys": 2.3, "values": 2.5, "query+keys": 0.6, "query+values": 0.1, "keys+values": 0.5}
    names |= {"keys: labels": 0.2, "values: texts": 0.1, "keys: own text": 2.1, "keys: other texts": 0.3}
    names |= {"predicted: query": 0.9, "predicted: keys": 0.8, "predicted: values": 0.7}
    towers = cell("two-towers", overview.SHOWN[SMOLLM2], *(row(name, size, -0.1) for name, size in names.items()))
    index = overview.text([(towers.finding, [towers])])
    assert "2 heads with another prompt's gives the other label in 70–90% of prompts (intact model: −10%)" in index
    assert "Single exchanges cost 2.30–2.70 nats; pairs, which should cancel, 0.10–0.60." in index
    assert "Exchanging keys costs 2.10 nats if only the text of their own demonstration changed class, 0.30 if" in index
    assert "each key stands mainly for its own demonstration" in index
    assert "| keys | yes | 2.30±0.20 |" in index
    assert "| query and keys | no | 0.60±0.20 |" in index
    assert "| random heads, any row | no | −0.10 |" in index
    trec = replace(cell("two-towers", overview.ON_SENTENCES, *towers.rows), model=QWEN)
    index = overview.text([(towers.finding, [towers, trec])])
    assert "SmolLM2, animal-country, A/B | Qwen, TREC, A/B |" in index
    assert "| keys | yes | 2.30±0.20 | 2.30±0.20 |" in index
    others = "keys: other texts"
    unclear = [row(others, 1.9, -0.1) if one.measure == others else one for one in towers.rows]
    assert "stands mainly" not in overview.text([(towers.finding, [replace(towers, rows=unclear)])])
    fewer = replace(towers, rows=towers.rows[:2])
    assert "the other label" not in overview.text([(fewer.finding, [fewer])])


def test_sentences_name_two_tasks_and_give_ranges_for_more():
    cells = [cell("behavior", task, row("accuracy", 0.8 + i / 10, 0.5)) for i, task in enumerate("abc")]
    measure = cells[0].finding.main.name
    cells = [replace(one, rows=[replace(one.rows[0], measure=measure)]) for one in cells]
    how = {"template": "{q}% ({c}%; {low} … {high})"}
    assert sentences.each(cells[:2], measure, **how) == (
        "80.0% (50.0%; 10.0 … 50.0) on a (SmolLM2); 90.0% (50.0%; 20.0 … 60.0) on b (SmolLM2)"
    )
    assert sentences.each(cells, measure, template="{q}% ({c}%)") == "80.0–100.0% (50.0%) on 3 tasks"
    level = replace(cells[0], rows=[row(measure, 0.5, 0.5)])
    for some, where in ((cells, "every task"), ([level, *cells], "3 of 4 tasks"), ([level], "no task")):
        assert sentences.by_outcome(some, measure, "{where}, it is") == f"On {where}, it is"


READERS = ("query", "keys at the labels", "values at the labels")


def test_the_index_names_the_third_that_writes_most():
    values = {("query", 1): 0.5, ("keys at the labels", 1): 0.7, ("values at the labels", 0): 0.6}
    rows = [
        row(f"{third} third → {reader}", values.get((reader, i), 0.1))
        for reader in READERS
        for i, third in enumerate(overview.THIRDS)
    ]
    circuit = cell("circuit", overview.SHOWN[SMOLLM2], *rows)
    index = overview.text([(circuit.finding, [circuit])])
    assert "Most of what heads compare is written in the middle third, most of what they carry in the first" in index
    assert "from what 2 heads read costs, in nats: SmolLM2: queries 0.10, 0.50, 0.10; keys 0.10, 0.70" in index
    assert "Random heads: 0.00." in index
    other = {("query", 0): 0.5, ("keys at the labels", 0): 0.7, ("values at the labels", 0): 0.6}
    differs = [replace(one, quantity=0.1, low=-0.1, high=0.3) for one in rows]
    for place, (reader, i) in enumerate((reader, i) for reader in READERS for i in range(3)):
        if (reader, i) in other:
            differs[place] = row(rows[place].measure, other[reader, i])
    qwen = replace(cell("circuit", overview.SHOWN[QWEN], *differs), model=QWEN)
    index = overview.text([(circuit.finding, [circuit, qwen])])
    assert "Qwen: queries 0.50, 0.10, 0.10; keys 0.70, 0.10, 0.10; values 0.60, 0.10, 0.10; most of wh" in index


def test_the_index_names_no_third_where_none_is_above_its_control():
    rows = [row(f"{third} third → {reader}", 0.15) for reader in READERS for third in overview.THIRDS]
    circuit = cell("circuit", overview.SHOWN[SMOLLM2], *rows)
    index = overview.text([(circuit.finding, [circuit])])
    assert overview.NOTHING_WRITTEN.capitalize() in index
    assert "most of what" not in index


def test_claims_count_tasks_above_and_below_the_control():
    stored = [
        cell("label-attention", "a", row("chance", 0.8, 0.5)),
        cell("label-attention", "b", row("chance", 0.55, 0.5)),
        cell("label-attention", "c", row("chance", 0.2, 0.5)),
        cell("label-attention", "d", row("chance", 0.9, 0.5), model="icl-mini"),
    ]
    lines = claims.table(stored).splitlines()
    (found,) = [line for line in lines if "attend to true labels" in line]
    assert "| 1 of 3 (other side: 1) |" in found
    assert "20.0–80.0% (50.0)" in found
    assert all("not measured" in line for line in lines if "Table 2" in line or "Figure 7" in line)
    flow = [cell("location", "a", row("depth_layers", share, 0.1, ranking="increase")) for share in (0.4, 0.9)]
    (found,) = [line for line in claims.table(flow).splitlines() if "Almost all" in line]
    assert "| 1 of 2 (above control: 2) |" in found
    falling = [cell("recency-bias", "a", row("attention", -0.8)), cell("recency-bias", "b", row("attention", 0.0))]
    (found,) = [line for line in claims.table(falling).splitlines() if "when they come first" in line]
    assert "| 1 of 2 |" in found


def test_the_index_names_the_task_of_claims_on_one_task_only_if_it_is_the_same():
    values, flow = (cell(name, "a", row("main", 0.8)) for name in ("values", "circuit"))
    assert overview._single_task([values, flow]) == " “Of 1”: a in SmolLM2."
    assert overview._single_task([values, replace(flow, task="b")]) == ""
    assert overview._single_task([values, flow, replace(flow, task="b")]) == " “Of 1”: a in SmolLM2."


def test_every_figure_and_table_of_the_paper_has_a_claim():
    text = " ".join(claim.where for some in claims.CLAIMS.values() for claim in some)
    figures = {int(number) for number in re.findall(r"\d+", " ".join(re.findall(r"Figures? ([\d, –]+)", text)))}
    for first, last in re.findall(r"(\d+)–(\d+)", text):
        figures |= {*range(int(first), int(last) + 1)}
    assert figures == {*range(1, 28)}
    assert {int(number) for number in re.findall(r"\d+", " ".join(re.findall(r"Tables? ([\d, ]+)", text)))} == {1, 2, 3}


@pytest.mark.parametrize(("finding", "some"), claims.CLAIMS.items(), ids=claims.CLAIMS)
def test_claims_name_measures_that_exist(finding, some):
    assert {claim.measure for claim in some} <= {one.name for one in find(finding).measures}


@pytest.mark.parametrize("finding", [find(name) for name in IDS], ids=IDS)
def test_a_changed_measure_is_still_measured(finding):
    assert bool(finding.post_hoc) >= bool(finding.earlier)
    assert finding.earlier in ("", *(measure.name for measure in finding.measures[1:]))
