"""Scores of what heads copy, from weights alone.

1. A head's OV circuit maps each token of the vocabulary to logits of all tokens: W_E W_V W_O W_U,
   with the norms of `reading.copying`. Its eigenvalues other than zero are those of the small
   matrix `W_O (W_U W_E) W_V` [d_head d_head], because AB and BA have the same ones.
2. `W_U W_E` [d_model d_model] is summed over the vocabulary once, in pieces.
3. The copying score is the sum of the eigenvalues over the sum of their absolute values.

Source: Elhage et al. 2021, A mathematical framework for transformer circuits.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.models.readout import Readout
from icl_lens.models.view import ModelView
from icl_lens.reading.copying import eigenvalue_scores, head_copying
from icl_lens.reading.embeddings import token_inputs
from icl_lens.reading.repeated_tokens import random_tokens, usable_tokens
from icl_lens.runs.progress import steps

N_COPIED = 200
"""Number of random tokens among which the most promoted one is looked for."""
N_TOKENS_AT_ONCE = 4096


def copying_scores(
    circuits: Sequence[Float[Tensor, "head d_head d_head"]],
) -> Float[Tensor, "layer head"]:
    """Return each head's copying score over the whole vocabulary, −1 to 1; 1 if all eigenvalues of
    the head's OV circuit are positive: on the whole, it raises the tokens that it attends to.

    `circuits` are those of `small_circuits`.
    """
    return torch.stack([eigenvalue_scores(circuit) for circuit in circuits])


@torch.no_grad()
def small_circuits(view: ModelView) -> list[Float[Tensor, "head d_head d_head"]]:
    """Return each layer's matrices `W_O (W_U W_E) W_V`, float64.

    The norm before attention and the final norm are those of `head_copying`.
    """
    readout = view.readout(torch.zeros(1, view.d_model))
    sums: dict[tuple[bool, bool, float], Tensor] = {}
    circuits = []
    for layer in range(view.n_layers):
        norm = view.attn_input_norm(layer)
        key = (norm.normalize, norm.center, norm.eps)
        if key not in sums:
            sums[key] = _unembedding_times_embedding(view, readout, layer)
        gain = norm.gain_as(torch.float64).cpu()
        into_values = gain.expand(view.d_model)[:, None] * view.W_V(layer).cpu().double()
        out = view.W_O(layer).cpu().double()
        if readout.center:
            out = out - out.mean(-1, keepdim=True)
        if readout.gain is not None:
            out = out * readout.gain.cpu().double()
        heads = [view.kv_head(head) for head in range(view.n_heads)]
        circuits.append(out @ sums[key] @ into_values[heads])
    return circuits


def _unembedding_times_embedding(
    view: ModelView, readout: Readout, layer: int
) -> Float[Tensor, "d_model d_model"]:
    """Return the sum over the vocabulary of each token's unembedding times its embedding, normed as
    in a layer but without gain and shift.
    """
    norm = view.attn_input_norm(layer)._replace(gain=None, shift=None)
    n_vocabulary = readout.W_U.shape[1]
    total = torch.zeros(view.d_model, view.d_model, dtype=torch.float64)
    for tokens in torch.arange(n_vocabulary).split(N_TOKENS_AT_ONCE):
        embeddings = norm(token_inputs(view, tokens))
        unembeddings = readout.W_U[:, tokens.to(readout.W_U.device)].to(embeddings)
        total += (unembeddings @ embeddings).double().cpu()
    return total * readout.logit_scale


def promotes_attended(view: ModelView, seed: int) -> Bool[Tensor, "token layer head"]:
    """Return whether each head promotes a token most, among random tokens, when it attends to it.

    The shares over tokens are `HeadCopying.copy_score`.
    """
    n_tokens = min(N_COPIED, len(usable_tokens(view.model)))
    (ids,) = random_tokens(view.model, 1, n_tokens, seed)
    tokens = torch.tensor(ids)
    inputs = token_inputs(view, tokens)
    is_promoted = []
    with steps("tokens that heads promote", len(view.heads())) as advance:
        for head in view.heads():
            logits = head_copying(view, head, tokens, inputs=inputs).logits
            is_promoted.append(logits.argmax(-1).cpu() == torch.arange(n_tokens))
            advance(1)
    return torch.stack(is_promoted, dim=1).unflatten(1, (view.n_layers, view.n_heads))
