"""Time and memory, one script a question: `python -m experiments.benchmark.search` and its
neighbors."""
