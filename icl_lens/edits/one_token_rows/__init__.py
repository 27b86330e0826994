"""Run edits of the last position: one pass over the prompts, then one token per prompt and set.

1. `prefix_cache` runs the prompts once and keeps what later rows need: keys, values, and the stream.
2. `layer_attention` computes the attention of rows to one layer's cached keys and values.
3. `run_rows` runs the last token of each prompt under many sets of edits in one pass.
4. `score_rows` divides prompts and sets among such passes, and returns what is read of them.
"""
