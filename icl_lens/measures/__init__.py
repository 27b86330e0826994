"""Measure heads, edges and demonstrations: most measures say what an edit does to the answer.

Heads over many prompts:

1. `locate` ranks all heads by one of the scores of `ranking_scores`, which `head_measures` measures
   on a batch. `other_scores` measures the first heads by the rest, `ranking_means` makes means,
   intervals and `selected`, and `locate_result` is what users get.
2. `effects` ablates each head. `exchanges` exchanges queries, keys or values for those of donors.
   `label_attention` is the attention to labels of the answer and to others.
3. `controlled_ablation` ablates heads jointly, beside the sets that `random_heads` draws, with
   `controlled_ablation_result`; `joint_removal` does so for several lists at once. `answer_scores`
   are the label log-probabilities that both compare, `head_findings` says what the removal shows.
4. `head_overlap` compares two lists of heads.

Edges between components:

5. `circuit` ranks edges into heads and FFNs and tests the first ones: `edge_space` has all edges in
   a fixed order, `edge_sets` those that a test removes.
6. `head_to_head_effects` removes what one component wrote from what another reads.
   `mean_score_parts` splits heads' attention to labels by writer; `saliency` follows gradients.

Other questions:

7. `demonstration_effects` leaves demonstrations out; `generation` continues prompts under edits.
8. `debias` reweights attention against bias; `calibration` divides by what labels get whatever the
   text.
9. `function_vectors` averages heads' outputs; `vector_gains` measures what vectors add.
"""
