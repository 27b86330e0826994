"""Integers of NumPy, such as those of `np.arange`, do what integers of Python do, also in seeds and
in files.
"""

import json

import families
import numpy as np
import pytest

import icl_lens as il
from icl_lens.reading.repeated_tokens import random_tokens

pytestmark = pytest.mark.usefixtures("no_type_checks")  # annotations name Python's integers

PROMPT = il.Prompt.parse(families.PROMPT, answer="foo")
SEED, TWO, THREE, TWENTY = np.array([5, 2, 3, 20])


@pytest.fixture(scope="module")
def mini():
    return il.load_model("icl-mini")


def test_seeds_draw_the_same_prompts_and_tokens(mini):
    for task in ("sentiment-number", "singular-plural"):
        numpy = il.load_task(task, n=THREE, seed=SEED, demonstrations=TWO)
        assert numpy == il.load_task(task, n=3, seed=5, demonstrations=2)
    assert random_tokens(mini, TWO, THREE, SEED) == random_tokens(mini, 2, 3, 5)
    metric = il.query_key_metric(mini, (TWO, np.int64(1)))
    rotated = [metric.with_random_rotation(seed=seed).key_rotation for seed in (SEED, 5)]
    assert (rotated[0] == rotated[1]).all()


def test_seeds_of_resampled_heads_draw_the_same_prompts(mini):
    batch = il.tokenize(mini, il.load_task("sentiment-number", n=8))
    options = {"mode": "resample", "reference": batch, "positions": "last"}
    scores = il.score(
        mini, batch, [[il.Ablate(["L5H0"], seed=seed, **options)] for seed in (SEED, 5, 6)]
    )
    assert (scores[:, 0] == scores[:, 1]).all()
    assert (scores[:, 0] != scores[:, 2]).any()


@pytest.mark.slow
def test_results_and_folders_hold_integers_of_python(mini, tmp_path):
    batch = il.tokenize(mini, il.load_task("sentiment-number", n=8))
    folders = [
        il.Run(tmp_path / name, batch_size=np.int64(4)) for name in ("heads", "effects", "ablation")
    ]
    il.locate(mini, batch, k=TWO, run=folders[0])
    json.loads(il.locate(mini, batch, by="effect", k=TWO, run=folders[1]).to_json())
    ablation = il.ablate_with_controls(
        mini, batch, ["L5H0"], n_random=TWO, seed=SEED, run=folders[2]
    )
    json.loads(ablation.to_json())
    explained = il.explain(mini, PROMPT, k=THREE, n_ablated=TWO, n_random=THREE, seed=SEED)
    assert json.loads(explained.to_json())["settings"]["seed"] == 5
    json.loads(il.task_check(mini, "sentiment-number", n=TWENTY, seed=SEED).to_json())
    with pytest.raises(il.InputError, match=r"seed must be an integer, got 1\.5"):
        il.ablate_with_controls(mini, batch, ["L5H0"], n_random=2, seed=1.5)
