"""Limits on memory and tokens at once: one budget, and what each computation may take of it."""

BUDGET = 64 * 2**20
"""Bytes of a batch's activations, the default of `Run.memory`."""
