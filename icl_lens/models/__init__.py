"""Load models, and hide how families, model classes and versions of TransformerLens differ.

1. `checkpoints` finds the files of a model and prepares them; `loading` loads a model from them,
   refuses what no function can explain, and compares what was loaded with Hugging Face.
2. `view` locates weights and hooks; all other packages read weights through it. `module_checks`
   refuses modules that do not compute what their weights say.
3. `norms` infers what a norm computes, `attention_scores` how queries and keys become scores;
   `readout` maps a vector to log-probabilities, ranks and words (`content_words` are those that
   say something). `head` defines names such as `L22H0`.
4. `passes` has what a forward pass needs: no caches, independent rows, one thread, limits on
   memory. `sizes` estimates what a pass takes, and how many rows it may have; `freed_memory` makes
   room for large ones. `active_edits` says what edits a model now.
"""
