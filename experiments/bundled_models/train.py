"""Train one bundled model: its levels, stopping rule, checkpoints and exported files.

A step's data is a function of (seed, step, level) and levels follow from accuracies, so an interrupted and resumed run
gives the same model as an uninterrupted one.
"""

import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from experiments.bundled_models.architectures import N_POSITIONS, NAMES, Arch, fuse_activations, make_model, matrices
from experiments.bundled_models.curriculum import LEVELS, Data
from experiments.bundled_models.episodes import (
    LABEL_WEIGHT,
    Episode,
    Vocabulary,
    balanced_episode,
    load_words,
    seen_pairs,
)
from experiments.bundled_models.muon import Muon
from experiments.bundled_models.tokenizer import make_tokenizer
from icl_lens.errors import InputError

CHECKPOINT = "checkpoint.safetensors"
N_SNAPSHOTS = 10
SHOWN = (2, 4, 8, 16)
"""Numbers of demonstrations in validation prompts; training episodes have 1 to 16."""
CHUNK = 32
"""Validation prompts per forward pass."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; a checkpoint can be resumed only with the same ones."""

    arch: Arch
    seed: int = 0
    n_tokens: int = 2000
    """Minimum number of tokens per batch."""
    matrix_rate: float = 0.01
    """Muon's learning rate, for the layers' matrices."""
    other_rate: float = 3e-3
    """AdamW's learning rate, for embeddings, norms and biases."""
    warm_up: int = 60
    """Steps in which both rates rise linearly from zero."""
    slow_from: int = 750
    slow: float = 0.3
    """Factor of both rates from step `slow_from` on: fast while words are learned, slower while they are compared."""
    min_level_steps: int = 100
    """Minimum number of steps per level, even if its accuracy is reached sooner."""
    memory: float = 0.96
    """Weight of the previous value in the running accuracy, an exponential moving average."""
    check_every: int = 100
    n_checked: int = 240
    """Number of prompts in each of the three validation sets: single words, texts, texts of seen pairs."""
    decay_accuracy: float = 88.0
    """Accuracy (%) on held-out pairs, in the last level, at which learning rates start to decay to zero."""
    stop_accuracy: float = 97.0
    """Accuracy (%) on held-out pairs, in the last level, at which training stops at once."""
    cool_down: float = 0.2
    """Length of the decay to zero, as a share of the steps before it, rounded down to a multiple of `check_every`."""
    steps: int = 12_000
    """Training ends here at the latest."""


@dataclass
class Progress:
    """How far a run has come; saved in its checkpoint."""

    done: int = 0
    level: int = 0
    level_began: int = 0
    cooling_began: int | None = None
    recent: float | None = None
    """Running accuracy (0 to 1) on what this level measures: names, or labels shown before."""
    seconds: float = 0.0
    """Processor time of all steps."""
    finished: bool = False


def weighted_loss(
    logits: Float[Tensor, "row pos vocab"], tokens: Int[Tensor, "row pos"], weights: Float[Tensor, "row pos"]
) -> Float[Tensor, ""]:
    """Return the weighted mean cross-entropy (nats) of tokens given those before them; the first is not predicted.

    Rows are padded on the right, so causal attention needs no mask.
    """
    weight = weights[:, 1:].flatten()
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weight).sum() / weight.sum()


def known_label_accuracy(
    logits: Float[Tensor, "row pos vocab"], tokens: Int[Tensor, "row pos"], weights: Float[Tensor, "row pos"]
) -> float:
    """Return the share of fully weighted tokens (names, labels shown before) that are the most probable token."""
    counted = weights[:, 1:] == LABEL_WEIGHT
    return (logits[:, :-1].argmax(-1) == tokens[:, 1:])[counted].float().mean().item()


def validation_episodes(data: Data, n: int, *, longest: int, held_out: bool = True) -> list[Episode]:
    """Return `n` prompts of two classes, always the same: 2 to 16 correctly labeled demonstrations, half per class."""
    rng = random.Random(f"validation {longest} {held_out}")
    pairs = sorted(tuple(sorted(pair)) for pair in data.held_out) if held_out else seen_pairs(data.words, data.held_out)
    return [balanced_episode(rng, data.words, pairs, SHOWN[i % len(SHOWN)], longest=longest) for i in range(n)]


@torch.no_grad()
def label_accuracy(model: Any, data: Data, episodes: Sequence[Episode]) -> float:
    """Return the percentage of prompts whose correct label is more probable than the episode's other labels."""
    right: list[bool] = []
    for start in range(0, len(episodes), CHUNK):
        part = episodes[start : start + CHUNK]
        rows = [[index for token in episode.tokens[:-1] for index in data.pieces[token]] for episode in part]
        longest, pad = max(map(len, rows)), data.pieces["<pad>"]
        logits = model(input_ids=torch.tensor([row + pad * (longest - len(row)) for row in rows])).logits
        for row, episode, scores in zip(rows, part, logits, strict=True):
            labels = [data.pieces[label][0] for label in episode.labels]
            right.append(int(scores[len(row) - 1, labels].argmax()) == episode.items[-1].side)
    return 100 * statistics.fmean(right)


class Trainer:
    """A model, its optimizers and their progress."""

    def __init__(self, settings: TrainConfig, words: Vocabulary):
        self.settings = settings
        self.tokenizer = make_tokenizer(words, N_POSITIONS)
        self.data = Data(words, self.tokenizer, settings.seed, settings.n_tokens)
        torch.manual_seed(settings.seed)
        self.model = make_model(settings.arch, len(self.tokenizer))
        fuse_activations(self.model)
        self.model.train()
        groups = matrices(self.model)
        own = {id(parameter) for group in groups for parameter in group["params"]}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in own]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(groups, lr=settings.matrix_rate),
            torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.rates = (settings.matrix_rate, settings.other_rate)
        self.progress = Progress()
        self.history: list[dict[str, Any]] = []

    def rate(self) -> float:
        """Return the factor of both learning rates: warm-up, 1, `slow`, and decay to zero once accuracy is enough."""
        at = self.progress
        factor = min(1.0, (at.done + 1) / self.settings.warm_up)
        if at.done >= self.settings.slow_from:
            factor *= self.settings.slow
        if at.cooling_began is not None:
            between = self.settings.check_every
            length = between * max(1, int(self.settings.cool_down * at.cooling_began / between))
            factor *= max(0.0, 1 - (at.done - at.cooling_began) / length)
        return factor

    def step(self) -> float:
        """Update the model once; return the batch's weighted loss in nats."""
        started = time.process_time()
        at = self.progress
        batch = self.data.batch(at.done, at.level)
        factor = self.rate()
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = factor * rate
        logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        loss = weighted_loss(logits, batch.tokens, batch.weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        at.done += 1
        if batch.kind == LEVELS[at.level].measured:
            accuracy = known_label_accuracy(logits.detach(), batch.tokens, batch.weights)
            memory = self.settings.memory
            at.recent = accuracy if at.recent is None else memory * at.recent + (1 - memory) * accuracy
        ready = at.recent is not None and at.recent >= LEVELS[at.level].until
        if ready and at.level < len(LEVELS) - 1 and at.done - at.level_began >= self.settings.min_level_steps:
            at.level, at.level_began, at.recent = at.level + 1, at.done, None
        at.seconds += time.process_time() - started
        return loss.item()

    def check(self) -> dict[str, Any]:
        """Measure accuracies, keep them in the history, and apply the stopping rule."""
        at, n = self.progress, self.settings.n_checked
        self.model.eval()
        words, texts, seen = (
            label_accuracy(self.model, self.data, validation_episodes(self.data, n, longest=longest, held_out=held_out))
            for longest, held_out in ((1, True), (8, True), (8, False))
        )
        self.model.train()
        accuracy = (words + texts) / 2
        entry = {"step": at.done, "level": at.level, "words": words, "texts": texts, "texts of seen pairs": seen}
        self.history.append({name: round(value, 1) for name, value in entry.items()})
        last = at.level == len(LEVELS) - 1
        if last and at.cooling_began is None and accuracy >= self.settings.decay_accuracy:
            at.cooling_began = at.done
        at.finished = (last and accuracy >= self.settings.stop_accuracy) or self.rate() == 0.0
        return self.history[-1]

    def save(self, folder: Path) -> None:
        """Write the complete state to a temporary file and move it into place."""
        tensors = {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"{key}.{names[id(parameter)]}": value for key, value in state.items()}
        run = {"settings": asdict(self.settings), "progress": asdict(self.progress), "history": self.history}
        _write(folder / CHECKPOINT, tensors, {"run": json.dumps(run)})

    def resume(self, folder: Path) -> None:
        """Load the checkpoint in `folder`, if there is one; raise InputError if it was saved with other settings."""
        path = folder / CHECKPOINT
        if not path.exists():
            return
        with safe_open(path, framework="pt") as file:
            run = json.loads(file.metadata()["run"])
            if run["settings"] != asdict(self.settings):
                raise InputError(
                    f"{path} is of a run with {run['settings']}, not {asdict(self.settings)};"
                    " restart with --no-resume, or use the same settings"
                )
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(file.get_tensor(f"model.{name}"))
            for optimizer, keys in zip(
                self.optimizers, (("momentum",), ("step", "exp_avg", "exp_avg_sq")), strict=True
            ):
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    name = names[id(parameter)]
                    optimizer.state[parameter] = {key: file.get_tensor(f"{key}.{name}").clone() for key in keys}
        self.progress, self.history = Progress(**run["progress"]), run["history"]

    def snapshot(self, folder: Path) -> None:
        """Write the weights of this step (float16, about 2 MB) to `folder`."""
        tensors = {name: parameter.detach().half() for name, parameter in self.model.named_parameters()}
        _write(folder / f"step-{self.progress.done:06d}.safetensors", tensors, {"format": "pt"})

    def export(self, folder: Path) -> None:
        """Write the Hugging Face folder to a temporary folder and move its files into place."""
        temp_path = folder.parent / f".{folder.name}.part"
        self.model.eval()
        self.model.save_pretrained(temp_path)
        self.model.train()
        self.tokenizer.save_pretrained(temp_path)
        record = {**asdict(self.settings), **asdict(self.progress), "history": self.history}
        (temp_path / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for file in temp_path.iterdir():
            file.chmod(0o644)  # safetensors writes files only the owner may read
            os.replace(file, folder / file.name)
        shutil.rmtree(temp_path)


def thin_out(folder: Path, n: int = N_SNAPSHOTS) -> None:
    """Keep only `n` evenly spaced snapshots in `folder`, including the first and the last."""
    found = sorted(folder.glob("step-*.safetensors"))
    kept = {found[round(i * (len(found) - 1) / (n - 1))] for i in range(n)} if found else set()
    for path in set(found) - kept:
        path.unlink()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temp_path = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temp_path, metadata=metadata)
    os.replace(temp_path, path)


def train(settings: TrainConfig, out: Path, checkpoints: Path, *, resume: bool) -> None:
    """Train until the stopping rule ends it (from the last checkpoint if there is one and `resume`), export to `out`.

    `checkpoints` gets the state to resume from and, at the end, ten snapshots of the weights.
    """
    console = Console()
    trainer = Trainer(settings, load_words())
    if resume:
        trainer.resume(checkpoints)
    else:
        shutil.rmtree(checkpoints, ignore_errors=True)
    at = trainer.progress
    while not at.finished and at.done < settings.steps:
        trainer.step()
        if at.done % settings.check_every == 0:
            entry = trainer.check()
            trainer.snapshot(checkpoints)
            trainer.save(checkpoints)
            console.print(f"{NAMES[settings.arch]} {at.seconds / 60:.1f} min, running {at.recent or 0:.3f}, {entry}")
    trainer.save(checkpoints)
    thin_out(checkpoints)
    trainer.export(out)
