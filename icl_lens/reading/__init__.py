"""Read a forward pass: record its activations, decompose them, and attribute the answer to their
parts.

1. `capture` runs the prompts, and `recorder` keeps, per prompt and layer, only what the analysis
   reads: vectors at the last position, the last query's attention row, values, and inputs at label
   positions. The result is an `Activations`, whose methods return what heads hold and attend to at
   labels. `from_cache` reads the same tensors from a TransformerLens cache, which `cache_checks`
   compares with the batch.
2. Unless `check=False`, every batch is checked: heads must sum to the attention output, sublayers
   must sum to the residual stream, and the readout must reproduce the model's logits. A model
   family that fails is rejected.
3. `passes`: forward passes with logits at the last position only.
4. `decompose`: exact einsum splits of attention and FFN outputs into heads, (head, position) parts
   and neurons.
5. `increases`: log p(answer | x + u) − log p(answer | x) of layers, heads, (head, position) parts
   and neurons u.
6. `search`: the largest increases without computing all of them. With a frozen norm, one dot
   product bounds each part; parts are evaluated exactly in the order of their bounds until no
   remaining bound can reach the top k.
7. `qk_metric`, `similarity`, `copying`: what heads compare, in general and on one prompt, and what
   they copy.
8. `score_parts`, `value_parts`, `reasons`: attention scores and values of a head, split by the
   components that wrote the layer's input.
"""
