"""Text to label: hops by hand, the planted mover, and models that answer in another way."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny_study import planted_study, tiny_study

import icl_lens as il
from experiments.findings import text_to_label
from experiments.findings.text_to_label import COLLECTORS, FINDING, MOVERS, QUERY, Hops, lost_without
from experiments.framework.study import clusters_of, thin_out
from icl_lens.intervals import cluster_weights
from icl_lens.metrics import label_log_odds


@pytest.fixture
def hops(gpt2, tmp_path, monkeypatch):
    """Hops of a tiny model whose comparing heads are all but one in the last layer."""
    monkeypatch.setattr(text_to_label, "scanned_heads", lambda study: [il.Head(2, 1), il.Head(2, 0), il.Head(0, 0)])
    study = tiny_study(gpt2, tmp_path, n=6)
    return Hops(study, study.halves()[0])


def test_movers_are_the_heads_of_largest_edges(hops):
    """On a tiny model, the order of exact effects is that of first-order effects."""
    found, batch = hops.ranked[MOVERS], hops.ranking
    assert hops.comparing == [il.Head(2, 1), il.Head(2, 0)]
    effects = {}
    for head in hops.study.view.heads():
        if head.layer < 2:
            edges = il.head_to_head_effects(
                hops.study.model, batch, hops.comparing, part="k", at="label", writers=[head], reference=batch
            )
            effects[head] = float(edges.log_odds.double().mean(0).sum())
    assert len(found.heads) == len(effects) // 2
    assert found.by_chance == 0.5
    ranks = sorted(effects, key=lambda head: -effects[head])
    assert set(found.heads) == set(ranks[: len(found.heads)])


def test_selected_is_the_share_of_draws_with_the_head(hops, monkeypatch):
    """Of three writers, one always leads, and the others change places with the queries that are drawn."""
    batch, names = hops.ranking, hops.writers(il.Head(2, 0))
    clusters = clusters_of(batch)
    assert len(set(clusters)) > 2
    values = torch.zeros(len(batch), 3, 6, len(names), dtype=torch.float64)
    first, second, third = (names.index(name) for name in ("L0H0", "L1H1", "L1H2"))
    values[..., first] = 9.0
    values[..., second] = torch.from_numpy((clusters == 0) * 1.0)[:, None, None]
    values[..., third] = torch.from_numpy((clusters == 1) * 1.0)[:, None, None]
    monkeypatch.setattr(text_to_label, "estimate_effects", lambda *args: {il.Head(2, 0): values})
    found = hops.rank([il.Head(2, 0)], "k", "label", "last", 2)
    assert found.heads[0] == il.Head(0, 0)
    chosen = Counter()
    draws = cluster_weights(clusters)
    for draw in draws:
        means = {name: sum(draw * values[:, 1, 0, names.index(name)].numpy()) for name in names if "H" in name}
        chosen.update(sorted(means, key=lambda name: -means[name])[:2])
    assert found.selected == pytest.approx([chosen[str(head)] / len(draws) for head in found.heads], abs=0.05)  # ties
    assert found.selected[0] == 1.0
    assert 0.2 < found.selected[1] < 0.8


def test_edges_of_each_hop_by_hand(hops):
    movers = [il.Head(1, 0), il.Head(0, 1)]
    hops.__dict__["ranked"] = {MOVERS: text_to_label.Ranked(movers, [1.0, 1.0], 0.5)}
    own, texts = "L2H1", hops.inputs(movers[0], [("v", "text")], "label")
    assert [str(edge) for edge in hops.keys(movers)][:2] == [f"L1H0 → {own}.k (label)", f"L0H1 → {own}.k (label)"]
    assert [edge.writer for edge in texts] == list(hops.writers(movers[0]))
    assert {str(edge) for edge in texts} >= {"L0H2 → L1H0.v (text) at label", "embed → L1H0.v (text) at label"}
    chains = hops.collected([il.Head(0, 2)])
    assert [str(edge) for edge in chains] == [  # no head comes before a mover in the first layer
        f"L0H2 → L1H0.v (other) at label → {one}.k (label)" for one in ("L2H1", "L2H0")
    ]
    assert [str(edge) for edge in hops.queries(movers)][:2] == [f"L1H0 → {own}.q", f"L0H1 → {own}.q"]


def test_losses_are_those_in_a_block(hops):
    study, batch = hops.study, thin_out(hops.study.held_out, 3)
    sets = {"keys": hops.keys([il.Head(1, 0)]), "nothing": [], "queries": hops.queries([il.Head(0, 1)])}
    found = lost_without(study, batch, hops.ranking, sets)
    intact = label_log_odds(il.score(study.model, batch), batch.answer)
    assert not found["nothing"].any()
    for name in ("keys", "queries"):
        with il.edited(study.model, il.WithoutEdges(sets[name], reference=hops.ranking), batch=batch):
            expected = intact - label_log_odds(il.score(study.model, batch), batch.answer)
        assert found[name] == pytest.approx(expected.numpy(), abs=1e-5)
        assert np.abs(found[name]).max() > 1e-4


@pytest.mark.slow
def test_the_planted_mover_is_found_and_takes_texts_from_their_own_tokens(tmp_path):
    study = planted_study("two-tower", tmp_path)
    found = FINDING.measure(study)
    rows = {row.measure: row for row in found.rows}
    assert {row.measure for row in found.rows} == {one.name for one in FINDING.measures}
    for name in (MOVERS, "heads", "texts", QUERY, "query text", "values"):
        assert rows[name].low > 1.0, name  # nats
    for name in ("between", "labels", COLLECTORS, "collected"):
        assert abs(rows[name].quantity) < 0.1, name
    heads = found.details[(found.details["hop"] == MOVERS) & (found.details["head"] != "")].iloc[0]
    assert (heads["head"], heads["selected"]) == ("L1H4", 1.0)
    assert heads["low"] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last-label", "majority"])
def test_nothing_moves_where_no_text_is_read(tmp_path, kind):
    for row in FINDING.measure(planted_study(kind, tmp_path)).rows:
        assert not row.low > 0.01, row
