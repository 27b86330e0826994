"""Episodes and training of the bundled models: what is held out stays out, and a resumed run is the unbroken one."""

import itertools
import json
import random
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import card, train_icl_mini
from experiments.episodes import (
    LABEL_WEIGHT,
    OTHER_WEIGHT,
    draw_sides,
    held_out_pairs,
    load_words,
    make_episode,
    seen_pairs,
)
from experiments.train_icl_mini import Data, HeadDropout, Settings, Trainer, make_model, train, weighted_loss
from icl_lens.errors import InputError

WORDS = load_words()
ARCHS = ("gpt2", "llama", "gptj")


def small(arch="gpt2", steps=3):
    return Settings(arch, steps=steps, batch=6, head_dropout=0.5)


def state(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def test_an_episode_by_hand():
    episode = make_episode(random.Random(0), WORDS, ("sentiment", "number"), (0, 0, 1, 0, 1), labels=("bar", "foo"))
    assert episode.tokens[1::3] == (":",) * 5
    assert episode.tokens[2::3] == ("bar", "bar", "foo", "bar", "foo")
    for token, side in zip(episode.tokens[::3], (0, 0, 1, 0, 1), strict=True):
        assert token in WORDS.categories[episode.pair[side]]
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
            mine = [word for word in item.text if word in WORDS.categories[episode.pair[item.side]]]
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
    assert statistics.fmean(abs(share - 0.5) > 0.25 for share in shares) > 0.25
    assert 0.6 < stays < 0.75


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
    data = Data(WORDS, Settings("gpt2", steps=40))
    trained = set()
    for step in range(24):
        tokens, weights = data.batch(step)
        for row, weight in zip(tokens, weights, strict=True):
            words = [WORDS.vocabulary[int(i)] for i, w in zip(row, weight, strict=True) if w > 0]
            present = [category[word] for word in words if word in category and len(category[word]) == 1]
            met = frozenset().union(*present)
            assert len(met) <= 2
            assert met not in held_out
            trained |= met
    assert trained == set(WORDS.categories)


def test_batches_pad_on_the_right_with_weight_zero():
    data = Data(WORDS, Settings("gpt2", steps=4))
    tokens, weights = data.batch(3)
    padding = tokens == WORDS.vocabulary.index("<pad>")
    assert padding.any()
    assert torch.equal(padding, weights == 0)
    assert (padding[:, 1:] >= padding[:, :-1]).all()
    assert not (data.batch(0)[0] == WORDS.vocabulary.index("<pad>")).any()


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
def test_a_resumed_run_is_the_unbroken_run(arch, tmp_path):
    unbroken = Trainer(small(arch), WORDS)
    losses = [unbroken.step() for _ in range(3)]
    broken = Trainer(small(arch), WORDS)
    first = broken.step()
    broken.save(tmp_path)
    resumed = Trainer(small(arch), WORDS)
    resumed.resume(tmp_path)
    assert resumed.done == 1
    assert [first, resumed.step(), resumed.step()] == losses
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
    assert json.loads((folder / "training.json").read_text())["done"] == 3
    tokens = torch.tensor([ids])
    trainer.dropout.p = 0.0
    torch.testing.assert_close(model(input_ids=tokens).logits, trainer.model(input_ids=tokens).logits)


@pytest.mark.parametrize("arch", ARCHS)
def test_head_increases_by_hand(arch):
    torch.manual_seed(0)
    model = make_model(arch, len(WORDS.vocabulary)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokenizer = train_icl_mini.make_tokenizer(WORDS)
    task = card.word_tasks()[0]
    episodes = task.episodes(WORDS, card.ORDER, 3) + task.episodes(WORDS, card.IMBALANCED, 2)
    got = card.head_increases(model, tokenizer, episodes)
    where = card.parts(model)
    layer, head = 2, 3
    expected = []
    for episode in episodes:
        ids = torch.tensor([tokenizer(episode.prompt).input_ids])
        kept = {}
        handles = [
            where.projections[layer].register_forward_pre_hook(lambda m, args, kept=kept: kept.update(z=args[0])),
            where.final_norm.register_forward_pre_hook(lambda m, args, kept=kept: kept.update(final=args[0])),
        ]
        with torch.no_grad():
            stream = model(input_ids=ids, output_hidden_states=True).hidden_states[layer][0, -1]
        for handle in handles:
            handle.remove()
        z = kept["z"][0, -1]
        alone = torch.zeros_like(z)
        alone[16 * head : 16 * head + 16] = z[16 * head : 16 * head + 16]
        with torch.no_grad():
            update = where.projections[layer](alone) - where.projections[layer](torch.zeros_like(z))
        final, norm = kept["final"][0, -1], where.final_norm
        answer = tokenizer.convert_tokens_to_ids(episode.answer)
        log_probs = []
        for vector in (stream + update, stream):
            if arch == "llama":
                normed = vector / (final.pow(2).mean() + norm.variance_epsilon).sqrt() * norm.weight
            else:
                centred = vector - vector.mean()
                normed = centred / (final.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
            log_probs.append(model.lm_head(normed).log_softmax(-1)[answer].item())
        expected.append(log_probs[0] - log_probs[1])
    assert abs(got[layer, head].item() - statistics.fmean(expected)) < 1e-5
    assert abs(statistics.fmean(expected)) > 1e-3


def test_silencing_heads_zeroes_them_everywhere_and_only_inside():
    torch.manual_seed(0)
    model = make_model("gpt2", 50).eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = model(input_ids=tokens).logits
    with card.silenced(model, [(1, 2), (1, 5), (4, 0)]):
        inside = model(input_ids=tokens).logits
    assert torch.equal(model(input_ids=tokens).logits, before)
    with torch.no_grad():
        for layer, heads in ((1, (2, 5)), (4, (0,))):
            for head in heads:
                model.transformer.h[layer].attn.c_proj.weight[16 * head : 16 * head + 16] = 0
    torch.testing.assert_close(inside, model(input_ids=tokens).logits)
    assert not torch.allclose(inside, before)


def test_the_card_is_written_from_measurements(tmp_path):
    train(small(), tmp_path / "tiny", tmp_path / "checkpoints", resume=False)
    card.write_card(tmp_path / "tiny", n_prompts=8, n_draws=2)
    text = (tmp_path / "tiny" / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n")
    assert "3 steps of up to 6 episodes" in text
    for task in card.word_tasks():
        assert f"{task.pair[1]} (other class: {task.pair[0]}), true label {task.labels[1]}" in text
