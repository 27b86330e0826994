"""Answer one question with several measures, and say it in a result.

Single measures, such as those of `icl-lens locate`, `ablate` and `circuit`, are in `measures`.

One prompt:

1. `explanation` describes a model on one prompt, and compares two such descriptions. `python_code`
   writes the Python code of models and prompts, for explanations and live views.

Many prompts:

2. `model_comparison` compares two models.
3. `task_check`, and `pair_check` for pairs, say what a model does on a task.
   `task_check_base` is what both results share. `arrangements` reorders demonstrations, so that
   each contrast of `behavior_contrasts` is zero for all behaviors but one.
4. `two_towers` exchanges heads' queries, keys and values to test whether they work as two towers,
   and returns a `two_towers_result`.
5. `trace` exchanges what is at each layer and token role, to show where the answer is read;
   `trace_estimates` estimates this from gradients, and `trace_result` is what users get.
6. `atlas` measures the scores of every head that papers use, side by side.
"""
