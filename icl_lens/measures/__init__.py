"""Measure what edits do to the answer: each measure builds edits and names what `score` returns.

1. `effects` ablates each head; `controlled_ablation` compares sets of heads with random ones.
2. `head_to_head_effects` removes edges between heads.
3. `debias` reweights attention against bias; `function_vectors` averages heads' outputs; `saliency` follows gradients.
"""
