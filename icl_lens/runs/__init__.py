"""Run a computation over many prompts, in batches, by several processes, resumable from a folder.

1. `run`: `Run` says where chunks are stored, how prompts are batched, and which processes work.
2. `distributed`: the processes that a launcher started together, and what they exchange.
3. `configuration`: everything that a run's numbers depend on, by which a folder is recognized.
4. `folder`: chunks and results as files, and the locks by which processes share a folder.
5. `stream`: plan prompts into batches, and compute or read each batch's chunk.
6. `map_prompts`: a function of one's own over many prompts.
7. `progress`: progress bars and callbacks of what takes longer than two seconds.
"""
