"""Located heads as a table with intervals, a summary sentence, and counts."""

from typing import TYPE_CHECKING, Any

from icl_lens.attribution.search import TopHeads
from icl_lens.prompts.batch import PromptBatch
from icl_lens.result.head_findings import list_finding
from icl_lens.result.number_format import decimal

if TYPE_CHECKING:
    import pandas as pd


def heads_table(top: TopHeads) -> "pd.DataFrame":
    """Return one row per head: name, `top.by` (mean, nats), low, high, selected, rank, layer, head, share_evaluated.

    `share_evaluated`, the share of prompts on which a head was evaluated, is always 1 for located heads.
    """
    table = top.to_frame().rename(columns={"value": top.by})
    table["share_evaluated"] = 1.0
    return table


def summary(top: TopHeads, batch: PromptBatch) -> str:
    """Return one or two sentences on how the values were computed: exactly, of all heads or with bounds for some."""
    if not top.certified:
        return (
            f"All {top.n_parts} heads were evaluated exactly on all {batch.count_summary}, because this readout "
            "(own norm or soft-cap) has no bounds."
        )
    text = (
        f"The ranking is exact: {top.n_exact} of {top.n_parts} heads were evaluated on all {batch.count_summary}, "
        f"{100 * top.share_evaluated:.1f}% of all evaluations."
    )
    if top.n_exact < top.n_parts:
        text += (
            f" Largest unevaluated bound: {decimal(top.unevaluated_bound, 4)} nats; last head in the table: "
            f"{decimal(float(top.value[-1]), 4)}."
        )
    return text


def heads_result(top: TopHeads, table: "pd.DataFrame | None" = None) -> dict[str, Any]:
    """Return the finding, the counts, `selected` of a random head, and the largest unevaluated bound (nats) of a run.

    `table` is that of `heads_table`, with the effects of each head if they were measured.
    """
    table = heads_table(top) if table is None else table
    return {
        "finding": list_finding(table, len(top.value), top.by, n_heads=top.n_parts),
        "certified": top.certified,
        "n_prompts": top.n_prompts,
        "n_heads": top.n_parts,
        "heads_evaluated_on_all_prompts": top.n_exact,
        "share_evaluated": top.share_evaluated,
        "expected_selected": len(top.value) / top.n_parts,
        "largest_unevaluated_bound": top.unevaluated_bound if top.n_exact < top.n_parts else None,
    }
