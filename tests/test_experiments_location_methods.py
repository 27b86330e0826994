"""location-methods: its curves by hand, its verdict on made-up tables, and its orders of heads."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import icl_lens as il
from experiments.claims import heads_in_order, location_methods
from experiments.claims.location_methods import METHODS, Curves, LocationMethodsConfig
from experiments.lab.runner import run
from experiments.lab.study import Study, StudySettings, Variant

N, HEADS = 40, 8
COUNTS = [1, 2, 4]


def made(
    methods: dict[str, tuple[float, float]],
    *,
    random: tuple[float, float] = (0.2, 0.2),
    other: tuple[float, float] = (0.3, 0.3),
    whole: float = 10.0,
    spread: float = 0.02,
) -> pd.DataFrame:
    """What each method's heads keep and cost, as shares of what all heads add; random orders; methods not named."""
    rng = np.random.default_rng(0)
    ids = {"prompt": range(N), "query": np.arange(N) % 20, "other": np.arange(N) % 10}
    base = pd.DataFrame({**ids, "positions": "last", "mode": "zero", "layer": -1})
    frames = [
        base.assign(method="model", group="", name="", edit=edit, count=0, share=0.0, odds=value)
        for edit, value in (("all", whole), ("none", 0.0))
    ]
    orders = [("random", "random", f"set {i}", random) for i in range(3)]
    for method in METHODS:
        orders.append((method, "located", "own", methods.get(method, other)))
        orders += [(method, "random", f"set {i}", random) for i in range(3)]
    for method, group, name, (kept, cost) in orders:
        for count in COUNTS:
            for edit, share in (("kept", kept), ("removed", 1 - cost)):
                odds = whole * (share + rng.normal(0, spread, N))
                common = {"method": method, "group": group, "name": name, "edit": edit}
                frames.append(base.assign(**common, count=count, share=count / HEADS, odds=odds))
    return pd.concat(frames, ignore_index=True)


GOOD = {"increase": (0.8, 0.8)}


@pytest.mark.parametrize(
    ("population", "outcome"),
    [
        ({"methods": GOOD}, "supported"),
        ({"methods": GOOD, "random": (0.9, 0.1)}, "not supported"),  # other heads of the same layers keep more
        ({"methods": GOOD, "random": (0.1, 0.9)}, "not supported"),  # removing others costs more
        ({"methods": {**GOOD, "attention": (0.9, 0.5)}}, "not supported"),  # attention's heads keep more
        ({"methods": {**GOOD, "attention": (0.5, 0.9)}}, "not supported"),
        ({"methods": {**GOOD, "attention": (0.8, 0.5)}, "spread": 0.3}, "undecided"),
        ({"methods": GOOD, "whole": 1e-9}, "supported"),
        ({"methods": GOOD, "whole": 0.0}, "undecided"),  # no heads matter
        ({"methods": GOOD, "whole": -5.0}, "undecided"),  # all heads together hurt
    ],
)
def test_claim(population: dict[str, Any], outcome: str) -> None:
    judged = location_methods.claim(made(**population))
    assert judged.outcome == outcome, judged.reason
    assert (judged.p < 0.05) == (outcome != "undecided")


def test_a_method_that_ties_is_no_better() -> None:
    """The very same heads as attention's: the difference is none in every prompt."""
    table = made(GOOD)
    own = table.loc[(table["method"] == "increase") & (table["group"] == "located")]
    table = table.loc[~((table["method"] == "attention") & (table["group"] == "located"))]
    table = pd.concat([table, own.assign(method="attention")], ignore_index=True)
    assert location_methods.claim(table).outcome == "undecided"


def test_every_method_has_its_verdicts() -> None:
    table = made({**GOOD, "induction": (0.1, 0.1), "gradient": (0.9, 0.9), "attention": (0.5, 0.5)})
    found = location_methods.by_method(Curves.of(table, "last", "zero"))
    outcomes = {key: outcome for key, (outcome, _) in found.items()}
    assert ("attention", "attention") not in outcomes
    assert [outcomes["increase", other] for other in ("random", "attention")] == ["supported", "supported"]
    assert [outcomes["induction", other] for other in ("random", "attention")] == ["not supported", "not supported"]
    assert [outcomes["effect, all", other] for other in ("random", "attention")] == ["supported", "not supported"]
    alone = [v.p for v in Curves.of(table, "last", "zero").against_random("gradient")]
    assert found["gradient", "random"][1] >= max(alone), "their number is allowed for"
    reason = location_methods.claim(table).reason
    assert "attention to labels, with the number of methods allowed for: beaten by increase and gradient" in reason


def test_deep_heads_alone_are_no_find() -> None:
    """A ranking that beats heads of all layers, but no other heads of its own layers: not better than chance."""
    table = made({"increase": (0.6, 0.6)}, random=(0.6, 0.6), spread=0.001)
    anywhere = (table["method"] == "random") & (table["group"] == "random")
    table.loc[anywhere, "odds"] = np.where(table.loc[anywhere, "edit"] == "kept", 1.0, 9.0)
    curves = Curves.of(table, "last", "zero")
    assert (curves.area("kept", "increase") - curves.area("kept", "random", "random"))[1:].min() > 0
    assert location_methods.claim(table).outcome != "supported"


def test_areas_by_hand() -> None:
    """Kept 0.2, 0.4, 1.2 of 10 nats with 1, 2, 4 of 8 heads."""
    table = made({}, spread=0.0)
    mine = (table["method"] == "increase") & (table["group"] == "located") & (table["edit"] == "kept")
    table.loc[mine, "odds"] = table.loc[mine, "count"].map({1: 2.0, 2: 4.0, 4: 12.0})
    curves = Curves.of(table, "last", "zero")
    assert curves.counts == COUNTS
    assert curves.total == HEADS
    assert curves.area("kept", "increase")[0] == pytest.approx((0.2 / 2 + 0.4 + 1.2 / 2) / 2)
    cpr, cmd = curves.cpr("increase")
    # At shares 0, 1/8, 2/8, 4/8, 1: 0, 0.2, 0.4, 1.2, 1.
    assert cpr == pytest.approx(0.1 / 8 + 0.3 / 8 + 0.8 / 4 + 1.1 / 2)
    assert cmd == pytest.approx(0.9 / 8 + 0.7 / 8 + 0.4 / 4 + 0.1 / 2)
    assert curves.area("removed", "attention")[0] == pytest.approx(0.3)
    assert curves.matters().value == pytest.approx(10.0)


def test_what_is_drawn() -> None:
    figure = location_methods.figure(made(GOOD))
    assert len(figure.axes) == 3
    assert [text.get_text() for text in figure.axes[2].get_yticklabels()] == [*METHODS, "random"]


@pytest.mark.parametrize(("n", "counts"), [(12, [1, 2, 4, 8]), (8, [1, 2, 4]), (48, [1, 2, 4, 8, 16, 32]), (1, [])])
def test_counts(n: int, counts: list[int]) -> None:
    assert heads_in_order.counts_of(n) == counts


def test_random_orders_have_the_same_layers() -> None:
    order = [il.Head(layer, head) for head in range(5) for layer in (2, 0, 1)]
    shuffled = [heads_in_order.same_layers(order, random.Random(seed)) for seed in range(5)]
    for one in shuffled:
        assert [head.layer for head in one] == [head.layer for head in order]
        assert sorted(one) == sorted(order)
    assert len({*map(tuple, [*shuffled, order])}) > 3


# On a tiny model


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return str(path)


CONFIG = LocationMethodsConfig(ranked=3, judged=4, judged_at_all=2, controls=2, draws=2, timed=2)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_the_curves_are_those_of_single_ablations(load_tiny: Any, words: str, name: str) -> None:
    """One point of each setting, in all eight cells, by zeroing and averaging heads in passes of their own."""
    model = load_tiny(name)
    study = Study(model, StudySettings(model="tiny", n=20, path=words))
    table = heads_in_order.table(study, CONFIG)
    scores = heads_in_order.rankings(study, study.apart[0][:3])
    best = scores["gradient"].flatten().argsort(descending=True).tolist()
    order = [il.Head.at(i, 4) for i in best]
    for positions, mode in heads_in_order.SETTINGS:
        rows = study.apart[1][: 4 if positions == "last" else 2]
        reference = None
        if mode == "mean":
            chosen = study.apart[0][:25]
            cells = [(swapped, asked) for swapped in (False, True) for asked in ("true", "false")]
            reference = [study.batch(heads_in_order.Variant(swapped=s, asked=a))[chosen] for s, a in cells]
        for edit, removed in (("kept", order[2:]), ("removed", order[:2])):
            expected = []
            for cell in heads_in_order.VARIANTS:
                batch = study.batch(cell)[rows]
                with il.ablate_heads(model, removed, mode=mode, reference=reference, positions=positions):
                    found = il.label_log_probs(model, batch)
                at = torch.arange(len(rows))
                expected.append(found[at, batch.answer] - found[at, 1 - batch.answer])
            mine = table.query(
                f"positions == {positions!r} and mode == {mode!r} and method == 'gradient' and group == 'located' "
                f"and edit == {edit!r} and count == 2"
            )
            assert mine["prompt"].tolist() == rows.tolist()
            np.testing.assert_allclose(mine["odds"], torch.stack(expected).mean(0), atol=1e-5)


def test_scores_are_what_they_are_called(gpt2: Any, words: str) -> None:
    """By methods' own definitions, a cell and a prompt at a time."""
    study = Study(gpt2, StudySettings(model="tiny", n=20, path=words))
    rows = study.apart[0][:3]
    found = heads_in_order.rankings(study, rows)
    assert [*found] == [*METHODS]
    falls = torch.zeros(3, 4, dtype=torch.float64)
    attention = torch.zeros(3, 4, dtype=torch.float64)
    for cell in heads_in_order.VARIANTS:
        for row in rows.tolist():
            batch = study.batch(cell)[row]
            whole = il.label_log_probs(gpt2, batch)[0]
            answer = int(batch.answer[0])
            for head in study.view.heads():
                with il.ablate_heads(gpt2, [head]):
                    left = il.label_log_probs(gpt2, batch)[0]
                gap = (whole - left)[answer] - (whole - left)[1 - answer]
                falls[head] += float(gap) / 24
            acts = il.capture(gpt2, batch)
            for position in batch.label_positions[0]:
                attention += acts.pattern[0, :, :, position].double() / 24
    torch.testing.assert_close(found["effect, all"], falls, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["attention"], attention, atol=1e-5, rtol=0)


def test_models_of_many_heads_are_edited_at_all_positions_on_fewer_prompts(
    gpt2: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as many heads as prompts are meant for: a third of them, and where that is one, none to judge on."""
    study = Study(gpt2, StudySettings(model="tiny", n=20, path=words))
    monkeypatch.setattr(heads_in_order, "WHOLE", 4)
    for judged, asked in ((6, {"last": 4, "all": 2}), (5, {"last": 4})):
        table = heads_in_order.table(study, replace(CONFIG, judged_at_all=judged))
        assert table.groupby("positions")["prompt"].nunique().to_dict() == asked
    monkeypatch.setattr(heads_in_order, "SHARED", 6)  # half of the prompts
    table = heads_in_order.table(study, CONFIG)
    assert table["prompt"].nunique() == 2
    # Of no whole prompt: of one, with either label as the answer.
    one = study.apart[0][:1]
    monkeypatch.setattr(heads_in_order, "WHOLE", 1)
    cells = [study.batch(cell)[one] for cell in (Variant(), Variant(swapped=True))]
    first = torch.stack([il.head_effects(gpt2, batch, positions="all").log_odds[0].double() for batch in cells]).mean(0)
    found = heads_in_order.rankings(study, study.apart[0][:3])
    torch.testing.assert_close(found["effect, all"], first, atol=1e-5, rtol=0)
    assert "at all positions" not in location_methods.claim(table).reason
    assert location_methods.figure(table).axes


def test_times_are_in_no_other_file(gpt2: Any, words: str, tmp_path: Path) -> None:
    """Two runs: everything but seconds.json is the same to the byte."""
    experiment = replace(location_methods.EXPERIMENT, config=CONFIG)
    settings = StudySettings(model="tiny", n=20, path=words)
    for name in ("first", "second"):
        run([experiment], settings, load=lambda _: gpt2, out=tmp_path / name)
    folders = [tmp_path / name / "tiny" / "sentiment-number" / "location-methods" for name in ("first", "second")]
    files = sorted(path.name for path in folders[0].iterdir())
    assert files == ["figure.pdf", "figure.png", "result.json", "seconds.json", "table.csv", "table.parquet"]
    for name in files:
        if name != "seconds.json":
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    seconds = json.loads((folders[0] / "seconds.json").read_text())
    assert [*seconds] == [*METHODS]
    assert min(seconds.values()) > 0
