"""How long an atlas takes: the tokens that its scores run, and the time of a measured pass.

1. `pass_tokens_by_score` counts, score by score, the tokens that run through all layers, as
   docs/howto/atlas.md does. A token for each head runs from the head's layer on, about half of the
   layers; products of all heads' outputs with W_U count as the tokens of as many operations.
2. `seconds_per_token` measures a pass over two of the prompts.
3. `expected_seconds` multiplies them.
"""

import time
from typing import Any

import torch

from icl_lens.analyses.atlas.token_scores import TEXTS
from icl_lens.analyses.atlas.turned_heads import N_TURNED_SEQUENCES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.repeated_tokens import N_TOKENS, repeated_sequences

TURNED_FACTOR = 2.0
"""What recomputing a sequence's attention of turned heads takes, over a pass."""
TEXT_FACTOR = 2.5
"""What reading copy suppression from a text takes, over a pass."""
WEIGHTS_FACTOR = 3.0
"""What the scores of weights take, over the product of W_U and the embeddings."""
TOKENS_A_TEXT = 38
REMOVAL_TOKENS = 11
"""Tokens that removing the first heads by a score, and random ones, takes on a held-out prompt."""
N_SCORES = 24


def pass_tokens_by_score(
    view: ModelView,
    *,
    n_sequences: int,
    n_prompts: int = 0,
    n_edited: int = 0,
    n_held_out: int = 0,
    prompt_tokens: float = 0.0,
) -> dict[str, float]:
    """Return the tokens that groups of scores run through all layers, by group.

    `prompt_tokens` is the mean length of the prompts; `n_edited` of them have heads edited one by
    one.
    """
    sequence = 2 * min(N_TOKENS, view.model.cfg.n_ctx // 2 - 2) + 1
    turned = min(n_sequences, N_TURNED_SEQUENCES) * sequence * TURNED_FACTOR
    weights_tokens = view.d_model**2 * _vocabulary(view) / _layer_parameters(view)
    head_tokens = len(view.heads()) * (view.n_layers + 1) / (2 * view.n_layers)
    readout_tokens = len(view.heads()) * view.d_model * _vocabulary(view) / _layer_parameters(view)
    n_edited, n_held_out = min(n_edited, n_prompts), min(n_held_out, n_prompts)
    return {
        "random tokens": n_sequences * sequence + turned,
        "texts": len(TEXTS) * TOKENS_A_TEXT * TEXT_FACTOR,
        "weights": weights_tokens * WEIGHTS_FACTOR,
        "read": n_prompts * (prompt_tokens + readout_tokens),
        "effect": n_edited * (prompt_tokens + head_tokens),
        "exchanges": n_edited * (4 * prompt_tokens + 3 * head_tokens),
        "indirect effect": n_edited * (2 * prompt_tokens + head_tokens + readout_tokens),
        "removal": n_held_out * (prompt_tokens + N_SCORES * REMOVAL_TOKENS),
    }


def seconds_per_token(model: Any, batch: PromptBatch | None = None) -> float:
    """Return the seconds that a token of a pass over two prompts takes, or of two sequences of
    random tokens without prompts; measured after a pass that is not counted.
    """
    if batch is None:
        n_tokens = min(N_TOKENS, ModelView.of(model).model.cfg.n_ctx // 2 - 2)
        batch = repeated_sequences(ModelView.of(model).model, n=2, n_tokens=n_tokens, seed=0)
    measured = batch[list(range(min(2, len(batch))))]
    with torch.no_grad():
        last_logits(ModelView.of(model).model, measured)
        start = time.monotonic()
        last_logits(ModelView.of(model).model, measured)
    return (time.monotonic() - start) / float(measured.attention_mask.sum())


def expected_seconds(
    model: Any, batch: PromptBatch | None, per_token: float, **counts: int
) -> float:
    """Return the expected seconds of `il.head_atlas`; `counts` are n_sequences, n_edited and
    n_held_out.
    """
    view = ModelView.of(model)
    if batch is None:
        return per_token * sum(pass_tokens_by_score(view, **counts).values())
    prompt_tokens = float(batch.attention_mask.sum(1).double().mean())
    tokens = pass_tokens_by_score(view, n_prompts=len(batch), prompt_tokens=prompt_tokens, **counts)
    return per_token * sum(tokens.values())


def _vocabulary(view: ModelView) -> int:
    """Return the number of tokens that the model knows."""
    return view.model.W_U.shape[-1]


def _layer_parameters(view: ModelView) -> int:
    """Return the number of weights of all layers that a token is multiplied with."""
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    attention = 2 * (view.n_heads + view.n_kv_heads) * view.d_head
    mlp = (3 if getattr(view.cfg, "gated_mlp", False) else 2) * d_mlp
    return view.n_layers * view.d_model * (attention + mlp)
