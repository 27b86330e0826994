"""What does it cost to find the parts that raise the answer most, beside a forward pass?

`python experiments/benchmark/search.py --shape gpt2-large --sizes 14x1,200x16 --out search.csv`

On prompts of some length, this times a forward pass, the certified search for the 20 largest
(layer, head, position) increases, and other ways to the same answer: every increase, the paper
authors' loop, and TransformerLens' own logit attribution, which gives logits instead. Slow ways run
once, with --slow, and must find the same largest values.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.benchmark.model_shapes import SHAPES, build, random_prompts
from experiments.benchmark.timing import time_in_turns, timed, write_table

K = 20
MAX_DIFFERENCE = 1e-3
"""Largest difference (nats) between the values that two exact searches find."""


def forward(model: Any, batch: il.PromptBatch) -> Tensor:
    """Run an ordinary forward pass."""
    with torch.no_grad():
        return model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")


def certified_search(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """Return the largest increases, certified, including the pass and its capture."""
    return il.top_subheads(il.capture(model, batch), k=K, by="increase").value


def exhaustive_search(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """Return the largest increases after computing every one."""
    increases = il.subhead_log_prob_increase(il.capture(model, batch), batch.answer_tokens)
    return increases.flatten(1).topk(K).values


def authors_loop(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """Return the same as the authors' notebooks do: a product with W_U for each layer and head."""
    largest = []
    for row in range(len(batch)):
        acts = il.capture(model, batch[row])
        target = int(batch.answer_tokens[row])
        increases = []
        for layer in range(model.cfg.n_layers):
            layer_input = acts.resid_pre[:, layer].to(acts.readout.dtype)
            log_prob_before = acts.readout.log_probs(layer_input)[0, target]
            # None of the models that are timed has grouped queries, or a norm after attention.
            pattern, values = acts.pattern[0, layer], acts.values.of_layer(layer)[0]
            W_O = acts.view.W_O(layer).to(layer_input.dtype)
            for head in range(model.cfg.n_heads):
                weighted_values = pattern[head, :, None] * values[:, head]
                outputs = weighted_values.to(W_O.dtype) @ W_O[head]
                log_probs = acts.readout.log_probs((layer_input + outputs)[None])[0]
                increases.append(log_probs[:, target] - log_prob_before)
        largest.append(torch.cat(increases).topk(K).values)
    return torch.stack(largest)


def logit_attribution(model: Any, batch: il.PromptBatch) -> Float[Tensor, "component batch"]:
    """Return logits of heads by TransformerLens' stack_head_results and logit_attrs."""
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
        outputs = cache.stack_head_results(layer=-1)[:, torch.arange(len(batch)), batch.last]
        return cache.logit_attrs(outputs, batch.answer_tokens, pos_slice=-1, has_batch_dim=True)


FAST: dict[str, Callable[[Any, il.PromptBatch], Any]] = {
    "forward": forward,
    "forward + capture": il.capture,
    f"certified top {K}": certified_search,
    "stack_head_results + logit_attrs": logit_attribution,
}
SLOW: dict[str, Callable[[Any, il.PromptBatch], Tensor]] = {
    f"exhaustive top {K}": exhaustive_search,
    "the authors' loop": authors_loop,
}


def measure(
    model: Any, name: str, n_tokens: int, n_prompts: int, *, repeats: int, with_slow: bool
) -> list[dict[str, Any]]:
    """Return a row for each way on one batch: seconds, and their ratio to a forward pass.

    Raise ValueError if a slow way finds other values than the certified search.
    """
    batch = il.tokenize(model, random_prompts(n_prompts, n_tokens))
    seconds = time_in_turns({way: partial(run, model, batch) for way, run in FAST.items()}, repeats)
    certified = certified_search(model, batch)
    for way, run in SLOW.items() if with_slow else ():
        seconds[way], largest = timed(partial(run, model, batch))
        difference = float((largest - certified).abs().max())
        if difference > MAX_DIFFERENCE:
            raise ValueError(f"{way!r} differs from the certified search by {difference:.2g} nats")
    rows = []
    for way, value in seconds.items():
        rows.append(
            {
                "model": name,
                "prompts": n_prompts,
                "tokens": n_tokens,
                "way": way,
                "seconds": value,
                "forwards": value / seconds["forward"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the search for the largest increases.")
    parser.add_argument(
        "--shape", choices=SHAPES, default="gpt2-large", help="shape, random weights"
    )
    parser.add_argument("--model", help="a model to load instead of a shape")
    parser.add_argument("--sizes", default="14x1,14x16,200x1", help="tokens x prompts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", action="store_true", help="also the ways that take minutes")
    parser.add_argument("--out", type=Path, default=Path("search.csv"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        name, dtype = options.model, None
        if options.model is None:
            name, dtype = options.shape, SHAPES[options.shape].dtype
            build(SHAPES[options.shape], Path(temporary) / name)
        source = options.model or str(Path(temporary) / name)
        model = il.load_model(source, device=device, dtype=dtype)
        for size in options.sizes.split(","):
            n_tokens, n_prompts = map(int, size.split("x"))
            rows += measure(
                model,
                name,
                n_tokens,
                n_prompts,
                repeats=options.repeats,
                with_slow=options.slow,
            )
            write_table(pd.DataFrame(rows), options.out)


if __name__ == "__main__":
    main()
