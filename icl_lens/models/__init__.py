"""Load models, and hide how families, model classes and versions of TransformerLens differ.

Load:

1. `load` loads a model with raw weights from what `resolve` finds: a bundled or `installed` model,
   a folder, a Hub repository, or a file that `gguf` converts (`gguf_header`, `gguf_tokenizer`).
   `hugging_face_objects` accepts a user's model, which `shared_weights` copies without its weights,
   and `user_tokenizer` gives TransformerLens a tokenizer unchanged. `quiet` keeps loading quiet.
2. `load_errors` says what is wrong with files, `weight_checks` with weights; `file_digests`
   recognizes changed files. `supported` refuses models that no function can explain.

Know a model's layout and weights:

3. `view` locates weights and hooks; all other packages read weights through it. `layout` refuses
   blocks that are not heads on one residual stream, `weight_modules` modules that do not compute
   what their weights say. `modules` lists modules; `offload` reads weights from CPU or disk.
4. `norms` infers what a norm computes, `attention_scores` how queries and keys become scores;
   `readout` maps a vector to log-probabilities, ranks and words (`content_words` are those that
   say something). `head` defines names such as `L22H0`.

Run passes, with locks and edits:

5. `inference` runs passes without caches, `independent_rows` makes rows independent of each other,
   `locking` gives a model to one thread. `memory` has the limits, `sizes` what passes take of them.
6. `active_edits` says what edits a model now; `module_hooks` finds hooks that users have set.

Compare with Hugging Face:

7. `bridge_comparison` compares a bridge with its original, `bridge_causes` says why they differ.
"""
