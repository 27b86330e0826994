"""`icl-lens ablate`: zero heads and measure the answer's probability or a task's accuracy, next to random heads."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from icl_lens.cli.console import PlainConsole, new_table, progress
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import By, ModelOptions, PageOptions, TaskOptions, TokenOptions, preview

if TYPE_CHECKING:
    from icl_lens.models.head import Head
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt


MIN_QUERIES = 16
"""Smallest number of a task's different queries to locate heads on one half and ablate them on the other."""


@dataclass(frozen=True, kw_only=True)
class AblateTask(TaskOptions):
    """A task to evaluate instead of a single prompt."""

    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of prompts; heads are located on n others.")] = 200

    def split_prompts(self, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Return prompts to locate heads on and `n` to ablate them on, with other queries if there are enough."""
        from icl_lens.prompts.tasks import split_by_query

        half = self.n + -self.n % 4  # classes and labels are balanced within four prompts
        balanced = self.classes == "binary"  # with all classes, labels are fixed and answers vary
        prompts = self.prompts(n=4 * half, seed=seed, balanced=balanced)
        if len({prompt.query for prompt in prompts}) >= min(2 * self.n, MIN_QUERIES):
            locating, testing = split_by_query(prompts, half)[0], split_by_query(prompts, self.n)[1]
            if (len(locating), len(testing)) == (half, self.n):
                return locating, testing
        return prompts[:half], prompts[half:][: self.n]


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """The heads to ablate, and the random sets to compare them with."""

    panel: ClassVar[str] = "Heads"

    heads: Annotated[
        str | None, typer.Option(help="Heads to ablate, e.g. L1H2,L3H0.", show_default="located heads")
    ] = None
    k: Annotated[
        int | None, typer.Option("--top", "-k", min=1, help="Number of heads to locate.", show_default="6")
    ] = None
    by: Annotated[
        By | None, typer.Option(help="Score that locates heads.", show_default="contrast; increase with one label")
    ] = None
    positions: Annotated[Literal["all", "last"], typer.Option(help="Positions to zero; last is faster.")] = "all"
    random_sets: Annotated[int, typer.Option(min=1, max=1000, help="Random sets, of the same and of all layers.")] = 10

    def choose(self, model: Any, prompts: "PromptBatch") -> "tuple[list[Head], str]":
        """Return the heads named by the options or located on the prompts, and how they were chosen."""
        from icl_lens.errors import InputError
        from icl_lens.locate.locate import top_heads_by
        from icl_lens.models.view import ModelView

        view = ModelView.of(model)
        if self.heads is not None:
            names = dict.fromkeys(self.heads.replace(",", " ").split())
            if not names:
                raise InputError("--heads must name at least one head, e.g. L1H2,L3H0; omit it to locate heads")
            return [view.check_head(name) for name in names], "selected"
        k, most = 6 if self.k is None else self.k, len(view.heads())
        if k > most:
            raise InputError(f"--top must be at most {most}, the number of heads of {view.name}, got {k}")
        by = self.by or ("contrast" if len(prompts.labels) > 1 else "increase")
        with progress() as report:
            return top_heads_by(model, prompts, k, by=by, progress=report), f"located by {by}"


@dataclass(frozen=True, kw_only=True)
class AblateOutput(PageOptions):
    """The page, and the JSON file."""

    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers, also per prompt, as JSON.")] = (
        None
    )


@grouped
def ablate(
    output: AblateOutput,
    heads: HeadsOptions,
    task: AblateTask,
    tokens: TokenOptions,
    model: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(help='Prompt, e.g. "happy : bar three : foo nine :".')] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", "-a", help="Correct label.", show_default="model's prediction")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for prompts and random heads.")] = 0,
) -> None:
    """Zero-ablate heads and compare with random head sets of the same size, from the same layers and from all layers.

    Both classes are queried and each label is the answer equally often, so a constant answer scores at chance (50 %
    with two labels). Accuracy is reported between the labels and over the full vocabulary (top token), log-odds against
    the other labels.
    """
    import icl_lens as il
    from icl_lens.files import check_writable, write_text
    from icl_lens.models.view import ModelView
    from icl_lens.report.ablation import (
        ablation_json,
        comparison_rows,
        condition_names,
        condition_rows,
        notes,
        probability_rows,
    )
    from icl_lens.report.html import ablation_page

    _check(prompt, answer, task, heads)
    check_writable(output.json_file, output.html)
    loaded, console = model.load(), PlainConsole()
    if prompt is None:
        locating, testing = task.split_prompts(seed)
        batch = tokens.tokenize(loaded, testing)
        console.print(preview(batch))
        reference = tokens.tokenize(loaded, locating)
    else:
        batch = tokens.tokenize(loaded, [il.Prompt.parse(prompt, answer=answer)])
        if answer is None:
            predicted = batch.labels[int(il.label_log_probs(loaded, batch)[0].argmax())]
            batch = tokens.tokenize(loaded, [il.Prompt.parse(prompt, answer=predicted)])
        reference = batch
    behavior = task.print_behavior(console, loaded, tokens, seed=seed)
    chosen, how = heads.choose(loaded, reference)
    if heads.heads is None and prompt is None:
        tested, located = ({one.query for one in prompts} for prompts in (batch.prompts, reference.prompts))
        shared = (
            f"{len(tested & located)} of their {len(located)} queries" if tested & located else "none of their queries"
        )
        how += f" on {len(reference)} other prompts ({shared} also occur here)"
    with progress() as report:
        found = il.ablate_with_controls(
            loaded,
            batch,
            chosen,
            n_random_sets=heads.random_sets,
            positions=heads.positions,
            seed=seed,
            progress=report,
        )
    name = ModelView.of(loaded).name
    correct, text, command = str(batch.prompts[0].answer), batch.texts[0], shlex.join(["icl-lens", *sys.argv[1:]])
    page = output.write(
        lambda: ablation_page(
            found,
            model=name,
            text=text,
            answer=correct,
            chosen=f"{how.capitalize()}.",
            behavior="" if behavior is None else str(behavior),
            command=command,
        )
    )
    if output.json_file is not None:
        prompts = [{"text": text, "answer": one.answer} for text, one in zip(batch.texts, batch.prompts, strict=True)]
        check = None if behavior is None else behavior.to_frame()["value"].to_dict() | {"sentence": str(behavior)}
        write_text(
            output.json_file,
            ablation_json(found, model=name, command=command, chosen=how, task_check=check, prompts=prompts),
        )
    console.print(f"{name}: {', '.join(map(str, found.heads))}, {how}")
    if prompt is None:
        columns = ("", "accuracy (95 %)", "log-odds, nats (95 %)", "top token")
        tables = {
            columns: condition_rows(found),
            ("difference", "accuracy, points (95 %)", columns[2]): comparison_rows(found),
        }
    else:
        tables = {("probability of", *condition_names(found).values()): probability_rows(found)}
    for header, rows in tables.items():
        table = new_table(*header)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes(found):
        console.print(note, style="dim")
    if output.json_file is not None:
        console.print(f"JSON: {output.json_file}", soft_wrap=True)
    output.show(page, console)


def _check(prompt: str | None, answer: str | None, task: AblateTask, heads: HeadsOptions) -> None:
    """Raise InputError for options that conflict or have no effect."""
    from icl_lens.errors import InputError

    if (prompt is None) == (task.name is None):
        raise InputError("pass either a prompt or --task, e.g. --task sentiment-number")
    if task.name is not None and answer is not None:
        raise InputError("--answer has no effect with a task, whose prompts have their own answers; remove it")
    if heads.heads is not None and (heads.k is not None or heads.by is not None):
        raise InputError("pass either --heads, or --top and --by to locate them, not both")
    if prompt is not None:
        task.check_no_task()
