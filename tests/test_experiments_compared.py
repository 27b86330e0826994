"""Claims about several tasks: which tasks are compared, where their data come from, and which heads they share."""

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import icl_lens as il
from experiments.catalogue import find
from experiments.claims import common_heads, head_overlap, vocabulary
from experiments.claims.tasks import compared
from experiments.lab.frames import where
from experiments.lab.reductions import correct
from experiments.lab.runner import configuration
from experiments.lab.study import Study, StudySettings, Variant
from icl_lens.errors import InputError
from icl_lens.prompts.tasks import WORD_TASKS


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
    assert [*compared(WORD_TASKS, settings)] == tasks, "no mirror images"
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
        assert found["layers"] == pytest.approx(sum(a * b for a, b in zip(*in_layer, strict=True)) / 4 / k)
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


@pytest.mark.parametrize("named", [("mood",), ("kind", "kind=a.jsonl"), ("=a.jsonl",)])
def test_a_task_named_twice_or_not_at_all_is_refused(named: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="must be different ones; give each once, as TASK or TASK=PATH"):
        _ = StudySettings(task="mood", compared=named).others


def test_a_word_list_serves_all_word_tasks() -> None:
    settings = StudySettings(path="words.json", compared=("mood=mood.csv",))
    assert settings.path_of("animal-country") == "words.json"
    assert settings.path_of("mood") == "mood.csv"


# Heads common to the tasks


def heads(*names: str) -> list[il.Head]:
    return [il.Head(*map(int, name[1:].split("H"))) for name in names]


def test_common_heads_are_those_on_every_list() -> None:
    lists = [heads("L1H0", "L1H1", "L2H0"), heads("L2H0", "L1H0", "L3H3"), heads("L2H0", "L1H0", "L1H1")]
    assert common_heads.in_common(lists) == (heads("L1H0", "L2H0"), 3)


def test_where_no_head_is_on_every_list_most_lists_count() -> None:
    lists = [heads("L1H0", "L1H1"), heads("L1H1", "L2H2"), heads("L2H2", "L1H1"), heads("L2H2", "L0H0")]
    assert common_heads.in_common(lists) == (heads("L2H2", "L1H1"), 3)
    assert common_heads.in_common([heads("L1H0"), heads("L2H0")]) == ([], 2)
    assert common_heads.in_common([heads("L1H0"), heads("L1H0")]) == (heads("L1H0"), 2)


def test_common_heads_of_sentence_tasks(gpt2: Any, settings: StudySettings) -> None:
    """Ranks and attention of the common heads are what single passes give, both labels as the true one."""
    study = Study(gpt2, settings)
    table = common_heads.table(study, common_heads.CommonHeadsConfig(tasks=()))
    common, on = common_heads.in_common([study.located(1, Variant(task=task)) for task in (None, "kind", "place")])
    verdict = common_heads.claim(table.assign(query=table["prompt"]))
    if not common:
        assert "no head is located on more than half" in verdict.reason
        return
    assert table["on"].unique().tolist() == [on]
    head, row = common[0], int(study.test[0])
    for layout in ("order", "imbalanced", "reorder"):
        for place, label in enumerate(("true", "false")):
            found = where(table, measure="attention", layout=layout, label=label, name=str(head), prompt=row)
            expected = []
            for swapped in (False, True):
                batch = study.batch(Variant(layout, swapped))[torch.tensor([row])]
                attention = il.attention_to_labels(il.capture(gpt2, batch))[0, head.layer, head.head]
                true = (batch.label_index == batch.answer[:, None])[0]
                wanted = true if place == 0 else (batch.label_index[0] >= 0) & ~true
                expected.append(float(attention[wanted].sum()))
            assert found["attention"].tolist() == pytest.approx([sum(expected) / 2], abs=1e-5)
    assert common_heads.figure(table.assign(query=table["prompt"])).axes


def test_no_common_head_is_undecided() -> None:
    table = pd.DataFrame({"prompt": range(9), "query": range(9), "measure": "none", "group": "none"})
    table = table.assign(tasks=4, on=3)
    assert common_heads.claim(table).outcome == "undecided"
    assert common_heads.figure(table)


# Words of sentence tasks


def test_the_example_of_a_sentence_task_is_its_own(gpt2: Any, settings: StudySettings) -> None:
    """A tested prompt that is answered rightly, with the texts whose words are listed; the paper's on its own task."""
    study = Study(gpt2, settings)
    config = vocabulary.VocabularyConfig()
    shown = vocabulary.example(study, config)
    row = study.prompts().index(shown)
    assert row in study.test.tolist()
    assert study.get(correct)[row] == 1
    words = where(vocabulary.table(study, config), prompts="example")
    texts = [one.text for one in shown.demonstrations]
    assert words["text"].tolist() == [*texts, *texts, shown.query]
    assert words["words"].str.len().min() > 0
    study.settings = StudySettings(model="tiny", n=24)
    assert vocabulary.example(study, config) == il.Prompt.parse(config.example, answer="foo")
