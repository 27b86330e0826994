"""Edit the forward pass inside `with` blocks and measure the effect on the answer.

1. A block (`ablation`, `attention`, `patching`) defines which heads are edited and how. `edit_checks` tests each model
   once: the edit must reach the logits, and the attention pattern must be recomputable.
2. `editor` holds all active edits of a model and applies them in a fixed order, however blocks are nested: queries,
   keys and values, then scores, then patterns, then z, then ablation. If two blocks edit the same activation of the
   same head in the same way, the inner one is applied last. `pattern` recomputes attention from queries and keys.
3. These edits reach the model through `hook_z`, because some families ignore edits of the attention pattern.
   `add_vector` (in `function_vectors`) is the exception: it edits the residual stream after a layer.
4. `edited_scores` scores prompts under many edits, with `prefix_cache` or `partial_forward`. `effects`
   (effect of ablating each head) and `debias` (two corrections for label biases) are built on these modules.
"""
