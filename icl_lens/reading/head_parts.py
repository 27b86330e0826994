"""What heads read and write at the last position, in the dtype that is computed in.

Some families (Gemma 2 and 3) have a norm after attention. Its scale is a factor of z and of the
attention here, so that z · W_O, and attention · value · W_O summed over keys, are what a head
writes.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.reading.activations import Activations
from icl_lens.reading.decompose import repeat_kv, scaled_rows


def scaled_z(acts: Activations) -> Float[Tensor, "batch layer head d_head"]:
    """Return each head's z, times the scale of a norm after attention; its product with W_O is the
    head's output.
    """
    return scaled_rows(acts.z.to(acts.readout.dtype), acts.attn_scale)


def scaled_pattern(acts: Activations, layer: int) -> Float[Tensor, "batch head key"]:
    """Return the last query's attention, times the scale of a norm after attention.

    `scaled_pattern` · `head_values` · W_O, summed over keys, is the head's output.
    """
    pattern = acts.pattern[:, layer].to(acts.readout.dtype)
    return scaled_rows(pattern, None if acts.attn_scale is None else acts.attn_scale[:, layer])


def head_values(acts: Activations, layer: int) -> Float[Tensor, "batch key head d_head"]:
    """Return values at every position, b_V included; key-value groups are repeated for the heads
    that read them.
    """
    return repeat_kv(acts.values.of_layer(layer).to(acts.readout.dtype), acts.view.n_heads)


def padding(acts: Activations) -> Bool[Tensor, "batch key"]:
    """Return which positions of `acts.pattern` are after the last token."""
    keys = torch.arange(acts.pattern.shape[-1], device=acts.pattern.device)
    return keys > acts.batch.last.to(keys.device)[:, None]
