"""The runner on tiny random models: folders, resuming, other configurations, bad input, the gate, and the report."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import icl_lens as il
from experiments import catalogue
from experiments.lab.competence import Competence
from experiments.lab.controls import Comparison
from experiments.lab.experiment import NO_HEADS
from experiments.lab.given import Given
from experiments.lab.located import LocatedHead
from experiments.lab.pages import write_pages
from experiments.lab.passes import columns_of, tensors_from
from experiments.lab.reductions import class_attention, head_contrasts, head_increases, is_true_label
from experiments.lab.report import report_page, write_report
from experiments.lab.results import Result, read_all
from experiments.lab.runner import fingerprint
from experiments.lab.runner import run as run_experiments
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import Verdict

FILES = {"table.parquet", "table.csv", "figure.png", "figure.pdf", "result.json"}
BOTH = FILES | {"figure-contrast.png", "figure-contrast.pdf"}
CAPTION = ["id", "title", "source", "claim", "criterion", "paper", "about", "chosen", "departs"]
ROOT = Path(__file__).parent.parent
VERDICTS = sum(len(catalogue.find(name).rankings) for name in catalogue.IDS)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word list that the tiny tokenizer knows."""
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
        "animal": ["cat", "dog", "w50", "w51", "w52", "w53", "w54"],
        "country": ["France", "Spain", "w60", "w61", "w62", "w63", "w64"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return str(path)


@pytest.fixture(scope="module")
def settings(words: str) -> StudySettings:
    return StudySettings(model="tiny", n=24, path=words)


@pytest.fixture(scope="module")
def study(gpt2: Any, settings: StudySettings) -> Study:
    return Study(gpt2, settings)


@pytest.fixture(scope="module")
def everything(gpt2: Any, settings: StudySettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All experiments, run once on a tiny GPT-2."""
    out = tmp_path_factory.mktemp("results")
    ran = run_experiments([*map(catalogue.find, catalogue.IDS)], settings, load=lambda name: gpt2, out=out)
    assert not ran.failed
    return out


def test_all_experiments_write_their_folders(everything: Path) -> None:
    for name in catalogue.IDS:
        folder = everything / "tiny" / "sentiment-number" / name
        one = len(catalogue.find(name).rankings) == 1
        assert {path.name for path in folder.iterdir()} - {"seconds.json"} == (FILES if one else BOTH)
        table = pd.read_parquet(folder / "table.parquet")
        assert {*table["by"]} == ({"increase"} if one else {"increase", "contrast"})
        assert "query" in table or "prompt" not in table
        assert len(table) == len(pd.read_csv(folder / "table.csv")) > 0
        assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_no_claim_is_supported_for_random_weights(everything: Path) -> None:
    verdicts = {(result.id, by): one for _, result in read_all(everything) for by, one in result.verdicts.items()}
    assert {name for name, _ in verdicts} == set(catalogue.IDS)
    outcomes = {key: one.outcome for key, one in verdicts.items()}
    assert "supported" not in outcomes.values(), outcomes
    assert len(outcomes) == VERDICTS


def test_result_says_what_it_was_made_with(everything: Path, gpt2: Any) -> None:
    raw = json.loads((everything / "tiny" / "sentiment-number" / "label-rank" / "result.json").read_text())
    assert list(raw)[:11] == [*CAPTION, "model", "task"]
    assert raw["configuration"]["n"] == 24
    assert raw["configuration"]["controls"] == 20
    assert raw["configuration"]["weights"] == fingerprint(gpt2)
    assert {"torch", "transformer-lens", "python"} <= set(raw["versions"])
    assert {"increase", "contrast"} == {one["ranked_by"] for one in raw["heads"]}
    assert raw["verdict"]["low"] <= raw["verdict"]["effect"] <= raw["verdict"]["high"]


def run(model: Any, settings: StudySettings, out: Path, *ids: str, **options: Any) -> Any:
    return run_experiments([*map(catalogue.find, ids)], settings, load=lambda name: model, out=out, **options)


def test_what_is_done_is_not_computed_again(gpt2: Any, settings: StudySettings, tmp_path: Path) -> None:
    assert [result.id for result in run(gpt2, settings, tmp_path, "order").results] == ["order"]
    result = tmp_path / "tiny" / "sentiment-number" / "order" / "result.json"
    before = result.stat().st_mtime_ns
    again = run(gpt2, settings, tmp_path, "order", "imbalance")
    assert again.done == ["order"]
    assert [one.id for one in again.results] == ["imbalance"]
    assert result.stat().st_mtime_ns == before


def test_an_unfinished_result_is_computed_again(gpt2: Any, settings: StudySettings, tmp_path: Path) -> None:
    run(gpt2, settings, tmp_path, "order")
    (tmp_path / "tiny" / "sentiment-number" / "order" / "result.json").unlink()
    assert not run(gpt2, settings, tmp_path, "order").done


def test_another_configuration_is_never_overwritten_silently(
    gpt2: Any, settings: StudySettings, tmp_path: Path
) -> None:
    run(gpt2, settings, tmp_path, "order")
    result = tmp_path / "tiny" / "sentiment-number" / "order" / "result.json"
    before = result.read_bytes()
    other = StudySettings(model="tiny", n=26, path=settings.path)
    with pytest.raises(il.InputError, match=r"n 24 there, 26 now.*--overwrite"):
        run(gpt2, other, tmp_path, "imbalance", "order")
    assert result.read_bytes() == before
    assert not (tmp_path / "tiny" / "sentiment-number" / "imbalance").exists(), "checked before anything is computed"
    assert run(gpt2, other, tmp_path, "order", overwrite=True).results
    assert json.loads(result.read_text())["configuration"]["n"] == 26


def test_other_weights_under_the_same_name_are_another_configuration(
    gpt2: Any, load_tiny: Callable[..., Any], settings: StudySettings, tmp_path: Path
) -> None:
    run(gpt2, settings, tmp_path, "order")
    with pytest.raises(il.InputError, match="weights"):
        run(load_tiny("llama_gqa"), settings, tmp_path, "order")


def test_an_experiment_that_fails_does_not_stop_the_others(
    gpt2: Any, settings: StudySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise il.InputError("no neurons here")

    monkeypatch.setattr("experiments.claims.ffn.top_neurons", refuse)
    ran = run(gpt2, settings, tmp_path, "ffn", "order")
    assert ran.failed == {"ffn": "no neurons here"}
    assert [result.id for result in ran.results] == ["order"]


@pytest.mark.parametrize("family", ["llama_gqa", "gptj"])
def test_other_families_run(
    family: str, load_tiny: Callable[..., Any], settings: StudySettings, tmp_path: Path
) -> None:
    ran = run(load_tiny(family), settings, tmp_path, "vocabulary", "attention-vs-increase", "ffn")
    assert not ran.failed
    assert len(ran.results) == 3


# The study


def test_halves_split_the_prompts(study: Study) -> None:
    """Into halves that ask about other texts."""
    choose, test = (half.tolist() for half in study.halves)
    assert sorted(choose + test) == list(range(24))
    assert min(len(choose), len(test)) >= 8
    asked = [{study.prompts()[row].query for row in half} for half in (choose, test)]
    assert not asked[0] & asked[1]


def test_located_heads_are_chosen_on_their_half_only(study: Study) -> None:
    acts = il.capture(study.model, study.batch()[study.halves[0]])
    top = il.top_heads(acts, acts.batch.answer_tokens, k=3)
    assert study.located(3) == top.heads


def test_controls_are_of_the_same_layers_and_none_is_chosen(study: Study) -> None:
    heads = [il.Head(0, 1), il.Head(2, 0), il.Head(2, 3)]
    draws = study.controls(heads, 50)
    assert len(draws) == 50
    for drawn in draws:
        assert [head.layer for head in drawn] == [0, 2, 2]
        assert len({*drawn, *heads}) == 6
    assert len({tuple(drawn) for drawn in draws}) == 3 * 2


def test_controls_of_a_layer_without_free_heads_come_from_the_nearest(study: Study) -> None:
    heads = [il.Head(0, head) for head in range(4)]
    for drawn in study.controls(heads, 10):
        assert {head.layer for head in drawn} == {1}
        assert len({*drawn}) == 4


def test_all_other_heads_of_the_layers_stand_beside_located_ones(study: Study) -> None:
    """Three of four heads located: the one left; none left: those of the nearest layer; many: as many as are wanted."""
    three = [il.Head(1, 0), il.Head(1, 1), il.Head(1, 2), il.Head(2, 0)]
    compared = Comparison.of(study, three, 20)
    assert compared.controls == {1: (il.Head(1, 3),), 2: (il.Head(2, 1), il.Head(2, 2), il.Head(2, 3))}
    assert compared.heads == (*three, il.Head(1, 3), *compared.controls[2])
    layer = [il.Head(0, head) for head in range(4)]
    assert Comparison.of(study, layer, 20).controls == {0: tuple(il.Head(1, head) for head in range(4))}
    assert len(Comparison.of(study, three, 2).controls[2]) == 2
    assert Comparison.of(study, three, 2) == Comparison.of(study, three, 2)
    with pytest.raises(il.InputError, match="none is left to compare with"):
        Comparison.of(study, study.view.heads(), 20)
    frame = pd.concat(compared.rows(lambda head: pd.DataFrame({"layer of its own": [head.layer]})))
    assert frame["group"].tolist() == ["located"] * 4 + ["random"] * 4
    assert frame["layer"].tolist() == [1, 1, 1, 2, 1, 2, 2, 2]


def test_prompts_that_ask_about_the_same_word_have_the_same_number(study: Study) -> None:
    numbers = study.queries()
    for row, other in [(0, 1), (3, 9), (5, 5)]:
        same = study.prompts()[row].query == study.prompts()[other].query
        assert (numbers[row] == numbers[other]) == same
    both = study.both_queries(study.test)
    assert len(both["query"]) == len(both["other"]) == len(study.test)


def test_both_rankings_read_one_study(study: Study) -> None:
    ranked = study.ranked_by("contrast")
    assert (ranked.ranking, study.ranking) == ("contrast", "increase")
    assert ranked.get(head_contrasts) is study.get(head_contrasts)
    assert torch.equal(ranked.rises(), study.get(head_contrasts))
    answer = study.batch().answer_tokens
    acts = il.capture(study.model, study.batch())
    expected = il.head_log_prob_increase(acts, answer, against=study.batch().other_label_tokens)
    torch.testing.assert_close(ranked.rises(), expected)


def test_needs_that_depend_on_the_task_are_told(settings: StudySettings) -> None:
    tasks = {need.variant.task for need in catalogue.find("head-overlap").all_needs(settings)}
    assert {"sentiment-number", "animal-country"} < tasks
    variants = [need.variant for need in catalogue.find("order").all_needs(settings)]
    assert {*variants} == {Variant(layout, swapped) for layout in ("order", "reorder") for swapped in (False, True)}
    reductions = {need.reduction for need in catalogue.find("order").all_needs(settings)}
    assert {head_increases, head_contrasts} < reductions
    assert head_contrasts not in {need.reduction for need in catalogue.find("accuracy").all_needs(settings)}


def test_one_pass_serves_all_reductions_and_pieces_join_in_order(
    gpt2: Any, settings: StudySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Study(gpt2, settings)
    expected = class_attention(il.capture(gpt2, whole.batch()))
    monkeypatch.setattr("experiments.lab.study.PASS_BYTES", 30_000)
    captured = []
    capture = il.capture
    monkeypatch.setattr("icl_lens.capture", lambda model, batch: captured.append(len(batch)) or capture(model, batch))
    pieces = Study(gpt2, settings)
    pieces.collect([Need(Variant(), head_increases), Need(Variant(), class_attention)])
    assert len(captured) > 3
    assert sum(captured) == settings.n
    torch.testing.assert_close(pieces.get(class_attention), expected)
    pieces.get(head_increases, Variant(task="sentiment-number"))
    assert sum(captured) == settings.n, "the task under study is the same variant, named or not"


def test_variants_are_the_same_texts(study: Study) -> None:
    plain, swapped, reordered, short = (
        study.prompts(variant)
        for variant in (Variant(), Variant(swapped=True), Variant("reorder"), Variant("imbalanced"))
    )
    for a, b, c, d in zip(plain, swapped, reordered, short, strict=True):
        assert a.query == b.query == c.query == d.query
        assert (a.answer, b.answer) == ("foo", "bar")
        assert sorted(one.text for one in a.demonstrations) == sorted(one.text for one in c.demonstrations)
        assert a.demonstrations[:-1] == d.demonstrations
    assert study.batch().labels == study.batch(Variant(swapped=True)).labels


def test_class_attention_sums_over_the_class(study: Study) -> None:
    acts = il.capture(study.model, study.batch()[:3])
    by_label = il.attention_by_label(acts)
    foo = acts.batch.labels.index("foo")
    torch.testing.assert_close(class_attention(acts)[..., 0], by_label[..., foo])
    torch.testing.assert_close(class_attention(acts)[..., 1], by_label[..., 1 - foo])
    assert is_true_label(acts.batch).sum(-1).tolist() == [2, 2, 2]


# Neurons


def test_best_neurons_are_those_of_an_exhaustive_search(study: Study) -> None:
    from experiments.claims.ffn import top_neurons

    rows = study.halves[0]
    acts = il.capture(study.model, study.batch()[rows])
    targets = acts.batch.answer_tokens
    exact = torch.stack([il.neuron_log_prob_increase(acts, targets, layer).mean(0) for layer in range(3)])
    best = exact.flatten().topk(5).indices.tolist()
    width = exact.shape[1]
    assert top_neurons(study, rows, 5) == tuple((index // width, index % width) for index in best)


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa", "gptj"])
def test_drive_is_what_a_coefficient_loses_without_the_head(
    family: str, load_tiny: Callable[..., Any], settings: StudySettings
) -> None:
    """GPT-2 by hand: W_in and b_in on the normed input; others: nothing from heads that come later."""
    from experiments.claims.ffn import CoefficientDrive, ffn_inputs

    model = load_tiny(family)
    acts = il.capture(model, Study(model, settings).batch()[:4])
    later = CoefficientDrive(((1, 2),), (il.Head(2, 0),))(acts)
    assert not later.any()
    drive = CoefficientDrive(((2, 5),), (il.Head(0, 1), il.Head(1, 3)))(acts)
    assert drive.abs().min() > 0
    if family != "gpt2":
        return
    x = ffn_inputs(acts)[:, 2]
    without = x - acts.head_outputs(1)[:, 3]
    layer_norm = torch.nn.functional.layer_norm
    block = families.build("gpt2").transformer.h[2]
    ln, fc = block.ln_2, block.mlp.c_fc
    gelu = torch.nn.GELU(approximate="tanh")

    def coefficient(y: torch.Tensor) -> torch.Tensor:
        normed = layer_norm(y, (32,), ln.weight, ln.bias, ln.eps)
        return gelu(normed @ fc.weight[:, 5] + fc.bias[5])

    torch.testing.assert_close(drive[:, 0, 1], (coefficient(x) - coefficient(without)).detach(), atol=1e-5, rtol=1e-4)


# The report


def made(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "id": "order",
        "title": "A title",
        "source": "Figure 9",
        "claim": "A claim",
        "criterion": "A criterion",
        "paper": None,
        "model": "tiny",
        "task": "sentiment-number",
        "configuration": {"n": 10},
        "verdict": Verdict("supported", 1.0, 0.5, 1.5, "nats", "a reason", 0.01),
        "contrast": None,
        "heads": (LocatedHead("L1H0", 1.0, 0.1, "increase"), LocatedHead("L2H1", 0.8, 0.7, "contrast")),
        "competence": Competence(0.9, 0.8, 1.0, 0.5),
        "versions": {"torch": "1"},
    }
    return Result(**(fields | changes))


def test_report_escapes_everything() -> None:
    nasty = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    result = made(
        id=nasty,
        title=nasty,
        source=nasty,
        claim=nasty,
        criterion=nasty,
        paper=nasty,
        model=nasty,
        task=nasty,
        configuration={nasty: nasty},
        versions={nasty: nasty},
        about=nasty,
        chosen=nasty,
        verdict=Verdict("supported", 1.0, 0.5, 1.5, nasty, nasty),
    )
    page = report_page([(result, {"increase": b"png"})])
    assert "<script" not in page
    assert "<img src=x" not in page
    assert page.count("<img ") == 1
    assert page.count("</style>") == 1
    assert "onerror=alert(2)&gt;&quot;&#x27;&amp;" in page


def test_report_needs_no_network(everything: Path) -> None:
    page = write_report(everything, everything / "report.html", order=catalogue.IDS).read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "<script" not in page
    assert page.count("data:image/png;base64,") == VERDICTS
    assert f"{VERDICTS} verdicts are given" in page
    assert page.index("<table>") < page.index("<section")
    for name in catalogue.IDS:
        assert f'<section id="{name}">' in page


def test_pages_of_the_documentation(everything: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_pages(everything, folder, task="sentiment-number", order=catalogue.IDS)
    (folder / "old.md").write_text("of an experiment that is gone")
    write_pages(everything, folder, task="sentiment-number", order=catalogue.IDS)
    assert {path.stem for path in folder.glob("*.md")} == {"index", *catalogue.IDS}
    index = (folder / "index.md").read_text()
    results = {result.id: result for _, result in read_all(everything)}
    for name in catalogue.IDS:
        (row,) = re.findall(rf"^\| \[{name}\]\({name}.md\) .*", index, re.MULTILINE)
        both = [one.outcome for one in results[name].verdicts.values()]
        assert re.findall(r"not supported|supported|undecided", row) == both
        assert ("| the same |" in row) == (len(both) == 1)
        page = (folder / f"{name}.md").read_text()
        images = re.findall(r"{image} (\S+)", page)
        assert len(images) == len(both)
        assert all((folder / image).read_bytes().startswith(b"\x89PNG") for image in images)
    assert f"{VERDICTS} verdicts are given" in index
    assert "## Located heads" in index
    rows = {(row["id"], row["by"]): row for row in json.loads((folder / "results.json").read_text())}
    assert len(rows) == VERDICTS
    assert rows["accuracy", "increase"]["effect"] == pytest.approx(results["accuracy"].verdict.effect, rel=1e-3)
    assert all(row["holm"] >= row["p"] for row in rows.values())


def test_the_table_counts_all_verdicts_and_marks_those_that_do_not_survive(tmp_path: Path) -> None:
    """By hand: p-values 0.01, 0.03 and 0.04 of three verdicts are 0.03, 0.06 and 0.06 with all."""
    verdicts = [Verdict("supported", 1.0, 0.5, 1.5, "nats", "a reason", p) for p in (0.01, 0.03, 0.04)]
    results = [made(id="order", verdict=verdicts[0], contrast=verdicts[1]), made(id="layers", verdict=verdicts[2])]
    given = Given.of(results)
    assert str(given).startswith("3 verdicts are given: 3 supported, 0 not supported, 0 undecided; 2 of them do not")
    assert given.said(results[0], "increase") == "p = 0.01, with all = 0.03"
    assert given.said(results[0], "contrast") == "p = 0.03, with all = 0.06 †"
    assert [holm for *_, holm in given.every()] == pytest.approx([0.03, 0.06, 0.06])


def test_pages_say_which_choices_came_after_results(tmp_path: Path) -> None:
    chosen = made(id="order", chosen="The number of heads, on tiny.", about="located heads")
    for result in (chosen, made(id="layers", about=NO_HEADS)):
        folder = tmp_path / "results" / "tiny" / "sentiment-number" / result.id
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(result.to_json())
        Image.new("RGB", (8, 8)).save(folder / "figure.png")
    write_pages(tmp_path / "results", tmp_path / "pages", task="sentiment-number", order=catalogue.IDS)
    page = (tmp_path / "pages" / "order.md").read_text()
    assert "Chosen after results were seen\n: The number of heads, on tiny." in page
    assert "About\n: Located heads." in page
    other = (tmp_path / "pages" / "layers.md").read_text()
    assert "Chosen after" not in other
    assert "both rankings give the same verdict" in other
    index = (tmp_path / "pages" / "index.md").read_text()
    assert "| tiny | L1H0 1.00/0.10 | **L2H1** 0.80/0.70 |" in index


def test_a_result_survives_being_written_and_read(tmp_path: Path) -> None:
    result = made(verdict=Verdict("undecided", float("nan"), float("nan"), float("nan"), "nats", "nothing"))
    (tmp_path / "result.json").write_text(result.to_json())
    again = Result.read(tmp_path)
    assert again.verdict.effect != again.verdict.effect
    assert again.competence == result.competence
    assert again.heads == result.heads
    assert again.contrast is None
    assert (again.claim, again.configuration) == (result.claim, result.configuration)


# The command line


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    families.save("gpt2", folder)
    return folder


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def in_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> tuple[int, str, str]:
    """The command line without a new interpreter."""
    from experiments.__main__ import main

    monkeypatch.setattr(sys, "argv", ["experiments", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_list_names_every_experiment() -> None:
    """In an interpreter of its own, as users start it."""
    found = command("list")
    assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in catalogue.IDS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "no-such-figure"], "no experiment 'no-such-figure'"),
        (["run"], "name the experiments to run"),
        (["run", "order", "--all"], "or give --all"),
        (["run", "order", "--model", "/no/such/folder"], "no folder '/no/such/folder'"),
        (["run", "order", "--model", "{model}", "--task", "no-such-task"], "no task 'no-such-task'"),
        (["run", "order", "--model", "{model}", "--n", "3"], "--n 3 is too few"),
        (["run", "order", "--model", "{model}", "--out", "{file}"], "cannot write results"),
        (["report", "--out", "{empty}"], "no results under"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    says: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    places = {"model": tiny_folder, "file": tmp_path / "file", "empty": tmp_path / "empty"}
    filled = [argument.format(**places) for argument in arguments]
    if "run" in filled and "--out" not in filled:
        filled += ["--out", str(tmp_path / "results")]
    code, _, err = in_process(capsys, monkeypatch, *filled)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1, err
    assert err.startswith("experiments: ")


def test_run_and_report(
    tiny_folder: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["run", "order", "--model", tiny_folder, "--path", words, "--n", "24", "--out", tmp_path]
    code, out, _ = in_process(capsys, monkeypatch, *given)
    assert code == 0
    assert "order: undecided" in out
    code, out, _ = in_process(capsys, monkeypatch, *given)
    assert "done before" in out
    code, out, _ = in_process(capsys, monkeypatch, "report", "--out", tmp_path)
    assert code == 0
    assert "report.html" in out
    assert (tmp_path / "report.html").is_file()


def test_a_chunk_whose_axes_lie_in_any_order_is_kept() -> None:
    """An axis of length one has any stride, of which Arrow wants the largest first."""
    for values in (torch.rand(1, 4).mT, torch.rand(2, 1, 3).transpose(0, 1), torch.rand(3, 4, 2).transpose(0, 2)):
        kept = tensors_from(pa.table(columns_of({"value": values})))
        assert torch.equal(kept["value"], values)
