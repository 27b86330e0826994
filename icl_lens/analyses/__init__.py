"""Answer one question with several measures: the functions behind the commands.

`explanation` (its sections are computed in `explanation_sections`), `model_comparison`, `task_behavior` and `towers`.
"""
