"""Location: every method's scores against plain hooks, the deep share by hand, an untrained model."""

from functools import partial

import numpy as np
import pytest
import torch
from tiny_study import log_odds, tiny_study

from experiments.findings.location import FINDING, deep_share
from experiments.framework.locating import METHODS, by_tracing
from icl_lens.edits import patch


def set_z(value, head, z, hook):
    z = z.clone()
    z[:, -1, head] = value if isinstance(value, torch.Tensor) else value * z[:, -1, head]
    return z


def reference(name, study, batch, row, layer, head):
    """Return one head's score on one prompt, computed from its z or pattern in passes of this prompt alone."""
    hook = f"blocks.{layer}.attn.hook_z"
    tokens = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
    _, cache = study.model.run_with_cache(tokens)
    odds = partial(log_odds, study.model)
    if name == "effects":
        return odds(batch, row) - odds(batch, row, [(hook, partial(set_z, 0.0, head))])
    if name == "gradient":  # a central difference
        less, more = (odds(batch, row, [(hook, partial(set_z, 1 + step, head))]) for step in (-1e-2, 1e-2))
        return (more - less) / 2e-2
    if name == "attention":
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head, -1]
        labels = zip(batch.label_positions[row].tolist(), batch.label_index[row].tolist(), strict=True)
        return sum(float(pattern[at]) * (1 if label == batch.answer[row] else -1) for at, label in labels)
    other, answer = study.halves(exchanged=True)[0], int(batch.answer[row])
    assert other.answer[row] == 1 - answer
    clean = [(hook, partial(set_z, cache[hook][0, -1, head], head))]
    return odds(other, row, clean, answer=answer) - odds(other, row, answer=answer)


@pytest.mark.parametrize("name", ["effects", "gradient", "attention", "tracing"])
def test_scores_are_those_of_plain_runs(gpt2, tmp_path, name):
    study = tiny_study(gpt2, tmp_path)
    batch = study.halves()[0]
    scores = METHODS[name].score(study, batch)
    assert scores.shape == (len(batch), 3, 4)
    assert scores.abs().max() > 0.01
    for row, layer, head in [(0, 0, 0), (1, 1, 3), (2, 2, 1), (5, 0, 2), (11, 2, 2)]:
        expected = reference(name, study, batch, row, layer, head)
        assert float(scores[row, layer, head]) == pytest.approx(expected, abs=2e-3 if name == "gradient" else 2e-5)


def test_tracing_pairs_each_piece_with_its_own_prompts(gpt2, tmp_path, monkeypatch):
    study = tiny_study(gpt2, tmp_path)
    whole = by_tracing(study, study.halves()[0])
    monkeypatch.setattr(study, "pieces", lambda batch: list(batch.split(5)))
    recorded, record = [], patch._record
    monkeypatch.setattr(patch, "_record", lambda *args: recorded.append(len(args[2])) or record(*args))
    torch.testing.assert_close(by_tracing(study, study.halves()[0]), whole, atol=1e-5, rtol=0)
    assert recorded == [5, 5, 2]  # the donors of a piece run once for all heads


def test_deep_share_by_hand():
    values = torch.tensor([[1.0], [-5.0], [2.0], [1.0]]).expand(6, 4, 1)
    other = torch.tensor([[2.0], [2.0], [3.0], [-1.0]]).expand(6, 4, 1)
    found = deep_share(values, other, np.arange(6))
    assert (found.quantity, found.control) == pytest.approx((0.75, 3 / 7))
    assert found.low < 0.75 - 3 / 7 < found.high  # no interval has zero width
    middle = torch.tensor([[1.0], [2.0], [1.0]]).expand(6, 3, 1)
    assert deep_share(middle, middle, np.arange(6)).quantity == pytest.approx(0.5)
    layers = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).expand(6, 2, 2)  # attention and FFN
    assert deep_share(layers, layers, np.arange(6), counted=slice(0, 1)).quantity == pytest.approx(0.2)
    assert deep_share(layers, layers, np.arange(6), counted=slice(1, 2)).quantity == pytest.approx(0.4)


def test_deep_noise_is_not_depth():
    """Deep layers write more, whatever the answer is: only contributions that follow the answer exceed the control."""
    noise = np.random.default_rng(0).normal(size=(200, 8, 60)) * np.r_[[0.2] * 4, [1.0] * 4][:, None]
    noisy = deep_share(torch.tensor(noise), None, np.arange(200))
    assert noisy.quantity > 0.7  # far above an even spread
    assert noisy.low < 0 < noisy.high
    noise[:, 6:] += 1.0
    assert deep_share(torch.tensor(noise), None, np.arange(200)).low > 0


def test_the_heads_mean_decides_and_not_the_prompts():
    """A contribution that cancels over prompts counts as zero."""
    values = torch.zeros(10, 2, 1)
    values[:, 0], values[::2, 1], values[1::2, 1] = 1.0, 9.0, -9.0
    assert deep_share(values, None, np.arange(10)).quantity == pytest.approx(0, abs=1e-6)


def test_an_untrained_model_loses_nothing(gpt2, tmp_path):
    rows = FINDING.measure(tiny_study(gpt2, tmp_path, n=48)).rows
    lost = [row for row in rows if row.measure.startswith("lost_")]
    assert len(lost) == len(METHODS)
    assert all(row.low < 0 < row.high for row in lost)
