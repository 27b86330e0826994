"""What a model does on a task: models with one behavior each are distinguished, and numbers are those of a loop."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch

import icl_lens as il
from experiments.planted import Kind, build
from icl_lens.analyses.task_behavior import N_PROMPTS, _lesser, _shuffle
from icl_lens.cli.locate import locate
from icl_lens.intervals import Interval, percentile_interval

NAMES = ("number", "sentiment")
WORDS = files("icl_lens") / "bundled" / "words.json"
EXPECTED: dict[str, tuple[Kind, tuple[str, ...] | None, tuple[str, ...]]] = {
    "two towers": ("two-tower", None, ("learns",)),
    "a head that compares, and others that copy": ("compare-copy", None, ("learns",)),
    "random weights": ("untrained", None, ("prefers",)),
    "the last label": ("last-label", None, ("copies",)),
    "all labels alike": ("majority", None, ("prefers",)),
    "an FFN that names the category": ("lookup", NAMES, ("knows",)),
    "names that are not among the labels": ("lookup", None, ("prefers",)),
}


QUICK = ("two towers", "the last label")
CASES = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in EXPECTED]


@pytest.mark.parametrize("case", CASES)
def test_models_that_do_one_thing(case, tmp_path, capsys):
    """`icl-lens locate` prints the same sentence, although its layout is another."""
    kind, labels, behaviors = EXPECTED[case]
    truth = build(kind, tmp_path)
    model = il.load_model(str(truth.folder), device="cpu")
    found = il.task_check(
        model, il.load_task("sentiment-number", path=truth.words, layout="random", n=N_PROMPTS, labels=labels)
    )
    assert found.behaviors == behaviors
    assert all(found.effects[name].value > 0.5 for name in behaviors)
    assert all(found.effects[name].value < 0.2 for name in found.effects if name not in behaviors)
    if kind == "lookup":
        options = {"task": "sentiment-number", "path": truth.words, "labels": ",".join(labels) if labels else None}
        capsys.readouterr()
        locate(**options, model=str(truth.folder), n=4, k=1, layout="order", device="cpu")
        assert str(found) in " ".join(capsys.readouterr().out.split())
    assert ("no clear sign of doing the task" in str(found)) == (not {"learns", "knows"} & {*behaviors})


PREFERENCES = (0.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("kind", "labels", "tells_apart"),
    [
        pytest.param("two-tower", None, True, marks=pytest.mark.slow),
        pytest.param("majority", None, False, marks=pytest.mark.slow),
        pytest.param("last-label", None, False, marks=pytest.mark.slow),
        pytest.param("lookup", NAMES, True, marks=pytest.mark.slow),
    ],
)
def test_a_preference_neither_hides_nor_feigns_that_a_model_tells_the_classes_apart(
    kind, labels, tells_apart, tmp_path
):
    """From a preference of 0 to 6 nats, the verdict and its AUROCs stay; only accuracy and the preference change."""
    found, correct = [], []
    for nats in PREFERENCES:
        word = "bar" if labels is None else labels[0]
        truth = build(kind, tmp_path / str(nats), preference=nats, preferred=word)
        model = il.load_model(str(truth.folder), device="cpu")
        prompts = il.load_task("sentiment-number", path=truth.words, layout="random", n=40, labels=labels)
        found.append(il.task_check(model, prompts))
        correct.append(found[-1].accuracy["given"].value)
    behavior = {"two-tower": "learns", "lookup": "knows", "last-label": "copies"}.get(kind)
    for nats, one in zip(PREFERENCES, found, strict=True):
        assert one.tells_apart == tells_apart
        assert one.auroc["random"].value == pytest.approx(found[0].auroc["random"].value, abs=0.02)
        assert one.effects["learns"].value == pytest.approx(found[0].effects["learns"].value, abs=0.02)
        assert behavior is None or behavior in one.behaviors
        sign = 1 if found[0].favorite == word else -1
        if nats >= 1:
            assert one.favorite == word
            assert one.preference.value == pytest.approx(nats + sign * found[0].preference.value, abs=0.05)
            assert one.preference.low > 0
            assert f"prefers {word!r} by {one.preference.value:.1f} nats" in str(one)
        assert ("it tells the classes apart" in str(one)) == tells_apart
        assert ("but prefers" in str(one)) == (tells_apart and one.preference.low > 0)
    if kind != "lookup":  # whose neurons add more than 6 nats
        assert min(correct) < 0.75, "the preference is strong enough to hide what was learned"
    assert not tells_apart or max(correct) == 1


def of_three_classes(words: Any, n: int) -> list[il.Prompt]:
    """Prompts of three classes, two demonstrations each, all labels equally often the answer and last."""
    listed = json.loads(words.read_text())["categories"]
    classes = {"foo": listed["animal"], "bar": listed["country"], "baz": listed["number"]}
    rng, prompts = np.random.default_rng(0), []
    for i in range(n):
        answer = tuple(classes)[i % 3]
        query = classes[answer][i % 30]
        shown = [
            il.Demonstration(text, label)
            for label, texts in classes.items()
            for text in rng.choice([text for text in texts if text != query], 2, replace=False).tolist()
        ]
        order = [shown[j] for j in rng.permutation(len(shown))]
        prompts.append(il.Prompt(order, query, answer, tuple(classes)))
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tells_apart"), [("two-tower", True), ("last-label", False), ("majority", False)])
def test_three_classes_and_a_preference(kind, tells_apart, tmp_path):
    for nats in (0.0, 4.0):
        truth = build(kind, tmp_path / str(nats), preference=nats)
        model = il.load_model(str(truth.folder), device="cpu")
        found = il.task_check(model, of_three_classes(truth.words, 60))
        assert found.tells_apart == tells_apart
        assert list(found.label_auroc) == ["foo", "bar", "baz"]
        assert all((share.low > 0.8) == tells_apart for share in found.label_auroc.values())
        assert kind != "last-label" or "copies" in found.behaviors
        assert nats == 0 or (found.favorite == "bar" and found.preference.value == pytest.approx(nats, abs=0.5))


def test_aurocs_are_those_of_pairs_in_every_draw():
    """A count over all pairs of prompts, each as often as drawn; each prompt has its own choices."""
    rng = np.random.default_rng(1)
    scores = torch.from_numpy(rng.normal(size=(30, 3))).log_softmax(-1)
    answer = torch.from_numpy(rng.integers(2, size=30))
    choices = torch.tensor([[True, True, i % 2 == 0] for i in range(30)])
    counts = rng.multinomial(29, [1 / 30] * 30, size=4)
    weights = np.concatenate([np.full((1, 30), 1 / 30), counts / 29])
    found = il.metrics.label_aurocs(scores, answer, choices=choices, weights=weights)
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
            assert found[draw, label] == pytest.approx(np.mean(pairs))
    assert np.isnan(found[:, 2]).all(), "the third label is never the answer"
    one_row = il.metrics.label_aurocs(scores, answer, choices=choices)
    np.testing.assert_array_equal(one_row, found[:1])


def test_your_prompts_are_measured_as_they_are(icl_mini, monkeypatch):
    """In the paper's layout, copying the last label is always right, and only there."""
    prompts = il.load_task("animal-country", layout="order", n=40)
    found = check_rule(icl_mini, monkeypatch, prompts, copy_last)
    assert found.accuracy["given"].value == found.last_label == 1
    assert found.accuracy["random"].value < 0.75
    assert found.behaviors == ("copies",)
    assert not found.tells_apart
    assert ". 100% of the 40 prompts correct (91%–100%; always the last label 100%" in str(found)
    assert list(found.accuracy) == ["given", "random", "exchanged", "order", "reorder"]


def test_prompts_that_share_one_query_have_no_verdict(icl_mini):
    """24 orders of the same demonstrations say nothing about other queries: measured, not judged."""
    shown = [il.Demonstration(*one) for one in (("cat", "foo"), ("Spain", "bar"), ("dog", "foo"), ("Italy", "bar"))]
    prompts = [il.Prompt(order, "France", "bar", ("foo", "bar")) for order in itertools.permutations(shown)]
    found = il.task_check(icl_mini, prompts)
    assert (found.n_prompts, found.n_queries, found.behaviors) == (24, 1, ())
    assert str(found).startswith("No verdict, because all 24 prompts have the same query")
    assert "nan" not in str(found)
    assert "cannot do" not in str(found)
    batch = il.tokenize(icl_mini, prompts)
    expected = il.metrics.accuracy(il.score(icl_mini, batch), batch.answer)
    assert found.accuracy["given"].value == expected
    assert f"{expected:.0%} of the 24 prompts correct" in str(found)
    assert "NaN" not in json.dumps(found.to_dict())


Rule = Callable[[il.Prompt], str]


def check_rule(
    model: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[il.Prompt], rule: Rule
) -> il.results.TaskCheck:
    """Return the check of a model that predicts the label that a rule returns."""

    def by_rule(model: Any, batch: il.PromptBatch) -> torch.Tensor:
        return torch.eye(len(batch.labels))[[batch.labels.index(rule(prompt)) for prompt in batch.prompts]]

    monkeypatch.setattr("icl_lens.analyses.task_behavior.score", by_rule)
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
    ],
)
def test_answers_by_a_rule(icl_mini, monkeypatch, rule, behaviors):
    found = check_rule(icl_mini, monkeypatch, il.load_task("animal-country", layout="random", n=60), rule)
    assert found.behaviors == behaviors
    assert ("cannot do the task" in str(found)) == (not behaviors)
    assert ("prefers 'bar'" in str(found).partition(". By")[0]) == bool(behaviors)
    assert not behaviors or found.effects["prefers"].value == pytest.approx(1)


@pytest.mark.parametrize(
    ("rules", "lesser"),
    [
        pytest.param([copy_last, lambda prompt: "bar"], (), id="as often"),
        pytest.param([copy_last] * 3 + [lambda prompt: "bar"], ("prefers",), id="three times as often"),
        pytest.param([learn] * 3 + [copy_last], ("copies",), id="learns more often"),
    ],
)
def test_smaller_effects_are_clearly_smaller(icl_mini, monkeypatch, rules, lesser):
    """Each query has its own rule, so the effects are the shares of queries."""
    prompts = il.load_task("animal-country", layout="random", n=60)
    place = {query: i for i, query in enumerate(sorted({prompt.query for prompt in prompts}))}

    def mixed(prompt: il.Prompt) -> str:
        return rules[place[prompt.query] % len(rules)](prompt)

    found = check_rule(icl_mini, monkeypatch, prompts, mixed)
    assert len(found.behaviors) == 2
    assert found.lesser == lesser
    main, _, rest = str(found).partition(". By")[0].partition(", and to a lesser degree ")
    for name, words in {"copies": "copies", "prefers": "prefers", "learns": "learns"}.items():
        assert (words in main) == (name in found.behaviors and name not in lesser)
        assert (words in rest) == (name in lesser)


def test_effects_that_one_query_shows_are_not_told(icl_mini, monkeypatch):
    """An effect above zero whose interval includes zero is neither a behavior nor a lesser one."""
    prompts = il.load_task("animal-country", layout="random", n=60)
    odd = prompts[0].query
    found = check_rule(
        icl_mini, monkeypatch, prompts, lambda prompt: "bar" if prompt.query == odd else copy_last(prompt)
    )
    assert found.effects["prefers"].value > 0
    assert found.behaviors == ("copies",)
    assert found.lesser == ()
    assert "prefers" not in str(found).partition(". By")[0]


def test_learning_and_knowing_count_together():
    """Each is smaller than the preference, but their sum is larger than every other effect."""
    values = {"learns": 0.4, "knows": 0.4, "copies": 0.3, "prefers": 0.5}
    draws = {name: np.full(4, value) for name, value in values.items()}

    def interval(one):
        return percentile_interval(float(one[0]), one[1:], n_clusters=9)

    assert _lesser(draws, interval) == ("copies", "prefers")
    with pytest.raises(il.InputError, match="n must be None for a list"):
        il.task_check(None, [], n=20)


@pytest.mark.slow
def test_preferring_is_a_share_with_three_classes(icl_mini, monkeypatch):
    """This holds even if some prompts do not have the label."""
    prompts = of_three_classes(WORDS, 30)
    shown = [[one for one in p.demonstrations if one.label != "baz"] for p in prompts]
    others = [il.Prompt(some, p.query, "foo", ("foo", "bar")) for some, p in zip(shown, prompts, strict=True)]
    for some, favorite in ((prompts, "baz"), (prompts + others, "baz"), (prompts + others, "bar")):

        def prefer(prompt: il.Prompt, label: str = favorite) -> str:
            return label if label in prompt.labels else learn(prompt)

        found = check_rule(icl_mini, monkeypatch, some, prefer)
        assert found.favorite == favorite
        assert found.effects["prefers"].value == pytest.approx(1)


def test_accuracies_are_those_of_a_loop(icl_mini):
    prompts = il.load_task("sentiment-number", layout="random", n=20, demonstrations=1)
    found = il.task_check(icl_mini, prompts, seed=3)
    right = []
    for prompt in prompts:
        own = sorted(prompt.demonstrations, key=lambda one: one.label == prompt.answer)
        shown = il.Prompt(own, prompt.query, prompt.answer, prompt.labels)
        log_probs = il.score(icl_mini, il.tokenize(icl_mini, [shown], labels=prompt.labels))[0]
        right.append(prompt.labels[int(log_probs.argmax())] == prompt.answer)
    assert found.accuracy["order"].value == sum(right) / len(right)
    frame = found.to_frame()
    assert frame.loc["accuracy, order", "value"] == found.accuracy["order"].value
    says_last = [prompt.demonstrations[-1].label == prompt.answer for prompt in prompts]
    assert frame.loc["baseline, last label", "value"] == found.last_label == sum(says_last) / len(says_last)
    assert list(frame.loc["copies"]) == list(found.effects["copies"])


def test_exchanged_labels_are_exchanged_with_three_classes(icl_mini, monkeypatch):
    prompts = of_three_classes(WORDS, 30)
    following = {"foo": "bar", "bar": "baz", "baz": "foo"}
    seen: list[il.Prompt] = []

    def see(prompt: il.Prompt) -> str:
        seen.append(prompt)
        return copy_last(prompt)

    found = check_rule(icl_mini, monkeypatch, prompts, see)
    for before in prompts:
        random = _shuffle(before, 0)
        shown = [il.Demonstration(one.text, following[one.label]) for one in random.demonstrations]
        assert random in seen
        assert il.Prompt(shown, before.query, following[str(before.answer)], before.labels) in seen
    assert len(seen) == len(set(seen)) > 90
    assert {*prompts} <= {*seen}
    assert found.behaviors == ("copies",)
    assert found.effects["copies"].value == pytest.approx(1)


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


def test_a_preference_whose_interval_includes_zero_is_no_clear_one(icl_mini):
    found = il.task_check(icl_mini, "animal-country", n=20)
    for low, words in ((0.1, f"prefers {found.favorite!r} by 0.5 nats"), (-0.1, "prefers no label clearly")):
        sentence = str(replace(found, preference=Interval(0.5, low, 0.9)))
        assert words in sentence.partition("By its log-odds")[2]
