"""The heads of largest mean increase over any number of prompts.

1. `locate`: prompts are planned into batches. Every batch gives a bound of every head and exact values of candidates;
   the mean of bounds bounds the mean, so that few heads need a second pass. The result is exact and certified.
2. `folder`: batches that are done are kept as files, so that a killed run goes on from them.
3. `processes`: several processes share the batches out among themselves.
"""
