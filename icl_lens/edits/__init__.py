"""Define edits as values, and run them, in blocks and for scores, in the fastest exact way.

An edit says which heads or sites it changes, at which position, and what is written there:

1. `pattern` recomputes attention from queries and keys; `kv_cache` computes that of single tokens
   after a prompt.
2. `edit` has the base class `Edit`, which knows nothing of passes, and what its methods get.
3. The edits: `ablate` (with `reference`, which runs the prompts of a mean); `attention_edits`
   change weights or scores; `add_vector` writes into the residual stream; `sites` ablates and
   patches the stream and what layers add to it, through `site_hooks`, at `site_positions`; `patch`
   writes activations of other prompts; `edges` rebuilds heads without what earlier components wrote
   (with `reader`); `interchange` exchanges queries, keys or values at the last position for those
   of donors.

How they run:

4. `edit_checks` tests, once per model, that edits of each head reach the logits and that each
   layer's attention can be recomputed.
5. `score` plans: sets of edits run in rows of one token (`last_token_rows`, in passes of
   `last_token_pass` over a `prefix_cache`), from a layer and a token on (`restart`, in the
   `restart_passes`), or in whole passes, where `editor` holds all active edits and applies them in
   a fixed order. Edits of attention reach the model through `hook_z`, because some families ignore
   edits of the pattern. `prompt_cache` makes the caches that passes over later tokens continue.
6. `donor_passes` records what heads have on donor prompts; `gradients` computes gradients with
   respect to heads' z and to sites.
"""
