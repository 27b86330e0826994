"""Label words in values: ranks and features against plain loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import tiny_study

import icl_lens as il
from experiments.findings import values
from experiments.framework import projections
from experiments.framework.study import Study

HEADS = [il.Head(0, 1), il.Head(2, 3)]


@pytest.fixture
def study(gpt2: Any, tmp_path: Path) -> Study:
    return tiny_study(gpt2, tmp_path, n=8)


def written(model: Any, study: Study, batch: il.PromptBatch, row: int, head: il.Head) -> tuple[torch.Tensor, float]:
    """Return what a head writes at each label (centered, times the final gain), and the final norm's scale."""
    tokens = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
    _, cache = model.run_with_cache(tokens)
    v = cache[f"blocks.{head.layer}.attn.hook_v"][0, batch.label_positions[row], head.head]
    u = v @ model.W_O[head.layer, head.head]
    last = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"][0, -1]
    scale = 1 / float((last.var(unbiased=False) + model.cfg.eps).sqrt())
    return (u - u.mean(-1, keepdim=True)) * model.ln_final.w, scale


def test_ranks_and_features_agree_with_loops_over_positions(gpt2: Any, study: Study) -> None:
    batch = study.held_out
    acts = il.capture(gpt2, batch)
    own = projections.label_token_ranks(acts, HEADS)
    other = projections.label_token_ranks(acts, HEADS, other=True)
    features = projections.label_features(acts, HEADS)
    for row in range(3):
        for i, head in enumerate(HEADS):
            vectors, scale = written(gpt2, study, batch, row, head)
            odds: dict[int, list[float]] = {0: [], 1: []}
            for demo in range(4):
                label = int(batch.label_index[row, demo])
                logits = (vectors[demo] @ gpt2.W_U).tolist()
                for ranks, which in ((own, label), (other, 1 - label)):
                    token = int(batch.label_tokens[which])
                    assert ranks[row, i, demo] == 1 + sum(one > logits[token] for one in logits)
                first, second = (logits[int(token)] * scale for token in batch.label_tokens)
                odds[label].append(first - second)
            expected = (np.mean(odds[0]) - np.mean(odds[1])) / 2
            assert float(features[row, i]) == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_means_of_ranks() -> None:
    ranks = torch.tensor([[1.0, 2.0, torch.nan], [10.0, 100.0, 1000.0]])
    assert values.reciprocals(ranks).tolist() == pytest.approx([0.75, 0.111 / 3])
    assert values.magnitudes(ranks, 1000).tolist() == pytest.approx([(3 + np.log10(500)) / 2, 1.0])
