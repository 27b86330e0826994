"""Results of a locate run as a table with intervals, a summary sentence, and files."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from icl_lens.attribution.search import TopHeads
from icl_lens.locate.mean_effects import MeanEffects
from icl_lens.locate.mean_exchanges import MeanExchanges
from icl_lens.locate.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd


def heads_table(top: TopHeads) -> "pd.DataFrame":
    """Return one row per head: name, `top.by` (mean, nats), low, high, rank, layer, head, share_evaluated.

    `share_evaluated`, the share of prompts on which a head was evaluated, is always 1 for located heads.
    """
    table = top.to_frame().rename(columns={"value": top.by})
    table["share_evaluated"] = 1.0
    return table


def summary(top: TopHeads) -> str:
    """Return one or two sentences on the share of exact evaluations and the largest unevaluated bound."""
    if not top.certified:
        return (
            f"All {top.n_parts} heads were evaluated exactly on all {top.n_prompts:,} prompts, because this readout "
            "(own norm or soft-cap) has no bounds."
        )
    text = (
        f"Exact, certified: {top.n_exact} of {top.n_parts} heads evaluated on all {top.n_prompts:,} prompts, "
        f"{100 * top.share_evaluated:.1f}% of all evaluations."
    )
    if top.n_exact < top.n_parts:
        text += (
            f" Largest unevaluated bound: {top.unevaluated_bound:.4f} nats; last head in the table: "
            f"{float(top.value[-1]):.4f}."
        )
    return text


def effects_result(effects: MeanEffects) -> dict[str, Any]:
    """Return the counts and methods of a run, for result.json."""
    return {
        "exact": effects.exact,
        "positions": effects.positions,
        "n_prompts": effects.n_prompts,
        "n_queries": effects.n_queries,
        "n_heads": effects.log_prob.mean.numel(),
        "prompts_by_algorithm": dict(effects.algorithms),
        "fallback_reason": effects.fallback_reason or None,
    }


def exchanges_result(exchanges: MeanExchanges) -> dict[str, Any]:
    """Return the counts and methods of a run, for result.json."""
    return {
        "n_prompts": exchanges.n_prompts,
        "n_queries": exchanges.n_queries,
        "n_heads": exchanges.query.mean.numel(),
        "fallback_reason": exchanges.fallback_reason or None,
    }


def heads_result(top: TopHeads) -> dict[str, Any]:
    """Return the counts and the largest unevaluated bound (nats) of a run, for result.json."""
    return {
        "certified": top.certified,
        "n_prompts": top.n_prompts,
        "n_heads": top.n_parts,
        "heads_evaluated_on_all_prompts": top.n_exact,
        "share_evaluated": top.share_evaluated,
        "largest_unevaluated_bound": top.unevaluated_bound if top.n_exact < top.n_parts else None,
    }


def write_run(folder: RunFolder, tables: "Mapping[str, pd.DataFrame]", result: Mapping[str, Any]) -> None:
    """Write tables as Parquet and CSV, and result.json. Raise InputError if the folder is not writable."""
    for name, table in tables.items():
        folder.write(f"{name}.parquet", pa.table({column: table[column].to_numpy() for column in table.columns}))
        folder.write_bytes(f"{name}.csv", table.to_csv(index=False, lineterminator="\n").encode())
    folder.write_bytes("result.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
