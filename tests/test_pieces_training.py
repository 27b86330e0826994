"""Training of the bundled models: what is held out stays out, levels and the stopping rule, resumed runs, the card."""

import contextlib
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.pieces_world import card, curriculum
from experiments.pieces_world import train as training
from experiments.pieces_world.architectures import N_POSITIONS, fuse_activations, make_model, matrices
from experiments.pieces_world.curriculum import LEVELS, Data, Level
from experiments.pieces_world.episodes import load_words
from experiments.pieces_world.muon import Muon, orthogonalized
from experiments.pieces_world.pieces import make_tokenizer
from experiments.pieces_world.train import Settings, Trainer, told_accuracy, train, weighted_losses
from experiments.pieces_world.validation import label_accuracy, validation_episodes
from icl_lens.errors import InputError

WORDS = load_words()
TOKENIZER = make_tokenizer(WORDS, N_POSITIONS)
ARCHS = ("gpt2", "llama", "gptj")


def small(arch="gpt2", **given):
    return Settings(arch, **{"n_tokens": 100, "steps": 4, "check_every": 2, "n_checked": 4, "warm_up": 2, **given})


def data(n_tokens=600):
    return Data(WORDS, TOKENIZER, 0, n_tokens)


def state(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def words_of(row):
    return TOKENIZER.decode([index for index in row if index != TOKENIZER.pad_token_id]).split()


# Batches


def test_held_out_pairs_are_never_trained_on():
    """No text of an episode without strays, and no two of its classes, are of categories of a held-out pair."""
    source, met = data(), set()
    for level in (1, 2):
        for step in range(40):
            batch = source.batch(step, level)
            if batch.kind != "episode":
                continue
            for row in batch.tokens.tolist():
                sure = {WORDS.owners[word][0] for word in words_of(row) if len(WORDS.owners.get(word, ())) == 1}
                pairs = {frozenset(pair) for pair in itertools.combinations(sure, 2)}
                assert not pairs & source.held_out
                met |= pairs
    assert len(met) > 300


def test_levels_begin_with_names_and_end_with_the_whole_world():
    source = data()
    kinds = [{source.batch(step, level).kind for step in range(60)} for level in range(len(LEVELS))]
    assert kinds == [set(level.shares) for level in LEVELS]
    assert kinds[0] == {"list", "named"}
    assert "episode" in kinds[-1]
    fillers, labels = set(WORDS.fillers), set(WORDS.labels)

    def seen(level, wanted):
        episodes = [batch for step in range(60) if (batch := source.batch(step, level)).kind == "episode"]
        return [len(set(words_of(row)) & wanted) for batch in episodes for row in batch.tokens.tolist()]

    names = set(WORDS.names.values())
    assert max(seen(1, fillers)) == max(seen(2, fillers)) == 0
    assert max(seen(4, fillers)) > 5
    assert max(seen(1, labels)) == 6
    assert max(seen(4, labels)) == 4
    assert min(seen(4, labels)) == 1
    assert max(seen(1, names)) > 1
    assert max(seen(2, names)) == max(seen(4, names)) == 0


def test_batches_pad_on_the_right_with_weight_zero_and_every_piece_has_its_words_weight():
    source = data()
    batch = next(b for step in range(50) if (b := source.batch(step, 4)).kind == "episode")
    padding = batch.tokens == TOKENIZER.pad_token_id
    assert padding.any()
    assert torch.equal(padding, batch.weights == 0)
    assert (padding[:, 1:] >= padding[:, :-1]).all()
    row, weights = source._row(["love", ":", "foo"], [0.1, 0.1, 1.0])
    assert row == TOKENIZER("love : foo").input_ids
    assert weights == [0.1, 0.1, 0.1, 1.0]


def test_a_batch_is_a_function_of_seed_step_and_level():
    one, again, other = data().batch(7, 3), data().batch(7, 3), Data(WORDS, TOKENIZER, 1, 600).batch(7, 3)
    assert torch.equal(one.tokens, again.tokens)
    assert torch.equal(one.weights, again.weights)
    assert one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens)


# Loss and optimiser


class Fixed(nn.Module):
    """A model that always gives the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, use_cache=None):
        return Fixed(self.logits.expand(*input_ids.shape, -1))


def test_the_loss_counts_only_weighted_tokens():
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 3, 2, 1]])
    weights = torch.tensor([[9.0, 0.5, 1.0, 0.0]])
    by_hand = (
        0.5 * functional.cross_entropy(logits[0, 0:1], torch.tensor([3]))
        + 1.0 * functional.cross_entropy(logits[0, 1:2], torch.tensor([2]))
    ) / 1.5
    assert torch.allclose(weighted_losses(logits, tokens, weights), by_hand)


def test_running_accuracy_counts_names_and_labels_only():
    logits = torch.zeros(1, 4, 5)
    logits[0, 0, 3] = logits[0, 1, 4] = logits[0, 2, 1] = 1.0
    tokens = torch.tensor([[0, 3, 2, 1]])
    assert told_accuracy(logits, tokens, torch.tensor([[0.1, 1.0, 0.1, 0.1]])) == 1.0
    assert told_accuracy(logits, tokens, torch.tensor([[0.1, 1.0, 1.0, 0.1]])) == 0.5


@pytest.mark.parametrize("shape", [(12, 12), (12, 40), (40, 12)])
def test_orthogonalized_has_equal_singular_values_and_the_same_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix)
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.5
    assert singular.max() < 1.3
    inside = u.T @ result @ v.T  # diagonal in the same bases
    assert (inside - inside.diag().diag()).abs().max() < 1e-3


def test_muon_moves_by_its_rate_and_takes_joint_matrices_apart():
    generator = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(16, 48, generator=generator))
    before, gradient = weight.detach().clone(), torch.randn(16, 48, generator=generator)
    weight.grad = gradient.clone()
    Muon([{"params": [weight], "parts": 3, "axis": 1}], lr=0.5).step()
    moved = before - weight.detach()
    for part, source in zip(moved.chunk(3, 1), gradient.chunk(3, 1), strict=True):
        torch.testing.assert_close(part, 0.5 * 0.2 * 4.0 * orthogonalized(source), rtol=1e-4, atol=1e-5)
    assert abs(moved.pow(2).mean().sqrt() - 0.1) < 0.03


@pytest.mark.parametrize("arch", ARCHS)
def test_every_matrix_of_the_layers_has_one_group(arch):
    model = make_model(arch, 50)
    grouped = [parameter for group in matrices(model) for parameter in group["params"]]
    assert len({id(p) for p in grouped}) == len(grouped)
    assert all(p.ndim == 2 for p in grouped)
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and (".h." in name or ".layers." in name)]
    assert {id(p) for p in grouped} == {id(p) for p in inside}
    joint = [p for group in matrices(model) if group.get("parts") == 3 for p in group["params"]]
    assert len(joint) == (8 if arch == "gpt2" else 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_fused_activations_are_the_same_function(arch):
    torch.manual_seed(0)
    model = make_model(arch, 50).eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = model(input_ids=tokens).logits
    fuse_activations(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, before)


# Validation, levels, stopping


def test_validation_prompts_are_held_out_pairs_with_2_to_16_demonstrations():
    source = data()
    episodes = validation_episodes(source, 40, longest=8)
    assert [e.prompt for e in episodes] == [e.prompt for e in validation_episodes(source, 40, longest=8)]
    for episode in episodes:
        assert frozenset(episode.categories) in source.held_out
        shown = [item.told for item in episode.items[:-1]]
        assert sum(shown) == len(shown) / 2
        assert all(item.told == item.side for item in episode.items)
    assert [len(episode.items) - 1 for episode in episodes] == [2, 4, 8, 16] * 10
    seen = validation_episodes(source, 40, longest=8, held_out=False)
    assert not {frozenset(episode.categories) for episode in seen} & source.held_out


def test_validation_accuracy_is_between_the_two_labels():
    source = data()
    episodes = validation_episodes(source, 50, longest=1)
    logits = torch.zeros(1, 1, len(TOKENIZER))
    logits[..., 2] = 9.0  # the colon, which is no label
    order = torch.arange(float(len(TOKENIZER)))
    logits[0, 0] += order / 1000
    right = [source.pieces[e.answer][0] == max(source.pieces[label][0] for label in e.labels) for e in episodes]
    assert label_accuracy(Fixed(logits), source, episodes) == pytest.approx(100 * sum(right) / 50)


def test_a_level_ends_at_its_accuracy_and_not_before_its_least_number_of_steps(monkeypatch):
    easy = (
        Level({"named": 1.0}, until=0.5, measured="named"),
        Level({"episode": 1.0}, until=0.5),
        Level({"episode": 1.0}),
    )
    monkeypatch.setattr(training, "LEVELS", easy)
    monkeypatch.setattr(curriculum, "LEVELS", easy)
    accuracy = iter([0.4, 0.9, 0.9, 0.9, 0.6, 0.9, 0.9])
    monkeypatch.setattr(training, "told_accuracy", lambda *args: next(accuracy))
    trainer = Trainer(small(at_least=2, memory=0.0), WORDS)
    levels = []
    for _ in range(7):
        trainer.step()
        levels.append(trainer.progress.level)
    assert levels == [0, 1, 1, 2, 2, 2, 2]


def test_the_stopping_rule(monkeypatch):
    accuracy = iter([99.0] * 3 + [80.0] * 3 + [88.0] * 3 + [90.0] * 3 + [97.0] * 3)
    monkeypatch.setattr(training, "label_accuracy", lambda *args: next(accuracy))
    trainer = Trainer(small(cool_down=0.59, n_checked=2, check_every=10), WORDS)
    at = trainer.progress
    at.done, at.level = 100, 3
    trainer.check()
    assert (at.cooling_began, at.finished) == (None, False)  # not the last level
    at.level = len(LEVELS) - 1
    trainer.check()
    assert (at.cooling_began, at.finished) == (None, False)
    assert trainer.rate() == 1.0
    trainer.check()
    assert (at.cooling_began, at.finished) == (100, False)
    at.done = 125
    assert trainer.rate() == 0.5
    trainer.check()
    assert not at.finished
    trainer.check()
    assert at.finished
    assert [entry["step"] for entry in trainer.history] == [100, 100, 100, 125, 125]
    at.done, at.cooling_began = 750, None
    assert trainer.rate() == 0.3
    at.cooling_began = 100
    at.finished, at.done = False, 150
    monkeypatch.setattr(training, "label_accuracy", lambda *args: 90.0)
    trainer.check()
    assert at.finished  # the rates have come to zero


# Whole runs


@pytest.mark.parametrize("arch", ARCHS)
def test_a_resumed_run_is_the_unbroken_run(arch, tmp_path):
    settings = small(arch, at_least=1, memory=0.5)
    unbroken = Trainer(settings, WORDS)
    losses = [unbroken.step() for _ in range(4)]
    broken = Trainer(settings, WORDS)
    first = [broken.step(), broken.step()]
    broken.check()
    broken.save(tmp_path)
    resumed = Trainer(settings, WORDS)
    resumed.resume(tmp_path)
    assert resumed.progress == broken.progress
    assert resumed.history == broken.history
    assert [*first, resumed.step(), resumed.step()] == losses
    for name, parameter in state(unbroken).items():
        assert torch.equal(parameter, state(resumed)[name]), name
    assert list(tmp_path.iterdir()) == [tmp_path / training.CHECKPOINT]


def test_resuming_another_run_is_refused(tmp_path):
    trainer = Trainer(small(), WORDS)
    trainer.step()
    trainer.save(tmp_path)
    with pytest.raises(InputError, match="--no-resume"):
        Trainer(small(steps=5), WORDS).resume(tmp_path)


def test_ten_snapshots_are_left_at_the_end(tmp_path):
    trainer = Trainer(small(), WORDS)
    for done in range(10, 480, 10):
        trainer.progress.done = done
        trainer.snapshot(tmp_path)
    stored = load_file(tmp_path / "step-000470.safetensors")
    assert set(stored) == set(state(trainer))
    assert all(tensor.dtype == torch.float16 for tensor in stored.values())
    training.thin_out(tmp_path)
    kept = sorted(int(path.stem[5:]) for path in tmp_path.iterdir())
    assert len(kept) == 10
    assert kept[0] == 10
    assert kept[-1] == 470
    assert {b - a for a, b in itertools.pairwise(kept)} <= {50, 60}
    training.thin_out(tmp_path)
    assert len(list(tmp_path.iterdir())) == 10


@pytest.mark.parametrize("arch", ARCHS)
def test_a_run_writes_a_loadable_folder_of_at_most_6_mb(arch, tmp_path):
    folder = tmp_path / "tiny"
    train(small(arch), folder, tmp_path / "checkpoints", resume=True)
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6_000_000
    assert not list(tmp_path.glob(".*"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = "love : bar like : bar eight : foo two : foo one :"
    ids = tokenizer(prompt).input_ids
    assert tokenizer.decode(ids) == prompt
    assert tokenizer.bos_token_id is None
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    trainer = Trainer(small(arch), WORDS)
    trainer.resume(tmp_path / "checkpoints")
    record = json.loads((folder / "training.json").read_text())
    assert record["done"] == 4
    assert [entry["step"] for entry in record["history"]] == [2, 4]
    tokens = torch.tensor([ids])
    torch.testing.assert_close(model(input_ids=tokens).logits, trainer.model.eval()(input_ids=tokens).logits)


# The card


def test_answers_are_counted_by_class(monkeypatch):
    """A stand-in that always puts 2/3 on foo and 1/3 on the colon: right where foo is the query's label."""
    task = card.word_tasks()
    foo, bar = task[0].episodes(WORDS, card.ORDER, 3), task[1].episodes(WORDS, card.ORDER, 2)
    log_probs = torch.full((5, len(TOKENIZER)), -50.0)
    log_probs[:, TOKENIZER.convert_tokens_to_ids("foo")] = -0.4
    log_probs[:, 2] = -1.1
    monkeypatch.setattr(card, "last_log_probs", lambda model, batch: log_probs)
    monkeypatch.setattr(card, "encode", lambda model, episodes: None)

    class Model:
        pass

    model = Model()
    model.tokenizer = TOKENIZER
    result = card.answers(model, foo + bar)
    assert [episode.answer for episode in foo + bar] == ["foo"] * 3 + ["bar"] * 2
    assert result.label == result.word == [True] * 3 + [False] * 2
    assert result.class_1 == [True] * 3 + [False] * 2  # for bar's task class 1 is bar, and foo is class 0
    log_probs[:, 2] = 0.0
    result = card.answers(model, foo + bar)
    assert result.label == [True] * 3 + [False] * 2
    assert result.word == [False] * 5


def test_ablation_takes_the_largest_heads_and_random_others(monkeypatch):
    values = torch.arange(12.0).view(3, 4)
    values[0, 1] = 99.0
    zeroed = []

    @contextlib.contextmanager
    def ablate(model, heads):
        zeroed.append(list(heads))
        yield

    monkeypatch.setattr(card, "ablate_heads", ablate)

    def answers(model, episodes):
        right = [(0, 1) not in zeroed[-1]] * 4
        return card.Answers(right, right, right)

    monkeypatch.setattr(card, "answers", answers)
    cut = card.ablation(None, [None] * 4, card.ranked_heads(values), 5)
    located = [(0, 1), (2, 3), (2, 2), (2, 1)]
    assert cut.located[:4] == located
    assert located in zeroed
    assert sum(len(heads) == 4 and not set(heads) & set(located) for heads in zeroed) == 5
    assert cut.costs_more == (100.0, 100.0)
    assert cut.intact == (100.0, 100.0)


def test_prompts_as_in_training_show_both_classes_and_wrong_labels():
    pairs = [("animal", "color"), ("tool", "sport")]
    episodes = card.mixed_episodes(WORDS, pairs, None, 100, longest=8)
    shown = [item for episode in episodes for item in episode.items[:-1]]
    assert 0.08 < sum(item.told != item.side for item in shown) / len(shown) < 0.22
    assert all({item.side for item in episode.items[:-1]} == {0, 1} for episode in episodes)
    clean = card.shown_episodes(WORDS, pairs, 6, 20, longest=1)
    assert all(sorted(item.told for item in episode.items[:-1]) == [0, 0, 0, 1, 1, 1] for episode in clean)


def test_the_card_is_written_from_measurements(tmp_path):
    train(small(), tmp_path / "tiny", tmp_path / "checkpoints", resume=False)
    card.write_card(tmp_path / "tiny", n_prompts=8, n_draws=2)
    text = (tmp_path / "tiny" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n")
    assert "4 steps of a little more than 100 tokens" in text
    for task in card.word_tasks():
        assert f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]}" in text
    for heading in ("By increase", "By contrast", "Accuracy by number of demonstrations", "Biases"):
        assert heading in text
