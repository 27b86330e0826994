"""Experiments with other demonstrations, labels, classes and templates: what they belong to, and who refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import icl_lens as il
from experiments import catalogue
from experiments.lab import competence, runner
from experiments.lab.results import read_all
from experiments.lab.runner import configuration, pass_configuration
from experiments.lab.runner import run as run_experiments
from experiments.lab.study import Study, StudySettings, Variant, folder_of

WORDS = {
    "sentiment": ["love", "like", "hate", "happy", "sad", "good", "bad"],
    "number": ["eight", "two", "one", "nine", "three", "w40", "w41"],
    "animal": ["cat", "dog", "w50", "w51", "w52", "w53", "w54"],
    "country": ["France", "Spain", "w60", "w61", "w62", "w63", "w64"],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("words") / "words.json"
    path.write_text(json.dumps({"categories": WORDS}))
    return str(path)


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sentences of three classes, with columns of their own."""
    path = tmp_path_factory.mktemp("topics") / "topics.jsonl"
    rows = [
        {"said": f"{word} {other}", "kind": kind}
        for kind in ("animal", "country", "number")
        for word in WORDS[kind][:5]
        for other in WORDS["sentiment"][:3]
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def run(model: Any, settings: StudySettings, out: Path, *ids: str, **options: Any) -> Any:
    return run_experiments([*map(catalogue.find, ids)], settings, load=lambda name: model, out=out, **options)


def test_defaults_are_configured_as_before(gpt2: Any, words: str) -> None:
    plain = StudySettings(model="tiny", n=24, path=words)
    expected = {"model": "tiny", "task": "sentiment-number", "n": 24, "seed": 0, "path": words}
    assert plain.described() == expected
    assert StudySettings(model="tiny", n=24, path=words, labels=("foo", "bar")).described() == expected, "the same"
    found = configuration(catalogue.find("order"), Study(gpt2, plain))
    assert list(found) == [*expected, "heads", "controls", "weights", "prompts_digest", "data"]
    assert not {"demonstrations", "template"} & {*pass_configuration(Study(gpt2, plain))}
    assert folder_of(plain) == Path("tiny", "sentiment-number")
    assert plain.said == "sentiment-number"


def test_weights_are_read_once_for_all_experiments(gpt2: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(runner, "fingerprint", lambda model: read.append("once") or f"digest {len(read)}")
    study = Study(gpt2, StudySettings(model="tiny", n=24, path=words))
    found = [configuration(experiment, study)["weights"] for experiment in map(catalogue.find, catalogue.IDS)]
    found.append(pass_configuration(study)["weights"])
    assert len(found) > 20
    assert {*found} == {"digest 1"}


OTHERS: list[dict[str, Any]] = [
    {"demonstrations": 3},
    {"labels": ("yes", "no")},
    {"labels": ("no", "yes")},
    {"template": il.Template("{text} the {label}", "{text} the")},
    {"template": il.Template(separator=" and ")},
    {"template": il.Template(prefix="a ")},
]


def test_each_setting_is_in_the_configuration_the_digests_and_the_folder(gpt2: Any, words: str) -> None:
    plain = StudySettings(model="tiny", n=24, path=words)
    every = [plain, *(StudySettings(model="tiny", n=24, path=words, **one) for one in OTHERS)]
    assert len({folder_of(one) for one in every}) == len(every)
    assert len({one.said for one in every}) == len(every)
    studies = [Study(gpt2, one) for one in every]
    found = [configuration(catalogue.find("order"), study) for study in studies]
    assert len({one["prompts_digest"] for one in found}) == len(every), "they are other prompts"
    assert all(json.loads(json.dumps(one)) for one in found)
    for given, one, study in zip(OTHERS, found[1:], studies[1:], strict=True):
        assert given.keys() <= one.keys()
        assert given.keys() <= pass_configuration(study).keys()


def test_prompts_have_them(gpt2: Any, words: str) -> None:
    template = il.Template("{text} the {label}", "{text} the", separator=" and ")
    settings = StudySettings(model="tiny", n=24, path=words, demonstrations=3, labels=("yes", "no"), template=template)
    study = Study(gpt2, settings)
    batch, other = study.batch(), study.batch(Variant(swapped=True))
    assert study.labels == batch.labels == other.labels == ("yes", "no")
    assert {prompt.answer for prompt in batch.prompts} == {"yes"}
    assert {prompt.answer for prompt in other.prompts} == {"no"}
    assert [len(prompt.demonstrations) for prompt in batch.prompts] == [6] * 24
    assert batch.texts[0].count(" the ") == 6
    assert batch.texts[0].count(" and ") == 6
    assert batch.texts[0].endswith(" the")
    assert study.example("love : bar eight : foo one :", "foo").texts == ("love the bar and eight the foo and one the",)
    assert len(study.batch(Variant(task="animal-country")).prompts[0].demonstrations) == 6, "in other tasks too"


def test_results_of_other_settings_lie_beside_one_another(gpt2: Any, words: str, tmp_path: Path) -> None:
    plain = StudySettings(model="tiny", n=24, path=words)
    several = StudySettings(model="tiny", n=24, path=words, demonstrations=3, labels=("yes", "no"))
    run(gpt2, plain, tmp_path, "label-features")
    before = (tmp_path / "tiny/sentiment-number/label-features/result.json").read_bytes()
    (result,) = run(gpt2, several, tmp_path, "label-features").results
    assert (tmp_path / "tiny/sentiment-number/label-features/result.json").read_bytes() == before
    assert result.task == "sentiment-number, 3 demonstrations of each class, labels yes and no"
    assert result.configuration["demonstrations"] == 3
    assert len(read_all(tmp_path)) == 2
    assert run(gpt2, several, tmp_path, "label-features").done == ["label-features"], "labels are a list in the file"
    with pytest.raises(il.InputError, match=r"seed 0 there, 1 now.*--overwrite"):
        run(gpt2, StudySettings(**(vars(several) | {"seed": 1})), tmp_path, "label-features")


def test_other_labels_stand_in_tables(gpt2: Any, words: str) -> None:
    study = Study(gpt2, StudySettings(model="tiny", n=24, path=words, labels=("yes", "no")))
    for name, column in (
        ("accuracy", "answer"),
        ("label-features", "label"),
        ("prediction-shift", "label"),
        ("attention-vs-increase", "answer"),
    ):
        experiment = catalogue.find(name)
        table = experiment.tabulate(study)
        assert list(dict.fromkeys(table[column])) == ["yes", "no"], name
        assert experiment.verdicts(table)
        assert all(figure.axes or figure.texts for figure in experiment.figures(table).values())


def test_experiments_that_work_with_any_classes_run_and_the_others_say_why(
    gpt2: Any, topics: str, tmp_path: Path
) -> None:
    settings = StudySettings(
        model="tiny",
        task="topics",
        n=24,
        path=topics,
        classes="all",
        columns=("said", "kind"),
        labels=("foo", "bar", "yes"),
        demonstrations=1,
    )
    lines: list[str] = []
    ran = run(gpt2, settings, tmp_path, "label-rank", "imbalance", "two-tower", "order", say=lines.append)
    assert [one.id for one in ran.results] == ["label-rank", "order"]
    assert list(ran.failed) == ["imbalance", "two-tower"]
    assert "either of two labels the answer in turn" in ran.failed["two-tower"]
    assert "leaves out one of the true demonstrations" in ran.failed["imbalance"]
    assert sum("cannot be run" in line for line in lines) == 2
    assert ran.results[0].competence.chance >= 1 / 3
    assert ran.results[0].configuration["classes"] == "all"


def test_with_all_classes_each_has_its_own_label_and_the_next_ones_where_labels_are_exchanged(
    gpt2: Any, topics: str
) -> None:
    settings = StudySettings(
        model="tiny",
        task="topics",
        n=24,
        path=topics,
        classes="all",
        columns=("said", "kind"),
        labels=("foo", "bar", "yes"),
    )
    study = Study(gpt2, settings)
    own, other = (
        {prompt.query.split()[0]: prompt.answer for prompt in study.prompts(Variant(swapped=swapped))}
        for swapped in (False, True)
    )
    kind = {word: kind for kind, words in WORDS.items() for word in words}
    assert {kind[word]: label for word, label in own.items()} == {"animal": "foo", "country": "bar", "number": "yes"}
    assert {kind[word]: label for word, label in other.items()} == {"animal": "bar", "country": "yes", "number": "foo"}
    assert study.batch().labels == study.batch(Variant(swapped=True)).labels == ("foo", "bar", "yes")


def test_a_model_that_says_one_label_is_no_better_than_chance_where_classes_are_uneven(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class has most queries: its label is right more often than one in three."""
    path = tmp_path / "uneven.jsonl"
    rows = [(kind, n) for kind, n in (("animal", 6), ("country", 2), ("number", 2))]
    texts = [
        {"text": f"{word} {other}", "label": kind}
        for kind, n in rows
        for word in WORDS[kind][:n]
        for other in WORDS["sentiment"][:4]
    ]
    path.write_text("\n".join(map(json.dumps, texts)))
    settings = StudySettings(
        model="tiny", task="uneven", n=40, path=str(path), classes="all", labels=("foo", "bar", "yes")
    )
    study = Study(gpt2, settings)
    for label in range(3):
        says = lambda reduction, variant, label=label: (study.batch(variant).answer == label).float()  # noqa: E731
        monkeypatch.setattr(study, "get", says)
        assert not competence.measure(study).capable
    monkeypatch.setattr(study, "get", lambda reduction, variant: torch.ones(40))
    assert competence.measure(study).capable


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": "all"}, r"classes='all' has nothing to do for the word task 'sentiment-number'"),
        ({"max_words": 4}, r"max_words=4 has nothing to do for the word task"),
        ({"split": "train"}, r"split='train' has nothing to do for the word task"),
        ({"task": "sst2", "path": None, "columns": ("a", "b")}, r"'sst2' has its own; leave it out"),
        ({"labels": ("yes",)}, r"labels=\('yes',\) must be 2 different words"),
        ({"labels": ("yes", "yes")}, r"must be 2 different words"),
        ({"demonstrations": 0}, r"demonstrations=0 must both be at least 1"),
        ({"demonstrations": 7}, r"has 7 words of its own, and a prompt takes 8"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    gpt2: Any, words: str, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    settings = StudySettings(**({"model": "tiny", "n": 24, "path": words} | given))
    with pytest.raises(il.InputError, match=said):
        run(gpt2, settings, tmp_path, "order")


def test_a_single_file_has_one_split(gpt2: Any, topics: str, tmp_path: Path) -> None:
    settings = StudySettings(model="tiny", task="topics", n=24, path=topics, columns=("said", "kind"), split="dev")
    with pytest.raises(il.InputError, match="a single file has one split"):
        run(gpt2, settings, tmp_path, "order")
