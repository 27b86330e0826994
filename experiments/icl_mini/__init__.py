"""How the bundled models were made: `python -m experiments.icl_mini`."""
