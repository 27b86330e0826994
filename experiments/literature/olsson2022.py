"""Do induction heads carry what a repeated text adds to the prediction of its next token?

Olsson et al. (arXiv 2209.11895): induction heads "might be the mechanism for the actual majority of
in-context learning", measured as the loss late in the context minus the loss early in it.

1. Random tokens are shown twice. What the first showing adds to log p of the last token is the gain
   of in-context learning.
2. The heads that attend most to the token after the earlier occurrence, on other random tokens, are
   set to zero at all tokens, as are random heads of the same layers. The claim holds if they carry
   more of the gain than random heads, and more than what remains without them.

The authors measure natural text at its 50th and 500th token; repeated random tokens leave only the
part that copying can explain.

    python experiments/literature/olsson2022.py --model icl-mini -n 40
"""

import random
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, from_command_line, heads_by_induction, usable_tokens

import icl_lens as il

N_RANDOM_SETS = 10
N_TOKENS = 24


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure the gain of a first showing, with and without induction heads."""
    study = Study.from_command_line("olsson2022", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    rows = random_rows(study)
    once = il.PromptBatch.from_tokens([row[:-1] for row in rows], targets=last(rows))
    twice = il.PromptBatch.from_tokens([row + row[:-1] for row in rows], targets=last(rows))
    heads = heads_by_induction(study, study.n_located)
    head_sets = [heads]
    head_sets += il.random_head_sets(study.model, heads, n_random=N_RANDOM_SETS, seed=study.seed)
    edits = [[], *([il.Ablate(head_set, positions="all")] for head_set in head_sets)]
    gains = log_probs(study, "twice", twice, edits) - log_probs(study, "once", once, edits)
    lost = gains[:, :1] - gains
    names = [str(row) for row in range(len(rows))]
    controls = {
        "random heads of the same layers": lost[:, 2:],
        "gain kept without them": gains[:, 1],
    }
    for versus, control in controls.items():
        measure, note = "gain lost without induction heads", " ".join(map(str, heads))
        table.add(measure, lost[:, 1], control, names, versus=versus, note=note)
    table.state("Induction heads carry most of what a repeated text adds", n_rows=len(controls))
    table.add("gain of a first showing", gains[:, 0], 0.0, names, versus="zero")
    return table.write()


def random_rows(study: Study) -> list[list[int]]:
    """Return rows of different random tokens; the seed differs from the one that ranks heads."""
    rng = random.Random(f"tested {study.seed}")
    usable = usable_tokens(study)
    n_tokens = min(N_TOKENS, (study.model.cfg.n_ctx - 2) // 2, len(usable))
    return [rng.sample(usable, n_tokens) for _ in range(study.n)]


def last(rows: list[list[int]]) -> list[int]:
    """Return the last token of every row, which is predicted."""
    return [row[-1] for row in rows]


def log_probs(
    study: Study, part: str, batch: il.PromptBatch, edits: Sequence[Sequence[il.Ablate]]
) -> np.ndarray:
    """Return log p of each row's next token under each set of edits, [row set], nats."""

    def of_rows(rows: list[int]) -> torch.Tensor:
        targets = batch[rows].targets
        assert targets is not None

        def of_target(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return scores.gather(1, targets.to(scores.device)[places][:, None])[:, 0]

        return il.score(study.model, batch[rows], edits, read=of_target).double()

    options = {"heads": [str(edit_set) for edit_set in edits]}
    run = study.run(part)
    return il.map_prompts(study.model, batch, of_rows, options=options, run=run)


if __name__ == "__main__":
    from_command_line(main)
