"""Does the sum of a few heads' mean outputs trigger a task without demonstrations?

Todd et al. (arXiv 2310.15213): heads with the largest average indirect effects "transport a compact
representation of the demonstrated task": their summed mean output, added to the residual stream,
makes the model do the task on a query alone.

1. On one half of the prompts: indirect effects rank the heads; the mean outputs of the first are
   summed; the layer is the one where this vector adds most to log p(answer) of queries alone.
2. On the other half, with other queries: what the vector adds to log p(answer) of queries alone.
3. Controls: random vectors of the same norm, and the same heads' vector from prompts with shuffled
   labels.

The authors test GPT-J and Llama 2 on more than 40 tasks, mostly pairs. With arbitrary labels, the
vector must carry which class has which label, as it does not with pairs.

    python experiments/literature/todd2024.py --model icl-mini --task animal-country -n 40
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from claims import (
    Study,
    Table,
    first_heads,
    from_command_line,
    queries_alone,
    with_random_labels,
)

import icl_lens as il

N_RANDOM_VECTORS = 10


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what a function vector adds to the answers of queries alone."""
    study = Study.from_command_line("todd2024", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    model, shuffled = study.model, shuffled_prompts(study)
    reference = list(study.locating.split(32))
    effects = il.indirect_effects(model, shuffled, reference).double().mean(0)
    heads = first_heads(effects, study.n_located)
    vector = il.function_vector(model, reference, heads)
    layer = il.vector_gains(model, vector, queries_alone(study, study.locating)).best
    vectors = [vector, il.function_vector(model, list(shuffled.split(32)), heads)]
    vectors += random_vectors(vector, study.seed)
    alone = queries_alone(study, study.testing)
    edits = [[], *([il.AddVector(added, layer)] for added in vectors)]
    scores = study.scores("added", alone, lambda rows: edits, {"layer": layer})
    measured = {
        "log p(answer) gained": log_probs(study, alone, edits),
        "log-odds gained": scores.log_odds,
    }
    about = {"at": f"after layer {layer}", "note": " ".join(map(str, heads))}
    for measure, values in measured.items():
        gained = values - values[:, :1]
        controls = {"random vectors": gained[:, 3:], "shuffled labels": gained[:, 2]}
        for versus, control in controls.items():
            table.add(measure, gained[:, 1], control, versus=versus, **about)
        if measure.startswith("log p"):
            table.state("The summed outputs of a few heads trigger the task", n_rows=2)
    return table.write()


def shuffled_prompts(study: Study) -> il.PromptBatch:
    """Return the locating prompts with their labels in random order."""
    return study.tokenize(with_random_labels(study.locating.prompts, study.seed))


def random_vectors(vector: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Return random vectors of the same norm."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(N_RANDOM_VECTORS, len(vector), generator=generator).to(vector)
    directions = directions / directions.norm(dim=1, keepdim=True)
    return list(directions * vector.norm())


def log_probs(
    study: Study, batch: il.PromptBatch, edits: Sequence[Sequence[il.AddVector]]
) -> np.ndarray:
    """Return log p(answer) over the vocabulary under each set of edits, [prompt set], nats."""
    answers = batch.answer_tokens

    def of_answer(scores: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        return scores.gather(1, answers.to(scores.device)[prompts][:, None])[:, 0]

    return il.score(study.model, batch, edits, read=of_answer).double().cpu().numpy()


if __name__ == "__main__":
    from_command_line(main)
