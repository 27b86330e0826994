"""Time and memory of locating heads, relative to a forward pass: `python -m experiments.benchmark`."""
