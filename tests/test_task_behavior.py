"""What a model does on a task: models with one behavior each are distinguished, and numbers are those of a loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import icl_lens as il
from experiments.planted import Kind, build
from icl_lens.cli.locate import locate
from icl_lens.metrics import bootstrap_interval
from icl_lens.task_behavior import N_PROMPTS, _lesser, _shuffle

NAMES = ("number", "sentiment")
EXPECTED: dict[str, tuple[Kind, tuple[str, ...] | None, tuple[str, ...]]] = {
    "two towers": ("two-tower", None, ("learns",)),
    "a head that compares, and others that copy": ("compare-copy", None, ("learns",)),
    "random weights": ("untrained", None, ("prefers",)),
    "the last label": ("last-label", None, ("copies",)),
    "all labels alike": ("majority", None, ("prefers",)),
    "an FFN that names the category": ("lookup", NAMES, ("knows",)),
    "names that are not among the labels": ("lookup", None, ("prefers",)),
}


@pytest.mark.parametrize("case", EXPECTED)
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


Rule = Callable[[il.Prompt], str]


def check_rule(model: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[il.Prompt], rule: Rule) -> il.TaskCheck:
    """Return the check of a model that predicts the label that a rule returns."""

    def by_rule(model: Any, batch: il.PromptBatch) -> torch.Tensor:
        return torch.eye(len(batch.labels))[[batch.labels.index(rule(prompt)) for prompt in batch.prompts]]

    monkeypatch.setattr("icl_lens.task_behavior.label_log_probs", by_rule)
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
    assert ("prefers 'bar'" in str(found)) == bool(behaviors)
    assert not behaviors or found.effects["prefers"].value == 1


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
    main, _, rest = str(found).partition(":")[0].partition(", and to a lesser degree ")
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
    assert "prefers" not in str(found)


def test_learning_and_knowing_count_together():
    """Each is smaller than the preference, but their sum is larger than every other effect."""
    values = {"learns": 0.4, "knows": 0.4, "copies": 0.3, "prefers": 0.5}
    per_prompt = {name: torch.full((4,), value, dtype=torch.float64) for name, value in values.items()}
    assert _lesser(per_prompt, bootstrap_interval) == ("copies", "prefers")
    with pytest.raises(il.InputError, match="n must be None for a list"):
        il.task_check(None, [], n=20)


def three_classes() -> list[il.Prompt]:
    """Prompts with a third label, each the answer of a third of them."""
    prompts = []
    for i, prompt in enumerate(il.load_task("animal-country", layout="random", n=30)):
        shown = [*prompt.demonstrations, il.Demonstration("green", "baz")]
        prompts.append(il.Prompt(shown, prompt.query, ("foo", "bar", "baz")[i % 3], ("foo", "bar", "baz")))
    return prompts


def test_preferring_is_a_share_with_three_classes(icl_mini, monkeypatch):
    """This holds even if some prompts do not have the label."""
    prompts = three_classes()
    others = [il.Prompt(p.demonstrations[:-1], p.query, "foo", ("foo", "bar")) for p in prompts]
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
        log_probs = il.label_log_probs(icl_mini, il.tokenize(icl_mini, [shown], labels=prompt.labels))[0]
        right.append(prompt.labels[int(log_probs.argmax())] == prompt.answer)
    assert found.accuracy["order"].value == sum(right) / len(right)
    frame = found.to_frame()
    assert frame.loc["accuracy, order", "value"] == found.accuracy["order"].value
    says_last = [
        prompt.demonstrations[-1].label == prompt.answer for prompt in [_shuffle(prompt, 3) for prompt in prompts]
    ]
    assert frame.loc["baseline, last label", "value"] == found.last_label == sum(says_last) / len(says_last)
    assert list(frame.loc["copies"]) == list(found.effects["copies"])


def test_exchanged_labels_are_exchanged_with_three_classes(icl_mini, monkeypatch):
    prompts = three_classes()
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
    assert found.behaviors == ("copies",)
    assert found.effects["copies"].value == 1


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
