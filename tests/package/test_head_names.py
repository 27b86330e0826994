"""Wherever a head is an argument, its name, a pair and a `Head` are the same."""

import inspect
from functools import wraps

import pytest
import sweep
import torch
from sweep import assert_same

import icl_lens as il
from icl_lens.models.head import AnyHead

FORMS = [lambda head: head, tuple, lambda head: str(head).lower()]


def change_in_live_view(case):
    pytest.importorskip("anywidget", reason="anywidget is missing: there is no live view")
    view = il.live(case.model, case.prompts[0], heads=[case.reader])
    assert view.wait(120)
    view.close()
    return torch.tensor(view.numbers["change"]["log_probs"])


def explained(case):
    return il.explain(case.model, case.prompts[0], k=12)


def mean_parts(case):
    return il.mean_score_parts(case.model, case.batch, [case.reader])


CALLS = {name: call.function for name, call in sweep.CALLS.items()} | {
    "explain": lambda c: str(
        il.explain(c.model, c.prompts[0], why=c.reader).to_frame("words").to_dict()
    ),
    "html.attention_patterns": lambda c: str(
        il.html.attention_patterns(["a", "b"], torch.eye(2)[None], [c.reader])
    ),
    "html.attention_to_labels": lambda c: str(il.html.attention_to_labels(c.acts, heads=c.heads)),
    "html.subhead_values": lambda c: str(il.html.subhead_values(explained(c), c.heads)),
    "html.words_by_position": lambda c: str(il.html.words_by_position(explained(c), c.heads)),
    "head_atlas": lambda c: str(il.head_atlas(c.model, n_sequences=2, heads=c.heads)),
    "head_overlap": lambda c: str(il.head_overlap(c.model, c.heads, c.heads[:1])),
    "live": change_in_live_view,
    "random_head_sets": lambda c: str(il.random_head_sets(c.model, c.heads, n_random=2, seed=0)),
    "HeadAtlas.row": lambda c: str(il.head_atlas(c.model, n_sequences=2).row(c.reader)),
    "HeadAtlas.for_heads": lambda c: str(il.head_atlas(c.model, n_sequences=2).for_heads(c.heads)),
    "HeadAtlas.notes_on": lambda c: str(il.head_atlas(c.model, n_sequences=2).notes_on(c.reader)),
    "MeanScoreParts.sentence": lambda c: mean_parts(c).sentence(c.reader),
    "MeanScoreParts.strongest": lambda c: str(mean_parts(c).strongest(c.reader, "key")),
    "MeanScoreParts.total": lambda c: str(mean_parts(c).total(c.reader)),
    "ScoreParts.by_position": sweep.CALLS["attention_score_parts"].function,
    "ValueParts.by_position": sweep.CALLS["value_parts"].function,
}
"""The calls of the sweep, and those of other functions, or in which heads are optional."""


def takes_heads():
    """Yield the public functions and methods with an argument that is a head, or contains heads:
    owner and name.
    """
    owners = {"": il} | {
        f"{name}.": getattr(il, name) for name in dir(il) if not name.startswith("_")
    }
    owners |= {f"{name}.": getattr(il.results, name) for name in il.results.__all__}
    for prefix, owner in owners.items():
        for name in dir(owner):
            function = getattr(owner, name, None)
            is_edit = inspect.isclass(function) and issubclass(function, il.Edit)
            if (
                name.startswith("_")
                or not (inspect.isfunction(function) or is_edit)
                or not inspect.isclass(owner) * prefix.count(".") + inspect.ismodule(owner)
            ):
                continue
            if arguments_of_heads(function):
                yield prefix + name, owner


def arguments_of_heads(function):
    arguments = inspect.signature(function).parameters
    return [
        name for name, parameter in arguments.items() if str(AnyHead) in str(parameter.annotation)
    ]


def converted(value, form):
    """Return an argument with its heads in another form."""
    if isinstance(value, il.Head):
        return form(value)
    if isinstance(value, str) and value.startswith("L"):
        return form(il.Head.parse(value))
    return [converted(head, form) for head in value] if isinstance(value, list) else value


OWNERS = dict(takes_heads())


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", OWNERS)
def test_a_head_has_three_forms(gpt2, monkeypatch, name):
    attribute = name.rpartition(".")[2]
    function, answers_by_form, argument_reprs = getattr(OWNERS[name], attribute), [], []
    for form in FORMS:

        @wraps(function)
        def call(*args, form=form, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            for argument in bound.arguments.keys() & {*arguments_of_heads(function)}:
                bound.arguments[argument] = converted(bound.arguments[argument], form)
                argument_reprs.append(repr(bound.arguments[argument]))
            return function(*bound.args, **bound.kwargs)

        monkeypatch.setattr(OWNERS[name], attribute, call)
        answers_by_form.append(CALLS[name](sweep.Case(gpt2, sweep.PROMPTS, sweep.OTHERS)))
    assert len({*argument_reprs}) >= len(FORMS), "a call must have heads"
    for answer_in_form in answers_by_form[1:]:
        if isinstance(answer_in_form, str):
            assert answer_in_form == answers_by_form[0]
        else:
            assert_same(answer_in_form, answers_by_form[0], msg=name)
