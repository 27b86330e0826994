"""`python -m experiments.benchmark`: measure everything in one run and write one table.

Variants are timed in alternation, so that a busy machine slows all of them; times are medians, and ratios are within
the run. Peak memory is that of a child process that does nothing else.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

import icl_lens as il
from experiments.benchmark.dataset_timings import (
    edges,
    fixing,
    locating,
    mean_effects,
    removing,
    removing_at_last,
    shares,
)
from experiments.benchmark.edge_methods import edge_methods
from experiments.benchmark.live_timings import live
from experiments.benchmark.memory import peak_of
from experiments.benchmark.model_shapes import SHAPES, build, random_prompts
from experiments.benchmark.report import Peak, Row, document
from experiments.benchmark.two_processes import two_processes
from experiments.benchmark.variants import explaining, measure
from icl_lens.errors import InputError
from icl_lens.files import write_text
from icl_lens.prompts.tasks import load_task

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / f"benchmark{'-gpu' if torch.cuda.is_available() else ''}.md"
METHODS_DOCUMENT = DOCUMENT.with_name("benchmark-edges.md")
MAX_FORWARD_SECONDS = 45.0
"""Maximum seconds of a bare forward pass; larger batches are omitted."""
AT_LAST_TOKENS = (14, 200, 1000)
"""Lengths (tokens) of the prompts on which every head is removed at the last position."""


def sizes_of(text: str) -> list[tuple[int, int]]:
    """Return the (tokens, prompts) pairs of a text such as 14x1,200x16; raise InputError for another text."""
    try:
        return [(int(tokens), int(batch)) for tokens, batch in (size.split("x") for size in text.split(",") if size)]
    except ValueError:
        raise InputError(f"{text!r} is not a list of sizes; pass tokens x prompts, e.g. 14x1,200x16") from None


def batches(
    model: Any, name: str, sizes: list[tuple[int, int]], slow: list[tuple[int, int]], *, repeats: int
) -> Iterator[Row]:
    """Measure every variant on every size of batch; omit sizes whose forward pass would take too long."""
    per_token = 0.0
    for tokens, batch in sizes:
        expected = per_token * tokens * batch
        if expected > MAX_FORWARD_SECONDS:
            yield Row(name, f"{batch} × {tokens}", "all", note=f"omitted: {expected:.0f} s per forward pass")
            continue
        # Slow batches need fewer turns: their times vary less.
        turns = repeats if expected < 10 else min(repeats, 3)
        rows = list(measure(model, name, tokens, batch, repeats=turns, slow=(tokens, batch) in slow))
        yield from rows
        per_token = (rows[0].seconds or 0.0) / (tokens * batch)


Only = Literal["everything", "explain", "edges", "live", "edge-methods"]
EDGE_TOKENS = (14, 200)
LIVE = ("icl-mini", "smollm2-135m")
"""Models whose live view is timed."""
EXPLAINED = ("smollm2-135m", "gemma-3-270m")
"""Shapes of the models whose explanation of one prompt is timed."""


def on_real_weights(n: int, device: str, *, repeats: int) -> Iterator[Row]:
    """Measure every variant, and location and removal over many prompts, on the bundled models."""
    for name in il.bundled_models():
        model = il.load_model(name, device=device)
        batch = il.tokenize(model, load_task("sentiment-number", n=n))
        yield from batches(model, name, [(14, 16)], [(14, 16)], repeats=repeats)
        yield from locating(model, name, batch, repeats=repeats, check=True)
        yield from shares(model, name, batch)
        yield from removing(model, name, batch[:100], repeats=repeats)
        yield from removing_at_last(model, name, batch[:100], repeats=repeats)
        yield from fixing(model, name, batch[:100], repeats=repeats)
        yield from mean_effects(model, name, batch, repeats=1)


def memory(folder: Path, n: int) -> Iterator[Peak]:
    """Measure peak memory of passes, searches, an explanation, removing heads, and location over many prompts."""
    for key in ("bare", "captured", "certified", "linear"):
        yield peak_of(folder, key, 16, 14)
    yield peak_of(folder, "explain", 1, 14)
    for tokens in AT_LAST_TOKENS:
        yield peak_of(folder, "removed", 1, tokens)
    for prompts, tokens in ((min(n, 100), 14), (n, 14), (2, 1000)):
        yield peak_of(folder, "locate", prompts, tokens)


def explained(name: str, folder: Path) -> Iterator[Peak]:
    """Measure peak memory of explaining one prompt with a model that fills the machine, in the shape's precision."""
    build(SHAPES[name], folder)
    yield peak_of(folder, "explain", 1, 14, dtype=SHAPES[name].dtype)


def main(
    shape: Annotated[str, typer.Option(help=f"Shape of the large model: {', '.join(SHAPES)}.")] = "gpt2-large",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 5,
    n: Annotated[int, typer.Option(min=1, help="Prompts of the dataset rows.")] = 1000,
    sizes: Annotated[str, typer.Option(help="Tokens x batch sizes.")] = "14x1,14x16,14x64,200x1,200x16,200x64",
    slow: Annotated[str, typer.Option(help="Sizes on which the exhaustive searches are run, once.")] = "14x1,14x16",
    with_memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    largest: Annotated[
        str,
        typer.Option(help="Shape of the model whose peak memory is measured when it explains a prompt; empty: none."),
    ] = "llama-7b",
    only: Annotated[
        Only, typer.Option(help="Everything, explaining a prompt, edges, the live view, or other methods' edges.")
    ] = "everything",
    out: Annotated[Path | None, typer.Option(help="The page; by default that in docs/.")] = None,
) -> None:
    """Measure time and memory of location, relative to a forward pass, and write the page."""
    console = Console(stderr=True, width=200)
    for given in (shape, largest or shape):
        if given not in SHAPES:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(SHAPES)}")
    try:
        wanted, slow_sizes = sizes_of(sizes), sizes_of(slow)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = out or (METHODS_DOCUMENT if only == "edge-methods" else DOCUMENT)
    rows: list[Row] = []
    peaks: list[Peak] = []
    if only == "edge-methods":
        for page in edge_methods(device):
            write_text(out, page)  # keeps models if the run stops
        console.print(f"Table: {out}")
        return

    def add(measured: Iterator[Row] | Iterator[Peak]) -> None:
        for one in measured:
            if isinstance(one, Row):
                rows.append(one)
            else:
                peaks.append(one)
            console.print("  ".join(one.cells()), markup=False, highlight=False)
            write_text(out, document(rows, peaks))  # keeps rows if the run stops

    if only in ("everything", "live"):
        for name in LIVE:
            add(live(il.load_model(name, device=device), name, repeats=max(repeats, 10)))
        if only == "live":
            return
    with tempfile.TemporaryDirectory() as temporary:
        for name in EXPLAINED:
            build(SHAPES[name], Path(temporary) / name)
            if only != "edges":
                add(explaining(il.load_model(str(Path(temporary) / name), device=device), name, repeats=repeats))
        for name in dict.fromkeys((shape, EXPLAINED[0])) if only != "explain" else ():
            build(SHAPES[name], Path(temporary) / name)
            model = il.load_model(str(Path(temporary) / name), device=device)
            for tokens in EDGE_TOKENS:
                add(edges(model, name, il.tokenize(model, random_prompts(1, tokens)), repeats=min(repeats, 2)))
        if only != "everything":
            console.print(f"Table: {out}")
            return
        for name in dict.fromkeys([shape, "llama-7b"] if device == "cuda" else [shape]):
            folder = Path(temporary) / name
            build(SHAPES[name], folder)
            model = il.load_model(str(folder), device=device, dtype=SHAPES[name].dtype)
            add(batches(model, name, wanted, slow_sizes, repeats=repeats))
            batch = il.tokenize(model, random_prompts(n, 14))
            add(locating(model, name, batch, repeats=1, check=False))
            add(shares(model, name, batch[: min(n, 100)]))
            add(removing(model, name, batch[:1], repeats=1))
            add(mean_effects(model, name, batch[: min(n, 16)], repeats=1))
            add(fixing(model, name, batch[: min(n, 4)], repeats=1))
            for tokens in AT_LAST_TOKENS:
                add(removing_at_last(model, name, il.tokenize(model, random_prompts(1, tokens)), repeats=repeats))
            del model
        add(on_real_weights(n, device, repeats=repeats))
        if with_memory and device == "cpu":
            add(two_processes(Path(temporary) / shape, n))
            add(memory(Path(temporary) / shape, n))
            if largest:
                add(explained(largest, Path(temporary) / largest))
    console.print(f"Table: {out}")


if __name__ == "__main__":
    typer.run(main)
