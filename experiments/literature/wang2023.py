"""Do labels collect what their texts say in shallow layers, and is it read from them in deep ones?

Wang et al. (arXiv 2305.14160): "label words are anchors": information flows from texts to labels in
shallow layers, and from labels to the last token in deep layers.

1. Attention from labels to all earlier tokens but the first one, or from the last token to labels,
   is cut in every head of the first or of the last third of the layers (attention knockout); the
   weights that remain are renormalized.
2. Each claim holds if the cut costs the answer more in its third than in the other one, and more
   than with random tokens instead of labels: as many others of the prompt, drawn several times.

The authors cut five layers of GPT2-XL and GPT-J, and measure how often the answer stays the same.

    python experiments/literature/wang2023.py --model icl-mini --task animal-country -n 40
"""

import random

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, from_command_line

import icl_lens as il

N_DRAWS = 5
NO_DRAW = -1
"""Draws of random tokens, and what stands for none: the labels themselves."""
THIRDS = ("first third", "last third")
EXPECTED = {"texts to labels": THIRDS[0], "labels to last": THIRDS[1]}
"""What is cut, and the layers in which it should cost most."""
CLAIMS = {
    "texts to labels": "Labels collect what their texts say in",
    "labels to last": "What labels collected is read in",
}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the answer loses when attention between roles is cut, by third of the layers."""
    study = Study.from_command_line("wang2023", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    settings = [(cut, third, NO_DRAW) for cut in EXPECTED for third in THIRDS]
    for cut, third in EXPECTED.items():
        settings += [(cut, third, draw) for draw in range(N_DRAWS)]

    def edits_of(rows: list[int]) -> list[list[il.Block]]:
        batch = study.testing[rows]
        edits: list[list[il.Block]] = [[]]
        for cut, third, draw in settings:
            edges = cut_edges(batch, cut, draw, study.seed)
            edits.append([il.Block(heads_of(study, third), edges)])
        return edits

    scores = study.scores("cut", study.testing, edits_of, {"cuts": settings})
    lost = scores.log_odds[:, :1] - scores.log_odds
    by_setting = dict(zip(settings, lost.T[1:], strict=True))
    for cut, third in EXPECTED.items():
        (other_third,) = set(THIRDS) - {third}
        of_draws = [by_setting[cut, third, draw] for draw in range(N_DRAWS)]
        controls = {
            f"cut in the {other_third}": by_setting[cut, other_third, NO_DRAW],
            "random tokens instead of labels": np.stack(of_draws, axis=1),
        }
        for versus, control in controls.items():
            measure = f"log-odds lost without attention, {cut}"
            quantity = by_setting[cut, third, NO_DRAW]
            table.add(measure, quantity, control, at=third, versus=versus)
        table.state(f"{CLAIMS[cut]} the {third} of the layers", n_rows=len(controls))
    return table.write()


def heads_of(study: Study, third: str) -> list[il.Head]:
    """Return all heads of the first or last third of the layers."""
    n_layers = study.model.cfg.n_layers
    size = max(1, n_layers // 3)
    layers = range(size) if third == THIRDS[0] else range(n_layers - size, n_layers)
    return [head for head in study.all_heads() if head.layer in layers]


def cut_edges(batch: il.PromptBatch, cut: str, draw: int, seed: int) -> torch.Tensor:
    """Return the edges [prompt query key] that a cut removes: from labels to earlier tokens, or
    from the last token to labels. With a draw, random tokens stand for the labels.

    The first token of the prompt stays, as a place to attend to.
    """
    n_tokens = batch.tokens.shape[1]
    edges = torch.zeros(len(batch), n_tokens, n_tokens, dtype=torch.bool)
    for row, prompt in enumerate(batch.prompts):
        labels = label_tokens(batch, row)
        last = int(batch.last[row])
        if draw != NO_DRAW:
            others = [token for token in range(1, last) if token not in labels]
            rng = random.Random(f"{seed} {draw} {prompt}")
            labels = rng.sample(others, min(len(labels), len(others)))
        if cut == "labels to last":
            edges[row, last, labels] = True
            continue
        for label in labels:
            edges[row, label, 1:label] = True
    return edges


def label_tokens(batch: il.PromptBatch, row: int) -> list[int]:
    """Return the positions of all tokens of a prompt's labels."""
    positions: list[int] = []
    for start, end in batch.label_ranges[row].tolist():
        positions += range(start, end)
    return positions


if __name__ == "__main__":
    from_command_line(main)
