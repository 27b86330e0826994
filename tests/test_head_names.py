"""Wherever a head is an argument, its name, a pair and a `Head` are the same."""

import inspect

import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.head import AnyHead

FORMS = [il.Head(2, 1), (2, 1), "l2h1"]
NAME = "L2H1"


def within(block):
    """Return a call that measures the labels' log-probabilities within a block."""

    def measure(run, head):
        with block(run, head):
            return il.score(run.model, run.batch)

    return measure


def change_in_live_view(run, head):
    pytest.importorskip("anywidget", reason="anywidget is missing: there is no live view")
    view = il.live(run.model, run.batch.prompts[0], heads=[head])
    assert view.wait(120)
    view.close()
    return torch.tensor(view.numbers["change"]["log_probs"])


CALLS = {
    "ablate_heads": within(lambda run, head: il.ablate_heads(run.model, [head])),
    "ablate_with_controls": lambda run, head: (
        il.ablate_with_controls(run.model, run.batch, [head], n_random=1).conditions["heads"].scores[0].label_log_probs
    ),
    "attention_score_parts": lambda run, head: il.attention_score_parts(run.acts, head).scores,
    "Block": within(lambda run, head: il.edited(run.model, il.Block([head], run.edges))),
    "choose_strength": lambda run, head: torch.from_numpy(
        il.choose_strength(run.model, run.batch, run.batch, [head], fix="majority").to_frame().to_numpy(float)
    ),
    "debias_edits": within(
        lambda run, head: il.edited(run.model, *il.debias_edits(run.batch, [head], majority=1.0), batch=run.batch)
    ),
    "explain": lambda run, head: il.explain(run.model, run.batch.prompts[0], why=head).to_frame("words"),
    "function_vector": lambda run, head: il.function_vector(run.model, run.batch, [head]),
    "head_copying": lambda run, head: il.head_copying(run.model, head, [40, 50, 60]),
    "head_to_head_effects": lambda run, head: (
        il.head_to_head_effects(
            run.model, run.batch, [head], part="q", writers=[(0, 1) if isinstance(head, tuple) else "L0H1"]
        ).log_prob
    ),
    "html.attention_patterns": lambda run, head: str(
        il.html.attention_patterns(["a", "b"], torch.eye(2)[None], [head])
    ),
    "html.attention_to_labels": lambda run, head: str(il.html.attention_to_labels(run.acts, heads=[head])),
    "html.subhead_values": lambda run, head: str(il.html.subhead_values(run.explained, heads=[head])),
    "html.words_by_position": lambda run, head: str(il.html.words_by_position(run.explained, heads=[head])),
    "Activations.label_keys": lambda run, head: run.acts.label_keys(head, source="resid"),
    "Ablate": lambda run, head: il.score(run.model, run.batch, [[il.Ablate([head])]]),
    "Patch": lambda run, head: il.score(
        run.model, run.batch, [[il.Patch([head], run.batch[[1, 0]], activation="q", positions="last")]]
    ),
    "label_similarity": lambda run, head: il.label_similarity(run.model, run.batch, [head]),
    "Activations.label_values": lambda run, head: run.acts.label_values(head),
    "Activations.last_query": lambda run, head: run.acts.last_query(head),
    "live": change_in_live_view,
    "locate_circuit": lambda run, head: il.locate_circuit(
        run.model, run.many, run.many, [head], n_edges=3, n_random=2
    ).to_frame(),
    "mean_score_parts": lambda run, head: il.mean_score_parts(run.model, run.many, [head]).to_frame(),
    "MeanScoreParts.sentence": lambda run, head: il.mean_score_parts(run.model, run.many, [NAME]).sentence(head),
    "MeanScoreParts.strongest": lambda run, head: il.mean_score_parts(run.model, run.many, [NAME]).strongest(
        head, "key"
    ),
    "MeanScoreParts.total": lambda run, head: il.mean_score_parts(run.model, run.many, [NAME]).total(head),
    "Activations.own_label_ranks": lambda run, head: run.acts.own_label_ranks(head).double(),
    "patch_heads": within(
        lambda run, head: il.patch_heads(run.model, [head], run.batch[[1, 0]], activation="q", positions="last")
    ),
    "query_key_metric": lambda run, head: il.query_key_metric(run.model, head).query_side,
    "RemovePosition": within(lambda run, head: il.edited(run.model, il.RemovePosition([head]))),
    "Reweight": within(
        lambda run, head: il.edited(
            run.model,
            il.Reweight([head], torch.zeros(run.batch.label_positions.shape), renormalize=False),
            batch=run.batch,
        )
    ),
    "ScoreParts.by_position": lambda run, head: il.attention_score_parts(run.acts, "L3H0").by_position(head, "key"),
    "two_towers": lambda run, head: il.two_towers(run.model, run.many.prompts, [head], n_random=1).to_frame(),
    "value_parts": lambda run, head: il.value_parts(run.acts, head, run.batch.answer_tokens).parts,
    "ValueParts.by_position": lambda run, head: il.value_parts(run.acts, "L3H0", run.batch.answer_tokens).by_position(
        head
    ),
}


def takes_heads():
    """Return the public functions and methods with an argument that is a head, or contains heads."""
    owners = {"": il} | {f"{name}.": getattr(il, name) for name in dir(il) if not name.startswith("_")}
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
            if any(str(AnyHead) in str(one.annotation) for one in inspect.signature(function).parameters.values()):
                yield prefix + name


def test_every_function_with_heads_is_tried():
    assert {*CALLS} == {*takes_heads()}


@pytest.fixture(scope="module")
def run(icl_mini):
    class Run:
        """A model with prompts of one length, and more of them."""

        model = icl_mini
        many = il.tokenize(icl_mini, il.load_task("sentiment-number", n=8))
        batch = many[[0, 1]]
        explained = il.explain(icl_mini, batch.prompts[0], k=48)
        acts = il.capture(icl_mini, batch, writers="all")
        edges = torch.ones(1, batch.tokens.shape[1], batch.tokens.shape[1], dtype=torch.bool).tril(-1)

    return Run


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_head_has_three_forms(run, name):
    first, *others = (CALLS[name](run, form) for form in FORMS)
    for other in others:
        if isinstance(first, torch.Tensor):
            assert_close(other, first)
        elif hasattr(first, "equals"):
            assert other.equals(first)
        else:
            assert str(other) == str(first)
