"""Other papers: function vectors and indirect effects against the library and loops, and an untrained model."""

import pytest
import torch
from tiny_study import CATEGORIES, tiny_study

import icl_lens as il
from experiments.findings.other_papers import FINDING
from experiments.framework import function_vectors
from experiments.framework.function_vectors import assignments, indirect_effects, steered
from experiments.framework.run import measure
from experiments.framework.study import Study


@pytest.fixture
def study(gpt2, tmp_path) -> Study:
    return tiny_study(gpt2, tmp_path)


def test_shuffled_labels_say_nothing_and_assignments_are_opposite(study):
    one, other = assignments(study)
    for pair in zip(one.held_out.prompts, other.held_out.prompts, strict=True):
        assert len({tuple(prompt.demonstrations) for prompt in pair}) == 1
        assert len({prompt.answer for prompt in pair}) == 2
        by_class = [{d.label for d in pair[0].demonstrations if d.text in words} for words in CATEGORIES.values()]
        assert by_class == [{"foo", "bar"}] * 2
    for task in (one, other):
        named = {(d.text in CATEGORIES["number"], d.label) for p in task.reference.prompts for d in p.demonstrations}
        assert len(named) == 2  # one label for each class
    assert not {p.query for p in one.reference.prompts} & {p.query for p in one.held_out.prompts}


def test_vectors_are_added_as_plain_blocks_would(study):
    (task, _), sets = assignments(study), [[], [il.Head(1, 0), il.Head(2, 3)]]
    vectors = function_vectors._vectors(study, task.reference, sets)
    torch.testing.assert_close(vectors[1].float(), il.function_vector(study.model, sets[1], task.reference))
    assert not vectors[0].any()
    vectors = 5 * vectors
    for zero_shot in (False, True):
        found = function_vectors._log_odds(study, task.held_out, vectors, zero_shot)
        batch = function_vectors.without_demonstrations(study, task.held_out) if zero_shot else task.held_out
        for layer in range(3):
            with il.add_vector(study.model, vectors[1].float(), layer, batch):
                log_probs = il.last_log_probs(study.model, batch)
            first, second = log_probs[:, task.held_out.label_tokens].unbind(1)
            expected = (1 - 2.0 * task.held_out.answer) * (first - second)
            torch.testing.assert_close(found[:, 1, layer].float(), expected, atol=1e-4, rtol=0)
        assert (found[:, 0, 0] - found[:, 1, 0]).abs().max() > 1e-3


def test_the_layer_is_chosen_on_the_locating_prompts(study, monkeypatch):
    tasks = list(assignments(study))
    odds = {True: torch.tensor([0.0, 2.0, 1.0]), False: torch.tensor([3.0, -1.0, 3.0])}  # locating, held out

    def made_up(study, batch, vectors, zero_shot):
        return odds[any(batch is task.locating for task in tasks)].expand(len(batch), len(vectors), 3)

    monkeypatch.setattr(function_vectors, "_log_odds", made_up)
    correct, clusters = steered(study, tasks, zero_shot=False)
    assert correct.shape == (len(clusters), 2 + function_vectors.N_VECTOR_SETS)
    assert not correct.any()  # the layer best on locating prompts is wrong on held-out ones


def test_indirect_effects_are_the_librarys_and_a_plain_loops(study):
    tasks = list(assignments(study))
    effects = indirect_effects(study, tasks)
    expected = torch.cat([il.indirect_effects(study.model, task.held_out, task.reference) for task in tasks])
    torch.testing.assert_close(effects.probability, expected)
    batch = tasks[1].held_out
    with il.ablate_heads(study.model, [(1, 2)], mode="mean", reference=tasks[1].reference, positions="last"):
        after = il.label_log_probs(study.model, batch)
    gained = (after - il.label_log_probs(study.model, batch)) @ torch.tensor([1.0, -1.0]) * (1 - 2.0 * batch.answer)
    torch.testing.assert_close(effects.log_odds[len(tasks[0].held_out) :, 1, 2], gained, atol=1e-5, rtol=0)


def test_an_untrained_model_gains_nothing(gpt2, tmp_path):
    rows = measure(FINDING, tiny_study(gpt2, tmp_path, n=40)).rows
    gains = [row for row in rows if row.measure in ("vector_shuffled", "vector_zero_shot")]
    assert len(gains) == 4  # for heads located by contrast and by increase
    for row in gains:
        assert row.note == "accuracy with nothing added: 50.0%"
        assert row.low <= 0 <= row.high
