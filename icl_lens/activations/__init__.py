"""Record the activations of one forward pass and decompose them.

1. `activations`: `capture` runs the model once, and `recorder` keeps, per prompt and layer, only
   what the analysis reads: vectors at the last position, the last query's attention row, values,
   and inputs at label positions. `from_cache` reads the same tensors from a TransformerLens cache,
   which `cache_checks` compares with the batch.
   Methods of `Activations` return what heads hold and attend to at labels.
2. Unless `check=False`, every batch is checked: heads must sum to the attention output, sublayers
   must sum to the residual stream, and the readout must reproduce the model's logits. A model
   family that fails is rejected.
3. `passes`: forward passes with logits at the last position only; `block_inputs`: passes that
   begin at a layer; `ffn_outputs`: what an FFN writes for any input.
4. `decompose`: exact einsum splits of attention and FFN outputs into heads, (head, position) parts
   and neurons.
"""
