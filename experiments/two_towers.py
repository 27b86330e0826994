"""Two towers, tested by interchange: do queries and keys compare texts, and do values carry labels?

1. A scan exchanges the query of every single head, on 16 prompts of the locating half or more; the
   12 heads of largest effect are tested.
2. On the testing half, these heads take their query, keys or values at the last position from donor
   prompts, one of them or several. Two towers predict for each exchange whether the answer becomes
   the other label (`il.two_towers`).
3. The control is the mean over the same exchanges in 20 random sets of heads from the same layers.
4. The same with the first two heads of the scan alone; on other prompts; and in another template.

    python experiments/two_towers.py --model icl-mini --task animal-country -n 200

The paper's hypothesis.
"""

from typing import Any

import pandas as pd
from common import N_RANDOM_SETS, Study, Table, dots, from_command_line, thinned
from matplotlib.figure import Figure

import icl_lens as il

N_SCANNED = 16
"""The scan runs on this many prompts to twice as many, or on all of a half that has fewer."""
N_REPLICATED, N_RANDOM_REPLICATED = 60, 5
"""Maximum number of prompts, and number of random sets, of a replication."""
REPLICATED = ("query", "keys", "values", "query+keys", "query+values", "keys+values")
ARROWS = il.Template("{text} -> {label}", "{text} ->", "\n")
VERSUS = "random heads of the same layers"


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Exchange queries, keys and values in the heads of a scan, in its first two, and on other
    prompts."""
    study = Study.from_command_line(
        "two-towers", "Do queries and keys act as two towers?", arguments
    )
    table = Table(study)
    scanned = thinned(study.locating, N_SCANNED).prompts
    towers = exchange(study, "scan's heads", k=study.n_located, scan_prompts=scanned)
    add_losses(table, towers)
    add_predicted(table, towers)
    table.save(draw(table.to_frame()))
    two_heads = exchange(study, "first two heads", heads=towers.heads[:2])
    add_losses(table, two_heads, "first two heads, ", REPLICATED)
    n = min(study.n, N_REPLICATED)
    replications = {
        "other prompts": (study.changed(n=n, seed=study.seed + 1), study.template),
        "arrows": (study.changed(n=n), ARROWS),
    }
    for name, (replica, template) in replications.items():
        try:
            again = exchange(
                replica, name, heads=towers.heads, template=template, n_random=N_RANDOM_REPLICATED
            )
            add_losses(table, again, f"{name}, ", REPLICATED)
        except il.InputError as error:
            for exchanged in REPLICATED:
                table.add_missing(f"{name}, {exchanged}", error)
    return table.write(draw(table.to_frame()))


def exchange(study: Study, part: str, **options: Any) -> il.results.TwoTowers:
    """Return what every exchange costs on the study's testing prompts."""
    defaults = {
        "template": study.template,
        "n_random": N_RANDOM_SETS,
        "seed": study.seed,
        "run": study.run(part),
    }
    return il.two_towers(study.model, study.testing.prompts, **(defaults | options))


def add_losses(
    table: Table,
    towers: il.results.TwoTowers,
    prefix: str = "",
    names: tuple[str, ...] | None = None,
) -> None:
    """Add what each exchange costs the answer in the heads, and in random sets on average."""
    heads = " ".join(map(str, towers.heads))
    predictions = {"other": "predicted: the other label", "same": "predicted: no effect"}
    for exchanged in towers.exchanges:
        if names is None or exchanged.name in names:
            table.add(
                prefix + exchanged.name,
                exchanged.lost,
                exchanged.random_lost.T,
                towers.queries,
                at=predictions[exchanged.predicted],
                versus=VERSUS,
                note=heads,
            )


def add_predicted(table: Table, towers: il.results.TwoTowers) -> None:
    """Add how often the three single exchanges give the other label, as two towers predict."""
    for exchanged in towers.exchanges[:3]:
        table.add(
            f"other label after {exchanged.name}",
            exchanged.as_predicted,
            ~towers.correct,  # of two labels, the intact model gives the other where it is wrong
            towers.queries,
            unit="%",
            versus="intact model",
        )


def draw(table: pd.DataFrame) -> Figure:
    """Draw what each exchange costs in the scan's heads, next to random heads."""
    exchanges = table.query("unit == 'nats' and not measure.str.contains(',')", engine="python")
    return dots(exchanges, label="log-odds lost, nats", names=("heads of the scan", "random heads"))


if __name__ == "__main__":
    from_command_line(main)
