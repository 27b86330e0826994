"""Define edits as values: which heads, at which stage and position, and what is written into their
activations.

1. `pattern` recomputes attention from queries and keys; `kv_cache` computes that of single tokens
   after a prompt.
2. `edit` has the base class `Edit`, which knows nothing of passes, and what its methods get.
3. The edits: `ablate` (with `reference`, which runs the prompts of a mean); `attention_edits`
   change weights or scores; `add_vector` writes into the residual stream; `sites` ablates and
   patches the stream and what layers add to it, through `site_hooks`, at `site_positions`; `patch`
   writes activations of other prompts; `edges` rebuilds heads and FFNs without what earlier
   components wrote (with `reader` and `ffn_reader`); `interchange` exchanges queries, keys or values
   at the last position for those of donors.
"""
