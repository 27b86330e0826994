"""Every script of `experiments/` runs by its one-line command, over public names only, and
resumes.
"""

import ast
import io
import json
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import ablation
import circuit
import ground_truth
import numpy as np
import pandas as pd
import publish
import pytest
import shared_heads
import task_table
import vectors
from common import Table, dots
from matplotlib.colors import to_rgb
from planted import build

import icl_lens as il

EXPERIMENTS = Path(publish.__file__).parent
SCRIPTS = sorted(EXPERIMENTS.rglob("*.py"))
COLUMNS = "model task measure at ranking quantity control low high unit versus prompts queries note".split()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_a_script_imports_public_names_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    assert not [module for module in modules if module.startswith("icl_lens.")]
    names = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "il"
    ]
    assert {*names} <= {*il.__all__}


def test_the_tables_of_the_docs_are_made_from_the_rows_beside_them():
    tasks = task_table.read(task_table.ROWS)
    assert task_table.ROWS.with_suffix(".md").read_text() == task_table.tables(
        tasks, "smollm2-135m"
    )
    assert (EXPERIMENTS / "task_comparison.md").read_text() == task_table.comparison(tasks)
    assert vectors.ROWS.with_suffix(".md").read_text() == vectors.page(
        task_table.read(vectors.ROWS)
    )


@pytest.mark.parametrize("question", publish.QUESTIONS)
def test_every_published_study_has_its_settings(question):
    data = EXPERIMENTS.parent / "docs" / "results" / "data"
    settings = json.loads((data / f"{question}.json").read_text())
    studies = publish.studies_of(publish.read(data / f"{question}.csv"))
    assert {f"{model}: {task}" for model, task in studies} == settings.keys()
    for about in settings.values():
        assert {"versions", "weights", "prompts", "n"} <= about.keys()
        assert not [value for value in about.values() if str(value).startswith("/")], (
            "a folder of one machine"
        )


def test_every_published_claim_has_its_command_date_and_digests():
    data = EXPERIMENTS.parent / "docs" / "results" / "data"
    settings = json.loads((data / "claims.json").read_text())
    claims = publish.read(data / "claims.csv")
    studies = zip(claims["script"], claims["model"], claims["task"], strict=True)
    assert {f"{script}, {model}: {task}" for script, model, task in studies} == settings.keys()
    for about in settings.values():
        assert {"date", "weights", "prompts", "versions"} <= about.keys()
        script = shlex.split(about["command"])[1]
        assert script == f"experiments/literature/{about['question']}.py"
        assert (EXPERIMENTS.parent / script).is_file()


def test_claims_are_collected_beside_those_that_were_published(tmp_path):
    data = tmp_path / "docs" / "data"
    data.mkdir(parents=True)
    row = {"model": "m", "task": "t", "measure": "lost", "quantity": 1.0, "control": 0.0}
    row |= {"low": 0.5, "high": 1.5, "claim": "It costs", "holds": "holds"}
    published = [{"script": "lu2022", **row}, {"script": "lu2022", **row, "task": "new"}]
    pd.DataFrame(published).to_csv(data / "claims.csv", index=False)
    computed = tmp_path / "out" / "m" / "t"
    computed.mkdir(parents=True)
    pd.DataFrame([row | {"quantity": 2.0}]).to_csv(computed / "lu2022.csv", index=False)
    about = {"model_name": "m", "task_name": "t", "n": 3}
    (computed / "lu2022.json").write_text(json.dumps(about))
    publish.collect_claims(tmp_path / "out", tmp_path / "docs")
    claims = publish.read(data / "claims.csv")
    assert claims["script"].tolist() == ["lu2022", "lu2022"]
    assert dict(zip(claims["task"], claims["quantity"], strict=True)) == {"t": 2.0, "new": 1.0}
    assert json.loads((data / "claims.json").read_text()) == {"lu2022, m: t": about}


def test_a_gain_in_accuracy_is_within_its_interval():
    """Accuracy lost may be negative: with fewer prompts right than without the heads."""
    study = SimpleNamespace(model_name="model", task_name="task")
    table = Table(study)
    n = 40
    lost = np.array([-1.0] * 10 + [0.0] * 30)
    queries = [str(place) for place in range(n)]
    table.add("accuracy lost", lost, np.zeros(n), queries, versus="none", unit="%")
    row = table.to_frame().iloc[0]
    assert row["quantity"] == -25
    assert row["low"] < -25 < row["high"] < 0


def test_panels_that_share_the_names_of_measures_have_them_in_one_order():
    rows = []
    for model, order in (("first", ["query", "keys"]), ("second", ["keys", "query"])):
        for measure in order:
            quantity = {"query": 1.0, "keys": 2.0}[measure]
            rows.append({"model": model, "task": "task", "measure": measure, "quantity": quantity})
    table = pd.DataFrame(rows).assign(control=0.0, low=0.0, high=0.5)
    figure = dots(table, label="nats", names=("heads", "random heads"))
    for axes in figure.axes:
        assert list(axes.lines[0].get_xdata()) == [1.0, 2.0]
        assert list(axes.lines[0].get_ydata()) == ["query", "keys"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def icl_mini():
    return il.load_model("icl-mini")


@pytest.fixture
def load_once(icl_mini, monkeypatch):
    """Load icl-mini once for all scripts; other tests load the models that they name."""
    monkeypatch.setattr(il, "load_model", lambda name: icl_mini)


@pytest.mark.slow
@pytest.mark.parametrize("question", publish.QUESTIONS)
def test_a_script_writes_its_table_what_it_depends_on_and_its_figure(question, folder, load_once):
    table = import_module(question.replace("-", "_")).main(["-n", "8", "--out", str(folder)])
    path = folder / "icl-mini" / "animal-country--bar-foo" / question
    assert table.columns.tolist() == COLUMNS
    assert table["quantity"].notna().any()
    written = pd.read_csv(path.with_suffix(".csv"))
    pd.testing.assert_series_equal(
        written["quantity"], table["quantity"], rtol=1e-5, check_dtype=False
    )
    about = json.loads(path.with_suffix(".json").read_text())
    assert {"seed", "versions", "weights", "prompts", "n", "command", "date"} <= about.keys()
    assert about["weights"]
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_stored_command_resumes_with_the_same_table(tmp_path, monkeypatch):
    """It runs on a file first, then, as its settings say, from its chunks in this process."""
    rows = []
    for label, words in il.WordTask("animal-country").words().items():
        rows += [(word, label) for word in words]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "mine.csv", index=False)
    arguments = ["--model", "icl-mini", "--task", "mine.csv", "-n", "6"]
    subprocess.run(
        [sys.executable, EXPERIMENTS / "ablation.py", *arguments],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    table = tmp_path / "results" / "icl-mini" / "mine--bar-foo" / "ablation.csv"
    chunks = sorted((tmp_path / "results").rglob("prompts-*.parquet"))
    assert chunks
    times = [chunk.stat().st_mtime_ns for chunk in chunks]
    written = table.read_bytes()
    settings = json.loads(table.with_suffix(".json").read_text())
    table.unlink()
    monkeypatch.chdir(tmp_path)
    program, script, *stored_arguments = shlex.split(settings["command"])
    assert (program, script) == ("python", "experiments/ablation.py")
    import_module("ablation").main(stored_arguments)
    assert table.read_bytes() == written
    assert [chunk.stat().st_mtime_ns for chunk in chunks] == times  # nothing was computed again


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["two-tower", "last-label"])
def test_planted_towers_are_seen_and_copying_the_last_label_is_not(setting, tmp_path):
    questions = ["--questions", "label-attention", "two-towers", "behavior"]
    table = ground_truth.main(
        ["-n", "24", "--settings", setting, "--seeds", "0", *questions, "--out", str(tmp_path)]
    )
    assert len(table) == 7
    assert "not as predicted" not in set(table["outcome"]), table.to_string()
    assert table["above"].any() == (setting == "two-tower")


@pytest.mark.parametrize(
    ("setting", "n_above", "above", "outcome"),
    [
        ("two-tower", 3, "3/3", "as predicted"),
        ("two-tower", 2, "2/3", "as predicted"),
        ("two-tower", 1, "1/3 ⚠", "not as predicted"),
        ("last-label", 1, "1/3", "as predicted"),
        ("last-label", 2, "2/3 ⚠", "not as predicted"),
        ("lookup", 2, "2/3 ⚠", "explained afterwards"),
        ("lookup", None, "no interval", "no interval"),
    ],
)
def test_the_majority_of_seeds_decides_whether_a_measure_is_as_predicted(
    setting, n_above, above, outcome
):
    rows = []
    for seed in range(3):
        about = {"question": "two-towers", "measure": "keys", "at": "", "unit": "nats"}
        numbers = {
            "quantity": seed + 1.0,
            "control": 0.5,
            "above": None if n_above is None else seed < n_above,
        }
        rows.append({"setting": setting, "seed": seed, **about, **numbers})
    (row,) = ground_truth.means_of_seeds(pd.DataFrame(rows)).to_dict("records")
    assert (row["quantity"], row["control"]) == (2.0, 0.5)
    assert (row["above"], row["outcome"]) == (above, outcome)


def test_heads_of_each_method_are_counted_by_role_over_seeds():
    rows = []
    for seed, roles in enumerate(["two-tower two-tower decoy", "two-tower noise decoy"]):
        rows.append(
            {
                "setting": "two-tower",
                "seed": seed,
                "measure": "planted heads by increase",
                "at": 1,
                "unit": "heads",
                "note": roles,
            }
        )
    (row,) = ground_truth.heads_by_method(pd.DataFrame(rows)).to_dict("records")
    assert row == {
        "method": "increase",
        "passes": 1,
        "two-tower": "3 of 6, 2 decoys, 1 noise",
    }


@pytest.mark.slow
def test_contrast_finds_planted_heads_and_the_increase_decoys(tmp_path):
    options = ["-n", "24", "--settings", "two-tower", "--seeds", "0", "--questions", "location"]
    table = ground_truth.main([*options, "--out", str(tmp_path)])
    heads = pd.read_csv(tmp_path / "ground-truth-heads.csv").set_index("method")["two-tower"]
    assert heads["contrast"] == "4 of 4"
    assert "decoy" in heads["increase"]
    assert set(table["unit"].dropna()) == {"nats", "%", "heads"}


CLAIMS = {
    "bakalova2025": [False],  # texts reach the labels of their own demonstrations only
    "cho2024": [None, None],
    "feucht2025": [False, False],  # it copies no random tokens, and labels without words' concepts
    "halawi2023": [False, False],
    "hendel2023": [False],  # the vector makes labels likely, not the right one
    "lu2022": [False],
    "mcdougall2023": [False, False],  # what it predicts was always shown: no reason to suppress it
    "min2022": [None, False],  # with labels that say nothing, random ones teach nothing
    "olsson2022": [False],
    "todd2024": [False],  # the vector has the labels, but not which is whose
    "wang2023": [True, None],  # texts reach labels in the first third of icl-mini's layers
    "yang2025": [True, False],
    "yin2025": [None],
    "zhao2021": [False],
}
"""Script -> whether its claims hold on icl-mini, which learns which class has which label; None is
not checked.
"""


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_of_the_literature_holds_where_it_must(claim, load_once, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    table = import_module(claim).main(["-n", "24", "--out", str(tmp_path)])
    assert table.columns.tolist() == [*COLUMNS, "claim", "holds"]
    verdicts = table["holds"][table["claim"] != ""].tolist()
    for verdict, is_expected in zip(verdicts, CLAIMS[claim], strict=True):
        assert is_expected is None or (verdict == "holds") == is_expected, table
    settings = json.loads(next(tmp_path.rglob(f"{claim}.json")).read_text())
    assert settings["weights"]


PLANTED_CLAIMS = [
    ("untrained", "bakalova2025", ["not shown"]),
    ("two-tower", "bakalova2025", ["does not hold"]),  # each demonstration is read alone
    ("untrained", "wang2023", ["not shown", "not shown"]),
    ("last-label", "wang2023", ["not shown", "not shown"]),
    ("two-tower", "wang2023", ["holds", "holds"]),
    ("two-tower", "yin2025", ["does not hold"]),  # without induction heads all answers are lost
    ("two-tower", "halawi2023", ["holds", "holds"]),
    ("lookup", "lu2022", ["not shown"]),  # orders differ, but none is better than chance
    ("two-tower", "cho2024", ["holds", "holds"]),
    ("last-label", "cho2024", ["not shown", "not shown"]),
    ("suppressor", "mcdougall2023", ["holds", "holds"]),
    # Neurons make the labels likely, and the heads that write most about them lower them.
    ("suppressor", "yang2025", ["does not hold", "not shown"]),
]
"""A planted model, a script, and whether its claims hold there."""


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(("kind", "claim", "expected"), PLANTED_CLAIMS)
def test_a_claim_holds_on_planted_models_as_they_were_made(
    kind, claim, expected, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    planted = build(kind, tmp_path / kind, seed=0)
    options = ["--model", str(planted.folder), "--path", str(planted.words), "--name", kind]
    options += ["-n", "24", "--heads", "4", "--out", str(tmp_path / "out")]
    table = import_module(claim).main(options)
    assert table["holds"][table["claim"] != ""].tolist() == expected, table


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.1, 0.5), (0.2, 0.3)], "holds"),
        ([(0.1, 0.5), (-0.1, 0.3)], "not shown"),
        ([(0.1, 0.5), (-0.4, -0.3)], "does not hold"),
        ([(float("nan"), float("nan"))], "not shown"),
    ],
)
def test_a_claim_holds_if_it_exceeds_all_its_controls(intervals, verdict, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    rows = [{"quantity": 0.3, "low": low, "high": high} for low, high in intervals]
    claims = import_module("claims")
    assert claims.verdict(rows) == verdict
    assert claims.verdict([*rows, {"note": "no classes"}]) == "not measured"


def test_a_claim_stands_in_the_row_of_the_control_that_decides(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    study = SimpleNamespace(model_name="m", task_name="t")
    table = import_module("claims").Table(study)
    for measure, low in (("earlier", -9.0), ("easy", 2.0), ("hard", 0.1), ("hardest", -0.1)):
        table.add_row(measure, quantity=3.0, control=1.0, low=low, high=3.0)
        if measure == "hard":
            table.state("Beats two controls", n_rows=2)
    table.state("Beats three controls", n_rows=2)
    stated = dict(zip(table.to_frame()["measure"], table.to_frame()["holds"], strict=True))
    assert stated == {"earlier": "", "easy": "", "hard": "holds", "hardest": "not shown"}


def test_the_anchor_claim_cuts_labels_or_as_many_other_tokens(icl_mini, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    anchors = import_module("wang2023")
    batch = il.tokenize(icl_mini, il.load_task("animal-country", n=2))
    labels = batch.label_positions.tolist()
    last = batch.last.tolist()
    cut = anchors.cut_edges(batch, "labels to last", anchors.NO_DRAW, seed=0)
    for row in range(2):
        assert cut[row].nonzero().tolist() == [[last[row], label] for label in labels[row]]
    cut = anchors.cut_edges(batch, "texts to labels", anchors.NO_DRAW, seed=0)
    for row in range(2):
        assert sorted(set(cut[row].nonzero()[:, 0].tolist())) == labels[row]
        assert all(cut[row, label].sum() == label - 1 for label in labels[row])
    draws = [anchors.cut_edges(batch, "labels to last", draw, seed=0) for draw in range(5)]
    for drawn in draws:
        assert drawn.sum((1, 2)).tolist() == [len(of_row) for of_row in labels]
        assert not (drawn & anchors.cut_edges(batch, "labels to last", -1, seed=0)).any()
    assert len({tuple(drawn.flatten().tolist()) for drawn in draws}) > 1


def test_concept_copying_is_measured_with_one_output_of_one_head(icl_mini, monkeypatch):
    """It is what changes if z of this head, at the token before the word, comes from the run in
    which the word was shown; done by hand with hooks.
    """
    monkeypatch.syspath_prepend(EXPERIMENTS / "literature")
    copying = import_module("feucht2025")
    heads = [il.Head.from_index(index, 6) for index in range(48)]
    study = SimpleNamespace(model=icl_mini, seed=0, run=lambda name: None, all_heads=lambda: heads)
    word = copying.words_of_several_tokens(study)[0]
    repeated = copying.shown_twice(study, [word], 1, "name").tokens
    other = copying.shown_twice(study, [word], 1, "name", is_first_other=True).tokens
    n_first = copying.N_BEFORE + len(word)
    assert repeated[0, n_first:].tolist() == other[0, n_first:].tolist()
    assert repeated[0, :n_first].tolist() == [*repeated[0, n_first:-1].tolist(), *word]
    assert not set(other[0, :n_first].tolist()) & set(word)
    gains = copying.copying_gains(study, "name", [word], 1)[0]
    head = il.Head.from_index(int(gains.abs().argmax()), 6)
    _, cache = icl_mini.run_with_cache(repeated)

    def patched(z, hook):
        z[:, -2, head.head] = cache[hook.name][:, -2, head.head]

    hooks = [(f"blocks.{head.layer}.attn.hook_z", patched)]
    before = icl_mini(other)[0, -1].softmax(-1)[word[1]]
    after = icl_mini.run_with_hooks(other, fwd_hooks=hooks)[0, -1].softmax(-1)[word[1]]
    assert float(gains[head]) == pytest.approx(float(after - before), rel=0.02)


def test_every_claim_is_listed_with_its_source():
    readme = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    scripts = {path.stem for path in (EXPERIMENTS / "literature").glob("*.py")} - {"claims"}
    assert scripts == set(CLAIMS) == set(publish.CLAIMS)
    for script in scripts:
        assert f"`{script}.py` | arXiv " in readme


def test_the_published_curve_stands_at_the_numbers_of_heads_removed():
    """Numbers of a published table are texts, which would be drawn as places 0, 1, 2, ..."""
    table = publish.read(publish.DOCS / "data" / "ablation.csv")
    figure = ablation.draw(table.query("model == 'smollm2-135m'"))
    for axes in figure.axes:
        for line in axes.lines[:2]:
            assert line.get_xdata().tolist() == list(ablation.COUNTS)


def test_a_figure_says_that_edges_carry_nothing():
    """Their shares are not defined then, and a logarithmic axis of none would be an error."""
    table = publish.read(publish.DOCS / "data" / "circuit.csv").query("model == 'icl-mini'")
    one_task = table[table["task"] == table["task"].iloc[0]]
    figure = circuit.draw(one_task)
    assert figure.axes[1].get_xscale() == "log"
    assert not figure.axes[1].texts
    figure = circuit.draw(one_task[~one_task["measure"].str.startswith(("kept", "CPR"))])
    figure.savefig(io.BytesIO())
    (text,) = figure.axes[1].texts
    assert text.get_text() == "all edges carry nothing\nthat differs from zero"


def test_numbers_on_heat_maps_differ_from_their_cells():
    table = publish.read(publish.DOCS / "data" / "shared-heads.csv")
    figure = shared_heads.draw(table.query("model not in @publish.SMALL_MODELS"))
    for axes in figure.axes:
        (image,) = axes.images
        is_missing = image.get_array().mask
        assert 0 < len(axes.texts) == (~is_missing).sum()
        for text in axes.texts:
            column, row = text.get_position()
            cell = np.mean(image.to_rgba(image.get_array())[int(row), int(column), :3])
            assert abs(np.mean(to_rgb(text.get_color())) - cell) > 0.35, text.get_text()
