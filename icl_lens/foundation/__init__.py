"""What several packages share: intervals, defaults, files, digests, checks of shapes.

Its modules import no other module of icl_lens than `errors`.

1. `intervals` computes intervals, p-values and draws over prompts, by one recipe.
2. `ranking_scores` says what the scores are that rank heads, and which one ranks by default;
   `defaults` are the numbers that functions and commands share.
3. `files` writes files so that no reader sees a partial one; `hub` downloads those of the Hugging
   Face Hub; `digest` identifies weights and configurations in results.
4. `shapes` checks tensors against annotated axes; `printable` writes out control characters.
"""
