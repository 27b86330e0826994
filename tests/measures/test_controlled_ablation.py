"""What `ablate` computes: the heads it chooses, scores without them, and scores without random
control heads.
"""

import math
import random
import warnings
from collections import Counter
from types import SimpleNamespace

import families
import numpy as np
import pytest
import torch
from cases import slow
from scipy.stats import t as student
from shared import pair_prompts
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits.one_token_rows import prefix_cache
from icl_lens.edits.reference_prompts import SamePairsWarning, mean_z
from icl_lens.foundation.intervals import bootstrap_interval
from icl_lens.measures import controlled_ablation
from icl_lens.measures.answer_scores import AnswerScores, score_answers
from icl_lens.measures.controlled_ablation_result import Condition, ControlledAblation
from icl_lens.measures.joint_removal import ListRemoval
from icl_lens.measures.locate import with_predicted_answers
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.view import ModelView
from icl_lens.reading.last_logits import last_log_probs

HEADS = [il.Head(0, 1), il.Head(2, 3)]


@pytest.fixture(scope="module")
def ablation(gpt2, gpt2_batch):
    """Return an ablation whose passes are so small that even a few prompts take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "KEY_BYTES", 1)
        return il.ablate_with_controls(
            gpt2, gpt2_batch, ["L0H1", (2, 3), "L0H1"], n_random=2, seed=1
        )


def test_chosen_are_those_of_largest_mean_score(gpt2, gpt2_batch, gpt2_acts):
    answers, other_labels = gpt2_batch.answer_tokens, gpt2_batch.other_label_tokens
    scores = {
        "increase": il.head_log_prob_increase(gpt2_acts, answers),
        "contrast": il.head_log_prob_increase(gpt2_acts, answers, against=other_labels),
        "effect": il.head_effects(gpt2, gpt2_batch).log_odds,
    }
    for by, score in scores.items():
        best = score.mean(0).flatten().argsort(descending=True).tolist()
        assert il.locate(gpt2, gpt2_batch, k=12, by=by).heads == [
            il.Head.from_index(index, 4) for index in best
        ], by
    assert (
        il.locate(gpt2, gpt2_batch, k=12).heads
        == il.locate(gpt2, gpt2_batch, k=12, by="effect").heads
    )


def test_without_an_answer_it_is_what_the_model_says(gpt2):
    batch = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT)])
    predicted_label = batch.labels[int(il.score(gpt2, batch)[0].argmax())]
    answered = il.tokenize(
        gpt2, [il.Prompt.parse(families.PROMPT, answer=predicted_label)], labels=batch.labels
    )
    assert with_predicted_answers(gpt2, batch).answer.tolist() == answered.answer.tolist()


def test_random_sets(gpt2):
    view = ModelView.of(gpt2)
    remaining_heads = [head for head in view.heads() if head not in HEADS]
    rng = random.Random(5)
    assert random_head_sets(gpt2, HEADS, n_random=3, seed=5, same_layers=False) == [
        rng.sample(remaining_heads, 2) for _ in range(3)
    ]
    for same_layers in (False, True):
        for drawn in random_head_sets(gpt2, HEADS, n_random=50, seed=0, same_layers=same_layers):
            assert len(set(drawn)) == 2
            assert not set(drawn) & set(HEADS)
            assert not same_layers or {head.layer for head in drawn} == {0, 2}


def test_layers_without_enough_other_heads_borrow_from_the_nearest(gpt2, gpt2_batch):
    heads = [il.Head(0, head) for head in range(3)]
    sets = random_head_sets(gpt2, heads)
    for head_set in sets:
        assert Counter(head.layer for head in head_set) == {0: 1, 1: 2}
    assert il.ablate_with_controls(gpt2, gpt2_batch, heads, n_random=1).n_displaced == 2
    assert il.ablate_with_controls(gpt2, gpt2_batch, heads[:1], n_random=1).n_displaced == 0


def test_without_random_heads_of_all_layers_the_other_numbers_are_the_same(
    gpt2, gpt2_batch, ablation, monkeypatch
):
    n_scored = set()

    def counted(view, batch, sets):
        n_scored.add(len(sets))
        return score_answers(view, batch, sets)

    monkeypatch.setattr(controlled_ablation, "score_answers", counted)
    alone = il.ablate_with_controls(gpt2, gpt2_batch, HEADS, all_layers=False, n_random=2, seed=1)
    assert n_scored == {1 + 1 + 2}, "no ablation, the heads, and two random sets"
    assert alone.conditions["same layers"].sets == ablation.conditions["same layers"].sets
    assert alone.conditions["all layers"].sets == alone.conditions["all layers"].scores == ()
    assert alone.to_frame().index.tolist() == ["no ablation", "heads", "same layers"]
    for name in ("heads", "same layers"):
        for measure in ("log_odds", "over_vocabulary"):
            assert_close(alone.per_prompt(name, measure), ablation.per_prompt(name, measure))
    assert "random, all layers" not in repr(alone)


@pytest.mark.parametrize(
    ("positions", "mode"),
    [
        ("all", "zero"),
        ("last", "mean"),
        slow("last", "zero"),
        slow("all", "mean"),
        slow("last", "resample"),
    ],
)
def test_removed_prompt_by_prompt(gpt2, gpt2_batch, ablation, positions, mode):
    """Each prompt alone, under ablate_heads; accuracies counted by hand."""
    how = {"positions": positions, "mode": mode}
    if mode != "zero":
        how["reference"] = gpt2_batch[:2]
    if (positions, mode) != ("last", "zero"):
        ablation = il.ablate_with_controls(gpt2, gpt2_batch, HEADS, n_random=2, seed=1, **how)
    way = {"zero": "zeroed", "mean": "mean-ablated", "resample": "resample-ablated"}[mode]
    assert f"L0H1, L2H3 {way} at" in repr(ablation)
    for name, condition in ablation.conditions.items():
        accuracies = ablation.per_prompt(name, "accuracy")
        for removed, answers, correct in zip(
            condition.sets, condition.scores, accuracies, strict=True
        ):
            for row in range(len(gpt2_batch)):
                alone = gpt2_batch[row]
                with il.edited(gpt2, il.Ablate(removed, seed=1, **how), batch=alone):
                    log_probs = last_log_probs(gpt2, alone)[0]
                labels = log_probs[alone.label_tokens]
                choice_scores = labels.masked_fill(~alone.label_mask[0], -float("inf"))
                is_top = int(log_probs.argmax()) == int(alone.answer_tokens)
                assert_close(answers.label_log_probs[row], labels)
                assert correct[row] == (int(choice_scores.argmax()) == int(alone.answer))
                assert bool(answers.top1_correct[row]) == is_top
    intact, without = (ablation.conditions[name].scores[0] for name in ("no ablation", "heads"))
    assert not torch.allclose(intact.label_log_probs, without.label_log_probs)


def test_an_ablation_has_its_heads_queries_and_random_sets(gpt2_batch, ablation):
    assert ablation.heads == tuple(HEADS)
    assert [len(condition.sets) for condition in ablation.conditions.values()] == [1, 1, 2, 2]
    assert ablation.conditions["heads"].sets == (tuple(HEADS),)
    assert ablation.queries == tuple(prompt.query for prompt in gpt2_batch.prompts)


@pytest.fixture(scope="module")
def ablation_of_queries(icl_mini):
    batch = il.tokenize(icl_mini, il.load_task("sentiment-number", n=24, layout="random"))
    ablation = il.ablate_with_controls(icl_mini, batch, ["L4H0"], n_random=4, positions="last")
    return batch, ablation


def test_one_set_has_the_interval_over_queries(ablation_of_queries):
    batch, ablation = ablation_of_queries
    odds = ablation.per_prompt("heads", "log_odds")[0]
    log_probs = ablation.conditions["heads"].scores[0].label_log_probs
    assert odds == pytest.approx(il.metrics.label_log_odds(log_probs, batch.answer.cpu()).numpy())
    queries = [prompt.query for prompt in batch.prompts]
    over_queries = bootstrap_interval(odds, clusters=queries)
    assert tuple(ablation.interval("heads", "log_odds")) == pytest.approx(tuple(over_queries))


def test_the_interval_of_random_sets_contains_how_much_sets_vary(ablation_of_queries, monkeypatch):
    _, ablation = ablation_of_queries
    same = ablation.per_prompt("same layers", "log_odds")
    assert ablation.interval("same layers", "log_odds").value == pytest.approx(same.mean())
    sets_differ = np.arange(4.0)[:, None].repeat(24, axis=1)
    monkeypatch.setattr(type(ablation), "per_prompt", lambda *_: sets_differ)
    reach = student.ppf(0.975, 3) * np.std(np.arange(4), ddof=1) / 2  # all spread is between sets
    interval = tuple(ablation.interval("same layers", "log_odds"))
    assert interval == pytest.approx((1.5, 1.5 - reach, 1.5 + reach))


def test_differences_from_random_sets_are_in_the_table(ablation_of_queries):
    _, ablation = ablation_of_queries
    heads, same = (ablation.per_prompt(name, "log_odds") for name in ("heads", "same layers"))
    difference = ablation.difference("heads", "same layers", "log_odds")
    assert difference.value == pytest.approx(heads.mean() - same.mean())
    assert difference.low < difference.value < difference.high
    frame = ablation.to_frame()
    assert frame.loc["heads", "log_odds_minus_same_layers_high"] == difference.high
    differences = frame.filter(like="_minus_same_layers")
    assert differences.drop("same layers").notna().all(axis=None)
    assert differences.loc["same layers"].isna().all()
    accuracies = ablation.per_prompt("same layers", "accuracy").mean(1)
    assert frame.loc["same layers", "accuracy_max"] == accuracies.max()
    top_token = np.mean(ablation.per_prompt("heads", "over_vocabulary"))
    assert frame.loc["heads", "over_vocabulary"] == top_token


def test_chance_counts_the_labels_that_a_prompt_has(ablation_of_queries):
    _, ablation = ablation_of_queries
    assert ablation.chance == 0.5
    assert ablation.chance_in_words == "50.0%"
    of_two = "50.0%, between the 2 labels that each prompt has of 3"
    for n_choices, words in ((2, of_two), (3, "33.3%")):
        masks = (torch.arange(3) < n_choices).expand(2, -1)
        different = SimpleNamespace(label_mask=masks, answer=torch.tensor([0, 1]))
        scores = {"heads": SimpleNamespace(scores=[different])}
        of_three = SimpleNamespace(conditions=scores, labels=("a", "b", "c"), chance=1 / n_choices)
        assert type(ablation).chance_in_words.fget(of_three) == words


@pytest.mark.parametrize(("layout", "warns"), [("random", False), ("order", True)])
def test_a_constant_answer_is_named_where_it_is_always_right(icl_mini, layout, warns):
    prompts = il.load_task("sentiment-number", n=8, layout=layout)
    batch = il.tokenize(icl_mini, prompts)
    ablation = il.ablate_with_controls(icl_mini, batch, ["L4H0"], n_random=3, all_layers=False)
    assert len({prompt.answer for prompt in prompts}) == (1 if warns else 2)
    always = "chance: 50.0%, but 100.0% for a model that always answers 'foo'."
    assert (always in " ".join(ablation.notes())) == warns


def test_two_random_sets_give_no_interval(gpt2, gpt2_batch, ablation, monkeypatch):
    """Nothing says how much random sets vary."""
    assert math.isnan(ablation.interval("heads", "log_odds").low)  # of three queries
    monkeypatch.setattr("icl_lens.foundation.intervals.MIN_CLUSTERS", 2)
    assert len(ablation.conditions["same layers"].sets) == 2
    assert math.isfinite(ablation.interval("heads", "log_odds").low)
    for measure in ("accuracy", "log_odds", "auroc", "over_vocabulary"):
        assert math.isfinite(ablation.difference("heads", "same layers", measure).value)
        assert math.isnan(ablation.difference("heads", "same layers", measure).low)
        assert math.isnan(ablation.interval("same layers", measure).high)


def test_heads_that_only_change_a_preference_lower_accuracy_but_not_the_auroc():
    """One set adds a preference of 8 nats, the other makes all prompts alike: accuracy is ½ for
    both.
    """
    n, rng = 40, np.random.default_rng(0)
    answer = torch.arange(n) % 2
    learned = torch.from_numpy(rng.normal(2.0, 0.5, n)) * torch.where(answer == 1, 1.0, -1.0)
    noise = torch.from_numpy(rng.normal(0.0, 1.0, n))
    odds = {
        "no ablation": [learned],
        "heads": [learned + 8.0],
        "same layers": [noise + 8.0, learned],
        "all layers": [],
    }
    choices = torch.ones(n, 2, dtype=torch.bool)
    scores = {}
    for name, sets in odds.items():
        scores[name] = ()
        for log_odds in sets:
            log_probs = torch.stack([-log_odds / 2, log_odds / 2], 1).log_softmax(-1).float()
            scores[name] += (AnswerScores(log_probs, answer == 0, answer, choices),)
    conditions = {
        name: Condition(((il.Head(0, 0),),) * len(of_condition), of_condition)
        for name, of_condition in scores.items()
    }
    ablation = ControlledAblation(
        (il.Head(0, 0),), conditions, tuple(map(str, range(n))), ("foo", "bar"), "all"
    )
    assert ablation.interval("no ablation", "accuracy").value == 1
    assert ablation.interval("heads", "accuracy").value == 0.5
    assert (
        ablation.interval("heads", "auroc").value
        == ablation.interval("no ablation", "auroc").value
        == 1
    )
    assert ablation.difference("heads", "no ablation", "auroc").value == 0
    noisy = il.metrics.label_aurocs(scores["same layers"][0].label_log_probs, answer).mean()
    assert 0.3 < noisy < 0.7
    assert ablation.interval("same layers", "auroc").value == pytest.approx((noisy + 1) / 2)
    frame = ablation.to_frame()
    assert frame.loc["same layers", ["auroc_min", "auroc_max"]].tolist() == pytest.approx(
        [noisy, 1]
    )
    assert frame.loc["heads", "auroc_minus_same_layers"] == pytest.approx((1 - noisy) / 2)
    assert "(chance: 0.5): no ablation 1.00 (" in " ".join(ablation.notes())


@pytest.mark.slow
def test_balanced_prompts_do_not_locate_a_head_that_favors_a_label(icl_mini):
    """The head always writes foo − bar: it is in the top 3 if every answer is foo, in the lower
    half otherwise.
    """
    view, head = ModelView.of(icl_mini), il.Head(7, 3)
    batches = {}
    for layout in ("order", "random"):
        prompts = il.load_task("sentiment-number", n=24, layout=layout)
        batches[layout] = il.tokenize(icl_mini, prompts, labels=("foo", "bar"))
    foo, bar = batches["order"].label_tokens
    z = view.model.W_O[7, 3] @ (view.model.W_U[:, foo] - view.model.W_U[:, bar])

    def favor(value, hook):
        value = value.clone()
        value[:, :, head.head] = 20 * z / z.norm()
        return value

    with icl_mini.hooks(fwd_hooks=[(view.hook(7, "attn.hook_z"), favor)]):
        located = {
            layout: il.locate(icl_mini, batch, k=48, by="contrast").heads
            for layout, batch in batches.items()
        }
    assert located["order"].index(head) < 3
    assert located["random"].index(head) >= 24


def test_a_mean_over_several_batches_weighs_prompts_the_same(gpt2, gpt2_batch):
    """Of batches of two prompts and of one, the mean is that of the three prompts."""
    two, single = gpt2_batch[[0, 1]], gpt2_batch[[2]]
    means = [mean_z(ModelView.of(gpt2), [0, 2], [batch], "last") for batch in (two, single)]
    mean_of_two = mean_z(ModelView.of(gpt2), [0, 2], [two, single], "last")
    for layer in (0, 2):
        assert_close(mean_of_two[layer], (2 * means[0][layer] + means[1][layer]) / 3)


def test_a_mean_over_the_same_pairs_is_warned_of_and_said(gpt2):
    """It keeps what heads do for the task; a mean over this and another task does not."""
    same = il.tokenize(gpt2, pair_prompts("love foo,like bar,one two"), prepend_bos=False)
    tokenized = il.tokenize(gpt2, pair_prompts("love like,one nine,two three"), prepend_bos=False)
    options = {"mode": "mean", "n_random": 1}
    with pytest.warns(
        SamePairsWarning, match="same pairs, whose mean keeps it; pass several batches"
    ):
        ablation = il.ablate_with_controls(gpt2, same, HEADS, reference=same, **options)
    assert "The mean is over 3 prompts of the same task, which keeps what heads do" in repr(
        ablation
    )
    with pytest.warns(SamePairsWarning):
        il.head_effects(gpt2, same, mode="mean", reference=same)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamePairsWarning)
        mean_ablation = il.ablate_with_controls(
            gpt2, same, HEADS, reference=[same, tokenized], **options
        )
        il.indirect_effects(gpt2, same, same)  # its mean is to keep the task
    assert "The mean is over 6 prompts in 2 batches." in repr(mean_ablation)
    assert mean_ablation.reference_sentence in mean_ablation.to_markdown()


def ablation_of(
    log_odds,
    top_token=True,
    labels=("foo", "bar"),
    n_queries=None,
    cost=0.0,
    random_costs=(0.0,) * 5,
):
    """An ablation of prompts whose answers, in turn, have these log-odds; it costs all of them as
    many nats, and random sets of heads cost others.
    """
    n = len(log_odds)
    answer = torch.arange(n) % 2 if len(labels) == 2 else torch.zeros(n, dtype=torch.long)
    is_top = torch.full((n,), top_token)
    choices = torch.ones(n, len(labels), dtype=torch.bool)

    def scores(lost):
        signed_odds = torch.where(answer == 0, log_odds - lost, lost - log_odds)
        log_probs = torch.stack([signed_odds / 2, -signed_odds / 2], 1).log_softmax(-1).float()
        return AnswerScores(log_probs[:, : len(labels)], is_top, answer, choices)

    head_sets = ((il.Head(0, 0),),)
    conditions = {
        "no ablation": Condition(((),), (scores(0.0),)),
        "heads": Condition(head_sets, (scores(cost),)),
        "same layers": Condition(head_sets * len(random_costs), tuple(map(scores, random_costs))),
        "all layers": Condition((), ()),
    }
    queries = tuple(str(i % (n_queries or n)) for i in range(n))
    return ControlledAblation((il.Head(0, 0),), conditions, queries, labels, "last")


@pytest.mark.parametrize(
    ("ablation", "lacks_task"),
    [
        (ablation_of(torch.full((40,), 1.0)), False),  # all are right
        (ablation_of(torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(10)), True),  # a guess
        (ablation_of(torch.full((40,), -1.0)), True),  # all are wrong
        # Always the first label, which has larger odds where it is the answer.
        (ablation_of(torch.tensor([3.0, -2.0]).repeat(20)), False),
        (ablation_of(torch.tensor([3.0, -3.0]).repeat(20)), True),  # always the first label
        (ablation_of(torch.full((40,), -1.0), n_queries=3), False),  # no interval, no verdict
        (ablation_of(torch.ones(8), labels=("foo",)), False),  # pairs
        (ablation_of(torch.ones(8), top_token=False, labels=("foo",)), True),
    ],
)
def test_a_model_without_the_task_has_neither_accuracy_nor_auroc_above_chance(ablation, lacks_task):
    assert ablation.lacks_task == lacks_task


COSTS = [
    (2.0, 0.0, True),
    (2.0, 2.0, False),  # as much as random heads
    (2.0, 3.0, False),
    (-2.0, 0.0, False),
    (-2.0, -3.0, False),  # the answer gains, with random heads even more
    (0.0, 0.0, False),
]


@pytest.mark.parametrize(("cost", "random_cost", "matter"), COSTS)
@pytest.mark.parametrize("n_prompts", [1, 20])
def test_heads_matter_only_if_they_cost_something_and_more_than_random_heads(
    cost, random_cost, matter, n_prompts
):
    """The same rule for a result of one prompt or of several, and for a list of heads."""
    random_costs = [random_cost + nats for nats in (-0.1, -0.05, 0.0, 0.05, 0.1)]
    ablation = ablation_of(torch.full((n_prompts,), 1.0), cost=cost, random_costs=random_costs)
    assert ablation.shows_that_heads_matter == matter
    assert ablation.finding.startswith("L0H0 matters: ") == matter
    if n_prompts > 1:
        assert ListRemoval.from_ablation(ablation).shows_that_heads_matter == matter


@pytest.mark.parametrize("n_queries", [1, 2, 3, 4])
def test_a_verdict_on_several_prompts_needs_as_many_queries_as_their_intervals(n_queries):
    """Also on prompts of one query: no sentence has an interval below which a note says that there
    is none.
    """
    ablation = ablation_of(
        torch.full((12,), 1.0), n_queries=n_queries, cost=2.0, random_costs=[-0.1, 0.0, 0.1]
    )
    assert ablation.shows_that_heads_matter == (n_queries == 4)
    says_why = "not compared with random heads of the same layers: that needs prompts with at least"
    assert (says_why in ablation.finding) == (n_queries < 4)
    assert ("95% interval" in ablation.finding) == (n_queries == 4)


def test_intervals_are_over_random_sets_only_if_there_are_some():
    for random_costs, is_over_sets in (([], False), ([0.0, 0.1, 0.2], True)):
        ablation = ablation_of(torch.full((12,), 1.0), cost=2.0, random_costs=random_costs)
        assert ("and over the random sets" in " ".join(ablation.notes())) == is_over_sets
