"""Which heads make a language model learn in context, and how? Locate, project, intervene, explain."""

from icl_lens.activations import Activations, capture, label_log_probs, last_log_probs
from icl_lens.attention import attention_by_label, attention_to_labels
from icl_lens.attribution import (
    LayerIncreases,
    head_log_prob_increase,
    layer_log_prob_increase,
    neuron_log_prob_increase,
    subhead_log_prob_increase,
)
from icl_lens.causal import Agreement, HeadEffects, agreement, head_effects
from icl_lens.circuits import is_content_word, label_keys, label_values, last_query, own_label_ranks
from icl_lens.dataset import locate_heads, mean_head_increases
from icl_lens.debias import balancing_weights, choose_strength, debias
from icl_lens.errors import InputError
from icl_lens.explain import Explanation, explain
from icl_lens.free_prompts import tokenize_text
from icl_lens.interventions import (
    ablate_heads,
    ablate_rows,
    block_attention,
    patch_heads,
    remove_position,
    scale_label_attention,
)
from icl_lens.location import TopHeads, TopSubheads, top_heads, top_subheads
from icl_lens.models import Head, bundled_models, load_model
from icl_lens.prompts import Demonstration, Prompt, Template
from icl_lens.readout import Readout
from icl_lens.tasks import load_task
from icl_lens.tokens import PromptBatch, tokenize

__all__ = [
    "Activations",
    "Agreement",
    "Demonstration",
    "Explanation",
    "Head",
    "HeadEffects",
    "InputError",
    "LayerIncreases",
    "Prompt",
    "PromptBatch",
    "Readout",
    "Template",
    "TopHeads",
    "TopSubheads",
    "ablate_heads",
    "ablate_rows",
    "agreement",
    "attention_by_label",
    "attention_to_labels",
    "balancing_weights",
    "block_attention",
    "bundled_models",
    "capture",
    "choose_strength",
    "debias",
    "explain",
    "head_effects",
    "head_log_prob_increase",
    "is_content_word",
    "label_keys",
    "label_log_probs",
    "label_values",
    "last_log_probs",
    "last_query",
    "layer_log_prob_increase",
    "load_model",
    "load_task",
    "locate_heads",
    "mean_head_increases",
    "neuron_log_prob_increase",
    "own_label_ranks",
    "patch_heads",
    "remove_position",
    "scale_label_attention",
    "subhead_log_prob_increase",
    "tokenize",
    "tokenize_text",
    "top_heads",
    "top_subheads",
]
