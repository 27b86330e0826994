"""Locate the heads with the largest mean increase or effect over any number of prompts.

1. `locate`: each batch of prompts yields bounds for all heads and exact values for candidates. No head's mean increase
   exceeds its mean bound, so few heads need a second pass. The result is exact and, where bounds exist, certified.
2. `mean_effects`, `mean_exchanges`: mean effects of all heads, with intervals: of ablating each, and of exchanging its
   query, keys or values. `streamed_means` adds up their chunks; `exchanges` has their donors.
3. `mean_score_parts`: why some heads attend to true labels, and what their values carry, with intervals.
4. `circuit`: rank the edges into some heads, and test on other prompts how much of the answer the top ones carry.
"""
