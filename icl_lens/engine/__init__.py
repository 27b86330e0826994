"""Run edits, in `with` blocks and for scores under many edits, in the fastest exact way.

1. `edit_checks` tests, once per model, that edits of each head reach the logits and that each
   layer's attention can be recomputed.
2. `score` plans: sets of edits run in rows of one token (`rows`, in passes of `row_pass` over a
   `prefix_cache`), from a layer and a token on (`restart`, in passes of `pass_rows`), or in whole
   passes, where `editor` holds all active edits and applies them in a fixed order. Edits of
   attention reach the model through `hook_z`, because some families ignore edits of the pattern.
   `prompt_cache` makes the caches that passes over later tokens continue.
3. `donor_passes` records what heads have on donor prompts; `gradients` computes gradients with
   respect to heads' z and to sites.
"""
