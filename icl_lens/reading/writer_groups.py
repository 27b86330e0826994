"""Writers of a layer's input in groups: embeddings, heads and FFNs of early and of late layers,
biases.
"""

GROUPS = ("embeddings", "early heads", "early FFNs", "late heads", "late FFNs", "biases")
"""Early layers are those in the first half of the model."""


def group_of(writer: str, n_layers: int) -> str:
    """Return the group of a writer, named as in `il.attention_score_parts`."""
    if writer in ("embed", "pos_embed"):
        return "embeddings"
    if writer == "bias":
        return "biases"
    return (
        f"{'early' if 2 * layer_of(writer) < n_layers else 'late'} "
        f"{'FFNs' if writer.startswith('F') else 'heads'}"
    )


def layer_of(writer: str) -> int:
    """Return the layer of a head or FFN, named as in `il.attention_score_parts`; -1 for embeddings.

    Raise ValueError for "bias", which is a sum over layers.
    """
    if writer == "bias":
        raise ValueError("'bias' has no layer: it is a sum over layers")
    return -1 if writer in ("embed", "pos_embed") else int(writer[1:].partition("H")[0])
