"""The command line: what it prints and writes, and one clear line with exit code 2 for bad
input.
"""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import explanations as ex
import families
import faults
import pandas as pd
import pytest
from tolerance import assert_close
from typer.testing import CliRunner

import icl_lens as il
from icl_lens.cli import COMMANDS, TASKS, WITHOUT_TASKS, app, console, overview, stored_checks
from icl_lens.cli.options import unescape
from icl_lens.prompts.datasets import DATASETS
from icl_lens.prompts.pair_task import bundled_pairs
from icl_lens.result.number_format import signed

HYPHEN_FOR_MINUS = re.compile(r"(?<![\w-])-\d")
"""A negative number that is not written with the minus sign, U+2212."""


def test_explain_prints_everything_and_writes_it(run, tiny, tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "numbers.json"
    options = ("--answer", "foo", "--no-bias", "-k", 3, "--html", page, "--json", file)
    code, out, _ = run("explain", families.PROMPT, "--model", tiny, *options)
    assert code == 0
    for heading in (
        "Most probable: ",
        "log p(foo)",
        "Heads by contrast",
        "Top words of",
        "Zeroing L",
        "█",
    ):
        assert heading in out
    numbers = json.loads(file.read_text())
    assert numbers["settings"]["bias"] is False
    assert len(numbers["heads"]) == 3
    for report in numbers["heads"]:
        assert signed(report["increase"]) in out
    assert "−" in out
    assert not HYPHEN_FOR_MINUS.search(out)
    assert page.read_text().lower().startswith("<!doctype html>")
    assert faults.left_in(tmp_path) == {"page.html", "numbers.json"}, "nothing half-written is left"


def test_help_says_of_every_command_what_the_overview_says():
    """At 80 columns, no sentence is cut off."""
    help_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    for command, summary in COMMANDS.items():
        assert re.search(rf"^ +{command.__name__} +{re.escape(summary)}$", help_text, re.M), command
        assert f"  {command.__name__:9} {summary}" in overview().splitlines()
    assert len(app.registered_commands) == len(COMMANDS)


PROMPT = "love : bar one : foo two :"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", PROMPT, "--answer", "baz"], "baz"),
        (["explain", "love : bar zebra : foo one :"], "zebra"),
        (["explain", "love : bar " * 40 + "one :"], "64"),
        (["explain", "--text", "love", PROMPT], "either a prompt"),
        (["explain", "--text", "love", "--prefix", " "], "--prefix has no effect here"),
        (["explain", PROMPT, "--template", "{text} : {label}\\n"], "--separator '\\n'"),
        (["explain", PROMPT, "--template", "{label} : {text}"], "before"),
        (["explain", PROMPT, "--against", "zork"], "against must be one of the labels"),
        (["explain", PROMPT, "-t", "sentiment-number"], "no effect with a task"),
        (["explain", "--text", "love", "-t", "sentiment-number"], "no effect with a task"),
        (["explain", "-t", "sentiment-number", "-a", "foo"], "no effect with a task"),
        (["explain", "--layout", "reorder"], "--layout has no effect here"),
        (
            ["explain", "-t", "sentiment-number", "--max-words", "3"],
            "--max-words has no effect here",
        ),
        (["compare", PROMPT, "-t", "sentiment-number"], "no effect with a task"),
        (["compare", PROMPT, "--labels", "a,b"], "--labels has no effect here"),
        (
            ["compare", "-t", "sentiment-number", "-n", "3"],
            "-n must be 1 without a second model and a task, got 3",
        ),
        (["ablate"], "either a prompt or --task"),
        (["ablate", PROMPT, "-t", "sst2"], "either a prompt or --task"),
        (["ablate", "-t", "sentiment-number", "-a", "foo"], "--answer has no effect"),
        (["ablate", PROMPT, "--mode", "mean"], "--mode mean requires --task"),
        (["ablate", PROMPT, "--heads", "L0H1", "-k", "3"], "not both"),
        (
            ["ablate", PROMPT, "--heads", "L0H1", "--by", "contrast"],
            "either --heads, or --top and --by",
        ),
        (["ablate", PROMPT, "--heads", " "], "--heads must name at least one head"),
        (["ablate", PROMPT, "--labels", "yes,no"], "--labels has no effect here"),
        (["ablate", PROMPT, "--no-check"], "--check has no effect here"),
        (
            ["ablate", "-t", "sentiment-number", "--labels", "yes"],
            "labels must be 2 different words",
        ),
        (["ablate", "-t", "x", "--columns", "a"], "--columns must name"),
        (["ablate", PROMPT, "--heads", "22,0"], "invalid head '22'"),
        (["ablate", PROMPT, "-k", "7"], "got 7"),
        (["ablate", PROMPT, "-k", "13"], "k must be between 1 and 12"),
        (["circuit"], "pass --task"),
        (
            ["circuit", "-t", "sentiment-number", "--heads", "L0H1", "-k", "3"],
            "--heads, or --top and --by to locate",
        ),
        (["circuit", "-t", "sentiment-number", "--split", "train"], "--split has no effect here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tiny, arguments, message):
    code, _, err = run(*arguments, "--model", tiny)
    assert code == 2
    faults.assert_sentence(err.removesuffix("\n"), message)


def test_a_model_that_is_not_kept_is_named_offline(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = run("explain", "--model", "gpt2-enormous")
    assert code == 2
    assert "gpt2-enormous" in err
    assert "HF_HUB_OFFLINE" in err


@pytest.mark.slow
def test_the_bundled_model_explains_the_papers_prompt(tmp_path):
    """The installed command itself, in a process of its own: no arguments, no network."""
    done = subprocess.run(
        [sys.executable, "-m", "icl_lens", "explain", "--json", str(tmp_path / "x.json")],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    numbers = json.loads((tmp_path / "x.json").read_text())
    assert numbers["model"] == "icl-mini"
    assert numbers["input"]["label_positions"] == [3, 7, 11, 15]
    assert len(numbers["input"]["tokens"]) == 19
    assert numbers["summary"]["predicted"] == "foo"


@pytest.mark.parametrize(("argument", "expected"), [("models", "icl-mini"), ("--help", "explain")])
def test_models_and_help_need_no_model(run, argument, expected):
    code, out, _ = run(argument)
    assert code == 0
    assert expected in out


TASK_COMMANDS = [command.__name__ for command in COMMANDS if command not in WITHOUT_TASKS]


@pytest.mark.parametrize("name", TASK_COMMANDS)
def test_help_is_short_and_help_all_has_every_option(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, [name, "--help"]).output.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert "--help-all" in " ".join(lines)
    assert "country-capital" in " ".join(lines)
    _, everything, _ = run(name, "--help-all")
    assert "--revision" in everything
    assert "--revision" not in " ".join(lines)


def test_every_task_is_in_help():
    for name in (*DATASETS, *bundled_pairs()):
        assert name in TASKS


def test_without_arguments_the_commands_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert len(out.splitlines()) <= 16
    for name in (*TASK_COMMANDS, "models"):
        assert f"\n  {name} " in out


def test_typing_errors_are_answered_with_what_was_meant(run, tiny):
    assert "Did you mean 'locate'?" in run("locat")[2]
    assert "--task" in run("locate", "--taks", "x")[2]
    assert "did you mean 'icl-mini'?" in run("explain", "-m", "icl-mni")[2]
    answers = {
        ("explain", "--k", "3"): "no option --k; write --top/-k",
        ("explain", "--sed", "3"): "no option --sed (did you mean --seed?); see icl-lens",
        ("explain", "--zzzz"): "no option --zzzz; see icl-lens explain --help-all",
        (
            "explain",
            "--heads",
            "L1H1",
        ): "no option --heads, an option of atlas, ablate, towers, circuit",
        ("ablate", "L1H1,l2h3"): "write icl-lens ablate --heads L1H1,l2h3",
        ("explain", "L1H1"): "write icl-lens explain --why L1H1",
        ("locate", "-t", "sentiment-number", "L1H1"): "which icl-lens locate does not read",
    }
    for arguments, answer in answers.items():
        code, _, err = run(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert answer in err
    assert (
        "did you mean 'sentiment-number'?" in run("locate", "-m", tiny, "-t", "sentimant-number")[2]
    )


@pytest.mark.slow
def test_a_check_is_kept_for_the_other_commands(run, tiny, words, monkeypatch, tmp_path):
    task = ("-t", "sentiment-number", "--path", words, "-m", tiny)
    assert "icl-lens check draws more" in run("explain", *task, "-k", 1, "--ablate", 1)[1]
    code, out, err = run(
        "check", *task, "--json", tmp_path / "x.json", "--html", tmp_path / "x.html"
    )
    assert code == 0, err
    assert "First of 60 prompts, 4 demonstrations each:" in out
    sentence = str(il.results.load(tmp_path / "x.json"))
    assert " ".join(sentence.split()) in " ".join(out.split())
    assert "<html" in (tmp_path / "x.html").read_text()
    monkeypatch.setattr(
        "icl_lens.analyses.task_check.task_check", lambda *_, **__: pytest.fail("checked again")
    )
    for command in (
        ("explain", "-k", 1, "--ablate", 1),
        ("locate", "-n", 4, "-k", 1, "--anyway"),
        ("check",),
    ):
        code, out, err = run(*command, *task)
        assert code == 0, err
        assert " ".join(sentence.split()) in " ".join(out.split())


def test_where_the_model_does_not_do_the_task_locate_asks_for_anyway(run, tiny, words):
    """It stops after the check, before it runs any other prompt."""
    task = ("-t", "sentiment-number", "--path", words, "-m", tiny, "-n", 20, "-k", 1)
    code, out, err = run("locate", *task)
    assert code == 2
    assert "The model is not shown to learn from the demonstrations" in " ".join(out.split())
    assert "the model is not shown to do this task" in err.splitlines()[-1]
    assert "pass --anyway" in err.splitlines()[-1]
    assert "without these heads" not in out
    code, out, err = run("locate", *task, "--anyway")
    assert code == 0, err
    out = " ".join(out.split())
    assert out.index("The model is not shown to learn") < out.index("The model is not shown to do")
    assert "none of them is shown to carry the answer" in out


def test_a_check_shows_a_prompt_that_it_measures(run, tiny, words):
    """They are in random order, and a layout is refused."""
    task = ("check", "-t", "sentiment-number", "--path", words, "-m", tiny, "-n", 20)
    _, in_random_order, _ = run(*task)
    first = il.load_task("sentiment-number", words, n=20)[0]
    assert str(first) in " ".join(in_random_order.split())
    code, _, error = run(*task, "--layout", "order")
    assert code == 2
    assert "--layout has no effect here: a check needs balanced random order" in error


@pytest.mark.slow
def test_a_check_of_other_prompts_is_another(run, tiny, words, tmp_path):
    task = ("-t", "sentiment-number", "--path", words, "-m", tiny, "-n", 20)
    digests = []
    for options in ((), ("--seed", 1), ("--separator", " : "), ("--labels", "yes,no")):
        code, _, error = run("check", *task, *options, "--json", tmp_path / "x.json")
        assert code == 0, error
        digests.append(json.loads((tmp_path / "x.json").read_text())["digest"])
    assert len(set(digests)) == 4
    assert len(list(stored_checks.checks_folder().iterdir())) == 4


def test_any_text_is_explained(run, tiny, tmp_path):
    file = tmp_path / "free.json"
    text = ("--text", "love : like", "--answer", " foo", "--against", " bar", "--against", " no")
    code, out, _ = run("explain", *text, "-m", tiny, "-k", 3, "--json", file)
    assert code == 0
    for words in (
        "against bar, no",
        "attends most to",
        "Heads by contrast",
        "; bar and no in ",
        "Lowest contrasts of all heads: L",
    ):
        assert words in out
    explanation = il.results.Explanation.load(file)
    assert explanation.is_plain_text
    assert explanation.settings.against == (" bar", " no")
    assert signed(explanation.heads[0].contrast) in out


SIX = ("sentiment", "number", "animal", "country", "color", "fruit")
TEMPLATE = ("--template", "{text}\\n: {label}", "--separator", "\\n")


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Return options that read a CSV of six classes in the bundled model's words, three prompts of
    that task, and the four on which `icl-lens locate -n 4` locates heads.
    """
    words = json.loads((Path(il.__file__).parent / "bundled" / "words.json").read_text())[
        "categories"
    ]
    rows = []
    for kind in SIX:
        pairs = itertools.pairwise(words[kind][:20])
        rows += [f"{word} {partner},{kind}" for word, partner in pairs]
    file = tmp_path_factory.mktemp("six") / "kinds.csv"
    file.write_text("\n".join(["note,kind", *rows]))
    labels = "foo,bar,frob,blick,waldo,thud"
    options = (
        "--path",
        file,
        "--columns",
        "note,kind",
        "--classes",
        "all",
        "--demonstrations",
        1,
        "--labels",
        labels,
    )
    task = il.TextTask("kinds", file, columns=("note", "kind"), classes="all")
    prompts = task.prompts(3, demonstrations=1, labels=labels.split(","))
    locating = task.prompts(16, demonstrations=1, labels=labels.split(","))[
        :4
    ]  # too few to share no query
    return (*options, "--no-check"), prompts, locating


@pytest.mark.slow
def test_a_task_of_six_classes_is_the_same_in_every_command_and_in_python(
    run, six, icl_mini, tmp_path
):
    options, prompts, locating = six
    template = il.Template("{text}\n: {label}", "{text}\n:", separator="\n")
    code, out, err = run("explain", *options, *TEMPLATE, "--json", tmp_path / "x.json")
    assert code == 0, err
    loaded = il.results.Explanation.load(tmp_path / "x.json")
    assert loaded.input.prompt == prompts[0]
    explained = [il.explain(icl_mini, prompt, template=template) for prompt in prompts[:2]]
    assert loaded == explained[0]
    code, out, err = run("locate", *options, *TEMPLATE, "-n", 4)
    assert code == 0, err
    batch = il.tokenize(icl_mini, locating, template=template)
    assert batch.texts[0] in out
    located = il.locate(icl_mini, batch)
    check_heads_and_scores(located, out)
    code, out, err = run("compare", *options, *TEMPLATE)
    assert code == 0, err
    for row in il.compare(*explained).to_frame()[:5].itertuples():
        cells = f"{row.name} {row.a:+z.3f} {row.b:+z.3f} {row.change:+z.3f}".replace("-", "−")
        assert cells in " ".join(out.split())
    code, out, err = run(
        "ablate", *options, *TEMPLATE, "-n", 2, "--heads", "L1H5", "--random-sets", 1
    )
    assert code == 0, err
    assert "First of 2 prompts" in out


def check_heads_and_scores(located, out):
    assert all(f"{name} " in out for name in map(str, located.heads))
    for score in located.to_frame()["score"][:12]:
        assert f"{score:+.3f}" in out.replace("−", "-")


def test_locating_starts_with_what_the_model_does(run, icl_mini, monkeypatch):
    """On no more prompts than heads are located on."""
    _, out, _ = run("locate", "-t", "sentiment-number", "-n", 20, "-k", 1)
    behavior = str(il.task_check(icl_mini, "sentiment-number", n=20))
    assert " ".join(behavior.split()) in " ".join(out.split())


@pytest.mark.slow
def test_a_task_is_drawn_by_its_seed(run, six, tmp_path):
    options, prompts, _ = six
    code, _, _ = run(
        "explain", *options, "--seed", 5, "--json", tmp_path / "x.json", "-k", 1, "--ablate", 1
    )
    assert code == 0
    assert il.results.Explanation.load(tmp_path / "x.json").input.prompt != prompts[0]


@pytest.mark.slow
def test_many_labels_fit_a_terminal(six, icl_mini):
    """At 80 columns, no word is broken, and the prompt is shown as written."""
    _, prompts, _ = six
    labels = ("joyful", "furious", "melancholic", "terrified", "disgusted", "astonished")
    explanation = il.explain(
        icl_mini, prompts[0], template=il.Template("{text}\n: {label}", "{text}\n:", separator="\n")
    )
    whole = {"spellings": ((("␣mel", "anch", "ol", "ic"),) * 6), "whole_log_probs": (-42.75,) * 6}
    whole |= {"scored_tokens": ("␣mel",) * 6, "log_probs": (-12.5,) * 6}
    demonstrations = [
        replace(demonstration, label=labels[explanation.labels.index(demonstration.label)])
        for demonstration in prompts[0].demonstrations
    ]
    prompt = il.Prompt(
        demonstrations,
        prompts[0].query,
        labels=[
            labels[explanation.labels.index(demonstration)] for demonstration in prompts[0].labels
        ],
    )
    target = labels[explanation.labels.index(explanation.target)]
    whole["compared_with"] = tuple(label for label in labels if label != target)
    named = ex.changed(explanation, **whole, labels=labels, target=target, prompt=prompt)
    text = ex.terminal_text(named, width=80)
    assert max(map(len, text.splitlines())) <= 80
    words = set(text.replace("@", " ").split())
    assert {*labels, "increase", "'␣mel'", "0.00037%", "scores"} <= words
    assert "→" not in text
    for line in named.input.template.render(prompt).text.split("\n"):
        assert f"│ {line} " in text


def test_tiny_models_have_fewer_heads_than_locate_asks_for(run, tiny, words):
    task = (
        "-t",
        "sentiment-number",
        "--path",
        words,
        "--demonstrations",
        1,
        "-n",
        2,
        "-m",
        tiny,
        "--no-check",
    )
    code, out, err = run("locate", *task)
    assert code == 0, err
    assert "the 12 heads in the table" in " ".join(out.split())
    assert "These 2 prompts have 2 different queries; intervals over more are narrower" in " ".join(
        out.split()
    )
    assert "−" in out
    assert not HYPHEN_FOR_MINUS.search(out)
    code, _, err = run("locate", *task, "-k", 13)
    assert code == 2
    assert "k must be between 1 and 12" in err


@pytest.mark.slow
def test_templates_are_decoded(run, tiny, tmp_path):
    """A line break typed as two characters becomes one character."""
    file = tmp_path / "x.json"
    code, _, _ = run(
        "explain", families.PROMPT, "-m", tiny, "-a", "foo", "--separator", "\\n", "--json", file
    )
    assert code == 0
    assert il.results.Explanation.load(file).input.template.separator == "\n"
    in_lines = families.PROMPT.replace("bar ", "bar\\n").replace("foo ", "foo\\n")
    code, _, _ = run("explain", in_lines, "-m", tiny, "-a", "foo", "--json", tmp_path / "y.json")
    assert code == 0
    texts = [il.results.Explanation.load(path).input.text for path in (file, tmp_path / "y.json")]
    assert texts[0] == texts[1]
    assert unescape("a\\\\nb\\tc") == "a\\nb\tc"


@pytest.mark.slow
def test_locate_shows_the_first_prompt_and_ranks_by_effect(run, icl_mini, tmp_path):
    arguments = ("locate", "-t", "sentiment-number", "-n", 4, "-k", 2, "--no-check")
    for seed in (0, 3):
        _, out, _ = run(*arguments, "--seed", seed)
        assert str(il.load_task("sentiment-number", n=4, seed=seed)[0]) in out
    code, out, _ = run(*arguments, "--out", tmp_path / "run")
    assert code == 0
    assert "mean effect above zero" in out
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=4))
    located = il.locate(icl_mini, batch, k=2)
    assert all(f"{value:+.3f}" in out for value in located.to_frame()["score"][:2])
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["by"] == "effect"
    table = pd.read_csv(tmp_path / "run" / "heads.csv")
    assert_close(table["score"], located.to_frame()["score"])
    code, _, err = run(*arguments, "--by", "increase", "--out", tmp_path / "run")
    assert code == 2
    assert "--by effect" in err


def test_a_long_stage_is_announced_once_where_no_bar_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(console, "LONG", 0.0)
    with console.progress() as report:
        for done in (0, 1, 2):
            report("part", done, 3)
    assert capsys.readouterr().err == "Locating heads: about 0 s.\n"
    for options in ({"hidden": True}, {"announces": False}):
        with console.progress(**options) as report:
            report("part", 1, 3)
    monkeypatch.setattr(console, "LONG", 10.0)
    with console.progress() as report:
        report("part", 1, 3)
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_long_check_is_announced_with_its_duration(run, tiny, words, monkeypatch, capsys):
    for seconds, announcement in (
        (2.0, ""),
        (30.0, "300 passes, about 2 min; --no-check omits this."),
    ):
        seen, times = [], iter([0.0, 0.0, seconds, 2 * seconds])
        report = console.with_duration(
            lambda *stage, seen=seen: seen.append(stage), clock=times.__next__
        )
        stages = [("check", 0, 300), ("check", 60, 300), ("check", 120, 300)]
        for stage in stages:
            report(*stage)
        assert seen == stages
        assert announcement in capsys.readouterr().err
    arguments = ("locate", "-t", "sentiment-number", "--path", words, "-m", tiny, "-n", 20, "-k", 2)
    assert "--no-check" not in run(*arguments)[2]
    monkeypatch.setattr(console, "LONG", 0.0)
    assert run(*arguments, "--seed", 1)[2].count("--no-check") == 1
    assert "--no-check" not in run(*arguments, "--no-check")[2]
