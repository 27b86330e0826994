"""What an atlas says follows from its numbers: which heads have kinds, and the sentences."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sweep
import torch

import icl_lens as il
from icl_lens.analyses.atlas import head_atlas, kinds, turned_heads
from icl_lens.analyses.atlas.definitions import DEFINITIONS
from icl_lens.analyses.atlas.head_atlas import Survey
from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.analyses.atlas.kinds import KINDS, average_head_p_values, discoveries
from icl_lens.foundation.intervals import Interval
from icl_lens.measures.joint_removal import ListRemoval
from icl_lens.models.view import ModelView

SHAPE = (2, 3)


def made_up(p_values, **fields):
    """Return an atlas whose scores have these p-values by head; other heads have 1."""
    scores = {}
    for name, heads in p_values.items():
        p_value = torch.ones(SHAPE).double()
        for head, number in heads.items():
            p_value[head] = number
        rising = torch.arange(6.0).double().reshape(SHAPE)
        score = HeadScore.of(DEFINITIONS[name], rising)
        scores[name] = replace(score, kind=KINDS[name], p_value=p_value)
    return HeadAtlas("tiny", scores, {}, k=2, **fields)


def test_the_finding_counts_heads_and_the_heads_of_each_kind():
    atlas = made_up({"induction": {(1, 1): 1e-4}, "effect": {(1, 1): 1e-4, (0, 2): 1e-4}})
    assert atlas.finding == "2 of 6 heads of tiny have a kind: induction (1) and needed (2)."
    assert list(atlas.kinds_by_head) == [il.Head(1, 1), il.Head(0, 2)]  # most kinds first
    assert atlas.kinds["needed"] == [il.Head(1, 1), il.Head(0, 2)]  # largest score first
    atlas = made_up({"induction": {(0, 1): 1e-4, (1, 2): 1e-4}, "effect": {(1, 0): 1e-4}})
    # The first heads of both kinds, and then the second head of one.
    assert list(atlas.kinds_by_head) == [il.Head(1, 0), il.Head(1, 2), il.Head(0, 1)]
    atlas = made_up({"induction": {(1, 1): 1e-4}, "effect": {(1, 1): 1e-4}})
    assert atlas.finding == "1 of 6 heads of tiny has a kind: induction (1) and needed (1)."
    assert made_up({"effect": {(1, 1): 0.04}}).finding == (
        "None of 6 heads of tiny stands out by any of 1 kind."
    )
    untested = replace(
        atlas, scores={"copying": HeadScore.of(DEFINITIONS["copying"], torch.eye(3))}
    )
    assert untested.finding == "1 score of 9 heads of tiny; none of them was tested for kinds."


def test_a_kind_with_another_name_than_its_score_is_explained():
    """Induction is tested by the score of that name; "needed" by another, if a head has it."""
    page = made_up({"induction": {(1, 1): 1e-4}, "effect": {(1, 1): 1e-4}}).to_markdown()
    assert "“needed” is tested by effect." in page
    assert "“induction” is tested by" not in page
    no_needed_head = made_up({"induction": {(1, 1): 1e-4}, "effect": {}})
    assert "is tested by" not in no_needed_head.to_markdown()


def test_the_summary_names_the_nulls_that_were_used_and_the_kinds_that_were_not_tested():
    turned, average = (
        "turned against their keys",
        "the mean absolute score of all heads on the same prompts",
    )
    of_weights = made_up({"induction": {}}).summary()
    assert turned in of_weights
    assert average not in of_weights
    of_prompts = made_up({"effect": {}}, n_prompts=9, n_queries=8).summary()
    assert turned not in of_prompts
    assert average in of_prompts
    assert "means over 9 prompts with 8 distinct queries" in of_prompts
    assert "at most 5.0% are expected to have it by mistake" in of_prompts
    assert "Not tested" not in of_prompts
    assert "over the first 4." in made_up({"effect": {}}, n_prompts=9, n_edited=4).summary()
    for all_edited in ({"n_prompts": 9, "n_edited": 9}, {"n_prompts": 9, "n_edited": 4}):
        name = "effect" if all_edited["n_edited"] == 9 else "contrast"
        assert "over the first" not in made_up({name: {}}, **all_edited).summary()
    atlas = made_up({}, untested={"needed": "they need more", "compares": "they need more"})
    assert atlas.summary() == "Not tested: needed and compares, because they need more."


def removal(lost, difference, unit="nats", intact=1.5):
    """Return a made-up removal of two heads; random heads cost 0.1."""
    ends = {
        "lost": Interval(lost, lost - 0.2, lost + 0.2),
        "lost_by_random": Interval(0.1, 0.0, 0.2),
    }
    heads = (il.Head(0, 0), il.Head(1, 0))
    return ListRemoval(heads, intact=intact, difference=Interval(*difference), unit=unit, **ends)


def test_the_judge_says_by_which_scores_the_first_heads_matter():
    atlas = made_up({"induction": {}, "effect": {}, "promotes_attended": {}}, n_held_out=20)
    assert atlas.removal_finding == ""
    matters, more = removal(0.9, (0.8, 0.5, 1.1)), removal(1.2, (1.1, 0.9, 1.3))
    unclear, gains = removal(2.0, (1.9, -0.1, 3.9)), removal(-0.1, (0.2, 0.1, 0.3))
    judged = replace(
        atlas, removals={"induction": matters, "effect": more, "promotes_attended": unclear}
    )
    assert judged.removal_finding == (
        "Zeroed together on 20 held-out prompts (with other queries), the first 2 heads by 2 of 3 "
        "scores are shown to cost the answer more than random heads of the same layers do (by "
        "chance, 0.1 would be). Of these, most is lost without the first by effect: +1.20 (95% "
        "interval +1.00 … +1.40) nats of log-odds; without random heads, +0.10 (95% interval +0.00 … "
        "+0.20). Without removal, the log-odds are +1.50."
    )
    assert judged.removal_frame()["score"].tolist() == ["promotes_attended", "effect", "induction"]
    judged = replace(
        atlas, removals={"induction": gains, "promotes_attended": unclear}, n_shared_queries=3
    )
    assert judged.removal_finding == (
        "Zeroed together on 20 held-out prompts (3 of whose queries were used for the scores), the "
        "first 2 heads by none of 2 scores are shown to cost the answer more than random heads of "
        "the same layers do."
    )
    assert judged.removal_finding in str(judged)


@pytest.mark.parametrize(
    ("unit", "intact", "expected"),
    [
        # Less than what is lost, and less than zero.
        ("nats", 0.2, "Without removal, the log-odds are +0.20."),
        ("nats", -0.3, "Without removal, the log-odds are −0.30."),
        ("share", 0.75, "Without removal, this share is 75.0%."),
        ("share", 0.0, "Without removal, this share is 0.0%."),
    ],
)
def test_a_loss_is_no_part_of_what_there_is_without_removal(unit, intact, expected):
    """Log-odds pass through zero: more can be lost than there is."""
    effect = removal(0.5, (0.4, 0.2, 0.6), unit=unit, intact=intact)
    judged = replace(made_up({"effect": {}}, n_held_out=20), removals={"effect": effect})
    loss = {
        "nats": "+0.50 (95% interval +0.30 … +0.70) nats of log-odds; without random heads, +0.10 "
        "(95% interval +0.00 … +0.20).",
        "share": "+50.0 (+30.0…+70.0) points of the share of prompts whose top token is right; "
        "without random heads, +10.0 (+0.0…+20.0).",
    }
    assert judged.removal_finding.endswith(f" by effect: {loss[unit]} {expected}")


def test_the_judge_says_nothing_of_too_few_queries():
    """Not even that no list matters: without intervals, nothing is compared."""
    nothing = removal(0.9, (0.8, float("nan"), float("nan")))
    judged = replace(made_up({"effect": {}}, n_held_out=3), removals={"effect": nothing})
    assert judged.removal_finding == (
        "Zeroed together on 3 held-out prompts (with other queries), the first 2 heads by each score "
        "are not compared with random heads of the same layers: that needs prompts with at least 4 "
        "different queries."
    )


def test_scores_of_a_file_are_not_said_to_come_from_weights(tmp_path):
    (tmp_path / "published.json").write_text("[[0, 1, 0.5]]", encoding="utf-8")
    joined = made_up({"induction": {}}).with_scores(tmp_path / "published.json")
    assert joined["published"].samples == "read from a file"


def test_heads_have_names_only_by_the_token_that_they_attend_to_most(gpt2, monkeypatch):
    n_tokens, names = 5, ("previous_token", "duplicate_token", "induction", "first_token")
    survey = Survey(ModelView.of(gpt2), 4, 0)
    for name in names:
        mean = torch.full((3, 4), 0.3, dtype=torch.float64)
        survey.scores[name] = HeadScore.of(DEFINITIONS[name], mean)
    by_distance = torch.full((3, 4, 12), 0.1).double()
    by_distance[0, 0, 7] = 0.4
    by_distance[0, 1, 1] = 0.4  # the token before
    by_distance[0, 2, n_tokens] = 0.4  # the same token
    by_distance[0, 3, n_tokens - 1] = 0.4  # the token after it
    turned = torch.zeros(20, 3, 4, 6).double()
    monkeypatch.setattr(head_atlas, "turned_attention", lambda *arguments: (turned, by_distance))
    survey._add_kinds_by_attention(n_tokens, n_sequences=2)
    not_named = {}
    for name in names:
        named = survey.scores[name].heads_of_kind(0.05)
        not_named[name] = {str(head) for head in ModelView.of(gpt2).heads() if head not in named}
    assert not_named == {
        "previous_token": {"L0H0", "L0H2", "L0H3"},
        "duplicate_token": {"L0H0", "L0H1", "L0H3"},
        "induction": {"L0H0", "L0H1", "L0H2"},
        "first_token": {"L0H0", "L0H1", "L0H2", "L0H3"},
    }
    turned += 0.3  # as high as the heads
    survey._add_kinds_by_attention(n_tokens, n_sequences=2)
    assert not any(survey.scores[name].heads_of_kind(0.05) for name in names)


def test_heads_copy_if_they_promote_what_they_attend_to_more_than_the_other_heads_do(
    gpt2, monkeypatch
):
    shares = torch.full((3, 4), 0.2)
    shares[0] = torch.tensor([0.15, 0.18, 0.22, 0.25])
    shares[2, 3] = 0.9
    is_promoted = torch.arange(200)[:, None, None] < 200 * shares
    monkeypatch.setattr(head_atlas.weight_scores, "promotes_attended", lambda *args: is_promoted)
    survey = Survey(ModelView.of(gpt2), 4, 0)
    survey._weights()
    promotes = survey.scores["promotes_attended"]
    assert promotes.kind == "copying"
    assert promotes.heads_of_kind(0.05) == [
        il.Head(2, 3)
    ]  # all are far above chance, one half of a percent
    assert survey.scores["copying"].p_value is None


def test_attention_that_is_not_that_of_queries_and_keys_gets_no_names(gpt2, monkeypatch):
    monkeypatch.setattr(turned_heads, "MAX_ERROR", -1.0)
    text = ["love like love hate"]
    atlas = il.head_atlas(gpt2, text=text, n_sequences=2)
    assert list(atlas.kinds) == ["copying"]
    attention_kinds = ["previous token", "duplicate token", "induction", "sink"]
    assert list(atlas.untested) == attention_kinds
    assert "Not tested: previous token, duplicate token, induction and sink" in atlas.summary()


def test_the_average_head_is_as_large_as_heads_of_either_sign():
    generator = np.random.default_rng(0)
    scores = 0.01 * generator.standard_normal((20, 2, 3))
    scores[:, 0] += 1
    scores[:, 1] -= 1
    queries = [str(row) for row in range(20)]
    p_values = average_head_p_values(scores, queries, 0)
    assert not discoveries(p_values, 0.05).any()
    again = average_head_p_values(np.tile(scores, (3, 1, 1)), queries * 3, 0)
    assert torch.equal(again, p_values)  # prompts with the same query are no further evidence


def test_a_kind_without_enough_queries_says_how_many_there_were(gpt2):
    """A prompt without the score, and a repeated query, do not count; eight queries are enough."""
    survey = Survey(ModelView.of(gpt2), 4, 0)
    values = np.random.default_rng(0).normal(size=(9, survey.view.n_layers, survey.view.n_heads))
    values[0] = math.nan
    survey.add("effect", values, [*"abcdefgh", "h"])
    assert survey.untested == {"needed": "they need 8 prompts with distinct queries, and got 7"}
    survey.add("exchange", values, list("abcdefghi"))
    assert list(survey.untested) == ["needed"]


@pytest.mark.parametrize("n_outstanding", [0, 1, 6])
def test_few_queries_name_several_heads_that_stand_out_at_once_but_no_single_one(
    gpt2, monkeypatch, n_outstanding
):
    """The smallest p-value of eight queries is 1/256: at a rate of 0.01, five of 12 heads at once."""
    for module in (kinds, head_atlas):
        monkeypatch.setattr(module, "RATE", 0.01)
    survey = Survey(ModelView.of(gpt2), 4, 0)
    values = 0.1 * np.random.default_rng(0).normal(size=(8, 12))
    values[:, :n_outstanding] += 3
    survey.add("effect", values.reshape(8, 3, 4), list("abcdefgh"))
    n_named = 0
    if survey.scores["effect"].p_value is not None:
        n_named = len(survey.scores["effect"].heads_of_kind(0.01))
    assert n_named == (6 if n_outstanding == 6 else 0)
    reason = "they need 11 prompts with distinct queries, and got 8"
    assert survey.untested == ({} if n_named else {"needed": reason})
    assert (survey.scores["effect"].p_value is None) == (n_named == 0)  # nothing else names p


def test_errors_of_folders_texts_and_numbers_are_raised(gpt2, tmp_path, no_type_checks):
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "notes.txt").write_text("")
    survey = Survey(ModelView.of(gpt2), 4, 0)
    batch = sweep.tokenized(gpt2, sweep.ONE_WORD)
    with pytest.raises(il.InputError, match="must be empty"):
        survey.measure_task(batch, [0, 1], il.Run(tmp_path))
    with pytest.raises(il.InputError, match="at least three tokens"):
        il.head_atlas(gpt2, text=["love"], n_sequences=2)
    with pytest.raises(il.InputError, match="k must be"):
        il.head_atlas(gpt2, k="3")
    values = {"induction": torch.full((2, 3, 4), torch.nan).double().numpy()}
    values["induction"][0] = 1
    values["induction"][1, 0, 0] = np.inf
    with pytest.raises(il.InputError, match="NaN or infinite"):
        survey.attempt(["induction"], lambda: values)
