"""`icl-lens ablate`: what is left of the answer, or of a task's accuracy, when heads are removed."""

import random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from icl_lens.cli.options import (
    BosOption,
    ColumnsOption,
    DemonstrationsOption,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    LabelsOption,
    LayoutChoice,
    LayoutOption,
    MaxWordsOption,
    ModelOption,
    PathOption,
    RevisionOption,
    SplitOption,
    load,
    task_prompts,
)


def ablate(
    prompt: Annotated[str | None, typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".')] = None,
    task: Annotated[str | None, typer.Option("--task", "-t", help="A task instead of one prompt.")] = None,
    n: Annotated[int, typer.Option(help="Prompts of the task; heads are located on as many others.")] = 200,
    heads: Annotated[
        str | None, typer.Option(help="Heads to remove, like L1H2,L3H0; default: those of largest mean increase.")
    ] = None,
    k: Annotated[int | None, typer.Option("--top", "-k", help="How many heads to locate.", show_default="6")] = None,
    draws: Annotated[int, typer.Option(help="Sets of as many random heads to compare with.")] = 20,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="The prompt's right label.")] = None,
    layout: LayoutOption = LayoutChoice.order,
    demonstrations: DemonstrationsOption = 2,
    path: PathOption = None,
    columns: ColumnsOption = "text,label",
    split: SplitOption = "test",
    max_words: MaxWordsOption = None,
    labels: LabelsOption = None,
    model: ModelOption = "icl-mini",
    bos: BosOption = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and random heads.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Remove heads and see what is left, against as many random heads.

    In every second prompt of a task the two labels are exchanged, so that always saying one of them is right half the
    time. Accuracy is given between the labels, and over the whole vocabulary.
    """
    import torch

    import icl_lens as il
    from icl_lens.metrics import accuracy
    from icl_lens.models.view import ModelView

    if (prompt is None) == (task is None):
        raise il.InputError("give either a prompt or --task, for instance --task sentiment-number")
    if task is not None and answer is not None:
        raise il.InputError("--answer is a prompt's; a task's prompts have their own answers: leave it out")
    if heads is not None and k is not None:
        raise il.InputError("--top locates heads, and --heads names them: give one of the two")
    if prompt is not None and (path is not None or labels is not None or layout is not LayoutChoice.order):
        raise il.InputError(
            "--path, --labels and --layout are a task's; a prompt says all of it itself: leave them out"
        )
    k = 6 if k is None else k
    if n < 1 or draws < 1 or k < 1:
        raise il.InputError(f"--n {n}, --draws {draws} and --top {k} must be at least 1")
    loaded = load(model, device=device, dtype=dtype, revision=revision)
    if task is not None:
        half = n + n % 2  # in pairs, so that both halves have both labels as often
        prompts = task_prompts(
            task,
            n=2 * half,
            seed=seed,
            layout=layout.value,
            demonstrations=demonstrations,
            path=path,
            columns=columns,
            split=split,
            max_words=max_words,
            labels=labels,
            balanced=True,
        )
        choosing, testing = prompts[:half], prompts[half:][:n]
    else:
        assert prompt is not None
        choosing = testing = [il.Prompt.parse(prompt, answer=answer)]
    batches = list(il.tokenize(loaded, testing, prepend_bos=bos).split(64))
    view = ModelView.of(loaded)
    everything = [il.Head(layer, head) for layer in range(view.n_layers) for head in range(view.n_heads)]
    if heads is not None:
        names = dict.fromkeys(heads.replace(",", " ").split())
        if not names:
            raise il.InputError("--heads names no head; give heads like L1H2,L3H0, or leave it out to locate some")
        removed = [view.check_head(il.Head.parse(name)) for name in names]
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

    def scores(some: list[il.Head]) -> tuple[torch.Tensor, torch.Tensor]:
        """[prompt label] log-probabilities, and [prompt] whether the answer is the most probable token."""
        found = []
        with il.ablate_heads(loaded, some):
            for batch in batches:
                log_probs = il.last_log_probs(loaded, batch)
                said = log_probs.argmax(-1) == batch.answer_tokens.to(log_probs.device)
                found.append((log_probs[:, batch.label_tokens.to(log_probs.device)].float().cpu(), said.cpu()))
        label, said = zip(*found, strict=True)
        return torch.cat(label), torch.cat(said).float()

    rows = {"nothing removed": scores([]), f"{len(removed)} heads removed": scores(removed)}
    controls = [scores(some) for some in sets]
    console = Console()
    console.print(f"{view.name}: {'located' if heads is None else 'chosen'} {', '.join(map(str, removed))}")
    table = Table()
    table.add_column("")
    if task is not None:
        index = torch.cat([batch.answer.cpu() for batch in batches])
        mask = torch.cat([batch.label_mask.cpu() for batch in batches])
        table.add_column("accuracy between labels", justify="right")
        table.add_column("over the vocabulary", justify="right")
        for name, (value, said) in rows.items():
            table.add_row(name, f"{accuracy(value, index, choices=mask):.1%}", f"{float(said.mean()):.1%}")
        between = torch.tensor([accuracy(value, index, choices=mask) for value, _ in controls])
        whole = torch.stack([said.mean() for _, said in controls])
        table.add_row(f"{len(removed)} random heads, {draws} draws", _spread(between), _spread(whole))
    else:
        shown = batches[0].labels
        for label in shown:
            table.add_column(f"p({label})", justify="right")
        for name, (value, _) in rows.items():
            table.add_row(name, *[f"{p:.1%}" for p in value[0].exp().tolist()])
        every = torch.stack([value[0] for value, _ in controls]).exp()
        spreads = [_spread(every[:, i]) for i in range(len(shown))]
        table.add_row(f"{len(removed)} random heads, {draws} draws", *spreads)
    console.print(table)


def _spread(values: Any) -> str:
    """Mean, least and most of a tensor of shares."""
    return f"{float(values.mean()):.1%} ({float(values.min()):.1%} to {float(values.max()):.1%})"
