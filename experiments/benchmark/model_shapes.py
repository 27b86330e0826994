"""Models of real sizes with random weights, saved as Hugging Face folders, and prompts for them."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import icl_lens as il
from experiments.small_models.world import SPECIAL, load_words


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with random weights."""

    name: str
    kind: str
    layers: int
    heads: int
    d_model: int
    d_vocab: int
    d_mlp: int
    dtype: torch.dtype = torch.float32
    kv_heads: int | None = None
    d_head: int | None = None
    tied: bool = False
    """Whether W_U is the embedding."""


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt2-large", "gpt2", 36, 20, 1280, 50257, 5120),
        Shape("llama-7b", "llama", 32, 32, 4096, 32000, 11008, torch.bfloat16),
        Shape("smollm2-135m", "llama", 30, 9, 576, 49152, 1536, kv_heads=3, tied=True),
        Shape(
            "gemma-3-270m",
            "gemma3_text",
            18,
            4,
            640,
            262144,
            2048,
            kv_heads=1,
            d_head=256,
            tied=True,
        ),
        Shape("small", "gpt2", 4, 8, 128, 20000, 512),
    )
}


def build(shape: Shape, folder: Path) -> None:
    """Write a model of that shape, scaled so that attention and predictions are far from uniform.

    Unit-variance inputs give attention scores of standard deviation 2 and logits of standard
    deviation 3; each sublayer adds about a tenth of the embedding's variance to the stream. The
    tokenizer knows the bundled word list, one token per word.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=shape.dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = distribution(shape, name, parameter)
            parameter.normal_(mean, deviation, generator=generator)
    model.save_pretrained(folder)
    write_tokenizer(shape.d_vocab, folder)


def config_of(shape: Shape) -> Any:
    """Return the Hugging Face configuration of a shape."""
    from transformers import AutoConfig

    if shape.kind == "gpt2":
        sizes = {
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_embd": shape.d_model,
            "n_inner": shape.d_mlp,
        }
    else:
        sizes = {
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads or shape.heads,
            "head_dim": shape.d_head or shape.d_model // shape.heads,
            "tie_word_embeddings": shape.tied,
            "hidden_size": shape.d_model,
            "intermediate_size": shape.d_mlp,
        }
    tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return AutoConfig.for_model(shape.kind, vocab_size=shape.d_vocab, **tokens, **sizes)


def distribution(shape: Shape, name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the mean and standard deviation of a parameter's random values."""
    if parameter.ndim == 1:
        is_gain = "weight" in name and shape.kind != "gemma3_text"  # Gemma stores gains minus 1
        return float(is_gain), 0.1
    if any(part in name for part in ("c_attn", "q_proj", "k_proj", "v_proj")):
        return 0.0, 2**0.5 * shape.d_model**-0.5
    if any(part in name for part in ("wte", "embed_tokens", "lm_head")):
        return 0.0, 3 * shape.d_model**-0.5
    fan_in = shape.d_mlp if shape.d_mlp in parameter.shape else shape.d_model
    return 0.0, fan_in**-0.5 / 10


def write_tokenizer(d_vocab: int, folder: Path) -> None:
    """Write a tokenizer that knows the bundled word list, with ids all over the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = load_words()
    known = [*SPECIAL, *words.fillers, *words.labels, *words.categories_of]
    known = list(dict.fromkeys(known))
    step = d_vocab // (len(known) + 1)
    ids = {word: step * place for place, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(folder)


def random_prompts(n: int, n_tokens: int) -> list[il.Prompt]:
    """Return prompts of four demonstrations with `n_tokens` tokens each, at one token per word."""
    rng = random.Random(0)
    known = sorted(load_words().categories_of)
    n_per_text, n_left = divmod(n_tokens - 9, 5)
    prompts = []
    for _ in range(n):
        words = [rng.choice(known) for _ in range(5 * n_per_text + n_left)]
        demonstrations = []
        for place, label in enumerate(("bar", "bar", "foo", "foo")):
            text = " ".join(words[place * n_per_text : (place + 1) * n_per_text])
            demonstrations.append((text, label))
        prompts.append(il.Prompt(demonstrations, " ".join(words[4 * n_per_text :]), "foo"))
    return prompts
