"""Does one task vector make a model do a task without demonstrations?

Hendel et al. (arXiv 2310.15916): in-context learning is "compressing S into a single task vector",
the residual stream at the last token of the demonstrations S and a dummy query, which "modulates
the transformer" on other queries.

1. Each of some sets of demonstrations is shown with dummy queries; the mean residual stream after a
   layer, at the last token, is the set's vector of that layer.
2. It is written in place of the residual stream of queries alone. The layer is the one of the
   highest accuracy on other queries of the first half; the second half tests it.
3. The control is the vector of the same layer from demonstrations of another task with the same
   labels or, of pairs, from other pairs. A vector that only says which words are labels does as
   well from there.

The authors take one dummy query for each set of demonstrations, and test 18 tasks on models of 2.8B
to 30B parameters. An answer is right if its first token is the most probable of the vocabulary.

    python experiments/literature/hendel2023.py --model icl-mini --task animal-country -n 40
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from claims import (
    Study,
    Table,
    from_command_line,
    queries_alone,
    shown_after,
    top_token_is_answer,
)
from shared_tasks import other_data

import icl_lens as il

N_SETS = 3
N_DUMMY_QUERIES = 8
"""Sets of demonstrations, and dummy queries of each."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy on queries alone, with task vectors of this task and of another."""
    study = Study.from_command_line("hendel2023", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    other_study = study.changed(task_source=other_task(study), path=None)
    layers, queries = [], []
    is_right: list[np.ndarray] = []
    for number in range(N_SETS):
        vectors, locating = vectors_and_prompts(study, study.locating.prompts, number)
        other_vectors, _ = vectors_and_prompts(other_study, other_study.prompts(), number)
        alone = queries_alone(study, study.tokenize(locating))
        in_place = il.vector_gains(study.model, vectors, alone, replace=True)
        layer = in_place.layers[int(in_place.top1.double().mean(0).argmax())]
        edits: list[list[il.AddVector]] = [[]]
        for of_layers in (vectors, other_vectors):
            edits.append([il.AddVector(of_layers[layer], layer, replace=True)])
        demonstrations = locating[0].demonstrations
        testing = study.tokenize(shown_after(study, demonstrations, study.testing.prompts))
        about = {"layer": layer, "demonstrations": list(map(str, demonstrations))}
        alone = queries_alone(study, testing)
        without = top_token_is_answer(study, f"vectors {number}", alone, edits, about)
        shown = top_token_is_answer(study, f"demonstrations {number}", testing, [[]], about)
        is_right.append(np.concatenate([without, shown], axis=1))
        layers.append(str(layer))
        queries += list(testing.queries)
    intact, with_vector, with_other, with_demonstrations = np.concatenate(is_right).T
    controls = {
        f"vector of {other_study.task_source}": with_other,
        "query alone": intact,
        "demonstrations": with_demonstrations,
    }
    at = f"after layers {', '.join(layers)}"
    for versus, control in controls.items():
        measure = "accuracy with the task vector"
        table.add(measure, with_vector, control, queries, unit="%", at=at, versus=versus)
        if versus == "query alone":
            table.state("One vector makes the model do the task without demonstrations", n_rows=2)
    return table.write()


def vectors_and_prompts(
    study: Study, prompts: Sequence[il.Prompt], number: int
) -> tuple[torch.Tensor, list[il.Prompt]]:
    """Return the task vectors [layer d_model] of the demonstrations of one of the prompts, and the
    other prompts' queries after them, without those that were dummies.
    """
    shown = shown_after(study, prompts[number].demonstrations, prompts)
    dummies, others = shown[:N_DUMMY_QUERIES], shown[N_DUMMY_QUERIES:]
    if not others:
        raise il.InputError(
            f"-n must give more than {N_DUMMY_QUERIES} different queries, got {len(shown)}"
        )
    return il.task_vectors(study.model, study.tokenize(dummies)), others


def other_task(study: Study) -> str:
    """Return a word task of other classes or, for a task of pairs, other pairs."""
    if study.labels:
        return other_data(study)
    return "present-past" if study.task_source != "present-past" else "country-capital"


if __name__ == "__main__":
    from_command_line(main)
