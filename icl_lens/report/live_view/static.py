"""Draw what a live view shows without a script, for notebooks opened without their kernel."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from icl_lens.models.head import Head
from icl_lens.report.html import view_page
from icl_lens.report.html.templating import render_static
from icl_lens.report.live_view.panels import Panel
from icl_lens.result.number_format import percent, signed
from icl_lens.result.view import Cell, Column, HeadValues, Label, Section, View

DONE = {
    "removed": "removed at the last position",
    "query": "with the query of the prompt with the other query",
    "keys": "with the keys of the prompt with exchanged texts",
    "values": "with the values of the prompt with exchanged labels",
}


def static_html(
    model: str, state: Mapping[str, Any], panels: Mapping[str, Panel], element_id: str
) -> str:
    """Return the state and the panels that are computed as tables, in tags that notebooks keep
    without trust.
    """
    contents = view_page.contents(static_view(model, state, panels), {})
    body = render_static(view_page.TEMPLATE, **contents)
    return Markup('<div id="{}">{}</div>').format(element_id, Markup(body))


def static_view(model: str, state: Mapping[str, Any], panels: Mapping[str, Panel]) -> View:
    """Return what is shown of a state and its panels."""
    answer, change = panels.get("answer"), panels.get("change", {})
    labels = answer["labels"] if answer else []
    sentences = [f"Query: {state['query']}", change_sentence(answer, change)]
    sections = [_demonstrations_section(state, panels.get("demonstrations", {}), labels)]
    if answer is not None:
        sections.append(_answer_section(answer, change))
    score_name = state["by"]
    for panel in panels.values():
        if score_name in panel:
            sections.append(_map_section(score_name, panel))
            break
    sections.append(Section(notes=("Last state; run the cell for the live view.",)))
    return View(f"Live view of {model}", tuple(filter(None, sentences)), tuple(sections))


def change_sentence(answer: Panel | None, change: Panel) -> str:
    """Return what the change of the chosen heads does, beside the random sets; empty if none is
    chosen.
    """
    if answer is None or "after" not in change:
        return change.get("left_out", "")
    measure = "log-odds" if answer["has_others"] else "log p"
    target, draws = answer["labels"][answer["target"]], change["draws"]
    heads, done = ", ".join(change["heads"]), DONE[change["change"]]
    before, after = signed(change["before"], 2), signed(change["after"], 2)
    random = f"{signed(min(draws), 2)} to {signed(max(draws), 2)}"
    return (
        f"{heads} {done}: {measure} of {target} {before} → {after} nats; "
        f"{change['controls']}: {random}."
    )


def _demonstrations_section(
    state: Mapping[str, Any], effects: Panel, labels: Sequence[str]
) -> Section:
    ways = effects.get("ways", ())
    columns = [Column(name, is_number=False) for name in ("place", "text", "label")]
    columns += map(Column, ways)
    rows: list[tuple[Cell, ...]] = []
    for place, (text, label) in enumerate(state["demonstrations"]):
        index = labels.index(label) if label in labels else -1
        numbers = effects["effects"][place] if "effects" in effects else [""] * len(ways)
        rows.append((str(place + 1), text, Label(label, index), *numbers))
    return Section(columns=tuple(columns), rows=tuple(rows))


def _answer_section(answer: Panel, change: Panel) -> Section:
    has_change = "probs" in change
    columns = [Column("label", is_number=False), Column("probability", digits=2)]
    if has_change:
        columns.append(Column("changed", digits=2))
    rows: list[tuple[Cell, ...]] = []
    for index, label in enumerate(answer["labels"]):
        row: list[Cell] = [Label(label, index), percent(answer["probs"][index])]
        if has_change:
            row.append(percent(change["probs"][index]))
        rows.append(tuple(row))
    measure = "log-odds" if answer["has_others"] else "log p"
    outcomes = [answer["outcome"], *([change["after"]] if has_change else [])]
    rows.append((f"{measure} of {answer['labels'][answer['target']]}", *outcomes))
    return Section(columns=tuple(columns), rows=tuple(rows))


def _map_section(score_name: str, panel: Panel) -> Section:
    head_map = HeadValues(
        score_name,
        tuple(map(tuple, panel[score_name])),
        frozenset(map(Head.parse, panel[f"{score_name}_located"])),
    )
    return Section(f"All heads by {score_name}, nats", head_map=head_map)
