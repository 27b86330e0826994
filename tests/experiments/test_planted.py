"""Planted heads do what their roles say and cause the models' answers, which test_task_check.py
tests.
"""

import itertools
from typing import Any, NamedTuple, get_args

import pytest
import torch
from cases import slow
from planted import Kind, Planted, build
from prompt_parts import labels_of
from safetensors.torch import load_file

import icl_lens as il
from icl_lens.metrics import accuracy, label_log_odds

KINDS: tuple[Kind, ...] = get_args(Kind)
CHANCE = (0.3, 0.7)
BATCHES: dict[tuple[il.Prompt, ...], il.PromptBatch] = {}
NATURAL = ("number", "sentiment")


def task(truth: Planted, *, swapped: bool = False, n: int = 12, **options: Any) -> list[il.Prompt]:
    """Return prompts of load_task whose queries are numbers or, if `swapped`, sentiments."""
    name = "number-sentiment" if swapped else "sentiment-number"
    return il.load_task(name, path=truth.words, n=n, **options)


def balanced(truth: Planted, *, demonstrations: int = 2) -> list[il.Prompt]:
    """Prompts in random order: queries of both classes, both labels as the answer."""
    options: dict[str, Any] = {"demonstrations": demonstrations, "n": 16}
    return [*task(truth, swapped=False, **options), *task(truth, swapped=True, **options)]


def with_counts(truth: Planted, true: int, false: int) -> list[il.Prompt]:
    """Return prompts in random order with `true` demonstrations of the query's class and `false` of
    the other.
    """
    prompts = []
    for prompt in balanced(truth, demonstrations=4):
        left = [
            true if demonstration.label == prompt.answer else false
            for demonstration in prompt.demonstrations
        ]
        labels = labels_of(prompt)
        n_before = [labels[:i].count(label) for i, label in enumerate(labels)]
        demonstrations = [
            demonstration
            for demonstration, most, before in zip(
                prompt.demonstrations, left, n_before, strict=True
            )
            if before < most
        ]
        prompts.append(il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels))
    return prompts


def tokenized(model: Any, prompts: list[il.Prompt]) -> il.PromptBatch:
    """The prompts as a batch, made once: all planted models have the same tokenizer."""
    key = tuple(prompts)
    if key not in BATCHES:
        BATCHES[key] = il.tokenize(model, prompts)
    return BATCHES[key]


class Answers(NamedTuple):
    """Accuracy and log-odds of a model on prompts of two labels each, as means over the prompts."""

    accuracy: float
    log_odds: float


def answers(model: Any, prompts: list[il.Prompt]) -> Answers:
    batch = tokenized(model, prompts)
    values = il.score(model, batch)
    return Answers(
        accuracy(values, batch.answer), float(label_log_odds(values, batch.answer).mean())
    )


def noise_like(truth: Planted, heads: tuple[il.Head, ...]) -> list[il.Head]:
    """Return the same number of heads of the same layers that are noise."""
    used = set().union(*truth.heads.values())
    noise_heads: list[il.Head] = []
    for head in heads:
        candidates = (il.Head(head.layer, index) for index in range(8))
        noise_heads.append(
            next(
                candidate
                for candidate in candidates
                if candidate not in used and candidate not in noise_heads
            )
        )
    return noise_heads


def share_on_true(acts: il.Activations, heads: list[il.Head] | tuple[il.Head, ...]) -> list[float]:
    """Return the share of each head's attention to labels that is on labels of the query's class,
    over all prompts.
    """
    attention = acts.attention_to_labels()
    is_true = (acts.batch.label_index == acts.batch.answer[:, None])[:, None, None]
    share = (attention * is_true).sum((0, -1)) / attention.sum((0, -1))
    return [share[head.layer, head.head].item() for head in heads]


@pytest.mark.slow
def test_majority_follows_the_counts(planted):
    truth, model = planted("majority")
    assert answers(model, with_counts(truth, 4, 1)).accuracy >= 0.95
    assert answers(model, with_counts(truth, 1, 4)).accuracy <= 0.05
    assert abs(answers(model, balanced(truth)).log_odds) < 0.3
    acts = il.capture(model, tokenized(model, balanced(truth)))
    attention = torch.stack(
        [acts.attention_to_labels()[:, h.layer, h.head] for h in truth.heads["majority"]]
    )
    assert attention.sum(-1).mean() > 0.75
    assert (attention.mean(1) / attention.sum(-1).mean() - 1 / 4).abs().max() < 0.1


@pytest.mark.slow
def test_lookup_does_without_demonstrations(planted):
    truth, model = planted("lookup")
    prompts = [
        *task(truth, swapped=False, labels=NATURAL),
        *task(truth, swapped=True, labels=NATURAL),
    ]
    demonstrations = [il.Demonstration("iron", "number"), il.Demonstration("tennis", "sentiment")]
    unrelated = [il.Prompt(demonstrations, prompt.query, prompt.answer) for prompt in prompts]
    assert answers(model, unrelated).accuracy >= 0.95
    with il.ablate_heads(model, truth.heads["mover"]):
        assert answers(model, unrelated).accuracy < 0.75


@pytest.mark.slow
def test_suppressors_lower_labels_that_are_shown_and_no_others(planted):
    truth, model = planted("suppressor")
    shown = il.tokenize(model, balanced(truth))
    scores = {}
    for name, labels in (("shown", ("foo", "bar")), ("not shown", ("baz", "qux"))):
        tokens = model.tokenizer.convert_tokens_to_ids(list(labels))
        edits = [[], [il.Ablate(truth.heads["suppressor"])]]
        log_probs = il.score(
            model, shown, edits, read=lambda rows, _, tokens=tokens: rows[:, tokens]
        )
        scores[name] = log_probs.mean((0, 2))
    assert scores["not shown"][0] > -4  # of 22 labels
    assert scores["shown"][0] < scores["not shown"][0] - 2
    assert abs(scores["shown"][1] - scores["not shown"][1]) < 1


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("two-tower", "two-tower"),
        slow("two-tower", "mover"),
        slow("compare-copy", "copier"),
        slow("compare-copy", "mover"),
        slow("compare-copy", "comparer"),
    ],
)
def test_planted_heads_are_the_cause(planted, kind, role):
    truth, model = planted(kind)
    prompts = balanced(truth)
    before = answers(model, prompts)
    assert before.log_odds > 3
    with il.ablate_heads(model, truth.heads[role]):
        without = answers(model, prompts)
    assert abs(without.log_odds) < 0.5
    assert CHANCE[0] <= without.accuracy <= CHANCE[1]
    with il.ablate_heads(model, noise_like(truth, truth.heads[role])):
        control = answers(model, prompts)
    assert abs(control.log_odds - before.log_odds) < 0.5
    assert control.accuracy >= 0.95
    with il.ablate_heads(model, truth.heads["decoy"]):
        assert answers(model, prompts).accuracy >= 0.95


def test_heads_attend_to_what_their_roles_say(planted):
    truth, model = planted("two-tower")
    batch = tokenized(model, balanced(truth))
    acts = il.capture(model, batch)
    attention = acts.attention_to_labels()
    for head, share in zip(
        truth.heads["two-tower"], share_on_true(acts, truth.heads["two-tower"]), strict=True
    ):
        assert share > 0.85
        assert attention[:, head.layer, head.head].sum(-1).mean() > 0.85
    assert all(abs(share - 0.5) < 0.05 for share in share_on_true(acts, truth.heads["decoy"]))
    (mover,) = truth.heads["mover"]
    _, cache = model.run_with_cache(batch.tokens)
    pattern = cache[f"blocks.{mover.layer}.attn.hook_pattern"][:, mover.head]
    labels, rows = batch.label_positions, torch.arange(len(batch))
    assert pattern[rows[:, None], labels, labels - 2].mean() > 0.85
    assert pattern[rows, batch.last, batch.last - 1].mean() > 0.85


@pytest.mark.slow
def test_copier_attends_to_the_label_that_the_comparer_picked(planted):
    truth, model = planted("compare-copy")
    acts = il.capture(model, tokenized(model, balanced(truth)))
    assert min(share_on_true(acts, [*truth.heads["comparer"], *truth.heads["copier"]])) > 0.85
    with il.ablate_heads(model, truth.heads["comparer"]):
        acts = il.capture(model, acts.batch)
    assert all(abs(share - 0.5) < 0.1 for share in share_on_true(acts, truth.heads["copier"]))


@pytest.mark.slow
def test_same_seed_same_files_and_same_noise_in_all_kinds(planted, tmp_path):
    truth, _ = planted("two-tower")
    again = build("two-tower", tmp_path / "again", seed=0)
    for name in ("model.safetensors", "words.json", "tokenizer.json", "config.json"):
        assert (truth.folder / name).read_bytes() == (again.folder / name).read_bytes()
    weights = {kind: load_file(planted(kind)[0].folder / "model.safetensors") for kind in KINDS}
    for kind, tensors in weights.items():
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        for layer in (0, 7):
            for name in ("attn.c_attn.weight", "mlp.c_fc.weight"):
                key = f"transformer.h.{layer}.{name}"
                assert torch.equal(tensors[key], weights["two-tower"][key]), kind


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hidden", slow("removed")])
def test_demonstrations_help_as_planted(planted, way: str) -> None:
    """Of the query's class where texts are compared, the last one, by their label alone, or not at
    all.
    """
    means = {}
    for kind in ("two-tower", "last-label", "majority", "lookup"):
        truth, model = planted(kind)
        effects = il.demonstration_effects(model, il.tokenize(model, balanced(truth)), ways=[way])
        means[kind] = effects.by_place().set_index(["place", "demonstrations"])["mean"]
    for place in range(1, 5):
        assert means["two-tower"][place, "answer"] > 0.3
        assert means["two-tower"][place, "other"] < 0.1
        assert means["majority"][place, "answer"] > 1.5
        assert means["majority"][place, "other"] < -1.5
    for place, whose in itertools.product(range(1, 5), ("answer", "other")):
        assert abs(means["lookup"][place, whose]) < 0.1
    for place, whose in itertools.product(range(1, 4), ("answer", "other")):
        assert abs(means["last-label"][place, whose]) < 0.1
    assert means["last-label"][4, "answer"] > 5
    assert means["last-label"][4, "other"] < -5
    if way == "hidden":
        check_totals(means)


def check_totals(means: dict[str, Any]) -> None:
    # Two demonstrations of a class replace each other; labels that are equally frequent cancel.
    whole = {kind: mean["all at once", "both"] for kind, mean in means.items()}
    assert whole["two-tower"] > 5 > 5 * means["two-tower"]["sum", "both"]
    assert abs(whole["majority"]) < 0.1
