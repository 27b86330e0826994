"""The bundled models before training: eight layers of six heads, about one million parameters each."""

import math
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

Arch = Literal["gpt2", "llama", "gptj"]
NAMES: dict[Arch, str] = {"gpt2": "icl-mini", "llama": "icl-mini-llama", "gptj": "icl-mini-gptj"}
N_LAYERS, N_HEADS, D_MODEL, N_POSITIONS = 8, 6, 96, 320
INITIAL_STD = 0.06
"""Standard deviation of all weights: attention is uneven from the start; with the usual 0.02, models learn slowly."""


def make_model(arch: Arch, vocab_size: int) -> PreTrainedModel:
    """Return a model with random weights, drawn from torch's global generator."""
    common = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 1, "initializer_range": INITIAL_STD}
    common |= {"vocab_size": vocab_size}
    gpt = {"n_positions": N_POSITIONS, "n_embd": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS}
    gpt |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if arch == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**gpt, **common))
        # Waves instead of noise: attention to the word before is then one linear map for all positions.
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


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's layers."""
    trunk: Any = model.base_model
    return trunk.layers if isinstance(model, LlamaForCausalLM) else trunk.h


def fuse_activations(model: PreTrainedModel) -> None:
    """Replace GPT-2's and GPT-J's activation by torch's own of the same function, a third faster per step."""
    if not isinstance(model, LlamaForCausalLM):
        for block in blocks(model):
            block.mlp.act = nn.GELU(approximate="tanh")  # pyright: ignore[reportAttributeAccessIssue]


def matrices(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Return Muon's parameter groups: the layers' matrices, of which GPT-2's c_attn holds queries, keys and values."""
    names = {name: p for name, p in blocks(model).named_parameters() if p.ndim == 2}
    joint = [parameter for name, parameter in names.items() if "c_attn" in name]
    groups: list[dict[str, Any]] = [{"params": [p for name, p in names.items() if "c_attn" not in name]}]
    return [*groups, {"params": joint, "parts": 3, "axis": 1}] if joint else groups
