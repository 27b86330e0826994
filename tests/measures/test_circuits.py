"""Circuits: planted edges are found, models without any show none, and tables follow from single
sets of edges.
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from planted import Kind, Planted, build
from planted_study import planted_study
from tolerance import assert_close

import icl_lens as il
from icl_lens.measures.edge_space import CURVE_INPUTS, THIRDS, EdgeSpace
from icl_lens.models.head import FFN
from icl_lens.models.view import ModelView
from icl_lens.reading.writer_groups import layer_of

TASK = "sentiment-number"
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2))]


def planted(kind: Kind, folder: Path, n: int, seed: int = 0) -> tuple[Planted, Any]:
    """Return the truth about a planted model, and a study of it on `n` prompts."""
    study = planted_study(kind, folder, n, seed)
    return build(kind, folder, seed=seed), study


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_planted_edges_come_first_and_carry_the_answer(tmp_path, seed):
    truth, study = planted("two-tower", tmp_path, 40, seed)
    (mover,), heads = truth.heads["mover"], truth.heads["two-tower"]
    circuit = il.locate_circuit(study.model, *study.halves(), heads, n_edges=24, n_random=6)
    expected = {il.Edge(head, "q", str(mover)) for head in heads}
    for head in heads:
        expected.add(il.Edge(head, "k", str(mover), "label"))
        expected.add(il.Edge(head, "v", "embed", "label"))
    check_first_edges(circuit.to_frame(), {str(edge) for edge in expected})
    first = circuit.to_frame("curve").set_index("kept").loc[24]
    assert first["low"] > 0.95
    assert first["random_high"] < 0.95
    assert first["difference_low"] > 0.3
    groups = circuit.to_frame("groups").set_index("group")
    carrying = groups[groups["effect"] > 1]
    inputs = ("query", "keys at the labels", "values at the labels")
    assert set(carrying.index) == {f"first third → {end}" for end in inputs}
    assert (carrying["difference_low"] > 1).all()
    assert groups["control"].abs().max() < 0.1
    layers = circuit.to_frame("layers").set_index("input")
    writes = {end: set(layers.loc[end].query("effect > 1")["layer"]) for end in CURVE_INPUTS}
    assert writes == dict(
        zip(CURVE_INPUTS, ({mover.layer}, {mover.layer}, set(), {-1}), strict=True)
    )
    assert "not better" not in " ".join(circuit.sentences())


def check_first_edges(table, names):
    """The first edges are exactly the named ones, and each of them matters more than any other."""
    first, later = table[: len(names)], table[len(names) :]
    assert set(first["edge"]) == names
    assert (first["low"] > 0).all()
    assert later["effect"].abs().max() < first["effect"].min()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_planted_edges_into_labels_come_first(tmp_path, seed):
    """The mover finds the nearest text by position, and copies its category, to labels and to the
    last token.
    """
    truth, study = planted("two-tower", tmp_path, 12, seed)
    (mover,), decoy = truth.heads["mover"], truth.heads["decoy"][0]
    heads = [
        mover,
        il.Head(mover.layer, (mover.head + 1) % 8),
        decoy,
    ]  # which reads the same labels, for nothing
    for reader_at, expected in (
        (
            "label",
            {("q", "pos_embed", "label"), ("k", "pos_embed", "text"), ("v", "embed", "text")},
        ),
        (
            "last",
            {("v", "embed", "query")},
        ),  # of all tokens near the last one, the query alone is a text
    ):
        edges = {str(il.Edge(mover, *edge, reader_at)) for edge in expected}
        circuit = il.locate_circuit(
            study.model, *study.halves(), heads, reader_at=reader_at, n_edges=6, n_random=3
        )
        table = circuit.to_frame()
        assert set(table["edge"][: len(edges)]) == edges  # precision and recall are 1
        assert table["effect"][len(edges) :].abs().max() < 0.4 < table["low"][: len(edges)].min()
        where = " at label tokens" if reader_at == "label" else ","
        assert f"edges into 3 heads{where}" in circuit.sentences()[0]


def test_planted_chains_carry_what_their_edges_do(tmp_path):
    """Labels get the category of the text before them from its embedding, through the mover's
    values, to keys.
    """
    truth, study = planted("two-tower", tmp_path, 12)
    (mover,), decoy, (ranking, testing) = (
        truth.heads["mover"],
        truth.heads["decoy"][0],
        study.halves(),
    )
    chain = il.Edge(mover, "v", "embed", "text", reader_at="label")
    finds = il.Edge(mover, "k", "pos_embed", "text", reader_at="label")
    unrelated_heads = [
        replace(chain, writer="F0"),
        replace(chain, role="label"),
        il.Edge(decoy, "v", str(mover), "label", "label"),
    ]
    writers = [str(mover), chain, finds, (chain, finds), *unrelated_heads]
    options = {"part": "k", "at": "label", "reference": ranking}
    edge_effects = il.head_to_head_effects(
        study.model, testing, truth.heads["two-tower"], writers=writers, **options
    )
    whole, moved, looked, moved_and_looked, *of_unrelated = (
        edge_effects.log_odds.mean(0).sum(0).tolist()
    )
    assert whole > 2
    assert moved == pytest.approx(whole, rel=0.05)
    assert moved_and_looked == pytest.approx(whole, rel=0.05)
    assert looked > 0.5 * whole  # without positions, the mover copies other texts
    assert max(map(abs, of_unrelated)) < 0.02 * whole
    assert edge_effects.writers[1:4:2] == (
        f"embed → {mover}.v (text) at label",
        f"2 edges → {mover} at label",
    )


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        slow("last-label", "last-label"),
        pytest.param("majority", "majority", marks=[pytest.mark.slow, pytest.mark.rotating]),
        slow("untrained", "decoy"),
    ],
)
def test_models_that_compare_nothing_have_no_query_or_key_edges(tmp_path, kind, role):
    """In balanced order, heads that copy the last label, or all labels, raise the other label as
    much as the answer.
    """
    truth, study = planted(kind, tmp_path, 40)
    heads = truth.heads[role] or tuple(il.Head(layer, 2) for layer in (4, 5, 6))
    circuit = il.locate_circuit(study.model, *study.halves(), heads, n_edges=4, n_random=3)
    groups = circuit.to_frame("groups").set_index("group")
    for third, end in itertools.product(THIRDS[:2], ("query", "keys at the labels")):
        name = f"{third} third → {end}"
        assert groups.loc[name, "low"] < 0.05, name
    assert not circuit.is_defined
    assert len(circuit.sentences()) == 1
    assert "not distinguishable from zero" in circuit.sentences()[0]


@pytest.fixture(scope="module")
def small(load_tiny, words):
    """Return a random model, prompts to rank and to test edges on, heads, and the circuit into
    these heads.
    """
    model = load_tiny("llama_gqa")
    ranking, testing = il.split_by_query(il.load_task(TASK, n=60, layout="random", path=words), 12)
    heads = [il.Head(2, 1), il.Head(1, 3)]
    return (
        model,
        ranking,
        testing,
        heads,
        il.locate_circuit(model, ranking, testing, heads, n_edges=5, n_random=3),
    )


def log_odds(model, batch, sets, reference):
    scores = il.score(
        model, batch, [[il.WithoutEdges(edges, reference=reference)] for edges in sets]
    )
    return torch.stack(
        [il.metrics.label_log_odds(set_scores, batch.answer) for set_scores in scores.unbind(1)],
        dim=1,
    )


def test_tables_follow_from_sets_of_edges(small):
    """Removed and kept sets, built edge by edge, and intervals by the general bootstrap."""
    model, ranking, testing, heads, circuit = small
    reference, batch = il.tokenize(model, ranking), il.tokenize(model, testing)
    space = EdgeSpace.of(ModelView.of(model), heads)
    all_edges = [space.edge(number) for number in range(len(space))]
    assert len(set(all_edges)) == len(all_edges) == circuit.n_all_edges == 11 * (11 + 6)
    edges = circuit.to_frame()
    edge_of_name = {str(edge): edge for edge in all_edges}
    first = [edge_of_name[name] for name in edges["edge"]]
    weaker_edges = [edge for edge in all_edges if edge not in first]
    without = [[*weaker_edges, edge] for edge in first]
    set_log_odds = log_odds(
        model,
        batch,
        [[], all_edges, weaker_edges, *([edge] for edge in first), *without],
        reference,
    ).double()
    m = set_log_odds.mean(0)
    assert_close(circuit.score("all")[0], m[0], scale=8.0)
    assert_close(circuit.score("none")[0], m[1], scale=8.0)
    assert_close(edges["effect"].to_numpy(), m[0] - m[3:8], scale=8.0)
    assert_close(edges["needed"].to_numpy(), m[2] - m[8:], scale=8.0)
    assert 0 < circuit.score("largest estimate left out")[0] <= edges["estimate"].abs().min()
    row = circuit.to_frame("curve").set_index("kept").loc[5]
    assert row["faithfulness"] == pytest.approx(float((m[2] - m[1]) / (m[0] - m[1])), rel=1e-3)
    queries = [prompt.query for prompt in testing]
    assert len(set(queries)) > 1
    for number in range(5):
        interval = il.metrics.bootstrap_interval(
            set_log_odds[:, 0] - set_log_odds[:, 3 + number], clusters=queries
        )
        assert_close(
            edges.loc[number, ["low", "high"]].tolist(), [interval.low, interval.high], scale=8.0
        )


def test_circuits_contain_edges_into_ffns_whose_groups_have_no_control(small):
    """The first edges' exact effects are those of single sets, with the same means."""
    model, ranking, testing, *_ = small
    readers = ["L2H1", "F1", "F2"]
    circuit = il.locate_circuit(model, ranking, testing, readers, n_edges=5, n_random=3)
    space = EdgeSpace.of(ModelView.of(model), [il.Head("L2H1"), FFN(1), FFN(2)])
    assert circuit.n_all_edges == len(space) == 11 * 11 + (1 + 5 + 4) + (1 + 10 + 4)
    assert circuit.readers == tuple(readers)
    assert circuit.readers_in_words == "1 head and 2 FFNs"
    edge_of_name = {str(edge): edge for edge in map(space.edge, range(len(space)))}
    first = circuit.to_frame().query("part == 'mlp_in'").iloc[:2]
    assert len(first) == 2
    reference, batch = il.tokenize(model, ranking), il.tokenize(model, testing)
    sets = [[], *([edge_of_name[name]] for name in first["edge"])]
    m = log_odds(model, batch, sets, reference).double().mean(0)
    assert_close(first["effect"].to_numpy(), m[0] - m[1:], scale=8.0)
    groups = circuit.to_frame("groups").set_index("group")
    is_of_ffns = groups.index.str.endswith("FFNs")
    assert is_of_ffns.sum() == 3
    assert groups["control"].isna().tolist() == is_of_ffns.tolist()
    large = circuit.groups.assign(effect=2.0, low=1.0, high=3.0)
    scores = circuit.scores.assign(low=0.5, high=1.5)
    large = large.assign(difference_low=np.where(is_of_ffns, np.nan, 0.1))
    *_, sentence = replace(circuit, groups=large, scores=scores).sentences()
    assert "first third → query (+2.00)" in sentence
    assert "FFNs" not in sentence
    no_larger = large.assign(difference_low=large["difference_low"] - 0.2)
    *_, sentence = replace(circuit, groups=no_larger, scores=scores).sentences()
    assert sentence == (
        "No group of edges into heads has a drop that is shown to be above zero and above that "
        "of the same group into random heads; groups into FFNs have no control."
    )
    *_, sentence = replace(circuit, groups=large[is_of_ffns], scores=scores).sentences()
    assert sentence == (
        "No group of edges was compared with the same group into random heads: groups into FFNs "
        "have no control."
    )
    assert set(circuit.to_frame("layers")["input"]) == {*CURVE_INPUTS, "FFNs"}


def test_areas_are_trapezoids_from_no_edge_to_all(small):
    curve, circuit = small[-1].to_frame("curve"), small[-1]
    shares = [0, *curve["share"], 1]
    faithfulness = [0, *curve["faithfulness"], 1]
    assert circuit.score("cpr")[0] == pytest.approx(np.trapezoid(faithfulness, shares))
    assert circuit.score("cmd")[0] == pytest.approx(
        np.trapezoid(np.abs(1 - np.array(faithfulness)), shares)
    )
    assert circuit.score("cpr, difference")[0] == pytest.approx(
        circuit.score("cpr")[0] - np.trapezoid([0, *curve["random"], 1], shares)
    )


def test_groups_partition_the_edges_and_random_sets_match_strata(small):
    model, *_, heads, _ = small
    space = EdgeSpace.of(ModelView.of(model), heads)
    assert (sum(members.astype(int) for members in space.groups.values()) == 1).all()
    ranked = np.random.default_rng(1).permutation(len(space))
    small_set, large_set = space.random_like(ranked, [9, 60], seed=3)
    assert set(small_set) <= set(large_set)
    for size, edge_set in ((9, small_set), (60, large_set)):
        strata = []
        for edge_numbers in (edge_set, ranked[:size]):
            edges = map(space.edge, edge_numbers.tolist())
            strata.append(sorted((edge.part, edge.role, layer_of(edge.writer)) for edge in edges))
        assert strata[0] == strata[1]
    assert set(small_set) != set(ranked[:9])
    assert not np.array_equal(small_set, space.random_like(ranked, [9], seed=4)[0])


def test_estimates_rank_on_other_prompts(small):
    model, ranking, testing, heads, circuit = small
    of_fewer_prompts = il.locate_circuit(model, ranking, testing[:5], heads, n_edges=5, n_random=3)
    assert of_fewer_prompts.to_frame()["estimate"].tolist() == pytest.approx(
        circuit.to_frame()["estimate"].tolist(), abs=1e-5
    )
    assert circuit.to_frame()["estimate"].abs().is_monotonic_decreasing
    notes = " ".join(" ".join(section.notes) for section in circuit.to_view().sections)
    assert f"on {len(ranking)} prompts and tested on {len(testing)} others" in notes
    assert json.loads(json.dumps(circuit.to_dict()))["readers"] == ["L2H1", "L1H3"]


def test_sentences_say_no_where_intervals_do(small):
    """On made-up tables: edges that are no better than random, groups that matter no more than in
    random heads.
    """
    circuit = small[-1]
    scores = circuit.scores.assign(low=0.5, high=1.5)
    curve = circuit.curve.assign(faithfulness=0.9, low=0.8, high=1.0, random=-0.001, difference=0.8)
    good = curve.assign(difference_low=0.1, difference_high=0.9)
    groups = circuit.groups.assign(
        effect=2.0, low=1.0, high=3.0, difference=1.0, difference_low=0.1, difference_high=2.0
    )
    carried, kept_sentence, removed = replace(
        circuit, scores=scores, curve=good, groups=groups
    ).sentences()
    assert "not" not in carried + kept_sentence
    assert kept_sentence.endswith("keep 0%.")
    assert "first third → query (+2.00)" in removed
    no_better = curve.assign(difference_low=-0.1, difference_high=0.9)
    for changed in (
        {"difference_low": -0.1},
        {"low": -0.1},
    ):  # no more than in random heads; not above zero itself
        *_, kept_sentence, removed = replace(
            circuit, scores=scores, curve=no_better, groups=groups.assign(**changed)
        ).sentences()
        assert "not shown that they keep more" in kept_sentence
        assert removed == (
            "No group of edges has a drop that is shown to be above zero and above that of the "
            "same group into random heads."
        )
    undefined = replace(circuit, scores=scores.assign(low=-0.5), curve=good, groups=groups)
    assert not undefined.is_defined
    assert "which is not distinguishable from zero" in " ".join(undefined.sentences())
    assert "nothing distinguishable" in undefined.to_view().title
    few = replace(undefined, scores=scores.assign(low=math.nan, high=math.nan))
    (sentence,) = few.sentences()
    assert "fewer than 4 queries give no interval" in sentence
    assert "distinguishable" not in sentence + few.to_view().title
    assert few.to_view().title.endswith("too few queries to say what they carry")


def defined(circuit, drops, **columns):
    """Return a circuit whose groups have these drops, all above zero and above random heads, and
    the others none.
    """
    effects = [*drops, *[-1.0] * (len(circuit.groups) - len(drops))]
    groups = circuit.groups.assign(
        effect=effects, low=[1e-4 if effect > 0 else -2.0 for effect in effects], high=3.0
    )
    groups = groups.assign(difference=1.0, difference_low=0.1, difference_high=2.0)
    scores = circuit.scores.assign(low=0.5, high=1.5)
    return replace(circuit, groups=groups.assign(**columns), scores=scores)


SHOWN = "shown to be above zero and above that of the same group"


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ([0.00501], f"Groups of edges whose drop, when they are removed, is {SHOWN}s"),
        (
            [0.00499],
            f"No group of edges has a drop that rounds to 0.01 nats or more and is {SHOWN}",
        ),
        (
            [2.0, 0.00499],
            "Groups of edges whose drop, when they are removed, rounds to 0.01 nats or more and is "
            f"{SHOWN}s",
        ),
        ([], f"No group of edges has a drop that is {SHOWN}"),
    ],
)
def test_the_smallest_drop_is_said_where_it_leaves_out_a_group(small, drops, expected):
    *_, sentence = defined(small[-1], drops).sentences()
    assert sentence.startswith(f"{expected} into random heads")
    assert sentence.count("(+") == sum(drop > 0.005 for drop in drops)
    assert "+0.00)" not in sentence


def test_the_groups_with_the_largest_drops_are_named(small):
    """Not those with the largest differences, which the sentence does not have."""
    circuit = small[-1]
    n_groups = len(circuit.groups)
    drops, differences = [0.02, 0.04, 0.06, 0.08, 0.3], np.linspace(2, 1, n_groups)
    *_, sentence = defined(circuit, drops, difference=differences).sentences()
    groups = circuit.groups["group"].tolist()
    named = [f"{groups[place]} (+{drops[place]:.2f})" for place in (4, 3, 2, 1)]
    assert sentence.endswith(f" into random heads: {', '.join(named)} and 1 more.")
    *_, sentence = defined(circuit, drops[:4], difference=differences).sentences()
    assert sentence.endswith(f"{', '.join(named[1:])} and {groups[0]} (+0.02).")


@pytest.mark.parametrize(
    ("n_others", "expected"),
    [
        (0, None),
        (1, "The largest first-order effect of the other edge is "),
        (2, "The largest first-order effect of the other 2 edges is "),
    ],
)
def test_the_largest_effect_of_other_edges_is_said_only_of_a_part_of_them(
    small, n_others, expected
):
    circuit = small[-1]
    circuit = replace(circuit, n_all_edges=len(circuit.edges) + n_others)
    notes = " ".join(circuit.to_view().sections[0].notes)
    largest = circuit.score("largest estimate left out")[0]
    if expected is None:
        assert "first-order" not in notes
    else:
        assert f"{expected}{largest:.3f} nats." in notes
