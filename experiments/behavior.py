"""Does the model learn the task from its demonstrations?

Prompts show both classes equally often. In random order, each class is the query's in half of the
prompts and each label the answer in half of those, so that neither a fixed answer nor the last
label scores above 50%. The same texts are then shown with the query's class last, with it first,
and with the two labels exchanged.

The control is a model that copies the label of the last demonstration.

    python experiments/behavior.py --model icl-mini --task animal-country -n 200

The paper's Table 2.
"""

import pandas as pd
from common import COLORS, Study, Table, from_command_line, panels
from matplotlib.figure import Figure

import icl_lens as il

CONDITIONS = ("random order", "query's class last", "query's class first", "labels exchanged")


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy between the labels in four conditions, on the testing half."""
    study = Study.from_command_line("behavior", "Does the model learn the task?", arguments)
    table = Table(study)
    for condition, batch in batches(study).items():
        scores = study.scores(condition, batch, lambda rows: [[]], {"condition": condition})
        copied = il.metrics.recent_label(batch.label_index) == batch.answer
        table.add(
            "accuracy",
            scores.correct[:, 0],
            copied.double().numpy(),
            batch.queries,
            at=condition,
            unit="%",
            versus="copying the last label",
        )
    return table.write(draw(table.to_frame()))


def batches(study: Study) -> dict[str, il.PromptBatch]:
    """Return the testing prompts in each condition."""
    exchanged = il.donor_prompts(study.testing.prompts)["labels"]
    prompts = (
        study.testing,
        study.halves("last")[1],
        study.halves("first")[1],
        study.tokenize(exchanged),
    )
    return dict(zip(CONDITIONS, prompts, strict=True))


def draw(table: pd.DataFrame) -> Figure:
    """Draw accuracy in each condition, with a line at guessing."""
    figure, pairs = panels(table)
    for place, (axes, rows) in enumerate(pairs):
        axes.barh(rows["at"], rows["quantity"], color=COLORS[0])
        axes.axvline(50, color="black", lw=0.8, ls="--")
        axes.set_xlim(0, 100)
        axes.invert_yaxis()
        if place % 3:
            axes.set_yticklabels([])
        axes.set_xlabel("accuracy, %", fontsize=8)
    return figure


if __name__ == "__main__":
    from_command_line(main)
