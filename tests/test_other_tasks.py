"""Prompts of other tasks: balanced, with correct answers, and scored against the token they name."""

from collections import Counter

import families
import numpy as np
import pytest
import torch
from tiny_study import tiny_study

import icl_lens as il
from experiments.framework import other_tasks
from experiments.framework.study import Study, compared_tokens, contrasts
from experiments.framework.tasks import PAPER_TASKS

NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
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


def test_mappings_and_names_are_what_they_say(study):
    asked = other_tasks.mapping(study, "number-next", seed=0)
    words = np.array(WORDS)
    for text, answer, other in zip(
        asked.batch.texts, words[asked.batch.answer_tokens], words[compared_tokens(asked.batch)[:, 0]], strict=True
    ):
        *shown, query = [line.split(" ->") for line in text.split("\n")]
        assert NUMBERS.index(answer) == NUMBERS.index(query[0]) + 1
        assert len(shown) == 6
        assert not {query[0], answer} & {word.strip() for pair in shown for word in pair}
        assert other in {second.strip() for _, second in shown}
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
    with pytest.raises(il.InputError, match="0 of the answers are one token"):
        other_tasks.mapping(study, "plural", seed=0)


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
    assert other_tasks.one_token_words(study, ["Mary", "Zoe", "one"], after="a :") == ["Mary", "one"]
