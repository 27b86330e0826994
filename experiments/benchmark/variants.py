"""What is timed on one batch: the forward pass, location in its several ways, and yardsticks."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.benchmark.page import Row
from experiments.benchmark.shapes import random_prompts
from icl_lens.models.view import ModelView

K = 20
MOST_RESULTS = 6 * 2**30
"""Bytes of head results above which TransformerLens' own way is left out."""


class Variant(NamedTuple):
    """A way to an answer, timed as a whole from tokens on."""

    label: str
    run: Callable[[Any, il.PromptBatch], Any]
    slow: bool = False
    """Takes minutes: run once, and only on sizes chosen for it."""


def bare(model: Any, batch: il.PromptBatch) -> Tensor:
    """The model's forward pass as anyone would call it, logits at every position."""
    with torch.no_grad():
        return model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")


def certified(model: Any, batch: il.PromptBatch) -> il.TopSubheads:
    return il.top_subheads(il.capture(model, batch), batch.answer_tokens, k=K)


def exhaustive(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    increase = il.subhead_log_prob_increase(il.capture(model, batch), batch.answer_tokens)
    return increase.flatten(1).topk(K).values


def authors(model: Any, batch: il.PromptBatch) -> Float[Tensor, "batch k"]:
    """As the paper's notebooks go about it: prompt by prompt, a loop over layers and heads, all positions projected."""
    best = []
    for row in range(len(batch)):
        acts = il.capture(model, batch[row])
        target, values = int(batch.answer_tokens[row]), []
        for layer in range(acts.view.n_layers):
            x = acts.resid_pre[:, layer].to(acts.readout.dtype)
            base = acts.readout.log_probs(x)[0, target]
            pattern, v, W_O = acts.head_pattern(layer), acts.head_values(layer), acts.view.W_O(layer)
            for head in range(acts.view.n_heads):
                vectors = (pattern[0, head, :, None] * v[0, :, head]) @ W_O[head].to(x.dtype)
                log_probs = acts.readout.log_probs((x + vectors)[None])[0]
                values.append(log_probs[:, target] - base)
        best.append(torch.cat(values).topk(K).values)
    return torch.stack(best)


def linear(model: Any, batch: il.PromptBatch) -> Tensor:
    """TransformerLens' own `stack_head_results` and `logit_attrs`: logits, not log-probabilities, of whole heads."""
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
        results = cache.stack_head_results(layer=-1)[:, torch.arange(len(batch)), batch.last]
        return cache.logit_attrs(results, batch.answer_tokens, pos_slice=-1, has_batch_dim=True)


VARIANTS = {
    "bare": Variant("bare forward", bare),
    "bare_last": Variant("bare forward, last logits only", il.last_log_probs),
    "captured": Variant("forward + capture", il.capture),
    "certified": Variant(f"forward + capture + certified top {K}", certified),
    "linear": Variant("stack_head_results + logit_attrs (logits of heads)", linear),
    "exhaustive": Variant(f"forward + capture + exhaustive top {K}", exhaustive, slow=True),
    "authors": Variant("the authors' loop over layers and heads", authors, slow=True),
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, everything on a GPU finished, and what it returns."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(model: Any, name: str, n_tokens: int, n: int, *, repeats: int, slow: bool) -> Iterator[Row]:
    """Every variant on one batch, in turns; the slow ones once, if at all."""
    batch = il.tokenize(model, random_prompts(n, n_tokens))
    view = ModelView.of(model)
    parts = view.n_layers * view.n_heads * n_tokens
    left_out = {key: "left out: minutes a run" for key, variant in VARIANTS.items() if variant.slow and not slow}
    results = n * parts * view.d_model * view.model.W_U.element_size()
    if results > MOST_RESULTS:
        left_out["linear"] = f"left out: holds {results / 2**30:.0f} GiB of head results"
    bare(model, batch)  # whatever happens once only happens here
    times: dict[str, list[float]] = {key: [] for key in VARIANTS}
    location: list[float] = []  # without the pass and the capture
    top, others = None, {}
    for turn in range(repeats):
        for key, variant in VARIANTS.items():
            if key in left_out or (variant.slow and turn > 0):
                continue
            try:
                seconds, result = timed(lambda run=variant.run: run(model, batch))
            except (AttributeError, RuntimeError, KeyError, AssertionError, TypeError) as error:
                if key != "linear":
                    raise
                # The yardstick is someone else's: where it does not run on a model, the table says so.
                left_out[key] = f"fails: {str(error).splitlines()[0][:80]}"
                continue
            times[key].append(seconds)
            if key == "captured":
                location.append(timed(lambda acts=result: il.top_subheads(acts, batch.answer_tokens, k=K))[0])
            elif key == "certified":
                top = result
            elif variant.slow:
                others[key] = result
    assert top is not None
    median = {key: statistics.median(found) for key, found in times.items() if found}
    for key, variant in VARIANTS.items():
        if key not in median:
            yield Row(name, f"{n} × {n_tokens}", variant.label, note=left_out[key])
            continue
        exact, note = "", ""
        if key == "certified":
            exact = f"{float(top.n_exact.double().mean()):.1f} of {parts}"
            own = statistics.median(location)
            note = f"location alone {own:.3g} s"
            if "exhaustive" in median:
                note += f", {(median['exhaustive'] - median['captured']) / own:.0f} × faster than exhaustive"
        elif variant.slow:
            exact = f"{parts} of {parts}"
            note = f"its {K} largest are certified's within {float((others[key] - top.value).abs().max()):.0e} nats"
        yield Row(
            name,
            f"{n} × {n_tokens}",
            variant.label,
            median[key],
            median[key] / median["bare"],
            len(times[key]),
            exact,
            note,
        )
