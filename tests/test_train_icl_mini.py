"""Episodes and training of the bundled models: what is held out stays out, and a resumed run is the unbroken one."""

import contextlib
import itertools
import json
import random
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.icl_mini import card
from experiments.icl_mini import train as train_icl_mini
from experiments.icl_mini.episodes import (
    ASIDE_WEIGHT,
    LABEL_WEIGHT,
    OTHER_WEIGHT,
    draw_categories,
    draw_sides,
    held_out_pairs,
    list_sequence,
    load_words,
    make_episode,
    seen_pairs,
)
from experiments.icl_mini.train import (
    Data,
    HeadCost,
    HeadDropout,
    Trainer,
    TrainingSettings,
    make_model,
    train,
    weighted_loss,
)
from icl_lens.errors import InputError

WORDS = load_words()
ARCHS = ("gpt2", "llama", "gptj")


def small(arch="gpt2", steps=3):
    return TrainingSettings(arch, steps=steps, concentrate=1, batch=6, head_dropout=0.5)


def state(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_an_episode_by_hand():
    episode = make_episode(random.Random(0), WORDS, ("sentiment", "number"), (0, 0, 1, 0, 1), labels=("bar", "foo"))
    assert episode.tokens[1::3] == (":",) * 5
    assert episode.tokens[2::3] == ("bar", "bar", "foo", "bar", "foo")
    for token, side in zip(episode.tokens[::3], (0, 0, 1, 0, 1), strict=True):
        assert token in WORDS.categories[episode.categories[side]]
    other, label = OTHER_WEIGHT, LABEL_WEIGHT
    # The first bar and the first foo cannot be known; the second bar, the third and the query's foo can.
    assert episode.weights == (other,) * 5 + (label,) + (other,) * 5 + (label,) + (other,) * 2 + (label,)
    assert episode.answer == "foo"
    assert episode.prompt == " ".join(episode.tokens[:14])


def test_texts_have_fillers_and_no_content_word_twice():
    rng = random.Random(1)
    n_content, n_words, first_is_filler = 0, 0, 0
    for _ in range(300):
        sides = draw_sides(rng, 9)
        episode = make_episode(rng, WORDS, ("animal", "color"), sides, longest=6)
        content = [word for item in episode.items for word in item.text if word not in WORDS.fillers]
        assert len(set(content)) == len(content)
        for item in episode.items:
            assert 1 <= len(item.text) <= 6
            mine = [word for word in item.text if word in WORDS.categories[episode.categories[item.side]]]
            assert mine
            assert all(word in WORDS.fillers for word in item.text if word not in mine)
            first_is_filler += item.text[0] in WORDS.fillers
        n_content += len(content)
        n_words += sum(len(item.text) for item in episode.items)
    assert 0.45 < n_content / n_words < 0.65
    assert first_is_filler > 0.25 * 300 * 9


def test_an_ambiguous_word_can_stand_for_either_of_its_categories():
    sides_of_orange = set()
    for seed in range(400):
        episode = make_episode(random.Random(seed), WORDS, ("color", "fruit"), (0, 1) * 4)
        sides_of_orange |= {item.side for item in episode.items if "orange" in item.text}
    assert sides_of_orange == {0, 1}


def test_unequal_classes_and_repeats_are_common():
    rng = random.Random(2)
    drawn = [draw_sides(rng, 9) for _ in range(2000)]
    shares = [statistics.fmean(sides) for sides in drawn]
    stays = statistics.fmean(a == b for sides in drawn for a, b in itertools.pairwise(sides))
    assert abs(statistics.fmean(shares) - 0.5) < 0.03
    assert statistics.fmean(abs(share - 0.5) > 0.25 for share in shares) > 0.15
    assert 0.55 < stays < 0.7


def test_asides_are_words_of_the_items_category_in_place_of_its_label_or_after_it():
    seen_kinds = set()
    for seed in range(40):
        sides = (0, 1, 2, 0, 1, 2, 0)
        names = ("animal", "color", "tool")
        episode = make_episode(random.Random(seed), WORDS, names, sides, labels=("foo", "bar", "baz"), asides=0.3)
        at, shown, used = 0, set(), []
        for n, side in enumerate(sides):
            name, label = names[side], ("foo", "bar", "baz")[side]
            word, colon = episode.tokens[at : at + 2]
            assert word in WORDS.categories[name]
            assert colon == ":"
            at += 2
            kind = []
            if episode.tokens[at] == label:
                assert episode.weights[at] == (LABEL_WEIGHT if side in shown else OTHER_WEIGHT)
                shown.add(side)
                kind.append("label")
                at += 1
            if episode.tokens[at : at + 1] and episode.weights[at] == ASIDE_WEIGHT:
                assert episode.tokens[at] in WORDS.categories[name]
                used.append(episode.tokens[at])
                kind.append("word")
                at += 1
            used.append(word)
            assert kind
            seen_kinds.add(tuple(kind))
            assert n < 6 or kind == ["label"]
        assert at == len(episode.tokens)
        assert len(set(used)) == len(used)
    assert seen_kinds == {("label",), ("word",), ("label", "word")}


def test_a_list_is_of_one_category():
    words = list_sequence(random.Random(4), WORDS, 8)
    assert len(set(words)) == 8
    assert any(set(words) <= set(group) for group in WORDS.categories.values())


def test_drawn_categories_avoid_held_out_pairs():
    held_out = held_out_pairs(WORDS)
    rng = random.Random(5)
    for _ in range(300):
        drawn = draw_categories(rng, WORDS, 6, held_out)
        assert len(set(drawn)) == 6
        assert not {frozenset(pair) for pair in itertools.combinations(drawn, 2)} & held_out


def test_held_out_pairs_are_never_trained_on():
    held_out = held_out_pairs(WORDS)
    pairs = {frozenset(pair) for pair in seen_pairs(WORDS, held_out)}
    assert not pairs & held_out
    n = len(WORDS.categories)
    assert len(pairs) + len(held_out) == n * (n - 1) / 2
    category = {}
    for name, group in WORDS.categories.items():
        for word in group:
            category.setdefault(word, set()).add(name)
    data = Data(WORDS, TrainingSettings("gpt2", steps=20))
    trained = set()
    for step in range(20):
        for tokens, _ in (data.batch(step), data.lists(step)):
            for row in tokens.tolist():
                sure = [category[w] for w in (WORDS.vocabulary[i] for i in row) if len(category.get(w, ())) == 1]
                met = frozenset().union(*sure)
                assert not {frozenset(pair) for pair in itertools.combinations(met, 2)} & held_out
                trained |= met
    assert trained == set(WORDS.categories)


def test_a_run_goes_from_lists_over_many_classes_to_texts():
    data = Data(WORDS, TrainingSettings("gpt2", steps=40))
    easy = [data.batch(step)[0] for step in range(4, 24)]
    late = [data.batch(step)[0] for step in range(24, 40)]
    fillers = torch.tensor([WORDS.vocabulary.index(word) for word in WORDS.fillers])
    labels = torch.tensor([WORDS.vocabulary.index(word) for word in WORDS.labels])
    assert not any(torch.isin(tokens, fillers).any() for tokens in easy)
    assert [bool(torch.isin(tokens, fillers).any()) for tokens in late] == [False, True] * 8
    most = [max(len(set(row[torch.isin(row, labels)].tolist())) for row in tokens) for tokens in easy + late]
    assert max(most[:20]) == 5
    assert set(most[20:]) == {2}


def test_batches_pad_on_the_right_with_weight_zero():
    data = Data(WORDS, TrainingSettings("gpt2", steps=4))
    tokens, weights = data.batch(3)
    padding = tokens == WORDS.vocabulary.index("<pad>")
    assert padding.any()
    assert torch.equal(padding, weights == 0)
    assert (padding[:, 1:] >= padding[:, :-1]).all()


class Fixed(nn.Module):
    """A model that always gives the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, use_cache):
        return self


def test_the_loss_counts_only_weighted_tokens():
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 3, 2, 1]])
    weights = torch.tensor([[9.0, 0.5, 1.0, 0.0]])
    by_hand = (
        0.5 * functional.cross_entropy(logits[0, 0:1], torch.tensor([3]))
        + 1.0 * functional.cross_entropy(logits[0, 1:2], torch.tensor([2]))
    ) / 1.5
    assert torch.allclose(weighted_loss(Fixed(logits), tokens, weights), by_hand)


@pytest.mark.parametrize("arch", ARCHS)
def test_dropping_every_head_leaves_the_model_without_attention(arch):
    torch.manual_seed(0)
    model = make_model(arch, 50).eval()
    dropout = HeadDropout(model)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 8]])
    before = model(input_ids=tokens).logits
    dropout.p = 1.0
    after = model(input_ids=tokens).logits
    dropout.p = 0.0
    assert torch.equal(model(input_ids=tokens).logits, before)
    assert not torch.allclose(before[0, 3], before[1, 3])
    assert torch.equal(after[0, 3], after[1, 3])


@pytest.mark.parametrize("arch", ARCHS)
def test_head_sizes_are_the_norms_of_what_heads_write(arch):
    torch.manual_seed(0)
    model = make_model(arch, 50).eval()
    cost = HeadCost(model)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 8]])
    model(input_ids=tokens)
    assert cost.sizes == []
    cost.on = True
    kept = []
    layer, head = 1, 3
    projection = train_icl_mini.output_projections(model)[layer]
    handle = projection.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    model(input_ids=tokens)
    handle.remove()
    cost.on = False
    alone = torch.zeros_like(kept[0])
    alone[..., 16 * head : 16 * head + 16] = kept[0][..., 16 * head : 16 * head + 16]
    with torch.no_grad():
        written = projection(alone) - projection(torch.zeros_like(alone))
    by_hand = written.pow(2).sum(-1).mean().sqrt()
    assert torch.allclose(cost.sizes[layer][head], by_hand, atol=1e-4)
    total = torch.stack(cost.sizes).sum()
    assert torch.equal(cost.take(), total)
    assert cost.sizes == []


@pytest.mark.parametrize("arch", ARCHS)
def test_a_resumed_run_is_the_unbroken_run(arch, tmp_path):
    unbroken = Trainer(small(arch), WORDS)
    losses = [unbroken.step() for _ in range(4)]  # the last one with head costs
    broken = Trainer(small(arch), WORDS)
    first = broken.step()
    broken.save(tmp_path)
    resumed = Trainer(small(arch), WORDS)
    resumed.resume(tmp_path)
    assert resumed.done == 1
    assert [first, resumed.step(), resumed.step(), resumed.step()] == losses
    for name, parameter in state(unbroken).items():
        assert torch.equal(parameter, state(resumed)[name]), name
    assert list(tmp_path.iterdir()) == [tmp_path / train_icl_mini.CHECKPOINT]


def test_resuming_another_run_is_refused(tmp_path):
    trainer = Trainer(small(), WORDS)
    trainer.step()
    trainer.save(tmp_path)
    with pytest.raises(InputError, match="--no-resume"):
        Trainer(small(steps=4), WORDS).resume(tmp_path)


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
    assert len(ids) == 14
    assert tokenizer.decode(ids) == prompt
    assert tokenizer("love unheard").input_ids[1] == tokenizer.unk_token_id
    assert tokenizer.bos_token_id is None
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    trainer = Trainer(small(arch), WORDS)
    trainer.resume(tmp_path / "checkpoints")
    assert json.loads((folder / "training.json").read_text())["done"] == 4
    tokens = torch.tensor([ids])
    trainer.dropout.p = 0.0
    torch.testing.assert_close(model(input_ids=tokens).logits, trainer.model(input_ids=tokens).logits)


def test_answers_are_counted_by_class(monkeypatch):
    """A stand-in that always puts 2/3 on foo and 1/3 on the colon: right where foo is the query's label."""
    task = card.word_tasks()
    foo, bar = task[0].episodes(WORDS, card.ORDER, 3), task[1].episodes(WORDS, card.ORDER, 2)
    tokenizer = train_icl_mini.make_tokenizer(WORDS)
    log_probs = torch.full((5, len(tokenizer)), -50.0)
    log_probs[:, tokenizer.convert_tokens_to_ids("foo")] = -0.4
    log_probs[:, 2] = -1.1
    monkeypatch.setattr(card, "last_log_probs", lambda model, batch: log_probs)
    monkeypatch.setattr(card, "encode", lambda model, episodes: None)

    class Model:
        pass

    model = Model()
    model.tokenizer = tokenizer
    result = card.answers(model, foo + bar)
    assert [episode.answer for episode in foo + bar] == ["foo"] * 3 + ["bar"] * 2
    assert result.label == result.word == [True] * 3 + [False] * 2
    assert result.class_1 == [True] * 3 + [False] * 2  # for bar's task class 1 is bar, and foo is class 0
    log_probs[:, 2] = 0.0
    result = card.answers(model, foo + bar)
    assert result.label == [True] * 3 + [False] * 2
    assert result.word == [False] * 5


def test_ablation_takes_the_largest_heads_and_random_others(monkeypatch):
    increases = torch.arange(12.0).view(3, 4)
    increases[0, 1] = 99.0
    zeroed = []
    monkeypatch.setattr(card, "head_increases", lambda model, episodes: increases)

    @contextlib.contextmanager
    def ablate(model, heads):
        zeroed.append(list(heads))
        yield

    monkeypatch.setattr(card, "ablate_heads", ablate)

    def answers(model, episodes):
        right = [(0, 1) not in zeroed[-1]] * 4
        return card.Answers(right, right, right)

    monkeypatch.setattr(card, "answers", answers)
    cut = card.ablation(None, card.word_tasks()[0].episodes(WORDS, card.ORDER, 4), 5)
    located = [(0, 1), (2, 3), (2, 2), (2, 1)]
    assert [head for head, _ in cut.located[:4]] == located
    assert located in zeroed
    assert sum(len(heads) == 4 and not set(heads) & set(located) for heads in zeroed) == 5
    assert cut.costs_more == (100.0, 100.0)
    assert cut.intact == (100.0, 100.0)


def test_the_card_is_written_from_measurements(tmp_path):
    train(small(), tmp_path / "tiny", tmp_path / "checkpoints", resume=False)
    card.write_card(tmp_path / "tiny", n_prompts=8, n_draws=2)
    text = (tmp_path / "tiny" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n")
    assert "4 steps of up to 6 episodes" in text
    for task in card.word_tasks():
        assert f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]}" in text
