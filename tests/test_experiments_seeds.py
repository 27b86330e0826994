"""Verdicts across training seeds, on made-up results: what flips, what is unsure, and the page that says so."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_experiments_pages import made, verdict, written

import icl_lens as il
from experiments.__main__ import app
from experiments.lab.pages import write_pages
from experiments.lab.results import Result
from experiments.lab.seeds import kind, seeds_page, summary, trained, write_seeds
from experiments.lab.study import StudySettings, folder_of
from experiments.lab.verdict import Outcome
from experiments.lab.work import Work
from icl_lens.errors import InputError

ORDER = ("layers", "order", "imbalance")
THREE = ("m-0", "m-1", "m-2")


def test_a_claim_flips_only_if_it_is_supported_and_not_supported() -> None:
    yes, no, unsure = "supported", "not supported", "undecided"
    assert kind([yes, yes, yes]) == "same"
    assert kind([unsure, unsure]) == "same"
    assert kind([yes, no, yes]) == "flips"
    assert kind([yes, no, unsure]) == "flips"
    assert kind([yes, unsure, yes]) == "unsure"
    assert kind([no]) == "same"
    assert kind([]) == "none"
    assert summary([yes, yes, yes]) == "● supported, 3 of 3"
    assert summary([yes, no, yes]) == "**flips**: ● 2, ✕ 1"
    assert summary([no, unsure, unsure]) == "unsure: ✕ 1, ○ 2"
    assert summary([]) == "–"


def of_seeds(id: str, increase: list[Outcome], contrast: list[Outcome] | None = None) -> list[Result]:
    """One result for each of THREE."""
    return [
        made(id=id, model=model, verdict=verdict(one), contrast=None if contrast is None else verdict(contrast[i]))
        for i, (model, one) in enumerate(zip(THREE, increase, strict=True))
    ]


def rows(page: str) -> dict[tuple[str, str], list[str]]:
    """Cells of the tables' rows by experiment and ranking, without effects; the overview's first."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in page.splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        name = re.sub(r"\[(.*?)\].*", r"\1", cells[0])
        if line.startswith("| ") and name in ORDER:
            found.setdefault((name, cells[1]), []).extend(re.sub("<br>.*", "", cell) for cell in cells[2:])
    return found


def test_the_page_shows_every_verdict_and_what_flips() -> None:
    every = [
        *of_seeds("layers", ["supported"] * 3),
        *of_seeds("order", ["supported", "not supported", "supported"], ["undecided", "supported", "supported"]),
    ]
    results = {("GPT-2", model): [one for one in every if one.model == model] for model in THREE}
    results["Llama", "l-0"] = [
        made(id="order", model="l-0", verdict=verdict("undecided"), contrast=verdict("supported"))
    ]
    page = seeds_page(results, n=1000, task="sentiment-number", order=ORDER)
    found = rows(page)
    assert list(found) == [("layers", ""), ("order", "by increase"), ("order", "by contrast")]
    overview, gpt2, llama = slice(0, 2), slice(2, 6), slice(6, 8)
    row = found["order", "by increase"]
    assert row[overview] == ["**flips**: ● 2, ✕ 1", "○ undecided, 1 of 1"]
    assert row[gpt2] == ["● supported", "✕ not supported", "● supported", "**flips**: ● 2, ✕ 1"]
    assert row[llama] == ["○ undecided", "○ undecided, 1 of 1"]
    assert found["order", "by contrast"][overview] == ["unsure: ● 2, ○ 1", "● supported, 1 of 1"]
    assert found["layers", ""] == ["● supported, 3 of 3", "–", *["● supported"] * 3, "● supported, 3 of 3", "–", "–"]
    assert "Of 5 claims, by architecture and ranking of heads, 3 have the same verdict" in page
    assert "1 flip and 1 are unsure" in page
    assert "11 verdicts are given" in page
    assert "90.0% [80.0%, 100.0%]" in page, "what each model can do"
    assert "with, 1,000 prompts (m-0, m-1, m-2, l-0: 10) of sentiment-number each" in page, "what was asked"
    assert "with, 10 prompts of sentiment-number each" in seeds_page(
        results, n=10, task="sentiment-number", order=ORDER
    )


def test_only_results_of_these_models_and_prompts_are_on_the_page(tmp_path: Path) -> None:
    for name in (*THREE, "other"):
        (tmp_path / name).mkdir()
    out = written(
        tmp_path / "out",
        *of_seeds("order", ["supported", "not supported", "supported"]),
        made(id="order", model="other"),
        made(id="order", model="m-0", task="animal-country", verdict=verdict("undecided")),
        made(id="imbalance", model="m-0"),
    )
    named = trained([f"GPT-2={','.join(str(tmp_path / name) for name in THREE)}"])
    page = tmp_path / "pages" / "seeds.md"
    page.parent.mkdir()
    write_seeds(named, out, page, n=10, task="sentiment-number", order=("layers", "order"))
    assert list(rows(page.read_text())) == [("order", "")]
    kept = json.loads((page.parent / "seeds.json").read_text())
    assert [(row["architecture"], row["model"], row["outcome"]) for row in kept] == [
        ("GPT-2", "m-0", "supported"),
        ("GPT-2", "m-1", "not supported"),
        ("GPT-2", "m-2", "supported"),
    ]
    write_pages(out, page.parent, task="sentiment-number", order=ORDER)
    assert page.exists()
    assert (page.parent / "seeds.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["GPT-2"], "not of the form NAME=FOLDER"),
        (["=a"], "not of the form"),
        (["GPT-2=a,"], "not of the form"),
        (["GPT-2=a,gone"], "there is no folder 'gone'"),
        (["GPT-2=a", "GPT-2=b"], "a name is given twice"),
        (["GPT-2=a,b/a"], "two folders are called 'a'"),
        (["GPT-2=a", "Llama=a"], "two folders are called 'a'"),
    ],
)
def test_what_is_no_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "b/a"):
        (tmp_path / name).mkdir()
    with pytest.raises(il.InputError, match=said):
        trained(given)


def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: dict[str, str]) -> list[tuple[str, int]]:
    """The command with a runner that writes made-up results: the models that it was asked for, and what was to come."""
    asked: list[tuple[str, int]] = []

    def run(experiments: Any, settings: Any, *, out: Path, work: Work, **options: Any) -> Any:
        asked.append((settings.model, work.later))
        name = Path(settings.model).name
        if not (out / name).exists():
            written(out, *(made(id=one.id, model=name) for one in experiments if one.id not in failed))
        return SimpleNamespace(failed=failed)

    monkeypatch.setattr("experiments.lab.runner.run", run)
    monkeypatch.chdir(tmp_path)
    for name in THREE:
        (tmp_path / name).mkdir(exist_ok=True)
    options = ["--only", "order", "--only", "imbalance", "--n", "40", "--page", "seeds.md", "--out", "out"]
    app(["seeds", "GPT-2=m-0,m-1", "Llama=m-2", *options], standalone_mode=False)
    return asked


def test_the_command_runs_every_model_under_one_bar_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(tmp_path, monkeypatch, {}) == [("m-0", 2), ("m-1", 1), ("m-2", 0)]
    page = (tmp_path / "seeds.md").read_text()
    assert "| experiment | heads | GPT-2 | Llama |" in page
    assert "40 prompts" in page
    assert list(rows(page)) == [("order", ""), ("imbalance", "")]


def test_the_page_is_written_also_where_an_experiment_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="3 of 6 experiments could not be run: imbalance"):
        ran(tmp_path, monkeypatch, {"imbalance": "no neurons"})
    assert list(rows((tmp_path / "seeds.md").read_text())) == [("order", "")]


def test_work_of_later_runs_is_in_the_bar_from_the_start(no_type_checks: None) -> None:
    """Two runs of 100 prompts in the shared pass: 200 in all, also after the first is done."""
    settings = SimpleNamespace(n=100)
    view = SimpleNamespace(n_layers=2, n_heads=2)
    study: Any = SimpleNamespace(settings=settings, test=range(50), view=view, own=lambda variant: variant)
    work = Work()
    work.later = 1
    work.expect(study, [SimpleNamespace(variant="a")], [])  # type: ignore[list-item]
    assert work.total == 200
    work.begin("shared")
    work("all prompts", 100, computed=True)
    work.end()
    assert (work.done, work.total) == (100, 200)
    work.later = 0
    work.expect(study, [SimpleNamespace(variant="a")], [])  # type: ignore[list-item]
    assert work.total == 200


def test_a_bundled_model_goes_by_its_name(tmp_path: Path) -> None:
    """Its results are those that the other commands make, and lie in the same folder."""
    (tmp_path / "gpt2-1").mkdir()
    (one,) = trained([f"GPT-2=icl-mini,{tmp_path / 'gpt2-1'}"])
    first, second = one.settings(n=20, task="sentiment-number")
    assert first == StudySettings(model="icl-mini", n=20)
    assert str(folder_of(second).parent) == "gpt2-1"
