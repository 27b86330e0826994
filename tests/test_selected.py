"""`selected`: how often each head or edge is among the first k over resampled queries, recomputed
draw by draw.
"""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from test_html import Page

import icl_lens as il
from icl_lens.edits.edges import writer_means
from icl_lens.intervals import draw_clusters
from icl_lens.locate.edge_space import EdgeSpace
from icl_lens.locate.exchanges import single_exchanges, tower_prompts
from icl_lens.locate.located_heads import heads_result, heads_table
from icl_lens.locate.streamed_means import ResampledSums
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.models.view import ModelView

N, K = 24, 3
AGAIN = "when these queries are drawn again"


def by_draws(values, queries, k):
    """Rank the means of every draw in turn."""
    counts, query_of = draw_clusters(queries)
    often = np.zeros(values.shape[1])
    for draw in counts:
        rows = [row for row in range(len(values)) for _ in range(draw[query_of[row]])]
        mean = np.mean([values[row] for row in rows], axis=0)
        for item in sorted(range(len(mean)), key=lambda item: -mean[item])[:k]:
            often[item] += 1
    return often / len(counts)


def assert_shares(shares, expected):
    """Rounding may exchange two heads in a few of the 2,000 draws."""
    np.testing.assert_allclose(np.asarray(shares), expected, atol=2 / 2000)
    assert ((np.asarray(expected) > 0) & (np.asarray(expected) < 1)).any()


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, il.load_task("sentiment-number", n=N, layout="random", path=words))


@pytest.mark.parametrize("by", ["contrast", "increase"])
def test_located_heads(gpt2, many, by):
    """With heads that a second pass evaluates, and with those of which some are left out."""
    against = many.other_label_tokens if by == "contrast" else None
    increases = il.head_log_prob_increase(il.capture(gpt2, many), many.answer_tokens, against=against)
    expected = by_draws(increases.flatten(1).double().numpy(), many.queries, K)
    top = il.locate_heads(gpt2, many, k=K, by=by, run=il.Run(batch_size=5), slack=1e6)
    assert top.n_exact == top.n_parts
    assert_shares(top.selected, expected[top.layer * 4 + top.head])
    table, text = heads_table(top), f"the head is among the first {K} {AGAIN} (random head: 25.0%)"
    assert table["selected"].tolist() == top.selected.tolist()
    assert heads_result(top)["expected_selected"] == K / 12
    for text_of_table in (repr(top), " ".join(Page(top.to_html()).text.split())):
        assert text in text_of_table
        assert all(f"{share:.1%}" in text_of_table for share in top.selected.tolist())


def test_heads_without_exact_means_are_not_ranked(icl_mini, monkeypatch):
    """This only raises the shares: by little, because 20 candidates more than k are evaluated."""
    many = il.tokenize(icl_mini, il.load_task("sentiment-number", n=20))
    all_increases = (
        il.head_log_prob_increase(il.capture(icl_mini, many), many.answer_tokens).flatten(1).double().numpy()
    )
    whole = by_draws(all_increases, many.queries, 9)
    for margin, largest in ((20, 0.02), (0, 0.2)):
        monkeypatch.setattr("icl_lens.locate.locate.MARGIN", margin)
        top = il.locate_heads(icl_mini, many, k=9, by="increase")
        assert top.n_exact < top.n_parts
        difference = top.selected.numpy() - whole[top.layer * 6 + top.head]
        assert -2 / 2000 <= difference.min() <= difference.max() < largest
    assert difference.max() > 0.02


def test_heads_located_by_effect(gpt2, many):
    effects, effects_by_prompt = (
        il.locate_effects(gpt2, many, k=K, run=il.Run(batch_size=7)),
        il.head_effects(gpt2, many),
    )
    for name in ("log_odds", "log_prob"):
        expected = by_draws(getattr(effects_by_prompt, name).flatten(1).double().numpy(), many.queries, K)
        assert_shares(getattr(effects, name).selected.flatten(), expected)
        assert expected.sum() == pytest.approx(K)
    frame = effects.to_frame()
    assert frame["selected"].tolist() == [float(effects.log_odds.selected[head]) for head in effects.top(12)]
    for text_of_table in (repr(effects), effects.summary().lower()):
        assert f"among the first {K} {AGAIN} (random head: 25.0%)" in text_of_table
    assert il.locate_effects(gpt2, many[:4]).k == 12  # 20, or all if there are fewer
    with pytest.raises(il.InputError, match=r"k must be between 1 and 12 \(heads\), got 13"):
        il.locate_effects(gpt2, many, k=13)


@pytest.mark.slow
def test_heads_located_by_towers(gpt2, many):
    many = many[:12]
    lost = single_exchanges(ModelView.of(gpt2), tower_prompts(gpt2, many))[0].double().flatten(2)
    exchanges = il.locate_towers(gpt2, many, k=K, run=il.Run(batch_size=7))
    for i, name in enumerate(("query", "keys", "values")):
        assert_shares(getattr(exchanges, name).selected.flatten(), by_draws(lost[:, i].numpy(), many.queries, K))
    scan = il.two_towers(gpt2, many.prompts[:4], k=K, scan_prompts=many.prompts, n_random=3)
    assert scan.scan["selected"].tolist() == exchanges.to_frame()["selected"].tolist()
    summary = json.loads(scan.to_json())["summary"]
    assert (summary["expected_selected"], summary["scan"][0]["selected"]) == (K / 12, scan.scan["selected"][0])
    text = " ".join(Page(scan.to_html()).text.split())
    assert f"among the first {K} {AGAIN} (random head: 25.0%)" in text
    assert all(f"{share:.1%}" in text for share in scan.scan["selected"])


@pytest.mark.slow
def test_edges_of_circuits(gpt2, words, tmp_path):
    """Edges are ranked by the size of their mean, on the prompts that rank them; a resumed run has
    the same bytes.
    """
    first, second = il.split_by_query(il.load_task("sentiment-number", n=60, layout="random", path=words), 16)
    ranking, testing = il.tokenize(gpt2, first), il.tokenize(gpt2, second[:4])
    heads, options = [il.Head(2, 1), il.Head(1, 3)], {"n_edges": 6, "n_random": 3}
    run = il.Run(tmp_path / "run", batch_size=5)
    circuit = il.locate_circuit(gpt2, ranking, testing, heads, **options, run=run)
    space, means = EdgeSpace.of(ModelView.of(gpt2), heads), writer_means(gpt2, ranking)
    estimates_by_prompt = space.flatten(estimate_effects(gpt2, ranking, heads, means, "last")).double().numpy()
    counts, query_of = draw_clusters(ranking.queries)
    often = np.zeros(len(space))
    for draw in counts:
        mean = sum(draw[query_of[row]] * estimates_by_prompt[row] for row in range(len(estimates_by_prompt)))
        often[np.argsort(-np.abs(mean))[:6]] += 1
    named = {str(space.edge(number)): share for number, share in enumerate(often / len(counts))}
    table = circuit.to_frame()
    assert (table["estimate"] < 0).any()
    assert_shares(table["selected"], [named[edge] for edge in table["edge"]])
    assert circuit.to_dict()["expected_selected"] == 6 / len(space)
    for text_of_table in (circuit.to_markdown(), " ".join(Page(circuit.to_html()).text.split())):
        assert f"the edge is among the first 6 {AGAIN} (random edge: {6 / len(space):.1%})" in text_of_table
        assert all(f"{share:.1%}" in text_of_table for share in table["selected"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*")}
    for name in ("estimates-00001.parquet", "edges.parquet", "edges.csv"):
        (tmp_path / "run" / name).unlink()
    again = il.locate_circuit(gpt2, ranking, testing, heads, **options, run=run)
    pd.testing.assert_frame_equal(again.edges, circuit.edges, check_exact=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*")} == files


@pytest.mark.slow
def test_a_single_query_selects_nothing(gpt2, many):
    of_one_query = many[[0, 0]]
    assert il.locate_heads(gpt2, of_one_query, k=K).selected is None
    assert "selected" not in repr(il.locate_heads(gpt2, of_one_query, k=K))
    effects = il.locate_effects(gpt2, of_one_query, k=K)
    assert bool(effects.log_odds.selected.isnan().all())
    assert effects.to_view().sections[0].texts()[0][3] == "–"
    circuit = il.locate_circuit(gpt2, of_one_query, many[:4], ["L2H1"], n_edges=2, n_random=3)
    assert circuit.edges["selected"].isna().all()
    assert [row[4] for row in circuit.to_view().sections[0].texts()] == ["–", "–"]


def test_planted_scores():
    """The first head always wins, two equal ones share the last place, two that are equal on
    average get half each.
    """
    rng = np.random.default_rng(0)
    counts = draw_clusters(list(map(str, range(400))), draws=300)[0]
    noise = rng.normal(size=400)
    noise -= noise.mean()
    equal = np.stack([noise + 9, noise, noise, np.full(400, -5.0)], axis=1)
    equal_on_average = np.stack([noise + 9, noise, -noise, np.full(400, -5.0)], axis=1)
    for values, tolerance in ((equal, 0), (equal_on_average, 0.1)):
        sums = ResampledSums(counts, 4)
        for query, row in enumerate(values):
            sums.add(row, query)
        shares = sums.selected(2, np.ones(400, int))
        np.testing.assert_allclose(shares, [1, 0.5, 0.5, 0], atol=tolerance)
        assert shares.sum() == pytest.approx(2)
        shares_of_two = sums.selected(1, np.ones(400, int), np.array([1, 3]))
        np.testing.assert_array_equal(shares_of_two, [np.nan, 1, np.nan, 0])
        signed, absolute = (
            sums.selected(1, np.ones(400, int), np.array([2, 3]), absolute=way) for way in (False, True)
        )
        assert (signed[2], absolute[3]) == (1, 1)


def test_files_without_it_are_read_or_refused(gpt2, many, tmp_path):
    """Located heads of earlier versions have no `selected`, and no digest; other results had
    another version.
    """
    path = tmp_path / "old.json"
    top = il.locate_heads(gpt2, many, k=K)
    saved = json.loads(top.to_json())
    del saved["selected"]
    path.write_text(json.dumps(saved))
    with pytest.raises(il.InputError, match="not those that were written"):
        il.results.TopHeads.load(path)
    del saved["digest"]
    path.write_text(json.dumps(saved))
    assert repr(il.results.TopHeads.load(path)) == repr(replace(top, selected=None))
    effects = il.locate_effects(gpt2, many[:4], k=K)
    path.write_text(json.dumps(json.loads(effects.to_json()) | {"version": 1}))
    with pytest.raises(il.InputError, match="must be 2, got 1"):
        il.results.MeanEffects.load(path)
    assert torch.equal(il.locate_heads(gpt2, many, k=K).selected, top.selected)
