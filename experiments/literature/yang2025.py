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
from claims import Study, Table, ZeroedLists, first_heads, from_command_line, without_shared

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
    zeroed = ZeroedLists.of(study, ranked_heads(study), N_RANDOM_SETS)
    scores = study.scores("log-odds", study.testing, lambda rows: zeroed.edits, zeroed.names)
    log_label_mass = labels_log_prob(study, zeroed)
    measures = {
        "log-probability of the labels lost": log_label_mass[:, :1] - log_label_mass,
        "log-odds of the answer lost": scores.log_odds[:, :1] - scores.log_odds,
    }
    for (measure, lost), kind in zip(measures.items(), KINDS, strict=True):
        other_kind = KINDS[1 - KINDS.index(kind)]
        controls = {
            f"without {other_kind} heads": lost[:, zeroed.place(other_kind)],
            "without random heads of the same layers": lost[:, zeroed.random_places(kind)],
        }
        about = {"at": f"without {kind} heads", "note": " ".join(zeroed.names[kind])}
        for versus, control in controls.items():
            table.add(measure, lost[:, zeroed.place(kind)], control, versus=versus, **about)
        table.state(CLAIMS[kind], n_rows=len(controls))
    return table.write()


def ranked_heads(study: Study) -> dict[str, list[il.Head]]:
    """Return the first heads by recognition and by learning; none is in both lists."""

    def of_prompts(acts: il.Activations) -> torch.Tensor:
        return torch.stack([recognition_and_learning(acts, row) for row in range(len(acts.batch))])

    per_prompt = study.read("kinds", study.locating, of_prompts, texts=list(study.locating.texts))
    means = torch.from_numpy(per_prompt).mean(0)  # [kind layer head]
    lists = {}
    for kind, of_kind in zip(KINDS, means, strict=True):
        lists[kind] = first_heads(of_kind, study.n_located)
    return without_shared(lists)


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


def labels_log_prob(study: Study, zeroed: ZeroedLists) -> np.ndarray:
    """Return the log of the labels' summed probability under each set of edits, [prompt set]."""

    def of_rows(rows: list[int]) -> torch.Tensor:
        batch = study.testing[rows]

        def summed(log_probs: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
            return log_probs[:, batch.label_tokens.to(log_probs.device)].logsumexp(1)

        return il.score(study.model, batch, zeroed.edits, read=summed).double()

    run = study.run("labels")
    return il.map_prompts(study.model, study.testing, of_rows, options=zeroed.names, run=run)


if __name__ == "__main__":
    from_command_line(main)
