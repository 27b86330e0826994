"""Train a bundled model from nothing: `python -m experiments.icl_mini --arch gpt2|llama|gptj`.

A step's data, dropped heads and learning rate are functions of (seed, step), so a run that was broken off
and resumed is the run it would have been.
"""

import json
import math
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
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

from experiments.icl_mini.episodes import (
    Words,
    draw_categories,
    draw_sides,
    held_out_pairs,
    list_sequence,
    load_words,
    make_episode,
)
from icl_lens.errors import InputError

Arch = Literal["gpt2", "llama", "gptj"]
NAMES: dict[Arch, str] = {"gpt2": "icl-mini", "llama": "icl-mini-llama", "gptj": "icl-mini-gptj"}
N_POSITIONS = 256
CHECKPOINT = "checkpoint.safetensors"
INITIAL_STD = 0.06
"""Of all weights: near 1/√d_model, so that attention is uneven from the start; the usual 0.02 learns slowly."""
LISTS_UNTIL, EASY_UNTIL = 0.08, 0.6
"""Shares of the run at which lists give way to episodes, and the easiest episodes to all kinds."""


@dataclass(frozen=True)
class TrainingSettings:
    """All that shapes a run; a checkpoint is resumed only by a run of the same settings."""

    arch: Arch
    steps: int = 3500
    """Steps of learning; `concentrate` more follow, in which heads cost `head_cost` and leave what others do."""
    concentrate: int = 400
    head_cost: float = 0.01
    seed: int = 0
    batch: int = 48
    learning_rate: float = 1.5e-3
    head_dropout: float = 0.1


RECIPES: dict[Arch, TrainingSettings] = {
    "gpt2": TrainingSettings("gpt2"),
    "llama": TrainingSettings("llama", concentrate=800, head_cost=0.04),
    "gptj": TrainingSettings("gptj", steps=2000, concentrate=1600, head_cost=0.1),
}
"""How the bundled models were trained: the rotary ones share the job among more heads and need the cost longer."""


def make_tokenizer(words: Words) -> PreTrainedTokenizerFast:
    """One token a word, words separated by blanks; nothing is added before or after a text."""
    vocabulary = {word: index for index, word in enumerate(words.vocabulary)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", model_max_length=N_POSITIONS
    )


def make_model(arch: Arch, vocab_size: int) -> PreTrainedModel:
    """A freshly drawn model of at most 1.45 million parameters, from torch's global generator."""
    common = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1, "initializer_range": INITIAL_STD}
    if arch == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size,
            n_positions=N_POSITIONS,
            n_embd=128,
            n_layer=6,
            n_head=8,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        model = GPT2LMHeadModel(config)
        # Waves instead of noise: attention to the word before is then one linear map for all positions.
        angles = torch.arange(N_POSITIONS)[:, None] * torch.logspace(0.2, -1.5, config.n_embd // 2)
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)
        model.transformer.wpe.weight.data = math.sqrt(2) * INITIAL_STD * waves
        return model
    if arch == "llama":
        config = LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=N_POSITIONS,
            hidden_size=128,
            intermediate_size=176,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            **common,
        )
        return LlamaForCausalLM(config)
    config = GPTJConfig(
        vocab_size=vocab_size,
        n_positions=N_POSITIONS,
        n_embd=128,
        n_inner=320,
        n_layer=6,
        n_head=8,
        rotary_dim=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        **common,
    )
    return GPTJForCausalLM(config)


def output_projections(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Each layer's attention output projection, whose input is the heads' outputs side by side."""
    trunk: Any = model.base_model
    if isinstance(model, GPT2LMHeadModel):
        return [block.attn.c_proj for block in trunk.h]
    if isinstance(model, GPTJForCausalLM):
        return [block.attn.out_proj for block in trunk.h]
    return [block.self_attn.o_proj for block in trunk.layers]


class HeadDropout:
    """While training, silence each head of each sequence with probability `p`: several learn the same job.

    The heads that stay are not scaled up: at evaluation all of them speak, as in any model.
    """

    def __init__(self, model: PreTrainedModel):
        self.n_heads = model.config.num_attention_heads
        self.p = 0.0
        self.generator = torch.Generator()
        for projection in output_projections(model):
            projection.register_forward_pre_hook(self._silence)

    def _silence(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if self.p == 0.0:
            return None
        z = args[0]
        keep = torch.rand(z.shape[0], 1, self.n_heads, 1, generator=self.generator) >= self.p
        return ((z.unflatten(-1, (self.n_heads, -1)) * keep).flatten(-2),)


def _padded(
    tokens: list[list[int]], weights: list[list[float]], pad: int
) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row pos"]]:
    """Both as tensors, padded on the right with `pad` and weight 0."""
    longest = max(map(len, tokens))
    return (
        torch.tensor([row + [pad] * (longest - len(row)) for row in tokens]),
        torch.tensor([row + [0.0] * (longest - len(row)) for row in weights]),
    )


class HeadCost:
    """While switched on, keeps how large each head's output is: its root mean square norm over the batch.

    The square root makes it a group penalty: a head that is hardly needed goes to zero instead of shrinking with all
    others, so a job that a whole layer shares ends up with the few heads that do it best.
    """

    def __init__(self, model: PreTrainedModel):
        self.n_heads = model.config.num_attention_heads
        self.on = False
        self.sizes: list[Float[Tensor, " n_heads"]] = []
        for projection in output_projections(model):
            projection.register_forward_pre_hook(self._measure)

    def _measure(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        if not self.on:
            return
        z = args[0].unflatten(-1, (self.n_heads, -1))
        weight: Any = module.weight
        # Conv1D stores its weight input by output, Linear output by input.
        maps = (weight.T if isinstance(module, torch.nn.Linear) else weight).unflatten(0, (self.n_heads, -1))
        squares = torch.einsum("bthd,hde,bthe->h", z, maps @ maps.transpose(1, 2), z) / z.shape[:2].numel()
        self.sizes.append((squares + 1e-6).sqrt())

    def take(self) -> Float[Tensor, ""]:
        """Sum of all heads' sizes since the last call."""
        total = torch.stack(self.sizes).sum()
        self.sizes.clear()
        return total


class Data:
    """Training batches, each a function of (seed, step)."""

    def __init__(self, words: Words, settings: TrainingSettings):
        self.words = words
        self.settings = settings
        self.ids = {word: index for index, word in enumerate(words.vocabulary)}
        self.held_out = held_out_pairs(words)

    def batch(self, step: int) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row pos"]]:
        """Episodes of step `step`: token ids, and the loss weight of predicting each of them (0 for padding).

        The easiest have single words with asides and 2 to 5 evenly drawn classes: telling five labels apart is
        worth more than telling two, and neither the majority nor the last label tells them. Then there are two
        classes, and every second step has texts of up to 6 words and half as many rows. All episodes of a step
        have equally many items, so that little is padding.
        """
        rng = random.Random(f"{self.settings.seed}-{step}-episodes")
        easy = step < self.settings.steps * EASY_UNTIL
        texts = not easy and step % 2 == 1
        n_classes = rng.randint(2, 5) if easy else 2
        n_items = 2 * n_classes + 3 if easy else rng.randint(2, 8) + 1
        n_rows = self.settings.batch // 2 if texts else self.settings.batch
        tokens, weights = [], []
        for _ in range(n_rows):
            categories = draw_categories(rng, self.words, n_classes, self.held_out)
            sides = [rng.randrange(n_classes) for _ in range(n_items)] if easy else draw_sides(rng, n_items)
            episode = make_episode(
                rng, self.words, categories, sides, longest=6 if texts else 1, asides=0.25 if easy else 0.0
            )
            tokens.append([self.ids[token] for token in episode.tokens])
            weights.append(list(episode.weights))
        return _padded(tokens, weights, self.ids["<pad>"])

    def lists(self, step: int) -> tuple[Int[Tensor, "row pos"], Float[Tensor, "row pos"]]:
        """Lists of step `step`, three times as many as episodes: token ids and loss weights."""
        rng = random.Random(f"{self.settings.seed}-{step}-lists")
        rows = [list_sequence(rng, self.words, 8) for _ in range(3 * self.settings.batch)]
        tokens = torch.tensor([[self.ids[word] for word in row] for row in rows])
        return tokens, torch.ones(tokens.shape)


def weighted_loss(
    model: torch.nn.Module, tokens: Int[Tensor, "row pos"], weights: Float[Tensor, "row pos"]
) -> Float[Tensor, ""]:
    """Weighted mean cross-entropy (nats) of each token given those before it; the first is not predicted.

    Rows are padded on the right, so causal attention needs no mask.
    """
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    targets, weight = tokens[:, 1:], weights[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def learning_rate(settings: TrainingSettings, step: int) -> float:
    """Twice a linear warm-up and half a cosine: from the peak to 2 % of it, then from half the peak to 0."""
    if step >= settings.steps:
        rest = step - settings.steps
        return (
            0.25
            * settings.learning_rate
            * min(1.0, (rest + 1) / 20)
            * (1 + math.cos(math.pi * rest / settings.concentrate))
        )
    if step < 100:
        return settings.learning_rate * (step + 1) / 100
    done = (step - 100) / max(1, settings.steps - 100)
    return settings.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def dropout_rate(settings: TrainingSettings, step: int) -> float:
    """None while episodes are easy (the model must leave chance first) and while heads cost something."""
    if step >= settings.steps:
        return 0.0
    return settings.head_dropout * min(1.0, max(0.0, (step / settings.steps - EASY_UNTIL) / 0.1))


class Trainer:
    """A model, its optimiser and the step they have reached."""

    def __init__(self, settings: TrainingSettings, words: Words):
        self.settings = settings
        self.data = Data(words, settings)
        torch.manual_seed(settings.seed)
        self.model = make_model(settings.arch, len(words.vocabulary))
        self.model.train()
        self.dropout = HeadDropout(self.model)
        self.cost = HeadCost(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        self.done = 0
        self.seconds = 0.0

    def step(self) -> float:
        """One update; returns the episodes' weighted loss in nats."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.done)
        self.dropout.p = dropout_rate(self.settings, self.done)
        self.dropout.generator.manual_seed(self.settings.seed * 1_000_003 + self.done)
        if self.done < self.settings.steps * LISTS_UNTIL:
            loss = weighted_loss(self.model, *self.data.lists(self.done))
        else:
            self.cost.on = self.done >= self.settings.steps
            loss = weighted_loss(self.model, *self.data.batch(self.done))
            if self.cost.on:
                loss = loss + self.settings.head_cost * self.cost.take()
                self.cost.on = False
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        self.seconds += time.perf_counter() - started
        return loss.item()

    def save(self, folder: Path) -> None:
        """Write the whole state beside the last checkpoint and move it into place: never half a file."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            tensors[f"model.{name}"] = parameter.detach()
            tensors[f"exp_avg.{name}"] = state["exp_avg"]
            tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
        meta = {"settings": asdict(self.settings), "done": self.done, "seconds": self.seconds}
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{CHECKPOINT}.part"
        save_file(tensors, beside, metadata={"run": json.dumps(meta)})
        os.replace(beside, folder / CHECKPOINT)

    def resume(self, folder: Path) -> None:
        """Take up the checkpoint in `folder`, if there is one; raises InputError if it is of another run."""
        path = folder / CHECKPOINT
        if not path.exists():
            return
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["run"])
            if meta["settings"] != asdict(self.settings):
                raise InputError(
                    f"{path} is of a run with {meta['settings']}, not {asdict(self.settings)};"
                    " start anew with --no-resume, or ask for the same run"
                )
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(file.get_tensor(f"model.{name}"))
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(meta["done"])),
                    "exp_avg": file.get_tensor(f"exp_avg.{name}").clone(),
                    "exp_avg_sq": file.get_tensor(f"exp_avg_sq.{name}").clone(),
                }
        self.done, self.seconds = meta["done"], meta["seconds"]

    def export(self, folder: Path, words: Words) -> None:
        """Write the Hugging Face folder beside `folder`, then move its files into place."""
        beside = folder.parent / f".{folder.name}.part"
        self.model.eval()
        self.model.save_pretrained(beside)
        self.model.train()
        make_tokenizer(words).save_pretrained(beside)
        record = {**asdict(self.settings), "done": self.done, "seconds": round(self.seconds)}
        (beside / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for file in beside.iterdir():
            file.chmod(0o644)  # safetensors writes files only the owner may read
            os.replace(file, folder / file.name)
        shutil.rmtree(beside)


def train(settings: TrainingSettings, out: Path, checkpoints: Path, *, resume: bool, save_every: int = 250) -> None:
    """Train to the end (from the last checkpoint if there is one and `resume`) and export to `out`."""
    words = load_words()
    trainer = Trainer(settings, words)
    if resume:
        trainer.resume(checkpoints)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(
            NAMES[settings.arch], total=settings.steps + settings.concentrate, completed=trainer.done
        )
        mean = None
        while trainer.done < settings.steps + settings.concentrate:
            loss = trainer.step()
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            progress.update(bar, advance=1, description=f"{NAMES[settings.arch]} loss {mean:.3f}")
            if trainer.done % save_every == 0:
                trainer.save(checkpoints)
                progress.console.print(f"step {trainer.done} loss {mean:.3f} {trainer.seconds:.0f} s")
    trainer.save(checkpoints)
    trainer.export(out, words)
