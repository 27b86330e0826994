"""How long location takes beside the bare forward pass, and how much memory: `python -m experiments.benchmark`."""
