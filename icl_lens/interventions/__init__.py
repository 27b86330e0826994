"""Editing the forward pass inside `with` blocks: they nest in any order, and leave nothing behind.

Whatever is edited reaches the model through `hook_z`, because some families ignore edits of the attention pattern.
The order in which blocks are nested does not matter: queries, keys and values first, then scores, then patterns, then
z. Where two blocks set the same thing of the same head, the inner one holds.
"""
