"""Every difference between models: families, model classes, versions of TransformerLens.

1. `load`: a bundled model, a folder or a name on the Hub becomes a `TransformerBridge` with raw weights.
2. `view`: a `ModelView` says where a model's weights and hooks are and what a block does to a head's output; all other
   rooms read weights through it. `norms` and `scores` are its parts: what a norm does, how queries and keys become
   attention scores.
3. `readout`: final norm and unembedding, by which a vector becomes log-probabilities, ranks and words.

`head` names a head: `L22H0`.
"""
