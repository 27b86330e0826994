"""A page about an ablation with controls; templates/ablation.html.j2 draws it."""

from collections.abc import Sequence

from icl_lens.interventions.controlled_ablation import ControlledAblation
from icl_lens.report.ablation import (
    comparison_rows,
    condition_names,
    condition_rows,
    label_probabilities,
    notes,
    probability_rows,
)
from icl_lens.report.html.parts import Cell, Chip, Dots, Table
from icl_lens.report.html.templating import render_page


def ablation_page(
    found: ControlledAblation,
    *,
    model: str,
    text: str,
    answer: str = "",
    chosen: str = "",
    behavior: str = "",
    command: str = "",
) -> str:
    """Return a self-contained page of answers without ablation, with the heads ablated and with random heads ablated.

    `text` is the first prompt, `answer` its answer; `chosen` says how the heads were chosen, `behavior` what the model
    does on the task (`il.task_check`), and `command` reproduces the page.
    """
    is_task = len(found.queries) > 1
    columns = [condition_names(found)["heads"], "#accuracy, points (95%)", "#log-odds, nats (95%)"]
    return render_page(
        "ablation.html.j2",
        title=f"{model}: {len(found.heads)} heads ablated",
        model=model,
        text=text,
        answer=Chip(answer, found.labels.index(answer)) if answer in found.labels else None,
        chosen=chosen,
        behavior=behavior,
        command=command,
        found=found,
        is_task=is_task,
        before_after=_before_after(found, answer),
        result=_task_table(found) if is_task else _prompt_table(found),
        comparison=Table(columns, comparison_rows(found)) if is_task else None,
        notes=notes(found),
    )


def _before_after(found: ControlledAblation, answer: str) -> Sequence[float]:
    """Return the accuracy, or the probability of one prompt's answer, without ablation and with the heads ablated."""
    conditions = [found.conditions[name] for name in ("no ablation", "heads")]
    if len(found.queries) > 1:
        return [one.scores[0].accuracy_between_labels for one in conditions]
    return [label_probabilities(one, found.labels.index(answer))[0] for one in conditions]


def _task_table(found: ControlledAblation) -> Table:
    before = float(found.per_prompt("no ablation", "accuracy").mean())
    rows: list[list[Cell]] = []
    for name, texts in zip(condition_names(found), condition_rows(found), strict=True):
        means = found.per_prompt(name, "accuracy").mean(1).tolist()
        draws = means if name in ("same layers", "all layers") else []
        rows.append([*texts, Dots(before, sum(means) / len(means), draws)])
    columns = ["", "#accuracy (95%)", "#log-odds, nats (95%)", "#top token", "accuracy, 0 – 100%"]
    return Table(columns, rows, "removal")


def _prompt_table(found: ControlledAblation) -> Table:
    rows: list[list[Cell]] = []
    for i, (label, *texts) in enumerate(probability_rows(found)):
        before, after = (label_probabilities(found.conditions[name], i)[0] for name in ("no ablation", "heads"))
        draws = label_probabilities(found.conditions["same layers"], i)
        rows.append([Chip(label, i), *texts, Dots(before, after, draws)])
    names = [f"#{name}" for name in condition_names(found).values()]
    return Table(["probability of", *names, "0 – 100%"], rows, "removal")
