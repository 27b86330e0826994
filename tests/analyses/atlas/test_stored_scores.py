"""Scores of heads from the files of others, and two scores against each other."""

import json

import pytest
import torch

import icl_lens as il
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import HeadScore


@pytest.fixture
def atlas():
    rising = torch.arange(6.0).double().reshape(2, 3)
    scores = {
        "induction": HeadScore.of(DEFINITIONS["induction"], rising),
        "copying": HeadScore.of(DEFINITIONS["copying"], -rising),
        "effect": HeadScore.of(DEFINITIONS["effect"], rising.square()),
    }
    return HeadAtlas("tiny", scores, {}, k=2)


FILES = {
    "list.json": json.dumps([[0, 1, 0.5], [1, 2, -0.25]]),
    "objects.json": json.dumps(
        [{"layer": 0, "head": 1, "score": 0.5}, {"layer": 1, "head": 2, "score": -0.25}]
    ),
    "retrieval.json": json.dumps({"0-1": [0.25, 0.75], "1-2": [-0.25]}),
    "feucht.json": json.dumps(
        [{"layer": 0, "head_idx": 1, "score": 0.5}, {"layer": 1, "head_idx": 2, "score": -0.25}]
    ),
    "nested.json": json.dumps(
        {
            "next_tok_attn": [
                {"layer": 0, "head_idx": 1, "score": 0.5},
                {"layer": 1, "head_idx": 2, "score": -0.25},
            ]
        }
    ),
    "locos.json": json.dumps(
        {"meta": {"model": "tiny"}, "scores": {"0-1": [0.5, 0.5], "1-2": [-0.25], "1-1": []}}
    ),
    "names.json": json.dumps({"L0H1": 0.5, "L1H2": -0.25}),
    "table.csv": "layer,head,name,score\n0,1,L0H1,0.5\n1,2,L1H2,-0.25\n",
}


@pytest.mark.parametrize("name", FILES)
def test_stored_scores_join_as_columns(atlas, tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    joined = atlas.with_scores(path)
    (column,) = set(joined.scores) - set(atlas.scores)
    mean = joined[column].mean
    assert (mean[0, 1], mean[1, 2], int(mean.isnan().sum())) == (0.5, -0.25, 4)
    assert joined[column].top(9) == [il.Head(0, 1), il.Head(1, 2)]
    assert joined[column].source == name
    joined.save(tmp_path / "atlas.json")
    assert il.results.HeadAtlas.load(tmp_path / "atlas.json").to_frame().equals(joined.to_frame())


def test_scores_of_a_nested_file_keep_their_names(atlas, tmp_path):
    path = tmp_path / "n2048.json"
    lists = {"next_tok_attn": [[0, 1, 0.5]], "induction": [[1, 2, 0.25]]}
    path.write_text(json.dumps(lists), encoding="utf-8")
    joined = atlas.with_scores(path)
    assert list(joined.scores)[3:] == ["next_tok_attn", "n2048_induction"]
    assert joined["n2048_induction"].mean[1, 2] == 0.25


def test_scores_joined_under_one_name_are_all_kept_or_refused(atlas):
    joined = atlas.with_scores({"AIE": torch.zeros(2, 3)}).with_scores({"AIE": torch.ones(2, 3)})
    assert list(joined.scores)[3:] == ["AIE", "given_AIE"]
    assert [float(joined[name].mean[0, 0]) for name in ("AIE", "given_AIE")] == [0, 1]
    with pytest.raises(il.InputError, match="has a score 'given_AIE' already"):
        joined.with_scores({"AIE": torch.zeros(2, 3)})


def test_tensors_and_rows_join_as_files_do(atlas):
    published = [(0, 1, 0.0587), (1, 2, 0.0584)]
    effects = torch.arange(6.0).reshape(2, 3)
    joined = atlas.with_scores({"published": published, "AIE": effects})
    assert joined["published"].top(3) == [il.Head(0, 1), il.Head(1, 2)]
    assert torch.equal(joined["AIE"].mean, effects.double())
    assert joined["AIE"].samples == "given as numbers"


def test_other_numbers_get_one_sentence(atlas, no_type_checks):
    with pytest.raises(il.InputError, match="take the mean over prompts first"):
        atlas.with_scores({"AIE": torch.zeros(5, 2, 3)})
    with pytest.raises(il.InputError, match="must be a tensor"):
        atlas.with_scores({"AIE": [0.5, 0.25]})
    with pytest.raises(il.InputError, match="must list heads of tiny"):
        atlas.with_scores({"AIE": torch.zeros(3, 3)})


def test_a_name_of_a_score_is_no_formula_in_a_spreadsheet(atlas, tmp_path):
    joined = atlas.with_scores({"=1+1": torch.zeros(atlas.shape)})
    joined.to_csv(tmp_path / "scores.csv")
    header = (tmp_path / "scores.csv").read_text().splitlines()[0].split(",")
    assert "'=1+1" in header


def test_a_table_of_an_atlas_comes_back(atlas, tmp_path):
    atlas.to_csv(tmp_path / "other.csv")
    joined = atlas.with_scores(tmp_path / "other.csv")
    assert torch.equal(joined["other_effect"].mean, atlas["effect"].mean)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "has no scores of heads"),
        ("a.json", json.dumps([[9, 0, 1.0]]), "must list heads of tiny"),
        ("a.json", json.dumps({"layer": "x"}), "has no scores of heads"),
        ("a.json", '{"AIE": [[0, 0, 1.0]], "AIE": [[0, 0, 2.0]]}', "the key 'AIE' occurs twice"),
        ("a.csv", "a,b\n1,2\n", "has no scores of heads"),
        ("a.csv", "layer,head,score\n", "has no scores of heads"),
    ],
)
def test_other_files_get_one_sentence(atlas, tmp_path, name, text, words):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(il.InputError, match=words):
        atlas.with_scores(tmp_path / name)
    with pytest.raises(il.InputError, match="cannot read"):
        atlas.with_scores(tmp_path / "missing.json")


def test_agreements_are_rank_correlations_and_shared_heads(atlas):
    rows = {(row.first, row.second): row for row in atlas.agreements().itertuples()}
    assert rows["induction", "effect"].spearman == pytest.approx(1)
    assert rows["induction", "copying"].spearman == pytest.approx(-1)
    assert rows["induction", "effect"].shared == 2
    assert rows["induction", "copying"].shared == 0
    assert rows["copying", "effect"].expected == pytest.approx(2 * 2 / 6)


def test_published_heads_are_the_authors_lists_with_their_license(atlas):
    published = il.published_heads("GPT-J")
    # The first ten of the authors' file.
    names = "L15H5 L9H14 L12H10 L8H1 L11H0 L13H13 L8H0 L14H9 L9H2 L24H6"
    assert list(map(str, published.top(10))) == names.split()
    frame = published.to_frame()
    assert frame["score"].is_monotonic_decreasing
    assert len(frame) == 40
    assert frame["layer"].max() < 28
    assert frame["head"].max() < 16
    assert "MIT License" in published.license
    assert "Eric Todd" in published.license
    assert "Permission is hereby granted" in published.license
    assert "2310.15213" in published.source
    with pytest.raises(il.InputError, match="name must be one of 'gpt-j'"):
        il.published_heads("gpt-5")
    with pytest.raises(il.InputError, match="must list heads of tiny"):
        atlas.with_scores(published)


def test_published_heads_join_an_atlas_of_their_model():
    induction = HeadScore.of(DEFINITIONS["induction"], torch.rand(28, 16))
    of_gpt_j = HeadAtlas("gpt-j", {"induction": induction}, {}, k=12)
    joined = of_gpt_j.with_scores(il.published_heads("gpt-j"))
    column = joined["published_indirect_effect"]
    assert column.top(2) == [il.Head(15, 5), il.Head(9, 14)]
    assert float(column.mean[15, 5]) == 0.0587
    assert int(column.mean.isnan().sum()) == 28 * 16 - 40
    assert "2310.15213" in column.source
    assert column.samples == "from a published list"
    with pytest.raises(il.InputError, match="has a score 'published_indirect_effect' already"):
        joined.with_scores(il.published_heads("gpt-j"))
