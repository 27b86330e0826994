"""What a model does on a task: models that do one thing only are told apart, and the numbers are those of a loop."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import icl_lens as il
from experiments.planted import Kind, build
from icl_lens.cli.locate import locate
from icl_lens.metrics import Interval
from icl_lens.task_behavior import N_PROMPTS, _shuffle

NAMES = ("number", "sentiment")
EXPECTED: dict[str, tuple[Kind, tuple[str, ...] | None, tuple[str, ...]]] = {
    "two towers": ("two-tower", None, ("learns",)),
    "the last label": ("last-label", None, ("copies",)),
    "all labels alike": ("majority", None, ("prefers",)),
    "an FFN that names the category": ("lookup", NAMES, ("knows",)),
    "names that are not among the labels": ("lookup", None, ("prefers",)),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_models_that_do_one_thing(case, tmp_path, capsys):
    """Also in the sentence that a command prints, whatever layout it is asked for."""
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
    assert ("no clear sign that it does the task" in str(found)) == (not {"learns", "knows"} & {*behaviors})


@pytest.mark.parametrize(
    ("rule", "behaviors", "said"),
    [
        pytest.param(lambda prompt: 1, ("prefers",), "prefers 'bar'", id="one label"),
        pytest.param(lambda prompt: 1 - len(prompt.query) % 2, (), "cannot do the task", id="in turn"),
    ],
)
def test_answers_by_a_rule(icl_mini, monkeypatch, rule, behaviors, said):
    def by_rule(model: Any, batch: il.PromptBatch) -> torch.Tensor:
        return torch.eye(2)[[rule(prompt) for prompt in batch.prompts]]

    monkeypatch.setattr("icl_lens.task_behavior.label_log_probs", by_rule)
    found = il.task_check(icl_mini, il.load_task("animal-country", layout="random", n=60))
    assert found.behaviors == behaviors
    assert said in str(found)
    assert not behaviors or found.effects["prefers"].value == 1


def test_the_largest_effect_comes_first(icl_mini):
    """Learning and knowing count together: they add up to doing the task."""
    effects = {"learns": 0.4, "knows": 0.4, "copies": 0.3, "prefers": 0.5}
    found = il.task_check(icl_mini, "animal-country", n=20)
    assert found == il.task_check(icl_mini, il.load_task("animal-country", layout="random", n=20))
    several = replace(found, effects={name: Interval(x, x, x) for name, x in effects.items()}, favorite="bar")
    assert several.behaviors == ("prefers", "learns", "knows", "copies")
    assert str(several).startswith(
        "The model learns from the demonstrations and knows the label words, and to a lesser degree prefers 'bar' and "
        "copies the last label:"
    )
    with pytest.raises(il.InputError, match="n must be None for a list"):
        il.task_check(icl_mini, [], n=20)


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
    prompts = il.load_task("animal-country", layout="random", n=20)
    shown = [[*prompt.demonstrations, il.Demonstration("green", "baz")] for prompt in prompts]
    prompts = [il.Prompt(d, p.query, p.answer, ("foo", "bar", "baz")) for d, p in zip(shown, prompts, strict=True)]
    following = {"foo": "bar", "bar": "baz", "baz": "foo"}
    seen: list[il.Prompt] = []

    def last_label(model: Any, batch: il.PromptBatch) -> torch.Tensor:
        seen.extend(batch.prompts)
        said = [batch.labels.index(prompt.demonstrations[-1].label) for prompt in batch.prompts]
        return torch.eye(3)[said]

    monkeypatch.setattr("icl_lens.task_behavior.label_log_probs", last_label)
    found = il.task_check(icl_mini, prompts)
    for before, random, exchanged in zip(prompts, seen[:20], seen[20:40], strict=True):
        assert sorted(random.demonstrations, key=str) == sorted(before.demonstrations, key=str)
        assert exchanged.answer == following[str(before.answer)]
        for one, other in zip(random.demonstrations, exchanged.demonstrations, strict=True):
            assert (other.text, other.label) == (one.text, following[one.label])
    assert found.behaviors == ("copies",)
    assert found.effects["copies"].value == 1


def test_refused(icl_mini):
    prompts = il.load_task("animal-country", layout="random", n=20)
    unanswered = il.Prompt(prompts[0].demonstrations, "dog", None, prompts[0].labels)
    same = il.Prompt([il.Demonstration("cat", "foo")], "dog", "foo", ("foo", "bar"))
    for last, message in [
        ([], "at least 20 prompts, got 19"),
        ([unanswered], "prompt 19 must have an answer"),
        ([same], "prompt 19 must have demonstrations with at least two labels"),
    ]:
        with pytest.raises(il.InputError, match=message):
            il.task_check(icl_mini, [*prompts[:19], *last])
