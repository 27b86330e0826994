"""Output of `emergence`: tables, a figure and a summary of one run, and the page of several runs."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.bundled_models.emergence import MAIN_RANKING, RANKINGS, Emergence, head_onsets, summarize, trajectory
from experiments.framework import markdown
from experiments.framework.estimate import compare
from experiments.framework.plotting import STYLE
from icl_lens.errors import InputError
from icl_lens.files import write_text
from icl_lens.report.palette import BLUE, GRAY, GREEN, ORANGE


def _curve(ax: Axes, table: Any, value: str, color: str, label: str) -> None:
    """Plot the mean over prompts by step, with its 95% interval over queries."""
    means = table.groupby(["step", "prompt", "query"])[value].mean().reset_index()
    steps = sorted(set(means["step"]))
    groups = [means[means["step"] == step] for step in steps]
    found = [compare(one[value].to_numpy(), 0.0, pd.factorize(one["query"])[0]) for one in groups]
    ax.plot(steps, [one.quantity for one in found], "o-", color=color, label=label, markersize=2.5, linewidth=1)
    ax.fill_between(steps, [one.low for one in found], [one.high for one in found], color=color, alpha=0.2, linewidth=0)


def figure(run: Emergence) -> Figure:
    """Plot accuracy, located heads' contrast and attention to labels, and scores on repeated tokens, by step."""
    drawn = Figure(figsize=(6.8, 4.2), layout="constrained")
    axes = drawn.subplots(2, 2, sharex=True)
    _curve(axes[0, 0], run.prompts.assign(correct=run.prompts["correct"].astype(float)), "correct", BLUE, "accuracy")
    axes[0, 0].axhline(0.5, color="0.5", linewidth=0.6, linestyle=":")
    axes[0, 0].set(ylabel="Accuracy", title="Answers", ylim=(0, 1.02))
    colors = (BLUE, ORANGE, GREEN, GRAY)
    for name, color in zip(run.located[MAIN_RANKING], colors, strict=False):
        _curve(axes[0, 1], run.heads[run.heads["name"] == name], MAIN_RANKING, color, name)
    axes[0, 1].axhline(0, color="0.5", linewidth=0.6)
    axes[0, 1].set(ylabel="Contrast of the labels (nats)", title="Located heads")
    axes[0, 1].legend()
    located: Any = run.heads[run.heads["name"].isin(run.located[MAIN_RANKING])]
    for kind, color in (("true", BLUE), ("false", ORANGE)):
        _curve(axes[1, 0], located, f"on_{kind}", color, f"{kind} labels")
    axes[1, 0].set(xlabel="Step", ylabel="Attention of the last token", title="Located heads look at", ylim=(0, 1.02))
    axes[1, 0].legend()
    scores = trajectory(run)
    for score, color in (("induction", BLUE), ("previous", ORANGE)):
        axes[1, 1].plot(scores.index, scores[score], "o-", color=color, label=score, markersize=2.5, linewidth=1)
    axes[1, 1].axhline(1, color="0.5", linewidth=0.6, linestyle=":")
    axes[1, 1].set(xlabel="Step", ylabel="Times even attention", title="Best head on repeated tokens", yscale="log")
    axes[1, 1].legend()
    return drawn


HEADS = ("located by", "head", "at the end (nats)", "half of it at step")


def head_rows(onsets: pd.DataFrame) -> list[list[str]]:
    """Return cells under `HEADS`: which step each located head appears at."""
    return [
        [by, name, f"{final:.2f}", "never" if pd.isna(step) else f"{step:,.0f}"]
        for by, name, final, step in onsets.itertuples(index=False)
    ]


def write(run: Emergence, folder: Path) -> None:
    """Write table.csv (by step), heads.csv (when heads appear), figure.png and summary.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.csv", trajectory(run).to_csv(float_format="%.4f"))
    write_text(folder / "heads.csv", head_onsets(run).to_csv(index=False, float_format="%.4f"))
    stored = {**summarize(run), "located": {by: run.located[by] for by in RANKINGS}}
    write_text(folder / "summary.json", json.dumps(stored, indent=2) + "\n")
    with matplotlib.rc_context(STYLE):
        figure(run).savefig(folder / "figure.png", dpi=150)


def page(folder: Path) -> str:
    """Return a page of every run that `write` left in a folder of `folder`: summary, figure, and when heads appear.

    Raise InputError if there is none.
    """
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    if not runs:
        raise InputError(f"there is no run in {str(folder)!r}; write some with --out {folder / 'NAME'} first")
    rows = []
    for run in runs:
        found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        attention, induction = found["attention"], found["induction"]
        rise = attention["quantity"] - attention["control"]
        rows.append(
            [
                f"[{run.name}](#{run.name})",
                f"step {found['before']:,} to {found['after']:,}: "
                f"{found['accuracy_before']:.2f} to {found['accuracy_after']:.2f}",
                f"{rise:.2f} [{attention['low']:.2f}, {attention['high']:.2f}]",
                f"{induction['quantity']:.1f} [{1 + induction['low']:.1f}, {1 + induction['high']:.1f}], "
                f"{found['induction_head']} at step {found['induction_step']:,}",
            ]
        )
    columns = [
        "run",
        "accuracy rises most",
        "attention to true minus false labels, compared with other heads",
        "induction score",
    ]
    parts = [
        "# How the heads come about",
        "Ten snapshots of each training of the bundled models' recipe, one training per seed. Heads are located at the "
        "end of training, on half of the prompts, and measured on the other half in every snapshot. The table shows "
        "the two snapshots between which accuracy rises most. Between them, the located heads' attention to true minus "
        "false labels rises by the number in the third column more than that of the other heads of their layers, as a "
        "share of their final attention to labels. Other papers link in-context heads to induction heads: the last "
        "column is the best head's induction score up to the second of these snapshots (1 is evenly spread attention), "
        "on sequences that were not used to choose the head. Brackets are 95% intervals.",
        markdown.table(columns, rows, align="llll"),
    ]
    for run in runs:
        parts += [f"## {run.name}", f"![Accuracy, heads and attention by step]({run.name}/figure.png)"]
        parts.append(markdown.table(HEADS, head_rows(pd.read_csv(run / "heads.csv")), align="ll"))
    parts.append(
        "Made by `python -m experiments.bundled_models emergence` and `emergence-page`, from the snapshots that\n"
        "training writes; they are not in the repository."
    )
    return "\n\n".join(parts) + "\n"
