"""`icl-lens compare`: compare two prompts or two models."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from icl_lens.cli.console import PlainConsole, new_table, progress
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import PAPER_ANSWER, PAPER_PROMPT, By, ModelOptions, PageOptions, ReadoutOptions, TaskOptions
from icl_lens.report.number_format import percent

if TYPE_CHECKING:
    from icl_lens.explanation import Explanation
    from icl_lens.report.model_comparison import ModelComparison

N_SHOWN = 12


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
    a: Annotated[
        str | None, typer.Argument(help="First prompt.", show_default=f"{PAPER_PROMPT}, with --model-b")
    ] = None,
    b: Annotated[str | None, typer.Argument(help="Second prompt.", show_default="the first")] = None,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="Correct label of A.")] = None,
    answer_b: Annotated[str | None, typer.Option(help="Correct label of B.", show_default="model's prediction")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Prompts of a task, for two models.")] = 1,
    by: Annotated[
        By | None, typer.Option(help="Score that ranks the heads' changes.", show_default="increase; contrast with -n")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling a task's prompts.")] = 0,
) -> None:
    """Compare two prompts on one model, or two models on one prompt: answers and heads.

    With --task or --path, A and B are a task's first two prompts, or its first prompt on two models; with -n, means
    over prompts, with intervals of the differences. With --html, the page also compares layers and attention, or shows
    all heads of both models.
    """
    from icl_lens import InputError, compare_models, explain
    from icl_lens.files import check_writable
    from icl_lens.report.comparison import compare as compared

    if n > 1 and (models.one or task.name is None):
        raise InputError(f"-n must be 1 without a second model and a task, got {n}; pass --model-b and --task")
    prompts: list[Any] = task.sample_prompts(2 if models.one else n, seed=seed, conflicting=(a, b, answer, answer_b))
    if not prompts and models.one and b is None:
        raise InputError("nothing to compare; pass two prompts, a task, or a second model with --model-b")
    if not prompts and a is None:
        a, answer = PAPER_PROMPT, answer or PAPER_ANSWER
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
        "by": by,
    }
    console = PlainConsole()
    if n > 1:
        settings["by"] = by or "contrast"
        for side, model in zip("AB", (first, second) if task.check else (), strict=False):
            console.print(f"{side}: ", end="")
            task.print_behavior(console, model, reading, seed=seed)
        with progress() as report:
            both = compare_models(first, second, prompts, progress=report, **settings)
        page = output.write(both.to_html)
        console.print(_task_answers(both))
        console.print(_task_heads(both))
        output.show(page, console)
        return
    before = explain(first, prompts[0], answer=answer, **settings)
    after = explain(second, prompts[-1], answer=answer_b, **settings)
    page = output.write(lambda: compared(before, after).to_html())
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
    from icl_lens.report.comparison import compare as compared
    from icl_lens.report.html.compare import compared_scores

    targets, both = f"A: {before.target}, B: {after.target}", compared(before, after)
    if not both.same_heads:
        table = new_table("A", before.settings.by, "B", after.settings.by)
        for x, y in zip(before.heads, after.heads, strict=False):
            scores = x.scores[before.settings.by], y.scores[after.settings.by]
            table.add_row(str(x.head), f"{scores[0]:+.3f}", str(y.head), f"{scores[1]:+.3f}")
        return Group(Text(f"Heads with the largest scores, nats ({targets})", "bold"), table)
    names = compared_scores(before, after)
    table = new_table("head", *(column for by in names for column in (f"{by} in A", "in B", "change")))
    prefixes = ["", *(f"{by}_" for by in names[1:])]
    for row in both.to_frame().head(N_SHOWN).to_dict("records"):
        scores = [row[prefix + column] for prefix in prefixes for column in ("a", "b", "change")]
        table.add_row(row["name"], *(f"{score:+.3f}" for score in scores))
    notes = []
    if before.model != after.model:
        notes.append("Heads of two models correspond only if one model was trained from the other.")
    if before.target != after.target and before.target in after.labels:
        notes.append(
            f"Changes compare what heads add to {before.target} in A with what they add to {after.target} in B; to "
            f"explain {before.target} in both, pass --answer {before.target} --answer-b {before.target}."
        )
    title = Text(f"Heads whose {names[0]} changed most, nats ({targets})", "bold")
    return Group(title, table, *(Text(note, "dim") for note in notes))


def _task_answers(both: "ModelComparison") -> Group:
    table = new_table("", "A", "B", "change", "95 % interval")
    for row in both.summary().to_dict("records"):
        shown = percent if row["measure"] == "accuracy" else "{:+.3f}".format
        table.add_row(row["measure"], shown(row["a"]), shown(row["b"]), f"{row['change']:+.3f}", _interval(row))
    return Group(
        Text(f"Answers to {both.n_prompts} prompts: {both.models[0]} (A) and {both.models[1]} (B)", "bold"), table
    )


def _task_heads(both: "ModelComparison") -> Group:
    if not both.same_heads:
        return Group(
            Text("The models have different numbers of layers or heads, so their heads do not correspond.", "dim")
        )
    found = []
    ranked: list[By] = [both.by, "increase", "contrast"]
    for by in dict.fromkeys(ranked):
        table = new_table("head", "A", "B", "change", "95 % interval")
        for row in both.to_frame(by).head(N_SHOWN).to_dict("records"):
            table.add_row(row["name"], *(f"{row[name]:+.3f}" for name in ("a", "b", "change")), _interval(row))
        found += [Text(f"Heads whose mean {by} changed most, nats", "bold"), table]
    note = "Heads of two models correspond only if one model was trained from the other."
    return Group(*found, Text(note, "dim"))


def _interval(row: dict[Any, Any]) -> str:
    return f"{row['low']:+.3f} … {row['high']:+.3f}"
