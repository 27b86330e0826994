"""The documentation's pages of results, on made-up results: verdicts on old models beside those on new ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import icl_lens as il
from experiments import catalogue
from experiments.lab.competence import Competence
from experiments.lab.experiment import EVERYWHERE
from experiments.lab.old_models import changes, keep_verdicts, old_beside_new, read_verdicts
from experiments.lab.pages import write_pages
from experiments.lab.report import report_page
from experiments.lab.results import Result
from experiments.lab.verdict import Outcome, Verdict

ORDER = ("layers", "order", "imbalance")


def verdict(outcome: Outcome, effect: float = 0.25) -> Verdict:
    return Verdict(outcome, effect, effect - 0.125, effect + 0.125, "nats", "a reason", 0.001)


def made(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "id": "order",
        "title": "A title",
        "source": "Figure 9",
        "claim": "A claim",
        "criterion": "A criterion",
        "paper": None,
        "model": "icl-mini",
        "task": "sentiment-number",
        "configuration": {"n": 10},
        "verdict": verdict("supported"),
        "contrast": None,
        "heads": (),
        "competence": Competence(0.9, 0.8, 1.0, 0.5),
        "versions": {"torch": "1"},
    }
    return Result(**(fields | changes))


def written(out: Path, *results: Result) -> Path:
    """A folder of results with figures."""
    for result in results:
        folder = out / result.model / result.task / result.id
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(result.to_json())
        for name in ("figure", "figure-contrast"):
            Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
    return out


def old(id: str, outcome: Outcome, model: str = "icl-mini", **further: Any) -> dict[str, Any]:
    verdict = {"outcome": outcome, "effect": 0.5, "low": 0.25, "high": 0.75, "unit": "nats", "reason": "long"}
    return {"id": id, "model": model, "task": "sentiment-number", **verdict, **further}


def test_the_index_shows_old_verdicts_beside_new_ones_and_says_how_many_changed(tmp_path: Path) -> None:
    out = written(
        tmp_path / "out",
        made(id="order", verdict=verdict("supported"), contrast=verdict("not supported")),
        made(id="layers", verdict=verdict("undecided")),
        made(id="imbalance", verdict=verdict("supported"), contrast=verdict("supported")),
    )
    pages = tmp_path / "pages"
    pages.mkdir()
    rows = [old("order", "supported"), old("layers", "not supported")]
    (pages / "old-models.json").write_text(json.dumps(rows))
    write_pages(out, pages, task="sentiment-number", order=ORDER)
    index = (pages / "index.md").read_text()
    assert index.index("## Located heads") < index.index("## Old models beside new ones")
    table = index[index.index("## Old models") :]
    cells = {
        row.split(" | ")[0].removeprefix("| "): row.removesuffix(" |").split(" | ")[2:]
        for row in re.findall(r"^\| \w+ \| sentiment.*", table, re.MULTILINE)
    }
    assert list(cells) == list(ORDER)
    shown = {name: [re.sub("<br>.*", "", cell) for cell in row] for name, row in cells.items()}
    # An old verdict by increase says nothing of one by contrast.
    assert shown["order"] == ["● supported", "● supported", "✕ not supported"]
    assert shown["layers"] == ["✕ not supported", "**○ undecided**", "same"]
    assert shown["imbalance"] == ["–", "● supported", "● supported"]
    assert "0.5 [0.25, 0.75] nats" in cells["order"][0]
    assert "Of 2 verdicts on the same claim, name, task and ranking, 1 are the same and 1 are others" in table
    assert "earlier rules" in table
    assert json.loads((pages / "old-models.json").read_text()) == rows, "it is there for the next time"


def test_results_of_other_models_stay_out(tmp_path: Path) -> None:
    out = written(tmp_path / "out", made(), made(model="another"))
    pages = tmp_path / "pages"
    write_pages(out, pages, task="sentiment-number", order=ORDER, models=[made().model])
    assert {row["model"] for row in json.loads((pages / "results.json").read_text())} == {made().model}
    with pytest.raises(il.InputError, match="no results of third"):
        write_pages(out, pages, task="sentiment-number", order=ORDER, models=["third"])


def test_without_old_verdicts_there_is_no_such_table_and_other_files_go(tmp_path: Path) -> None:
    out, pages = written(tmp_path / "out", made()), tmp_path / "pages"
    (pages / "figures").mkdir(parents=True)
    (pages / "seeds.md").write_text("# Seeds")
    (pages / "gone.md").write_text("of an experiment that is gone")
    (pages / "figures" / "gone.png").write_text("")
    write_pages(out, pages, task="sentiment-number", order=ORDER)
    index = (pages / "index.md").read_text()
    assert "Old models" not in index
    assert not (pages / "gone.md").exists()
    assert not (pages / "figures" / "gone.png").exists()
    assert (pages / "seeds.md").read_text() == "# Seeds", "another command's page stays"
    assert "[training seeds](seeds.md)" in index
    assert "order\nseeds\n```" in index, "and is in the table of contents"


def test_a_damaged_file_of_old_verdicts_is_refused_before_a_page_is_lost(tmp_path: Path) -> None:
    out, pages = written(tmp_path / "out", made()), tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("the old index")
    for damaged in ("[{", '[{"id": 1}]', "{}", json.dumps([old("order", "maybe")]), "7"):  # type: ignore[arg-type]
        (pages / "old-models.json").write_text(damaged)
        with pytest.raises(il.InputError, match=r"old-models\.json' cannot be read as verdicts"):
            write_pages(out, pages, task="sentiment-number", order=ORDER)
    assert (pages / "index.md").read_text() == "the old index"


def test_verdicts_that_are_kept_can_be_compared_with_themselves(tmp_path: Path) -> None:
    results = [old("order", "supported", by="increase"), old("order", "undecided", by="contrast")]
    results.append(old("layers", "supported", by="increase", low=None))
    (tmp_path / "results.json").write_text(json.dumps(results))
    keep_verdicts(tmp_path / "results.json", tmp_path / "old.json")
    kept = read_verdicts(tmp_path / "old.json")
    assert "reason" not in (tmp_path / "old.json").read_text()
    assert changes(kept, results).startswith("Of 3 verdicts")
    assert "3 are the same and 0 are others" in changes(kept, results)
    table = "\n".join(old_beside_new(kept, results, order=ORDER))
    assert "**" not in table
    assert table.index("| layers") < table.index("| order"), "in the order of the paper"
    assert "● supported | ● supported | same" in table, "no interval, no effect"


@pytest.mark.parametrize("name", catalogue.IDS)
def test_every_experiment_says_where_it_departs_from_the_paper(name: str) -> None:
    departs = catalogue.find(name).departs
    assert 60 < len(departs) < 700, "one or two plain sentences, or a few"
    assert re.search(r"[.!)]$", departs)
    assert "paper" in departs or "published version" in departs or "Appendix" in departs or "Section" in departs


def test_pages_and_report_say_where_a_result_departs_from_the_paper(tmp_path: Path) -> None:
    result = made(departs="The paper has other heads <of its own>.")
    out, pages = written(tmp_path / "out", result), tmp_path / "pages"
    write_pages(out, pages, task="sentiment-number", order=ORDER)
    said = "Departs from the paper\n: The paper has other heads <of its own>."
    assert said in (pages / "order.md").read_text()
    assert EVERYWHERE in (pages / "index.md").read_text()
    report = report_page([(result, {"increase": b""})])
    assert "<dt>Departs from the paper</dt><dd>The paper has other heads &lt;of its own&gt;.</dd>" in report
    assert "which the paper" in report


def test_results_from_before_there_was_that_caption_are_read(tmp_path: Path) -> None:
    raw = json.loads(made().to_json())
    del raw["departs"]
    (tmp_path / "result.json").write_text(json.dumps(raw))
    assert Result.read(tmp_path) == made()


def test_of_two_rankings_each_is_compared_with_its_own() -> None:
    before = [old("order", "supported", by="increase"), old("order", "undecided", by="contrast")]
    now = [old("order", "supported", by="increase"), old("order", "supported", by="contrast")]
    assert "1 are the same and 1 are others; 0 have no old one" in changes(before, now)
    *_, row = old_beside_new(before, now, order=ORDER)
    assert row.count("**") == 2
    assert row.endswith("| **● supported**<br>0.5 [0.25, 0.75] nats |")


def test_the_rules_name_every_claim_of_which_something_was_chosen_late() -> None:
    rules = (Path(__file__).parents[1] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"There are exceptions:(.*?)have rules of which some part was chosen", rules, flags=re.DOTALL)
    named = set(re.split(r",\s+|\s+and\s+", said.strip()))
    assert named == {name for name in catalogue.IDS if catalogue.find(name).chosen}
