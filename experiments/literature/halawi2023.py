"""With wrong demonstrations, are middle layers right more often than the last one?

Halawi et al. (arXiv 2307.09476): models "overthink": given demonstrations with permuted labels,
accuracy read out from a middle layer exceeds that of the output, and removing late heads that
attend to false labels restores it.

1. The labels are the names of the classes; in every demonstration they are exchanged. The answer
   stays the class of the query.
2. Every layer's residual stream at the last token is read out as if it were the last. The layer is
   the one of the highest accuracy on one half of the prompts; the other half tests it.
3. Heads of the last half of the layers that attend most to labels other than the answer are set to
   zero, as are random heads of the same layers.

The authors test 11 models of up to 20B parameters on 14 tasks, with up to 40 demonstrations.

    python experiments/literature/halawi2023.py --model icl-mini --task animal-country -n 40
"""

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, first_heads, from_command_line, named_classes, relabeled

import icl_lens as il

N_RANDOM_SETS = 10


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy by layer, and without late heads that attend to wrong labels."""
    study = named_classes(
        Study.from_command_line("halawi2023", str(__doc__).splitlines()[0], arguments)
    )
    table = Table(study)
    locating, testing = (wrongly_shown(study, half) for half in (study.locating, study.testing))
    correct = correct_by_layer(study, "locating", locating)
    layer = int(correct.mean(0).argmax())
    correct = correct_by_layer(study, "testing", testing)
    table.add(
        "accuracy read out before the last layers",
        correct[:, layer],
        correct[:, -1],
        at=f"before layer {layer}" if layer < correct.shape[1] - 1 else "output",
        unit="%",
        versus="the model's output",
    )
    table.state("With wrong demonstrations, a middle layer is right more often than the output")
    heads = heads_of_false_labels(study, locating)
    random_sets = il.random_head_sets(study.model, heads, n_random=N_RANDOM_SETS, seed=study.seed)
    edits: list[list[il.Ablate]] = [[]]
    for head_set in (heads, *random_sets):
        edits.append([il.Ablate(head_set, positions="last")])
    names = {"heads": list(map(str, heads))}
    scores = study.scores("without heads", testing, lambda rows: edits, names)
    gained = scores.correct - scores.correct[:, :1]
    table.add_difference_of_shares(
        "accuracy gained without late heads that attend to false labels",
        gained[:, 1],
        gained[:, 2:],
        testing.queries,
        versus="random heads of the same layers",
        note=" ".join(map(str, heads)),
    )
    table.state("Late heads that attend to false labels make answers wrong")
    return table.write()


def wrongly_shown(study: Study, batch: il.PromptBatch) -> il.PromptBatch:
    """Return the prompts with the two labels exchanged at their demonstrations; answers stay."""
    prompts = []
    for prompt in batch.prompts:
        first, second = prompt.labels
        exchanged = {first: second, second: first}
        labels = [exchanged[demonstration.label] for demonstration in prompt.demonstrations]
        prompts.append(relabeled(prompt, labels))
    return study.tokenize(prompts)


def correct_by_layer(study: Study, part: str, batch: il.PromptBatch) -> np.ndarray:
    """Return whether the answer is the likelier label, read out at the input of every layer and at
    the output, [prompt layer].
    """

    def is_correct(acts: il.Activations) -> torch.Tensor:
        readout = acts.readout.using(final_norm="own", bias=True)
        vectors = torch.cat([acts.resid_pre, acts.resid_final[:, None]], dim=1)
        log_probs = readout.log_probs(vectors)[..., acts.batch.label_tokens]
        return log_probs.argmax(-1) == acts.batch.answer[:, None]

    return study.read(f"readout, {part}", batch, is_correct, texts=list(batch.texts))


def heads_of_false_labels(study: Study, batch: il.PromptBatch) -> list[il.Head]:
    """Return the heads of the last half of the layers that attend most to labels other than the
    answer.
    """

    def attention(acts: il.Activations) -> torch.Tensor:
        is_false = acts.batch.label_index != acts.batch.answer[:, None]
        return (acts.attention_to_labels() * is_false[:, None, None]).sum(-1)

    to_false = study.read("attention", batch, attention, texts=list(batch.texts)).mean(0)
    to_false[: len(to_false) // 2] = -1
    return first_heads(torch.from_numpy(to_false), study.n_located)


if __name__ == "__main__":
    from_command_line(main)
