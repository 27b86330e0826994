"""What one forward pass leaves behind for the analysis.

1. `activations`: `capture` runs the model once and keeps, for each prompt and layer, only what is read later: vectors
   at the last position, the last query's attention row, values, and inputs at label positions. `from_cache` takes the
   same from a TransformerLens cache.
2. On every batch it is checked that heads sum to the attention output, that sublayers sum to the residual stream, and
   that the readout gives the model's own logits; a family that fails is refused.
3. `decompose`: exact splits of what attention and FFN write, as plain einsum: heads, (head, position) parts, neurons.
"""
