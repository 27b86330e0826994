"""Draw what a live view shows without a script, for notebooks that are opened without their kernel."""

from collections.abc import Mapping
from typing import Any

from icl_lens.live_view.panels import Panel
from icl_lens.models.head import Head
from icl_lens.report.html.parts import Chip, HeadMap, Table, text_table
from icl_lens.report.html.templating import render_static
from icl_lens.result.number_format import percent, signed

DONE = {
    "removed": "removed at the last position",
    "query": "with the query of the prompt with the other query",
    "keys": "with the keys of the prompt with exchanged texts",
    "values": "with the values of the prompt with exchanged labels",
}


def static_html(model: str, state: Mapping[str, Any], panels: Mapping[str, Panel], element_id: str) -> str:
    """Return the state and the panels that are computed as tables, in tags that notebooks keep without trust."""
    answer = panels.get("answer")
    labels = answer["labels"] if answer else []
    shown = [(text, label) for text, label in state["demonstrations"]]
    effects = panels.get("demonstrations", {})
    columns = ["place", "text", "label", *(f"#{way}" for way in effects.get("ways", ()))]
    rows: list[list[Any]] = []
    for place, (text, label) in enumerate(shown):
        numbers = [signed(value) for value in effects["effects"][place]] if "effects" in effects else []
        rows.append([str(place + 1), text, Chip(label, labels.index(label) if label in labels else None), *numbers])
    by = state["by"]
    scores = next((panel for panel in panels.values() if by in panel), None)
    return render_static(
        "live.html.j2",
        title=f"Live view of {model}",
        element_id=element_id,
        demonstrations=Table(columns, rows),
        query=state["query"],
        answer=None if answer is None else _answer(answer, panels.get("change", {})),
        sentence=change_sentence(answer, panels.get("change", {})),
        by=by,
        map=None if scores is None else HeadMap(scores[by], list(map(Head.parse, scores[f"{by}_located"])), by),
    )


def change_sentence(answer: Panel | None, change: Panel) -> str:
    """Return what the change of the chosen heads does, beside the random sets; empty if none is chosen."""
    if answer is None or "after" not in change:
        return change.get("left_out", "")
    what = "log-odds" if answer["has_others"] else "log p"
    target, draws = answer["labels"][answer["target"]], change["draws"]
    return (
        f"{', '.join(change['heads'])} {DONE[change['change']]}: {what} of {target} {signed(change['before'], 2)} → "
        f"{signed(change['after'], 2)} nats; {change['controls']}: {signed(min(draws), 2)} to "
        f"{signed(max(draws), 2)}."
    )


def _answer(answer: Panel, change: Panel) -> Table:
    has_change = "probs" in change
    rows = [
        [
            Chip(label, index),
            percent(answer["probs"][index]),
            *([percent(change["probs"][index])] if has_change else []),
        ]
        for index, label in enumerate(answer["labels"])
    ]
    what = "log-odds" if answer["has_others"] else "log p"
    outcome = [f"{what} of {answer['labels'][answer['target']]}", signed(answer["outcome"], 2)]
    rows.append([*outcome, *([signed(change["after"], 2)] if has_change else [])])
    return text_table(["label", "probability", *(["changed"] if has_change else [])], rows)
