"""Programs started in other processes: forked ones to kill, and several started together by a
launcher.
"""

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tolerance import tolerance

from icl_lens.prompts.tasks import load_task

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "PORT"]
NODES = [
    "-m",
    "torch.distributed.run",
    "--nnodes",
    "2",
    "--node_rank",
    "NODE",
    "--nproc_per_node",
    "1",
]
NODES += ["--master_addr", "127.0.0.1", "--master_port", "PORT"]
SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "NODE",
    "SLURM_LOCALID": "NODE",
    "MASTER_PORT": "PORT",
}
SRUN |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
LAUNCHES = {"torchrun": TORCHRUN, "accelerate": ACCELERATE, "two nodes": NODES, "srun": SRUN}
"""Ways to start two processes: on one machine by each launcher, on two "machines" that are both this one, and with the
variables that srun sets for each task."""


def forked(main, arguments, *, dies_after=None, kind="part"):
    """Run `main` with these arguments in a forked child process; return the process id.

    With `dies_after`, the child dies of SIGKILL once it wrote this number of chunks of `kind` and
    half of the next one.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if dies_after is not None:
            write, chunks = Path.write_bytes, []

            def write_or_die(path, data):
                if f"{kind}-" in path.name:
                    if len(chunks) == dies_after:
                        write(path, data[: len(data) // 2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    chunks.append(path)
                return write(path, data)

            Path.write_bytes = write_or_die
        sys.argv = list(map(str, arguments))
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def ended(pid):
    """Wait for a child process to end; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def undisturbed(main, arguments, out):
    """Run `main` to its end in a child process; return the `contents` of its output folder."""
    assert ended(forked(main, arguments)) == 0
    return contents(out)


def contents(out):
    """Return {path: bytes} of every file under a folder, except locks."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if _kept(path)
    }


def restore(files, out):
    """Write the files of `contents` into a folder."""
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)


def locating_half(task, words, n):
    """Return the prompts on which the command locates heads: those that are not held out."""
    return load_task(task, n=4 * n, path=words)[:n]  # too few queries for two halves


def stamps(out, pattern):
    """Return {name: (time of writing, inode)} of each file: a file that is written again gets
    others.
    """
    whole = (
        path for path in out.rglob(pattern) if not path.name.startswith(".")
    )  # hidden files are half-written
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in whole}


def _kept(path):
    return path.is_file() and path.name != ".lock"


def of_kind(chunks, kind):
    """Return {(rank, process id): chunks of one kind}."""
    return {
        key: [name for name in names if name.startswith(f"{kind}-")]
        for key, names in chunks.items()
    }


def assert_shared(chunks, numbers, kind="part"):
    """Assert that two processes computed the chunks of these numbers, each chunk once and each
    process about half.
    """
    chunks = of_kind(chunks, kind)
    assert sorted(rank for rank, _ in chunks) == [0, 1]
    first, second = (chunks[key] for key in sorted(chunks))
    assert sorted(first + second) == [f"{kind}-{number:05d}.parquet" for number in numbers]
    assert abs(len(first) - len(second)) <= 1


def same_numbers(out, expected):
    """Assert that the tables of a run are those of another: equal heads and prompts, values up to
    rounding.
    """
    written = contents(out)
    assert written.keys() == expected.keys()
    for name in written:
        if name.endswith(".parquet"):
            ours, theirs = (
                pd.read_parquet(io.BytesIO(data)) for data in (written[name], expected[name])
            )
            pd.testing.assert_frame_equal(ours, theirs, check_exact=False, rtol=0, atol=tolerance())


def launched(launch, arguments, log, **environment):
    """Run `icl-lens` by a launcher; return every node's result, and {(rank, process id): chunks it
    computed}.
    """
    log.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = os.environ | environment | {"OMP_NUM_THREADS": "1", "LOGGED": str(log)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    nodes = []
    for node in ["0", "1"] if "NODE" in launch or launch is SRUN else ["0"]:
        filled = {"PORT": port, "NODE": node}
        words, variables = ([], launch) if isinstance(launch, dict) else (launch, {})
        command = [sys.executable, *[filled.get(word, word) for word in words], "-m", "logged"]
        process_environment = environment | {
            name: filled.get(value, value) for name, value in variables.items()
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(
            subprocess.Popen([*command, *map(str, arguments)], env=process_environment, **pipes)
        )
    try:
        texts = [node.communicate(timeout=400) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    ran = [
        subprocess.CompletedProcess(node.args, node.returncode, *text)
        for node, text in zip(nodes, texts, strict=True)
    ]
    chunks = {
        tuple(map(int, path.name.split("-"))): path.read_text().splitlines()
        for path in log.iterdir()
    }
    return ran, chunks
