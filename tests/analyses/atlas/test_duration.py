"""The expected duration of an atlas: tokens are those that run, and a pass is measured."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import icl_lens as il
from icl_lens.analyses.atlas import duration
from icl_lens.analyses.atlas.duration import (
    expected_seconds,
    pass_tokens_by_score,
    seconds_per_token,
)
from icl_lens.analyses.atlas.head_atlas import Survey
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.scored_tokens import AnswerTokens


@pytest.mark.slow
def test_the_tokens_of_each_score_are_those_of_its_operations(icl_mini):
    """The operations of its matrix products, over those of a token of a pass."""
    view = ModelView.of(icl_mini)
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=4, demonstrations=4))
    survey, tokens = Survey(view, 4, 0), AnswerTokens.from_batch(view, batch, None, None)
    n_tokens = int(batch.attention_mask.sum())
    last_logits(icl_mini, batch)  # compares the model with that of Hugging Face
    operations_a_token = operations(lambda: last_logits(icl_mini, batch)) / n_tokens
    counts = {"n_sequences": 4, "n_prompts": 4, "n_edited": 4, "prompt_tokens": n_tokens / 4}
    expected = pass_tokens_by_score(view, **counts)
    run = il.Run()
    measured = {
        "effect": lambda: survey._effects(batch, tokens, run),
        "exchanges": lambda: survey._exchanges(batch, run),
        "indirect effect": lambda: survey._indirect_effects(batch, run),
    }
    for name, measure in measured.items():
        measure()  # compares passes of a new kind with those of Hugging Face
        n_run = operations(measure) / operations_a_token
        tolerance = 0.2 if name == "exchanges" else 0.1
        assert n_run == pytest.approx(expected[name], rel=tolerance), name


def operations(call):
    """Return the floating-point operations of the matrix products of a call."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_duration_is_a_measured_pass_times_the_tokens(icl_mini, monkeypatch):
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=4))
    calls = []

    def slow_pass(model, rows):
        calls.append(len(rows))
        time.sleep(0.2)

    monkeypatch.setattr(duration, "last_logits", slow_pass)
    per_token = seconds_per_token(icl_mini, batch)
    assert calls == [2, 2]  # the first is not counted
    n_tokens = float(batch.attention_mask[:2].sum())
    assert per_token == pytest.approx(0.2 / n_tokens, rel=0.3)
    counts = {"n_sequences": 4, "n_edited": 2, "n_held_out": 0}
    length = float(batch.attention_mask.sum(1).double().mean())
    tokens = pass_tokens_by_score(
        ModelView.of(icl_mini), n_prompts=4, prompt_tokens=length, **counts
    )
    assert expected_seconds(icl_mini, batch, 0.5, **counts) == pytest.approx(
        0.5 * sum(tokens.values())
    )
    without = pass_tokens_by_score(ModelView.of(icl_mini), n_sequences=4)
    assert not any(without[name] for name in ("read", "effect", "exchanges", "indirect effect"))
    assert expected_seconds(icl_mini, None, 0.5, **counts) < expected_seconds(
        icl_mini, batch, 0.5, **counts
    )
    more = pass_tokens_by_score(
        ModelView.of(icl_mini), n_prompts=4, prompt_tokens=length, **counts | {"n_edited": 9}
    )
    assert more["effect"] == pytest.approx(2 * tokens["effect"])  # there are only four prompts
    assert torch.isfinite(torch.tensor(seconds_per_token(icl_mini)))
