"""`icl-lens ablate`: what is left of the answer, or of a task's accuracy, when heads are removed."""

import random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from icl_lens.cli.options import (
    BosOption,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    ModelOption,
    RevisionOption,
    load,
)


def ablate(
    prompt: Annotated[str | None, typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".')] = None,
    task: Annotated[str | None, typer.Option("--task", "-t", help="A task instead of one prompt.")] = None,
    n: Annotated[int, typer.Option(help="Prompts of the task; heads are located on as many others.")] = 200,
    heads: Annotated[
        str | None, typer.Option(help="Heads to remove, like L1H2,L3H0; default: those of largest mean increase.")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many heads to locate.")] = 6,
    draws: Annotated[int, typer.Option(help="Sets of as many random heads to compare with.")] = 20,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="The prompt's right label.")] = None,
    model: ModelOption = "icl-mini",
    bos: BosOption = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and random heads.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Remove heads and see what is left, against as many random heads."""
    import torch

    import icl_lens as il
    from icl_lens.metrics import accuracy
    from icl_lens.models import ModelView

    if (prompt is None) == (task is None):
        raise il.InputError("give either a prompt or --task, for instance --task sentiment-number")
    if n < 1 or draws < 1 or k < 1:
        raise il.InputError(f"--n {n}, --draws {draws} and --top {k} must be at least 1")
    loaded = load(model, device=device, dtype=dtype, revision=revision)
    if task is not None:
        prompts = il.load_task(task, n=2 * n, seed=seed)
        choosing, testing = prompts[:n], prompts[n:]
    else:
        assert prompt is not None
        choosing = testing = [il.Prompt.parse(prompt, answer=answer)]
    batches = list(il.tokenize(loaded, testing, prepend_bos=bos).split(64))
    view = ModelView.of(loaded)
    everything = [il.Head(layer, head) for layer in range(view.n_layers) for head in range(view.n_heads)]
    if heads is not None:
        removed = [view.check_head(il.Head.parse(name)) for name in heads.split(",")]
    else:
        if k > len(everything):
            raise il.InputError(f"--top {k} is more than the {len(everything)} heads of {view.name}")
        found = []
        for batch in il.tokenize(loaded, choosing, prepend_bos=bos).split(64):
            acts = il.capture(loaded, batch)
            answers = torch.where(batch.answer < 0, acts.predicted.to(batch.answer.device), batch.answer)
            found.append(il.head_log_prob_increase(acts, batch.label_tokens[answers]))
        order = torch.cat(found).mean(0).flatten().argsort(descending=True)[:k]
        removed = [everything[i] for i in order.tolist()]
    rest = [head for head in everything if head not in removed]
    if len(rest) < len(removed):
        raise il.InputError(f"{len(removed)} of {len(everything)} heads leave too few random ones; remove fewer")
    rng = random.Random(seed)
    sets = [rng.sample(rest, len(removed)) for _ in range(draws)]

    def scores(some: list[il.Head]) -> torch.Tensor:
        with il.ablate_heads(loaded, some):
            return torch.cat([il.label_log_probs(loaded, batch).float().cpu() for batch in batches])

    rows = {"nothing removed": scores([]), f"{len(removed)} heads removed": scores(removed)}
    controls = torch.stack([scores(some) for some in sets])
    console = Console()
    console.print(f"{view.name}: {'located' if heads is None else 'chosen'} {', '.join(map(str, removed))}")
    table = Table()
    table.add_column("")
    if task is not None:
        index = torch.cat([batch.answer.cpu() for batch in batches])
        mask = torch.cat([batch.label_mask.cpu() for batch in batches])
        table.add_column("accuracy", justify="right")
        for name, value in rows.items():
            table.add_row(name, f"{accuracy(value, index, choices=mask):.1%}")
        random_accuracy = torch.tensor([accuracy(value, index, choices=mask) for value in controls])
        table.add_row(f"{len(removed)} random heads, {draws} draws", _spread(random_accuracy))
    else:
        labels = batches[0].labels
        for label in labels:
            table.add_column(f"p({label})", justify="right")
        for name, value in rows.items():
            table.add_row(name, *[f"{p:.1%}" for p in value[0].exp().tolist()])
        spreads = [_spread(controls[:, 0, i].exp()) for i in range(len(labels))]
        table.add_row(f"{len(removed)} random heads, {draws} draws", *spreads)
    console.print(table)


def _spread(values: Any) -> str:
    """Mean, least and most of a tensor of shares."""
    return f"{float(values.mean()):.1%} ({float(values.min()):.1%} to {float(values.max()):.1%})"
