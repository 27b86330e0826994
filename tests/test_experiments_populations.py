"""Made-up populations on which a simpler rule gives the wrong verdict and the rule in force the right one, both ways.

Each simpler rule is written out here as it once stood, so that a population shows what it would have said.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import test_experiments_published as published
import test_experiments_verdicts as paper
import torch

import icl_lens as il
from experiments.claims import (
    ablation,
    attention_vs_increase,
    best_head,
    blocked,
    causal_location,
    common_heads,
    ffn,
    head_count,
    head_overlap,
    imbalance,
    label_attention,
    label_rank,
    layers,
    majority_bias,
    neighbours,
    prediction_shift,
    shallow_flow,
    task_transfer,
    top_heads,
    two_tower,
    vocabulary,
)
from experiments.lab.editing import located_for_both
from experiments.lab.frames import by_prompt, where
from experiments.lab.intervals import Resample
from experiments.lab.located import LocatedHead
from experiments.lab.reductions import head_contrasts, head_increases
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import judge
from icl_lens.metrics import bootstrap_interval
from icl_lens.models.view import ModelView

SUPPORTED, NOT, OPEN = "supported", "not supported", "undecided"


def said(module: Any, table: pd.DataFrame) -> str:
    return module.EXPERIMENT.verdict(table if "query" in table else paper.asked(table)).outcome


def simply(values: Any, least: float) -> str:
    """The verdict on a mean by an interval that takes prompts for independent."""
    _, low, high = bootstrap_interval(np.asarray(values, dtype=float))
    return SUPPORTED if low > least else NOT if high < least else OPEN


# Prompts that share words


@pytest.mark.parametrize(("effect", "outcome"), [(0.0, OPEN), (1.2, SUPPORTED)])
def test_words_that_recur_are_no_independent_witnesses(effect: float, outcome: str) -> None:
    """Twelve words decide what 600 prompts say: by chance their mean is not 0, and prompts alone seem sure of it."""
    rng = np.random.default_rng(3)
    query = rng.integers(12, size=600)
    words = rng.normal(size=12)
    value = effect + (words - words.mean() + 0.3)[query] + rng.normal(0, 0.3, 600)
    table = pd.DataFrame({"prompt": range(600), "query": query, "value": value})
    assert simply(value, 0.0) == SUPPORTED
    assert judge(by_prompt(table, "value"), least=0.0, unit="nats", what="effect").outcome == outcome


# Heads that raise every label


def study_of(gpt2: Any, means: dict[il.Head, tuple[float, float, float]]) -> Study:
    """A study in which these heads have a mean increase, and contrasts where either label is the answer."""
    study = Study(gpt2, StudySettings(model="tiny", n=24, path=None))
    prompts = [il.Prompt.parse(f"love : bar like : bar eight : foo two : foo {w} :", answer="foo") for w in WORDS * 8]
    study._batches[Variant()] = il.tokenize(gpt2, prompts, labels=("foo", "bar"))
    exchanged = Variant(swapped=True)
    needs = (Need(Variant(), head_increases), Need(Variant(), head_contrasts), Need(exchanged, head_contrasts))
    for place, need in enumerate(needs):
        values = torch.zeros(24, study.view.n_layers, study.view.n_heads)
        for head, found in means.items():
            values[:, head.layer, head.head] = found[place]
        study._kept[need] = values
    return study


WORDS = ("one", "nine", "three")


def test_label_boosters_are_located_by_increase_and_not_by_contrast(gpt2: Any) -> None:
    booster, reader = il.Head(0, 1), il.Head(2, 3)
    study = study_of(gpt2, {booster: (1.0, 0.01, 0.01), reader: (0.8, 0.8, 0.7)})
    assert study.located(1) == [booster]
    assert study.ranked_by("contrast").located(1) == [reader]
    assert study.located(2) == [booster, reader], "the other study is another one"


def test_a_head_that_pushes_one_label_is_not_located_by_contrast(gpt2: Any) -> None:
    """Ranked for one label at a time it would be the first: it adds most where its label is the answer."""
    pusher, reader = il.Head(0, 1), il.Head(2, 3)
    study = study_of(gpt2, {pusher: (1.0, 1.0, -1.0), reader: (0.8, 0.5, 0.5)}).ranked_by("contrast")
    assert int(study.rises().mean(0).argmax()) == study.view.n_heads * pusher.layer + pusher.head
    assert study.located(1) == [reader]
    assert located_for_both(study, 1) == [reader]


@pytest.mark.parametrize(("increase", "contrast", "apart"), [(1.0, 0.01, False), (0.8, 0.8, True), (-1.0, 1.0, False)])
def test_which_located_heads_tell_the_labels_apart(increase: float, contrast: float, apart: bool) -> None:
    assert LocatedHead("L0H1", increase, contrast, "increase").tells_apart is apart


# A head that likes "foo"


def attending(gpt2: Any, cell: Variant, weight_of: Any) -> float:
    """Mean AUROC of a head whose attention to each label is what `weight_of` says of it, in one cell."""
    true, false = ("bar", "foo") if cell.swapped else ("foo", "bar")
    texts = [("love", false), ("like", false), ("eight", true), ("two", true)]
    texts = texts if cell.layout == "order" else texts[2:] + texts[:2]
    query, answer = ("one", true) if cell.asked == "true" else ("sad", false)
    prompt = il.Prompt([il.Demonstration(*one) for one in texts], query, answer, ("foo", "bar"))
    batch = il.tokenize(gpt2, [prompt], labels=("foo", "bar"))
    acts = il.capture(gpt2, batch)
    weights = [weight_of(text, label, label == answer, place) for place, (text, label) in enumerate(texts)]
    pattern = torch.zeros_like(acts.pattern)
    pattern[0, 0, 0, batch.label_positions[0]] = torch.tensor(weights)
    acts.pattern.copy_(pattern)
    return float(two_tower.Separation((il.Head(0, 0),))(acts)[0, 0, 0])


@pytest.mark.parametrize(
    ("weight_of", "simple", "balanced"),
    [
        (lambda text, label, true, place: 0.4 if label == "foo" else 0.1, 1.0, 0.5),  # likes "foo"
        (lambda text, label, true, place: 0.1 * place, 1.0, 0.5),  # likes near labels
        (lambda text, label, true, place: 0.4 if text in ("eight", "two") else 0.1, 1.0, 0.5),  # likes one class
        (lambda text, label, true, place: 0.4 if true else 0.1, 1.0, 1.0),  # reads the class
    ],
)
def test_a_head_that_likes_a_label_or_a_place_separates_nothing(
    gpt2: Any, weight_of: Any, simple: float, balanced: float
) -> None:
    assert attending(gpt2, Variant(), weight_of) == simple
    assert np.mean([attending(gpt2, cell, weight_of) for cell in two_tower.CELLS]) == pytest.approx(balanced)


def test_other_heads_that_separate_as_well_refute_two_towers() -> None:
    assert said(two_tower, published.two_tower_table(1.0, auroc=0.9, other=0.6)) == SUPPORTED
    assert said(two_tower, published.two_tower_table(1.0, auroc=0.7, other=0.9)) == NOT


# A fix that overcorrects


def minority_only(table: pd.DataFrame) -> str:
    """The rule that asked the rarer class only: reduction of its loss, and its accuracy."""
    lost = {
        group: by_prompt(table, "odds", group=group, layout="favoured", asked="true")
        - by_prompt(table, "odds", group=group, layout="against", asked="true")
        for group in ("none", "located")
    }
    accuracy = [by_prompt(table, "correct", group=group, asked="true") for group in ("located", "none")]
    reduced = simply(lost["none"].abs() - lost["located"].abs(), 0.0)
    return reduced if reduced != SUPPORTED else simply(accuracy[0] - accuracy[1], -0.02)


@pytest.mark.parametrize(
    ("population", "outcome"),
    [
        ({"after": 0.5}, SUPPORTED),
        ({"after": 0.5, "other_loss": 0.255}, NOT),  # the majority class goes from 90 % to 64.5 %
        ({"after": 0.5, "discriminates": (4.0, 1.0)}, NOT),  # everything is dulled, the bias with it
        ({"after": 0.5, "random": 0.3}, NOT),  # any heads would have done
        ({"after": 0.95, "spread": 0.02}, NOT),  # a twentieth of the bias is next to nothing
    ],
)
def test_a_fix_is_judged_by_both_classes(population: dict[str, Any], outcome: str) -> None:
    table = published.bias_table(**population)
    assert minority_only(table) == SUPPORTED
    assert said(majority_bias, table) == outcome


def test_lost_evidence_is_no_bias() -> None:
    """Leaving out a demonstration makes the model less sure of either class alike: no label gains."""
    table = published.bias_table(0.0, before=0.0)
    less = where(table, layout="against").assign(odds=lambda part: part["odds"] * 0.5)
    table = pd.concat([where(table, layout="favoured"), less])
    assert (
        simply(
            by_prompt(table, "odds", group="none", layout="favoured", asked="true")
            - by_prompt(table, "odds", group="none", layout="against", asked="true"),
            0.0,
        )
        == SUPPORTED
    )
    judged = majority_bias.EXPERIMENT.verdict(table)
    assert judged.outcome == OPEN
    assert "there is no such bias" in judged.reason
    assert "evidence lost (discrimination): 2 nats" in judged.reason


def test_no_bias_is_undecided_and_has_its_own_interval() -> None:
    judged = majority_bias.EXPERIMENT.verdict(published.bias_table(0.5, before=-0.7))
    assert judged.outcome == OPEN
    assert judged.effect == pytest.approx(-0.7)
    assert judged.low < -0.7 < judged.high < 0


# Zeroed heads that make a model say anything


def vocabulary_only(table: pd.DataFrame) -> str:
    falls = by_prompt(table, "vocabulary", group="random", mode="zero") - by_prompt(
        table, "vocabulary", group="located", mode="zero"
    )
    return simply(falls, ablation.LEAST)


@pytest.mark.parametrize(
    ("population", "outcome"),
    [
        ({"labels": 0.94, "odds": 4.9}, NOT),  # it says "zork", and still tells the labels apart
        ({"labels": 0.5, "odds": 4.9}, SUPPORTED),
        ({"labels": 0.94, "odds": 1.0}, SUPPORTED),
    ],
)
def test_a_fall_over_the_vocabulary_alone_is_not_enough(population: dict[str, float], outcome: str) -> None:
    table = published.ablation_table(0.0, **population)
    assert vocabulary_only(table) == SUPPORTED
    judged = ablation.EXPERIMENT.verdict(table)
    assert judged.outcome == outcome
    assert "2 heads, 4.0% of all" in judged.reason
    assert "set to their mean instead" in judged.reason


# Rules that could not fail, or could not pass


def test_no_head_can_have_half_of_rank_one() -> None:
    """Where the layer's other heads name the label too, located heads can be perfect and not twice as good."""
    perfect = paper.rank_table(0.0, 0.4)
    located, other = (by_prompt(paper.asked(perfect), "mrr", group=group) for group in ("located", "random"))
    assert simply(located - 2 * other, 0.0) == NOT
    assert said(label_rank, perfect) == OPEN
    assert said(label_rank, paper.rank_table(0.4, 0.4, 0.1)) == OPEN
    assert said(label_rank, paper.rank_table(0.9, 0.4)) == NOT, "worse than the others is worse"
    assert said(label_rank, paper.rank_table(0.0, 3.0)) == SUPPORTED


def test_any_head_has_more_increase_where_it_attends_more() -> None:
    """Values much alike: the correlation is near 1 in random heads as well, and says nothing of located ones."""
    table = paper.scatter_table(5, 0.1, other=0.01)
    judged = attention_vs_increase.EXPERIMENT.verdict(paper.asked(table))
    assert (judged.outcome, judged.unit) == (NOT, "rank correlation")
    assert said(attention_vs_increase, paper.scatter_table(5, 0.1, other=3.0)) == SUPPORTED


def test_heads_that_lower_the_answer_are_as_regular_as_those_that_raise_it() -> None:
    """Their correlation is near −1 for the same reason: no located head is special for being on the other side."""
    table = paper.scatter_table(5, 0.1, other=0.01)
    lowering = table["group"] == "random"
    table["increase"] = np.where(lowering, -table["increase"], table["increase"])
    drawn = Resample(np.ones((1, 2 * paper.N)), paper.N)
    own, other = (
        float(attention_vs_increase.correlations(drawn, where(table, name=name))[0]) for name in ("L1H0", "L1H2")
    )
    assert own > 0.9, "the rule that took the sign along: far above a control of −1"
    assert other > own, "either way"
    assert said(attention_vs_increase, table) == NOT


def test_a_head_of_the_first_layer_has_read_no_text() -> None:
    table = paper.words_table(0.9, 0.5, 0.5)
    assert said(vocabulary, table) == NOT
    assert said(vocabulary, table.assign(name="L0H4")) == OPEN
    assert said(vocabulary, paper.words_table(0.9, 0.9, 0.9).assign(name="L0H4")) == OPEN


@pytest.mark.parametrize("top", [1, 2, 30])
def test_a_value_names_its_label_only_if_that_is_among_its_first_words(gpt2: Any, monkeypatch: Any, top: int) -> None:
    """To say "foo" a little sooner than "bar", behind a hundred other words, is not to say "foo"."""
    monkeypatch.setattr(vocabulary, "TOP", top)
    batch = il.tokenize(gpt2, [il.Prompt.parse("love : bar eight : foo two : foo one :", answer="foo")])
    acts = il.capture(gpt2, batch)
    decode = acts.readout.decode
    words = [token for token in range(gpt2.W_U.shape[1]) if il.is_content_word(decode(token))]
    simpler = found = 0.0
    for head in ModelView.of(gpt2).heads():
        scores = acts.readout.vocabulary_scores(il.label_values(acts, head))[0]
        expected, before_other = [], []
        for demo, label in enumerate(batch.label_index[0].tolist()):
            own, other = (int(batch.label_tokens[place]) for place in (label, 1 - label))
            before_other.append(float(scores[demo, own] > scores[demo, other]))
            ahead = sum(bool(scores[demo, word] > scores[demo, own]) for word in words)
            expected.append(before_other[-1] * (ahead < top))
        wins = float(vocabulary.OwnWordWins(head, "resid")(acts)[0, 0])
        assert wins == pytest.approx(np.mean(expected)), head
        found, simpler = found + wins, simpler + float(np.mean(before_other))
    assert 0 < found <= simpler + 1e-5
    if top < 3:
        assert found < 0.7 * simpler, "the simpler rule: before the other label, wherever that is"


def test_false_labels_need_only_gain() -> None:
    """The paper says that their attention increases, not by how much: a clear small rise is one."""
    table = paper.unbalanced(0.3, 0.22, spread=0.01)
    assert said(imbalance, table) == SUPPORTED
    assert said(imbalance, paper.unbalanced(0.3, 0.18, spread=0.01)) == NOT
    rises = by_prompt(table, "attention", group="located", layout="imbalanced", label="false") - by_prompt(
        table, "attention", group="located", layout="order", label="false"
    )
    assert simply(rises / 0.6, 0.1) == NOT, "a tenth of attention on labels was asked for"


def test_one_head_stands_for_no_others() -> None:
    judged = task_transfer.EXPERIMENT.verdict(published.task_transfer_table(0.2, apart=1))
    assert judged.outcome == OPEN
    assert "1 head is located here only" in judged.reason


@pytest.mark.parametrize(("shallow", "outcome"), [(False, SUPPORTED), (True, OPEN)])
def test_a_list_without_shallow_heads_leaves_no_doubt(shallow: bool, outcome: str) -> None:
    """Few query words: a share of 1 has a binomial bound below nine tenths, though the list cannot be otherwise."""
    table = paper.asked(paper.top_heads_table(1.0, spread=0.0))
    table = table.assign(query=table["prompt"] % 12)
    if not shallow:
        table = table.loc[(table["group"] != "located") | (table["depth"] > 0.5)]
    assert top_heads.claim(table).outcome == outcome


def test_one_head_has_no_share_in_common() -> None:
    """With one head the share is 0 or 1 in every draw, whatever the two ways of locating have to do with one "
    "another."""
    table = paper.causal_table(0.2, 0.0, layers=0.2, spread=0.0)
    assert said(causal_location, table) == NOT
    table.loc[table["measure"] == "removal", "heads"] = "L1H0"
    judged = causal_location.EXPERIMENT.verdict(paper.asked(table) if "query" not in table else table)
    assert judged.outcome == OPEN
    assert "1 head is too few" in judged.reason


def test_the_rank_correlation_is_spearmans() -> None:
    """With whole and with repeated rows, ties included."""
    rng = np.random.default_rng(0)
    x = rng.integers(8, size=40).astype(float)
    y = x + rng.integers(6, size=40)
    counts = rng.integers(3, size=(5, 40)).astype(float)
    found = attention_vs_increase.rises(x, y, np.vstack([np.ones(40), counts]))
    rows = [np.arange(40), *(np.repeat(np.arange(40), count.astype(int)) for count in counts)]
    ranks = [[pd.Series(one[row]).rank() for one in (x, y)] for row in rows]
    assert found == pytest.approx([float(np.corrcoef(*pair)[0, 1]) for pair in ranks])


def test_heads_that_are_the_same_transfer_nothing() -> None:
    """Removing the same heads twice costs the same twice."""
    judged = task_transfer.EXPERIMENT.verdict(published.task_transfer_table(2.0, apart=0))
    assert judged.outcome == OPEN
    assert "both tasks have the same 1 located heads" in judged.reason
    assert said(task_transfer, published.task_transfer_table(1.8)) == SUPPORTED
    assert said(task_transfer, published.task_transfer_table(0.2)) == NOT


def test_heads_that_cost_nothing_here_leave_transfer_open() -> None:
    """Nothing was lost that the other task's heads could cost half of: that says nothing about sharing."""
    table = published.task_transfer_table(0.5)
    idle = table["group"].isin(["own"])
    table.loc[idle, "odds"] = table.loc[table["group"] == "none", "odds"].mean() + 0.1
    judged = task_transfer.EXPERIMENT.verdict(table)
    assert judged.outcome == "undecided"
    assert "cost nothing to compare others with" in judged.reason


def test_neurons_that_no_head_reaches_leave_ffn_open() -> None:
    """In a first layer of parallel blocks no head can drive a neuron, whatever the heads are like."""
    table = paper.neurons_table(0.1, 0.02, any_neuron=0.02)
    table.loc[table["kind"] == "best", "value"] = 0.0
    judged = ffn.EXPERIMENT.verdict(table)
    assert judged.outcome == "undecided"
    assert "come before every head" in judged.reason


@pytest.mark.parametrize(("n_layers", "size"), [(6, 2), (12, 3), (36, 9), (5, 1), (2, 1), (7, 2)])
def test_shallow_and_deep_windows_share_no_layer(n_layers: int, size: int) -> None:
    windows = shallow_flow.windows_of(n_layers, size)
    half = n_layers // 2
    shallow, deep = ([one for one in windows if (one[0] < half) == first] for first in (True, False))
    assert shallow
    assert deep
    assert max(stop for _, stop in shallow) == half
    assert min(start for start, _ in deep) == n_layers - half
    assert {stop - start for start, stop in windows} == {min(size, half)}
    assert shallow_flow.windows_of(1, 1) == []


def test_random_edges_are_as_many_and_none_of_them(gpt2: Any) -> None:
    batch = il.tokenize(gpt2, [il.Prompt.parse("love : bar like : bar eight : foo two : foo one :")] * 2)
    own = blocked.label_to_text(batch)
    other = blocked.random_edges(own, torch.Generator().manual_seed(0))
    assert not (own & other).any()
    assert not other.triu().any(), "only earlier positions, and not the own one"
    #  0 love, 1 :, 2 bar, 3 like, 4 :, 5 bar, …: the first colon sees only what it is blocked from
    assert other[0, 1].sum() == 0
    assert torch.equal(other[0, 3:].sum(-1), own[0, 3:].sum(-1))
    assert not torch.equal(other[0], other[1])


def test_any_blocked_edges_might_cost_as_much() -> None:
    assert said(shallow_flow, published.shallow_flow_table(1.0, random=0.0)) == SUPPORTED
    assert said(shallow_flow, published.shallow_flow_table(1.0, random=1.5)) == NOT


def test_attention_is_measured_by_its_own_size() -> None:
    """Shifts of 0.01 are all there is where labels get 0.03, and nothing where they get 0.9."""
    small = published.prediction_shift_table(0.01, 0.002, before=0.03)
    large = published.prediction_shift_table(0.03, 0.002, before=0.9)
    first, after = (
        by_prompt(small, "attention", group="located", label="foo", input=one) for one in ("first", "exchanged")
    )
    assert simply(first - after, 0.02) == NOT
    first, after = (
        by_prompt(large, "attention", group="located", label="foo", input=one) for one in ("first", "exchanged")
    )
    assert simply(first - after, 0.02) == SUPPORTED
    assert [said(prediction_shift, table) for table in (small, large)] == [SUPPORTED, NOT]
    scaled = paper.unbalanced(0.3, 0.3, spread=0.002)
    scaled["attention"] /= 20
    assert said(imbalance, scaled) == SUPPORTED


def test_a_head_that_looks_nowhere_in_particular_does_not_look_at_labels() -> None:
    """Twice as much on true labels, of next to nothing."""
    table = paper.attended(0.06, 0.01, 0.05, 0.01, spread=0.002)
    table.loc[table["group"] == "random", "attention"] /= 100
    assert said(label_attention, table) == NOT
    assert said(label_attention, table.assign(even=0.02)) == SUPPORTED


def test_kept_heads_mean_little_where_any_would_do() -> None:
    good = published.head_count_table(0.95)
    assert said(head_count, good) == SUPPORTED
    assert said(head_count, published.head_count_table(0.93, random_kept=0.96)) == NOT
    assert said(head_count, published.head_count_table(0.93, removed=0.93, random_removed=0.6)) == NOT


def test_random_neurons_that_are_driven_as_much_refute_the_drive() -> None:
    simple = paper.asked(paper.neurons_table(0.1, 0.02, any_neuron=0.2))
    located, other = (by_prompt(simple, "value", kind="best", group=group) for group in ("located", "random"))
    assert simply(located - other, 0.01) == SUPPORTED
    assert said(ffn, simple) == NOT
    assert said(ffn, paper.neurons_table(0.1, 0.02, any_neuron=0.02)) == SUPPORTED


def test_more_than_half_is_not_nearly_all() -> None:
    assert said(layers, paper.layers_table(0.7)) == NOT
    assert said(layers, paper.layers_table(0.97)) == SUPPORTED


def test_no_failure_is_headed_by_a_success() -> None:
    """The effect of a verdict is that of the part that failed, not of a part that holds in all prompts."""
    judged = two_tower.EXPERIMENT.verdict(published.two_tower_table(1.0, auroc=0.3))
    assert (judged.outcome, judged.unit) == (NOT, "AUROC")
    assert judged.effect < 0.5


# Swaps


def test_a_swap_for_the_last_query_moves_nothing_else(gpt2: Any) -> None:
    """Earlier positions stay as they were, and the answer moves otherwise than when all of them see the swap."""
    own = il.tokenize(gpt2, il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo"))
    longer = il.tokenize(gpt2, il.Prompt.parse("the sad cat : bar good : bar eight : foo nine two : foo one :"))
    heads = [il.Head(0, 1), il.Head(1, 0), il.Head(1, 3)]
    clean = _residuals(gpt2, own)
    for what in ("k", "v"):
        found = {}
        for seen_by in ("last", "all"):
            with il.patch_heads(gpt2, heads, longer, what=what, align="labels", into=own, seen_by=seen_by):
                found[seen_by] = _residuals(gpt2, own)
        torch.testing.assert_close(found["last"][:, :, :-1], clean[:, :, :-1])
        assert (found["last"][:, :, -1] - clean[:, :, -1]).abs().max() > 1e-4
        assert (found["all"][:, :, :-1] - clean[:, :, :-1]).abs().max() > 1e-4
    for align in ({}, {"align": "labels", "into": own}):
        with (
            pytest.raises(il.InputError, match="seen_by"),
            il.patch_heads(gpt2, heads, own, what="q" if align else "k", seen_by="last", **align),
        ):
            pass


def test_a_value_swap_for_the_last_query_by_hand(gpt2: Any) -> None:
    """Of one head: its output at the last position, with the other prompt's values at label positions."""
    own, other = (
        il.tokenize(gpt2, il.Prompt.parse(text, answer="foo"))
        for text in (
            "love : bar like : bar eight : foo two : foo one :",
            "love : foo like : foo eight : bar two : bar one :",
        )
    )
    head, places = il.Head(1, 2), own.label_positions[0]
    seen: dict[str, torch.Tensor] = {}

    def look(batch: il.PromptBatch, *names: str) -> None:
        hooks = [
            (f"blocks.1.attn.hook_{name}", lambda value, hook, name=name: seen.update({name: value.clone()}))
            for name in names
        ]
        with torch.no_grad(), gpt2.hooks(fwd_hooks=hooks):
            gpt2(batch.tokens, return_type="logits")

    look(other, "v")
    theirs = seen["v"][0, :, 2]
    look(own, "v", "pattern")
    mixed = seen["v"][0, :, 2].clone()
    mixed[places] = theirs[places]
    expected = seen["pattern"][0, 2, -1] @ mixed
    with il.patch_heads(gpt2, [head], other, what="v", align="labels", into=own, seen_by="last"):
        look(own, "z")
    torch.testing.assert_close(seen["z"][0, -1, 2], expected, atol=1e-5, rtol=1e-4)


def _residuals(model: Any, batch: il.PromptBatch) -> torch.Tensor:
    """[layer batch pos d_model] after each block."""
    kept: list[torch.Tensor] = []
    hooks = [(f"blocks.{layer}.hook_resid_post", lambda value, hook: kept.append(value.clone())) for layer in range(3)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
    return torch.stack(kept)


def test_cells_are_balanced() -> None:
    assert len({*two_tower.CELLS}) == 8
    for cell in two_tower.CELLS:
        assert replace(cell, swapped=not cell.swapped) in two_tower.CELLS
        assert replace(cell, asked="false" if cell.asked == "true" else "true") in two_tower.CELLS
        assert replace(cell, layout="reorder" if cell.layout == "order" else "order") in two_tower.CELLS


# Heads that tasks have in common


@pytest.mark.parametrize(("layers", "outcome"), [(0.3, SUPPORTED), (0.6, NOT), (0.95, OPEN)])
def test_tasks_with_the_same_deep_layers_share_heads_by_chance(layers: float, outcome: str) -> None:
    """Half of the heads are in both lists, far beyond chance; but so many random ones of these layers would be, too."""
    table = paper.overlap_table(0.5, 0.03, layers=layers)
    beyond = table.loc[table["cases"] == "all", "shared"] - table["chance"].iloc[0]
    assert simply(beyond, 0.25) == SUPPORTED
    assert said(head_overlap, table) == outcome


def test_overlap_that_wrong_answers_make_is_not_supported() -> None:
    table = paper.overlap_table(0.7, 0.03)
    correct = table["cases"] == "correct"
    assert said(head_overlap, table.assign(shared=table["shared"] - 0.5 * correct)) == NOT


def test_lists_of_a_draw_are_those_of_its_weighted_prompts() -> None:
    increases = torch.tensor([[[3.0, 1.0], [0.0, 2.0]], [[0.0, 1.0], [5.0, 2.0]]])
    weights = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    both, first, none = head_overlap.top_lists(increases, 2, weights)
    assert both.tolist() == [[0, 0], [1, 1]]
    assert first.tolist() == [[1, 0], [0, 1]]
    assert np.isnan(none).all()
    shared, layers = head_overlap.in_common(both[None], first[None])
    assert shared.tolist() == [0.5]
    assert layers.tolist() == [0.5], "one of the two heads of the second layer, which the first list has both of"


def test_common_heads_that_lose_attention_but_name_no_label_are_not_supported() -> None:
    """A head that only follows how many labels there are, and where they are, needs no values that name them."""
    table = paper.common_table(0.2, ranks=4.9)
    attention = where(table, measure="attention")
    assert all(part.outcome == SUPPORTED for part in imbalance.parts(paper.asked(attention)))
    assert said(common_heads, table) == NOT


def test_common_heads_that_do_as_their_layers_do_are_not_supported() -> None:
    """All heads of the layer lose as much: softmax, and not what is special of the common heads."""
    table = paper.common_table(0.2)
    located = where(table, group="located")
    same = located.assign(group="random", name="L1H1", attention=located["attention"] + 0.001)
    assert said(common_heads, pd.concat([located, same])) != SUPPORTED


# The single best head


def test_a_best_head_that_looks_at_the_labels_as_its_layer_does_is_not_supported() -> None:
    """Nearly all attention of the whole layer is on true labels: what the best head does is not its own."""
    table = paper.best_table(0.6)
    attention = where(table, measure="attention", group="located")
    same = attention.assign(group="random", name="L1H1", attention=attention["attention"] + 0.01)
    rest = table.loc[~((table["measure"] == "attention") & (table["group"] == "random"))]
    gap = by_prompt(where(attention, layout="order", label="true"), "attention")
    assert simply(gap - 0.1, 0.0) == SUPPORTED
    assert said(best_head, pd.concat([rest, same])) != SUPPORTED


# What labels take from their neighbours


def test_texts_that_all_change_scores_alike_are_no_neighbours() -> None:
    """The text before is a fifth of the change, as the paper assumes; but so is the one before that."""
    table = paper.neighbours_table(0.8, 0.2, 0.25)
    assert simply(where(table, what="label", group="located")["adjacent"], 0.05) == SUPPORTED
    assert said(neighbours, table) == NOT


def test_labels_that_read_their_own_text_only_do_not_explain_order() -> None:
    assert said(neighbours, paper.neighbours_table(0.98, 0.02, 0.001, spread=0.001)) == NOT


def test_heads_that_read_no_text_have_no_share() -> None:
    """A head of the first layer sees the label itself and nothing of the texts: nothing over nothing."""
    table = paper.neighbours_table(0.8, 0.2, 0.05)
    first = table.assign(layer=0, name=table["name"].str.replace("L1", "L0"), own=0.0, adjacent=0.0, far=0.0)
    both = pd.concat([first, table])
    assert said(neighbours, both) == SUPPORTED
    verdict = neighbours.claim(paper.asked(both))
    assert "left out, since no text changes their scores: L0H0" in verdict.reason
    assert said(neighbours, first) == OPEN


# Heads located by removing them


@pytest.mark.parametrize(("layers", "outcome"), [(0.2, SUPPORTED), (0.6, NOT), (0.8, OPEN)])
def test_two_ways_to_the_same_layers_are_not_two_ways_to_the_same_heads(layers: float, outcome: str) -> None:
    table = paper.causal_table(0.2, 0.7, layers=layers, spread=0.02)
    assert said(causal_location, table) == outcome


def test_heads_located_by_removal_that_matter_no_more_than_random_ones_are_not_supported() -> None:
    assert said(causal_location, paper.causal_table(0.88, 0.9)) == NOT
