"""Render mean score parts for the terminal with rich."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.attribution.reasons import WRITER_NAMES
from icl_lens.locate.mean_score_parts import SIDES, MeanScoreParts
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.report.terminal import new_table

N_SHOWN = 5
"""Writers that the terminal shows per side; three for pairs and for false labels."""
TITLES = {
    "query": "at the last token",
    "key": "at the labels",
    "pair": "pairs",
    SIDES[2]: "values, true labels",
    SIDES[3]: "values, false labels",
}


def terminal(found: MeanScoreParts) -> Group:
    """Return what `icl-lens explain --why HEAD -n N` prints."""
    first_order = "" if found.values_are_exact else " (first-order)"
    note = (
        f"Means over {found.n_prompts:,} prompts, 95% intervals over {found.n_queries:,} distinct queries. True "
        "labels are those equal to the answer. The strongest writers are chosen on these prompts: check them on others "
        "(--seed). Over all writers, each side sums to the score difference, and value "
        f"parts sum to what the head adds to the answer from these labels, nats{first_order}. {WRITER_NAMES}; "
        "pairs: query writer × key writer."
    )
    edited = [Text(edits_note(found.edits), "bold")] if found.edits else []
    return Group(*edited, *(block for head in found.heads for block in _of_head(found, head)), Text(note, "dim"))


def _of_head(found: MeanScoreParts, head: Head) -> Iterator[RenderableType]:
    yield Text(found.sentence(head), "bold")
    table = new_table("", "writer", "mean", "95% interval", left=(0, 1))
    for side, title in TITLES.items():
        shown = found.strongest(head, side, 3 if side in ("pair", SIDES[3]) else N_SHOWN).to_dict("records")
        if shown and side in SIDES[2:]:
            table.add_row(title, "all", *_cells(*found.total(head, side)))
            title = ""
        for row in shown:
            table.add_row(title, row["writer"], *_cells(row["value"], row["low"], row["high"]))
            title = ""
    yield table


def _cells(value: float, low: float, high: float) -> tuple[str, str]:
    return f"{value:+z.3f}", "–" if low != low else f"{low:+z.3f} … {high:+z.3f}"
