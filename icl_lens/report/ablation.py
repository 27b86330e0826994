"""An ablation with controls in words and numbers: its terminal tables and its page."""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Group
from rich.text import Text

from icl_lens.intervals import MIN_RANDOM_SETS, Interval
from icl_lens.measures.controlled_ablation import Condition, ConditionName, ControlledAblation
from icl_lens.models.active_edits import edits_note
from icl_lens.report.html.parts import Cell, Chip, Dots, Table
from icl_lens.report.terminal import full_table
from icl_lens.result.number_format import mean_and_range, percent, signed


def condition_names(found: ControlledAblation) -> dict[ConditionName, str]:
    """Return what each condition is called in tables."""
    n = len(found.heads)
    names: dict[ConditionName, str] = {
        "no ablation": "no ablation",
        "heads": f"{n} head{'s' * (n > 1)} {found.ablated}",
        "same layers": f"{n} random, same layers",
        "all layers": f"{n} random, all layers",
    }
    return {name: text for name, text in names.items() if found.conditions[name].sets}


def condition_rows(found: ControlledAblation) -> list[list[str]]:
    """Return each condition's name, accuracy and log-odds with 95% intervals, and accuracy over the vocabulary."""
    rows = []
    for name, text in condition_names(found).items():
        accuracy, odds = found.interval(name, "accuracy"), found.interval(name, "log_odds")
        over = percent(found.interval(name, "over_vocabulary").value)
        rows.append([text, share_text(accuracy), _interval_text(odds, signed_short), over])
    return rows


def probability_rows(found: ControlledAblation) -> list[list[str]]:
    """Return each label's probability after the first prompt under each condition: mean (range over sets)."""
    rows = []
    for i, label in enumerate(found.labels):
        shares = [label_probabilities(found.conditions[name], i) for name in condition_names(found)]
        rows.append([label, *map(mean_and_range, shares)])
    return rows


def label_probabilities(condition: Condition, label: int) -> list[float]:
    """Return a label's probability after the first prompt under each head set of a condition."""
    return [math.exp(float(one.label_log_probs[0, label])) for one in condition.scores]


def comparison_rows(found: ControlledAblation) -> list[list[str]]:
    """Return accuracy and log-odds with the heads ablated, minus those with random heads ablated."""
    rows = []
    for other in ("same layers", "all layers"):
        if found.conditions[other].sets:
            accuracy, odds = (found.difference("heads", other, measure) for measure in ("accuracy", "log_odds"))
            points = _interval_text(accuracy, lambda value: signed(100 * value, 1))
            rows.append([f"minus random, {other}", points, _interval_text(odds, signed_short)])
    return rows


def terminal(found: ControlledAblation) -> Group:
    """Return the tables that `icl-lens ablate` prints."""
    if len(found.queries) == 1:
        tables = {("probability of", *condition_names(found).values()): probability_rows(found)}
    else:
        columns = ("accuracy (95%)", "log-odds, nats (95%)", "top token")
        tables = {
            ("", *columns): condition_rows(found),
            ("difference", "accuracy, points (95%)", columns[1]): comparison_rows(found),
        }
    shown = [full_table(header, rows) for header, rows in tables.items()]
    finding = [Text(found.finding, "bold")] if found.finding else []
    return Group(*finding, *shown, *(Text(note, "dim") for note in notes(found)))


def notes(found: ControlledAblation) -> list[str]:
    """Return notes that explain the table's numbers."""
    n, n_queries = len(found.queries), len(set(found.queries))
    n_sets = len(found.conditions["same layers"].sets)
    where = "all positions" if found.positions == "all" else "the last position"
    lines = [f"Heads are {found.ablated} at {where}. Random: mean over {n_sets} sets each."]
    lines += [found.reference_sentence] if found.reference else []
    if n > 1:
        lines.append(
            f"Chance: {percent(found.chance)} between the labels. 95% intervals are over the {n_queries} queries of "
            f"{n} prompts, and over the random sets."
        )
    if 0 < n_sets < MIN_RANDOM_SETS:
        lines.append(
            f"Random heads have no intervals: these need at least {MIN_RANDOM_SETS} random sets, got {n_sets}."
        )
    if n > 1 and not math.isnan(found.interval("no ablation", "auroc").value):
        aurocs = [f"{name} {_number(found.interval(one, 'auroc'))}" for one, name in condition_names(found).items()]
        lines.append(
            "AUROC of the labels' log-odds, which a preference for one label does not change (chance: 0.5): "
            f"{', '.join(aurocs)}."
        )
    if found.edits:
        lines.append(edits_note(found.edits, "All conditions, also “no ablation”,"))
    if found.n_displaced:
        lines.append(
            f"{found.n_displaced} heads of each same-layer set are from the nearest layers, for lack of other heads."
        )
    return lines


def page(found: ControlledAblation) -> tuple[str, dict[str, Any]]:
    """Return the page of answers without ablation, with the heads ablated and with random heads ablated."""
    n, is_task = len(found.heads), len(found.queries) > 1
    answer = _answer(found)
    columns = [condition_names(found)["heads"], "#accuracy, points (95%)", "#log-odds, nats (95%)"]
    return "ablation.html.j2", {
        "title": f"{n} head{'s' * (n > 1)} ablated",
        "found": found,
        "answer": Chip(found.labels[answer], answer),
        "is_task": is_task,
        "result": _task_table(found) if is_task else _prompt_table(found),
        "comparison": Table(columns, comparison_rows(found)) if is_task else None,
        "notes": notes(found),
        **dict.fromkeys(("model", "text", "chosen", "behavior", "command"), ""),
    }


def _answer(found: ControlledAblation) -> int:
    """Return the index of the first prompt's answer or, without one, of the label that the model prefers."""
    scores = found.conditions["no ablation"].scores[0]
    answer = int(scores.answer[0])
    return answer if answer >= 0 else int(scores.label_log_probs[0].argmax())


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


def signed_short(value: float) -> str:
    """Format nats with two decimals and their sign."""
    return signed(value, 2)


def share_text(share: Interval) -> str:
    """Format a share with its interval: "96.7% (88.0–100.0)"."""
    low, high = (f"{100 * end:.1f}" for end in (share.low, share.high))
    return percent(share.value) if math.isnan(share.low) else f"{percent(share.value)} ({low}–{high})"


def _number(share: Interval) -> str:
    """Format an AUROC with its interval: "0.98 (0.95–1.00)"."""
    return f"{share.value:z.2f}" + ("" if math.isnan(share.low) else f" ({share.low:.2f}–{share.high:.2f})")


def _interval_text(interval: Interval, text: Callable[[float], str]) -> str:
    ends = "" if math.isnan(interval.low) else f" ({text(interval.low)}…{text(interval.high)})"
    return text(interval.value) + ends
