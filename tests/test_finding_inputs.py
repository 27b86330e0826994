"""Findings 13 and 14: groups of writers against loops; test_ground_truth.py has models where the writers are known."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import tiny_study
from tolerance import assert_close

import icl_lens as il
from experiments.findings import tower_inputs, value_inputs
from icl_lens.attribution.writer_groups import GROUPS, group_of, group_sums


def test_groups_by_kind_and_half_of_the_layers() -> None:
    names = ("embed", "pos_embed", "L0H3", "L14H0", "L15H8", "F14", "F15", "F20", "bias")
    expected = "embeddings embeddings early_heads early_heads late_heads early_FFNs late_FFNs late_FFNs biases".split()
    assert [group_of(name, 30) for name in names] == [name.replace("_", " ") for name in expected]


def test_early_and_late_groups_are_all_but_biases() -> None:
    parts = torch.rand(5, len(GROUPS), generator=torch.Generator().manual_seed(0))
    found = tower_inputs.by_group(parts)
    assert_close(found["early"], sum(found[name] for name in ("embeddings", "early heads", "early FFNs")))
    assert_close(found["early"] + found["late"] + found["biases"], parts.sum(-1))


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
def test_groups_sum_writers_of_each_prompt(load_tiny: Any, tmp_path: Path, family: str) -> None:
    model = load_tiny(family)
    study = tiny_study(model, tmp_path, n=6)
    heads = study.located
    acts = il.capture(model, study.held_out, writers=True)
    scores, values = tower_inputs.score_groups(acts, heads), value_inputs.value_groups(acts, heads)
    batch = acts.batch
    for column, head in enumerate(heads):
        parts = il.attention_score_parts(acts, head)
        value = il.value_parts(acts, head, batch.answer_tokens, against=batch.other_label_tokens)
        for row, prompt in enumerate(batch.prompts):
            same = [demonstration.label == prompt.answer for demonstration in prompt.demonstrations]
            for side, found in enumerate((parts.key_side, parts.query_side)):
                by_group = dict.fromkeys(GROUPS, 0.0)
                for number, writer in enumerate(parts.writers):
                    of = [float(found[row, key, number]) for key in range(len(same))]
                    shares = [
                        sum(x for x, one in zip(of, same, strict=True) if one == which) for which in (True, False)
                    ]
                    by_group[group_of(writer, 3)] += shares[0] / sum(same) - shares[1] / (len(same) - sum(same))
                scale = float(found.abs().max()) * 4
                assert_close(scores[row, column, side], list(by_group.values()), scale=scale)
            total = group_sums(value.parts[row].sum(0)[None], acts.view, value.writers)[0]
            assert_close(values[row, column], total)
    assert_close(values.sum(-1), torch.stack([_from_labels(acts, head) for head in heads], dim=1))


def _from_labels(acts: il.Activations, head: il.Head) -> torch.Tensor:
    """Return what a head adds to the answer's log-odds from label positions: the sum of subhead contrasts."""
    batch = acts.batch
    found = il.subhead_log_prob_increase(
        acts, batch.answer_tokens, layers=[head.layer], against=batch.other_label_tokens
    )[:, 0, head.head]
    return found.gather(1, batch.label_positions).sum(1)
