"""Edit the forward pass inside `with` blocks and measure the effect on the answer.

1. A block (`ablation`, `attention`, `patching`) defines which heads are edited and how. `edit_checks` tests each model
   once: the edit must reach the logits, and the attention pattern must be recomputable.
2. `editor` holds all active edits of a model and applies them in a fixed order, however blocks are nested: queries,
   keys and values, then scores, then patterns, then z. If two blocks set the same activation of the same head, the
   inner one takes precedence. `pattern` recomputes attention from queries and keys.
3. All edits reach the model through `hook_z`, because some families ignore edits of the attention pattern.
4. Built on top: `effects` (effect of ablating each head) and `debias` (two corrections for label biases).
"""
