"""Do labels collect what their texts say in shallow layers, and is it read from them in deep ones?

Wang et al. (arXiv 2305.14160): "label words are anchors": information flows from texts to labels in
shallow layers, and from labels to the last token in deep layers.

1. Attention from labels to all earlier tokens, or from the last token to labels, is cut in every
   head of the first or of the last third of the layers (attention knockout); the weights that
   remain are renormalized.
2. Each claim holds if the cut costs the answer more in its third than in the other one. The same
   number of cut positions, drawn at random among the other tokens, is the second control.

The authors cut five layers of GPT2-XL and GPT-J, and measure how often the answer stays the same.

    python experiments/literature/wang2023.py --model icl-mini --task animal-country -n 40
"""

import random

import pandas as pd
import torch
from claims import Study, Table, from_command_line

import icl_lens as il

THIRDS = ("first third", "last third")
CLAIMS = {
    "texts to labels": "Labels collect what their texts say in",
    "labels to last": "What labels collected is read in",
}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the answer loses when attention between roles is cut, by third of the layers."""
    study = Study.from_command_line("wang2023", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    cuts = ("texts to labels", "texts to random tokens", "labels to last", "random tokens to last")
    settings = [(cut, third) for cut in cuts for third in THIRDS]

    def edits_of(rows: list[int]) -> list[list[il.Block]]:
        batch = study.testing[rows]
        edits: list[list[il.Block]] = [[]]
        for cut, third in settings:
            edges = cut_edges(batch, cut, study.seed)
            edits.append([il.Block(heads_of(study, third), edges)])
        return edits

    scores = study.scores("cut", study.testing, edits_of, {"cuts": settings})
    lost = scores.log_odds[:, :1] - scores.log_odds
    by_setting = dict(zip(settings, lost.T[1:], strict=True))
    for cut, expected in (("texts to labels", THIRDS[0]), ("labels to last", THIRDS[1])):
        other_third = THIRDS[1 - THIRDS.index(expected)]
        random_cut = cut.replace("labels", "random tokens")
        controls = {
            f"cut in the {other_third}": by_setting[cut, other_third],
            f"{random_cut}, in the same layers": by_setting[random_cut, expected],
        }
        for versus, control in controls.items():
            measure = f"log-odds lost without attention, {cut}"
            table.add(measure, by_setting[cut, expected], control, at=expected, versus=versus)
        table.state(f"{CLAIMS[cut]} the {expected} of the layers", n_rows=len(controls))
    return table.write()


def heads_of(study: Study, third: str) -> list[il.Head]:
    """Return all heads of the first or last third of the layers."""
    n_layers = study.model.cfg.n_layers
    size = max(1, n_layers // 3)
    layers = range(size) if third == THIRDS[0] else range(n_layers - size, n_layers)
    return [head for head in study.all_heads() if head.layer in layers]


def cut_edges(batch: il.PromptBatch, cut: str, seed: int) -> torch.Tensor:
    """Return the edges [prompt query key] that a cut removes: from labels to earlier tokens, or
    from the last token to labels, or the same of random tokens instead of labels.
    """
    n_tokens = batch.tokens.shape[1]
    edges = torch.zeros(len(batch), n_tokens, n_tokens, dtype=torch.bool)
    for row, prompt in enumerate(batch.prompts):
        labels = label_tokens(batch, row)
        if "random" in cut:
            others = [token for token in range(1, int(batch.last[row])) if token not in labels]
            labels = random.Random(f"{seed} {prompt}").sample(others, min(len(labels), len(others)))
        if cut.endswith("to last"):
            edges[row, int(batch.last[row]), labels] = True
            continue
        for label in labels:
            edges[row, label, 1:label] = True  # the first token stays, as a place to attend to
    return edges


def label_tokens(batch: il.PromptBatch, row: int) -> list[int]:
    """Return the positions of all tokens of a prompt's labels."""
    positions: list[int] = []
    for start, end in batch.label_ranges[row].tolist():
        positions += range(start, end)
    return positions


if __name__ == "__main__":
    from_command_line(main)
