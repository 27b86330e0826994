"""`icl-lens locate`: runs that are killed, distributed or disturbed give the same results, or one
clear line.
"""

import errno
import json
import os
import random
import signal
import time
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from cases import slow
from launches import (
    LAUNCHES,
    assert_shared,
    contents,
    ended,
    forked,
    launched,
    locating_half,
    of_kind,
    restore,
    same_numbers,
    stamps,
    undisturbed,
)
from shared import CATEGORIES
from tolerance import assert_close

import icl_lens as il
from icl_lens.cli import main
from icl_lens.prompts.tasks import load_task
from icl_lens.runs.distributed import Distributed
from icl_lens.runs.stream import ChunkStream

N, BATCH = 36, 3
rotating = partial(pytest.param, marks=pytest.mark.rotating)


@pytest.fixture(scope="module")
def inputs(tiny, words):
    """Arguments of a run on a tiny model (-n: torchrun takes --n for its own); only launched runs
    check the task.
    """
    task = ["--task", "sentiment-number", "--path", str(words), "-n", str(N), "--by", "increase"]
    return [
        *task,
        "--anyway",
        "--model",
        str(tiny),
        "--device",
        "cpu",
        "--top",
        "3",
        "--batch-size",
        str(BATCH),
    ]


@pytest.fixture
def run(run):
    return partial(run, "locate", "--no-check")


@pytest.fixture(scope="module")
def unbroken(inputs, tmp_path_factory):
    """The files of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("unbroken") / "out"
    return undisturbed(main, ["icl-lens", "locate", "--no-check", *inputs, "--out", out], out)


def one_line(code, stderr, *fragments):
    assert code == 2
    assert stderr.startswith("icl-lens: ")
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr
    for fragment in fragments:
        assert fragment in stderr


def test_files_and_table_hold_the_packages_numbers(inputs, unbroken, run, tmp_path, gpt2, words):
    code, stdout, _ = run(*inputs, "--out", tmp_path / "out")
    assert code == 0
    assert contents(tmp_path / "out") == unbroken
    assert "what a head adds to log p(answer)" in " ".join(stdout.split())
    table = pd.read_parquet(tmp_path / "out" / "heads.parquet")
    assert list(table.columns)[:5] == ["name", "score", "low", "high", "selected"]
    assert {
        "contrast",
        "effect",
        "effect_low",
        "effect_high",
        "keys",
        "rank",
        "layer",
        "head",
    } < set(table.columns)
    pd.testing.assert_frame_equal(table, pd.read_csv(tmp_path / "out" / "heads.csv"))
    assert all(name in stdout for name in table["name"][:3])
    assert ((table["low"] < table["score"]) & (table["score"] < table["high"])).all()
    # Against the package, prompt by prompt.
    batch = il.tokenize(gpt2, locating_half("sentiment-number", words, N))
    increases = il.head_log_prob_increase(il.capture(gpt2, batch), batch.answer_tokens)
    best = increases.mean(0).flatten().sort(descending=True)
    assert_close(table["score"], best.values)
    assert (table["layer"] * 4 + table["head"]).tolist() == best.indices.tolist()
    # The parts hold every prompt's own values.
    parts = pd.concat(
        [pd.read_parquet(path) for path in sorted((tmp_path / "out").glob("part-*.parquet"))]
    )
    parts = parts.sort_values("prompt")
    assert parts["prompt"].tolist() == list(range(N))
    assert_close(np.stack(parts["increase"]), increases.flatten(1))
    # The manifest and the parts state where the numbers come from.
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    metadata = pq.read_schema(tmp_path / "out" / "part-00000.parquet").metadata
    for name in (
        "model",
        "revision",
        "weights",
        "task",
        "seed",
        "template",
        "final_norm",
        "bias",
        "versions",
    ):
        assert name in manifest
        assert f"icl_lens.{name}".encode() in metadata


@pytest.mark.slow
def test_without_a_folder_nothing_is_written_and_the_table_has_intervals(
    inputs, run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, stdout, _ = run(*inputs)
    assert code == 0
    assert "95% interval" in stdout
    assert "95% intervals are over " in " ".join(stdout.split())
    assert list(tmp_path.iterdir()) == []


def test_interrupted_says_how_it_goes_on(inputs, run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("icl_lens.measures.head_measures.DirectMeasure.measure", interrupted)
    code, _, stderr = run(*inputs, "--out", tmp_path / "out")
    assert code == 130
    assert "rerun the same command to resume from" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_your_own_columns_and_labels_are_used(inputs, run, tmp_path):
    rows = ""
    for kind, words in CATEGORIES.items():
        rows += "".join(f"{word},{kind}\n" for word in words)
    (tmp_path / "notes.csv").write_text(f"note,kind\n{rows}\n")
    mine = [*inputs[4:], "--task", "notes", "--path", tmp_path / "notes.csv"]
    one_line(*run(*mine)[::2], "pass --columns 'note,kind'")
    one_line(*run(*mine, "--columns", "note")[::2], "--columns must name a text and a label column")
    out = tmp_path / "out"
    code, stdout, _ = run(
        *mine, "--columns", "note,kind", "--demonstrations", "1", "--labels", "yes,no", "--out", out
    )
    assert code == 0, stdout
    again = run(
        *mine,
        "--columns",
        "note, kind",
        "--demonstrations",
        "1",
        "--labels",
        "yes, no",
        "--out",
        out,
    )
    assert again[0] == 0, again[2]
    other_labels = ("--labels", "foo,bar", "--out", out)
    one_line(
        *run(*mine, "--columns", "note,kind", "--demonstrations", "1", *other_labels)[::2], "labels"
    )


@pytest.fixture(scope="module")
def located(gpt2, words):
    """Locate heads in Python, as the command does, by a run in a folder."""
    batch = il.tokenize(gpt2, load_task("sentiment-number", n=N, path=words))
    return lambda out: il.locate(gpt2, batch, k=3, by="increase", run=il.Run(out, batch_size=BATCH))


@pytest.mark.slow
def test_a_run_killed_ten_times_gives_the_same_bits(located, tmp_path):
    """SIGKILL in the middle of ten random chunks; nothing is lost or repeated, and the end is the
    same to the byte.
    """
    whole, unbroken = located(tmp_path / "unbroken"), contents(tmp_path / "unbroken")
    out, rng = tmp_path / "out", random.Random(0)
    before: dict[str, int] = {}
    for target in sorted(rng.sample(range(N // BATCH), 10)):
        killed = forked(lambda: located(out), [], dies_after=target - len(before))
        assert ended(killed) == -signal.SIGKILL
        assert any(path.name.startswith(".icl_lens-part-") for path in out.iterdir())
        after = stamps(out, "part-*")
        assert before.items() <= after.items(), "a part was lost or written twice"
        assert len(after) == target
        before = after
    assert 0 < len(before) < N // BATCH
    resumed = located(out)
    assert torch.equal(resumed.score.mean, whole.score.mean)
    assert torch.equal(resumed.score.low, whole.score.low)
    assert resumed.heads == whole.heads
    assert before.items() <= stamps(out, "part-*").items()
    assert contents(out) == unbroken
    assert {path.name for path in out.glob(".*")} <= {".lock"}


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_resumes(inputs, unbroken, run, tmp_path, monkeypatch):
    """If the disk fills up, the run prints one line; once space is free, it resumes and ends the
    same.
    """
    out, write = tmp_path / "out", Path.write_bytes

    def full(path, data):
        if len(list(out.glob("part-*.parquet"))) >= 5 and "part" in path.name:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        code, _, stderr = run(*inputs, "--out", out)
    one_line(code, stderr, "No space left", "part-00005.parquet", "free space", "same settings")
    assert len(contents(out)) == 6
    assert run(*inputs, "--out", out)[0] == 0
    assert contents(out) == unbroken


@pytest.mark.parametrize(
    "damage",
    ["copied", slow("cut"), slow("foreign")],
)
def test_a_damaged_part_is_computed_again(inputs, unbroken, run, tmp_path, damage):
    """A part that cannot be trusted is named and computed again; the others stay."""
    out = tmp_path / "out"
    restore(unbroken, out)
    for name in ("heads.csv", "heads.parquet", "result.json"):
        (out / name).unlink()
    path = out / "part-00003.parquet"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "copied":
        path.write_bytes((out / "part-00005.parquet").read_bytes())
    else:
        pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)
    untouched = (out / "part-00004.parquet").stat().st_mtime_ns
    code, _, stderr = run(*inputs, "--out", out)
    assert code == 0
    assert "part-00003.parquet is corrupt" in stderr
    assert "recomputing" in stderr
    assert stderr.count("\n") == 1
    assert contents(out) == unbroken
    assert (out / "part-00004.parquet").stat().st_mtime_ns == untouched


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_independent_runs_share_a_folder(located, tmp_path, monkeypatch, dies):
    """Each chunk is computed by one of three runs, and each run gets the result; one may die while
    it computes.
    """
    whole, unbroken = located(tmp_path / "unbroken"), contents(tmp_path / "unbroken")
    out, log = tmp_path / "out", tmp_path / "log"
    log.mkdir()
    compute = ChunkStream._compute

    def logged(self, in_round, *arguments):
        time.sleep(0.05)
        with (log / str(os.getpid())).open("a") as file:
            file.write(f"{in_round}\n")
        return compute(self, in_round, *arguments)

    def run():
        top = located(out)
        (log / f"{os.getpid()}-result").write_text(
            str((top.score.mean.tolist(), top.score.low.tolist(), top.heads))
        )

    monkeypatch.setattr(ChunkStream, "_compute", logged)
    children = [forked(run, [], dies_after=2 if dies and not i else None) for i in range(3)]
    assert [ended(child) for child in children] == [-signal.SIGKILL if dies else 0, 0, 0]
    computed = [(log / str(child)).read_text().splitlines() for child in children]
    assert all(len(chunks_of_run) >= 2 for chunks_of_run in computed), "each takes part"
    n_chunks = 2 * (N // BATCH)  # of scores, and of effects of the first heads
    assert len([*chain(*computed)]) == n_chunks + dies
    results = {(log / f"{child}-result").read_text() for child in children[dies:]}
    assert results == {str((whole.score.mean.tolist(), whole.score.low.tolist(), whole.heads))}
    assert contents(out) == unbroken


def test_the_tasks_of_a_job_step_are_counted(monkeypatch):
    """srun names rank, node and size; a batch script without srun is one process."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert Distributed.from_environment() == Distributed()
    step = {"STEP_NUM_TASKS": "4", "PROCID": "3", "LOCALID": "1", "JOB_ID": "81", "STEP_ID": "2"}
    for name, value in {**step, "STEP_NODELIST": "gpu[07-09,12],cpu3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    environments = []

    def state(**_):
        environments.append(
            {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
        )
        return SimpleNamespace(process_index=3, num_processes=4, local_process_index=1)

    monkeypatch.setattr("accelerate.PartialState", state)
    assert Distributed.from_environment().size == 4
    assert environments == [
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07"}
    ]


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", "1"), ("--layout", "reorder"), ("--n", "59")]
)
def test_another_configuration_in_a_folder_is_refused(
    inputs, unbroken, run, tmp_path, option, value
):
    out = tmp_path / "out"
    restore(unbroken, out)
    code, _, stderr = run(*inputs, option, value, "--out", out)
    one_line(code, stderr, "holds a run with", value, "choose another folder")
    assert contents(out) == unbroken


@pytest.mark.slow
def test_a_folder_of_other_files_is_refused(inputs, run, tmp_path):
    (tmp_path / "diary.txt").write_text("mine")
    code, _, stderr = run(*inputs, "--out", tmp_path)
    one_line(code, stderr, "diary.txt", "choose an empty or new folder")
    assert (tmp_path / "diary.txt").read_text() == "mine"
    code, _, stderr = run(*inputs, "--out", tmp_path / "diary.txt")
    one_line(code, stderr, "cannot write to folder", "choose another folder")


# Several processes


@pytest.fixture(scope="module")
def by_two(inputs, tmp_path_factory):
    """Return a function from a launch to (output folder, results, chunks) of its two processes;
    each runs once.
    """

    @cache
    def by_two(way):
        folder = tmp_path_factory.mktemp("two")
        arguments = ["locate", *inputs, "--out", folder / "out"]
        return folder / "out", *launched(LAUNCHES[way], arguments, folder / "log")

    return by_two


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torchrun", "srun", *map(rotating, ["accelerate", "two nodes"])])
def test_two_processes_share_the_work(by_two, unbroken, way):
    """Two processes compute different batches, each about half of them, and together what one
    computes.
    """
    out, nodes, chunks = by_two(way)
    assert [node.returncode for node in nodes] == [0] * len(nodes), nodes
    assert "".join(node.stdout for node in nodes).count("The score is what a head adds") == 1
    assert_shared(chunks, range(N // BATCH))
    same_numbers(out, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["srun", *map(rotating, ["accelerate", "two nodes"])])
def test_equal_bytes_for_an_equal_number_of_processes(by_two, way):
    assert contents(by_two(way)[0]) == contents(by_two("torchrun")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "way"), [(1, "torchrun"), rotating(0, "torchrun"), rotating(1, "two nodes")]
)
def test_a_run_resumes_after_one_of_two_processes_dies(inputs, unbroken, tmp_path, dead, way):
    """The other ends without a traceback of ours; three processes, or one, resume from the chunks."""
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = ["locate", *inputs, "--out", out]
    nodes, logged = launched(LAUNCHES[way], arguments, log, LOGGED_DEATH=f"{dead} 3")
    waited = time.time() - (log / f"{dead}-{dead_process(logged, dead)}").stat().st_mtime
    assert waited < 300, "gloo waits 30 minutes"
    assert all(node.returncode != 0 for node in nodes)
    check_errors("\n".join(node.stderr for node in nodes), dead_process(logged, dead))
    there = stamps(out, "part-*")
    check_chunks(there, logged, dead)
    if way == "torchrun" and dead:
        three = [{"2": "3"}.get(word, word) for word in LAUNCHES["torchrun"]]
        _, chunks = launched(three, arguments, tmp_path / "log3")
        assert sorted(rank for rank, _ in chunks) == [0, 1, 2]
        assert sum(map(len, of_kind(chunks, "part").values())) == N // BATCH - len(there)
    else:
        assert ended(forked(main, ["icl-lens", "locate", "--no-check", *inputs, "--out", out])) == 0
    assert there.items() <= stamps(out, "*").items()
    same_numbers(out, unbroken)


def dead_process(logged, dead):
    """Return the id of the process that has died, by its rank."""
    (pid,) = (pid for rank, pid in logged if rank == dead)
    return pid


def check_chunks(there, logged, dead):
    """The first chunk, and those that the process logged before it died, are there, but not all."""
    of_dead = logged[dead, dead_process(logged, dead)]
    assert len(of_dead) == 3
    assert {"part-00000.parquet", *of_dead} <= there.keys()
    assert there.keys() <= {"part-00000.parquet", *chain(*logged.values())}
    assert len(there) < N // BATCH


def check_errors(stderr, pid):
    """torchrun reports the killed process; ours say at most one line, without a traceback."""
    assert f"exitcode  : -{signal.SIGKILL:d} (pid: {pid})" in stderr
    assert "icl_lens/" not in stderr, "any traceback is the launcher's"
    lines = [line for line in stderr.splitlines() if line.startswith("icl-lens: ")]
    assert len(lines) <= 1, "the launcher may end the others before they notice"
    for line in lines:
        assert "another process has ended" in line
        assert "resumes from its chunks" in line


@pytest.mark.slow
def test_what_is_wrong_is_said_once(inputs, tmp_path):
    nodes, _ = launched(
        LAUNCHES["torchrun"], ["locate", *inputs, "--labels", "one"], tmp_path / "log"
    )
    assert nodes[0].returncode != 0
    assert nodes[0].stderr.count("icl-lens: ") == 1, nodes[0].stderr


def test_processes_of_mpi_are_counted(monkeypatch):
    """mpirun names the number of processes in its own way; accelerate knows the rest."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    state = SimpleNamespace(process_index=1, num_processes=2, local_process_index=1)
    monkeypatch.setattr("accelerate.PartialState", lambda **_: state)
    environments = Distributed.from_environment()
    assert (environments.rank, environments.size, environments.is_main) == (1, 2, False)


def test_accelerate_on_the_cpu_is_refused(monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts one process: refused, with what to do
    instead.
    """
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert Distributed.from_environment() == Distributed()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(il.InputError, match="torchrun --nproc_per_node 2"):
        Distributed.from_environment()
