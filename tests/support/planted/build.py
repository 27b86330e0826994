"""A planted model as a Hugging Face folder with a word list, and the truth about its heads."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from icl_lens.foundation.files import write_text
from icl_lens.models.head import Head
from planted import circuits
from planted.circuits import Kind, Role
from planted.heads import D_HEAD, N_HEADS, HeadWeights, noise_head
from planted.stream import D_MODEL, N_POSITIONS, Stream, draw_stream, embeddings
from planted.vocabulary import LABELS, make_tokenizer, texts, token_ids

D_MLP = 2 * D_MODEL
GELU_SIZE = 0.65  # root mean square of the GELU of a standard normal variable


@dataclass(frozen=True)
class Planted:
    """A planted model and the truth about it."""

    kind: Kind
    folder: Path  # the model, for `il.load_model`
    words: Path  # the word list, for `il.load_task(..., path=...)`
    heads: dict[Role, tuple[Head, ...]]
    """Planted heads by role, the strongest first; all other heads are noise."""


def build(
    kind: Kind, folder: Path, *, seed: int = 0, preference: float = 0.0, preferred: str = "bar"
) -> Planted:
    """Write a planted model, drawn from `seed`, into `folder` and return the truth about it.

    The bias of the final norm adds `preference` nats to the logit of the label `preferred`, and
    none to other labels.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = draw_stream(generator)
    with torch.random.fork_rng(
        devices=[]
    ):  # transformers draws weights, all of which are replaced here
        model: Any = GPT2LMHeadModel(_config())
    tables = [
        part.weight.data for part in (model.transformer.wte, model.transformer.wpe, model.lm_head)
    ]
    for table, rows in zip(tables, embeddings(stream, generator), strict=True):
        table[:] = rows
    blocks = model.transformer.h
    for layer, block in enumerate(blocks):
        _write_noise(block, stream, circuits.scale_before(layer), generator)
    sites = circuits.draw_sites(kind, generator)
    for site in sites:
        _write_head(
            blocks[site.head.layer].attn, site.head.head, circuits.head_weights(site, stream)
        )
    neurons = circuits.planted_neurons(kind, stream)
    if neurons is not None:
        ffn, (reads, biases, writes) = blocks[circuits.NEURON_LAYER].mlp, neurons
        places = slice(len(biases))
        ffn.c_fc.weight.data[:, places] = reads.T
        ffn.c_fc.bias.data[places] = biases
        ffn.c_proj.weight.data[places] = writes
    if kind == "untrained":
        for table in tables:
            norms = table.norm(dim=1, keepdim=True)
            table.normal_(generator=generator).mul_(norms / math.sqrt(D_MODEL))
    ids = [token_ids()[label] for label in LABELS]
    wanted = preference * torch.tensor([float(label == preferred) for label in LABELS])
    model.transformer.ln_f.bias.data[:] = torch.linalg.pinv(model.lm_head.weight.data[ids]) @ wanted
    model.save_pretrained(folder)
    make_tokenizer(N_POSITIONS).save_pretrained(folder)
    words = folder / "words.json"
    write_text(words, json.dumps({"categories": texts()}, indent=1) + "\n")
    heads = {
        role: tuple(site.head for site in sites if site.role == role) for role in get_args(Role)
    }
    return Planted(kind, folder, words, heads)


def _config() -> GPT2Config:
    return GPT2Config(
        vocab_size=len(token_ids()),
        n_positions=N_POSITIONS,
        n_embd=D_MODEL,
        n_layer=circuits.N_LAYERS,
        n_head=N_HEADS,
        n_inner=D_MLP,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=token_ids()["<pad>"],
    )


def _write_noise(block: Any, stream: Stream, scale: float, generator: torch.Generator) -> None:
    """Write noise heads and an FFN of noise into a layer; its LayerNorms keep gain 1 and bias 0."""
    for head in range(N_HEADS):
        _write_head(block.attn, head, noise_head(stream, scale, generator))
    reads, writes = torch.randn(2, D_MODEL, D_MLP, generator=generator) / math.sqrt(D_MODEL)
    block.mlp.c_fc.weight.data[:] = reads
    block.mlp.c_proj.weight.data[:] = (
        writes.T * circuits.NOISE_FFN_NORM / (GELU_SIZE * math.sqrt(D_MLP))
    )


def _write_head(attention: Any, head: int, weights: HeadWeights) -> None:
    """Write one head into the joint matrices of GPT-2."""
    dimensions = slice(head * D_HEAD, (head + 1) * D_HEAD)
    queries, keys, values = attention.c_attn.weight.data.split(D_MODEL, dim=1)
    queries[:, dimensions], keys[:, dimensions], values[:, dimensions] = (
        weights.query.T,
        weights.key.T,
        weights.value.T,
    )
    attention.c_attn.bias.data[dimensions] = weights.query_bias
    attention.c_proj.weight.data[dimensions] = weights.output
