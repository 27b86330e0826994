"""Answer one question with several measures: what commands compute, and what they return.

1. `explain` describes a model on one prompt. `compute_reports` and `compute_head_reports` compute
   what `explanation_reports` hold; `explanation_sentences`, `explanation_tables` and
   `explanation_sections` say, list and order it; `explanation` is what users get. `explanation_comparison`
   compares two of them.
2. `model_comparison` compares two models over many prompts.
3. `task_behavior`, and `pair_behavior` for pairs, say what a model does on a task (a `check`).
4. `two_towers` tests whether heads work as two towers and returns a `two_towers_result`.
"""
