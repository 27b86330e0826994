"""learning-kind: its prompts, its verdict on made-up tables of learners and recognisers, and a tiny model's answers."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import icl_lens as il
from experiments.claims import learning_kind
from experiments.claims.learning_kind import KINDS, LearningKindConfig
from experiments.claims.shots import ARBITRARY, classes_of, rows_of
from experiments.lab.study import Study, StudySettings, Variant
from icl_lens.prompts.tasks import word_list

N = 120


def share(mean: float, seed: int) -> np.ndarray:
    """N answers, this share of them right, in no order."""
    return np.random.default_rng(seed).permutation(np.arange(N) < round(mean * N)).astype(float)


def made(alone: float = 0.95, unfit: tuple[int, ...] = (), **accuracy: float) -> pd.DataFrame:
    """Accuracy by kind of labels with 4 and 8 demonstrations; `alone`: of the names without any."""
    frames = []
    ids = {"prompt": range(N), "query": np.arange(N) % 40}
    for seed, kind in enumerate(KINDS):
        for shots in (0, 4, 8, 16):
            mean = accuracy.get(kind, np.nan)
            if shots == 0 and not np.isnan(mean):
                mean = {"arbitrary": 0.5, "exchanged": 1 - alone}.get(kind, alone)
            groups = [("none", "")] + [("located", "located"), ("random", "set 0"), ("random", "set 1")] * (shots == 8)
            for group, name in groups:
                there = not np.isnan(mean) and shots not in unfit
                correct = share(0.5 if group == "located" else mean, seed) if there else np.full(N, np.nan)
                columns = {"classes": 2, "kind": kind, "shots": shots, "group": group, "name": name, "layer": -1}
                frames.append(pd.DataFrame({**ids, "correct": correct, "vocabulary": correct}).assign(**columns))
    correct = share(accuracy.get("three", 0.7), 9)
    columns = {"classes": 3, "kind": "arbitrary", "shots": 6, "group": "none", "name": "", "layer": -1}
    frames.append(pd.DataFrame({**ids, "correct": correct, "vocabulary": correct}).assign(**columns))
    return pd.concat(frames, ignore_index=True)


LEARNER = {"right": 0.95, "exchanged": 0.9, "random": 0.5, "arbitrary": 0.9}
RECOGNISER = {"right": 1.0, "exchanged": 0.0, "random": 1.0, "arbitrary": 0.5}


@pytest.mark.parametrize(
    ("population", "outcome"),
    [
        (LEARNER, "supported"),
        (RECOGNISER, "not supported"),  # right 100 % of the time, and learns nothing
        ({**RECOGNISER, "arbitrary": 0.9}, "not supported"),  # learns only where names do not speak against it
        ({**LEARNER, "arbitrary": 0.4}, "not supported"),  # exchanges names, but cannot learn new ones
        ({**LEARNER, "exchanged": 0.6}, "undecided"),
        (
            {**LEARNER, "alone": 0.5, "random": 0.5},
            "undecided",
        ),  # names mean nothing
        ({"right": 1.0, "exchanged": 0.9, "random": 0.8, "arbitrary": 0.9, "alone": 0.5}, "supported"),  # in context
        ({"arbitrary": 0.95}, "undecided"),  # no words for the names
        ({**LEARNER, "unfit": (4, 8, 16)}, "undecided"),  # no demonstrations fit
    ],
)
def test_claim(population: dict[str, Any], outcome: str) -> None:
    judged = learning_kind.claim(made(**population))
    assert judged.outcome == outcome, judged.reason
    assert (judged.p < 0.05) == (outcome != "undecided")


def test_right_names_alone_tell_a_learner_from_no_recogniser() -> None:
    """The simpler rule, accuracy with right names, is the same for both."""
    for population in (LEARNER, RECOGNISER):
        right = made(**population).query("kind == 'right' and shots == 8 and group == 'none'")["correct"]
        assert right.mean() > 0.9
    assert "recognises the task: supported" in learning_kind.claim(made(**RECOGNISER)).reason
    assert "recognises the task: not supported" in learning_kind.claim(made(**{**LEARNER, "random": 0.3})).reason


def test_what_does_not_fit_is_said_and_fewer_are_judged() -> None:
    judged = learning_kind.claim(made(**LEARNER, unfit=(8, 16)))
    assert judged.outcome == "supported"
    assert "4 demonstrations have them" in judged.reason
    assert "do not fit the model's context, its vocabulary or the word list: 8 of 2 classes, 16 of 2" in judged.reason
    assert "do not fit" not in learning_kind.claim(made(**LEARNER)).reason


def test_heads_are_told_by_kind_of_labels() -> None:
    reason = learning_kind.claim(made(**LEARNER)).reason
    assert "labels without meaning 50% (beside 90%: 0.4 [" in reason
    assert "3 classes with 6 demonstrations: 70% (chance 33%)" in reason


def test_judged_at_demonstrations_that_fit_with_every_kind_of_labels() -> None:
    """Names may be longer than labels without meaning: where they do not fit, fewer demonstrations are judged."""
    table = made(**LEARNER)
    table.loc[(table["kind"] != "arbitrary") & (table["shots"] == 8), ["correct", "vocabulary"]] = np.nan
    judged = learning_kind.claim(table)
    assert judged.outcome == "supported", judged.reason
    assert (
        "as 4 demonstrations have them" in judged.reason or "labels without meaning, 4 demonstrations" in judged.reason
    )


@pytest.mark.parametrize("population", [LEARNER, {"arbitrary": 0.9}, {**LEARNER, "unfit": (8, 16)}])
def test_figures_are_drawn(population: dict[str, Any]) -> None:
    assert len(learning_kind.figure(made(**population)).axes) == 3


# Prompts


def test_labels_of_every_kind_by_hand() -> None:
    rows = rows_of(["sentiment", "number"], None, 8, 6, 0)
    first = rows[0]
    names = ("Sentiment", "Number")
    words = word_list()
    for row in rows:
        for (text, side), _ in zip(row.shown, row.luck, strict=True):
            assert text in words[("sentiment", "number")[side]]
        assert row.query in words[("sentiment", "number")[row.asked]]
        assert row.query not in [text for text, _ in row.shown]
        assert [side for _, side in row.shown].count(0) == 3
    right, exchanged, drawn, arbitrary = (
        first.prompt(kind, ARBITRARY[:2] if kind == "arbitrary" else names, 4) for kind in KINDS
    )
    sides = [side for _, side in first.shown[:4]]
    assert [d.label for d in right.demonstrations] == [names[side] for side in sides]
    assert [d.label for d in exchanged.demonstrations] == [names[1 - side] for side in sides]
    assert [d.label for d in drawn.demonstrations] == [names[luck] for luck in first.luck[:4]]
    assert [d.label for d in arbitrary.demonstrations] == [ARBITRARY[side] for side in sides]
    assert (right.answer, exchanged.answer, drawn.answer) == (names[0], names[1], names[0])
    assert len({tuple(d.text for d in one.demonstrations) for one in (right, exchanged, drawn, arbitrary)}) == 1
    assert rows_of(["sentiment", "number"], None, 8, 16, 0)[0].prompt("right", names, 4) == right


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_label_place_or_class_is_right_more_often(count: int) -> None:
    """Always one label, the nearest, the first, or that of one class: each right once in so many classes."""
    classes = classes_of("sentiment-number", None, count)
    assert classes == ["sentiment", "number", "animal", "country"][:count]
    n = 600 * count
    rows = rows_of(classes, None, n, 2 * count, 0)
    prompts = [row.prompt("arbitrary", ARBITRARY[:count], 2 * count) for row in rows]
    rules = {
        "foo": lambda prompt, row: ARBITRARY[0],
        "nearest": lambda prompt, row: prompt.demonstrations[-1].label,
        "first": lambda prompt, row: prompt.demonstrations[0].label,
        "class": lambda prompt, row: row.label_of("arbitrary", ARBITRARY[:count])[0],
    }
    for rule in rules.values():
        right = np.mean([rule(prompt, row) == prompt.answer for prompt, row in zip(prompts, rows, strict=True)])
        assert right == pytest.approx(1 / count, abs=0.04)
    assert all(prompt.labels == ARBITRARY[:count] for prompt in prompts)


def test_words_run_out_in_one_sentence() -> None:
    with pytest.raises(il.InputError, match="28 words of its own, and a prompt of 56 demonstrations takes 29"):
        rows_of(["calendar", "metal"], None, 2, 56, 0)
    with pytest.raises(il.InputError, match="not two categories of words"):
        classes_of("sst2", None, 2)


# A tiny model


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words that the tiny tokenizer knows; categories whose own names are among them, and labels for two classes."""
    path = tmp_path_factory.mktemp("words") / "words.json"
    categories = {
        "cat": ["love", "like", "hate", "happy", "sad", "good", "bad"],
        "dog": ["eight", "two", "one", "nine", "three", "w40", "w41"],
        "red": ["w50", "w51", "w52", "w53", "w54", "w55"],
    }
    path.write_text(json.dumps({"categories": categories}))
    return str(path)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_bias"])
def test_every_condition_is_what_the_model_says(load_tiny: Any, words: str, name: str) -> None:
    model = load_tiny(name)
    study = Study(model, StudySettings(model="tiny", task="cat-dog", n=20, path=words))
    config = LearningKindConfig(prompts=16, shots=(0, 1, 2, 8, 16), heads=2, draws=2)
    table = learning_kind.table(study, config)
    rows = rows_of(["cat", "dog"], words, 16, 8, 0)
    heads = learning_kind.located_for_both(study, study.few(2))
    tested = [
        {study.prompts(Variant(asked=asked))[row].query for row in study.apart[1].tolist()}
        for asked in ("false", "true")
    ]
    fair = [[row for row in rows if row.asked == side and row.query in tested[side]] for side in (0, 1)]
    fair = [row for some in fair for row in some[: min(map(len, fair))]]
    for kind in KINDS:
        labels = ("foo", "bar") if kind == "arbitrary" else ("cat", "dog")
        ids = [model.tokenizer.encode(label, add_special_tokens=False)[-1] for label in labels]
        for shots, group in ((0, "none"), (2, "none"), (8, "none"), (8, "located")):
            mine = table.query(f"kind == {kind!r} and shots == {shots} and group == {group!r} and classes == 2")
            judged = fair if group == "located" else rows
            assert judged
            for row, correct in zip(judged, mine["correct"], strict=True):
                turn = {"right": 0, "random": 0, "exchanged": 1, "arbitrary": row.number // 2}[kind]
                of = [labels[(side + turn) % 2] for side in (0, 1)]
                pairs = zip(row.shown, row.luck, strict=True)
                said = [of[side] if kind != "random" else labels[luck] for (_, side), luck in pairs]
                shown = [f"{text} : {label}" for (text, _), label in zip(row.shown, said, strict=True)][:shots]
                text = " ".join([*shown, f"{row.query} :"])
                free = il.tokenize_text(model, text)
                with il.ablate_heads(model, heads if group == "located" else heads[:0]):
                    log_probs = il.last_log_probs(model, free)[0]
                best = labels[int(torch.stack([log_probs[one] for one in ids]).argmax())]
                assert correct == float(best == of[row.asked])
    # 16 demonstrations need more words than there are; three classes, a word "baz".
    assert table.query("shots == 16 or classes == 3")["correct"].isna().all()
    assert learning_kind.claim(table).outcome != "supported"
    assert learning_kind.figure(table).axes
