"""Models of real sizes with random weights, saved as Hugging Face folders, and prompts for them."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

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
    tokenizer knows the bundled word list, one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_embd": shape.d_model,
        "n_inner": shape.d_mlp,
    }
    if shape.kind != "gpt2":
        sizes = {
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads or shape.heads,
            "head_dim": shape.d_head or shape.d_model // shape.heads,
            "tie_word_embeddings": shape.tied,
            "hidden_size": shape.d_model,
            "intermediate_size": shape.d_mlp,
        }
    config = AutoConfig.for_model(
        shape.kind,
        vocab_size=shape.d_vocab,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    width = shape.d_model**-0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                gain = (
                    "weight" in name and shape.kind != "gemma3_text"
                )  # Gemma stores gains minus 1
                parameter.normal_(1.0 if gain else 0.0, 0.1, generator=generator)
            elif any(part in name for part in ("c_attn", "q_proj", "k_proj", "v_proj")):
                parameter.normal_(0.0, 2**0.5 * width, generator=generator)
            elif any(part in name for part in ("wte", "embed_tokens", "lm_head")):
                parameter.normal_(0.0, 3 * width, generator=generator)
            else:
                fan_in = shape.d_mlp if shape.d_mlp in parameter.shape else shape.d_model
                parameter.normal_(0.0, fan_in**-0.5 / 10, generator=generator)
    model.save_pretrained(folder)
    words = load_words()
    content = [word for group in words.categories.values() for word in group]
    known = list(dict.fromkeys([*SPECIAL, *words.fillers, *words.labels, *content]))
    step = shape.d_vocab // (len(known) + 1)  # spreads ids over the vocabulary
    tokenizer = Tokenizer(
        models.WordLevel({word: step * i for i, word in enumerate(known)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def random_prompts(n: int, n_tokens: int) -> list[il.Prompt]:
    """Return prompts of four demonstrations with `n_tokens` tokens each, at one token per word."""
    rng = random.Random(0)
    known = sorted({word for category in load_words().categories.values() for word in category})
    each, rest = divmod(n_tokens - 9, 5)

    def text(count: int) -> str:
        return " ".join(rng.choice(known) for _ in range(count))

    labels = ("bar", "bar", "foo", "foo")
    return [
        il.Prompt(
            [il.Demonstration(text(each), label) for label in labels], text(each + rest), "foo"
        )
        for _ in range(n)
    ]
