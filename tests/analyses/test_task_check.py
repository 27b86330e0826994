"""What a model does on a task: each contrast is zero for other behaviors, and each sentence follows
its number.
"""

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow, slow_except
from planted import Kind, build
from prompt_parts import labels_of, pairs_of, texts_of

import icl_lens as il
from icl_lens.analyses.arrangements import ArrangedPrompt, arrange
from icl_lens.analyses.behavior_contrasts import Contrasts, Design, contrasts
from icl_lens.analyses.task_check import (
    EFFECT_LEVEL,
    N_PROMPTS,
    LabelLogProbs,
    task_check_of_scores,
)
from icl_lens.cli.console import PlainConsole
from icl_lens.cli.locate import locate
from icl_lens.cli.task_options import print_what_heads_carry
from icl_lens.foundation.intervals import Interval

NAMES = ("number", "sentiment")
WORDS = files("icl_lens") / "bundled" / "words.json"
EXPECTED: dict[str, tuple[Kind, tuple[str, ...] | None, tuple[str, ...]]] = {
    "two towers": ("two-tower", None, ("learns",)),
    "a head that compares, and others that copy": ("compare-copy", None, ("learns",)),
    "random weights": ("untrained", None, ("prefers",)),
    "the last label": ("last-label", None, ("copies",)),
    "all labels alike, the earlier a little more": ("majority", None, ("prefers", "avoids")),
    "an FFN that names the category": ("lookup", NAMES, ("knows",)),
    "names that are not among the labels": ("lookup", None, ("prefers",)),
}


QUICK = ("two towers", "the last label")
CASES = slow_except(QUICK, EXPECTED)


@pytest.mark.parametrize("case", CASES)
def test_models_that_do_one_thing(case, tmp_path, capsys):
    """`icl-lens locate` prints the same sentence, although its layout is another."""
    kind, labels, behaviors = EXPECTED[case]
    truth = build(kind, tmp_path)
    model = il.load_model(str(truth.folder), device="cpu")
    check = il.task_check(
        model,
        il.load_task(
            "sentiment-number", path=truth.words, layout="random", n=N_PROMPTS, labels=labels
        ),
    )
    small = {"prefers"} - {
        *behaviors
    }  # the noise of the weights prefers a label by some tenths of a nat
    assert tuple(name for name in check.behaviors if name not in small) == behaviors
    assert "prefers" in behaviors or check.effects["prefers"].value < 0.5
    assert kind == "untrained" or check.shares[behaviors[0]].value > 0.5
    if kind == "lookup":
        options = {
            "task": "sentiment-number",
            "path": truth.words,
            "labels": ",".join(labels) if labels else None,
        }
        capsys.readouterr()
        options |= {"model": str(truth.folder), "n": N_PROMPTS, "k": 1, "layout": "order"}
        locate(**options, device="cpu", anyway=True)
        assert str(check) in " ".join(capsys.readouterr().out.split())
    assert ("not shown to learn" in str(check)) == ("learns" not in behaviors)


PREFERENCES = (0.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("kind", "labels", "tells_apart"),
    [
        slow("two-tower", None, True),
        slow("majority", None, False),
        slow("last-label", None, False),
        slow("lookup", NAMES, True),
    ],
)
def test_a_preference_neither_hides_nor_feigns_another_behavior(
    kind, labels, tells_apart, tmp_path
):
    """From a preference of 0 to 6 nats, the other effects and AUROCs stay; only accuracy and the
    preference change.
    """
    checks, correct = [], []
    for nats in PREFERENCES:
        word = "bar" if labels is None else labels[0]
        truth = build(kind, tmp_path / str(nats), preference=nats, preferred=word)
        model = il.load_model(str(truth.folder), device="cpu")
        prompts = il.load_task(
            "sentiment-number", path=truth.words, layout="random", n=40, labels=labels
        )
        checks.append(il.task_check(model, prompts))
        correct.append(checks[-1].accuracy["given"].value)
    behavior = {"two-tower": "learns", "lookup": "knows", "last-label": "copies"}.get(kind)
    for nats, check in zip(PREFERENCES, checks, strict=True):
        assert check.tells_apart == tells_apart
        assert behavior is None or behavior in check.behaviors
        assert ("model learns from" in str(check)) == (behavior == "learns")
        check_other_effects_stay(check, checks[0])
        if nats >= 1:
            check_preference(check, checks[0], word, nats)
    if kind != "lookup":  # whose neurons add more than 6 nats
        assert min(correct) < 0.75, "the preference is strong enough to hide what was learned"
    assert not tells_apart or max(correct) == 1


def check_other_effects_stay(check, without):
    """AUROC and effects other than the preference are those of the check without a preference."""
    assert check.auroc["given"].value == pytest.approx(without.auroc["given"].value, abs=0.02)
    for name in ("learns", "knows", "copies"):
        assert check.effects[name].value == pytest.approx(without.effects[name].value, abs=0.1)


def check_preference(check, without, word, nats):
    """The preference is the planted one, in addition to that of the check without it."""
    sign = 1 if without.favorite == word else -1
    expected = nats + sign * without.effects["prefers"].value
    preference = check.effects["prefers"].value
    assert check.favorite == word
    assert preference == pytest.approx(expected, abs=0.1)
    assert f"It prefers {word!r} by {preference:.2f} nats" in str(check)


def of_three_classes(words: Any, n: int) -> list[il.Prompt]:
    """Prompts of three classes, two demonstrations each, all labels equally often the answer and
    last.
    """
    listed = json.loads(words.read_text())["categories"]
    classes = {"foo": listed["animal"], "bar": listed["country"], "baz": listed["number"]}
    rng, prompts = np.random.default_rng(0), []
    for i in range(n):
        answer = tuple(classes)[i % 3]
        query = classes[answer][i % 30]
        demonstrations = []
        for label, texts in classes.items():
            candidates = [text for text in texts if text != query]
            for text in rng.choice(candidates, 2, replace=False).tolist():
                demonstrations.append(il.Demonstration(text, label))
        order = [demonstrations[j] for j in rng.permutation(len(demonstrations))]
        prompts.append(il.Prompt(order, query, answer, tuple(classes)))
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tells_apart"), [("two-tower", True), ("last-label", False), ("majority", False)]
)
def test_three_classes_and_a_preference(kind, tells_apart, tmp_path):
    preferences = {}
    for nats in (0.0, 4.0):
        truth = build(kind, tmp_path / str(nats), preference=nats)
        model = il.load_model(str(truth.folder), device="cpu")
        check = il.task_check(model, of_three_classes(truth.words, 60))
        assert check.tells_apart == tells_apart
        assert list(check.label_auroc) == ["foo", "bar", "baz"]
        assert all((share.low > 0.8) == tells_apart for share in check.label_auroc.values())
        assert ("learns" in check.behaviors) == (kind == "two-tower")
        assert kind != "last-label" or "copies" in check.behaviors
        preferences[nats] = check.effects["prefers"].value
    assert check.favorite == "bar"
    assert preferences[4] == pytest.approx(4, abs=1), (
        "the weights have one of some tenths of a nat without it"
    )


def test_aurocs_are_those_of_pairs_in_every_draw():
    """A count over all pairs of prompts, each as often as drawn; each prompt has its own
    choices.
    """
    rng = np.random.default_rng(1)
    scores = torch.from_numpy(rng.normal(size=(30, 3))).log_softmax(-1)
    answer = torch.from_numpy(rng.integers(2, size=30))
    choices = torch.tensor([[True, True, i % 2 == 0] for i in range(30)])
    counts = rng.multinomial(29, [1 / 30] * 30, size=4)
    weights = np.concatenate([np.full((1, 30), 1 / 30), counts / 29])
    aurocs = il.metrics.label_aurocs(scores, answer, choices=choices, weights=weights)
    p = scores.exp().masked_fill(~choices, 0)
    odds = (p / (p.sum(-1, keepdim=True) - p)).log().numpy()
    for draw, often in enumerate([np.ones(30, int), *counts]):
        rows = np.repeat(np.arange(30), often)
        for label in range(2):
            pairs = [
                (odds[i, label] > odds[j, label]) + 0.5 * (odds[i, label] == odds[j, label])
                for i, j in itertools.product(rows, rows)
                if answer[i] == label != answer[j]
            ]
            assert aurocs[draw, label] == pytest.approx(np.mean(pairs))
    assert np.isnan(aurocs[:, 2]).all(), "the third label is never the answer"
    one_row = il.metrics.label_aurocs(scores, answer, choices=choices)
    np.testing.assert_array_equal(one_row, aurocs[:1])


def test_your_prompts_are_measured_as_they_are(icl_mini, monkeypatch):
    """In the paper's layout, copying the last label is always right, and only there."""
    prompts = il.load_task("animal-country", layout="order", n=40)
    check = check_rule(icl_mini, monkeypatch, prompts, copy_last)
    assert check.accuracy["given"].value == check.accuracy["last"].value == check.last_label == 1
    assert check.accuracy["other"].value == 0
    assert check.behaviors == ("copies",)
    assert (
        "In the order given, the model answers 100% of the check's 40 prompts correctly (91%–100%; always the last"
        in str(check)
    )
    assert list(check.accuracy) == ["given", "last", "other", "original", "exchanged"]


def test_prompts_that_share_one_query_have_no_verdict(icl_mini):
    """24 orders of the same demonstrations say nothing about other queries: measured, not
    judged.
    """
    demonstrations = [
        il.Demonstration(*text_and_label)
        for text_and_label in (("cat", "foo"), ("Spain", "bar"), ("dog", "foo"), ("Italy", "bar"))
    ]
    prompts = [
        il.Prompt(order, "France", "bar", ("foo", "bar"))
        for order in itertools.permutations(demonstrations)
    ]
    check = il.task_check(icl_mini, prompts)
    assert (check.n_prompts, check.n_queries, check.behaviors) == (24, 1, ())
    assert str(check).startswith(
        "No verdict, because all 24 prompts have the same query, and an interval needs at least 4"
    )
    assert "nan" not in str(check)
    assert "cannot do" not in str(check)
    batch = il.tokenize(icl_mini, prompts)
    expected = il.metrics.accuracy(il.score(icl_mini, batch), batch.answer)
    assert check.accuracy["given"].value == expected
    assert (
        f"In the order given, the model answers {expected:.0%} of the check's 24 prompts correctly"
        in str(check)
    )
    assert "NaN" not in json.dumps(check.to_dict())


Rule = Callable[[il.Prompt], str]


def check_rule(
    model: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[il.Prompt], rule: Rule
) -> il.results.TaskCheck:
    """Return the check of a model that predicts the label that a rule returns."""

    def by_rule(model: Any, batch: il.PromptBatch) -> torch.Tensor:
        return torch.eye(len(batch.labels))[
            [batch.labels.index(rule(prompt)) for prompt in batch.prompts]
        ]

    monkeypatch.setattr("icl_lens.analyses.task_check.score", by_rule)
    return il.task_check(model, prompts)


def copy_last(prompt: il.Prompt) -> str:
    return prompt.demonstrations[-1].label


def learn(prompt: il.Prompt) -> str:
    return str(prompt.answer)


@pytest.mark.parametrize(
    ("rule", "behaviors"),
    [
        pytest.param(lambda prompt: "bar", ("prefers",), id="one label"),
        pytest.param(lambda prompt: prompt.labels[len(prompt.query) % 2], (), id="by length"),
        pytest.param(
            lambda prompt: prompt.demonstrations[0].label, ("first",), id="the first label"
        ),
        pytest.param(learn, ("learns",), id="the demonstrations"),
    ],
)
def test_answers_by_a_rule(icl_mini, monkeypatch, rule, behaviors):
    check = check_rule(
        icl_mini, monkeypatch, il.load_task("animal-country", layout="random", n=60), rule
    )
    assert check.behaviors == behaviors
    for name in check.effects:
        expected = float(name in behaviors)
        # What goes by the query alone is no behavior, but differs from query to query.
        assert check.shares[name].value == pytest.approx(expected, abs=1e-9 if behaviors else 0.3)


@pytest.mark.slow
def test_accuracies_are_those_of_a_loop(icl_mini):
    prompts = il.load_task("sentiment-number", layout="random", n=20, demonstrations=1)
    check = il.task_check(icl_mini, prompts, seed=3)
    right = []
    for prompt in prompts:
        by_label = sorted(
            prompt.demonstrations, key=lambda demonstration: demonstration.label == prompt.answer
        )
        exchanged = [
            il.Demonstration(pair.text, {"foo": "bar", "bar": "foo"}[pair.label])
            for pair in by_label
        ]
        partner = next(label for label in prompt.labels if label != prompt.answer)
        for arranged, answer in ((by_label, prompt.answer), (exchanged, partner)):
            same = il.Prompt(arranged, prompt.query, answer, prompt.labels)
            log_probs = il.score(icl_mini, il.tokenize(icl_mini, [same], labels=prompt.labels))[0]
            right.append(prompt.labels[int(log_probs.argmax())] == answer)
    assert check.accuracy["last"].value == sum(right) / len(right)
    frame = check.to_frame()
    assert frame.loc["accuracy, last", "value"] == check.accuracy["last"].value
    says_last = [prompt.demonstrations[-1].label == prompt.answer for prompt in prompts]
    assert (
        frame.loc["baseline, last label", "value"]
        == check.last_label
        == sum(says_last) / len(says_last)
    )
    assert list(frame.loc["copies, nats"]) == list(check.effects["copies"])


# Planted scores

LABELS = ("foo", "bar", "baz", "dim", "sum", "wit")
EFFECTS = ("learns", "knows", "copies", "first", "prefers")


def made_up_prompts(n_labels: int, n_each: int, n: int = 48) -> list[il.Prompt]:
    """Return prompts whose classes have labels in random order, with `n_each` demonstrations of
    each class.
    """
    rng, labels, prompts = random.Random(0), LABELS[:n_labels], []
    for number in range(n):
        label_of = rng.sample(labels, n_labels)
        demonstrations = []
        for place, c in itertools.product(range(n_each), range(n_labels)):
            demonstrations.append(il.Demonstration(f"{place} of class {c}", label_of[c]))
        answer = labels[number % n_labels]
        prompts.append(
            il.Prompt(
                rng.sample(demonstrations, len(demonstrations)), f"query {number}", answer, labels
            )
        )
    return prompts


def planted_scores(prompt: il.Prompt, original: str, nats: dict[str, float]) -> np.ndarray:
    """Return the labels' log-probabilities of a model with behaviors of this many nats; it prefers
    "bar".
    """
    gains = dict.fromkeys(prompt.labels, 0.0)
    gains[prompt.answer] += nats.get("learns", 0)
    gains[original] += nats.get("knows", 0)
    gains[prompt.demonstrations[-1].label] += nats.get("copies", 0)
    gains[prompt.demonstrations[0].label] += nats.get("first", 0)
    gains["bar"] += nats.get("prefers", 0)
    scores = np.array([*gains.values()])
    return scores - np.log(np.exp(scores).sum())


def planted_contrasts(arranged: list[ArrangedPrompt], nats: dict[str, float]) -> Contrasts:
    labels = arranged[0].prompts["last"].labels
    design = Design(
        np.array([labels.index(prompt.answer) for prompt in arranged]),
        np.array([labels.index(prompt.partner) for prompt in arranged]),
        np.ones((len(arranged), len(labels)), bool),
        np.array([prompt.starts_as_it_ends for prompt in arranged]),
    )
    scores = []
    for name in arranged[0].prompts:
        scores.append([])
        for prompt in arranged:
            scores[-1].append(planted_scores(prompt.prompts[name], prompt.answer, nats))
    return contrasts(np.array(scores), design)


SINGLE = [{name: 1.5} for name in EFFECTS]
SINGLE += [{name: -1.5} for name in EFFECTS if name not in ("prefers", "first")]
PAIRS = [
    {behavior: 1.0, two: -2.0 if two in ("learns", "copies") else 2.0}
    for behavior, two in itertools.permutations(EFFECTS, 2)
]
PREFERRING = [
    {name: 1.0, "prefers": nats}
    for name, nats in itertools.product(("learns", "knows", "copies"), (2.0, 4.0, 6.0))
]


@pytest.mark.parametrize("n_labels", [2, 3, 4, 6])
@pytest.mark.parametrize("n_each", [1, 2])
def test_a_contrast_is_zero_for_every_other_behavior(n_labels, n_each):
    """In every prompt, alone and in pairs: with one demonstration each, the first label is not told
    from the last.
    """
    arranged = [arrange(prompt) for prompt in made_up_prompts(n_labels, n_each, n=24)]
    for nats in ({}, *SINGLE, *PAIRS, *PREFERRING):
        planted = planted_contrasts(arranged, nats)
        values = {name: getattr(planted, name) for name in EFFECTS} | {
            "prefers": planted.prefers[:, 1]
        }
        expected = {name: nats.get(name, 0.0) for name in EFFECTS}
        if n_each == 1:
            expected |= {"copies": expected["copies"] - expected["first"], "first": np.nan}
        for name in EFFECTS:
            np.testing.assert_allclose(
                values[name], expected[name], atol=1e-9, err_msg=f"{name} of {nats}"
            )


def planted_check(
    prompts: list[il.Prompt], nats: dict[str, float], noise: float = 0.0
) -> il.results.TaskCheck:
    """Return the check of planted scores; `noise` is its standard deviation, nats."""
    arranged, labels, rng = (
        [arrange(prompt) for prompt in prompts],
        prompts[0].labels,
        np.random.default_rng(0),
    )

    def scores(arranged_prompts: list[il.Prompt]) -> LabelLogProbs:
        pairs = zip(arranged_prompts, prompts, strict=True)
        planted = np.array(
            [planted_scores(prompt, str(original.answer), nats) for prompt, original in pairs]
        )
        answers = [labels.index(str(prompt.answer)) for prompt in arranged_prompts]
        return LabelLogProbs(
            torch.from_numpy(planted + rng.normal(0, noise, planted.shape)), torch.tensor(answers)
        )

    by_arrangement = {}
    for name in arranged[0].prompts:
        by_arrangement[name] = scores([prompt.prompts[name] for prompt in arranged])
    return task_check_of_scores(scores(prompts), by_arrangement, prompts, arranged, labels)


CLAIMS = {
    "learns": "The model learns from the demonstrations",
    "contradicts": "The model contradicts the demonstrations",
    "knows": "It knows which class a label names",
    "misreads": "It reads the classes' words against the original labels",
    "copies": "It copies the last label",
    "avoids": "It avoids the last label",
    "first": "It copies the first label",
    "avoids first": "It avoids the first label",
    "prefers": "It prefers 'bar'",
}


@pytest.mark.parametrize(
    ("nats", "behaviors"),
    [
        ({}, ()),
        ({"learns": 1}, ("learns",)),
        ({"learns": -1}, ("contradicts",)),
        ({"knows": 1}, ("knows",)),
        ({"knows": -1}, ("misreads",)),
        ({"copies": 1}, ("copies",)),
        ({"copies": -1}, ("avoids",)),
        ({"first": 1}, ("first",)),
        ({"first": -1}, ("avoids first",)),
        ({"prefers": 1}, ("prefers",)),
        ({"learns": 1, "prefers": 6}, ("prefers", "learns")),
        ({"learns": 2, "knows": 3}, ("knows", "learns")),
        ({"copies": -2, "knows": 1}, ("avoids", "knows")),
        ({"learns": 0.05, "prefers": 0.05}, ()),
    ],
)
def test_each_behavior_that_holds_gets_its_sentence_and_no_other(nats, behaviors):
    for n_labels in (2, 3):
        check = planted_check(made_up_prompts(n_labels, 2, n=36), nats, noise=0.05)
        assert check.behaviors == behaviors
        sentence = str(check)
        for name, claim in CLAIMS.items():
            assert (claim in sentence) == (name in behaviors)
        assert ("not shown to learn" in sentence) == (not {"learns", "contradicts"} & {*behaviors})
        assert "degree" not in sentence
        assert (check.on_heads_that_matter() == "") == ("learns" in behaviors)


@pytest.mark.parametrize("preferred", [-4, 4])
def test_the_baseline_of_one_answer_is_the_most_frequent_one(preferred):
    """Whichever label the model prefers."""
    prompts = made_up_prompts(2, 2, n=36)
    same = prompts[0].labels[0]
    most = [*prompts[:4], *[prompt for prompt in prompts[4:] if prompt.answer == same]]
    check = planted_check(most, {"prefers": preferred}, noise=0.05)
    share = sum(prompt.answer == same for prompt in most) / len(most)
    assert (check.commonest, check.one_label) == (same, pytest.approx(share))
    assert share > 0.8
    assert f"always {same!r} {share:.0%})" in str(check)
    assert f"baseline, always {same!r}" in check.to_frame().index


@pytest.mark.parametrize(
    ("nats", "share", "verb"),
    [
        (0.5, 0.3, "copies"),
        (0.5, -0.3, "leans toward"),
        (-0.5, -0.3, "avoids"),
        (-0.5, 0.3, "leans away from"),
    ],
)
def test_answers_that_do_the_opposite_do_not_follow_the_first_label(nats, share, verb):
    check = planted_check(made_up_prompts(2, 2, n=36), {}, noise=0.05)
    effects = check.effects | {"first": Interval(nats, nats - 0.2, nats + 0.2)}
    shares = check.shares | {"first": Interval(share, share - 0.2, share + 0.2)}
    made_up = replace(check, effects=effects, shares=shares)
    assert f"It {verb} the first label" in str(made_up)


def test_every_measure_of_the_tables_is_defined_below_them():
    pairs = il.results.PairCheck
    table = planted_check(made_up_prompts(2, 2, n=36), {}, noise=0.05).to_view().sections[0]
    share = Interval(0.5, 0.2, 0.8)
    effects = dict.fromkeys(("learns", "maps", "knows", "copies"), share)
    accuracy = dict.fromkeys(("given", "mismatched", "none"), share)
    pair_table = pairs(20, 20, accuracy, effects, share, 0.1, 0.1, 0.1, 0.1).to_view().sections[0]
    for section in (table, pair_table):
        definitions = " ".join(section.notes).lower()
        for measure, *_ in section.rows:
            words = re.findall(r"\w+", re.sub("'.*?'", "", measure.lower()))
            undefined = [word for word in words if word not in definitions]
            assert set(undefined) <= {"always", "wrongly", "another", "shown", "last"}, measure
        assert max(map(len, section.notes)) <= 80


def test_heads_that_matter_are_no_sign_of_learning(capsys):
    """Said beside a finding that heads matter, if the model is not shown to learn, and not
    otherwise.
    """
    prompts = made_up_prompts(2, 2, n=36)
    learning = planted_check(prompts, {"learns": 1, "copies": 2}, noise=0.05)
    copying = planted_check(prompts, {"copies": 1, "prefers": 2}, noise=0.05)
    nothing = planted_check(prompts, {}, noise=0.05)
    needed = SimpleNamespace(shows_that_heads_matter=True)
    not_needed = SimpleNamespace(shows_that_heads_matter=False)
    silent = [(learning, needed), (copying, not_needed), (None, needed), (copying, None)]
    for behavior, removal in silent:
        print_what_heads_carry(PlainConsole(), behavior, removal)
        assert capsys.readouterr().out == ""
    sources = (
        (copying, "which here depends on a preference for 'bar' and which label is last."),
        (nothing, "carry the answer, which may come from anything else in the prompt."),
    )
    for behavior, ending in sources:
        print_what_heads_carry(PlainConsole(), behavior, needed)
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.startswith("That heads matter is no sign of learning")
        assert printed.endswith(ending)


def test_a_behavior_that_no_answer_follows_is_called_a_leaning():
    prompts = made_up_prompts(2, 2)
    check = planted_check(prompts, {"learns": 3, "copies": 0.5})
    assert check.behaviors == ("learns", "copies")
    assert (
        "It leans toward the last label: a label gains 0.50 nats (0.50 … 0.50) where it is shown last, but"
        in str(check)
    )
    assert (
        "100% of answers are right where the query's class is last, and 100% where another class is"
        in str(check)
    )
    check = planted_check(prompts, {"learns": 3, "copies": -0.5, "first": 0.5})
    assert "It leans away from the last label" in str(check)
    assert "It leans toward the first label" in str(check)
    hidden = planted_check(prompts, {"learns": 1, "prefers": 3})
    assert (
        "although its answers do not clearly follow; 50% of answers follow them with the original labels"
        in str(hidden)
    )
    assert "answers do not" not in str(planted_check(prompts, {"learns": 1, "prefers": 0.5}))


def test_an_avoided_last_label_is_named():
    """17% right where the query's class is last and 88% where it is not: learning alone would be
    called nothing.
    """
    prompts = made_up_prompts(2, 2, n=60)
    check = planted_check(prompts, {"copies": -0.87}, noise=0.6)
    assert check.behaviors == ("avoids",)
    assert check.accuracy["last"].value < 0.3 < 0.7 < check.accuracy["other"].value
    last, where_other_is_last = (check.accuracy[name].value for name in ("last", "other"))
    assert (
        f"{last:.0%} of answers are right where the query's class is last, and {where_other_is_last:.0%} where"
        in str(check)
    )


def test_with_one_answer_a_preference_is_not_told_from_knowing_words():
    prompts = [prompt for prompt in made_up_prompts(2, 2, n=80) if prompt.answer == "bar"]
    check = planted_check(prompts, {"learns": 1, "knows": 1, "prefers": 1})
    assert np.isnan(check.effects["knows"].value)
    assert check.behaviors == ("prefers", "learns")
    assert check.effects["prefers"].value == pytest.approx(2)
    assert "It prefers 'bar' or knows its word, which these prompts cannot tell apart" in str(check)
    three = [prompt for prompt in made_up_prompts(3, 2, n=80) if prompt.answer == "bar"]
    check = planted_check(three, {"learns": 1, "prefers": 6})
    assert (check.behaviors, check.favorite) == (("learns",), "bar")
    assert np.isnan(check.effects["prefers"].value)


def test_intervals_are_those_of_the_sampled_estimate():
    """The spread of estimates over fresh prompts is what the values of each prompt say, whatever
    the preference.
    """
    estimates, errors = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        prompts = made_up_prompts(3, 2, n=30)
        design = Design(
            np.array([LABELS.index(str(prompt.answer)) for prompt in prompts]),
            np.array([(LABELS.index(str(prompt.answer)) + 1) % 3 for prompt in prompts]),
            np.ones((30, 3), bool),
            rng.random(30) < 0.5,
        )
        estimated = contrasts(rng.normal(0, 1, (4, 30, 3)) + np.array([0.0, 6.0, 0.0]), design)
        values = np.stack(
            [estimated.learns, estimated.knows, estimated.copies, estimated.prefers[:, 1]]
        )
        estimates.append(values.mean(1))
        errors.append(values.std(1, ddof=1) / np.sqrt(30))
    np.testing.assert_allclose(np.mean(errors, 0), np.std(estimates, 0), rtol=0.25)


# Arrangements


def test_the_table_says_which_intervals_are_wider(icl_mini):
    """Those of behaviors are 99% intervals, as are the nats of the printed sentence."""
    check = il.task_check(icl_mini, "animal-country", n=20)
    (section,) = check.to_view().sections
    assert section.columns[2].name == "interval"
    assert any("99%" in note for note in section.notes)
    assert pytest.approx(0.99) == EFFECT_LEVEL


@pytest.mark.parametrize("n_labels", [2, 3, 4])
@pytest.mark.parametrize("n_each", [1, 2, 3])
def test_mirrored_orders_have_the_same_labels_as_exchanged_ones(n_labels, n_each):
    starts_as_it_ends = set()
    for prompt in made_up_prompts(n_labels, n_each):
        arranged = arrange(prompt)
        labels = {name: labels_of(p) for name, p in arranged.prompts.items()}
        assert labels["last"] == labels["other, exchanged"]
        assert labels["other"] == labels["last, exchanged"]
        assert (labels["last"][-1], labels["other"][-1]) == (arranged.answer, arranged.partner)
        assert labels["last"][0] in (arranged.answer, arranged.partner)
        assert (labels["last"][0] == arranged.answer) == arranged.starts_as_it_ends
        starts_as_it_ends.add(arranged.starts_as_it_ends)
    assert starts_as_it_ends == ({False} if n_each == 1 else {False, True})


@pytest.mark.parametrize("n_labels", [2, 3, 4])
@pytest.mark.parametrize("n_each", [1, 2, 3])
def test_orders_keep_texts_and_exchanges_only_change_labels(n_labels, n_each):
    for prompt in made_up_prompts(n_labels, n_each):
        arranged = arrange(prompt)
        for name in ("last", "other"):
            ordered, exchanged = arranged.prompts[name], arranged.prompts[f"{name}, exchanged"]
            assert {*pairs_of(ordered)} == {*pairs_of(prompt)}
            assert texts_of(exchanged) == texts_of(ordered)
            assert ordered.answer == prompt.answer
            assert exchanged.answer == arranged.partner


def test_classes_with_different_numbers_of_demonstrations_get_the_same_number():
    prompt = il.Prompt.parse("a : x b : x c : x d : y e : z f : z g :", answer="x")
    for arranged_prompt in arrange(prompt).prompts.values():
        counts = [labels_of(arranged_prompt).count(label) for label in "xyz"]
        assert counts == [1, 1, 2]
    assert arrange(prompt) == arrange(prompt) != arrange(prompt, seed=1)


def test_prompts_that_cannot_be_checked_are_refused(icl_mini):
    prompts = il.load_task("animal-country", layout="random", n=20)
    unanswered = il.Prompt(prompts[0].demonstrations, "dog", None, prompts[0].labels)
    same = il.Prompt([il.Demonstration("cat", "foo")], "dog", "foo", ("foo", "bar"))
    for last, message in [
        ([], "at least 20 prompts, got 19"),
        ([unanswered], "prompt 19 must have an answer"),
        ([same], "prompt 19 must have demonstrations with at least two labels, got 'foo'"),
    ]:
        with pytest.raises(il.InputError, match=message):
            il.task_check(icl_mini, [*prompts[:19], *last])


def test_an_interval_that_includes_a_tenth_of_a_nat_is_no_behavior():
    check = planted_check(made_up_prompts(2, 2), {"prefers": 0.5})
    for low, is_named in ((0.11, True), (0.09, False)):
        changed = replace(check, effects=check.effects | {"prefers": Interval(0.5, low, 0.9)})
        assert (
            ("prefers" in changed.behaviors)
            == ("It prefers 'bar' by 0.50 nats" in str(changed))
            == is_named
        )
    small = replace(check, effects=check.effects | {"learns": Interval(0.15, 0.02, 0.2)})
    assert "not shown to learn" in str(small)
    assert "gains 0.15 nats (0.02 … 0.20), not clearly more than 0.1;" in str(small)
