"""Experiments killed at any moment, damaged, shared among processes: the same files in the end."""

import io
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from families import save
from launches import LAUNCHES, TORCHRUN, contents, ended, forked, killed, launched, stamps

import icl_lens as il
from experiments.__main__ import main
from experiments.lab import study as lab
from experiments.lab.passes import Passes, columns_of, joined, tensors_from
from experiments.lab.study import Study, StudySettings, Variant
from experiments.lab.work import Work
from icl_lens.locate.folder import RunFolder, opened

ROWS = 6
# One of each kind of pass: shared reductions, reductions of some rows, edits, and every loop of its own.
IDS = ["order", "ffn", "shallow-flow", "head-atlas"]
RESULTS = {"table.parquet", "table.csv", "figure.png", "figure.pdf", "result.json"}
RESULTS |= {"figure-contrast.png", "figure-contrast.pdf"}
WORDS = {
    "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
    "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
}


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """Several batches in every pass, also in forked children."""
    before, lab.MOST_ROWS = lab.MOST_ROWS, ROWS
    yield
    lab.MOST_ROWS = before


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save("gpt2", folder / "tiny")
    (folder / "words.json").write_text(json.dumps({"categories": WORDS}))
    given = ["--model", folder / "tiny", "--path", folder / "words.json", "-n", 20, "--device", "cpu"]
    return ["run", *IDS, *given]


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    """The files of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert ended(forked(main, ["experiments", *inputs, "--out", out])) == 0
    return contents(out)


def chunks_of(found):
    return [name for name in found if "/passes/" in name and name.endswith(".parquet")]


def run(inputs, out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *map(str, inputs), "--out", str(out)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


def test_every_pass_leaves_chunks(unbroken):
    """Results of every experiment, and chunks of every batch of every pass, with their configuration."""
    here = "tiny/sentiment-number"
    assert {name for name in unbroken if "/passes/" not in name} == {f"{here}/{i}/{f}" for i in IDS for f in RESULTS}
    names = {Path(name).name for name in chunks_of(unbroken)}
    assert {"head_increases", "class_attention", "NeuronIncreases"} <= {name.split("-")[0] for name in names}
    passes = {name.rsplit("-", 2)[0] for name in names}
    assert {"blocked", "repeated", "means"} <= passes
    manifest = json.loads(next(data for name, data in unbroken.items() if name.endswith("manifest.json")))
    assert {"n", "seed", "weights", "prompts_digest", "data", "code", "versions", "dtype", "device"} <= set(manifest)


def test_killed_and_taken_up(inputs, unbroken, tmp_path):
    """SIGKILL at four moments all over the run: nothing lost or written twice, the same bytes in the end."""
    out, total, rng = tmp_path / "out", len(chunks_of(unbroken)), random.Random(2)
    before = {}
    for target in sorted(rng.sample(range(1, total - 10), 4)):
        pid = forked(main, ["experiments", *inputs, "--out", out], pause=0.002)
        assert killed(pid, lambda target=target: len(stamps(out, "passes/*/*.parquet")) >= target) == -signal.SIGKILL
        after = stamps(out, "passes/*/*.parquet")
        assert target <= len(after) < total
        assert before.items() <= after.items(), "a chunk was lost or written twice"
        before = after
    assert ended(forked(main, ["experiments", *inputs, "--out", out])) == 0
    assert before.items() <= stamps(out, "passes/*/*.parquet").items()
    found = contents(out)
    assert found.keys() == unbroken.keys()
    assert [name for name in found if found[name] != unbroken[name]] == []


def test_a_damaged_chunk_is_computed_again(inputs, unbroken, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for name, data in unbroken.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    (out / "tiny/sentiment-number/order/result.json").unlink()
    needed = [name for name in chunks_of(unbroken) if "class_attention" in name]
    data = bytearray(unbroken[needed[0]])
    data[len(data) // 2] ^= 0xFF
    (out / needed[0]).write_bytes(data)
    others = stamps(out, "passes/*/*.parquet")
    code, _, said = run(inputs, out, monkeypatch, capsys)
    assert (code, said.count("\n")) == (0, 1)
    assert f"{Path(needed[0]).name} is damaged" in said
    assert contents(out) == unbroken
    del others[Path(needed[0]).name]
    assert others.items() <= stamps(out, "passes/*/*.parquet").items()


def test_half_a_result_of_a_killed_run_is_removed(inputs, unbroken, tmp_path, monkeypatch, capsys):
    """What `replacing` had begun to write; other hidden files are the user's."""
    out = tmp_path / "out"
    for name, data in unbroken.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    folder = out / "tiny/sentiment-number/order"
    (folder / "result.json").unlink()
    (folder / ".icl_lens-table-rmd6ap0d.csv").write_text("half")
    (folder / ".note").write_text("mine")
    assert run(inputs, out, monkeypatch, capsys)[0] == 0
    assert not (folder / ".icl_lens-table-rmd6ap0d.csv").exists()
    assert (folder / ".note").read_text() == "mine"
    (folder / ".note").unlink()
    assert contents(out) == unbroken


def test_chunks_of_other_sources_are_not_taken_up(inputs, unbroken, tmp_path, monkeypatch, capsys):
    """They are removed, since nothing can take them up; chunks of other settings stay."""
    few = ["run", "order", *inputs[1 + len(IDS) :]]
    out = tmp_path / "out"
    assert run([*few, "--seed", 1], out, monkeypatch, capsys)[0] == 0
    (out / "tiny/sentiment-number/order/result.json").unlink()
    assert run(few, out, monkeypatch, capsys)[0] == 0
    passes = out / "tiny/sentiment-number/passes"
    both = {path.name for path in passes.iterdir()}
    (out / "tiny/sentiment-number/order/result.json").unlink()
    monkeypatch.setattr("experiments.lab.runner.code_digest", lambda: "edited")
    assert run(few, out, monkeypatch, capsys)[0] == 0
    now = {path.name for path in passes.iterdir()}
    assert len(both) == len(now) == 2
    assert len(both & now) == 1
    (kept,) = both & now
    assert json.loads((passes / kept / "manifest.json").read_text())["seed"] == 1


def test_two_runs_cannot_write_one_folder(inputs, tmp_path, monkeypatch, capsys):
    with opened(tmp_path / "out" / "tiny" / "sentiment-number"):
        code, _, said = run(inputs, tmp_path / "out", monkeypatch, capsys)
    assert (code, said.count("\n")) == (2, 1)
    assert "another run is writing the folder" in said


def test_interrupted_says_how_it_goes_on(inputs, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.lab.study.Study.collect", interrupted)
    code, _, said = run(inputs, tmp_path / "out", monkeypatch, capsys)
    assert (code, said.count("\n")) == (130, 1)
    assert "experiments: interrupted; the same command goes on from the chunks in" in said


# The waist


def test_chunks_hold_tensors_as_they_are(tmp_path):
    folder = RunFolder(tmp_path, {"x": 1})
    tensors = {
        "flat": torch.tensor([1.5, float("nan"), -0.0]),
        "deep": torch.randn(3, 4, 5, 2, dtype=torch.float64),
        "whole": torch.tensor([[2**62, 1], [3, 4], [5, 6]]),
    }
    folder.write("a-00000.parquet", columns_of(tensors))
    back = tensors_from(folder.read("a-00000.parquet"))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert back[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_tensors_that_cannot_be_kept_are_refused():
    with pytest.raises(il.InputError, match=r"torch\.bool, which is not kept"):
        Passes().run("x", [1], lambda i: {"value": torch.ones(1, dtype=torch.bool)})
    (found,) = Passes().run("x", [1], lambda i: {"value": torch.ones(1, dtype=torch.bfloat16)})
    assert found["value"].dtype == torch.float32


def test_passes_are_told_apart(gpt2, tmp_path):
    """Two passes with the same words are two; the same place in another run is the same."""
    calls = []

    def compute(value):
        return lambda i: calls.append(value) or {"value": torch.full((2,), float(value + i))}

    for again in (False, True):
        passes = Passes(RunFolder(tmp_path, {"x": 1}))
        for part, offset in (("one", 0), ("other", 100)):
            with passes.part(part):
                for value in (offset + 1, offset + 10):
                    found = joined(passes.run("the same words", [2, 2], compute(value)))
                    assert found["value"].tolist() == [value, value, value + 1, value + 1]
        assert calls == [1, 1, 10, 10, 101, 101, 110, 110], again


def test_a_reduction_that_is_new_joins_those_that_are_there(gpt2, tmp_path):
    """One capture a batch for what is missing there, and nothing else is computed again."""
    from experiments.lab import reductions

    path = tmp_path / "words.json"
    path.write_text(json.dumps({"categories": WORDS}))
    settings = StudySettings(model="tiny", n=20, path=str(path))

    def values(*wanted):
        study = Study(gpt2, settings, passes=Passes(RunFolder(tmp_path, {"x": 1})))
        study.collect([lab.Need(Variant(), reduction) for reduction in wanted])
        return [study.get(reduction) for reduction in wanted]

    (first,) = values(reductions.correct)
    (tmp_path / next(iter(stamps(tmp_path, "correct-*00002.parquet")))).unlink()
    kept = stamps(tmp_path, "*.parquet")
    again, increases = values(reductions.correct, reductions.head_increases)
    assert kept.items() <= stamps(tmp_path, "*.parquet").items()
    assert torch.equal(first, again)
    batch = il.tokenize(gpt2, il.load_task("sentiment-number", n=20, path=path), labels=("foo", "bar"))
    expected = il.head_log_prob_increase(il.capture(gpt2, batch), batch.answer_tokens)
    torch.testing.assert_close(increases, expected, atol=1e-5, rtol=0)


def test_work_left_is_estimated_and_mended(gpt2, monkeypatch):
    """Rate counts what was computed, not what was found; a part that has ended took what it took."""
    clock = [0.0]
    monkeypatch.setattr("experiments.lab.work.time.monotonic", lambda: clock[0])
    work = Work()
    work._open = {"shared": 100.0, "a": 50.0, "b": 10.0}
    work.begin("shared")
    work("x", 60, computed=False)
    assert (work.done, work.total, work.rate) == (60, 160, None)
    work("x", 40, computed=True)
    clock[0] = 10.0
    assert (work.rate, work.left) == (4.0, 15.0)
    work.end()
    work.begin("a")
    work("y", 80, computed=True)
    assert work.total == 190
    work.end()
    assert (work.done, work.total) == (180, 190)


# Several processes


def same_tables(found, expected):
    """The same results within 1e-5, and verdicts."""
    assert found.keys() == expected.keys()
    for name in found:
        if name.endswith("table.parquet"):
            ours, theirs = (pd.read_parquet(io.BytesIO(files[name])) for files in (found, expected))
            pd.testing.assert_frame_equal(ours, theirs, check_exact=False, rtol=0, atol=1e-5)
        if name.endswith("result.json"):
            ours, theirs = (json.loads(files[name]) for files in (found, expected))
            assert ours["verdict"]["outcome"] == theirs["verdict"]["outcome"]
            assert ours["configuration"] == theirs["configuration"]


@pytest.mark.slow
@pytest.mark.parametrize("way", LAUNCHES)
def test_two_processes(inputs, unbroken, tmp_path, way):
    """Two processes compute different chunks, of every pass half of them each; none twice; the same results."""
    out = tmp_path / "out"
    given = ["experiments", *inputs, "--out", out]
    ran, chunks = launched(LAUNCHES[way], given, tmp_path / "log", LOGGED_ROWS=str(ROWS))
    assert ran.returncode == 0, ran.stderr
    assert sorted(rank for rank, _ in chunks) == [0, 1]
    assert len({pid for _, pid in chunks}) == 2
    first, second = (chunks[key] for key in sorted(chunks))
    assert sorted(first + second) == sorted(Path(name).name for name in chunks_of(unbroken))
    ours, theirs = (Counter(name.rsplit("-", 1)[0] for name in names) for names in (first, second))
    assert {ours[name] - theirs[name] for name in ours | theirs} <= {0, 1}, "of every pass each takes half"
    assert sum(theirs.values()) > 20
    assert ran.stdout.count("over both labels and orders") == 1
    same_tables(contents(out), unbroken)


@pytest.mark.slow
def test_one_of_two_dies(inputs, unbroken, tmp_path):
    """The other ends with one line that says which; one process alone goes on from what is there."""
    out = tmp_path / "out"
    given = ["experiments", *inputs, "--out", out]
    ran, chunks = launched(TORCHRUN, given, tmp_path / "log", LOGGED_ROWS=str(ROWS), LOGGED_DEATH="1 20")
    assert ran.returncode != 0
    (pid,) = (pid for rank, pid in chunks if rank == 1)
    lines = [line for line in ran.stderr.splitlines() if line.startswith(("icl-lens: ", "experiments: "))]
    assert len(lines) == 1
    assert f"process 1 of 2 (pid {pid} on" in lines[0]
    there = stamps(out, "passes/*/*.parquet")
    assert 0 < len(there) < len(chunks_of(unbroken))
    assert ended(forked(main, ["experiments", *inputs, "--out", out])) == 0
    assert there.items() <= stamps(out, "passes/*/*.parquet").items()
    same_tables(contents(out), unbroken)


@pytest.mark.slow
def test_an_experiment_that_cannot_be_run_in_one_process_is_none_in_all(inputs, tmp_path):
    """An error of one process's batch is told once, and the other experiments go on."""
    out = tmp_path / "out"
    given = ["experiments", "run", "ffn", "order", *inputs[1 + len(IDS) :], "--out", out]
    ran, _ = launched(TORCHRUN, given, tmp_path / "log", LOGGED_ROWS=str(ROWS), LOGGED_REFUSE="1 NeuronIncreases")
    assert ran.returncode != 0
    assert ran.stdout.count("ffn: cannot be run: refused by rank 1") == 1
    assert (out / "tiny/sentiment-number/order/result.json").is_file(), ran.stderr[-1500:]
    assert not (out / "tiny/sentiment-number/ffn").exists()
    assert sum(line.startswith("experiments: ") for line in ran.stderr.splitlines()) == 1
