"""The bundled models and the world that they are trained on: words in pieces, no head penalty.

1. `tokenizer`: a byte-pair encoding of the word list in which no single token reveals a word's category.
2. `episodes`: prompts of 1 to 16 demonstrations with fillers, strays, near categories, wrong labels and uneven classes;
   plus lists and named words, from which categories are learned.
3. `curriculum`: levels from easy to hard, each ended by a running accuracy.
4. `train` (with `architectures`, `muon`): ends by an accuracy on held-out pairs of categories that was
   fixed beforehand.
5. `model_card` (with `metrics`, `head_locations`): what the model does, and in which layers and heads.
6. `emergence`: how accuracy, heads and their attention came about, over a run's snapshots.
7. `ship`: checked, stored in half precision, and put into the package.
"""

from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
"""The small models of other training seeds: NAME-SEED folders, in half precision."""
