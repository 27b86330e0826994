"""Edit the forward pass inside `with` blocks and measure the effect on the answer.

1. A block (`ablation`, `attention`, `patching`) defines which heads are edited and how. `edit_checks` tests,
   once per model, that edits of each head reach the logits and that each layer's attention can be recomputed.
2. `editor` holds all active edits of a model and applies them in a fixed order, however blocks are nested: queries,
   keys and values, then scores, then patterns, then z, then ablation. Within one of these stages, the edit of an inner
   block is applied after that of an outer one. `pattern` recomputes attention from queries and keys.
3. These edits reach the model through `hook_z`, because some families ignore edits of the attention pattern.
   `add_vector` (in `function_vectors`) is the exception: it edits the residual stream after a layer.
4. `edited_scores` scores prompts under many edits, with `prefix_cache` or `partial_forward`. `effects`
   (effect of ablating each head) and `debias` (two corrections for label biases) are built on these modules.
"""
