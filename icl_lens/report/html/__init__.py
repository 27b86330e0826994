"""HTML visualizations: circuitsvis elements for notebooks, and self-contained pages without external resources."""

from icl_lens.report.html.ablation import ablation_page
from icl_lens.report.html.circuit import circuit_page
from icl_lens.report.html.visualizations import (
    Element,
    attention_patterns,
    attention_to_labels,
    head_heatmap,
    similarity_matrix,
    subhead_values,
    token_values,
    words_by_position,
)

__all__ = [
    "Element",
    "ablation_page",
    "attention_patterns",
    "attention_to_labels",
    "circuit_page",
    "head_heatmap",
    "similarity_matrix",
    "subhead_values",
    "token_values",
    "words_by_position",
]
