"""The heads of largest mean increase, or effect, over any number of prompts.

1. `locate`: prompts are planned into batches. Every batch gives a bound of every head and exact values of candidates;
   the mean of bounds bounds the mean, so that few heads need a second pass. The result is exact and certified.
2. `effects`: the same for the effect of removing each head, with intervals.
3. `runner`: numbered pieces of work become chunks; experiments go through it, too.
4. `folder`: batches that are done are kept as files, so that a killed run goes on from them.
5. `processes`: several processes share the batches out among themselves.
"""
