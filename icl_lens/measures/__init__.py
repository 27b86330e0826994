"""Measure what edits do to the answer: each measure builds edits and names what `score` returns.

1. `effects` ablates each head; `controlled_ablation` compares sets of heads with random ones.
2. `head_to_head_effects` removes edges between heads.
3. `demonstration_effects` leaves demonstrations out; `generation` continues prompts under edits.
4. `debias` reweights attention against bias; `calibration` divides by what labels get whatever the text.
5. `function_vectors` averages heads' outputs; `vector_gains` measures what vectors add; `saliency` follows gradients.
"""
