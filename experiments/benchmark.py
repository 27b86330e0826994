"""How long location takes beside the bare forward pass, and how much memory: `python -m experiments.benchmark`.

One table from one run. Variants are timed in turns, so that a busy machine slows all of them; times are medians, and
ratios are within the run. Peak memory is that of a child process that does nothing else. What would take too long is
left out, and the table says what it would have taken.
"""

import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

import icl_lens as il
from icl_lens.dataset import mean_head_increases, plan_batches
from icl_lens.models import ModelView

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmark.md"


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


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt2-large", "gpt2", 36, 20, 1280, 50257, 5120),
        Shape("llama-7b", "llama", 32, 32, 4096, 32000, 11008, torch.bfloat16),
        Shape("small", "gpt2", 4, 8, 128, 2000, 512),
    )
}


@dataclass(frozen=True)
class Row:
    """A line of the table; `parts` are those evaluated exactly, of all."""

    model: str
    prompts: str
    variant: str
    seconds: float | None
    ratio: float | None
    runs: int
    parts: str = ""
    note: str = ""


# Models and prompts


def random_model(shape: Shape, folder: Path, device: str) -> Any:
    """A model of that shape with random weights, scaled so that attention and predictions are far from uniform.

    Unit-variance inputs give attention scores of standard deviation 2 and logits of standard deviation 3; each
    sublayer adds about a tenth of the embedding's variance to the stream.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.d_model, "n_inner": shape.d_mlp}
    if shape.kind == "llama":
        sizes = {
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "hidden_size": shape.d_model,
            "intermediate_size": shape.d_mlp,
        }
    config = AutoConfig.for_model(
        shape.kind, vocab_size=shape.d_vocab, bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes
    )
    config.save_pretrained(folder)
    vocabulary = {word: 7 * i for i, word in enumerate([":", "foo", "bar", *words(), "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=shape.dtype)
    hf = hf.to_empty(device=device)
    hf.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    width = shape.d_model**-0.5
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "weight" in name else 0.0, 0.1, generator=generator)
            elif any(part in name for part in ("c_attn", "q_proj", "k_proj", "v_proj")):
                parameter.normal_(0.0, 2**0.5 * width, generator=generator)
            elif any(part in name for part in ("wte", "embed_tokens", "lm_head")):
                parameter.normal_(0.0, 3 * width, generator=generator)
            else:
                fan_in = shape.d_mlp if parameter.shape[0] == shape.d_mlp or parameter.shape[-1] == shape.d_mlp else 0
                parameter.normal_(0.0, (fan_in or shape.d_model) ** -0.5 / 10, generator=generator)
    for module in hf.modules():
        if hasattr(module, "inv_freq"):  # not a parameter, and lost on the meta device
            module.__init__(config, device=device)
    return il.load_model(
        str(folder),
        hf_model=hf,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"),
        device=device,
        dtype=shape.dtype,
    )


def words() -> list[str]:
    """Words of the bundled list that are one word each: enough of them to draw prompts from."""
    categories = json.loads((files("icl_lens") / "bundled" / "words.json").read_text(encoding="utf-8"))["categories"]
    found = {word for category in categories.values() for word in category if " " not in word}
    return sorted(found - {":", "foo", "bar"})[:250]


def random_prompts(n: int, n_tokens: int, *, seed: int = 0) -> list[il.Prompt]:
    """Prompts of four demonstrations with texts as long as makes `n_tokens` tokens of one word each."""
    rng, known = random.Random(seed), words()
    each, rest = divmod(n_tokens - 9, 5)

    def text(count: int) -> str:
        return " ".join(rng.choice(known) for _ in range(count))

    labels = ("bar", "bar", "foo", "foo")
    return [
        il.Prompt([il.Demonstration(text(each), label) for label in labels], text(each + rest), "foo") for _ in range(n)
    ]


# Variants: each is timed as a whole, from tokens to answer


def bare(model: Any, batch: il.PromptBatch) -> Tensor:
    """The model's forward pass as anyone would call it, logits at every position."""
    with torch.no_grad():
        return model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")


def bare_last(model: Any, batch: il.PromptBatch) -> Tensor:
    """The forward pass with logits at the last position only."""
    return il.last_log_probs(model, batch)


def captured(model: Any, batch: il.PromptBatch) -> il.Activations:
    return il.capture(model, batch)


def certified(model: Any, batch: il.PromptBatch) -> il.TopSubheads:
    return il.top_subheads(il.capture(model, batch), batch.answer_tokens, k=20)


def exhaustive(model: Any, batch: il.PromptBatch) -> Tensor:
    increase = il.subhead_log_prob_increase(il.capture(model, batch), batch.answer_tokens)
    return increase.flatten(1).topk(20).values


def authors(model: Any, batch: il.PromptBatch) -> list[Any]:
    """As the paper's notebooks go about it: prompt by prompt, a loop over layers and heads, all positions projected."""
    found = []
    for row in range(len(batch)):
        acts = il.capture(model, batch[row])
        target, values = int(batch.answer_tokens[row]), {}
        for layer in range(acts.view.n_layers):
            x = acts.resid_pre[:, layer].to(acts.readout.dtype)
            base = acts.readout.log_probs(x)[0, target]
            pattern, v, W_O = acts.head_pattern(layer), acts.head_values(layer), acts.view.W_O(layer)
            for head in range(acts.view.n_heads):
                vectors = (pattern[0, head, :, None] * v[0, :, head]) @ W_O[head].to(x.dtype)
                log_probs = acts.readout.log_probs((x + vectors)[None])[0]
                for position, value in enumerate((log_probs[:, target] - base).tolist()):
                    values[layer, head, position] = value
        found.append(sorted(values.items(), key=lambda item: -item[1])[:20])
    return found


def linear(model: Any, batch: il.PromptBatch) -> Tensor:
    """TransformerLens' own `stack_head_results` and `logit_attrs`: logits, not log-probabilities, of whole heads."""
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask)
        results = cache.stack_head_results(layer=-1)[:, torch.arange(len(batch)), batch.last]
        return cache.logit_attrs(results, batch.answer_tokens, pos_slice=-1, has_batch_dim=True)


VARIANTS: dict[str, tuple[str, Callable[[Any, il.PromptBatch], Any]]] = {
    "bare": ("bare forward", bare),
    "bare_last": ("bare forward, last logits only", bare_last),
    "captured": ("forward + capture", captured),
    "certified": ("forward + capture + certified top 20", certified),
    "exhaustive": ("forward + capture + exhaustive top 20", exhaustive),
    "authors": ("the authors' loop over layers and heads", authors),
    "linear": ("stack_head_results + logit_attrs (logits of heads)", linear),
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, everything on a GPU finished."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(model: Any, name: str, n_tokens: int, n: int, *, repeats: int, limit: float, say: Console) -> Iterator[Row]:
    """Every variant on one batch, in turns; one whose single run would take longer than `limit` seconds is left out."""
    batch = il.tokenize(model, random_prompts(n, n_tokens), prepend_bos=False)
    view = ModelView.of(model)
    prompts = f"{n} × {n_tokens}"
    bare(model, batch)  # whatever happens once only happens here
    per_forward = timed(lambda: bare(model, batch))[0]
    parts = view.n_layers * view.n_heads * n_tokens
    # Multiplications of a projection of all parts, beside those of a forward pass.
    weights = sum(p.numel() for p in model.blocks.parameters())
    vocabulary = view.model.W_U.numel()
    factor = parts * vocabulary / (n_tokens * (weights + vocabulary))
    kept = n * view.n_layers * view.n_heads * n_tokens * view.d_model * view.model.W_U.element_size()
    once, turns, skipped = [], [], []
    for key in VARIANTS:
        if key in ("exhaustive", "authors") and (1 + factor) * per_forward > limit:
            skipped.append((key, f"left out: about {(1 + factor) * per_forward / 60:.0f} minutes a run"))
        elif key == "linear" and kept > 6 * 2**30:
            skipped.append((key, f"left out: holds {kept / 2**30:.0f} GiB of head results"))
        else:
            (once if key in ("exhaustive", "authors") else turns).append(key)
    times: dict[str, list[float]] = {key: [] for key in VARIANTS}
    last: dict[str, Any] = {}
    for _ in range(repeats):
        for key in list(turns):
            try:
                seconds, last[key] = timed(lambda key=key: VARIANTS[key][1](model, batch))
            except (AttributeError, RuntimeError, KeyError, AssertionError, TypeError) as error:
                if key != "linear":
                    raise
                # The yardstick is someone else's: where it does not run on a model, the table says so.
                skipped.append((key, f"fails: {str(error).splitlines()[0][:80]}"))
                turns.remove(key)
                continue
            times[key].append(seconds)
            if key != "certified":
                last.pop(key, None)
    for key in once:
        say.print(f"{name}, {prompts}: {VARIANTS[key][0]} …", style="dim")
        times[key].append(timed(lambda key=key: VARIANTS[key][1](model, batch))[0])
    forward = statistics.median(times["bare"])
    top = last["certified"]
    notes = dict(skipped)
    for key, (label, _) in VARIANTS.items():
        exact = {"certified": float(top.n_exact.double().mean()), "exhaustive": parts, "authors": parts}.get(key)
        seen = "" if exact is None else f"{exact:.1f} of {parts}"
        if key in notes:
            yield Row(name, prompts, label, None, None, 0, "", notes[key])
            continue
        seconds = statistics.median(times[key])
        note = ""
        if key == "certified":
            own = seconds - statistics.median(times["captured"])
            if times["exhaustive"]:
                whole = statistics.median(times["exhaustive"]) - statistics.median(times["captured"])
                note = f"location alone {own:.2f} s, {whole / own:.0f} × faster than exhaustive"
        yield Row(name, prompts, label, seconds, seconds / forward, len(times[key]), seen, note)


def over_dataset(model: Any, name: str, batch: il.PromptBatch, *, check: bool) -> Iterator[Row]:
    """Locating heads over many prompts beside the forward passes over the same batches."""
    view = ModelView.of(model)
    k = min(20, view.n_layers * view.n_heads)
    prompts = f"{len(batch):,} prompts"
    forward = 0.0
    for rows in plan_batches(view, batch):
        part = batch[rows]
        forward += timed(lambda part=part: bare(model, part))[0]
    yield Row(name, prompts, "bare forward", forward, 1.0, 1)
    seconds, top = timed(lambda: il.locate_heads(model, batch, k=k))
    yield Row(
        name,
        prompts,
        f"top {k} heads by exact mean, certified",
        seconds,
        seconds / forward,
        1,
        f"{top.n_exact} of {top.n_parts} heads; {100 * top.share:.1f} % of evaluations",
        f"largest bound left out {top.left_out:.3f}, last head {float(top.value[-1]):.3f} nats",
    )
    if check:
        seconds, mean = timed(lambda: mean_head_increases(model, batch))
        best = mean.flatten().topk(k)
        same = sorted(best.indices.tolist()) == sorted((top.layer * view.n_heads + top.head).tolist())
        error = float((best.values - top.value.cpu()).abs().max())
        yield Row(
            name,
            prompts,
            "every head's exact mean (W_O·W_U)",
            seconds,
            seconds / forward,
            1,
            f"{top.n_parts} of {top.n_parts} heads",
            f"{'the same' if same else 'OTHER'} {k} heads; values differ by at most {error:.0e} nats",
        )


def shares(model: Any, name: str, batch: il.PromptBatch) -> Iterator[Row]:
    """Share of (layer, head, position) parts evaluated for the top 20 of each prompt, and where the model is unsure."""
    n_exact, n_parts, margin = [], [], []
    for part in batch.split(50):
        acts = il.capture(model, part)
        top = il.top_subheads(acts, part.answer_tokens, k=20)
        n_exact.append(top.n_exact.double())
        n_parts.append(top.n_parts.double())
        best = acts.label_log_probs.topk(min(2, acts.label_log_probs.shape[1]), dim=-1).values
        margin.append(best[:, 0] - best[:, -1])
    exact, parts, sure = torch.cat(n_exact), torch.cat(n_parts), torch.cat(margin)
    unsure = sure.argsort()[: max(1, len(sure) // 10)]
    for label, rows in (("all prompts", slice(None)), ("the tenth where the model is least sure", unsure)):
        yield Row(
            name,
            f"{len(exact[rows]):,} prompts",
            f"certified top 20 subheads, {label}",
            None,
            None,
            1,
            f"{float(exact[rows].mean()):.1f} of {float(parts[rows].mean()):.0f} "
            f"({100 * float((exact[rows] / parts[rows]).mean()):.1f} %), at most {int(exact[rows].max())}",
        )


# Memory, in processes of their own


def child(shape: str, what: str, n: int, n_tokens: int) -> None:
    """Does one thing and prints its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(SHAPES[shape], Path(folder), "cpu")
    weights = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    batch = il.tokenize(model, random_prompts(n, n_tokens), prepend_bos=False)
    if what == "locate":
        il.locate_heads(model, batch, k=20)
    else:
        VARIANTS[what][1](model, batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"weights": weights, "loaded": loaded, "peak": peak}))


def memory(shape: str, what: str, n: int, n_tokens: int) -> dict[str, float]:
    """Weights, and peak resident memory after loading and at the end, GiB."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmark", "--child", f"{shape},{what},{n},{n_tokens}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: value / 2**30 for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


# The document


def machine() -> list[str]:
    """What the numbers were measured on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines = [f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {ram:.0f} GiB of memory"]
    if torch.cuda.is_available():
        lines.append(torch.cuda.get_device_name())
    names = ("torch", "transformers", "transformer-lens", "icl-lens")
    found = ", ".join(f"{name} {version(name)}" for name in names if _installed(name))
    return [*lines, f"Python {platform.python_version()}, {found}"]


def _installed(name: str) -> bool:
    try:
        version(name)
    except ImportError:
        return False
    return True


def document(rows: list[Row], peaks: list[tuple[str, dict[str, float]]]) -> str:
    """The page: machine, times, memory."""
    lines = ["# Benchmark", "", "Made by `python -m experiments.benchmark`; one run.", ""]
    lines += [f"* {line}" for line in machine()]
    lines += [
        "",
        "Times are medians over the runs given, in seconds, the variants taken in turns; ratios are to the bare "
        "forward pass over the same prompts. A part is a (layer, head, position). Weights of the large shapes are "
        "random, scaled so that neither attention nor predictions are uniform.",
        "",
        "| model | prompts × tokens | variant | seconds | ratio | runs | evaluated exactly | |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells = (row.model, row.prompts, row.variant, seconds, ratio, row.runs or "–", row.parts, row.note)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    if peaks:
        lines += [
            "",
            "Peak resident memory of a process that does nothing else, GiB. Libraries are part of it.",
            "",
            "| what | weights | after loading | peak | peak − weights |",
            "|---|---:|---:|---:|---:|",
        ]
        for what, one in peaks:
            above = one["peak"] - one["weights"]
            lines.append(f"| {what} | {one['weights']:.2f} | {one['loaded']:.2f} | {one['peak']:.2f} | {above:.2f} |")
    return "\n".join(lines) + "\n"


def main(
    shape: Annotated[str, typer.Option(help=f"Of the large model: {', '.join(SHAPES)}.")] = "gpt2-large",
    repeats: Annotated[int, typer.Option(help="Runs of each variant.")] = 5,
    limit: Annotated[float, typer.Option(help="Seconds that a single run of a variant may take.")] = 200.0,
    longest: Annotated[
        float, typer.Option(help="Seconds that a bare forward may take; larger batches are left out.")
    ] = 45.0,
    n: Annotated[int, typer.Option(help="Prompts of the dataset rows.")] = 1000,
    sizes: Annotated[str, typer.Option(help="Tokens × batch sizes.")] = "14x1,14x16,14x64,200x1,200x16,200x64",
    with_memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    out: Annotated[Path, typer.Option(help="The page.")] = DOCUMENT,
    one: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Time and memory of location beside the bare forward pass: one table, one run."""
    if one:
        name, what, count, tokens = one.split(",")
        return child(name, what, int(count), int(tokens))
    say = Console(stderr=True)
    rows: list[Row] = []
    peaks: list[tuple[str, dict[str, float]]] = []

    def add(found: Iterator[Row]) -> None:
        for row in found:
            rows.append(row)
            ratio = "" if row.ratio is None else f"{row.ratio:6.2f} ×"
            say.print(f"{row.model:12} {row.prompts:14} {row.variant:52} {ratio} {row.parts} {row.note}", markup=False)

    def block(model: Any, name: str) -> None:
        per_token = 0.0
        for size in sizes.split(","):
            tokens, batch = map(int, size.split("x"))
            expected = per_token * tokens * batch
            if expected > longest:
                add(
                    iter(
                        [
                            Row(
                                name,
                                f"{batch} × {tokens}",
                                "all",
                                None,
                                None,
                                0,
                                "",
                                f"left out: {expected:.0f} s a run",
                            )
                        ]
                    )
                )
                continue
            # Longer batches vary less and take longer: fewer turns.
            turns = repeats if expected < 10 else min(repeats, 3)
            add(measure(model, name, tokens, batch, repeats=turns, limit=limit, say=say))
            slowest = max((row.seconds or 0.0) for row in rows[-len(VARIANTS) :] if row.variant == "bare forward")
            per_token = slowest / (tokens * batch)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(SHAPES[shape], Path(folder), device)
    block(model, shape)
    batch = il.tokenize(model, random_prompts(n, 14), prepend_bos=False)
    add(over_dataset(model, shape, batch, check=False))
    add(shares(model, shape, batch[: min(n, 100)]))
    del model
    for bundled in il.bundled_models():
        model = il.load_model(bundled, device=device)
        from icl_lens.tasks import load_task

        batch = il.tokenize(model, load_task("sentiment-number", n=n))
        add(over_dataset(model, bundled, batch, check=True))
        add(shares(model, bundled, batch))
    if device == "cuda" and shape != "llama-7b":
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(SHAPES["llama-7b"], Path(folder), device)
        block(model, "llama-7b")
        del model
    if with_memory and device == "cpu":
        for what, count, tokens in (
            *((variant, 16, 14) for variant in ("bare", "captured", "certified", "linear")),
            ("locate", min(n, 100), 14),
            ("locate", n, 14),
            ("locate", 2, 1000),
        ):
            label = VARIANTS[what][0] if what in VARIANTS else "locate"
            peaks.append((f"{shape}, {label}, {count:,} × {tokens}", memory(shape, what, count, tokens)))
            say.print(*map(str, peaks[-1]), markup=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(document(rows, peaks), encoding="utf-8")
    say.print(f"Table: {out}")


if __name__ == "__main__":
    typer.run(main)
