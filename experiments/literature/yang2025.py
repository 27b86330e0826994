"""Do some heads name the labels, and others the right one?

Yang et al. (arXiv 2509.24164): task-recognition heads align the residual stream with the labels'
unembeddings, and task-learning heads turn it, within them, toward the right label; each kind
"independently and effectively" carries its part of in-context learning.

1. A head's recognition is the squared length of its output at the last token, projected to the span
   of the labels' unembeddings; its learning is the difference of the answer's logit from the other
   labels', over recognition. Both are means over one half of the prompts. Heads among the first of
   both lists are left out of each.
2. On the other half, each list is set to zero at all tokens, as are random heads of the same layers.
   Recognition is lost if the labels' probability falls, learning if the answer's log-odds fall.
3. The two claims hold if each list costs its own measure more than the other list does.

The authors test models of 1B to 70B parameters on eight datasets, and remove more heads.

    python experiments/literature/yang2025.py --model icl-mini --task animal-country -n 40
"""

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, first_heads, from_command_line

import icl_lens as il

N_RANDOM_SETS = 10
KINDS = ("recognition", "learning")
CLAIMS = {
    "recognition": "Recognition heads, not learning heads, make the labels likely",
    "learning": "Learning heads, not recognition heads, make the right label likely",
}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the labels and the answer lose without heads of each kind."""
    study = Study.from_command_line("yang2025", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    head_lists = ranked_heads(study)
    edits: list[list[il.Ablate]] = [[]]
    for heads in head_lists.values():
        edits.append([il.Ablate(heads, positions="all")])
        for random_heads in il.random_head_sets(
            study.model, heads, draws=N_RANDOM_SETS, seed=study.seed
        ):
            edits.append([il.Ablate(random_heads, positions="all")])
    names = {kind: list(map(str, heads)) for kind, heads in head_lists.items()}
    scores = study.scores("log-odds", study.testing, lambda rows: edits, names)
    log_label_mass = labels_log_prob(study, edits, names)
    measures = {
        "log-probability of the labels lost": (log_label_mass[:, :1] - log_label_mass),
        "log-odds of the answer lost": scores.log_odds[:, :1] - scores.log_odds,
    }
    places = {kind: 1 + number * (1 + N_RANDOM_SETS) for number, kind in enumerate(KINDS)}
    for (measure, lost), kind in zip(measures.items(), KINDS, strict=True):
        other_kind = KINDS[1 - KINDS.index(kind)]
        place = places[kind]
        about = {"at": f"without {kind} heads", "note": " ".join(names[kind])}
        table.add(
            measure,
            lost[:, place],
            lost[:, places[other_kind]],
            versus=f"without {other_kind} heads",
            **about,
        )
        table.add(
            measure,
            lost[:, place],
            lost[:, place + 1 : place + 1 + N_RANDOM_SETS],
            versus="without random heads of the same layers",
            **about,
        )
        table.state(CLAIMS[kind], n_rows=2)
    return table.write()


def ranked_heads(study: Study) -> dict[str, list[il.Head]]:
    """Return the first heads by recognition and by learning; none is in both lists."""

    def of_prompts(acts: il.Activations) -> torch.Tensor:
        return torch.stack([recognition_and_learning(acts, row) for row in range(len(acts.batch))])

    per_prompt = study.read("kinds", study.locating, of_prompts, texts=list(study.locating.texts))
    means = torch.from_numpy(per_prompt).mean(0)  # [kind layer head]
    first = [first_heads(of_kind, study.n_located) for of_kind in means]
    in_both = set(first[0]).intersection(first[1])
    if len(in_both) == study.n_located:
        raise il.InputError("the first heads of both lists are the same; pass fewer --heads")
    lists = {}
    for kind, heads in zip(KINDS, first, strict=True):
        lists[kind] = [head for head in heads if head not in in_both]
    return lists


def recognition_and_learning(acts: il.Activations, row: int) -> torch.Tensor:
    """Return both scores of every head on one prompt, [kind layer head]."""
    batch, by_layer = acts.batch, []
    answer = int(batch.answer[row])
    unembeddings = acts.readout.W_U.T[batch.label_tokens.to(acts.readout.W_U.device)].double()
    basis, _ = torch.linalg.qr(unembeddings.T)  # [d_model label]
    others = [label for label in range(len(unembeddings)) if label != answer]
    direction = unembeddings[answer] - unembeddings[others].mean(0)
    for layer in range(acts.view.n_layers):
        outputs = acts.head_outputs(layer)[row].double()
        recognition = (outputs @ basis).square().sum(-1)
        by_layer.append(torch.stack([recognition, outputs @ direction / recognition]))
    return torch.stack(by_layer, dim=1)


def labels_log_prob(
    study: Study, edits: list[list[il.Ablate]], options: dict[str, list[str]]
) -> np.ndarray:
    """Return the log of the labels' summed probability under each set of edits, [prompt set]."""

    def of_rows(rows: list[int]) -> torch.Tensor:
        batch = study.testing[rows]

        def summed(log_probs: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
            return log_probs[:, batch.label_tokens.to(log_probs.device)].logsumexp(1)

        return il.score(study.model, batch, edits, read=summed).double()

    run = study.run("labels")
    return il.map_prompts(study.model, study.testing, of_rows, options=options, run=run)


if __name__ == "__main__":
    from_command_line(main)
