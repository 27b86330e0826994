"""What fits where: memory and time of loading models of several sizes, and of three calls on them.

`python experiments/benchmark/sizes.py --models smollm2-135m model.gguf` measures each model in
float32 and bfloat16, each in a process of its own with one thread, and writes one row per call.
Rows that the file has already are not measured again."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import function_costs
import pandas as pd
import torch

import icl_lens as il

CALLS = {"explain": "explain", "locate, contrast": "locate", "two_towers": "exchanges"}
"""Calls of `function_costs`, and what the table calls them."""
DTYPES = ("float32", "bfloat16")


def measured_rows(source: str, name: str, dtype: str, n_tokens: int) -> list[dict[str, object]]:
    """Load a model and measure each call in a process that begins as a copy of this one."""
    start = time.monotonic()
    model = il.load_model(source, device="cpu", dtype=dtype)
    function_costs.read_weights(model)
    seconds = time.monotonic() - start
    n_weights = sum(parameter.numel() for parameter in set(model.original_model.parameters()))
    model_memory, _ = function_costs.resident_memory()
    case = function_costs.Case(model, n_tokens)
    _ = case.prompts, case.batch, case.other, case.four
    forward = function_costs.forward_cost(case, counts_operations=False)
    rows = []
    for call, label in CALLS.items():
        cost = function_costs.in_child(
            case, call, forward["forward_s"], 3600, counts_operations=False
        )
        if cost["error"]:
            raise RuntimeError(f"{call} of {name}: {cost['error']}")
        rows.append(
            {
                "model": name,
                "weights (millions)": round(n_weights / 1e6),
                "precision": dtype,
                "tokens": int(case.four.last.max()) + 1,
                "load (s)": round(seconds),
                "model (GiB)": round(model_memory, 2),
                "call": label,
                "prompts": cost["prompts"],
                "seconds": round(cost["seconds"], 1),
                "passes per prompt": round(cost["forwards"], 1),
                "above the model (GiB)": round(cost["peak"], 2),
            }
        )
    return rows


def main() -> None:
    """Read the options; measure what the file lacks, each model and precision in a new process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], metavar="NAME[=SOURCE]")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=100, help="Length of a prompt.")
    parser.add_argument("--out", type=Path, default=Path("docs/howto/sizes.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if len(options.models) == 1 and len(options.dtypes) == 1:
        name, _, source = options.models[0].partition("=")
        rows = measured_rows(source or name, name, options.dtypes[0], options.tokens)
        table = pd.concat([read(options.out), pd.DataFrame(rows)])
        table.to_csv(options.out, index=False)
        return
    for model in options.models:
        for dtype in options.dtypes:
            table = read(options.out)
            name = model.partition("=")[0]
            if len(table) and ((table["model"] == name) & (table["precision"] == dtype)).any():
                continue
            arguments = ["--models", model, "--dtypes", dtype, "--tokens", str(options.tokens)]
            arguments += ["--out", str(options.out)]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
    table = by_model(read(options.out))
    table.to_csv(options.out.with_name(f"{options.out.stem}_by_model.csv"), index=False)
    print(table.to_string(index=False))


def by_model(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line per model and precision, with seconds and memory of each call."""
    lines = []
    for _, calls in rows.groupby(["model", "precision"], sort=False):
        first = calls.iloc[0]
        line = {"model": first["model"], "precision": first["precision"]}
        line["model, GiB"] = first["model (GiB)"]
        for call in calls.to_dict("records"):
            line[call["call"]] = f"{call['seconds']:.0f} s, {call['above the model (GiB)']:.2f} GiB"
        lines.append(line)
    return pd.DataFrame(lines)


def read(path: Path) -> pd.DataFrame:
    """Return the rows of a file; none if there is no file."""
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


if __name__ == "__main__":
    main()
