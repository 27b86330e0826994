"""Do labels merge what their texts say, and does the last token retrieve the label that matches?

Cho et al. (arXiv 2410.04468) see three steps: every text is encoded in the token after it; labels
"merge the encoded representations of demonstrations with their corresponding label tokens"; and the
last token searches "the joint representations similar to the query representation", and copies
them.

1. Merging heads attend most from a label to its own demonstration: its text and what stands between
   text and label. Retrieving heads attend most from the last token to labels that are the answer,
   minus attention to others. Both are means over one half of the prompts.
2. On the other half, merging heads are set to zero at labels, and retrieving heads at the last token.
   Each claim holds if this costs the answer more than random heads of the same layers, set to zero
   at the same tokens.

The authors cut attention in all heads of a quarter of the layers, in models of 7B to 70B parameters
on six datasets of sentences, and from labels only to the token before them. Here, texts are words,
which labels can read directly, so the first step is not tested apart.

    python experiments/literature/cho2024.py --model icl-mini --task animal-country -n 40
"""

from typing import Literal

import pandas as pd
import torch
from claims import Scores, Study, Table, first_heads, from_command_line

import icl_lens as il

N_RANDOM_SETS = 10
CLAIMS = {
    "labels": "Heads that attend from labels to their own texts are needed there",
    "last": "Heads that attend from the last token to labels that match are needed there",
}
"""The tokens at which heads are set to zero, and what is claimed of them."""
NAMES = {"labels": "merging heads, at labels", "last": "retrieving heads, at the last token"}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the answer loses without the heads of each step."""
    study = Study.from_command_line("cho2024", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    by_place: dict[Literal["labels", "last"], list[il.Head]] = {
        "labels": merging_heads(study),
        "last": retrieving_heads(study),
    }
    for positions, heads in by_place.items():
        names = list(map(str, heads))
        scores = scores_without(study, positions, heads)
        about = {"versus": "random heads of the same layers", "note": " ".join(names)}
        log_odds_lost = scores.log_odds[:, :1] - scores.log_odds
        measure = f"log-odds lost without {NAMES[positions]}"
        table.add(measure, log_odds_lost[:, 1], log_odds_lost[:, 2:], **about)
        table.state(CLAIMS[positions])
        accuracy_lost = scores.correct[:, :1] - scores.correct
        measure = f"accuracy lost without {NAMES[positions]}"
        table.add(measure, accuracy_lost[:, 1], accuracy_lost[:, 2:], unit="%", **about)
        if positions == "last":
            table.add("log-odds", scores.log_odds[:, 0], 0.0, versus="zero")
    return table.write()


def scores_without(
    study: Study, positions: Literal["labels", "last"], heads: list[il.Head]
) -> Scores:
    """Return how prompts are answered with all heads, without these at some tokens, and without
    random ones of the same layers.
    """
    edits: list[list[il.Ablate]] = [[]]
    random_sets = il.random_head_sets(study.model, heads, n_random=N_RANDOM_SETS, seed=study.seed)
    for head_set in (heads, *random_sets):
        edits.append([il.Ablate(head_set, positions=positions)])
    options = {"heads": list(map(str, heads))}
    return study.scores(positions, study.testing, lambda rows: edits, options)


def merging_heads(study: Study) -> list[il.Head]:
    """Return the heads that attend most from labels to their own demonstrations."""
    positions = []
    for of_prompt in study.locating.label_positions.tolist():
        positions.append([position for position in of_prompt if position >= 0])
    up_to_labels = study.locating.at(positions)

    def attention(acts: il.Activations) -> torch.Tensor:
        keys = torch.arange(acts.pattern.shape[-1], device=acts.pattern.device)
        start = acts.batch.text_ranges[..., 0].amax(1)  # of the last demonstration
        is_own = (keys >= start[:, None]) & (keys < acts.batch.last[:, None])
        return (acts.pattern * is_own[:, None, None]).sum(-1)

    to_own = study.read("merging", up_to_labels, attention)
    return first_heads(torch.from_numpy(to_own).mean(0), study.n_located)


def retrieving_heads(study: Study) -> list[il.Head]:
    """Return the heads that attend most from the last token to labels that are the answer, minus
    attention to others.
    """

    def difference(acts: il.Activations) -> torch.Tensor:
        is_true = acts.batch.label_index == acts.batch.answer[:, None]
        sign = 2 * is_true.to(acts.pattern) - 1
        return (acts.attention_to_labels() * sign[:, None, None]).sum(-1)

    to_true = study.read("retrieving", study.locating, difference)
    return first_heads(torch.from_numpy(to_true).mean(0), study.n_located)


if __name__ == "__main__":
    from_command_line(main)
