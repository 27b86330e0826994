"""What all packages stand on: intervals, shared defaults, files, digests, checks of shapes.

1. `intervals` computes intervals, p-values and draws over prompts, by one recipe.
2. `ranking_scores` has the scores that rank heads, with their names, units and words, and
   `defaults` the numbers that functions and commands share.
3. `files` writes files so that no reader sees a partial one; `hub` downloads those of the Hugging
   Face Hub; `digest` identifies weights and configurations in results.
4. `shapes` checks tensors against annotated axes; `printable` writes out control characters.
"""
