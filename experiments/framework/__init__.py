"""What the findings share: tasks, prompts split into two halves, head rankings, intervals, resumable runs, and pages.

1. `tasks` draws prompts of a task in balanced order, with both labels as the answer and queries of both classes.
2. `study` holds one model on one task: prompts to choose heads on, held-out prompts to measure on, located heads and
   control heads from the same layers.
3. `estimate` compares a quantity with its control: the difference and its 95% interval, clustered by query word.
4. `finding` is one question with its answer as rows; `run` computes every finding on every model and task, resumably.
5. `pages` writes one page per finding, and the page that sums them up.
6. `arrangements`, `label_attention` and `label_bias` hold what the findings on labels and order share.
"""
