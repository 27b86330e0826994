"""`selected`: how often each head or edge is among the first k over resampled queries, recomputed
draw by draw.
"""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from cases import slow
from page_elements import Page

import icl_lens as il
from icl_lens.edits.captured_writers import writer_means
from icl_lens.foundation.intervals import draw_clusters
from icl_lens.measures.edge_space import EdgeSpace
from icl_lens.measures.exchanges import single_exchanges, tower_prompts
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.measures.ranking_means import (
    SHARE_LIMITS,
    mean_score,
    mean_score_of_heads,
    selected_shares,
)
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

N, K = 24, 3
AGAIN = "when these queries are drawn again"


def by_draws(values, queries, k):
    """Rank the means of every draw in turn."""
    counts, query_of = draw_clusters(queries)
    often = np.zeros(values.shape[1])
    for draw in counts:
        rows = np.repeat(np.arange(len(values)), [draw[query] for query in query_of]).tolist()
        mean = np.mean([values[row] for row in rows], axis=0)
        for item in sorted(range(len(mean)), key=lambda item: -mean[item])[:k]:
            often[item] += 1
    return often / len(counts)


def assert_shares(located_heads, expected):
    """Rounding may exchange two heads in a few of the 2,000 draws."""
    np.testing.assert_allclose(np.asarray(located_heads), expected, atol=2 / 2000)
    assert ((np.asarray(expected) > 0) & (np.asarray(expected) < 1)).any()


@pytest.fixture(scope="module")
def many(gpt2, words):
    return il.tokenize(gpt2, il.load_task("sentiment-number", n=N, layout="random", path=words))


@pytest.mark.parametrize("by", ["contrast", slow("increase")])
def test_located_heads(gpt2, many, by):
    against = many.other_label_tokens if by == "contrast" else None
    all_scores = il.head_log_prob_increase(
        il.capture(gpt2, many), many.answer_tokens, against=against
    )
    expected = by_draws(all_scores.flatten(1).double().numpy(), many.queries, K)
    located = il.locate(gpt2, many, k=K, by=by, run=il.Run(batch_size=5))
    assert_shares(located.score.selected.flatten(), expected)
    assert located.to_frame()["selected"].tolist() == [
        float(located.score.selected[head]) for head in located.top(12)
    ]
    assert located.to_dict()["expected_selected"] == K / 12
    text = f"the head is among the first {K} {AGAIN} (random head: 25.0%)"
    for text in (repr(located), " ".join(Page(located.to_html()).text.split())):
        assert text in text
        assert all(f"{float(located.score.selected[head]):.1%}" in text for head in located.heads)


def test_heads_located_by_effect(gpt2, many):
    located = il.locate(gpt2, many, by="effect", k=K, run=il.Run(batch_size=7))
    effects = il.head_effects(gpt2, many)
    for name, values in (("effect", effects.log_odds), ("log_prob", effects.log_prob)):
        expected = by_draws(values.flatten(1).double().numpy(), many.queries, K)
        assert_shares(located.scores[name].selected.flatten(), expected)
        assert expected.sum() == pytest.approx(K)
    for text in (repr(located), located.summary().lower()):
        assert f"among the first {K} {AGAIN} (random head: 25.0%)" in text
    assert il.locate(gpt2, many[:4]).k == 12  # 20, or all if there are fewer
    with pytest.raises(il.InputError, match=r"k must be between 1 and 12 \(heads\), got 13"):
        il.locate(gpt2, many, k=13)


@pytest.mark.slow
def test_heads_located_by_exchange(gpt2, many):
    many = many[:12]
    lost = single_exchanges(ModelView.of(gpt2), tower_prompts(gpt2, many))[0].double().flatten(2)
    located_heads = il.locate(gpt2, many, by="exchange", k=K, run=il.Run(batch_size=7))
    for i, name in enumerate(("exchange", "keys", "values")):
        assert_shares(
            located_heads.scores[name].selected.flatten(),
            by_draws(lost[:, i].numpy(), many.queries, K),
        )
    scan = il.two_towers(gpt2, many.prompts[:4], k=K, scan_prompts=many.prompts, n_random=3)
    assert scan.scan["selected"].tolist() == located_heads.to_frame()["selected"].tolist()
    summary = json.loads(scan.to_json())["summary"]
    assert (summary["expected_selected"], summary["scan"][0]["selected"]) == (
        K / 12,
        scan.scan["selected"][0],
    )
    text = " ".join(Page(scan.to_html()).text.split())
    assert f"among the first {K} {AGAIN} (random head: 25.0%)" in text
    assert all(f"{share:.1%}" in text for share in scan.scan["selected"])


@pytest.mark.slow
def test_edges_of_circuits(gpt2, words, tmp_path):
    """Edges are ranked by the size of their mean, on the prompts that rank them; a resumed run has
    the same bytes.
    """
    first, second = il.split_by_query(
        il.load_task("sentiment-number", n=60, layout="random", path=words), 16
    )
    ranking, testing = il.tokenize(gpt2, first), il.tokenize(gpt2, second[:4])
    heads, options = [il.Head(2, 1), il.Head(1, 3)], {"n_edges": 6, "n_random": 3}
    run = il.Run(tmp_path / "run", batch_size=5)
    circuit = il.locate_circuit(gpt2, ranking, testing, heads, **options, run=run)
    space, means = EdgeSpace.of(ModelView.of(gpt2), heads), writer_means(gpt2, ranking)
    edge_rows = (
        space.flatten(estimate_effects(gpt2, ranking, heads, means, "last")).double().numpy()
    )
    counts, query_of = draw_clusters(ranking.queries)
    often = np.zeros(len(space))
    for draw in counts:
        mean = sum(draw[query_of[row]] * edge_rows[row] for row in range(len(edge_rows)))
        often[np.argsort(-np.abs(mean))[:6]] += 1
    named = {str(space.edge(number)): share for number, share in enumerate(often / len(counts))}
    table = circuit.to_frame()
    assert (table["estimate"] < 0).any()
    assert_shares(table["selected"], [named[edge] for edge in table["edge"]])
    assert circuit.to_dict()["expected_selected"] == 6 / len(space)
    for text in (circuit.to_markdown(), " ".join(Page(circuit.to_html()).text.split())):
        assert f"the edge is among the first 6 {AGAIN} (random edge: {6 / len(space):.1%})" in text
        assert all(f"{share:.1%}" in text for share in table["selected"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*")}
    for name in ("estimates-00001.parquet", "edges.parquet", "edges.csv"):
        (tmp_path / "run" / name).unlink()
    again = il.locate_circuit(gpt2, ranking, testing, heads, **options, run=run)
    pd.testing.assert_frame_equal(again.edges, circuit.edges, check_exact=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*")} == files


def test_intervals_of_shares_end_where_shares_do():
    shares = np.array([1.0, 1.0, 1.0, 0.9, 0.2, 1.0])
    scores = np.stack([shares, 1 - shares], axis=1)
    queries = list("abcdef")
    outside = mean_score("attention", scores[:, None], queries, 1)
    assert outside.high[0, 0] > 1
    assert outside.low[0, 1] < 0
    inside = mean_score("attention", scores[:, None], queries, 1, limits=SHARE_LIMITS)
    listed = mean_score_of_heads(
        scores, [Head(0, 0), Head(0, 1)], queries, (1, 2), limits=SHARE_LIMITS
    )
    for score in (inside, listed):
        assert (score.high[0, 0], score.low[0, 1]) == (1, 0)
        assert torch.equal(score.mean, outside.mean)
        assert torch.equal(score.low[0, 0], outside.low[0, 0])


@pytest.mark.slow
def test_two_queries_select_nothing():
    """Each draw of two queries has one of them: the head of largest mean may be in none."""
    scores = np.array([[9.0, 0.0, 5.0], [0.0, 9.0, 5.0]])
    assert np.isnan(selected_shares(scores, ["one", "two"], 1)).all()
    three = np.concatenate([scores, [[5.0, 5.0, 6.0]]])
    assert selected_shares(three, ["one", "two", "three"], 1).sum() == pytest.approx(1)


def selected_texts(result):
    """Return the column "selected" of a result's first table, as it is shown."""
    section = result.to_view().sections[0]
    (place,) = (place for place, column in enumerate(section.columns) if "selected" in column.name)
    return [row[place] for row in section.texts()]


def test_a_single_query_selects_nothing(gpt2, many):
    single_query = many[[0, 0]]
    located = il.locate(gpt2, single_query, k=K)
    assert bool(located.score.selected.isnan().all())
    assert selected_texts(located)[0] == "–"
    circuit = il.locate_circuit(gpt2, single_query, many[:4], ["L2H1"], n_edges=2, n_random=3)
    assert circuit.edges["selected"].isna().all()
    assert selected_texts(circuit) == ["–", "–"]


def test_planted_scores():
    """The first head always wins, two equal ones share the last place, two that are equal on
    average get half each.
    """
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    noise -= noise.mean()
    equal = np.stack([noise + 9, noise, noise, np.full(400, -5.0)], axis=1)
    equal_on_average = np.stack([noise + 9, noise, -noise, np.full(400, -5.0)], axis=1)
    queries = list(map(str, range(400)))
    for values, tolerance in ((equal, 0), (equal_on_average, 0.1)):
        shares = selected_shares(values, queries, 2)
        np.testing.assert_allclose(shares, [1, 0.5, 0.5, 0], atol=tolerance)
        assert shares.sum() == pytest.approx(2)
        signed, absolute = (
            selected_shares(values[:, 2:], queries, 1, absolute=way) for way in (False, True)
        )
        assert (signed[0], absolute[1]) == (1, 1)


def test_files_of_earlier_versions_are_refused(gpt2, many, tmp_path):
    """In one sentence; saved heads of `top_heads` once had intervals."""
    path = tmp_path / "old.json"
    top = il.top_heads(il.capture(gpt2, many), k=K)
    path.write_text(json.dumps(json.loads(top.to_json()) | {"version": 1}))
    with pytest.raises(il.InputError, match="must be 2, got 1"):
        il.results.TopHeads.load(path)
    path.write_text(json.dumps(json.loads(top.to_json()) | {"format": "icl-lens mean effects"}))
    with pytest.raises(
        il.InputError, match=r"of an earlier version .* measure it again with il\.locate"
    ):
        il.results.load(path)
