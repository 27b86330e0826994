"""A head's values, keys and queries as d_model vectors that `acts.readout` projects onto the vocabulary."""

from collections.abc import Sequence
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.decompose import head_outputs
from icl_lens.errors import check_choice
from icl_lens.models.head import AnyHead
from icl_lens.models.memory import RANKED_BYTES


def label_values(acts: Activations, head: AnyHead) -> Float[Tensor, "batch demo d_model"]:
    """Return a head's value at each label times W_O, in residual-stream units, not weighted by attention.

    A label of several tokens is read at the token it is scored by (`batch.label_positions`); `acts.head_values` has the
    values at all positions.
    Contains b_V where the model's values do (raw weights). Zero where a prompt has fewer demonstrations.
    Raise InputError for an unknown head or a batch without demonstrations.
    Source: the paper, section 3.2; docs/howto/numbers.md.

    Example:
        >>> il.label_values(acts, il.Head(2, 0)).shape
        torch.Size([1, 4, 96])
    """
    layer, index = acts.view.check_head(head)
    acts.batch.require_demonstrations(
        "label position to read", "use acts.head_values(layer), the values at all positions"
    )
    kv = acts.view.kv_head(index)
    v = acts.at_labels(acts.values(layer)[:, :, kv].to(acts.readout.dtype))
    return head_outputs(v[..., None, :], acts.view.W_O(layer)[index : index + 1])[..., 0, :]


def label_keys(
    acts: Activations, head: AnyHead, *, source: Literal["resid", "attn"] = "resid"
) -> Float[Tensor, "batch demo d_model"]:
    """Return the input of a head's keys at each label's scored token, before the norm and the key matrix.

    `"resid"`: the residual stream entering the head's layer, as in the paper. `"attn"`: only what earlier attention
    layers wrote into it (no embedding, no FFN), as in the authors' code. The result is the same for all heads of a
    layer. Zero where a prompt has fewer demonstrations. Raise InputError for an unknown head or source, and for prompts
    without demonstrations.

    Example:
        >>> il.label_keys(acts, il.Head(2, 0), source="attn").shape
        torch.Size([1, 4, 96])
    """
    layer, _ = acts.view.check_head(head)
    acts.batch.require_demonstrations("label position to read", "use last_query or top_tokens, which need no labels")
    check_choice("source", source, ("resid", "attn"))
    if source == "resid":
        return acts.label_resid_pre[:, layer].to(acts.readout.dtype)
    return acts.label_attn_out[:, :layer].to(acts.readout.dtype).sum(1)


def last_query(acts: Activations, head: AnyHead) -> Float[Tensor, "batch d_model"]:
    """Return the last position's query mapped through the head's key matrix into d_model: `q W_Kᵀ`.

    Its dot product with the normed input of a key position is the head's score there before division by √d_head,
    without the b_K term (the same for every key) and, for rotary models, before rotation: content only, no position.
    With grouped-query attention, the head's own key-value group is used.

    For models that normalize queries and keys (Qwen3, Gemma-3, OLMo-2), `q` is the query after its norm, times the
    gain of the keys' norm. Each key's own scale is omitted, because no direction in d_model can represent it: the
    score is this dot product times 1/√(mean square of that key), so keys of different norms may be ordered differently.
    Processed weights fold the gain of the norm before attention into W_K; raw weights do not.

    Raise InputError for an unknown head or an unsupported query norm.
    Source: the paper, section 3.2.

    Example:
        >>> query = il.last_query(acts, il.Head(2, 0))
        >>> query.shape, len(acts.readout.top_tokens(query, k=5)[0])
        (torch.Size([1, 96]), 5)
    """
    layer, index = acts.view.check_head(head)
    kv = acts.view.kv_head(index)
    q = acts.view.query_in_key_space(layer, acts.q[:, layer].to(acts.readout.dtype))[:, index]
    W_K = acts.view.W_K(layer)[kv].to(q.dtype)
    return einsum(q, W_K, "batch d_head, d_model d_head -> batch d_model")


# Words too common to characterize a vector; the paper's tables omit them as well.
STOP_WORDS = frozenset(
    "a about above after again against all also am an and any are as at be because been before being below between "
    "both but by can could did do does doing down during each few for from further had has have having he her here "
    "hers herself him himself his how i if in into is it its itself just me more most my myself no nor not now of "
    "off on once only or other our ours ourselves out over own same she should so some such than that the their "
    "theirs them themselves then there these they this those through to too under until up very was we were what "
    "when where which while who whom why will with would you your yours yourself yourselves".split()
)


def is_content_word(token: str) -> bool:
    """Return whether a token is a word of at least two letters and not a stop word; for `top_tokens(keep=…)`.

    Example:
        >>> il.is_content_word(" sunny"), il.is_content_word(" the"), il.is_content_word("##")
        (True, False, False)
    """
    word = token.strip().strip("▁Ġ").lower()
    return len(word) > 1 and word.isalpha() and word not in STOP_WORDS


def own_label_ranks(acts: Activations, head: AnyHead) -> Tensor:
    """Return the rank [batch demo] of each demonstration's label token in its label value's projection; 1 is top.

    Zero where a prompt has fewer demonstrations.

    Example:
        >>> il.own_label_ranks(acts, il.Head(2, 0)).shape
        torch.Size([1, 4])
    """
    return label_ranks(acts, [head])[:, 0]


def label_ranks(acts: Activations, heads: Sequence[AnyHead]) -> Int[Tensor, "batch head demo"]:
    """Return `own_label_ranks` for several heads."""
    acts.batch.require_demonstrations("label to rank", "use acts.readout.ranks, which ranks any token")
    index = acts.batch.label_index.to(acts.readout.W_U.device)
    tokens = acts.batch.label_tokens.to(index.device)[index.clamp(min=0)][:, None]
    step = max(1, RANKED_BYTES // (index.numel() * acts.view.d_model * 4))
    found = []
    for start in range(0, len(heads), step):
        values = torch.stack([label_values(acts, head) for head in heads[start : start + step]], dim=1)
        found.append(acts.readout.ranks(values, tokens.expand(values.shape[:-1])))
    ranks = torch.cat(found, dim=1)
    return torch.where((index >= 0)[:, None], ranks, torch.zeros_like(ranks))
