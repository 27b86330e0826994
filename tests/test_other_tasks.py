"""Prompts of other tasks: balanced, with correct answers, and scored against the token they name."""

from collections import Counter

import families
import numpy as np
import pytest
import torch
from tiny_study import tiny_study
from transformers import GPT2Config, GPT2LMHeadModel

import icl_lens as il
from experiments.framework import other_tasks
from experiments.framework.study import Study, compared_tokens, contrasts
from experiments.framework.tasks import PAPER_TASKS
from icl_lens.prompts.pair_task import bundled_pairs

NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
CHAT = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} ; {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = [
    *("<pad> <unk> : -> foo bar baz a the When and went to store, gave drink After had lunch, handed keys".split()),
    *("While were at office, sent letter Then park, passed ball Yesterday met school, where showed book".split()),
    *("Before left party, present love like hate happy sad good bad yes red blue no".split()),
    *NUMBERS,
    *other_tasks.NAMES[:12],
]


@pytest.fixture(scope="module")
def study(family_folder, tmp_path_factory) -> Study:
    """A tiny random model whose vocabulary has the words of some tasks."""
    assert len(WORDS) == len(set(WORDS)) <= families.VOCAB_SIZE
    model = il.load_model(str(family_folder("gpt2")), device="cpu", tokenizer=families.tokenizer(WORDS))
    return tiny_study(model, tmp_path_factory.mktemp("words"), n=24)


def test_every_label_is_the_answer_to_every_class(icl_mini):
    asked = other_tasks.classes(Study(icl_mini, PAPER_TASKS[0], 18), other_tasks.CATEGORIES[:3], seed=0)
    class_of = {word: name for name in other_tasks.CATEGORIES[:3] for word in other_tasks.word_list()[name]}
    pairs = Counter()
    for prompt in asked.batch.prompts:
        labels = {class_of[one.text]: one.label for one in prompt.demonstrations}
        assert all(labels[class_of[one.text]] == one.label for one in prompt.demonstrations)
        assert len(prompt.demonstrations) == 6
        assert prompt.query not in {one.text for one in prompt.demonstrations}
        assert prompt.answer == labels[class_of[prompt.query]]
        pairs[class_of[prompt.query], prompt.answer] += 1
    assert len(pairs) == 9
    assert set(pairs.values()) == {2}
    last_is_first_shown = sum(p.demonstrations[0].label == p.answer for p in asked.batch.prompts)
    assert 0 < last_is_first_shown < len(asked.batch)


def pair_study(folder) -> Study:
    """A tiny random model that knows the words of a task of pairs, some of them as the same token."""
    words = [word for pair in bundled_pairs()["verb-gerund"].items() for word in pair]
    words = ["<pad>", "<unk>", "Words:", "->", "a", *dict.fromkeys(words)]
    tokenizer = families.tokenizer(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), n_positions=64, n_embd=16, n_layer=2, n_head=2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Study(il.load_model(str(folder), device="cpu"), PAPER_TASKS[0], 24)


def test_word_pairs_are_answered_with_any_word(tmp_path):
    """The accuracy is that of plain Hugging Face passes; halves share no query, and answers beat all outputs shown."""
    study = pair_study(tmp_path)
    pairs = bundled_pairs()["verb-gerund"]
    split, check = other_tasks.word_pairs(study, "verb-gerund", seed=0)
    halves = [half.batch.prompts for half in (split.locating, split.held_out)]
    assert [len(half) for half in halves] == [23, 23]
    assert {p.query for half in halves for p in half} == {*pairs}
    assert len({*split.held_out.clusters}) == 23
    model = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    right = 0
    for prompt, text, others in zip(
        halves[1], split.held_out.batch.texts, compared_tokens(split.held_out.batch), strict=True
    ):
        lines = [f"{one.text} -> {one.label}" for one in prompt.demonstrations]
        assert text == "\n".join(["Words:", *lines, f"{prompt.query} ->"])
        assert all(pairs[one.text] == one.label for one in prompt.demonstrations)
        shown = study.model.tokenizer.decode(others).split()
        assert sorted(shown) == sorted(one.label for one in prompt.demonstrations)
        with torch.no_grad():
            logits = model(torch.tensor([study.model.tokenizer.encode(text)])).logits
        right += study.model.tokenizer.decode(logits[0, -1].argmax()) == pairs[prompt.query]
    assert check.accuracy["given"].value == pytest.approx(right / 23)
    assert not check.does_task


@pytest.mark.parametrize("n_alike", [8, 45])
def test_no_two_outputs_of_word_pairs_begin_alike(tmp_path, monkeypatch, n_alike):
    pairs = [*bundled_pairs()["verb-gerund"].items()]
    pairs = [(source, f"a {target}" if i < n_alike else target) for i, (source, target) in enumerate(pairs)]
    monkeypatch.setattr(il.PairTask, "pairs", lambda self: pairs)
    study = pair_study(tmp_path)
    if n_alike == 8:
        split, _ = other_tasks.word_pairs(study, "verb-gerund", seed=0)
        shown = [sum(label.startswith("a ") for label in one.labels) for one in split.locating.batch.prompts]
        assert {*shown} == {0, 1}
        assert len(shown) == 23
    else:
        with pytest.raises(il.InputError, match="0 prompts per half have outputs that begin with different tokens"):
            other_tasks.word_pairs(study, "verb-gerund", seed=0)


def test_chat_is_the_same_task_in_the_words_of_the_tokenizer(icl_mini, study):
    with pytest.raises(il.InputError, match="chat template"):
        other_tasks.chat(Study(icl_mini, PAPER_TASKS[0], 8))
    tokenizer = study.model.tokenizer
    tokenizer.chat_template = CHAT
    try:
        task = other_tasks.chat(study)
    finally:
        tokenizer.chat_template = None
    assert (task.data, task.labels, task.name) == (study.task.data, study.task.labels, "chat")
    prompt = task.prompts(1)[0]
    shown = " ".join(f"<user> {one.text} ; <assistant> {one.label} ;" for one in prompt.demonstrations)
    assert task.template.render(prompt).text == f"{shown} <user> {prompt.query} ; <assistant>"


def test_names_and_sequences_are_what_they_say(study):
    words = np.array(WORDS)
    asked = other_tasks.ioi(study, seed=0)
    first = 0
    for text, answer, other in zip(
        asked.batch.texts, words[asked.batch.answer_tokens], words[compared_tokens(asked.batch)[:, 0]], strict=True
    ):
        named = [word for word in text.split() if word in other_tasks.NAMES]
        assert Counter(named) == {answer: 1, other: 2}
        first += named[0] == answer
    assert first == len(asked.batch) / 2
    asked = other_tasks.induction(study, seed=0)
    for row, last, answer in zip(asked.batch.tokens, asked.batch.last, asked.batch.answer_tokens, strict=True):
        tokens = row[: last + 1].tolist()
        assert tokens[tokens.index(tokens[-1]) + 1] == answer
    asked = other_tasks.copying(study, seed=0)
    for text, answer, other in zip(
        asked.batch.texts, words[asked.batch.answer_tokens], words[compared_tokens(asked.batch)[:, 0]], strict=True
    ):
        *shown, query = [line.split(" ->") for line in text.split("\n")]
        assert query[0] == answer
        assert all(first == second.strip() for first, second in shown)
        assert other in {first for first, _ in shown} - {answer}
        assert len(shown) == 6


def test_text_prompts_are_scored_against_their_own_token(study):
    asked = other_tasks.ioi(study, seed=0)
    values = study.map(asked.batch, contrasts)
    above = study.map(asked.batch, other_tasks.answer_beats_others)
    for row in (0, 7):
        one = asked.batch[row]
        with torch.no_grad():
            logits, cache = study.model.run_with_cache(one.tokens)
        answer, other = int(one.answer_tokens), int(compared_tokens(one))
        assert above[row] == bool(logits[0, -1, answer] > logits[0, -1, other])
        z = cache["blocks.1.attn.hook_z"][0, -1, 2]
        written = z @ study.model.W_O[1, 2]
        scale = cache["ln_final.hook_scale"][0, -1]
        direction = (study.model.W_U[:, answer] - study.model.W_U[:, other]) * study.model.ln_final.weight
        expected = ((written - written.mean()) / scale) @ direction
        assert float(values[row, 1, 2]) == pytest.approx(float(expected), abs=1e-4)


def test_labels_and_classes_of_other_tasks(icl_mini, study):
    own = Study(icl_mini, PAPER_TASKS[0], 8)
    natural = other_tasks.natural_labels(own)
    assert natural.labels == ("Sentiment", "Number")  # one token each, unlike "sentiment"
    assert natural.natural
    words = other_tasks.word_list()["number"]
    for prompt in natural.prompts(8):
        assert all(one.label == ("Number" if one.text in words else "Sentiment") for one in prompt.demonstrations)
    assert other_tasks.other_labels(own).labels == ("baz", "qux")
    assert other_tasks.other_classes(own).data == "animal-country"
    with pytest.raises(il.InputError, match="labels that name its classes"):
        other_tasks.natural_labels(Study(icl_mini, natural, 8))
    assert other_tasks.other_classes(Study(icl_mini, natural, 8)).labels == ("Animal", "Country")
    others = other_tasks.other_natural_labels(own)
    assert (others.data, others.labels) == ("animal-country", ("Animal", "Country"))
    assert other_tasks.one_token_words(study, ["Mary", "Zoe", "one"], after="a :") == ["Mary", "one"]
