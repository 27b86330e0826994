"""Shares, shifts and effects against plain loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_study import CATEGORIES, tiny_study

import icl_lens as il
from experiments.findings import label_attention as finding
from experiments.framework.projections import label_effects
from experiments.framework.study import Study, label_classes
from experiments.framework.tasks import PAPER_TASKS

HEAD = il.Head(1, 2)


@pytest.fixture
def study(gpt2: Any, tmp_path: Path) -> Study:
    return tiny_study(gpt2, tmp_path, n=8)


@pytest.fixture(scope="module")
def prompts(icl_mini: Any) -> Study:
    """Return a study of many prompts; tests read only their labels and answers."""
    return Study(icl_mini, PAPER_TASKS[0], 80)


def test_a_share_is_a_ratio_of_means(prompts: Study) -> None:
    """A prompt with hardly any attention to labels, all of it on the other class, does not count as much as others."""
    of_same = torch.full((len(prompts.held_out), 1, 1), 0.6, dtype=torch.double)
    of_other = torch.full_like(of_same, 0.2)
    of_same[::2], of_other[::2] = 0.0, 1e-6
    assert float(finding.shares(of_same, of_other).mean()) == pytest.approx(0.75, abs=1e-4)


def test_shifts_leave_out_what_does_not_follow_the_query(prompts: Study) -> None:
    same, other = label_classes(prompts.held_out)
    fixed = torch.rand(len(same), 1, 1, same.shape[1], generator=torch.Generator().manual_seed(0)).double()
    assert not finding.shifts(fixed, fixed, same, other).any()
    before, after = (0.4 * same.double()[:, None, None], 0.2 * other.double()[:, None, None])
    assert finding.shifts(before, after, same, other).flatten().tolist() == pytest.approx([0.6] * len(same))


def test_attention_and_its_effect_agree_with_a_plain_cache(gpt2: Any, study: Study) -> None:
    batch = study.held_out
    acts = il.capture(gpt2, batch)
    effects = label_effects(acts)
    found = finding.class_sums(acts.attention_to_labels(), *label_classes(batch))
    for row, prompt in enumerate(batch.prompts):
        _, cache = gpt2.run_with_cache(batch.tokens[row : row + 1, : int(batch.last[row]) + 1])
        pattern = cache[f"blocks.{HEAD.layer}.attn.hook_pattern"][0, HEAD.head, -1]
        v = cache[f"blocks.{HEAD.layer}.attn.hook_v"][0, :, HEAD.head]
        last = cache[f"blocks.{gpt2.cfg.n_layers - 1}.hook_resid_post"][0, -1]
        scale = 1 / (last.var(unbiased=False) + gpt2.cfg.eps).sqrt()
        sums = [0.0, 0.0]
        for demo, shown in enumerate(prompt.demonstrations):
            position = int(batch.label_positions[row, demo])
            sums[shown.label != prompt.answer] += float(pattern[position])
            u = pattern[position] * v[position] @ gpt2.W_O[HEAD.layer, HEAD.head]
            logits = (u - u.mean()) * scale * gpt2.ln_final.w @ gpt2.W_U
            own, other = (
                int(batch.label_tokens[i]) for i in (batch.label_index[row, demo], 1 - batch.label_index[row, demo])
            )
            assert float(effects[row, *HEAD, demo]) == pytest.approx(float(logits[own] - logits[other]), abs=1e-5)
        assert [float(one[row, *HEAD]) for one in found] == pytest.approx(sums, abs=1e-6)


def test_other_queries_follow_the_same_demonstrations(study: Study) -> None:
    classes = {word: kind for kind, words in CATEGORIES.items() for word in words}
    for own, other in zip(study.held_out.prompts, study.with_other_query.prompts, strict=True):
        assert own.demonstrations == other.demonstrations
        assert classes[own.query] != classes[other.query]
        for prompt in (own, other):
            of_class = {shown.label for shown in prompt.demonstrations if classes[shown.text] == classes[prompt.query]}
            assert of_class == {prompt.answer}
