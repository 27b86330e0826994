"""Train one bundled model: `python -m experiments.small_models.train --arch llama --out FOLDER`.

1. `make_tokenizer`: words in pieces, so that no piece reveals the category of its word.
2. `make_model`: eight layers of six heads, about one million parameters.
3. `Data`: a step's batch is a function of (seed, step, level); levels go from easy to hard.
4. `Trainer`: Muon for the layers' matrices, AdamW for the rest. A level ends at a running accuracy;
   training ends by the accuracy on pairs of categories that no training episode contrasts.
5. `export`: the Hugging Face folder, its weights in float16, with the record of the training.

Training takes ten to twenty minutes on one core. The recipe was fixed before any head was looked
at. The bundled models are seed 0 of each architecture.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_letters, ascii_lowercase
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from experiments.small_models.muon import Muon
from experiments.small_models.world import (
    LABEL_WEIGHT,
    PLAIN,
    SPECIAL,
    Difficulty,
    Episode,
    Vocabulary,
    balanced_episode,
    draw_episode,
    held_out_pairs,
    list_sequence,
    load_words,
    named_sequence,
    seen_pairs,
)

Architecture = Literal["gpt2", "llama", "gptj"]
BatchKind = Literal["list", "named", "episode"]

# ------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run."""

    arch: Architecture
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
    """Factor of both rates from step `slow_from` on: words are learned fast, compared slowly."""
    min_level_steps: int = 100
    """Minimum number of steps per level, even if its accuracy is reached sooner."""
    memory: float = 0.96
    """Weight of the previous value in the running accuracy, an exponential moving average."""
    check_every: int = 100
    n_checked: int = 240
    """Prompts in each of three validation sets: single words, texts, texts of seen pairs."""
    decay_accuracy: float = 88.0
    """Accuracy (%) on held-out pairs, in the last level, at which rates start to decay to zero."""
    stop_accuracy: float = 97.0
    """Accuracy (%) on held-out pairs, in the last level, at which training stops at once."""
    cool_down: float = 0.2
    """Length of the decay to zero as a share of the steps before it, in whole `check_every`."""
    steps: int = 12_000
    """Training ends here at the latest."""


@dataclass(frozen=True)
class Level:
    """A part of training: shares of the kinds of batches, and what ends it."""

    shares: dict[BatchKind, float]
    episodes: Difficulty = PLAIN
    until: float = 1.0
    """Running accuracy that ends this level."""
    measured: BatchKind = "episode"
    """Kind of batches it is measured on: names ("named") or labels shown before ("episode")."""


LEVELS = (
    Level({"list": 0.3, "named": 0.7}, until=0.75, measured="named"),
    Level(
        {"list": 0.05, "named": 0.1, "episode": 0.85},
        Difficulty((3, 6), (9, 15), repeats=0.15, names=0.25),
        until=0.65,
    ),
    Level(
        {"list": 0.05, "named": 0.15, "episode": 0.8},
        Difficulty((2, 4), (4, 14), near=0.05),
        until=0.75,
    ),
    Level(
        {"list": 0.05, "named": 0.15, "episode": 0.8},
        Difficulty(
            (2, 4),
            (2, 14),
            longest=4,
            strays=0.05,
            mislabeled=0.05,
            uneven=True,
            stay=0.15,
            near=0.1,
        ),
        until=0.7,
    ),
    Level(
        {"list": 0.05, "named": 0.1, "episode": 0.85},
        Difficulty(
            (2, 4),
            (1, 16),
            longest=8,
            strays=0.15,
            mislabeled=0.15,
            uneven=True,
            stay=0.25,
            near=0.2,
        ),
    ),
)
SINGLE_WORDS = 0.4
"""Share of batches whose texts are single words, in levels with longer texts."""
N_LISTED = 10
"""Words of a list."""
N_NAMED = 8
"""Texts of a sequence of named ones."""
N_DEMONSTRATIONS = (2, 4, 8, 16)
"""Numbers of demonstrations in validation prompts; training episodes have 1 to 16."""
VALIDATION_BATCH = 32

# ------------------------------------------------------------------ tokenizer

CONTINUATION = "##"
"""Prefix of pieces that do not begin a word."""
N_MERGES = 600
Merge = tuple[str, str]


def _joined(merge: Merge) -> str:
    return merge[0] + merge[1].removeprefix(CONTINUATION)


def _apply_merge(symbols: Sequence[str], merge: Merge) -> list[str]:
    """Return `symbols` with every occurrence of the pair joined, from left to right."""
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == merge:
            merged[-1] = _joined(merge)
        else:
            merged.append(symbol)
    return merged


def learn_merges(words: Iterable[str], n: int, *, never: frozenset[str]) -> list[Merge]:
    """Return `n` merges of byte-pair encoding over a set of words, the most frequent pair first.

    Ties are broken by alphabet. Merges that would make one of `never` are omitted.
    """
    symbols_of = {}
    for word in words:
        symbols_of[word] = [word[0], *(CONTINUATION + letter for letter in word[1:])]
    merges: list[Merge] = []
    while len(merges) < n:
        counts: Counter[Merge] = Counter()
        for symbols in symbols_of.values():
            counts.update(itertools.pairwise(symbols))
        possible = [(-n, pair) for pair, n in counts.items() if _joined(pair) not in never]
        if not possible:
            break
        merge = min(possible)[1]
        merges.append(merge)
        symbols_of = {word: _apply_merge(symbols, merge) for word, symbols in symbols_of.items()}
    return merges


def make_tokenizer(words: Vocabulary, n_positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits at white space and spells content words in pieces.

    A merge that would make a full content word is omitted: each has two pieces or more, and a model
    must put them together before it can look a meaning up. Labels, fillers, the colon and the names
    of categories are one token each. No special tokens are added.
    """
    content = sorted(words.categories_of)
    whole = [*SPECIAL, *words.fillers, *words.labels, *words.names.values()]
    merges = learn_merges(content, N_MERGES, never=frozenset([*content, *whole]))
    letters = [*ascii_letters, *(CONTINUATION + letter for letter in ascii_lowercase)]
    tokens = dict.fromkeys([*whole, *letters, *map(_joined, merges)])
    backend = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            continuing_subword_prefix=CONTINUATION,
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=n_positions,
    )


# ------------------------------------------------------------------ model

N_LAYERS, N_HEADS, D_MODEL, N_POSITIONS = 8, 6, 96, 320
INITIAL_STD = 0.06
"""Standard deviation of all weights: attention is uneven from the start. With the usual 0.02,
models learn slowly."""


def make_model(arch: Architecture, vocab_size: int) -> PreTrainedModel:
    """Return a model with random weights, drawn from torch's global generator."""
    common: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 1,
        "initializer_range": INITIAL_STD,
        "vocab_size": vocab_size,
    }
    gpt: dict[str, Any] = {
        "n_positions": N_POSITIONS,
        "n_embd": D_MODEL,
        "n_layer": N_LAYERS,
        "n_head": N_HEADS,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    if arch == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**gpt, **common))
        # Waves instead of noise: attention to the word before is then one map for all positions.
        angles = torch.arange(N_POSITIONS)[:, None] * torch.logspace(0.2, -1.5, D_MODEL // 2)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        model.transformer.wpe.weight.data = math.sqrt(2) * INITIAL_STD * waves
        return model
    if arch == "gptj":
        return GPTJForCausalLM(GPTJConfig(rotary_dim=8, tie_word_embeddings=False, **gpt, **common))
    config = LlamaConfig(
        max_position_embeddings=N_POSITIONS,
        hidden_size=D_MODEL,
        intermediate_size=256,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_HEADS // 2,
        tie_word_embeddings=False,
        **common,
    )
    return LlamaForCausalLM(config)


def _blocks(model: PreTrainedModel) -> nn.ModuleList:
    trunk: Any = model.base_model
    return trunk.layers if isinstance(model, LlamaForCausalLM) else trunk.h


def _fuse_activations(model: PreTrainedModel) -> None:
    """Use torch's form of GPT-2's and GPT-J's activation, a third faster per step."""
    if not isinstance(model, LlamaForCausalLM):
        for block in _blocks(model):
            mlp: Any = block.mlp
            mlp.act = nn.GELU(approximate="tanh")


def _matrix_groups(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return Muon's parameter groups: the layers' matrices.

    GPT-2's c_attn holds those of queries, keys and values side by side.
    """
    single: list[nn.Parameter] = []
    joint: list[nn.Parameter] = []
    for name, parameter in _blocks(model).named_parameters():
        if parameter.ndim == 2:
            (joint if "c_attn" in name else single).append(parameter)
    groups: list[dict[str, Any]] = [{"params": single}]
    if joint:
        groups.append({"params": joint, "parts": 3, "axis": 1})
    return groups


# ------------------------------------------------------------------ data


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right with weight 0: token ids and their loss weights."""

    kind: BatchKind
    tokens: Int[Tensor, "row pos"]
    weights: Float[Tensor, "row pos"]


class Data:
    """Training batches, each a function of (seed, step, level)."""

    def __init__(
        self, words: Vocabulary, tokenizer: PreTrainedTokenizerFast, seed: int, n_tokens: int
    ):
        self.words = words
        self.seed = seed
        self.n_tokens = n_tokens
        self.held_out = held_out_pairs(words)
        self.pieces: dict[str, list[int]] = {}
        names = words.names.values()
        for word in (*SPECIAL, *words.fillers, *words.labels, *names, *words.categories_of):
            self.pieces[word] = tokenizer.encode(word)

    def batch(self, step: int, level: int) -> Batch:
        """Return sequences of one kind with the same number of items, `n_tokens` or a few more."""
        rng = random.Random(f"{self.seed}-{step}")
        shares, difficulty = LEVELS[level].shares, LEVELS[level].episodes
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if rng.random() < SINGLE_WORDS:
            difficulty = replace(difficulty, longest=1)
        n_items = rng.randint(*difficulty.demonstrations) + 1
        rows: list[list[int]] = []
        row_weights: list[list[float]] = []
        while sum(map(len, rows)) < self.n_tokens:
            tokens, weights = self._sequence(rng, kind, difficulty, n_items)
            ids: list[int] = []
            id_weights: list[float] = []
            for token, weight in zip(tokens, weights, strict=True):
                pieces = self.pieces[token]
                ids += pieces
                id_weights += [weight] * len(pieces)
            if len(ids) <= N_POSITIONS:
                rows.append(ids)
                row_weights.append(id_weights)
        longest = max(map(len, rows))
        pad = self.pieces["<pad>"]
        padded = [ids + pad * (longest - len(ids)) for ids in rows]
        padded_weights = [weights + [0.0] * (longest - len(weights)) for weights in row_weights]
        return Batch(kind, torch.tensor(padded), torch.tensor(padded_weights))

    def _sequence(
        self, rng: random.Random, kind: BatchKind, difficulty: Difficulty, n_items: int
    ) -> tuple[Sequence[str], Sequence[float]]:
        if kind == "list":
            return list_sequence(rng, self.words, N_LISTED), [1.0] * N_LISTED
        if kind == "named":
            return named_sequence(rng, self.words, N_NAMED, longest=difficulty.longest)
        episode = draw_episode(rng, self.words, difficulty, self.held_out, n_items)
        return episode.tokens, episode.weights


# ------------------------------------------------------------------ accuracies


def weighted_loss(
    logits: Float[Tensor, "row pos vocab"],
    tokens: Int[Tensor, "row pos"],
    weights: Float[Tensor, "row pos"],
) -> Float[Tensor, ""]:
    """Return the weighted mean cross-entropy (nats) of tokens after the first, given those before.

    Rows are padded on the right, so causal attention needs no mask.
    """
    weight = weights[:, 1:].flatten()
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return (losses * weight).sum() / weight.sum()


def known_label_accuracy(
    logits: Float[Tensor, "row pos vocab"],
    tokens: Int[Tensor, "row pos"],
    weights: Float[Tensor, "row pos"],
) -> float:
    """Return the share of fully weighted tokens that are predicted.

    These are labels shown before and, in sequences of named texts, names.
    """
    is_counted = weights[:, 1:] == LABEL_WEIGHT
    is_predicted = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return is_predicted[is_counted].float().mean().item()


def validation_episodes(
    data: Data, n: int, *, longest: int, held_out: bool = True
) -> list[Episode]:
    """Return `n` prompts of two classes, always the same, with 2 to 16 demonstrations."""
    rng = random.Random(f"validation {longest} {held_out}")
    pairs: list[tuple[str, ...]] = [*seen_pairs(data.words, data.held_out)]
    if held_out:
        pairs = sorted(tuple(sorted(pair)) for pair in data.held_out)
    episodes = []
    for i in range(n):
        n_demonstrations = N_DEMONSTRATIONS[i % len(N_DEMONSTRATIONS)]
        episodes.append(balanced_episode(rng, data.words, pairs, n_demonstrations, longest=longest))
    return episodes


@torch.no_grad()
def label_accuracy(model: Any, data: Data, episodes: Sequence[Episode]) -> float:
    """Return the percentage of prompts whose right label is the more probable one."""
    n_right = 0
    pad = data.pieces["<pad>"]
    for start in range(0, len(episodes), VALIDATION_BATCH):
        batch = episodes[start : start + VALIDATION_BATCH]
        rows: list[list[int]] = []
        for episode in batch:
            pieces = [data.pieces[token] for token in episode.tokens[:-1]]
            rows.append(list(itertools.chain.from_iterable(pieces)))
        longest = max(map(len, rows))
        tokens = torch.tensor([row + pad * (longest - len(row)) for row in rows])
        logits = model(input_ids=tokens).logits
        for row, episode, row_logits in zip(rows, batch, logits, strict=True):
            label_ids = [data.pieces[label][0] for label in episode.labels]
            predicted_class = int(row_logits[len(row) - 1, label_ids].argmax())
            n_right += predicted_class == episode.items[-1].text_class
    return 100 * n_right / len(episodes)


# ------------------------------------------------------------------ training


@dataclass
class Progress:
    """How far a run has come."""

    done: int = 0
    level: int = 0
    level_began: int = 0
    cooling_began: int | None = None
    recent: float | None = None
    """Running accuracy (0 to 1) on what this level measures: names, or labels shown before."""
    seconds: float = 0.0
    """Processor time of all steps."""
    finished: bool = False


class Trainer:
    """A model, its optimizers and their progress."""

    def __init__(self, config: TrainConfig, words: Vocabulary, tokenizer: PreTrainedTokenizerFast):
        self.config = config
        self.tokenizer = tokenizer
        self.data = Data(words, tokenizer, config.seed, config.n_tokens)
        torch.manual_seed(config.seed)
        self.model = make_model(config.arch, len(tokenizer))
        _fuse_activations(self.model)
        self.model.train()
        groups = _matrix_groups(self.model)
        matrix_ids = set(
            map(id, itertools.chain.from_iterable(group["params"] for group in groups))
        )
        not_matrices = [p for p in self.model.parameters() if id(p) not in matrix_ids]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(groups, lr=config.matrix_rate),
            torch.optim.AdamW(
                not_matrices, lr=config.other_rate, betas=(0.9, 0.98), weight_decay=0.0
            ),
        )
        self.rates = (config.matrix_rate, config.other_rate)
        self.progress = Progress()
        self.history: list[dict[str, Any]] = []

    def rate_factor(self) -> float:
        """Return the factor of both learning rates.

        It rises in the warm-up, is 1 and then `slow`, and decays to zero once accuracy is enough.
        """
        progress, config = self.progress, self.config
        factor = min(1.0, (progress.done + 1) / config.warm_up)
        if progress.done >= config.slow_from:
            factor *= config.slow
        if progress.cooling_began is not None:
            n_checks = int(config.cool_down * progress.cooling_began / config.check_every)
            length = config.check_every * max(1, n_checks)
            factor *= max(0.0, 1 - (progress.done - progress.cooling_began) / length)
        return factor

    def step(self) -> float:
        """Update the model once; return the batch's weighted loss in nats."""
        started = time.process_time()
        progress = self.progress
        batch = self.data.batch(progress.done, progress.level)
        factor = self.rate_factor()
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
        progress.done += 1
        if batch.kind == LEVELS[progress.level].measured:
            self._update_running_accuracy(
                known_label_accuracy(logits.detach(), batch.tokens, batch.weights)
            )
        self._raise_level()
        progress.seconds += time.process_time() - started
        return loss.item()

    def _update_running_accuracy(self, accuracy: float) -> None:
        progress, memory = self.progress, self.config.memory
        if progress.recent is None:
            progress.recent = accuracy
        else:
            progress.recent = memory * progress.recent + (1 - memory) * accuracy

    def _raise_level(self) -> None:
        """Go on to the next level once this one's accuracy and minimum length are reached."""
        progress = self.progress
        is_long_enough = progress.done - progress.level_began >= self.config.min_level_steps
        if progress.recent is None or progress.level == len(LEVELS) - 1 or not is_long_enough:
            return
        if progress.recent >= LEVELS[progress.level].until:
            progress.level += 1
            progress.level_began = progress.done
            progress.recent = None

    def check(self) -> dict[str, Any]:
        """Measure accuracies, keep them in the history, and apply the stopping rule."""
        progress, config = self.progress, self.config
        self.model.eval()
        accuracies = {}
        for name, longest, held_out in (
            ("words", 1, True),
            ("texts", 8, True),
            ("texts of seen pairs", 8, False),
        ):
            episodes = validation_episodes(
                self.data, config.n_checked, longest=longest, held_out=held_out
            )
            accuracies[name] = label_accuracy(self.model, self.data, episodes)
        self.model.train()
        rounded = {name: round(accuracy, 1) for name, accuracy in accuracies.items()}
        self.history.append({"step": progress.done, "level": progress.level, **rounded})
        held_out_accuracy = (accuracies["words"] + accuracies["texts"]) / 2
        is_last_level = progress.level == len(LEVELS) - 1
        if is_last_level and held_out_accuracy >= config.stop_accuracy:
            progress.finished = True
        is_good_enough = is_last_level and held_out_accuracy >= config.decay_accuracy
        if is_good_enough and progress.cooling_began is None:
            progress.cooling_began = progress.done
        if self.rate_factor() == 0.0:
            progress.finished = True
        return self.history[-1]

    def export(self, folder: Path) -> None:
        """Write the Hugging Face folder beside its place and move it there.

        Weights are stored in float16; config.json says float32, the precision they load in.
        Raise FileExistsError if the folder exists.
        """
        if folder.exists():
            raise FileExistsError(f"{str(folder)!r} exists; move it away, or choose another folder")
        staging = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(staging, ignore_errors=True)
        self.model.eval()
        self.model.save_pretrained(staging)
        self.model.train()
        self.tokenizer.save_pretrained(staging)
        weights = load_file(staging / "model.safetensors")
        half = {name: tensor.half() for name, tensor in weights.items()}
        save_file(half, staging / "model.safetensors", metadata={"format": "pt"})
        record = {**asdict(self.config), **asdict(self.progress), "history": self.history}
        (staging / "training.json").write_text(
            json.dumps(record, indent=2) + "\n", encoding="utf-8"
        )
        for path in staging.iterdir():
            path.chmod(0o644)  # safetensors writes files that only the owner may read
        os.replace(staging, folder)


def train(config: TrainConfig, out: Path) -> None:
    """Train until the stopping rule ends it, and write the model to the folder `out`."""
    words = load_words()
    trainer = Trainer(config, words, make_tokenizer(words, N_POSITIONS))
    progress = trainer.progress
    while not progress.finished and progress.done < config.steps:
        trainer.step()
        if progress.done % config.check_every == 0:
            print(f"{progress.seconds / 60:.1f} min", trainer.check(), flush=True)
    trainer.export(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one bundled model.")
    parser.add_argument("--arch", choices=get_args(Architecture), default="gpt2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, required=True, help="Folder of the model; must not exist."
    )
    options = parser.parse_args()
    train(TrainConfig(options.arch, options.seed), options.out)


if __name__ == "__main__":
    main()
