"""The cache of GGUF files: one conversion, even by two processes; nothing incomplete is used, even
after a kill.
"""

import itertools
import logging
import os
import resource
import signal
import sys
import time

import gguf_files
import pytest
import torch
from launches import ended, forked

import icl_lens as il
from icl_lens.models.checkpoints import file_digests, gguf

pytestmark = pytest.mark.slow

IDS = torch.arange(20)[None]


@pytest.fixture(autouse=True)
def cache(gguf_cache):
    return gguf_cache


@pytest.fixture
def file(tmp_path):
    gguf_files.write("llama", tmp_path / "x.gguf", "Q8_0")
    return tmp_path / "x.gguf"


def load(file):
    return il.load_model(str(file), device="cpu")


def logits(model):
    with torch.no_grad():
        return model(IDS)


def folders(cache):
    """What the cache contains besides locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def conversions(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("converting")
    ]


def child(file, log, *, ready=lambda: True, limit=None):
    """Start a child process that loads `file` and writes its id and its log to `log`; return its
    id.

    It writes all converted weights, but does not put them in place until `ready()`.
    """

    def main():
        logger = logging.getLogger("icl_lens")
        logger.handlers = [logging.FileHandler(log)]
        logger.warning("process %d", os.getpid())
        convert = gguf._convert

        def convert_and_wait(*arguments):
            converted = convert(*arguments)
            while not ready():
                time.sleep(0.01)
            return converted

        gguf._convert = convert_and_wait
        if limit is not None:  # no file may grow larger, as on a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            load(file)
        except il.InputError as error:
            logger.warning("refused: %s", error)
            sys.exit(2)
        logger.warning("loaded")

    return forked(main, [])


def test_the_same_content_is_converted_once_wherever_it_lies(file, cache, caplog, tmp_path):
    first = logits(load(file))
    (name,) = folders(cache)
    written = (cache / name / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "copy.gguf").write_bytes(file.read_bytes())
    for again in (file, tmp_path / "copy.gguf"):
        assert torch.equal(logits(load(again)), first)
    assert len(conversions(caplog)) == 1
    assert folders(cache) == [name]
    assert (cache / name / "model.safetensors").stat().st_mtime_ns == written


def test_other_content_under_the_same_name_is_converted_anew(file, cache, caplog):
    before = logits(load(file))
    model = gguf_files.build("llama")
    with torch.no_grad():
        model.lm_head.weight.neg_()
    gguf_files.write("llama", file, "Q8_0", model=model)
    assert len(conversions(caplog)) == 1
    assert not torch.allclose(logits(load(file)), before, atol=0.1)
    assert len(conversions(caplog)) == 2
    assert len(folders(cache)) == 2


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_a_model(file, cache, tmp_path):
    log = tmp_path / "log"
    assert ended(child(file, log, ready=lambda: os.kill(os.getpid(), signal.SIGKILL))) == -9
    assert "loaded" not in log.read_text().splitlines()
    (partial,) = folders(cache)
    assert ".partial-" in partial
    assert (
        cache / partial / "model" / "model.safetensors"
    ).is_file()  # killed with all of it written
    loaded = logits(load(file))
    (whole,) = folders(cache)
    assert ".partial-" not in whole
    expected = logits(gguf_files.restored("llama", file)).logits  # the file itself is still there
    torch.testing.assert_close(loaded, expected, atol=1e-4, rtol=0)


def test_two_processes_convert_a_file_once(file, cache, tmp_path):
    logs = [tmp_path / f"log {number}" for number in range(2)]
    children = [child(file, log, ready=lambda: all(log.exists() for log in logs)) for log in logs]
    assert [ended(process) for process in children] == [0, 0]
    logged_lines = [log.read_text().splitlines() for log in logs]
    all_lines = list(itertools.chain.from_iterable(logged_lines))
    pids = {line for line in all_lines if line.startswith("process")}
    assert len(pids) == 2
    assert sum(line.startswith("converting") for line in all_lines) == 1
    assert [lines[-1] for lines in logged_lines] == ["loaded", "loaded"]
    (name,) = folders(cache)
    assert ".partial-" not in name


def test_a_full_disk_is_said_and_leaves_nothing(file, cache, tmp_path):
    assert ended(child(file, tmp_path / "log", limit=100_000)) == 2
    *_, refused = (tmp_path / "log").read_text().splitlines()
    assert refused.startswith("refused: cannot write the converted weights of 'x.gguf'")
    assert "free space there, or set the environment variable XDG_CACHE_HOME" in refused
    assert folders(cache) == []
    torch.testing.assert_close(
        logits(load(file)), logits(gguf_files.restored("llama", file)).logits, atol=1e-4, rtol=0
    )


def zero_second_half(path):
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + bytes(path.stat().st_size - half))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [zero_second_half, cut_short])
def test_a_damaged_conversion_says_which_folder_to_delete(damage, file, cache):
    load(file)
    (name,) = folders(cache)
    damage(cache / name / "model.safetensors")
    message = f"'model.safetensors' of .* is damaged; delete the folder '.*{name}' and retry to reconvert it"
    with pytest.raises(il.InputError, match=message):
        load(file)


def test_a_zeroed_page_of_a_large_file_is_noticed(tmp_path, monkeypatch):
    """Each page in turn: the first, one inside, the last whole one, and the rest after it."""
    monkeypatch.setattr(file_digests, "_WHOLE", 0)
    content = bytes(range(1, 256)) * 100
    (tmp_path / "weights").write_bytes(content)
    file_digests.record_digests(tmp_path)
    assert file_digests.damaged_file(tmp_path) is None
    for start in range(0, len(content), 4096):
        end = min(start + 4096, len(content))
        (tmp_path / "weights").write_bytes(content[:start] + bytes(end - start) + content[end:])
        assert file_digests.damaged_file(tmp_path) == "weights", start


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_replaced_during_its_conversion_is_not_kept_under_the_old_digest(
    when, file, cache, monkeypatch
):
    """Replaced by another of the same size, before or after its weights are read; the original then
    loads right.
    """
    original = file.read_bytes()
    model = gguf_files.build("llama")
    with torch.no_grad():
        model.lm_head.weight.neg_()
    gguf_files.write("llama", file.with_name("other.gguf"), "Q8_0", model=model)
    convert = gguf._convert

    def convert_while_replacing(path, *options):
        if when == "before":
            file.with_name("other.gguf").replace(file)
        convert(path, *options)
        if when == "after":
            file.with_name("other.gguf").replace(file)

    monkeypatch.setattr(gguf, "_convert", convert_while_replacing)
    with pytest.raises(
        il.InputError, match=r"x.gguf' must not change while it is converted, but it was replaced"
    ):
        load(file)
    assert folders(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    file.write_bytes(original)
    torch.testing.assert_close(
        logits(load(file)), logits(gguf_files.restored("llama", file)).logits, atol=1e-4, rtol=0
    )


def test_what_is_converted_is_on_the_disk_before_it_is_in_place(file, cache, monkeypatch):
    synced = []
    monkeypatch.setattr(
        file_digests.os,
        "fsync",
        lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")),
    )
    load(file)
    (name,) = folders(cache)
    names = {path.name for path in (cache / name).iterdir()} | {"model", cache.name}
    assert {os.path.basename(path) for path in synced} == names
    assert all(".partial-" in path for path in synced[:-1])
