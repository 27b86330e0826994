"""Describe a model on one prompt: what `il.explain` computes, says and returns.

1. `explain` captures the prompt and scores its heads. `compute_reports` and `compute_head_reports`
   compute what `reports` hold: numbers and names, nothing drawn.
2. `sentences` and `tables` say and list them. `sections` orders all that is shown, which
   `report` draws.
3. `result` is what users get. `command` writes the command or Python code that gives it again.
4. `comparison` compares two explanations.
"""
