"""Training of the bundled models: a killed run resumes to the same result, and training ends by its own rule."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerance import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.bundled_models import train as training
from experiments.bundled_models.curriculum import LEVELS
from experiments.bundled_models.episodes import BUNDLED, load_words
from experiments.bundled_models.train import CHECKPOINT, TrainConfig, Trainer, thin_out, train
from icl_lens.errors import InputError

pytestmark = pytest.mark.slow

WORDS = load_words()
SMALL = TrainConfig("gpt2", n_tokens=120, check_every=2, n_checked=4, steps=5)
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED / "icl-mini")


@pytest.fixture(autouse=True)
def _one_tokenizer(monkeypatch):
    """Use one tokenizer in all tests: learning its pieces takes seconds and always gives the same ones."""
    monkeypatch.setattr(training, "make_tokenizer", lambda *args: TOKENIZER)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from experiments.bundled_models.train import TrainConfig, Trainer, train
torch.set_num_threads(1)
step = Trainer.step
def until_the_fourth(self):
    if self.progress.done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
Trainer.step = until_the_fourth
folder = Path(sys.argv[1])
settings = TrainConfig(sys.argv[2], n_tokens=120, check_every=2, n_checked=4, steps=5)
train(settings, folder / "model", folder / "kept", resume=True)
"""


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gptj"])
def test_a_killed_training_ends_with_the_same_weights_in_a_loadable_folder(arch, tmp_path):
    settings, folder = replace(SMALL, arch=arch), tmp_path / "model"
    root = Path(training.__file__).parent.parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), arch], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not folder.exists()
    train(settings, folder, tmp_path / "kept", resume=True)
    train(settings, tmp_path / "whole", tmp_path / "other", resume=True)
    weights, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "model"))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    histories = [json.loads((tmp_path / name / "training.json").read_text())["history"] for name in ("whole", "model")]
    assert histories[0] == histories[1]
    assert [entry["step"] for entry in histories[0]] == [2, 4]
    kept = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("other", "kept")]
    assert kept[0] == kept[1] == [CHECKPOINT, "step-000002.safetensors", "step-000004.safetensors"]
    assert not list(tmp_path.glob(".*"))
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000
    record = json.loads((folder / "training.json").read_text())
    assert (record["arch"], record["done"], record["finished"]) == (arch, 5, False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = "love : bar like : bar eight : foo two : foo one :"
    tokens = torch.tensor([tokenizer(prompt).input_ids])
    assert tokenizer.decode(tokens[0]) == prompt
    trainer = Trainer(settings, WORDS)
    trainer.resume(tmp_path / "kept")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert_close(model(input_ids=tokens).logits, trainer.model.eval()(input_ids=tokens).logits)
    trainer.snapshot(tmp_path)
    for name, tensor in load_file(tmp_path / "step-000005.safetensors").items():
        assert torch.equal(tensor, trainer.model.get_parameter(name).half())


def test_a_run_that_is_not_resumed_begins_anew(tmp_path):
    settings = replace(SMALL, steps=1)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "step-000900.safetensors").touch()
    train(settings, tmp_path / "model", tmp_path / "kept", resume=False)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [CHECKPOINT]


def test_resuming_another_run_is_refused(tmp_path):
    trainer = Trainer(SMALL, WORDS)
    trainer.step()
    trainer.save(tmp_path)
    with pytest.raises(InputError, match="--no-resume"):
        Trainer(replace(SMALL, seed=1), WORDS).resume(tmp_path)


def checked(monkeypatch, accuracies, *, level, at):
    """Return a trainer after checks with these accuracies, 100 steps apart, and whether it had finished after each."""
    trainer = Trainer(TrainConfig("gpt2"), WORDS)
    trainer.progress.level = level
    finished = []
    for i, accuracy in enumerate(accuracies):
        trainer.progress.done = at + 100 * i
        monkeypatch.setattr(training, "label_accuracy", lambda *args, accuracy=accuracy: accuracy)
        trainer.check()
        finished.append(trainer.progress.finished)
    return trainer, finished


LAST = len(LEVELS) - 1


@pytest.mark.parametrize(
    ("accuracies", "level", "cooling_began", "finished"),
    [
        # Cooling takes a fifth of 1,000 steps, whatever accuracy does meanwhile.
        ([87.9, 88.0, 60.0, 60.0], LAST, 1000, [False, False, False, True]),
        ([96.9, 97.0], LAST, 900, [False, True]),
        ([99.0, 99.0], LAST - 1, None, [False, False]),
    ],
    ids=["enough", "more than enough", "an earlier level"],
)
def test_training_ends_by_its_accuracy(monkeypatch, accuracies, level, cooling_began, finished):
    trainer, found = checked(monkeypatch, accuracies, level=level, at=900)
    assert (trainer.progress.cooling_began, found) == (cooling_began, finished)
    if len(accuracies) == 4:
        trainer.progress.done = 1100
        assert trainer.rate() == pytest.approx(0.3 * 0.5)  # slow since step 750, and half of the fall
        trainer.progress.done = 1200
        assert trainer.rate() == 0.0


@pytest.mark.parametrize(("accuracy", "last"), [(LEVELS[0].until - 0.01, 0), (LEVELS[0].until, LAST)])
def test_a_level_ends_once_its_accuracy_and_its_least_length_are_reached(monkeypatch, accuracy, last):
    trainer = Trainer(replace(SMALL, min_level_steps=2), WORDS)
    monkeypatch.setattr(training, "known_label_accuracy", lambda *args: accuracy)
    found = [0]
    for _ in range(12):
        trainer.step()
        found.append(trainer.progress.level)
    levels, lengths = zip(*[(level, len(list(steps))) for level, steps in itertools.groupby(found)], strict=True)
    assert levels == tuple(range(last + 1))
    assert min(lengths) >= 2


@pytest.mark.parametrize(("n", "kept"), [(25, 10), (11, 10), (4, 4), (0, 0)])
def test_ten_snapshots_are_left_the_first_and_the_last_among_them(n, kept, tmp_path):
    for step in range(1, n + 1):
        (tmp_path / f"step-{100 * step:06d}.safetensors").touch()
    (tmp_path / CHECKPOINT).touch()
    thin_out(tmp_path)
    steps = sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert len(steps) == kept
    if n:
        assert (steps[0], steps[-1]) == (100, 100 * n)
        gaps = [b - a for a, b in itertools.pairwise(steps)]
        assert max(gaps) - min(gaps) <= 100
    assert (tmp_path / CHECKPOINT).exists()
