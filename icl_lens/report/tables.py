"""Convert tensors to tidy tables with one row per value and heads as `L22H0`."""

from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.attribution.attention import attention_to_labels
from icl_lens.attribution.increases import LayerIncreases
from icl_lens.attribution.search import TopHeads, TopSubheads
from icl_lens.result.tables import long_frame as to_frame


def layer_table(increases: LayerIncreases) -> pd.DataFrame:
    """Return layer increases: prompt, layer, component ("attn" | "ffn"), increase (nats)."""
    return increases.to_frame().rename(columns={"value": "increase"})


def head_table(increases: Tensor) -> pd.DataFrame:
    """Return head increases [batch layer head]: prompt, layer, head, name, increase (nats)."""
    return to_frame(increases, ("prompt", "layer", "head"), value="increase")


def top_heads_table(top: TopHeads) -> pd.DataFrame:
    """Return located heads: name, increase or contrast (`top.by`, mean over prompts, nats), rank, layer, head."""
    return top.to_frame().rename(columns={"value": top.by})


def top_subheads_table(acts: Activations, top: TopSubheads) -> pd.DataFrame:
    """Return located parts: name, position, token, increase or contrast (`top.by`, nats), prompt, rank, layer, head."""
    return replace(top, tokens=acts.batch.token_names).to_frame().rename(columns={"value": top.by})


def label_attention_table(acts: Activations) -> pd.DataFrame:
    """Return attention from the last position to labels, summed over each label's tokens.

    Columns: prompt, layer, head, demo, name, attention, position (of the label's scored token), label, is_answer
    (whether the label is the prompt's answer; False without an answer). Missing demonstrations have no row.
    """
    frame = to_frame(attention_to_labels(acts), ("prompt", "layer", "head", "demo"), value="attention")
    row, demo = torch.tensor(frame["prompt"].tolist()), torch.tensor(frame["demo"].tolist())
    batch = acts.batch.to("cpu")
    index = batch.label_index[row, demo]
    frame["position"] = batch.label_positions[row, demo].numpy()
    frame["label"] = [batch.labels[i] if i >= 0 else "" for i in index.tolist()]
    frame["is_answer"] = (index == batch.answer[row]).numpy()
    return frame.loc[frame["position"] >= 0].reset_index(drop=True)
