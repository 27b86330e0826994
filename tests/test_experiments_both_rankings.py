"""What both rankings ask for runs together, and each has its own heads in its table: against the library's blocks."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import icl_lens as il
from experiments.claims import blocked, label_features, majority_bias, shallow_flow, two_tower
from experiments.claims.bias import BiasConfig
from experiments.claims.blocked import label_to_text
from experiments.claims.queries import texts_exchanged
from experiments.lab.editing import FOO, located_for_both
from experiments.lab.frames import where
from experiments.lab.study import RANKINGS, Ranking, Study, StudySettings, Variant
from icl_lens.metrics import label_log_odds


@pytest.fixture
def study(load_tiny: Callable[..., Any], tmp_path: Any) -> Study:
    path = tmp_path / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
    }
    path.write_text(json.dumps({"categories": categories}))
    study = Study(load_tiny("gpt2"), StudySettings(model="tiny", n=16, path=str(path)))
    first, second = (located_of(study, ranking) for ranking in RANKINGS)
    assert {*first} != {*second}
    return study


def located_of(study: Study, ranking: Ranking) -> list[il.Head]:
    return located_for_both(study.ranked_by(ranking), study.few(6))


def counted(study: Study, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that are asked for, by what they are of."""
    asked: list[str] = []
    run = study.passes.run
    monkeypatch.setattr(
        study.passes, "run", lambda what, *args, **kwargs: asked.append(what) or run(what, *args, **kwargs)
    )
    return asked


def odds_of(scores: torch.Tensor, batch: il.PromptBatch) -> np.ndarray:
    return label_log_odds(scores, batch.answer, choices=batch.label_mask).numpy()


def test_layers_are_blocked_once_and_each_ranking_has_its_heads(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(study, monkeypatch)
    tables = {}
    for ranking in RANKINGS:
        tables[ranking] = shallow_flow.table(study.ranked_by(ranking), shallow_flow.ShallowFlowConfig())
        blocked = [what for what in asked if "blocked" in what]
    assert len(blocked) == len({*blocked}) > 0
    rows = torch.cat(study.halves)
    batch = study.batch(FOO)[rows]
    edges = label_to_text(batch)
    for ranking, table in tables.items():
        for window in ("0–0", "2–2"):
            layer = int(window[0])
            with il.block_attention(study.model, [il.Head(layer, head) for head in range(study.view.n_heads)], edges):
                acts = il.capture(study.model, batch)
            attention = il.attention_to_labels(acts)
            own = torch.stack([attention[:, head.layer, head.head] for head in located_of(study, ranking)]).mean(0)
            true = batch.label_index == batch.answer[:, None]
            gap = (own * true).sum(-1) - (own * ~true).sum(-1)
            found = where(table, window=window, edges="own")
            assert list(found["prompt"]) == rows.tolist()
            np.testing.assert_allclose(found["gap"], gap, atol=1e-5)
    first, second = (tables[ranking]["gap"].to_numpy() for ranking in RANKINGS)
    assert np.abs(first - second).max() > 1e-3


def test_fixes_are_in_each_rankings_heads(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(study, monkeypatch)
    for ranking in RANKINGS:
        table = majority_bias.EXPERIMENT.table(study.ranked_by(ranking), BiasConfig(draws=1))
        heads = located_of(study, ranking)
        found = where(table, group="located", layout="against", asked="true", answer="foo")
        batch = study.batch(Variant("imbalanced"))[found["prompt"].tolist()]
        strength = float(found["strength"].iloc[0])
        with il.debias(study.model, batch, heads, majority=strength):
            np.testing.assert_allclose(found["odds"], odds_of(il.label_log_probs(study.model, batch), batch), atol=1e-4)
        controls = where(table, group="random", name="set 0")
        assert len(controls) == len(where(table, group="located"))
    assert [what for what in asked if "majority" in what] == ["majority, held out", "majority, tested"]


def test_swaps_are_in_each_rankings_heads(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(study, monkeypatch)
    for ranking in RANKINGS:
        table = two_tower.table(study.ranked_by(ranking), two_tower.TwoTowerConfig(draws=1))
        heads = located_of(study, ranking)
        row = int(study.test[0])  # prompts take turns in the cells, of which the first is the first prompt's
        prompt = study.prompts(two_tower.CELLS[0])[row]
        own = study.tokenize([prompt])
        before = odds_of(il.label_log_probs(study.model, own), own)
        sources = {
            "V, labels exchanged": study.tokenize([study.prompts(Variant(swapped=True))[row]]),
            "K, texts exchanged": study.tokenize([texts_exchanged(prompt)]),
        }
        for measure, source in sources.items():
            with il.patch_heads(
                study.model,
                heads,
                source,
                what="v" if measure[0] == "V" else "k",
                align="labels",
                into=own,
                seen_by="last",
            ):
                after = odds_of(il.label_log_probs(study.model, own), own)
            found = where(table, measure=measure, group="located", prompt=2 * row)
            np.testing.assert_allclose(found["value"], before - after, atol=1e-4)
    exchanged = [what for what in asked if "exchanged" in what and "q·k" not in what]
    assert exchanged == ["nothing exchanged", *(f"{what} exchanged" for what in "qkvkv")]


def test_kinds_of_edges_blocked_in_one_pass_are_those_blocked_alone(study: Study) -> None:
    rows, heads, window = study.test[:4], study.view.heads()[-2:], (0, 2)
    both = blocked.blocked(study, rows, [(None, "own"), (window, "own"), (window, "random")], heads)
    for place, kind in ((1, "own"), (2, "random")):
        alone = blocked.blocked(study, rows, [(window, kind)], heads)
        for name, values in alone.items():
            torch.testing.assert_close(both[name][:, place], values[:, 0], atol=1e-4, rtol=0)
    assert (both["odds"][:, 1] - both["odds"][:, 2]).abs().max() > 1e-3


def test_label_differences_are_those_of_logits(gpt2: Any, gpt2_batch: il.PromptBatch) -> None:
    acts, head = il.capture(gpt2, gpt2_batch), il.Head(1, 0)
    found = label_features.LabelDifferences((head,))(acts)[:, 0, :, 0]
    logits = acts.readout.using(final_norm="frozen", bias=False).logits(il.label_values(acts, head))
    foo, bar = gpt2_batch.label_tokens.tolist()
    for label in range(2):
        here = gpt2_batch.label_index == label
        expected = ((logits[..., foo] - logits[..., bar]) * here).sum(1) / here.sum(1)
        torch.testing.assert_close(found[:, label], expected, atol=1e-4, rtol=0, equal_nan=True)
    assert found.nan_to_num().abs().max() > 1e-3
