"""Why heads have a kind or none: sentences about chosen heads follow from made-up numbers, both ways."""

from dataclasses import fields, replace

import numpy as np
import pytest
import scipy.stats
import torch

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.head_atlas import Survey
from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import AttentionElsewhere, HeadScore
from icl_lens.analyses.atlas.kinds import KINDS, average_head_p_values, discoveries, q_values
from icl_lens.models.view import ModelView

SHAPE = (2, 3)
SMALL = 1e-4


def score(name, means, p_values, **fields):
    """Return a made-up score of six heads, with its p-values."""
    mean = torch.tensor(means).double().reshape(SHAPE)
    p_value = torch.tensor(p_values).double().reshape(SHAPE)
    of_heads = HeadScore.of(DEFINITIONS[name], mean, **fields)
    return replace(of_heads, kind=KINDS[name], p_value=p_value)


def atlas_of(*scores, heads=()):
    return HeadAtlas("tiny", {score.name: score for score in scores}, {}, k=2, heads=tuple(heads))


def ends(*values):
    return torch.tensor(values).double().reshape(SHAPE)


def test_q_values_are_those_of_scipy_and_agree_with_the_heads_that_are_discovered():
    generator = np.random.default_rng(0)
    for _ in range(20):
        p_values = torch.from_numpy(generator.random((4, 5)) ** 3)
        q = q_values(p_values)
        expected = scipy.stats.false_discovery_control(p_values.flatten().numpy(), method="bh")
        assert np.abs(q.flatten().numpy() - expected).max() < 1e-12
        assert torch.equal(q <= 0.1, discoveries(p_values, 0.1))


def test_the_finding_about_chosen_heads_counts_those_that_have_a_kind():
    induction = score("induction", [0.9, 0.8, 0.1, 0, 0, 0], [SMALL, SMALL, 1, 1, 1, 1])
    needed = score("effect", [0.9, 0, 0, 0, 0, 0], [SMALL, 1, 1, 1, 1, 1])
    atlas = atlas_of(induction, needed)
    assert atlas.heads_finding == ""
    assert "heads_finding" in atlas.to_dict()
    assert atlas.for_heads(["L0H0", "L1H2", "L0H1"]).heads_finding == (
        "Of these 3 heads, 2 have a kind: L0H0 induction and needed; L0H1 induction; L1H2 has none."
    )
    assert atlas.for_heads(["L1H2", "L0H1", "L1H1"]).heads_finding == (
        "Of these 3 heads, 1 has a kind: L0H1 induction; L1H2 and L1H1 have none."
    )
    assert atlas.for_heads(["L1H2", "L1H1"]).heads_finding == (
        "Of these 2 heads, none has a kind: L1H2 and L1H1."
    )
    assert atlas.for_heads(["L0H0"]).heads_finding == "L0H0 has kinds: induction and needed."
    assert atlas.for_heads(["L0H1"]).heads_finding == "L0H1 has a kind: induction."
    assert atlas.for_heads(["L1H0"]).heads_finding == "L1H0 has no kind."
    untested = atlas_of(replace(induction, kind="", p_value=None)).for_heads(["L0H0"])
    assert untested.heads_finding == "The kinds of L0H0 were not tested."
    for heads, message in (([], "at least one head"), (["L2H0"], "head must be in layers 0–1")):
        with pytest.raises(il.InputError, match=message):
            atlas.for_heads(heads)
    with pytest.raises(il.InputError, match="must be an iterable of heads"):
        atlas.for_heads("L0H0")


def test_a_head_has_its_rank_among_all_heads():
    induction = score("induction", [0.3, 0.9, 0.3, 0.1, 0.5, torch.nan], [1] * 6)
    ranks = [induction.rank(il.Head.from_index(place, 3)) for place in range(6)]
    assert ranks == [3, 1, 3, 5, 2, None]
    frame = atlas_of(induction, heads=[il.Head(1, 1), il.Head(0, 0)]).heads_frame()
    assert frame["name"].tolist() == ["L1H1", "L0H0"]
    assert frame["rank"].tolist() == [2, 3]


def test_a_head_without_a_kind_is_closest_to_the_kind_with_the_smallest_q_value():
    induction = score("induction", [0.2, 0.8, 0.1, 0, 0, 0], [0.02, 0.9, 1, 1, 1, 1])
    needed = score("effect", [0.4, 0.3, 0, 0, 0, 0], [0.3, 0.011, 1, 1, 1, 1])
    atlas = atlas_of(induction, needed)
    assert atlas.notes_on("L0H0") == [
        "L0H0 is closest to induction (0.20, 2 of 6), but has no kind: q = 0.12, and a kind needs "
        "0.05 or less (p = 0.02)."
    ]
    assert atlas.notes_on("L0H1") == [
        f"L0H1 is closest to needed ({needed.title} +0.30, 2 of 6), but has no kind: q = 0.066, and a "
        "kind needs 0.05 or less (p = 0.011)."
    ]
    with_kind = atlas_of(induction, replace(needed, p_value=ends(0.3, SMALL, 1, 1, 1, 1)))
    assert with_kind.notes_on("L0H1") == []
    below = atlas_of(score("effect", [-0.4, 0.3, 0, 0, 0, 0], [0.9, SMALL, 0.99, 1, 1, 1]))
    assert below.notes_on("L0H0") == [
        f"L0H0 is closest to needed ({needed.title} −0.40, 6 of 6), but has no kind: it is not above "
        "the mean absolute score of all heads (p = 0.9)."
    ]


@pytest.mark.parametrize(
    ("q_of_effect", "expected"),
    [
        (0.9951, "writes the answer (contrast +0.30, 2 of 6)"),  # printed as 1, as that of contrast
        (0.9849, "needed (effect +0.20, 5 of 6)"),  # printed as 0.98
    ],
)
def test_of_q_values_that_are_printed_alike_the_smaller_p_value_is_closer(q_of_effect, expected):
    """By effect, L0H0 has the largest p-value of all heads, so that its q-value is the same."""
    needed = score("effect", [0.2, 0.3, 0.4, 0.5, 0.6, 0.1], [q_of_effect, *[q_of_effect] * 5])
    writes = score("contrast", [0.3, 0.4, 0, 0, 0, 0], [0.25, 0.9, 1, 1, 1, 1])
    assert writes.q_value is not None
    assert writes.q_value[0, 0] == 1
    (note, *_) = atlas_of(needed, writes).notes_on("L0H0")
    assert note.startswith(f"L0H0 is closest to {expected}, but has no kind: ")


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ((0.9951, 0.9999), "writes the answer"),  # p = 1 by both; by contrast, it ranks first
        ((0.9849, 0.9951), "needed"),  # p = 0.98 against 1
    ],
)
def test_of_equal_q_and_p_values_the_higher_rank_is_closer(p_values, expected):
    needed = score("effect", [0.2, 0.3, 0, 0, 0, 0], [p_values[0], 1, 1, 1, 1, 1])
    writes = score("contrast", [0.4, 0.3, 0, 0, 0, 0], [p_values[1], 1, 1, 1, 1, 1])
    (note, *_) = atlas_of(needed, writes).notes_on("L0H0")
    assert note.startswith(f"L0H0 is closest to {expected} (")


def test_of_q_values_just_above_the_rate_the_smaller_is_closer():
    """Both would be rounded to the rate, and are printed with more digits."""
    needed = score("effect", [0.4, 0.3, 0, 0, 0, 0], [0.0504 / 6, 1, 1, 1, 1, 1])
    writes = score("contrast", [0.3, 0.4, 0, 0, 0, 0], [0.0503 / 6, 1, 1, 1, 1, 1])
    for scores in ((needed, writes), (writes, needed)):
        (note, *_) = atlas_of(*scores).notes_on("L0H0")
        assert note.startswith("L0H0 is closest to writes the answer")
        assert "q = 0.050300, " in note


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.054, "it attends as much to the token 5 back (0.05)"),
        (0.056, "it attends more to the token 5 back (0.06)"),
    ],
)
def test_a_head_attends_more_elsewhere_only_if_the_printed_shares_differ(share, expected):
    induction = score("induction", [0.05, 0.1, 0, 0, 0, 0], [1] * 6)
    elsewhere = AttentionElsewhere(ends(share, *[0] * 5), torch.full(SHAPE, 5), n_tokens=8)
    (note,) = atlas_of(replace(induction, elsewhere=elsewhere)).notes_on("L0H0")
    assert note == f"L0H0 is closest to induction (0.05, 2 of 6), but has no kind: {expected}."


def test_a_q_value_just_above_the_rate_is_not_rounded_to_it():
    p_values = [0.0504, 1, 1, 1, 1, 1]
    above = score("effect", [0.3, 0, 0, 0, 0, 0], [p / 6 for p in p_values])
    (note, *_) = atlas_of(above).notes_on("L0H0")
    assert "q = 0.050400, and a kind needs 0.05 or less" in note


def test_a_larger_score_without_the_kind_is_explained_by_what_the_head_attends_to():
    """The head attends more to the token before; with less attention to it, it has the kind."""
    names = [SMALL] * 2 + [1] * 4
    barred = score("induction", [0.2, 0.1, 0.26, 0, 0, 0], names)
    back = torch.tensor([[5, 5, 1], [8, 9, 0]])
    elsewhere = AttentionElsewhere(ends(0.1, 0.05, 0.4, 1, 1, 1), back, n_tokens=8)
    barred = replace(barred, elsewhere=elsewhere)
    atlas = atlas_of(barred, score("effect", [0] * 6, [SMALL] * 6))
    assert atlas.notes_on("L0H2") == [
        "L0H2 does not have the kind induction, although its 0.26 is larger than the 0.10 of L0H1, "
        "which has it: it attends more to the token before (0.40)."
    ]
    assert atlas.notes_on("L1H0") == []  # its score is smaller than those of heads of the kind
    words = [elsewhere.token(il.Head(*divmod(place, 3))) for place in range(1, 6)]
    assert words == [
        "the token 5 back",
        "the token before",
        "the earlier copy of the same token",
        "the token 9 back",
        "the token itself",
    ]
    assert (
        replace(elsewhere, n_tokens=10).token(il.Head(1, 1)) == "the token after the earlier copy"
    )
    nearer = replace(elsewhere, n_tokens=7)
    assert nearer.token(il.Head(0, 1)) == "the second token after the earlier copy"
    close = replace(barred, mean=ends(0.262, 0.5, 0.263, 0, 0, 0))
    (note,) = atlas_of(close, score("effect", [0] * 6, [SMALL] * 6)).notes_on("L0H2")
    assert "its 0.263 is larger than the 0.262 of L0H0" in note
    has_kind = replace(barred, p_value=ends(SMALL, SMALL, SMALL, 1, 1, 1))
    has_kind = replace(has_kind, elsewhere=replace(elsewhere, share=ends(*[0.05] * 6)))
    assert atlas_of(has_kind).notes_on("L0H2") == []
    of_an_earlier_version = replace(barred, elsewhere=None)
    (note,) = atlas_of(of_an_earlier_version, score("effect", [0] * 6, [SMALL] * 6)).notes_on(
        "L0H2"
    )
    assert note.endswith("which has it: it attends more to another token.")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (
            -0.1,
            0.9,
            "it varies more over queries, for its size (95% interval −0.10 … +0.90 against +0.15 … "
            "+0.25; p = 0.04 against 0.0001).",
        ),
        (0.39, 0.41, "the test is less sure of it (p = 0.04 against 0.0001)."),
    ],
)
def test_a_larger_score_without_the_kind_is_explained_by_its_queries(low, high, expected):
    effect = score(
        "effect",
        [0.4, 0.2, 0, 0, 0, 0],
        [0.04, SMALL, 1, 1, 1, 1],
        low=ends(low, 0.15, 0, 0, 0, 0),
        high=ends(high, 0.25, 0, 0, 0, 0),
    )
    atlas = atlas_of(effect, score("induction", [0] * 6, [SMALL] * 6))
    (note,) = atlas.notes_on("L0H0")
    start = (
        "L0H0 does not have the kind needed, although its effect of +0.40 is larger than the +0.20 of "
        "L0H1"
    )
    assert note == f"{start}, which has it: {expected}"


def test_heads_that_vary_over_queries_lose_their_kind_to_smaller_ones_that_do_not(gpt2):
    """The same explanation from a measured test: made-up values of 12 queries, not p-values."""
    survey = Survey(ModelView.of(gpt2), 4, 0)
    shape = (12, survey.view.n_layers, survey.view.n_heads)
    values = 0.001 * np.random.default_rng(0).normal(size=shape)
    values[:, 0, 0] = 1.0
    values[0, 0, 1] = 24.0  # a mean of 2, from a single query
    queries = [str(row) for row in range(12)]
    survey.add("effect", values, queries)
    survey.add("exchange", np.abs(values), queries)
    atlas = HeadAtlas("gpt2", survey.scores, {}, k=4)
    assert atlas.kinds["needed"] == [il.Head(0, 0)]
    notes = atlas.notes_on("L0H1")
    assert any("of +2.00 is larger than the +1.00 of L0H0" in note for note in notes)
    assert any("it varies more over queries, for its size" in note for note in notes)
    values[:, 0, 1] = 2.0
    p_value = average_head_p_values(values, queries, 0)
    assert p_value is not None
    assert discoveries(p_value, 0.05)[0, 1]


@pytest.fixture(scope="module")
def measured(gpt2):
    text = ["love like love hate one two", "the cat a dog the cat"]
    return il.head_atlas(gpt2, text=text, n_sequences=5, heads=["L2H1", "L0H3"])


def test_an_atlas_of_chosen_heads_has_the_numbers_of_all_heads(gpt2, measured):
    text = ["love like love hate one two", "the cat a dog the cat"]
    of_all = il.head_atlas(gpt2, text=text, n_sequences=5)
    assert measured.heads == (il.Head(2, 1), il.Head(0, 3))
    assert measured.to_frame().equals(of_all.to_frame())
    frame = measured.heads_frame()
    assert frame["name"].unique().tolist() == ["L2H1", "L0H3"]
    for row in frame.itertuples():
        of_score = of_all[row.score]
        head = il.Head(row.name)
        assert row.mean == float(of_score.mean[head])
        assert row.rank == 1 + int((of_score.mean > of_score.mean[head]).sum())
        assert row.has_kind == (head in of_score.heads_of_kind(of_all.rate))
        assert bool(row.reason) == (bool(row.kind) and not row.has_kind)
    assert len(of_all.heads_frame()) == 12 * len(of_all.scores)


def test_a_stored_atlas_has_the_chosen_heads_and_why_they_have_no_kind(measured, tmp_path):
    measured.save(tmp_path / "atlas.json")
    loaded = il.results.HeadAtlas.load(tmp_path / "atlas.json")
    assert loaded.heads_frame().equals(measured.heads_frame())
    elsewhere, stored = measured["induction"].elsewhere, loaded["induction"].elsewhere
    assert elsewhere is not None
    assert stored is not None
    assert torch.equal(stored.share, elsewhere.share)
    assert stored.n_tokens == elsewhere.n_tokens


def test_files_have_the_fields_that_they_had_when_kinds_were_called_names():
    """So that atlases that were saved then load, as version 1."""
    assert [field.name for field in fields(HeadAtlas)] == [
        *("model", "scores", "left_out", "k", "untested", "n_prompts", "n_queries", "n_edited"),
        *("rate", "removals", "n_held_out", "n_shared_queries", "heads", "n_listed", "edits"),
    ]
    assert [field.name for field in fields(HeadScore)] == [
        *("name", "title", "definition", "source", "unit", "over", "n", "cost"),
        *("mean", "low", "high", "selected", "kind", "p_value", "elsewhere"),
    ]
    assert HeadAtlas.version == 1


def test_what_is_printed_begins_with_the_chosen_heads(measured):
    text = str(measured)
    assert text.startswith(measured.heads_finding)
    lines = [line.split() for line in text.splitlines() if line.startswith("induction  ")]
    cells = []
    for head in measured.heads:
        value = measured["induction"].format(float(measured["induction"].mean[head]))
        cells += [value, f"({measured['induction'].rank(head)})"]
    assert [cell.rstrip("*") for cell in lines[0][1:]] == cells
    assert "Kinds of these heads" in text
    assert "Heads with a kind" not in text  # only the page lists the others
    assert "Heads with a kind" in str(replace(measured, heads=())) or not measured.kinds_by_head
    assert text.count("(* has the kind)") == 1
    (record, _) = measured.to_dict()["heads"]
    assert record["name"] == "L2H1"
    assert {row["score"] for row in record["scores"]} == set(measured.scores)


def test_attention_elsewhere_is_the_largest_to_another_number_of_tokens_back(gpt2, measured):
    """A head that attends more to another token has no kind, whatever its score."""
    for name in ("previous_token", "duplicate_token", "induction", "first_token"):
        of_score = measured[name]
        barred = of_score.mean <= of_score.elsewhere.share
        assert (of_score.p_value[barred] == 1).all()
        assert (of_score.p_value[~barred] < 1).any() or bool(barred.all())
        n_back = {"previous_token": 1, "duplicate_token": of_score.elsewhere.n_tokens}.get(name)
        assert n_back is None or (of_score.elsewhere.n_back != n_back).all()
    with pytest.raises(il.InputError, match="head must be in layers 0–2"):
        il.head_atlas(gpt2, heads=["L9H0"])
    with pytest.raises(il.InputError, match="at least one head"):
        il.head_atlas(gpt2, heads=[])


def test_a_table_lists_as_many_first_heads_as_k_says(gpt2):
    text = ["love like love hate one two"]
    few = il.head_atlas(gpt2, text=text, n_sequences=2, k=2)
    lines = str(few).splitlines()
    assert [line.split()[1:] for line in lines if line.startswith("score ")] == [
        ["first", "second"]
    ]
    many = il.head_atlas(gpt2, text=text, n_sequences=2, k=5)
    (line,) = [line for line in str(many).splitlines() if line.startswith("induction (share):")]
    assert [part.split()[0] for part in line.split(": ")[1].split(", ")] == list(
        map(str, many["induction"].top(5))
    )
    assert "third" in str(il.head_atlas(gpt2, text=text, n_sequences=2))
