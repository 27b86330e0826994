"""Measure what edits do to the answer: each measure builds edits and names what `score` returns.

1. `locate` measures every head on many prompts, by any of the scores of `ranking_scores`;
   `mean_scores` makes means, intervals and `selected` of its numbers. `exchanges` has the donors of
   exchanged queries, keys and values.
2. `circuit` ranks edges into heads and FFNs and tests the first ones; `mean_score_parts` splits
   heads' attention to labels.
3. `effects` ablates each head; `controlled_ablation` compares sets of heads with random ones.
4. `head_to_head_effects` removes edges into heads and FFNs.
5. `demonstration_effects` leaves demonstrations out; `generation` continues prompts under edits.
6. `debias` reweights attention against bias; `calibration` divides by what labels get whatever the
   text.
7. `function_vectors` averages heads' outputs; `vector_gains` measures what vectors add; `saliency`
   follows gradients.
"""
