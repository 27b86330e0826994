"""The bundled models and the synthetic world that they are trained on.

1. `tokenizer`: a byte-pair encoding of the word list in which no single token reveals a word's category.
2. `episodes`: prompts of 1 to 16 demonstrations with fillers, strays, near categories, wrong labels and uneven classes;
   plus lists and named words, from which categories are learned.
3. `curriculum`: levels from easy to hard, each ended by a running accuracy.
4. `train` (with `architectures`, `muon`): trains up to an accuracy on held-out pairs of categories, fixed beforehand.
5. `model_card` (with `metrics`, `head_locations`): what the model does, and in which layers and heads.
6. `emergence`: how accuracy, heads and their attention develop over a run's snapshots.
7. `ship`: checks trained models, stores them in half precision, and puts them into the package.
"""

from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
"""Models of other training seeds in half precision, in folders NAME-SEED."""
