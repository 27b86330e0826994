"""Load models, and hide how families, model classes and versions of TransformerLens differ.

1. `load`: loads a bundled model, a folder or a Hub repository as a `TransformerBridge` with raw
   weights.
2. `view`: `ModelView` locates a model's weights and hooks and describes what a block does to a
   head's output; all other packages read weights through it. `norms` infers what a norm computes,
   and `attention_scores` how queries and keys become attention scores.
3. `readout`: maps a vector through final norm and unembedding to log-probabilities, ranks and
   words.

`head` defines head names such as `L22H0`.
"""
