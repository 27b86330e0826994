"""Edit the forward pass, in `with` blocks and for scores under many edits, and measure the effect on the answer.

1. An edit is a value (`edit`; `edits`, `patch`, `interchange` and `head_edges` define them): it names heads and writes
   their activations, and knows nothing of passes. `edit_checks` tests, once per model, that edits of each head reach
   the logits and that each layer's attention can be recomputed.
2. The `engine` runs edits in the fastest exact way: in rows of one token (`prefix_cache`, with the attention of
   `kv_cache`), in passes that start at a layer (`restart`), or in whole passes, where `editor` holds all active edits
   and applies them in a fixed order. Edits of attention reach the model through `hook_z`, because some families ignore
   edits of the pattern; `pattern` recomputes attention from queries and keys.
3. Everything else builds edits and names what `score` returns: `effects` (each head ablated), `controlled_ablation`,
   `debias`, `function_vectors`, `head_edges`, `interchange`.
"""
