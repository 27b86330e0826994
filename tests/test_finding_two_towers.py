"""Finding 7: scores and swaps against plain loops and hooks, and exchanged texts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import tiny_study

import icl_lens as il
from experiments.findings import two_towers as finding
from experiments.framework.study import Study
from icl_lens.prompts.donors import exchange_texts

HEADS = [il.Head(0, 1), il.Head(1, 0), il.Head(2, 3)]


@pytest.fixture
def study(gpt2: Any, tmp_path: Path) -> Study:
    return tiny_study(gpt2, tmp_path, n=8)


def test_scores_are_those_of_the_library_and_aurocs_those_of_loops(study: Study) -> None:
    batch = study.held_out
    scores = finding.query_key_scores(study, batch, batch)
    expected = il.label_similarity(study.model, batch, study.compared)[:, :, -1].numpy()
    chosen = tuple(np.array(study.compared).T)
    np.testing.assert_allclose(scores[:, *chosen], expected, atol=1e-4)
    found = finding.class_aurocs(study, scores)
    head = study.compared[0]
    for row, prompt in enumerate(batch.prompts):
        same = torch.tensor([one.label == prompt.answer for one in prompt.demonstrations])
        assert float(found[row, *head]) == pytest.approx(il.metrics.auroc(torch.tensor(scores[row, *head]), same))


def swapped_by_hooks(study: Study, row: int, what: str, source: il.PromptBatch) -> torch.Tensor:
    """The labels' log-probabilities with the last position's attention of HEADS computed by hand."""
    model, batch = study.model, study.held_out
    tokens = [one.tokens[row : row + 1, : int(one.last[row]) + 1] for one in (batch, source)]
    ours, theirs = (one.label_positions[row] for one in (batch, source))
    _, other = model.run_with_cache(tokens[1])
    seen: dict[str, torch.Tensor] = {}

    def keep(value: torch.Tensor, hook: Any, place: str) -> None:
        seen[place] = value

    def replace(z: torch.Tensor, hook: Any, layer: int) -> torch.Tensor:
        z = z.clone()
        for head in (one.head for one in HEADS if one.layer == layer):
            q, k, v = (seen[f"{name}{layer}"][0, :, head].clone() for name in "qkv")
            new = other[f"blocks.{layer}.attn.hook_{what}"][0, :, head]
            if what == "q":
                q[-1] = new[-1]
            else:
                (k if what == "k" else v)[ours] = new[theirs]
            z[0, -1, head] = torch.softmax(q[-1] @ k.T / k.shape[-1] ** 0.5, dim=-1) @ v
        return z

    hooks: list[Any] = []
    for layer in sorted({one.layer for one in HEADS}):
        hooks += [(f"blocks.{layer}.attn.hook_{name}", partial(keep, place=f"{name}{layer}")) for name in "qkv"]
        hooks.append((f"blocks.{layer}.attn.hook_z", partial(replace, layer=layer)))
    logits = model.run_with_hooks(tokens[0], fwd_hooks=hooks)[0, -1]
    return logits.log_softmax(-1)[batch.label_tokens]


@pytest.mark.parametrize("swap", finding.SWAPS, ids=lambda swap: swap.name)
def test_swaps_agree_with_attention_computed_by_hand(study: Study, swap: finding.Swap) -> None:
    source = {
        "query": study.with_other_query,
        "texts": study.tokenize([exchange_texts(prompt) for prompt in study.held_out.prompts]),
        "labels": study.halves(exchanged=True)[1],
    }[swap.source]
    found = finding.patched_log_probs(study, [HEADS, HEADS[:1]], source, swap.activation)
    for row in range(3):
        expected = swapped_by_hooks(study, row, swap.activation, source)
        torch.testing.assert_close(found[row, 0], expected, atol=1e-4, rtol=0)


def test_exchanged_texts_stay_with_their_class() -> None:
    prompt = il.Prompt.parse("love : bar one : foo like : bar two : foo nine :", answer="foo")
    assert str(exchange_texts(prompt)) == "one : bar love : foo two : bar like : foo nine :"
    assert exchange_texts(prompt).answer == "bar"
    assert exchange_texts(exchange_texts(prompt)) == prompt
