"""HTML visualizations: elements for notebooks, and self-contained pages without external resources.

1. `visualizations` are the elements for notebooks. `attention_to_labels` and `attention_patterns`
   are drawn by circuitsvis and contain its script (about 480 kB); nothing else contains it.
2. `view_page` is the page of any view, `atlas_page` that of an atlas, and `explanation_page` that
   of an explanation, whose sections `section_contents` and `head_contents` fill.
3. `elements` are what templates draw, as data; `templating` renders the templates.
"""

from icl_lens.report.html.visualizations import Element as Element
from icl_lens.report.html.visualizations import attention_patterns as attention_patterns
from icl_lens.report.html.visualizations import attention_to_labels as attention_to_labels
from icl_lens.report.html.visualizations import head_heatmap as head_heatmap
from icl_lens.report.html.visualizations import similarity_matrix as similarity_matrix
from icl_lens.report.html.visualizations import subhead_values as subhead_values
from icl_lens.report.html.visualizations import token_values as token_values
from icl_lens.report.html.visualizations import words_by_position as words_by_position

__all__ = [
    "Element",
    "attention_patterns",
    "attention_to_labels",
    "head_heatmap",
    "similarity_matrix",
    "subhead_values",
    "token_values",
    "words_by_position",
]


def __dir__() -> list[str]:
    return __all__
