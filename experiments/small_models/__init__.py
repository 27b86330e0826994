"""How the bundled models (icl-mini, icl-mini-llama, icl-mini-gptj) were trained.

`world` draws what they read, `train` trains them: `python -m experiments.small_models.train`.
"""
