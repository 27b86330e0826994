"""Editing the forward pass inside `with` blocks: they nest in any order, and leave nothing behind.

Whatever is edited reaches the model through `hook_z`, because some families ignore edits of the attention pattern.
The order in which blocks are nested does not matter: queries, keys and values first, then scores, then patterns, then
z. Where two blocks set the same thing of the same head, the inner one holds.
"""

from icl_lens.interventions.attention import block_attention, remove_position, scale_label_attention
from icl_lens.interventions.output import ablate_heads, ablate_rows
from icl_lens.interventions.patching import patch_heads

__all__ = ["ablate_heads", "ablate_rows", "block_attention", "patch_heads", "remove_position", "scale_label_attention"]
