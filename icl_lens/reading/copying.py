"""A head's OV circuit from token embeddings to token logits: what it writes about the tokens it
reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.token_ids import check_ids
from icl_lens.reading.embeddings import token_inputs
from icl_lens.reading.scored_tokens import token_ids
from icl_lens.result.base import Result
from icl_lens.result.number_format import decimal, signed
from icl_lens.result.tables import SHOWN_ROWS
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class HeadCopying(Result):
    """One head's OV circuit restricted to some tokens; made by `head_copying`.

    `logits[i, j]`: what attending to token i with weight 1 adds to the logit of token j, up to the
    final norm's scale and without biases, which do not depend on token i. Source:
    docs/howto/numbers.md.

    Example:
        >>> copying = il.head_copying(model, "L2H0", [5, 8, 13])
        >>> copying.logits.shape, 0 <= copying.discrimination <= 1
        (torch.Size([3, 3]), True)
    """

    tokens: Int[Tensor, " n"]
    logits: Float[Tensor, "read written"]

    def to_frame(self) -> pd.DataFrame:
        """Return token (read), own_logit, promoted (the token with the largest logit) and logit:
        one row per token.
        """
        best = self.logits.argmax(-1)
        return pd.DataFrame(
            {
                "token": self.tokens.tolist(),
                "own_logit": self.logits.diagonal().tolist(),
                "promoted": self.tokens.to(best.device)[best].tolist(),
                "logit": self.logits.amax(-1).tolist(),
            }
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        rows, n = self.to_frame().head(SHOWN_ROWS), len(self.tokens)
        copies, discriminates = decimal(self.copy_score, 2), decimal(self.discrimination, 2)
        scores = f"copy score {copies}, discrimination {discriminates}"
        columns: dict[str, list[object]] = {
            "token read (id)": rows["token"].tolist(),
            "own logit": list(map(signed, rows["own_logit"])),
            "promotes most (id)": rows["promoted"].tolist(),
            "logit": list(map(signed, rows["logit"])),
        }
        return table_view(f"HeadCopying({n} tokens; {scores})", columns, n)

    @property
    def copy_score(self) -> float:
        """Share of tokens that the head promotes most when it reads them, 0 to 1; chance is 1/n."""
        return float(
            (self.logits.argmax(-1) == torch.arange(len(self.tokens), device=self.logits.device))
            .double()
            .mean()
        )

    @property
    def discrimination(self) -> float:
        """How often the head promotes a token more when reading it than when reading another, 0 to
        1; chance is ½.

        Compares within each written token, so a head that always promotes the same token scores at
        chance.
        """
        own_logits = self.logits.diagonal()
        above = (own_logits > self.logits).double() + 0.5 * (own_logits == self.logits).double()
        n = len(own_logits)
        return float((above.sum() - 0.5 * n) / (n * (n - 1)))

    @property
    def eigenvalue_score(self) -> float:
        """Sum of the eigenvalues over the sum of their absolute values, -1 to 1; 1 for a circuit
        that copies.

        Source: Elhage et al. 2021, A mathematical framework for transformer circuits (there for the
        full vocabulary).
        """
        return float(eigenvalue_scores(self.logits.double()))


def eigenvalue_scores(matrices: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return the sum of each matrix's eigenvalues over the sum of their absolute values."""
    values = torch.linalg.eigvals(matrices)
    return values.real.sum(-1) / values.abs().sum(-1)


@torch.no_grad()
def head_copying(
    model: Any,
    head: AnyHead,
    tokens: Int[Tensor, " n"] | Sequence[int],
    *,
    inputs: Float[Tensor, "n d_model"] | None = None,
) -> HeadCopying:
    """Return a head's OV circuit `W_E W_V W_O W_U` restricted to some tokens.

    The norm before attention is applied between W_E and W_V, the final norm's gain between W_O and
    W_U. Embeddings are those that the first layer reads, without positions: normed in BLOOM,
    multiplied in Gemma and Granite. `inputs` are residual streams to use instead, such as the
    actual inputs of the head's layer.

    Raise InputError for an unknown head or token, fewer than two tokens, duplicate tokens, or
    `inputs` that are not one vector per token. Source: Elhage et al. 2021; docs/howto/numbers.md.

    Example:
        >>> copying = il.head_copying(model, il.Head(2, 0), batch.label_tokens)
        >>> copying.logits.shape, copying.copy_score in (0.0, 0.5, 1.0)
        (torch.Size([2, 2]), True)
    """
    view = model if isinstance(model, ModelView) else ModelView.of(model)
    layer, index = view.check_head(head)
    ids = token_ids("tokens", tokens, view)
    check_ids(view.model, ids.flatten().tolist())
    if ids.ndim != 1 or len(ids) < 2 or len(ids.unique()) < len(ids):
        raise InputError(
            f"tokens must be at least two different ids, got {ids.tolist()}; pass each token once"
        )
    read = token_inputs(view, ids) if inputs is None else inputs
    if read.shape != (len(ids), view.d_model):
        raise InputError(
            f"inputs must have shape {(len(ids), view.d_model)}, one residual stream per token, "
            f"got {tuple(read.shape)}"
        )
    dtype = view.compute_dtype
    x = view.attn_input_norm(layer)._replace(shift=None)(read.to(view.unembed_device, dtype))
    W_V, W_O = view.W_V(layer)[view.kv_head(index)].to(dtype), view.W_O(layer)[index].to(dtype)
    written = einsum(x, W_V, W_O, "n d_in, d_in d_head, d_head d_model -> n d_model")
    readout = view.readout(written)
    if readout.center:
        written = written - written.mean(-1, keepdim=True)
    if readout.gain is not None:
        written = written * readout.gain
    logits = written @ readout.W_U[:, ids].to(dtype) * readout.logit_scale
    return HeadCopying(ids, logits)
