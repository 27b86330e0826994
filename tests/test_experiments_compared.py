"""Claims about several tasks: which tasks are compared, where their data come from, and which heads they share."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.catalogue import find
from experiments.claims import head_overlap
from experiments.lab.frames import where
from experiments.lab.reductions import correct
from experiments.lab.runner import configuration
from experiments.lab.study import Study, StudySettings, Variant
from icl_lens.errors import InputError


def sentences(path: Path, classes: dict[str, list[str]], seed: int) -> str:
    """A file of sentences of three words, 30 of each class."""
    rng = random.Random(seed)
    rows: set[tuple[str, str]] = set()
    while len(rows) < 60:
        kind = list(classes)[len(rows) % 2]
        rows.add((" ".join(rng.choices([*classes[kind], "the", "a", "of", "and", "w70", "w71"], k=3)), kind))
    texts = dict(sorted(rows))
    path.write_text("".join(json.dumps({"text": text, "label": kind}) + "\n" for text, kind in texts.items()))
    return str(path)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> StudySettings:
    """A sentence task of a local file, and two others beside it."""
    folder = tmp_path_factory.mktemp("sentences")
    feelings = {"glad": ["love", "like", "happy", "good"], "sad": ["hate", "sad", "bad", "no"]}
    things = {"animal": ["cat", "dog", "w50", "w51"], "colour": ["red", "blue", "w40", "w41"]}
    places = {"country": ["France", "Spain", "w60", "w61"], "number": ["one", "two", "three", "nine"]}
    mood, kind, where_from = (
        sentences(folder / f"{name}.jsonl", classes, seed)
        for seed, (name, classes) in enumerate((("mood", feelings), ("kind", things), ("place", places)))
    )
    return StudySettings(model="tiny", n=24, task="mood", path=mood, compared=(f"kind={kind}", f"place={where_from}"))


def test_sentence_tasks_are_compared_in_one_run(gpt2: Any, settings: StudySettings) -> None:
    """Every pair of tasks, on all prompts and on those answered rightly, whose lists are those of a slow reference."""
    study = Study(gpt2, settings)
    tasks = ["mood", "kind", "place", "sentiment-number", "animal-country"]
    assert [*head_overlap.compared(head_overlap.HeadOverlapConfig(), settings)] == tasks, "no mirror images"
    config = head_overlap.HeadOverlapConfig(tasks=(), heads=2, draws=5)
    table = head_overlap.table(study, config)
    assert list(dict.fromkeys(table["pair"])) == ["mood / kind", "mood / place", "kind / place"]
    assert len(table) == 3 * 2 * 6
    k = study.few(2)
    lists = {}
    for task in ("mood", "place"):
        rows = study.get(correct, Variant(task=task)) > 0.5
        assert 0 < rows.sum() < 24
        for cases, mean in (
            ("all", study.rises(Variant(task=task)).mean(0)),
            ("correct", study.rises(Variant(task=task))[rows].mean(0)),
        ):
            best = sorted(((float(mean[i, j]), i, j) for i in range(3) for j in range(4)), reverse=True)[:k]
            lists[task, cases] = {(i, j) for _, i, j in best}
    for cases in ("all", "correct"):
        found = where(table, pair="mood / place", cases=cases, draw=0).iloc[0]
        both = lists["mood", cases], lists["place", cases]
        assert found["shared"] == pytest.approx(len(both[0] & both[1]) / k)
        in_layer = [[sum(layer == i for layer, _ in one) for i in range(3)] for one in both]
        assert found["layers"] == pytest.approx(np.dot(*in_layer) / 4 / k)
    assert head_overlap.figure(table).axes


def test_texts_of_a_task_come_from_its_own_file(gpt2: Any, settings: StudySettings) -> None:
    study = Study(gpt2, settings)
    for task, word in (("kind", "cat"), ("place", "Spain"), (None, "love")):
        shown = " ".join(demo.text for prompt in study.prompts(Variant(task=task)) for demo in prompt.demonstrations)
        assert word in shown
    assert settings.path_of("animal-country") is None


def test_tasks_compared_are_part_of_the_configuration_of_claims_that_compare(
    gpt2: Any, settings: StudySettings
) -> None:
    alone = StudySettings(**{**vars(settings), "compared": ()})
    for name, same in (("layers", True), ("head-overlap", False)):
        with_others, without = (configuration(find(name), Study(gpt2, one)) for one in (settings, alone))
        assert (with_others == without) is same


@pytest.mark.parametrize("compared", [("mood",), ("kind", "kind=a.jsonl"), ("=a.jsonl",)])
def test_a_task_named_twice_or_not_at_all_is_refused(compared: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="must be different ones; give each once, as TASK or TASK=PATH"):
        _ = StudySettings(task="mood", compared=compared).others


def test_a_word_list_serves_all_word_tasks() -> None:
    settings = StudySettings(path="words.json", compared=("mood=mood.csv",))
    assert settings.path_of("animal-country") == "words.json"
    assert settings.path_of("mood") == "mood.csv"
