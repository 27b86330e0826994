"""Information flow: edges and losses by hand, random edges, and random answers, which no blocked edge makes worse."""

from itertools import pairwise

import families
import numpy as np
import pytest
import torch
from shared import PROMPTS
from tiny_study import tiny_study

import icl_lens as il
from experiments.findings.information_flow import FINDING, SALIENCY, _saliency_rows, halves_of, log_odds
from experiments.framework.label_attention import label_edges, random_edges, text_edges
from experiments.framework.study import Study
from experiments.framework.tasks import PAPER_TASKS


def test_edges_by_hand(gpt2):
    """In "love : bar like : bar …", the colon and the label attend to the word before them, and the end to labels."""
    batch = il.tokenize(gpt2, PROMPTS)
    texts, labels = text_edges(batch), label_edges(batch)
    for row, words in enumerate(batch.token_strings):
        by_hand, to_labels, last = torch.zeros_like(texts[row]), torch.zeros_like(labels[row]), len(words) - 1
        starts = [0] + [place + 1 for place, word in enumerate(words) if word in ("foo", "bar")]
        for start, following in pairwise(starts):
            colon = following - 2
            assert words[colon] == ":"
            to_labels[last, colon + 1] = True
            for text in range(start, colon):
                by_hand[colon, text] = by_hand[colon + 1, text] = True
        assert torch.equal(texts[row], by_hand)
        assert torch.equal(labels[row], to_labels)


def test_random_edges_are_as_many_others():
    generator = torch.Generator().manual_seed(0)
    edges = (torch.rand(50, 12, 12, generator=generator) < 0.3).tril(-1)
    found = random_edges(edges, generator)
    assert not torch.triu(found).any()  # earlier positions only
    assert torch.equal(found[..., 0], edges[..., 0])  # the first position: where the flow's own edges block it
    assert not (found & edges)[..., 1:].any()
    free = torch.arange(12)[:, None].clamp(min=1)[:, 0] - 1 - edges[..., 1:].sum(-1)
    wanted = edges[..., 1:].sum(-1)
    assert torch.equal(found[..., 1:].sum(-1), torch.minimum(wanted, free))
    chosen = random_edges(edges[:1].expand(2000, -1, -1), generator)[:, 11, 1:11].double().mean(0)[~edges[0, 11, 1:11]]
    assert float(chosen.std()) < 0.03  # all free positions equally often


@pytest.mark.parametrize("flow", ["text_to_label", "label_to_last"])
@pytest.mark.parametrize("layers", [[0], [1, 2]])
def test_losses_are_those_of_blocked_edges(gpt2, tmp_path, flow, layers):
    """Every demonstration is a word, a colon and a label."""
    study = tiny_study(gpt2, tmp_path, n=4)
    batch, heads = study.held_out, [(layer, head) for layer in layers for head in range(families.N_HEADS)]
    edges = torch.zeros(len(batch), *[batch.tokens.shape[1]] * 2, dtype=torch.bool)
    for label in range(2, batch.tokens.shape[1] - 2, 3):
        if flow == "text_to_label":
            edges[:, [label - 1, label], label - 2] = True
        else:
            edges[:, -1, label] = True
    with il.edited(gpt2, il.Block(heads, edges)):
        expected = il.metrics.label_log_odds(il.score(gpt2, batch), batch.answer)
    ours = log_odds(study, batch, layers, flow)
    assert ours == pytest.approx(expected.numpy(), abs=1e-5)
    assert np.abs(ours - log_odds(study, batch)).max() > 1e-3


def test_nothing_flows_to_labels_in_the_last_layer(gpt2, tmp_path):
    """No layer reads what labels collect there."""
    study = tiny_study(gpt2, tmp_path)
    blocked = log_odds(study, study.held_out, [families.N_LAYERS - 1], "text_to_label")
    assert blocked == pytest.approx(log_odds(study, study.held_out), abs=1e-5)
    assert halves_of(families.N_LAYERS) == {"shallow": [0], "deep": [2]}
    with pytest.raises(il.InputError, match="one layer"):
        halves_of(1)


def test_shares_of_saliency_by_hand(gpt2, tmp_path):
    study = tiny_study(gpt2, tmp_path)
    rows = _saliency_rows(study, halves_of(families.N_LAYERS))
    labels, shares = [2, 5, 8, 11], []
    for shallow, _, deep in il.attention_saliency(gpt2, study.held_out).tolist():
        means = []
        for some in (labels, [place for place in range(1, 12) if place not in labels]):
            means.append(np.mean([shallow[query][key] for query in some for key in range(query)]))
        for some in (labels, [place for place in range(len(deep) - 1) if place not in labels]):
            means.append(np.mean([deep[-1][key] for key in some]))
        shares.append((means[0] / (means[0] + means[1]), means[2] / (means[2] + means[3])))
    for row, measure, expected in zip(rows, SALIENCY, np.mean(shares, axis=0), strict=True):
        assert (row.measure, row.quantity, row.control) == (measure.name, pytest.approx(expected, rel=1e-4), 0.5)


@pytest.mark.slow
def test_of_answers_at_random_nothing_is_lost(icl_mini):
    """The answers are independent of the prompts, so no flow carries them."""
    study = Study(icl_mini, PAPER_TASKS[0], 24)
    first, batch = study.halves()
    prompts = [
        il.Prompt(one.demonstrations, one.query, one.labels[row // 2 % 2], one.labels)
        for row, one in enumerate(batch.prompts)
    ]
    assert FINDING.measure(study).rows[0].low > 0
    study._kept["halves", "random", False] = (first, study.tokenize(prompts))
    shuffled = {row.measure: row for row in FINDING.measure(study).rows}
    for name in ("text_to_label", "label_to_last", "text_to_label_random", "label_to_last_random"):
        assert shuffled[name].low <= 0 <= shuffled[name].high
