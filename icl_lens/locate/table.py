"""Results of a locate run as a table with intervals, a summary sentence, and files."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from icl_lens.attribution.search import TopHeads
from icl_lens.locate.chunk import chunk_name
from icl_lens.locate.circuit import Circuit
from icl_lens.locate.mean_effects import MeanEffects
from icl_lens.locate.mean_score_parts import MeanScoreParts
from icl_lens.locate.run_folder import RunFolder
from icl_lens.metrics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd


def heads_table(top: TopHeads, folder: RunFolder | None = None) -> "pd.DataFrame":
    """Return rank, layer, head, name, increase (mean, nats), low, high (95% bootstrap over prompts), share_evaluated.

    Without a folder, which stores per-prompt values, or with a single prompt, there are no intervals.
    """
    table = top.to_frame().rename(columns={"value": "increase"})
    if folder is not None and top.n_prompts > 1:
        values = per_prompt(top, folder)
        intervals = [bootstrap_interval(values[:, i]) for i in range(values.shape[1])]
        table["low"] = [interval.low for interval in intervals]
        table["high"] = [interval.high for interval in intervals]
    table["share_evaluated"] = 1.0
    return table


def per_prompt(top: TopHeads, folder: RunFolder) -> Float[np.ndarray, "prompt k"]:
    """Return the located heads' increases per prompt (nats) from the run's chunks; NaN for missing chunks.

    The number of batches is read from the configuration ("batches"). Raise CorruptChunk for unreadable chunks.
    """
    values = np.full((top.n_prompts, len(top.value)), np.nan)
    column = {head: i for i, head in enumerate(zip(top.layer.tolist(), top.head.tolist(), strict=True))}
    for kind in ("part", "refined"):
        for number in range(folder.configuration["batches"]):
            chunk = folder.read(chunk_name(kind, number))
            if chunk is None:
                continue
            frame = chunk.to_pandas().dropna(subset="increase")
            at = [column.get(head, -1) for head in zip(frame["layer"], frame["head"], strict=True)]
            frame = frame.assign(column=at)
            frame = frame[frame["column"] >= 0]
            values[frame["prompt"], frame["column"]] = frame["increase"]
    return values


def summary(top: TopHeads) -> str:
    """Return a sentence on the share of exact evaluations and the largest unevaluated bound."""
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


def write_effects(folder: RunFolder, effects: MeanEffects) -> None:
    """Write heads.parquet, heads.csv (all heads) and result.json. Raise InputError if the folder is not writable."""
    found = {
        "exact": effects.exact,
        "positions": effects.positions,
        "n_prompts": effects.n_prompts,
        "n_queries": effects.n_queries,
        "n_heads": effects.log_prob.mean.numel(),
        "prompts_by_algorithm": dict(effects.algorithms),
        "fallback_reason": effects.fallback_reason or None,
    }
    _write(folder, effects.to_frame(), found)


def write_result(folder: RunFolder, table: "pd.DataFrame", top: TopHeads) -> None:
    """Write heads.parquet, heads.csv and result.json. Raise InputError if the folder is not writable."""
    found = {
        "certified": top.certified,
        "n_prompts": top.n_prompts,
        "n_heads": top.n_parts,
        "heads_evaluated_on_all_prompts": top.n_exact,
        "share_evaluated": top.share_evaluated,
        "largest_unevaluated_bound": top.unevaluated_bound if top.n_exact < top.n_parts else None,
    }
    _write(folder, table, found)


def write_score_parts(folder: RunFolder, found: MeanScoreParts) -> None:
    """Write writers.parquet, groups.parquet, both as CSV, and result.json. Raise InputError if it is not writable."""
    _write_table(folder, "writers", found.to_frame())
    _write_table(folder, "groups", found.to_frame("groups"))
    folder.write_bytes("result.json", (json.dumps(found.to_dict(), indent=1) + "\n").encode())


def write_circuit(folder: RunFolder, found: Circuit) -> None:
    """Write edges, curve, groups and scores as Parquet and CSV, and result.json. Raise InputError if not writable."""
    for name in ("edges", "curve", "groups", "scores"):
        _write_table(folder, name, getattr(found, name))
    folder.write_bytes("result.json", (json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n").encode())


def _write(folder: RunFolder, table: "pd.DataFrame", found: dict[str, Any]) -> None:
    _write_table(folder, "heads", table)
    folder.write_bytes("result.json", (json.dumps(found, indent=1) + "\n").encode())


def _write_table(folder: RunFolder, name: str, table: "pd.DataFrame") -> None:
    folder.write(f"{name}.parquet", pa.table({column: table[column].to_numpy() for column in table.columns}))
    folder.write_bytes(f"{name}.csv", table.to_csv(index=False, lineterminator="\n").encode())
