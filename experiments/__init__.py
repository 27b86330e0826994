"""The experiments: training of the bundled models, and one module for every figure and table."""
