"""Answer one question with several measures: what commands compute, and what they return.

One prompt:

1. `explain` describes a model on one prompt. `compute_reports` and `compute_head_reports` compute
   what `explanation_reports` hold; `explanation_sentences`, `explanation_tables` and
   `explanation_sections` say, list and order it; `explanation` is what users get.
2. `command` writes the command or Python code that gives an explanation again, with the parts that
   `python_code` writes. `explanation_comparison` compares two explanations.

Many prompts:

3. `model_comparison` compares two models.
4. `task_behavior`, and `pair_behavior` for pairs, say what a model does on a task.
   `task_check_base` is what both results share. `arrangements` reorders demonstrations, so that
   each contrast of `behavior_contrasts` is zero for all behaviors but one.
5. `two_towers` exchanges heads' queries, keys and values to test whether they work as two towers,
   and returns a `two_towers_result`.
6. `trace` exchanges what is at each layer and token role, to show where the answer is read;
   `trace_estimates` estimates this from gradients, and `trace_result` is what users get.
"""
