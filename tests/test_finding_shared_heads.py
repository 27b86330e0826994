"""Shared heads: chance by enumeration, and planted models in which two tasks share their heads or do not."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import reference_passes
import torch
from tiny_study import tiny_study
from transformers import GPT2LMHeadModel

import icl_lens as il
from experiments.findings.shared_heads import FINDING, last_contrasts, rank
from experiments.framework.head_kinds import Located, Removals, losses, shared, shared_with_last
from experiments.framework.other_tasks import Split
from experiments.framework.overlap import drawn_lists, expected_overlap, most_shared_by_chance, overlap
from experiments.framework.run import measure
from experiments.framework.study import Study, contrasts
from experiments.framework.tasks import Task
from experiments.planted import build
from experiments.planted.heads import D_HEAD, N_HEADS
from experiments.planted.stream import D_MODEL
from experiments.planted.vocabulary import LABELS
from icl_lens.intervals import weights_with_data

LABEL_PAIRS = (("foo", "bar"), ("baz", "qux"))


def lists_of(counts: list[int], n_heads: int) -> list[np.ndarray]:
    """Return every list with these numbers of heads per layer, each as [1 layer head] booleans."""
    found = []
    for chosen in product(*(combinations(range(n_heads), count) for count in counts)):
        one = np.zeros((1, len(counts), n_heads), dtype=bool)
        for layer, heads in enumerate(chosen):
            one[0, layer, list(heads)] = True
        found.append(one)
    return found


def test_expected_overlap_is_the_mean_over_all_random_lists():
    first, second = lists_of([2, 1, 0], 4), lists_of([1, 0, 2], 4)
    observed = np.mean([overlap(one, other) for one in first for other in second])
    assert expected_overlap(first[0], second[0])[0] == pytest.approx(observed)
    assert overlap(first[0], first[0])[0] == 1


def test_heads_are_ranked_again_in_every_draw():
    values = np.random.default_rng(0).normal(size=(12, 2, 3))
    clusters = np.arange(12) // 3
    lists = drawn_lists(values, clusters, 2, seed=5)
    weights = weights_with_data(clusters, seed=5)
    for draw in (0, 1, 700, 2000):
        means = sum(weight * value for weight, value in zip(weights[draw], values, strict=True)).flatten()
        assert {*np.flatnonzero(lists[draw])} == {*np.argsort(means)[-2:]}
    assert (lists.sum((1, 2)) == 2).all()
    assert (drawn_lists(values, clusters, 2, seed=6)[1:] != lists[1:]).any()  # drawn independently of each other


def test_a_model_that_does_nothing_shares_nothing(gpt2, tmp_path):
    (row,) = measure(FINDING, tiny_study(gpt2, tmp_path, n=24)).rows
    assert np.isnan(row.quantity)
    assert "does not do the task" in row.note


def test_heads_on_most_lists_by_chance_agree_with_enumeration():
    options = [lists_of(counts, 3) for counts in ([2, 0], [1, 1], [1, 2])]
    maxima = Counter(int(np.sum(chosen, axis=0).max()) for chosen in product(*options))
    drawn = most_shared_by_chance(np.concatenate([some[0] for some in options]), 20_000, seed=0)
    for count, times in maxima.items():
        assert (drawn == count).mean() == pytest.approx(times / maxima.total(), abs=0.02)
    assert {*drawn} == {*maxima}


class TwoTasks:
    """A planted model with four heads that copy labels, and its heads located on foo/bar and on baz/qux."""

    def __init__(self, folder, kind, n_located, *, apart=False):
        self.planted = build(kind, folder, seed=0)
        self.heads = self.planted.heads[kind]
        if apart:
            self.separate()
        model = il.load_model(str(folder), device="cpu")
        self.studies, self.tasks = [], {}
        for name, labels in zip(("first", "second"), LABEL_PAIRS, strict=True):
            task = Task(name, "animal-country", labels, path=str(self.planted.words))
            self.studies.append(Study(model, task, 24, n_heads=n_located))
        for i, study in enumerate(self.studies):
            split = Split.of(study.halves())
            found = rank(study, split.locating, seed=i)
            self.tasks[study.task.name] = replace(found, kind="arbitrary labels", tested=split.held_out.batch)

    def separate(self):
        """Let the first and last head copy foo and bar only, the two others all labels but these."""
        model = GPT2LMHeadModel.from_pretrained(self.planted.folder)
        for i, head in enumerate(self.heads):
            columns = 2 * D_MODEL + head.head * D_HEAD + torch.arange(len(LABELS))
            is_first = torch.tensor([label in LABEL_PAIRS[0] for label in LABELS])
            removed = ~is_first if i in (0, 3) else is_first
            model.transformer.h[head.layer].attn.c_attn.weight.data[:, columns[removed]] = 0
        model.save_pretrained(self.planted.folder)

    def noise(self):
        """Return a task on which heads of the planted layers are listed that only write noise."""
        heads = [
            next(one for one in (il.Head(head.layer, i) for i in range(N_HEADS)) if one not in self.heads)
            for head in (self.heads[0], self.heads[1])
        ]
        lists = np.zeros_like(self.tasks["first"].lists)
        lists[:, [head.layer for head in heads], [head.head for head in heads]] = True
        return Located(heads, lists, self.tasks["first"].accuracy, kind="pairs")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return TwoTasks(tmp_path_factory.mktemp("together"), "two-tower", 4)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return TwoTasks(tmp_path_factory.mktemp("apart"), "two-tower", 2, apart=True)


def test_sharing_is_found_where_it_is_planted(together):
    assert all({*one.heads} == {*together.heads} for one in together.tasks.values())
    found = shared(together.tasks, "arbitrary labels", "arbitrary labels")
    assert found.quantity == 1
    assert found.control < 0.3
    assert found.low > 0
    tasks = {**together.tasks, "noise": together.noise()}
    removals = Removals(together.studies[0], tasks)
    other, own = (removals.cost(source, "arbitrary labels") for source in ("arbitrary labels", None))
    assert other.low > 1
    assert other.quantity == pytest.approx(own.quantity)  # both tasks have the same heads
    assert removals.cost("pairs", "arbitrary labels").quantity < 0.1 * other.quantity
    assert removals.cost("arbitrary labels", "arbitrary labels", "log_prob").low > 0


def test_sharing_is_not_found_where_it_is_not_planted(apart):
    first, second = apart.tasks.values()
    assert {*first.heads} == {apart.heads[0], apart.heads[3]}
    assert {*second.heads} == {apart.heads[1], apart.heads[2]}
    found = shared(apart.tasks, "arbitrary labels", "arbitrary labels")
    assert found.quantity == 0
    assert found.low <= 0
    removals = Removals(apart.studies[0], apart.tasks)
    assert removals.cost(None, "arbitrary labels").low > 0.5
    other = removals.cost("arbitrary labels", "arbitrary labels")
    assert not other.low > 0


@pytest.mark.slow
def test_a_model_that_copies_the_last_output_has_no_lists(tmp_path):
    """Its heads lead the list of heads that write the last output, not that of heads that write the answer."""
    with pytest.raises(il.InputError, match="does not do the task"):
        TwoTasks(tmp_path / "refused", "last-label", 4)
    planted = build("last-label", tmp_path / "model", seed=0)
    model = il.load_model(str(planted.folder), device="cpu")
    study = Study(model, Task("first", "animal-country", path=str(planted.words)), 24)
    batch = study.halves()[0]
    last = study.map(batch, last_contrasts)
    is_answer = torch.tensor([prompt.demonstrations[-1].label == prompt.answer for prompt in batch.prompts])
    torch.testing.assert_close(last, study.map(batch, contrasts) * torch.where(is_answer, 1, -1)[:, None, None])
    mean = last.mean(0)
    best = [il.Head.from_index(index, N_HEADS) for index in mean.flatten().topk(4).indices.tolist()]
    assert {*best} == {*planted.heads["last-label"]}


def test_located_heads_are_not_those_of_the_last_output_in_two_towers(together):
    found = shared_with_last(together.tasks, "arbitrary labels")
    assert found.low <= 0


def test_losses_are_those_of_plain_hugging_face_passes(together):
    model = GPT2LMHeadModel.from_pretrained(together.planted.folder, attn_implementation="eager").eval()
    study = together.studies[1]
    batch = study.held_out[:3]
    sets = [together.heads[:2], together.noise().heads]
    found = losses(study, batch, sets)
    for row, (tokens, last) in enumerate(zip(batch.tokens, batch.last.tolist(), strict=True)):
        answer = int(batch.answer_tokens[row])
        (other,) = {*batch.label_tokens.tolist()} - {answer}

        def scores(heads, tokens=tokens[: last + 1], answer=answer, other=other):
            def zero(what, layer, z):
                if what != "z":
                    return None
                z = z.clone()
                z[-1, [head.head for head in heads if head.layer == layer]] = 0
                return z

            log_probs = reference_passes.run(model, tokens, zero).log_probs
            return np.array([log_probs[answer] - log_probs[other], log_probs[answer]])

        expected = np.stack([scores([]) - scores(heads) for heads in sets])
        assert found[row] == pytest.approx(expected, abs=1e-4)


def test_kinds_with_one_task_have_no_pair_of_different_tasks(together):
    tasks = {"first": together.tasks["first"]}
    with pytest.raises(il.InputError, match="no two different tasks"):
        shared(tasks, "arbitrary labels", "arbitrary labels")
    with pytest.raises(il.InputError, match="no two different tasks"):
        Removals(together.studies[0], tasks).cost("arbitrary labels", "arbitrary labels")
    with pytest.raises(il.InputError, match="no two different tasks"):
        shared_with_last({"first": replace(tasks["first"], last=None)}, "arbitrary labels")


def test_the_page_says_its_numbers_in_three_sentences():
    numbers = ["quantity", "control", "low", "high"]
    parts = [
        ("overlap of kinds", "arbitrary labels", "arbitrary labels", 0.56, 0.21, 0.24, 0.45),
        ("overlap of kinds", "arbitrary labels", "pairs", 0.3, 0.15, -0.1, 0.19),
        ("overlap with last", "arbitrary labels", "", 0.67, 0.22, 0.27, 0.62),
        ("cost", "arbitrary labels", "pairs", 2.62, 0.72, 1.57, 2.22),
        ("cost", "pairs", "arbitrary labels", 0.15, 0.18, -0.3, 0.25),
    ]
    details = pd.DataFrame(parts, columns=["what", "first", "second", *numbers]).assign(heads="", text="")
    names = ["what", "first", "quantity", "control", "high", "text"]
    heads = [("head", "L29H1", 16, 12, 16, "pairs 11/11"), ("head", "L3H0", 12, 12, 16, "pairs 9/11")]
    details = pd.concat([details, pd.DataFrame(heads, columns=names)])
    task = {"what": "task", "first": "antonyms", "second": "pairs", "heads": "L22H8 L25H7", "text": ""}
    details = pd.concat([details, pd.DataFrame([task | dict(zip(numbers, (0.84, 0.24, 0.67, 0.96), strict=True))])])
    cell = SimpleNamespace(model="smollm2-135m", details=details, row=lambda name: SimpleNamespace(n_heads=12))
    assert FINDING.answer([cell]) == (
        "Of 12 located heads, tasks with arbitrary labels share 56% in SmolLM2 (random lists of the same layers 21%, "
        "difference 24 to 45) with each other; 30% in SmolLM2 (15%, −10 to 19) with pairs. Removing the heads of "
        "arbitrary labels at the last position costs, in nats of log-odds, pairs 2.62 in SmolLM2 (random heads 0.72, "
        "difference 1.57 to 2.22). Of these heads, 67% in SmolLM2 (random lists 22%, difference 27 to 62) are among "
        "those that most favor the output shown last; on more lists than any head in 2,000 draws of random lists: 1 "
        "head in SmolLM2 (L29H1, on 16 of 16)."
    )
    assert FINDING.tables is not None
    lines = FINDING.tables([cell]).splitlines()
    assert "| arbitrary labels / arbitrary labels | 56% (21) [24, 45] |" in lines
    assert "| SmolLM2 | arbitrary labels | – | – | – | 2.62 (0.72) [1.57, 2.22] |" in lines
    assert "| antonyms | 84 [67,\N{NO-BREAK SPACE}96] | 24 | L22H8 L25H7 |" in lines
    assert "| next-item | – | – | – |" in lines
    assert "| SmolLM2 | L29H1 | 16 of 16 | 12 | pairs 11/11 |" in lines
    assert not any("L3H0" in line for line in lines)
    assert "Not above the control: in SmolLM2 arbitrary labels / pairs." in lines
    assert "Not above the control: in SmolLM2 pairs → arbitrary labels." in lines
    assert len(FINDING.draw(details.assign(model="m", task="t")).axes) == 2
