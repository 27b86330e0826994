"""Scores of every head, side by side, under the names that papers use.

1. `head_atlas` is `il.head_atlas`, which measures all scores; `duration` says how long it takes.
2. `definitions` says of each score what it is, its source, unit and cost; `head_score` holds one
   score of all heads.
3. `weight_scores`, `token_scores` and `task_scores` measure them: from weights, on random repeated
   tokens and texts, and on prompts of an in-context task. `turned_heads` measures attention with
   queries turned against keys. `published` has scores of papers, `stored_scores` those of files.
4. `kinds` tests which heads have the kind of a score; `kind_reasons` says why others do not.
5. `head_atlas_result` is the result: one row a head, one column a score.
"""
