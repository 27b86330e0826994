"""Define edits as values, and run them, in blocks and for scores, in the fastest exact way.

An edit says which heads or sites it changes, at which position, and what is written there:

1. `edit` has the base class `Edit`, which knows nothing of passes, and what its methods get.
2. Edits of heads: `ablate` replaces z; `attention_edits` change weights or scores; `patch` writes
   activations of other prompts. `reference_prompts` runs the prompts of a mean.
3. Edits of the residual stream: `add_vector` writes a vector into it; `sites` ablates and patches
   it and what layers add to it, through `site_hooks`, at `site_positions`.
4. `edges` says what an edge from an earlier component into a head or FFN is; `edge_removal` removes
   edges: it rebuilds heads (`head_reader`) and FFNs (`ffn_reader`) without what some components
   wrote, which `captured_writers` records.
5. `interchange` exchanges queries, keys or values at the last position for those of donor prompts,
   which `interchange_donors` runs.

How they run:

6. `score` chooses for each set of edits one of three ways: rows of one token after a cached prompt
   (`one_token_rows`), from a layer and a token on (`restarts`), or passes over whole prompts
   (`whole_passes`, which also runs blocks). `read` says what is read of each pass.
7. All three share `recomputed_patterns`, which recomputes attention from queries and keys, because
   some families ignore edits of the pattern: edits of attention reach the model through `hook_z`.
   `edited_attention` applies the edits of a layer to it. `edit_checks` tests once per model that
   edits reach the logits. `hugging_face_cache` makes the caches that passes over later tokens
   continue.
8. `gradients` computes gradients with respect to heads' z and to sites.
"""
