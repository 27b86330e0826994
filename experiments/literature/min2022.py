"""Do demonstrations with random labels help nearly as much as those with the right ones?

Min et al. (arXiv 2202.12837): "randomly replacing labels in the demonstrations barely hurts
performance", because demonstrations show the labels, the texts and the format.

1. The labels are the names of the classes, as theirs are; the same is measured with the study's
   labels, which say nothing about the classes.
2. Prompts are shown with their labels, with the same labels in random order, and without
   demonstrations.
3. The claim holds if random labels keep more of what demonstrations add than they lose.

The authors test 12 models of 774M to 175B parameters on 26 tasks, with 16 demonstrations.

    python experiments/literature/min2022.py --model icl-mini --task animal-country -n 40
"""

import pandas as pd
from claims import (
    Study,
    Table,
    from_command_line,
    named_classes,
    queries_alone,
    with_random_labels,
)

import icl_lens as il

CLAIM = "Random labels keep more of what demonstrations add than they lose"


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy with right labels, random labels, and no demonstrations."""
    study = Study.from_command_line("min2022", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    try:
        add_conditions(table, named_classes(study), "names of the classes")
    except il.InputError as error:
        table.add_missing("accuracy kept with random labels", error, at="names of the classes")
        table.state(f"{CLAIM} (names of the classes)")
    add_conditions(table, study, "labels of the study")
    return table.write()


def add_conditions(table: Table, study: Study, labels: str) -> None:
    """Add accuracy in the three conditions, and what random labels keep of the gain."""
    prompts = study.testing.prompts
    conditions = {
        "right labels": study.testing,
        "random labels": study.tokenize(with_random_labels(prompts, study.seed)),
        "no demonstrations": queries_alone(study, study.testing),
    }
    correct = {}
    for condition, batch in conditions.items():
        part = f"{condition}, {labels}"
        scores = study.scores(part, batch, lambda rows: [[]], {"condition": part})
        correct[condition] = scores.correct[:, 0]
    right, shuffled, without = correct.values()
    queries = study.testing.queries
    table.add_difference_of_shares(
        "accuracy kept with random labels",
        shuffled - without,
        right - shuffled,
        queries,
        at=labels,
        versus="accuracy lost with random labels",
    )
    table.state(f"{CLAIM} ({labels})")
    table.add(
        "accuracy with right labels",
        right,
        shuffled,
        queries,
        at=labels,
        unit="%",
        versus="random labels",
    )
    table.add(
        "accuracy with random labels",
        shuffled,
        without,
        queries,
        at=labels,
        unit="%",
        versus="no demonstrations",
    )


if __name__ == "__main__":
    from_command_line(main)
