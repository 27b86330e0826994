"""Scores of every head, side by side, under the names that papers use.

1. `definitions` says of each score what it is, its source, unit and cost.
2. `weight_scores`, `token_scores` and `task_scores` measure them: from weights, on random repeated
   tokens and texts, and on prompts of an in-context task.
3. `kinds` tests which heads a score names, and `naming` says why it does not name others.
4. `head_atlas` is the result: one row a head, one column a score.
5. `measure` is `il.head_atlas`, which puts them together.
"""
