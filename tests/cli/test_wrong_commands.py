"""Bad command lines: exit code 2 and one sentence, for every command."""

import copy
import json
import os
import re
import stat
import subprocess
import sys
import threading

import faults
import pytest

import icl_lens as il

pytestmark = pytest.mark.slow

PROMPT = "love : bar one : foo two :"

EXPLAIN = [
    ([""], "no ' : ' separator"),
    (["love like", "--answer", "foo"], "or for plain text pass il.Text(...) (--text)"),
    (["love : [link=x] one : foo two :"], "'[link=x]'"),
    (["\x1b[2J : bar one : foo two :"], "\\x1b[2J"),
    (["\u202e : bar one : foo two :"], "\\u202e"),
    (["😀 : bar one : foo two :"], "must be in the tokenizer's vocabulary"),
    ([PROMPT, "--answer", "\udcff"], "must be valid Unicode"),
    ([PROMPT, "--model", "./[red]"], "there is no folder './[red]'"),
    ([PROMPT, "--model", "/tmp/\x1b[2J"], "\\x1b[2J"),
    ([PROMPT, "--model", "gpt2", "--revision", ""], "revision of 'gpt2'"),
    ([PROMPT, "--html", "."], "Is a directory"),
    ([PROMPT, "--html", "/no/such/page.html"], "choose an existing, writable folder"),
    ([PROMPT, "--json", "x" * 300], "shorter name"),
    ([PROMPT, "--json", "a.json", "--html", "./b/../a.json"], "for two outputs"),
]
ABLATE = [
    ([PROMPT, "--n", "5"], "--n has no effect here"),
    ([PROMPT, "--path", "x.json"], "pass either a prompt or --task"),
    ([PROMPT, "--heads", "[red]"], "[red]"),
    (["--task", "sentiment-number", "--columns", "a,b"], "--columns has no effect here"),
    (["--task", "sentiment-\x1b[0m"], "unknown task"),
    (["--task", "sentiment-number", "--labels", "foo,qq77"], "'qq77'"),
    (["--task", "mine", "--path", "/"], "must have one file for the split"),
]
COMPARE = [
    ([], "pass two prompts, a task, or a second model"),
    ([PROMPT], "nothing to compare"),
    (["love like", "love two", "--answer", "foo"], "no ' : ' separator"),
    ([PROMPT, "--model-b", "icl-mini-llama", "--revision-b", "x"], "no revision 'x'"),
    ([PROMPT, PROMPT, "--answer-b", "z"], "'z' is not one of the labels"),
]
CIRCUIT = [(["--task", "sentiment-number", "--heads", ","], "--heads must name at least one head")]
LOCATE = [
    (
        ["--task", "sentiment-number", "--n", "8", "--batch-size", "2", "--memory", "9"],
        "--memory has no effect",
    ),
    (["--task", "sentiment-number", "--classes", "all"], "--classes has no effect here"),
    (["--task", "sentiment-number", "--template", "{text} [red] {label}"], "'[red]'"),
    (["--task", "sentiment-number", "--out", "/dev/null"], "cannot write to folder"),
]
COMMANDS = {
    "explain": EXPLAIN,
    "ablate": ABLATE,
    "circuit": CIRCUIT,
    "compare": COMPARE,
    "locate": LOCATE,
}
ROWS = []
for command, rows in COMMANDS.items():
    ROWS += [pytest.param(command, *row, id=f"{command} {i}") for i, row in enumerate(rows)]
USAGE = [
    ["locate", "--task", "sentiment-number", "--n", "0"],
    ["explain", PROMPT, "--top", "[/red]"],
]


@pytest.fixture(scope="module")
def loaded():
    return {}


@pytest.fixture
def run(run, monkeypatch, loaded, tmp_path):
    """Return `run`, in an empty folder and with each model loaded only once."""
    real = il.load_model

    def load(name, **kwargs):
        key = (name, *sorted(kwargs.items(), key=str))
        if key not in loaded:
            loaded[key] = real(name, **kwargs)
        return loaded[key]

    monkeypatch.setattr("icl_lens.load_model", load)
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize(("command", "arguments", "words"), ROWS)
def test_bad_input_is_refused_in_one_sentence(run, command, arguments, words, tmp_path):
    code, out, err = run(command, *arguments)
    assert code == 2, (code, out, err)
    assert err.startswith("icl-lens: "), err
    faults.assert_sentence(err.removesuffix("\n"), words)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", err), err
    assert not faults.left_in(tmp_path)


@pytest.mark.parametrize(
    ("command", "option"), [("explain", "--why"), ("ablate", "--heads"), ("circuit", "--heads")]
)
def test_unknown_heads_are_refused_before_the_task_check(run, command, option):
    code, out, err = run(command, "--task", "sentiment-number", option, "L99H0")
    assert code == 2, (code, out, err)
    faults.assert_sentence(err.removesuffix("\n"), "got L99H0")
    assert "random order" not in out


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_options_print_the_usage(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2, (code, out, err)
    assert "Usage" in err or "requires an argument" in err


def test_markup_in_names_is_shown(run, tmp_path):
    """Square brackets in paths are part of the name."""
    for name in ("[red]a.json", "[bold]b.json", ":cat:.json", "\x1b[31mc.json"):
        code, out, err = run("explain", PROMPT, "--json", name)
        assert code == 0, err
        assert f"JSON: {name}".replace("\x1b", "\\x1b") in out
        assert "\x1b[31m" not in out
        assert json.loads((tmp_path / name).read_text())["scores"]["target"] in ("foo", "bar")


def test_output_is_ascii_in_an_ascii_terminal():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "icl_lens", "explain", PROMPT]
    ran = subprocess.run(command, env=environment, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert b"The model predicts" in ran.stdout
    assert ran.stdout.isascii()


def test_a_closed_pipe_loses_nothing(tmp_path):
    """If the reader closes the pipe at once, the file is still written, and no exception is
    printed.
    """
    file = tmp_path / "a.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "icl_lens", "explain", PROMPT, "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert b"Traceback" not in err, err
    assert b"Exception ignored" not in err, err
    assert json.loads(file.read_text())["scores"]["labels"] == ["bar", "foo"]


def test_a_wrong_k_does_not_lock_the_folder(run, tmp_path):
    out = tmp_path / "run"
    assert (
        run("locate", "--task", "sentiment-number", "--n", "8", "--out", out, "-k", "100")[0] == 2
    )
    code, _, err = run("locate", "--task", "sentiment-number", "--n", "8", "--out", out, "-k", "3")
    assert code == 0, err


def test_files_of_others_stay(run, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    mine = {".notes.csv", ".secret.json", ".x.parquet", ".icl_lens.csv", ".manifest.json.abc.json"}
    for name in mine:
        (out / name).write_text("mine")
    (out / ".icl_lens-part-00000-abcd_123.parquet").write_text("half")
    code, _, err = run("locate", "--task", "sentiment-number", "--n", "8", "--out", out, "-k", "3")
    assert code == 0, err
    assert mine <= faults.left_in(out)
    assert ".icl_lens-part-00000-abcd_123.parquet" not in faults.left_in(out)
    assert (out / "result.json").is_file()


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_outputs_keep_mode_and_link(run, tmp_path, option):
    target, link = tmp_path / "real.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    code, _, err = run("explain", PROMPT, option, link)
    assert code == 0, err
    assert link.is_symlink()
    assert target.read_text() != "old"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert faults.left_in(tmp_path) == {"real.txt", "link.txt"}


def test_a_pipe_is_written_to(run, tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    code, _, err = run("explain", PROMPT, "--json", pipe)
    reader.join(timeout=30)
    assert code == 0, err
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert json.loads(got[0])["scores"]["labels"] == ["bar", "foo"]


def test_a_full_disk_is_one_sentence(run):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    code, _, err = run("explain", PROMPT, "--json", "/dev/full")
    assert code == 2
    faults.assert_sentence(err.removesuffix("\n"), "free space")


@pytest.mark.parametrize(
    "arguments", [["explain", PROMPT, "--json", "a.json"], ["--help"]], ids=str
)
def test_an_output_that_is_full_is_one_sentence(arguments, tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    package = os.path.dirname(os.path.dirname(il.__file__))
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "icl_lens", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": package},
            text=True,
        )
    assert ran.returncode == 2
    faults.assert_sentence(
        ran.stderr.removesuffix("\n"), "cannot print the output: No space left on device"
    )
    if "--json" in arguments:
        assert json.loads((tmp_path / "a.json").read_text())["scores"]["labels"] == ["bar", "foo"]


def test_nan_is_named(run, monkeypatch, loaded, icl_mini):
    """NaN weights raise an error instead of giving an accuracy of 50%."""
    broken = copy.deepcopy(icl_mini)
    broken.blocks[5].mlp.out.weight.data.fill_(float("nan"))
    monkeypatch.setattr("icl_lens.load_model", lambda name, **kwargs: broken)
    for arguments in (
        ["explain", PROMPT],
        ["compare", PROMPT, PROMPT],
        ["ablate", PROMPT],
        ["ablate", "--task", "sentiment-number", "--n", "4"],
        ["locate", "--task", "sentiment-number", "--n", "4"],
    ):
        code, out, err = run(*arguments)
        assert code == 2, (arguments, out, err)
        faults.assert_sentence(err.removesuffix("\n"), "NaN")
