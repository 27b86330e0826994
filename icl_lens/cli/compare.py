"""`icl-lens compare`: compare two prompts or two models."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from icl_lens.cli.console import PlainConsole, new_table
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import ModelOptions, PageOptions, ReadoutOptions, TaskOptions
from icl_lens.report.number_format import percent

if TYPE_CHECKING:
    from icl_lens.explanation import Explanation


@dataclass(frozen=True, kw_only=True)
class TwoModels(ModelOptions):
    """The models of A and B, and their device and precision."""

    model_b: Annotated[str | None, typer.Option(help="Model of B.", show_default="same as A")] = None
    revision_b: Annotated[str | None, typer.Option(help="Hub revision of B's model.", show_default="main branch")] = (
        None
    )

    @property
    def one(self) -> bool:
        """Whether A and B share one model."""
        return self.model_b is None and self.revision_b is None

    def both(self) -> tuple[Any, Any]:
        """Load both models; return the same object twice if B has no other model."""
        first = self.load()
        if self.one:
            return first, first
        name = self.model if self.model_b is None else self.model_b
        return first, replace(self, model=name, revision=self.revision_b).load()


@dataclass(frozen=True, kw_only=True)
class ComparePage(PageOptions):
    """The comparison page."""

    html: Annotated[Path | None, typer.Option(help="Write a self-contained comparison page.")] = None


@grouped
def compare(
    output: ComparePage,
    task: TaskOptions,
    reading: ReadoutOptions,
    models: TwoModels,
    a: Annotated[str | None, typer.Argument(help="First prompt.", show_default=False)] = None,
    b: Annotated[str | None, typer.Argument(help="Second prompt.", show_default="the first")] = None,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="Correct label of A.")] = None,
    answer_b: Annotated[str | None, typer.Option(help="Correct label of B.", show_default="model's prediction")] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling a task's prompts.")] = 0,
) -> None:
    """Compare two prompts on one model, or two models on one prompt: answers and heads.

    With --task or --path, A and B are a task's first two prompts, or its first prompt on two models. With --html, the
    page also compares layers and attention.
    """
    from icl_lens import InputError, explain
    from icl_lens.files import check_writable
    from icl_lens.report.comparison import compare as compared

    prompts: list[Any] = task.sample_prompts(2 if models.one else 1, seed=seed, conflicting=(a, b, answer, answer_b))
    if not prompts and a is None:
        raise InputError("nothing to compare; pass two prompts, or a task with --task or --path")
    if not prompts and b is None and models.one:
        raise InputError("nothing to compare; pass a second prompt, or a second model with --model-b")
    check_writable(output.html)
    first, second = models.both()
    prompts = prompts or [a, a if b is None else b]
    if b is None:
        answer_b = answer_b or answer
    settings: dict[str, Any] = {
        **reading.template_kwargs(),
        "prepend_bos": reading.bos,
        "final_norm": reading.final_norm,
        "bias": reading.bias,
    }
    before = explain(first, prompts[0], answer=answer, **settings)
    after = explain(second, prompts[-1], answer=answer_b, **settings)
    page = output.write(lambda: compared(before, after).to_html())
    console = PlainConsole()
    console.print(_answers(before, after))
    console.print(_heads(before, after))
    output.show(page, console)


def _answers(before: "Explanation", after: "Explanation") -> Group:
    table = new_table("label", "A", "B")
    for label in dict.fromkeys([*before.labels, *after.labels]):
        table.add_row(Text(label), *[_probability(side, label) for side in (before, after)])
    return Group(Text("Probability of each label", "bold"), table)


def _probability(side: "Explanation", label: str) -> str:
    return percent(math.exp(side.label_log_probs[side.labels.index(label)])) if label in side.labels else "–"


def _heads(before: "Explanation", after: "Explanation") -> Group:
    """Return the heads that changed most, or the best heads of each if the models differ in shape."""
    from icl_lens.report.html import most_changed

    targets = f"A: {before.target}, B: {after.target}"
    shapes = {(len(side.head_increases), len(side.head_increases[0])) for side in (before, after)}
    if len(shapes) == 2:
        table = new_table("A", "nats", "B", "nats")
        for x, y in zip(before.heads, after.heads, strict=False):
            table.add_row(str(x.head), f"{x.increase:+.3f}", str(y.head), f"{y.increase:+.3f}")
        return Group(Text(f"Heads with the largest increase ({targets})", "bold"), table)
    table = new_table("head", "A", "B", "change")
    for head in most_changed(before, after):
        x, y = (side.head_increases[head.layer][head.head] for side in (before, after))
        table.add_row(str(head), f"{x:+.3f}", f"{y:+.3f}", f"{y - x:+.3f}")
    note = (
        ""
        if before.model == after.model
        else "Heads of two models correspond only if one model was trained from the other."
    )
    return Group(Text(f"Heads whose increase changed most, nats ({targets})", "bold"), table, Text(note, "dim"))
