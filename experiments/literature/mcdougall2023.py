"""Do some heads make tokens less likely that are predicted and stand earlier in the text?

McDougall et al. (arXiv 2310.04625), on one head of GPT-2 small: "If components in earlier layers
predict a certain token, and this token appears earlier in the context, the head suppresses it: we
call this copy suppression."

1. A head's copy suppression is what it takes from the logit of the earlier token that is predicted
   most before its layer, by attending to this token. It is measured on short English texts or, if
   the model lacks their words, on one half of the prompts, with other labels.
2. In the other half, the copied token is the most probable one of the prompt's tokens, without the
   last one. The other token is the most probable one that the prompt does not have.
3. The first claim holds if what the heads write at the last token lowers the copied token's logit,
   more than random heads of the same layers do and more than the other token's logit.
4. The second claim holds if the copied token becomes more likely when the heads are set to zero at
   all tokens: more than with random heads, and more than the other token does.

The authors study web text. In the prompts here, what can be copied are labels, or answers of pairs
that have been shown.

    python experiments/literature/mcdougall2023.py --model icl-mini --task animal-country -n 40
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from claims import Study, Table, ZeroedLists, from_command_line
from shared_tasks import other_labels

import icl_lens as il

N_RANDOM_SETS = 10
NAME = "copy-suppression heads"
COPIED, OTHER = 0, 1
"""The two tokens of each prompt."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what copy-suppression heads take from the token that could be copied."""
    study = Study.from_command_line("mcdougall2023", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    zeroed = ZeroedLists.of(study, {NAME: suppressing_heads(study)}, N_RANDOM_SETS)
    tokens = study.read("tokens", study.testing, tokens_to_copy)
    log_probs = token_log_probs(study, zeroed, torch.from_numpy(tokens).long())
    measures = {
        "logit of the copied token, lowered directly": lowered_logits(study, zeroed),
        "log-probability of the copied token, gained without": log_probs - log_probs[:, :1],
    }
    claims = (
        "Copy-suppression heads write against what could be copied",
        "Without copy-suppression heads, copied tokens are more likely",
    )
    place, of_random = zeroed.place(NAME), zeroed.random_places(NAME)
    for (measure, values), claim in zip(measures.items(), claims, strict=True):
        controls = {
            "random heads of the same layers": values[:, of_random, COPIED],
            "the most likely token that the prompt lacks": values[:, place, OTHER],
            "zero": 0.0,
        }
        for versus, control in controls.items():
            quantity = values[:, place, COPIED]
            table.add(measure, quantity, control, versus=versus, note=" ".join(zeroed.names[NAME]))
        table.state(claim, n_rows=len(controls))
    intact = np.exp(log_probs[:, 0, COPIED])
    table.add("probability of the copied token", intact, 0.0, unit="%", versus="zero")
    return table.write()


def suppressing_heads(study: Study) -> list[il.Head]:
    """Return the first heads by copy suppression, on English texts or else on prompts, which have
    other labels than those that are tested.
    """
    atlas = il.head_atlas(study.model, n_sequences=1, seed=study.seed)
    if "copy_suppression" in atlas.left_out:
        ranking = study.changed(labels=other_labels(study)) if study.labels else study
        texts = list(ranking.locating.texts)
        atlas = il.head_atlas(study.model, text=texts, n_sequences=1, seed=study.seed)
    return atlas["copy_suppression"].top(study.n_located)


def tokens_to_copy(acts: il.Activations) -> torch.Tensor:
    """Return the most probable token of each prompt's own, without the last one, and of the rest of
    the vocabulary, [row token].
    """
    log_probs = acts.readout.log_probs(acts.resid_final)
    tokens = acts.batch.tokens.to(log_probs.device)
    last = tokens.gather(1, acts.batch.last[:, None].to(tokens.device))
    tokens = torch.where(acts.batch.attention_mask.to(tokens.device).bool(), tokens, last)
    is_in_prompt = torch.zeros_like(log_probs, dtype=torch.bool).scatter(1, tokens, True)
    can_be_copied = is_in_prompt.scatter(1, last, False)
    copied = log_probs.masked_fill(~can_be_copied, -torch.inf).argmax(1)
    other = log_probs.masked_fill(is_in_prompt, -torch.inf).argmax(1)
    return torch.stack([copied, other], dim=1)


def lowered_logits(study: Study, zeroed: ZeroedLists) -> np.ndarray:
    """Return how much the heads of each set, together, lower the logits of both tokens by what they
    write at the last token, [prompt set token]; 0 for no heads.
    """

    def of_heads(acts: il.Activations) -> torch.Tensor:
        columns = acts.readout.token_columns(tokens_to_copy(acts))
        directions = acts.readout.direction(columns)  # [row token d_model]
        by_layer = []
        for layer in range(acts.view.n_layers):
            by_layer.append(-acts.head_outputs(layer) @ directions.mT)
        return torch.stack(by_layer, dim=1)

    lowered = study.read("written", study.testing, of_heads)  # [prompt layer head token]
    sums = []
    for edits in zeroed.edits:
        heads: list[Any] = []
        for edit in edits:
            heads += edit.heads
        layers = [head.layer for head in heads]
        sums.append(lowered[:, layers, [head.head for head in heads]].sum(1))
    return np.stack(sums, axis=1)


def token_log_probs(study: Study, zeroed: ZeroedLists, tokens: torch.Tensor) -> np.ndarray:
    """Return log p of both tokens [prompt token] under each set of edits, [prompt set token]."""

    def of_rows(rows: list[int]) -> torch.Tensor:
        of_prompts = tokens[rows]

        def of_tokens(log_probs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return log_probs.gather(1, of_prompts[places].to(log_probs.device))

        return il.score(study.model, study.testing[rows], zeroed.edits, read=of_tokens).double()

    run = study.run("zeroed")
    return il.map_prompts(study.model, study.testing, of_rows, options=zeroed.names, run=run)


if __name__ == "__main__":
    from_command_line(main)
