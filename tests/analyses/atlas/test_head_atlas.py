"""What an atlas is as a result: its table, its heads, what it leaves out, and its page of documentation."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS, TASK_SCORES, TEXT_SCORES

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "howto" / "atlas.md"


@pytest.fixture(scope="module")
def atlas(gpt2):
    return il.head_atlas(
        gpt2, text=["love like love hate one two", "the cat a dog the cat"], n_sequences=5, k=4
    )


def test_the_table_has_a_row_for_each_head_and_a_column_for_each_score(atlas):
    frame = atlas.to_frame()
    assert frame.columns.tolist() == ["name", "kinds", *atlas.scores, "layer", "head"]
    assert frame["name"].tolist() == [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    for score in atlas:
        assert np.array_equal(frame[score.name], score.mean.flatten().numpy())
    assert atlas.row("L1H2") == {score.name: float(score.mean[1, 2]) for score in atlas}


def test_first_heads_and_intervals(atlas):
    induction = atlas["induction"]
    order = induction.mean.flatten().argsort(descending=True)[:3].tolist()
    assert induction.top(3) == [il.Head.from_index(index, 4) for index in order]
    assert (induction.low < induction.mean).all()
    assert (induction.mean < induction.high).all()
    assert induction.selected.sum() == pytest.approx(atlas.k)
    assert atlas["copying"].low.isnan().all()  # of weights: no mean, no interval


def test_what_is_missing_is_left_out_with_its_reason(icl_mini, atlas):
    assert {atlas.left_out[name] for name in TASK_SCORES} == {
        "it needs prompts of an in-context task"
    }
    with pytest.raises(il.InputError, match="it needs prompts"):
        atlas["contrast"]
    with pytest.raises(il.InputError, match="score must be one of"):
        atlas["inductoin"]
    with pytest.raises(il.InputError, match="head must be in layers 0–2"):
        atlas.row("L3H0")
    of_words = il.head_atlas(icl_mini, n_sequences=2)
    assert all("vocabulary" in of_words.left_out[name] for name in TEXT_SCORES)


@pytest.mark.slow
def test_first_heads_of_all_scores_are_removed_on_held_out_prompts(icl_mini, tmp_path):
    prompts = il.load_task("sentiment-number", n=40)
    measured, held_out = il.split_by_query(prompts, 8)
    atlas = il.head_atlas(
        icl_mini, measured, n_sequences=2, k=3, n_edited=5, held_out=held_out, n_random=3
    )
    assert atlas.n_held_out == 5
    assert set(atlas.removals) == set(atlas.scores)
    frame = atlas.removal_frame()
    assert (frame["lost"].diff().dropna() <= 0).all()
    for name, removal in atlas.removals.items():
        assert list(removal.heads) == atlas[name].top(3)
    by_score = frame.set_index("score")
    assert by_score["lost"]["effect"] > by_score["lost"]["first_token"]
    atlas.save(tmp_path / "atlas.json")
    loaded = il.results.HeadAtlas.load(tmp_path / "atlas.json")
    assert loaded.removal_frame().equals(frame)
    assert "What removing the first heads by each score costs" in str(loaded)
    with pytest.raises(il.InputError, match="must be omitted without prompts"):
        il.head_atlas(icl_mini, held_out=held_out)


@pytest.mark.slow
def test_pairs_and_texts_have_the_scores_that_need_no_labels(gpt2):
    pairs = [
        il.Prompt([("love", "like"), ("one", "two")], "cat", "dog", ["dog", "like", "two"])
    ] * 2
    atlas = il.head_atlas(
        gpt2, il.tokenize(gpt2, pairs), text=["love like love hate"], n_sequences=2
    )
    assert "increase" in atlas.scores
    assert "exchange" in atlas.left_out
    text = il.tokenize(gpt2, [il.Text("love like love", answer=" hate")])
    atlas = il.head_atlas(gpt2, text, text=["love like love hate"], n_sequences=2)
    assert "effect" in atlas.scores
    assert atlas.left_out["true_label_attention"] == "it needs prompts with demonstrations"


def test_every_score_is_documented():
    text = DOCUMENTATION.read_text(encoding="utf-8")
    for name in DEFINITIONS:
        assert f"`{name}`" in text, name


def test_csv_is_the_table(atlas, tmp_path):
    atlas.to_csv(tmp_path / "atlas.csv")
    table = pd.read_csv(tmp_path / "atlas.csv")
    assert torch.allclose(
        torch.tensor(table["induction"].to_numpy()), atlas["induction"].mean.flatten()
    )
