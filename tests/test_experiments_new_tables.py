"""Tables of causal-location, best-head and neighbours beside slow computations of the same, on three families."""

import json
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import icl_lens as il
from experiments.claims import ablation, best_head, causal_location, neighbours
from experiments.lab import editing
from experiments.lab.frames import where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Study, StudySettings, Variant
from icl_lens.metrics import label_log_odds

FAMILIES = ("gpt2", "gptj", "llama_gqa")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return str(path)


@pytest.fixture(params=FAMILIES)
def study(request: pytest.FixtureRequest, load_tiny: Any, words: str) -> Study:
    return Study(load_tiny(request.param), StudySettings(model="tiny", n=24, path=words))


def test_effects_are_those_of_removing_one_head_after_the_other(study: Study) -> None:
    rows = study.halves[0][:4]
    for ranking in ("increase", "contrast"):
        ranked = study.ranked_by(ranking)
        found = causal_location.effects_of(ranked, Variant(swapped=True), rows)
        batch = study.batch(Variant(swapped=True))[rows]

        def scored(batch: il.PromptBatch = batch, ranking: str = ranking) -> torch.Tensor:
            if ranking == "increase":
                return il.last_log_probs(study.model, batch).gather(1, batch.answer_tokens[:, None])[:, 0]
            scores = il.label_log_probs(study.model, batch)
            return label_log_odds(scores, batch.answer, choices=batch.label_mask)

        whole = scored()
        for head in (il.Head(0, 1), il.Head(2, 3)):
            with il.ablate_heads(study.model, [head], positions="last"):
                expected = whole - scored()
            torch.testing.assert_close(found[:, head.layer, head.head], expected.float(), atol=1e-4, rtol=1e-4)


def test_causally_located_heads_are_removed_on_the_other_half(study: Study) -> None:
    config = causal_location.CausalLocationConfig(draws=2, mean_draws=1, prompts=6, overlap_draws=20)
    table = causal_location.table(study, config)
    rows = study.halves[0][:6]
    effects = [causal_location.effects_of(study, variant, rows).mean(0) for variant in causal_location.VARIANTS]
    mean = effects[0] + effects[1]
    removed = where(table, measure="removal")
    located = [il.Head(*map(int, name[1:].split("H"))) for name in removed["heads"].iloc[0].split()]
    assert len(located) == 1 or all(mean[head] >= 0.1 * mean.max() for head in located)
    assert {*removed["prompt"]} == {*study.test.tolist()}
    assert not {*removed["prompt"]} & {*rows.tolist()}
    # What is compared is what is removed: so many heads of largest effect, and as many of largest increase.
    increases = sum(study.rises(variant)[rows].mean(0) for variant in causal_location.VARIANTS)
    assert {*located} == {*causal_location.best_heads(mean[None], len(located))}
    both = {*located} & {*causal_location.best_heads(increases[None], len(located))}
    overlap = where(table, measure="overlap")
    assert overlap["shared"].iloc[0] == pytest.approx(len(both) / len(located))
    assert len(overlap) == 21
    assert overlap[["shared", "layers"]].to_numpy().min() >= 0
    assert overlap[["shared", "layers"]].to_numpy().max() <= 1
    assert causal_location.claim(table).reason
    assert ablation.figure(removed).axes
    assert causal_location.figure(table).axes


def test_the_best_head_alone(study: Study) -> None:
    """Odds without it, and with it alone at the last position, are those of single edits."""
    table = best_head.table(study, best_head.BestHeadConfig(edited=1, prompts=3))
    both = [study.get(head_increases, Variant(swapped=swapped)) for swapped in (False, True)]
    mean = sum(one[study.halves[0]].mean(0) for one in both)
    best = il.Head.at(int(mean.argmax()), study.view.n_heads)
    assert best_head.best_two(study)[0] == best
    assert where(table, measure="attention", group="located")["name"].unique().tolist() == [str(best)]
    others = where(table, measure="rank", group="random")["name"].unique().tolist()
    same = [str(head) for head in study.view.heads() if head.layer == best.layer and head != best]
    assert sorted(others) == same, "none is left out for its values, the second best neither"
    second = str(best_head.best_two(study)[1])
    assert where(table, measure="rank", group="second")["name"].unique().tolist() == [second]
    batch = study.batch()[study.test[:3]]
    rest = [head for head in study.view.heads() if head != best]
    for edit, removed, positions in (("removed", [best], "all"), ("kept", rest, "last")):
        with il.ablate_heads(study.model, removed, positions=positions):
            scores = il.label_log_probs(study.model, batch)
        expected = label_log_odds(scores, batch.answer, choices=batch.label_mask)
        found = where(table, measure="removal", group="located", edit=edit, answer="foo")["odds"]
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    table = table.assign(query=table["prompt"])
    assert best_head.claim(table).reason.count("best head") == 2
    assert best_head.figure(table).axes


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_sets_without_heads_in_pieces_of_any_size(study: Study, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each block by itself says; the means that stand in place of heads are computed once for both labels."""
    sets = [[], [il.Head(0, 1)], [il.Head(1, 0), il.Head(2, 3)], [il.Head(2, 2)]]
    means = []
    own = editing.mean_z
    monkeypatch.setattr(editing, "mean_z", lambda *args: means.append(1) or own(*args))
    for variant in (editing.FOO, editing.BAR):
        found = editing.says_without(study, variant, study.test, sets, mode=mode, what="whole")
        with monkeypatch.context() as small:
            small.setattr(editing, "PIECE", 1)
            small.setattr(editing, "FEWEST_SETS", 1)
            pieces = editing.says_without(study, variant, study.test, sets, mode=mode, what="pieces")
        batch = study.batch(variant)[study.test]
        reference = None
        if mode == "mean":
            four = [Variant(swapped=swapped, asked=asked) for swapped in (False, True) for asked in ("true", "false")]
            reference = [study.batch(one)[study.halves[0][: editing.REFERENCE]] for one in four]
        for heads, whole, part in zip(sets, found, pieces, strict=True):
            with il.ablate_heads(study.model, heads, mode=mode, reference=reference) if heads else nullcontext():
                log_probs = il.last_log_probs(study.model, batch)
            labels = log_probs[:, batch.label_tokens]
            odds = label_log_odds(labels, batch.answer, choices=batch.label_mask)
            for frame in (whole, part):
                np.testing.assert_allclose(frame["odds"], odds.numpy(), atol=2e-5)
                assert frame["vocabulary"].tolist() == (log_probs.argmax(-1) == batch.answer_tokens).tolist()
    assert len(means) <= (mode == "mean")


def test_changes_of_scores_by_exchanged_texts(study: Study) -> None:
    """Beside loops over single prompts; and scores differ between labels as logarithms of attention do."""
    model, cell = study.model, Variant("reorder", swapped=True)
    prompts = study.prompts(cell)
    pool = neighbours.Pool.of(study.batch(cell))
    heads = [il.Head(1, 2), il.Head(2, 1)]
    every = [[prompts[row], *neighbours.exchanges(prompts[row], row, pool)] for row in range(24)]
    groups = [group for group in every if None not in group][:2]
    flat = [prompt for group in groups for prompt in group if prompt is not None]
    assert len(flat) == 12
    for group in groups:
        for i, prompt in enumerate(group[1:]):
            texts = [[*(one.text for one in p.demonstrations), p.query] for p in (group[0], prompt)]
            assert [j for j in range(5) if texts[0][j] != texts[1][j]] == [i]
            assert [one.label for one in prompt.demonstrations] == [one.label for one in group[0].demonstrations]
    acts = il.capture(model, il.tokenize(model, flat, labels=("foo", "bar")))
    found = neighbours.changes_of(acts, heads, torch.ones(12, dtype=torch.bool), 2)

    def score(keys_of: il.Prompt, query_of: il.Prompt, head: il.Head) -> list[float]:
        one, other = (il.capture(model, il.tokenize(model, [p], labels=("foo", "bar"))) for p in (keys_of, query_of))
        values = []
        for demo in range(4):
            apart = int(one.batch.last[0] - one.batch.label_positions[0, demo])
            rotates = "gpt2" not in study.view.architecture.lower()
            how = il.query_key_metric(model, head, distance=apart if rotates else None)
            values.append(float(how.scores(other.resid_pre[:, head.layer], one.label_resid_pre[:, head.layer, demo])))
        if keys_of is query_of:
            attention = il.attention_to_labels(one)[0, head.layer, head.head].log()
            expected = (attention - attention[0]).tolist()
            assert [value - values[0] for value in values] == pytest.approx(expected, abs=1e-4)
        return values

    for g, group in enumerate(groups):
        for h, head in enumerate(heads):
            base = np.array(score(group[0], group[0], head))
            by_text = [np.abs(np.array(score(other, group[0], head)) - base) for other in group[1:5]]
            labels = [np.mean([by_text[d - back][d] for d in (2, 3)]) for back in range(3)]
            np.testing.assert_allclose(found[g, h, 0], labels, atol=1e-4)
            changes = [np.array(score(group[0], group[i], head)) - base for i in (5, 4, 3)]
            query = [np.abs(one - one.mean()).mean() for one in changes]
            np.testing.assert_allclose(found[g, h, 1], query, atol=1e-4)
    usable = torch.ones(12, dtype=torch.bool)
    usable[5] = False
    lacking = neighbours.changes_of(acts, heads, usable, 2)
    assert bool(lacking[0, :, 1].isnan().all())
    torch.testing.assert_close(lacking[0, :, 0], found[0, :, 0])
    torch.testing.assert_close(lacking[1], found[1])


def test_neighbours_end_to_end(study: Study) -> None:
    table = neighbours.table(study, neighbours.NeighboursConfig(prompts=6, piece=2))
    assert {*table["prompt"]} == {*study.test[:6].tolist()}
    table = table.assign(query=table["prompt"])
    assert neighbours.claim(table).reason
    assert neighbours.figure(table)


def test_a_text_without_another_as_long_is_no_exchange(study: Study) -> None:
    prompt = study.prompts()[0]
    pool = neighbours.Pool.of(study.batch())
    longer = neighbours.Pool(pool.texts, dict.fromkeys(pool.length, 2))
    assert neighbours.exchanges(prompt, 0, longer) == [None] * 5
