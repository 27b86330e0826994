"""Load models, refuse those that no function can explain, and compare them with Hugging Face.

1. `load` loads a model with raw weights, or takes a user's one, which `hugging_face_objects` reads
   and `shared_weights` copies without its weights; `user_tokenizer` keeps its tokenizer unchanged.
2. `load_errors` says what is wrong with a model's files, `weight_checks` with its weights.
3. `supported` refuses models that no function can explain; `layout` refuses blocks that are not
   heads on one residual stream.
4. `bridge_comparison` compares a bridge with its original, `bridge_causes` says why they differ.
"""
