"""The recipe of the bundled models: the data they were trained on, and the rules that end it."""

import hashlib
import itertools
import json
import random
import statistics
from dataclasses import replace

import pytest
import torch
from cases import slow
from safetensors.torch import load_file
from tolerance import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.small_models import train as training
from experiments.small_models.train import LEVELS, Data, TrainConfig, Trainer, make_tokenizer, train
from experiments.small_models.world import (
    BUNDLED,
    draw_categories,
    held_out_pairs,
    load_words,
    seen_pairs,
)

WORDS = load_words()
HELD_OUT = held_out_pairs(WORDS)
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED / "icl-mini")
SMALL = TrainConfig("gpt2", n_tokens=120, check_every=2, n_checked=4, steps=3)
LAST_LEVEL = len(LEVELS) - 1
DIGESTS = (
    "85a4228a3911456a",
    "c9405f20c725cf3b",
    "e3d117b1efd7dfbb",
    "25f0487568786521",
    "3cc522d281477261",
)
"""Digests of 40 batches of each level, drawn by the recipe that the models were trained with."""


@pytest.mark.parametrize("level", [0, slow(1), LAST_LEVEL])
def test_the_recipe_draws_the_batches_that_the_bundled_models_were_trained_on(level):
    """Lengths, repeats, names and the order of classes cannot change without changing this."""
    data = Data(WORDS, TOKENIZER, seed=0, n_tokens=2000)
    digest = hashlib.sha256()
    for step in range(40):
        batch = data.batch(step, level)
        digest.update(repr((batch.kind, batch.tokens.tolist(), batch.weights.tolist())).encode())
    assert digest.hexdigest()[:16] == DIGESTS[level]


@pytest.mark.slow
def test_the_bundled_models_have_the_tokenizer_that_training_makes():
    made = make_tokenizer(WORDS, 320)._tokenizer.to_str()
    for name in ("icl-mini", "icl-mini-gptj", "icl-mini-llama"):
        assert AutoTokenizer.from_pretrained(BUNDLED / name)._tokenizer.to_str() == made


def test_drawn_categories_avoid_held_out_pairs():
    rng = random.Random(5)
    for near in (False, True):
        for _ in range(50):
            drawn = draw_categories(rng, WORDS, 6, HELD_OUT, near=near)
            pairs = {frozenset(pair) for pair in itertools.combinations(drawn, 2)}
            assert len(set(drawn)) == 6
            assert not pairs & HELD_OUT
    assert not {frozenset(pair) for pair in seen_pairs(WORDS, HELD_OUT)} & HELD_OUT


def test_pieces_of_words_do_not_tell_their_category():
    """Words that share a piece share a category in less than a quarter of the cases."""
    words_with: dict[int, list[str]] = {}
    pieces_of = {word: TOKENIZER(word).input_ids for word in WORDS.categories_of}
    assert min(map(len, pieces_of.values())) == 2
    for word, pieces in pieces_of.items():
        for piece in pieces:
            words_with.setdefault(piece, []).append(word)
    shares = []
    for word, pieces in pieces_of.items():
        categories = set(WORDS.categories_of[word])
        for piece in pieces:
            same = [bool(categories & {*WORDS.categories_of[w]}) for w in words_with[piece]]
            shares.append(statistics.fmean(same))
    assert statistics.fmean(shares) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "llama", "gptj"])
def test_training_writes_a_folder_that_transformers_loads(arch, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "make_tokenizer", lambda words, n_positions: TOKENIZER)
    config = replace(SMALL, arch=arch)
    folder = tmp_path / "model"
    train(config, folder)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    record = json.loads((folder / "training.json").read_text())
    assert (record["arch"], record["done"], record["finished"]) == (arch, 3, False)
    assert [entry["step"] for entry in record["history"]] == [2]

    trainer = Trainer(config, WORDS, TOKENIZER)
    losses = [trainer.step() for _ in range(3)]
    assert all(loss > 0 for loss in losses)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for name, parameter in trainer.model.named_parameters():
        assert_close(loaded.get_parameter(name), parameter.detach().half().float())
    with pytest.raises(FileExistsError, match="exists"):
        trainer.export(folder)


@pytest.mark.parametrize(
    ("accuracies", "level", "cooling_began", "finished"),
    [
        # Cooling takes a fifth of 1,000 steps, whatever accuracy does meanwhile.
        ([87.9, 88.0, 60.0, 60.0], LAST_LEVEL, 1000, [False, False, False, True]),
        ([96.9, 97.0], LAST_LEVEL, 900, [False, True]),
        ([99.0, 99.0], LAST_LEVEL - 1, None, [False, False]),
    ],
    ids=["enough", "more than enough", "an earlier level"],
)
def test_training_ends_by_its_accuracy(monkeypatch, accuracies, level, cooling_began, finished):
    trainer = Trainer(replace(SMALL, check_every=100), WORDS, TOKENIZER)
    trainer.progress.level = level
    finished_after = []
    for i, accuracy in enumerate(accuracies):
        trainer.progress.done = 900 + 100 * i
        monkeypatch.setattr(training, "label_accuracy", lambda *_, value=accuracy: value)
        trainer.check()
        finished_after.append(trainer.progress.finished)
    assert (trainer.progress.cooling_began, finished_after) == (cooling_began, finished)
    if cooling_began == 1000:
        trainer.progress.done = 1100
        # slow since step 750, and half of the decay
        assert trainer.rate_factor() == pytest.approx(0.3 * 0.5)
        trainer.progress.done = 1200
        assert trainer.rate_factor() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("shortfall", [0.01, 0.0])
def test_a_level_ends_once_its_accuracy_and_minimum_length_are_reached(monkeypatch, shortfall):
    trainer = Trainer(replace(SMALL, min_level_steps=2), WORDS, TOKENIZER)
    accuracy = LEVELS[0].until - shortfall
    monkeypatch.setattr(training, "known_label_accuracy", lambda *_: accuracy)
    levels = [0]
    for _ in range(12):
        trainer.step()
        levels.append(trainer.progress.level)
    if shortfall:
        assert levels[-1] == 0
    else:
        assert levels[-1] > 0
        changes = [step for step in range(1, len(levels)) if levels[step] != levels[step - 1]]
        assert min(b - a for a, b in itertools.pairwise([0, *changes])) >= 2
