"""Which score finds the heads that the answer needs?

1. Every score of `il.locate` ranks the heads on one half of the prompts.
2. On the other half, the first 12 of each ranking are set to zero together, at the last position.
3. The control is the mean over 20 random sets with as many heads of the same layers.

Heads that add to the answer need not be needed: where later heads make up for them, removing them
costs no more than removing random heads. A task of pairs, whose answers are words of their own, has
no other class whose query could be exchanged.

    python experiments/which_score.py --model icl-mini --task animal-country -n 40
    python experiments/which_score.py --model smollm2-135m --task country-capital --labels '' -n 40

The question behind the default of `icl-lens locate`.
"""

from typing import Literal

import pandas as pd
from common import N_RANDOM_SETS, Study, Table, dots, from_command_line
from matplotlib.figure import Figure

import icl_lens as il

Score = Literal["exchange", "effect", "contrast", "increase"]
Measure = Literal["log_odds", "accuracy"]
SCORES: tuple[Score, ...] = ("effect", "exchange", "contrast", "increase")
VERSUS = "random heads of the same layers"
NO_CLASSES = "pairs have no other class whose query could be exchanged"


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Locate heads by each score, and remove them jointly on other prompts."""
    study = Study.from_command_line(
        "which-score", "Which score finds the heads that the answer needs?", arguments
    )
    table = Table(study)
    for score in SCORES:
        add_removal(study, table, score)
        table.save(draw(table.to_frame()))
    return table.write(draw(table.to_frame()))


def add_removal(study: Study, table: Table, score: Score) -> None:
    """Add what the answer loses without the first heads by a score."""
    try:
        located = il.locate(
            study.model,
            study.locating,
            by=score,
            k=study.n_located,
            other_scores=False,
            held_out=study.testing,
            n_random=N_RANDOM_SETS,
            seed=study.seed,
            run=study.run(score),
        )
    except il.InputError:
        if score != "exchange" or study.labels:
            raise
        table.add_missing(f"log-odds lost, heads by {score}", NO_CLASSES, ranking=score)
        return
    removal = located.removal
    assert removal is not None
    about = {"versus": VERSUS, "ranking": score, "note": " ".join(map(str, located.heads))}
    measures: tuple[tuple[str, Measure, str], ...] = (
        (f"log-odds lost, heads by {score}", "log_odds", "nats"),
        (f"accuracy lost, heads by {score}", "accuracy", "%"),
    )
    for measure, name, unit in measures:
        intact = removal.per_prompt("no ablation", name)[0]
        without_heads = removal.per_prompt("heads", name)[0]
        without_random = removal.per_prompt("same layers", name)
        table.add(measure, intact - without_heads, (intact - without_random).T, unit=unit, **about)
    if score == SCORES[0]:
        intact = removal.per_prompt("no ablation", "log_odds")[0]
        table.add("log-odds of the intact model", intact, 0.0, versus="zero")


def draw(table: pd.DataFrame) -> Figure:
    """Draw what the answer loses without the heads of each score, beside random heads."""
    lost = table[table["measure"].str.startswith("log-odds lost")]
    lost = lost.assign(measure=lost["ranking"])
    return dots(lost, label="log-odds lost, nats", names=("first heads by score", VERSUS))


if __name__ == "__main__":
    from_command_line(main)
