"""Tokens shown twice, and what heads do on them: induction and previous-token scores.

On [a b c … a b c …] a head's induction score is its attention from each token of the second half to the token that
followed the same one in the first half, and its previous-token score that to the token before; means over the second
half. Source: Olsson et al., "In-context learning and induction heads", arXiv 2209.11895.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.lab.passes import Tensors
from experiments.lab.study import Study


def random_tokens(study: Study, length: int, seed: int) -> list[int]:
    """So many different tokens of the vocabulary, none of them special, in random order, or all that there are."""
    tokenizer = study.model.tokenizer
    special = {*getattr(tokenizer, "all_special_ids", ())}
    usable = [token for token in range(min(len(tokenizer), int(study.view.cfg.d_vocab))) if token not in special]
    return random.Random(seed).sample(usable, min(length, len(usable)))


def repeat_scores(study: Study, tokens: Sequence[int], *, front: Sequence[int] = ()) -> Tensors:
    """induction, previous [1 layer head] (0–1) on these tokens shown twice, behind what stands in `front`."""
    n, view = len(tokens), study.view
    twice = torch.tensor([[*front, *tokens, *tokens]], device=study.batch().tokens.device)
    seen: dict[int, Tensor] = {}

    def keep(layer: int):
        def hook_fn(pattern: Float[Tensor, "1 head query key"], hook: object) -> None:
            query = torch.arange(n, 2 * n, device=pattern.device) + len(front)
            both = [pattern[0][:, query, query - back].mean(-1) for back in (n - 1, 1)]
            seen[layer] = torch.stack(both).float().cpu()

        return hook_fn

    hooks: list[tuple[str, Any]] = [(view.last_logits_hook, lambda x, hook: x[:, :1])]  # of no use
    hooks += [(view.hook(layer, "attn.hook_pattern"), keep(layer)) for layer in range(view.n_layers)]
    with torch.no_grad(), view.lean_pass() as lean, study.model.hooks(fwd_hooks=hooks):
        study.model(twice, return_type="logits", **lean)
    induction, previous = torch.stack([seen[layer] for layer in range(view.n_layers)], dim=1)[:, None]
    return {"induction": induction, "previous": previous}


def front_of(study: Study, tokens: Sequence[int]) -> list[int]:
    """What the model has in front of every prompt: its token for the beginning, if the prompt begins with it."""
    return list(tokens[:1]) if tokens[0] == getattr(study.model.tokenizer, "bos_token_id", None) else []
