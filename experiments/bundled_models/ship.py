"""Put trained models into the package, in half precision and with their cards.

Checks: the seed is 0, training has ended, every word of the bundled list is spelled without <unk>, the weights in half
precision give the same answers, and the folder is small enough.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiments.bundled_models.architectures import NAMES, Arch
from experiments.bundled_models.episodes import BUNDLED, Vocabulary, load_words
from experiments.bundled_models.head_locations import HeadLocations, training_record, word_episodes
from experiments.bundled_models.metrics import encode
from experiments.bundled_models.model_card import write_card
from icl_lens import load_model, score
from icl_lens.errors import InputError
from icl_lens.metrics import is_correct

MAX_FOLDER_BYTES = 6_000_000
"""Largest size of a bundled model's folder."""
MAX_NATS, MAX_POINTS = 0.05, 0.5
"""Largest changes by half precision of any label's log-probability and of accuracy (percentage points)."""
N_COMPARED = 320
PROMPT = "love : bar like : bar eight : foo two : foo one :"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json")


@dataclass(frozen=True)
class PrecisionDrift:
    """What storing the weights in half precision changes, over prompts of both word tasks."""

    nats: float
    """Largest change of a label's log-probability."""
    points: float
    """Change of accuracy between the labels (percentage points)."""


def check_run(arch: Arch, folder: Path, run: dict[str, Any]) -> None:
    """Raise InputError if the folder's model has another architecture or seed, or its training has not ended."""
    if run["arch"] != arch:
        raise InputError(f"{str(folder)!r} holds a {run['arch']}, not a {arch}; pass {run['arch']}={folder}")
    if run["seed"] != 0:
        raise InputError(
            f"seed of {str(folder)!r} must be 0, whatever its results, got {run['seed']}; pass other seeds with --seeds"
        )
    if not run["finished"] and run["done"] < run["steps"]:
        raise InputError(
            f"training of {str(folder)!r} was interrupted at step {run['done']}, before its stopping rule; resume it"
        )


def check_tokenizer(tokenizer: Any, words: Vocabulary) -> None:
    """Raise InputError if a word of the list or the example cannot be spelled, or a label is not one token."""
    known = [*PROMPT.split(), *words.fillers, *words.labels, *words.categories_of]
    unknown = [word for word in known if tokenizer.unk_token_id in tokenizer(word).input_ids]
    if unknown:
        raise InputError(f"the tokenizer cannot spell {len(unknown)} words of words.json, {unknown[0]!r} among them")
    long = [word for word in (*words.labels, ":") if len(tokenizer(word).input_ids) != 1]
    if long:
        raise InputError(
            f"{long[0]!r} is a label of more than one token, and cards are measured on labels of one token"
        )


def store(source: Path, target: Path) -> None:
    """Copy a trained folder to `target`, with weights in float16; config.json keeps float32, for loading."""
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    with safe_open(source / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    weights = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata=metadata)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes files only the owner may read


def precision_drift(before: Path, after: Path, words: Vocabulary) -> PrecisionDrift:
    """Return the differences of labels' log-probabilities and accuracy between two folders' models, both in float32."""
    episodes = word_episodes(words, N_COMPARED)
    found = []
    for folder in (before, after):
        model = load_model(str(folder), device="cpu")
        batch = encode(model, episodes)
        found.append((score(model, batch), batch.answer))
    (one, answer), (other, _) = found
    accuracies = [100 * is_correct(log_probs, answer).double().mean().item() for log_probs in (one, other)]
    return PrecisionDrift(float((one - other).abs().max()), abs(accuracies[0] - accuracies[1]))


def store_half_precision(source: Path, target: Path, words: Vocabulary) -> PrecisionDrift:
    """Store a folder in float16 and return what that changes; raise InputError if it is too much."""
    store(source, target)
    change = precision_drift(source, target, words)
    if change.nats > MAX_NATS or change.points > MAX_POINTS:
        raise InputError(
            f"half precision must change labels' log-probabilities by at most {MAX_NATS} nats and accuracy by at most"
            f" {MAX_POINTS} points, got {change.nats:.3f} nats and {change.points:.1f} points for {str(source)!r}"
        )
    return change


def ship(
    models: dict[Arch, Path], other_seeds: Sequence[HeadLocations] = (), *, bundled: Path = BUNDLED, **sizes: int
) -> dict[str, PrecisionDrift]:
    """Check and measure each architecture's trained folder, then put all of them into `bundled` under their names.

    Nothing is moved before all models have passed. `other_seeds` are measured models of other seeds, for the cards;
    `sizes` are passed to `write_card`. Raise InputError for a model that cannot be shipped.
    """
    words = load_words()
    runs = {arch: training_record(folder) for arch, folder in models.items()}
    for arch, folder in models.items():
        check_run(arch, folder, runs[arch])
        check_tokenizer(load_model(str(folder), device="cpu").tokenizer, words)
    stored = {}
    with tempfile.TemporaryDirectory(dir=bundled, prefix=".") as staging:
        for arch, folder in models.items():
            staged = Path(staging) / NAMES[arch]
            stored[NAMES[arch]] = store_half_precision(folder, staged, words)
            write_card(staged, name=NAMES[arch], other_seeds=other_seeds, **sizes)
            size = sum(path.stat().st_size for path in staged.iterdir())
            if size > MAX_FOLDER_BYTES:
                raise InputError(
                    f"{str(folder)!r} would take {size:,} bytes; at most {MAX_FOLDER_BYTES:,} may be bundled"
                )
        for name in stored:
            if (bundled / name).exists():
                os.replace(bundled / name, Path(staging) / f"{name}.old")
            os.replace(Path(staging) / name, bundled / name)
    return stored
