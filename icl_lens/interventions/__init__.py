"""Editing the forward pass inside `with` blocks, and what that does to the answer.

1. A block (`ablation`, `attention`, `patching`) says what is edited in which heads, and `probe` asks the model once
   whether such an edit reaches the logits and whether its attention is understood.
2. `editor` holds all edits at work on a model and applies them in one fixed order, however blocks are nested: queries,
   keys and values, then scores, then patterns, then z. Where two blocks set the same thing of the same head, the inner
   one holds. `pattern` recomputes attention from queries and keys.
3. Whatever is edited reaches the model through `hook_z`, because some families ignore edits of the attention pattern.
4. On top: `effects` (what removing each head does) and `debias` (two fixes for label biases).
"""
