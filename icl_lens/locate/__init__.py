"""Locate the heads with the largest mean increase or effect over any number of prompts.

1. `locate`: plan prompts into batches. Each batch yields bounds for all heads and exact values for candidates; the mean
   of the bounds bounds the mean, so few heads need a second pass. The result is exact and certified.
2. `mean_effects`: mean ablation effects of all heads, with intervals.
3. `runner`: compute numbered work items as chunks; experiments use it too.
4. `run_folder`: store finished chunks as files, from which an interrupted run resumes.
5. `distributed`: distribute batches over processes.
"""
