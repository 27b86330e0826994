"""Words for classes: which word each class has, in which order, and which calls are refused."""

import csv
import itertools
import json
import random
from collections import Counter
from typing import get_args

import pytest
from prompt_parts import pairs_of

import icl_lens as il
from icl_lens.cli.task_options import parse_labels
from icl_lens.errors import InputError
from icl_lens.prompts.class_labels import class_labels
from icl_lens.prompts.labeled_task import Layout
from icl_lens.prompts.name_order import in_order

LAYOUTS = get_args(Layout)
BALANCED = ("random", "last", "first")


def write(path, classes, n_of_each=12, text="{} text {}"):
    """Write a CSV in random order; each text begins with its class, stripped."""
    rows = [
        (text.format(name.strip(), i), name)
        for name, i in itertools.product(classes, range(n_of_each))
    ]
    random.Random(0).shuffle(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def labels_of_texts(prompts):
    """Return all pairs of a text's class and its label, also those of queries."""
    labeled = []
    for prompt in prompts:
        labeled += [*pairs_of(prompt), (prompt.query, prompt.answer)]
    return {(text.split(" text ")[0], label) for text, label in labeled}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("classes", [("0", "1"), ("1", "-1"), ("10", "9"), ("1.5", "0.5")])
def test_words_belong_to_numbered_classes_in_the_order_of_the_numbers(tmp_path, layout, classes):
    path = write(tmp_path / "reviews.csv", classes)
    prompts = il.load_task("reviews", path=path, labels=("awful", "great"), n=40, layout=layout)
    low, high = sorted(classes, key=float)
    assert labels_of_texts(prompts) == {(low, "awful"), (high, "great")}
    assert all(prompt.labels == ("awful", "great") for prompt in prompts)
    if layout in BALANCED:
        assert Counter(prompt.answer for prompt in prompts) == {"awful": 20, "great": 20}


def test_twelve_numbered_classes_have_words_in_the_order_of_the_numbers(tmp_path):
    words = "jan feb mar apr may jun jul aug sep oct nov dec".split()
    path = write(tmp_path / "months.csv", [str(month) for month in range(12, 0, -1)])
    for classes in ("all", "binary"):
        task = il.TextTask("months", path, classes=classes)
        labeled = labels_of_texts(task.prompts(120, labels=words))
        assert labeled == {(str(month), word) for month, word in enumerate(words, 1)}
    defaults = il.TextTask("months", path, classes="all").prompts(1)
    assert labels_of_texts(defaults) == {(str(month), str(month)) for month in range(1, 13)}


@pytest.mark.parametrize("layout", BALANCED)
def test_words_without_meaning_are_exchanged_only_if_none_is_given_a_class(tmp_path, layout):
    path = write(tmp_path / "kinds.csv", ("loud", "calm"))
    all_pairs = {*itertools.product(("loud", "calm"), ("foo", "bar"))}
    for labels in (("foo", "bar"), {"loud": ["foo", "bar"], "calm": ["bar", "foo"]}):
        prompts = il.load_task("kinds", path=path, n=40, layout=layout, labels=labels)
        assert labels_of_texts(prompts) == all_pairs
        assert Counter(prompt.answer for prompt in prompts) == {"foo": 20, "bar": 20}
        kinds = Counter((prompt.query.split()[0], prompt.answer) for prompt in prompts)
        assert labels is None or not isinstance(labels, dict) or set(kinds.values()) == {10}
    numbered = write(tmp_path / "numbers.csv", ("0", "1"))
    prompts = il.load_task("numbers", path=numbered, n=40, layout=layout)
    assert labels_of_texts(prompts) == {("0", "0"), ("1", "1")}, (
        "by default, classes have their own names"
    )


@pytest.mark.parametrize("keys", [("0", "1"), (0, 1)])
def test_a_mapping_gives_each_class_its_words(tmp_path, keys):
    path = write(tmp_path / "reviews.csv", ("0", "1"))
    labels = dict(zip(keys, (["bad", "poor"], "good"), strict=True))
    prompts = il.load_task("reviews", path=path, labels=labels, n=40, layout="random")
    assert labels_of_texts(prompts) == {("0", "bad"), ("0", "poor"), ("1", "good")}
    assert {prompt.labels for prompt in prompts} == {("bad", "good"), ("poor", "good")}
    assert Counter(prompt.answer for prompt in prompts) == {"good": 20, "bad": 10, "poor": 10}


def test_a_mapping_chooses_the_classes(tmp_path):
    path = write(tmp_path / "stars.csv", [str(stars) for stars in range(1, 6)])
    two = il.load_task(
        "stars", path=path, labels={"1": "awful", "5": "great"}, n=20, layout="random"
    )
    assert labels_of_texts(two) == {("1", "awful"), ("5", "great")}
    words = {"1": "awful", "2": "poor", "3": "fair", "4": "good", "5": "great"}
    five = il.load_task("stars", path=path, labels=words, n=60, layout="random")
    assert labels_of_texts(five) == {*words.items()}
    assert all(len(prompt.labels) == 2 for prompt in five)


def test_spaces_around_a_class_do_not_make_another_one(tmp_path):
    path = write(tmp_path / "kinds.csv", (" pos", "pos", "neg ", "neg"))
    prompts = il.load_task(
        "kinds", path=path, n=20, layout="random", labels={"pos": "good", "neg": "bad"}
    )
    assert labels_of_texts(prompts) == {("pos", "good"), ("neg", "bad")}


AMBIGUOUS = [
    (("neg", "pos"), ("negative", "positive"), 2),
    (("Positive", "Negative"), ("pos", "neg"), 2),
    (("True", "False"), ("no", "yes"), 2),
    (("inside", "outside"), ("in side", "out side"), 2),
    (("indoor", "outdoor"), ("in side", "out side"), 2),
    (("1", "2", "3", "4", "5"), ("bad", "good"), 2),
    (("negative", "neutral", "positive"), ("sad", "neutral", "glad"), 3),
]


@pytest.mark.parametrize(("classes", "labels", "n_shown"), AMBIGUOUS)
def test_words_that_fit_in_more_than_one_way_are_refused_with_both_ways(classes, labels, n_shown):
    with pytest.raises(InputError, match="in more than one way") as refused:
        class_labels(labels, classes, n_shown)
    words = str(refused.value)
    python = words[words.index("labels={") + 7 : words.index("} (") + 1]
    shell = words[words.index("--labels '") + 10 : words.index("');")]
    mapping = json.loads(python.replace("'", '"'))
    words_of = {name: [word] for name, word in mapping.items()}
    assert parse_labels(shell) == words_of, "both spellings say the same"
    labels_of_advice = class_labels(mapping, classes, n_shown)  # the advice works
    assert labels_of_advice.words == {name: (word,) for name, word in mapping.items()}
    assert class_labels(None, classes, n_shown).arbitrary == ("foo", "bar", "baz")[:n_shown]


@pytest.mark.parametrize("classes", [("0", "1"), ("1", "2", "3", "4", "5"), ("True", "False")])
def test_default_words_name_no_class_whatever_the_classes_are_called(classes):
    assert class_labels(("foo", "bar"), classes, 2).arbitrary == ("foo", "bar")
    with pytest.raises(InputError, match=r"for words that mean nothing, pass foo, bar$"):
        class_labels(("no", "yes"), ("True", "False"), 2)


REFUSED = [
    ({"0": "a", "2": "b"}, "must map classes ('0', '1')"),
    ({"0": "a"}, "at least 2 classes, got 1; add '1'"),
    ({"0": "a", "1": "a"}, "different words in every prompt"),
    ({"0": ["a", "b"], "1": ["b", "b"]}, "different words in every prompt"),
    ({"0": "a", "1": ""}, "must have a word for the class '1'"),
    ({"0": "a", "1": []}, "must have a word for the class '1'"),
    ({"0": "a", "1": 2}, "label must be a string, got 2"),
    (("a", 2), "label must be a string, got 2; write '2'"),
]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("labels", "words"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_words_are_refused(labels, words):
    with pytest.raises(InputError) as refused:
        class_labels(labels, ("0", "1"), 2)
    assert words in str(refused.value)


def test_names_have_one_order():
    names = ["10", "9", "-1", "0.5", "b", "a", "level 10", "level 9", "B"]
    expected = ("-1", "0.5", "9", "10", "B", "a", "b", "level 9", "level 10")
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert in_order(names) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes, no", ["yes", "no"]),
        ("0=bad,1 = good", {"0": ["bad"], "1": ["good"]}),
        ("0=bad|poor , 1=good", {"0": ["bad", "poor"], "1": ["good"]}),
        ('{"a, b": "x", "c": ["y", "z"]}', {"a, b": "x", "c": ["y", "z"]}),
        ("=,≠", ["=", "≠"]),
    ],
)
def test_the_command_reads_words_and_mappings(text, expected):
    assert parse_labels(text) == expected


@pytest.mark.parametrize(
    ("text", "words"), [("0=bad,good", "for every word or for none"), ("{0: 1}", "JSON object")]
)
def test_the_command_refuses_half_a_mapping(text, words):
    with pytest.raises(InputError, match=words):
        parse_labels(text)
