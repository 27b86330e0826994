"""Tables carry names and the right numbers in the right rows."""

import pandas as pd
import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.report import tables


def test_to_frame_puts_each_value_in_its_row():
    values = torch.arange(24.0).reshape(2, 3, 4)
    frame = tables.to_frame(values, ("prompt", "layer", "head"), value="increase")
    assert list(frame.columns) == ["prompt", "layer", "head", "name", "increase"]
    for row in frame.itertuples():
        assert row.increase == values[row.prompt, row.layer, row.head]
        assert row.name == f"L{row.layer}H{row.head}"
    one = tables.to_frame(torch.tensor([5.0, 6.0]), ["prompt"])
    assert one.to_dict("list") == {"prompt": [0, 1], "value": [5.0, 6.0]}
    half = tables.to_frame(torch.tensor([1.5], dtype=torch.bfloat16), ["prompt"])
    assert half["value"].tolist() == [1.5]
    with pytest.raises(il.InputError, match="one name per axis"):
        tables.to_frame(values, ("prompt", "layer"))


def test_tables_of_results_are_their_frames(gpt2_acts, gpt2_batch):
    targets = gpt2_batch.answer_tokens
    layers, top = il.layer_log_prob_increase(gpt2_acts, targets), il.top_heads(gpt2_acts, targets, k=3)
    parts = il.top_subheads(gpt2_acts, targets, k=2)
    for table, result in (
        (tables.layer_table(layers), layers),
        (tables.top_heads_table(top), top),
        (tables.top_subheads_table(gpt2_acts, parts), parts),
    ):
        pd.testing.assert_frame_equal(table.rename(columns={"increase": "value"}), result.to_frame())
    heads = il.head_log_prob_increase(gpt2_acts, targets)
    frame = tables.head_table(heads)
    assert_close(frame[(frame["prompt"] == 1) & (frame["name"] == "L2H3")]["increase"].item(), heads[1, 2, 3])


def test_label_attention_table(gpt2_acts, gpt2_batch):
    frame = tables.label_attention_table(gpt2_acts)
    assert len(frame) == 12 * (4 + 3 + 2), "missing demonstrations have no row"
    for row in frame.sample(20, random_state=0).itertuples():
        assert_close(row.attention, gpt2_acts.pattern[row.prompt, row.layer, row.head, row.position])
        assert row.label == gpt2_batch.token_strings[row.prompt][row.position].strip()
        assert row.is_answer == (row.label == gpt2_batch.prompts[row.prompt].answer)
