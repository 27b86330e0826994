"""What is timed on one batch: the forward pass, the ways to locate parts, and other methods for comparison."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.benchmark.model_shapes import random_prompts
from experiments.benchmark.report import Row
from icl_lens.activations.passes import last_log_probs
from icl_lens.models.view import ModelView

K = 20
MAX_RESULT_BYTES = 6 * 2**30
"""Size of head results above which TransformerLens' own way is omitted."""


@dataclass(frozen=True)
class TimedVariant:
    """A way to compute the answer, timed from tokens on."""

    label: str
    run: Callable[[Any, il.PromptBatch], Any]
    slow: bool = False
    """Whether it takes minutes, so that it runs once, and only on sizes chosen for it."""


def forward_only(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch pos d_vocab"]:
    """Return the logits at every position of an ordinary forward pass."""
    with torch.no_grad():
        return model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")


def certified(model: Any, batch: il.PromptBatch) -> il.results.TopSubheads:
    """Return the certified search's best subheads of each prompt, including the pass and its capture."""
    return il.top_subheads(il.capture(model, batch), k=K, by="increase")


def exhaustive(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """Return each prompt's `K` largest increases, after computing every subhead's."""
    increase = il.subhead_log_prob_increase(il.capture(model, batch), batch.answer_tokens)
    return increase.flatten(1).topk(K).values


def paper_loop(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """Return the same as the paper's notebooks do: for each prompt, layer and head, with all positions at once."""
    best = []
    for row in range(len(batch)):
        acts = il.capture(model, batch[row])
        target, values = int(batch.answer_tokens[row]), []
        for layer in range(acts.view.n_layers):
            x = acts.resid_pre[:, layer].to(acts.readout.dtype)
            base = acts.readout.log_probs(x)[0, target]
            pattern, v, W_O = acts.scaled_pattern(layer), acts.head_values(layer), acts.view.W_O(layer)
            for head in range(acts.view.n_heads):
                vectors = (pattern[0, head, :, None] * v[0, :, head]) @ W_O[head].to(x.dtype)
                log_probs = acts.readout.log_probs((x + vectors)[None])[0]
                values.append(log_probs[:, target] - base)
        best.append(torch.cat(values).topk(K).values)
    return torch.stack(best)


def linear(model: Any, batch: il.PromptBatch) -> Float[Tensor, "component batch"]:
    """Return the logits (not log-probabilities) of heads by TransformerLens' `stack_head_results` and `logit_attrs`."""
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
        results = cache.stack_head_results(layer=-1)[:, torch.arange(len(batch)), batch.last]
        return cache.logit_attrs(results, batch.answer_tokens, pos_slice=-1, has_batch_dim=True)


VARIANTS: dict[str, TimedVariant] = {
    "bare": TimedVariant("bare forward", forward_only),
    "bare_last": TimedVariant("bare forward, last logits only", last_log_probs),
    "captured": TimedVariant("forward + capture", il.capture),
    "certified": TimedVariant(f"forward + capture + certified top {K}", certified),
    "linear": TimedVariant("stack_head_results + logit_attrs (logits of heads)", linear),
    "exhaustive": TimedVariant(f"forward + capture + exhaustive top {K}", exhaustive, slow=True),
    "authors": TimedVariant("the authors' loop over layers and heads", paper_loop, slow=True),
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, until the GPU has finished, and what it returns."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(model: Any, name: str, n_tokens: int, n: int, *, repeats: int, slow: bool) -> Iterator[Row]:
    """Time every variant on one batch, in alternation, and slow ones at most once; compare searches that must agree."""
    batch = il.tokenize(model, random_prompts(n, n_tokens))
    view = ModelView.of(model)
    parts = view.n_layers * view.n_heads * n_tokens
    left_out = {key: "omitted: takes minutes per run" for key, variant in VARIANTS.items() if variant.slow and not slow}
    results = n * parts * view.d_model * view.model.W_U.element_size()
    if results > MAX_RESULT_BYTES:
        left_out["linear"] = f"omitted: holds {results / 2**30:.0f} GiB of head results"
    forward_only(model, batch)  # warms up
    times: dict[str, list[float]] = {key: [] for key in VARIANTS}
    search: list[float] = []  # seconds of the certified search alone, without the pass and the capture
    found: dict[str, Any] = {}
    for turn in range(repeats):
        for key, variant in VARIANTS.items():
            if key in left_out or (variant.slow and turn > 0):
                continue
            try:
                seconds, result = timed(lambda run=variant.run: run(model, batch))
            except (AttributeError, RuntimeError, KeyError, AssertionError, TypeError) as error:
                if key != "linear":
                    raise
                # TransformerLens' own way may not support a model; the table says so.
                left_out[key] = f"fails: {str(error).splitlines()[0][:80]}"
                continue
            times[key].append(seconds)
            if key == "captured":
                search.append(timed(lambda acts=result: il.top_subheads(acts, k=K, by="increase"))[0])
            elif key == "certified" or variant.slow:
                found[key] = result
    median = {key: statistics.median(seconds) for key, seconds in times.items() if seconds}
    for key, variant in VARIANTS.items():
        if key not in median:
            yield Row(name, f"{n} × {n_tokens}", variant.label, note=left_out[key])
            continue
        exact, note = "", ""
        if key == "certified":
            exact = f"{float(found[key].n_exact.double().mean()):.1f} of {parts}"
            own = statistics.median(search)
            note = f"location alone {own:.3g} s"
            if "exhaustive" in median:
                note += f", {(median['exhaustive'] - median['captured']) / own:.0f} × faster than exhaustive"
        elif variant.slow:
            exact = f"{parts} of {parts}"
            error = float((found[key] - found["certified"].value).abs().max())
            note = f"same {K} largest values as certified, within {error:.0e} nats"
        ratio, runs = median[key] / median["bare"], len(times[key])
        yield Row(name, f"{n} × {n_tokens}", variant.label, median[key], ratio, runs, exact, note)


def explaining(model: Any, name: str, *, repeats: int) -> Iterator[Row]:
    """Time one prompt's forward pass, product with W_U, increases of all heads and explanation, in alternation."""
    batch = il.tokenize(model, random_prompts(1, 14))
    acts = il.capture(model, batch)
    inputs = acts.resid_pre[0].to(acts.readout.dtype)
    vectors = inputs.repeat_interleave(1 + acts.view.n_heads, dim=0)
    ways: dict[str, Callable[[], Any]] = {
        "bare forward": lambda: forward_only(model, batch),
        "every layer's input and heads times W_U, log-softmax": lambda: torch.log_softmax(
            vectors @ acts.readout.W_U, -1
        ),
        "increases of all heads": lambda: il.head_log_prob_increase(acts, batch.answer_tokens),
        "explain": lambda: il.explain(model, batch),
    }
    for run in ways.values():
        run()
    seconds = [[timed(run)[0] for run in ways.values()] for _ in range(repeats)]
    forward, product, *_ = medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    for label, median in zip(ways, medians, strict=True):
        note = f"{median / product:.2f} × the product with W_U"
        yield Row(name, f"1 × {batch.tokens.shape[1]}", label, median, median / forward, repeats, note=note)
