"""Are demonstrations first read in the light of earlier ones, in the lower layers?

Bakalova et al. (arXiv 2504.00132): "in the lower layers, the model builds up representations of
individual fewshot examples, which are contextualized by preceding examples"; in the higher layers
these are aggregated at the last token. How much the first step matters differs between tasks.

1. Attention from the tokens of each demonstration to those of earlier demonstrations is cut in every
   head of the first or of the last half of the layers; the weights that remain are renormalized.
   The query and the last token still attend to all demonstrations.
2. The claim holds if the cut costs the answer more in the first half than in the last, which a
   planted model that reads each demonstration alone shows, too, and more than another cut in the
   first half: the same tokens attend to earlier demonstrations, to themselves and to the first
   token, but not to the rest of their own demonstration or to separators.

The authors patch edges of Gemma 2 2B on five tasks.

    python experiments/literature/bakalova2025.py --model icl-mini --task animal-country -n 40
"""

import pandas as pd
import torch
from claims import Study, Table, from_command_line

import icl_lens as il

HALVES: tuple[str, ...] = ("first half", "last half")
CUTS: tuple[str, ...] = ("between demonstrations", "within demonstrations")


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the answer loses when demonstrations cannot attend to earlier ones."""
    study = Study.from_command_line("bakalova2025", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    settings = [(cut, half) for cut in CUTS for half in HALVES]

    def edits_of(rows: list[int]) -> list[list[il.Block]]:
        batch = study.testing[rows]
        edits: list[list[il.Block]] = [[]]
        edges_of = dict(zip(CUTS, cut_edges(batch), strict=True))
        for cut, half in settings:
            edits.append([il.Block(heads_of(study, half), edges_of[cut])])
        return edits

    scores = study.scores("cut", study.testing, edits_of, {"cuts": settings})
    lost = scores.log_odds[:, :1] - scores.log_odds
    by_setting = dict(zip(settings, lost.T[1:], strict=True))
    measure = "log-odds lost without attention between demonstrations"
    for half in HALVES:
        other_half = HALVES[1 - HALVES.index(half)]
        for versus, setting in (
            (f"cut in the {other_half}", (CUTS[0], other_half)),
            ("cut within demonstrations, same layers", (CUTS[1], half)),
        ):
            quantity, control = by_setting[CUTS[0], half], by_setting[setting]
            table.add(measure, quantity, control, at=half, versus=versus)
        if half == HALVES[0]:
            claim = "Demonstrations are read in the light of earlier ones in lower layers"
            table.state(claim, n_rows=2)
    return table.write()


def heads_of(study: Study, half: str) -> list[il.Head]:
    """Return all heads of the first or last half of the layers."""
    middle = study.model.cfg.n_layers // 2
    return [head for head in study.all_heads() if (head.layer < middle) == (half == HALVES[0])]


def cut_edges(batch: il.PromptBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the edges [prompt query key] from the tokens of a demonstration to those of earlier
    ones, and those to all other earlier tokens but the first: separators and its own demonstration.
    """
    n_tokens = batch.tokens.shape[1]
    between = torch.zeros(len(batch), n_tokens, n_tokens, dtype=torch.bool)
    within = torch.zeros_like(between)
    for row in range(len(batch)):
        ranges = demonstration_ranges(batch, row)
        for number, (start, end) in enumerate(ranges):
            for query in range(start, end):
                within[row, query, 1:query] = True
                for earlier_start, earlier_end in ranges[:number]:
                    between[row, query, earlier_start:earlier_end] = True
    return between, within & ~between


def demonstration_ranges(batch: il.PromptBatch, row: int) -> list[tuple[int, int]]:
    """Return the first token of each demonstration's text and the one after its label."""
    starts = batch.text_ranges[row, :, 0].tolist()
    ends = batch.label_ranges[row, :, 1].tolist()
    return [(start, end) for start, end in zip(starts, ends, strict=True) if 0 <= start < end]


if __name__ == "__main__":
    from_command_line(main)
