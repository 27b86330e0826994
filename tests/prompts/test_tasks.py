"""Word and sentence tasks: which texts end up where, and what is refused. No network; foundation/test_hub.py
has the Hub.
"""

import itertools
import json
import pickle
import socket
from collections import Counter
from copy import deepcopy
from importlib.resources import files
from itertools import pairwise

import datasets
import pytest
from cases import slow
from prompt_parts import demonstrated_texts, labels_of, pairs_of, texts_of
from small_tokenizers import model_of

from icl_lens.errors import InputError
from icl_lens.prompts.draw import N_PROMPTS
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.tasks import load_task
from icl_lens.prompts.text_task import TextTask
from icl_lens.prompts.tokenize import tokenize
from icl_lens.prompts.word_task import WORD_TASKS, WordTask

CATEGORIES = {
    "color": ["red", "blue", "green", "orange", "pink"],
    "fruit": ["apple", "pear", "orange", "plum", "fig", "lime", "date"],
    "pair": ["x", "y"],
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Assert that no test here looks up a host, even if a library hides that the look-up failed."""
    hosts = []

    def getaddrinfo(host, *_, **__):
        hosts.append(host)
        raise OSError(f"no network, so no {host}")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    assert hosts == []


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.json"
    path.write_text(json.dumps({"categories": CATEGORIES}))
    return path


KINDS = ["ABBR", "DESC", "NUM"]


def rows_of(split, kinds=KINDS, n_of_each=6):
    return [
        {"text": f"{split} {kind} text {i}", "label": kind}
        for i, kind in itertools.product(range(n_of_each), kinds)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train.jsonl", rows_of("train"))
    write(tmp_path / "test.jsonl", rows_of("test"))
    return tmp_path


def kind_of(text):
    """The class of a sentence, or the category of a word."""
    return (
        text.split()[1]
        if " " in text
        else next(name for name, words in CATEGORIES.items() if text in words)
    )


def texts_labeled(prompt, label):
    return [
        demonstration.text
        for demonstration in prompt.demonstrations
        if demonstration.label == label
    ]


def test_columns_of_a_file_are_those_of_the_tasks_with_settings(tmp_path):
    rows = rows_of("train")
    renamed = write(
        tmp_path / "mine.jsonl", [{"note": row["text"], "kind": row["label"]} for row in rows]
    )
    expected = TextTask("mine", renamed, columns=("note", "kind")).prompts(5)
    assert load_task("mine", renamed, columns=("note", "kind"), n=5) == expected
    pairs = [{"input": f"a{i}", "output": f"b{i}", "other": f"c{i}"} for i in range(9)]
    file = write(tmp_path / "pairs.jsonl", pairs)
    assert load_task("pairs", file, columns=("input", "other"), n=1)[0].answer.startswith("c")
    with pytest.raises(InputError, match=r"must have the columns 'a' and 'b'|'a'"):
        load_task("mine", renamed, columns=("a", "b"), n=1)


@pytest.mark.parametrize("name", ["sst2", "antonyms", "sentiment-number"])
def test_columns_without_a_file_are_refused(name):
    with pytest.raises(
        InputError,
        match=rf"columns must be None for the task '{name}'.*; pass the file .* as path=",
    ):
        load_task(name, columns=("note", "kind"))


# Words


@pytest.mark.parametrize(
    "name",
    [WORD_TASKS[0], *(slow(name) for name in WORD_TASKS[1:])],
)
def test_the_papers_word_tasks(name):
    """Two false demonstrations, two true ones, and the query, a word of the category named last."""
    words = json.loads((files("icl_lens") / "bundled" / "words.json").read_text())["categories"]
    false, true = name.split("-")
    prompts = load_task(name, n=1000, layout="order")
    assert len(prompts) == len(set(prompts)) == 1000
    for prompt in prompts:
        assert [d.label for d in prompt.demonstrations] == ["bar", "bar", "foo", "foo"]
        assert (prompt.answer, prompt.labels) == ("foo", ("foo", "bar"))
        assert set(texts_labeled(prompt, "bar")) <= set(words[false]) - set(words[true])
        assert {*texts_labeled(prompt, "foo"), prompt.query} <= set(words[true]) - set(words[false])
        assert (
            len({*texts_labeled(prompt, "foo"), *texts_labeled(prompt, "bar"), prompt.query}) == 5
        )
    # Every word is a query.
    assert len({prompt.query for prompt in prompts}) == len(set(words[true]) - set(words[false]))


@pytest.fixture(params=["words", "sentences", "sentences of all classes"])
def task(request, words, folder):
    """A task of one kind; tests run for each kind."""
    classes = "all" if "all" in request.param else "binary"
    is_words = request.param == "words"
    return WordTask("color-fruit", words) if is_words else TextTask("trec", folder, classes=classes)


def test_layouts_show_the_same_texts_in_another_order(task):
    order, reorder, imbalanced = (
        task.prompts(50, layout=layout) for layout in ("order", "reorder", "imbalanced")
    )
    for ordered, reordered, shortened in zip(order, reorder, imbalanced, strict=True):
        false, true = ordered.demonstrations[:-2], ordered.demonstrations[-2:]
        assert {d.label for d in true} == {ordered.answer}
        assert ordered.answer not in {d.label for d in false}
        assert reordered.demonstrations == true + false
        assert shortened.demonstrations == false + true[:-1]
        assert ordered.query == reordered.query == shortened.query
        assert ordered.answer == reordered.answer == shortened.answer


def test_the_same_texts_asked_about_the_other_class(task):
    """The query is an unseen text of the false class that is shown first, and the answer is that
    class's label.
    """
    prompts = task.prompts(60, layout="order")
    exchanged = [prompt.with_other_query() for prompt in prompts]
    assert [prompt.with_other_query() for prompt in exchanged] == prompts
    for left, right in zip(prompts, exchanged, strict=True):
        assert left.demonstrations == right.demonstrations
        assert right.answer == right.demonstrations[0].label != left.answer
        first = right.demonstrations[0].text
        assert kind_of(right.query) == kind_of(first) != kind_of(left.query)
        assert right.query not in {d.text for d in right.demonstrations}
    assert len({prompt.query for prompt in exchanged}) > 3


def test_seeds_give_the_same_prompts(task):
    first, again, second_seed = (task.prompts(30, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != second_seed
    assert task.prompts(10, seed=1) == first[:10]
    query_sets = set()
    for seed in range(5):
        query_sets.add(frozenset(prompt.query for prompt in task.prompts(4, seed=seed)))
    assert len(query_sets) > 1, "a few queries are drawn from all, not the first ones"


def test_balanced_layouts_ask_for_both_classes_and_exchange_labels_in_every_second_pair(words):
    """Four prompts: the true class, the false one, and both with labels exchanged; texts are those
    of the paper's.
    """
    task = WordTask("color-fruit", words)
    paper, random, last, first = (
        task.prompts(20, layout=layout) for layout in ("order", "random", "last", "first")
    )
    swap = {"foo": "bar", "bar": "foo"}
    for number, prompts in enumerate(zip(paper, random, last, first, strict=True)):
        ordered, *balanced = prompts
        asked = ordered.with_other_query() if number % 2 else ordered
        label = swap if number // 2 % 2 else {"foo": "foo", "bar": "bar"}
        labeled_texts = {(text, label[name]) for text, name in pairs_of(ordered)}
        for prompt in balanced:
            assert {*pairs_of(prompt)} == labeled_texts
            assert (prompt.query, prompt.answer) == (asked.query, label[asked.answer])
            assert prompt.labels == ("foo", "bar")


def test_layouts_differ_in_where_the_answers_label_stands(words):
    task = WordTask("color-fruit", words)
    random, last, first = (task.prompts(20, layout=name) for name in ("random", "last", "first"))
    for near, far in zip(last, first, strict=True):
        is_answer = [label == near.answer for label in labels_of(near)]
        assert is_answer == [False, False, True, True]
        assert far.demonstrations == near.demonstrations[2:] + near.demonstrations[:2]
    orders = set()
    for prompt in random:
        orders.add(tuple(label == prompt.answer for label in labels_of(prompt)))
    assert len(orders) > 2


def test_the_papers_labels_are_given_in_the_order_true_false(words):
    plain, swapped = (
        load_task("color-fruit", words, n=20, layout="order", labels=labels)
        for labels in (None, ("bar", "foo"))
    )
    swap = {"foo": "bar", "bar": "foo"}
    for left, right in zip(plain, swapped, strict=True):
        assert [(d.text, swap[d.label]) for d in left.demonstrations] == [
            (d.text, d.label) for d in right.demonstrations
        ]
        assert (left.query, right.answer, right.labels) == (right.query, "bar", ("bar", "foo"))


def test_prompts_differ_as_long_as_the_words_allow(words):
    # One of 5 colors, and both words of "pair" in either order.
    prompts = load_task("color-pair", path=words, n=24, demonstrations=1, layout="order")
    assert len(set(prompts[:10])) == len(set(prompts[10:20])) == 10
    assert Counter(Counter(prompts).values()) == Counter({3: 4, 2: 6})
    # Orange is in both: 4 × 3 colors, 6 × 5 × 4 fruits.
    prompts = load_task("color-fruit", path=words, n=1440, layout="order")
    assert len(set(prompts)) == 12 * 120


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            {"name": "color-shape"},
            "unknown task 'color-shape'.*sst2.*sentiment-number.*color, fruit, pair",
        ),
        ({"name": "color-pair"}, "'pair' must have at least 3 words .*got 2"),
        ({"name": "pair-fruit"}, "no unused text"),
        (
            {"name": "sst3", "path": None},
            r"unknown task 'sst3' \(did you mean 'sst2'\?\); choose .* \(sst2, trec, agnews",
        ),
        ({"path": "nowhere.json"}, "no word list"),
        ({"n": 0}, "between 1 and 1,000,000, got 0"),
        ({"demonstrations": 0}, "at least 1"),
        ({"layout": "imbalanced", "demonstrations": 1}, "at least 2"),
        ({"labels": ["foo", "foo"]}, "must be 2 different words"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_word_tasks_that_cannot_be_are_refused(words, arguments, complaint):
    with pytest.raises(InputError, match=complaint):
        load_task(**{"name": "color-fruit", "path": words, "n": 5} | arguments)


# Sentences


@pytest.fixture
def prompts_of_two_classes(folder):
    return load_task("trec", path=folder, n=100, layout="order", labels=("foo", "bar"))


def test_two_classes_a_prompt_are_those_of_query_and_another(prompts_of_two_classes):
    pairs = set()
    for prompt in prompts_of_two_classes:
        (of_foo,) = {kind_of(text) for text in texts_labeled(prompt, "foo")}
        (of_bar,) = {kind_of(text) for text in texts_labeled(prompt, "bar")}
        assert of_foo == kind_of(prompt.query) != of_bar
        assert (prompt.answer, prompt.labels) == ("foo", ("foo", "bar"))
        pairs.add((of_foo, of_bar))
    assert len(pairs) == 6, "every ordered pair of classes is met"


def test_demonstrations_are_of_the_other_split(prompts_of_two_classes):
    for prompt in prompts_of_two_classes:
        assert labels_of(prompt) == ["bar", "bar", "foo", "foo"]
        assert prompt.query.startswith("test ")
        assert all(text.startswith("train ") for text in texts_of(prompt))
        assert len(set(texts_of(prompt))) == 4


def test_each_query_is_asked_before_any_twice(prompts_of_two_classes):
    queries = [prompt.query for prompt in prompts_of_two_classes]
    assert len(queries) == 100
    assert set(queries[:18]) == {row["text"] for row in rows_of("test")}
    assert Counter(Counter(queries).values()) == Counter({6: 10, 5: 8})


def test_all_classes_keep_their_labels(folder):
    """A label belongs to the same class in every prompt; the true class stands next to the
    query.
    """
    prompts = TextTask("trec", folder, classes="all").prompts(
        60, layout="order", labels=("foo", "bar", "baz")
    )
    meaning = {"foo": "ABBR", "bar": "DESC", "baz": "NUM"}
    first = set()
    for prompt in prompts:
        assert prompt.labels == ("foo", "bar", "baz")
        assert len(prompt.demonstrations) == 6
        assert all(kind_of(d.text) == meaning[d.label] for d in prompt.demonstrations)
        assert meaning[prompt.answer] == kind_of(prompt.query)
        assert [d.label for d in prompt.demonstrations[4:]] == [prompt.answer] * 2
        assert all(
            left.label == right.label for left, right in list(pairwise(prompt.demonstrations))[::2]
        )
        first.add((prompt.answer, prompt.demonstrations[0].label))
    assert len(first) == 6
    named = TextTask("trec", folder, classes="all").prompts(5, labels=["a", "b", "c"])
    assert named[0].labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("NUM", "abbr"), "binary"),  # both name classes
        (("other", "num"), "binary"),
        (("NUM", "one", "ABBR"), "all"),
        (("DESC", "NUM", "ABBR"), "all"),
    ],
)
@pytest.mark.parametrize("layout", ["order", "random"])
def test_labels_that_name_classes_belong_to_them(folder, labels, classes, layout):
    """Every prompt shows them, and if labels are balanced, each is the answer equally often."""
    prompts = TextTask("trec", folder, classes=classes).prompts(60, layout=layout, labels=labels)
    kinds = {label: label.upper() for label in labels if label.upper() in {"NUM", "ABBR", "DESC"}}
    for prompt in prompts:
        assert prompt.labels == labels
        assert set(labels_of(prompt)) == {*labels}
        for text, label in [(prompt.query, prompt.answer), *pairs_of(prompt)]:
            assert kinds.get(label, kind_of(text)) == kind_of(text)
        for text in texts_labeled(prompt, "other"):
            assert kind_of(text) not in kinds.values()
        assert prompt.query not in texts_of(prompt)
    if classes == "binary" and layout == "random":
        assert Counter(prompt.answer for prompt in prompts) == dict.fromkeys(labels, 30)


def test_labels_that_name_classes_without_queries_are_refused(folder, monkeypatch):
    monkeypatch.setattr("icl_lens.prompts.labeled_task.MAX_SKIPPED", 100)
    write(folder / "other.jsonl", [{"text": f"other DESC {i}", "label": "DESC"} for i in range(3)])
    with pytest.raises(InputError, match="of the same prompt, got the names of 'ABBR', 'NUM'"):
        TextTask("trec", folder, split="other").prompts(4, labels=["NUM", "ABBR"])


def test_one_file_is_cut_in_two(tmp_path):
    path = write(tmp_path / "rows.jsonl", rows_of("one", n_of_each=8))
    prompts = load_task("mine", path=path, n=200)
    asked = {prompt.query for prompt in prompts}
    demonstrated = demonstrated_texts(prompts)
    assert not asked & demonstrated
    assert asked | demonstrated == {row["text"] for row in rows_of("one", n_of_each=8)}
    assert Counter(map(kind_of, asked)) == dict.fromkeys(KINDS, 4)
    assert load_task("mine", path=path, n=200) == prompts
    assert {prompt.query for prompt in load_task("mine", path=path, n=200, seed=1)} != asked


def test_queries_from_the_train_split(folder):
    prompts = TextTask("trec", folder, split="train").prompts(100)
    asked = {prompt.query for prompt in prompts}
    assert not asked & demonstrated_texts(prompts)
    assert all(query.startswith("train ") for query in asked)


def test_texts_in_both_splits_are_asked_for_only(folder):
    shared_row = {"text": "train NUM text 0", "label": "NUM"}
    write(folder / "test.jsonl", [*rows_of("test"), shared_row])
    prompts = load_task("trec", path=folder, n=60)
    assert shared_row["text"] in {prompt.query for prompt in prompts}
    assert shared_row["text"] not in demonstrated_texts(prompts)


def test_what_becomes_of_odd_texts(folder):
    odd = [
        {"text": "test NUM with\na  line\tbreak \n", "label": "NUM"},
        {"text": " \n", "label": "NUM"},
        {"text": None, "label": "NUM"},
        {"text": "test NUM without label", "label": None},
        {"text": "test NUM text 0", "label": "NUM"},
        {"text": "test NUM " + "long " * 20, "label": "NUM"},
    ]
    write(folder / "test.jsonl", [*rows_of("test"), *odd])
    prompts = TextTask("trec", folder, max_words=21).prompts(19, labels=("foo", "bar"))
    asked = Counter(prompt.query for prompt in prompts)
    assert asked == Counter(
        [*(row["text"] for row in rows_of("test")), "test NUM with a line break"]
    )
    longest = {
        prompt.query for prompt in load_task("trec", path=folder, n=20, labels=("foo", "bar"))
    } - set(asked)
    assert longest == {("test NUM " + "long " * 20).strip()}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_other_files_and_columns_are_read(tmp_path, suffix):
    rows = [
        {"sentence": f'{row["text"]}, "quoted"', "class": row["label"]} for row in rows_of("one")
    ]
    table = datasets.Dataset.from_list(rows).to_pandas()
    path = tmp_path / f"rows [1].{suffix}"
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    prompts = TextTask("mine", path, columns=("sentence", "class")).prompts(30)
    assert all(prompt.query.endswith(', "quoted"') for prompt in prompts)
    assert {kind_of(prompt.query) for prompt in prompts} == set(KINDS)
    with pytest.raises(InputError, match="no column 'text', 'label', only 'sentence', 'class'"):
        load_task("mine", path=path)


def test_numbers_as_labels_survive_an_empty_cell(tmp_path):
    """An empty cell turns a CSV column of integers into floats; the classes stay the same."""
    lines = [f"text {kind} {i},{kind}" for i, kind in itertools.product(range(6), range(3))]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join([*lines, "text without label,"]))
    write(tmp_path / "test.jsonl", [{"text": f"ask {i}", "label": i % 3} for i in range(6)])
    for prompt in TextTask("mine", tmp_path, classes="all").prompts(
        6, labels=("foo", "bar", "baz")
    ):
        assert prompt.answer == ("foo", "bar", "baz")[int(kind_of(prompt.query)) % 3]
        for d in prompt.demonstrations:
            assert d.label == ("foo", "bar", "baz")[int(kind_of(d.text))]


def test_class_names_of_parquet_files_are_read(tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])}
    )
    rows = {"text": [f"t {i}" for i in range(12)], "label": [i % 2 for i in range(11)] + [-1]}
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    for prompt in TextTask("mine", path, classes="all").prompts(20, demonstrations=1):
        assert prompt.answer == ("z", "a")[int(prompt.query.split()[1]) % 2]
        assert "t 11" not in str(prompt)


def test_a_dataset_is_picked_from_a_folder_by_its_name(tmp_path):
    for name in ("sst2", "trec"):
        for split in ("train", "test"):
            write(tmp_path / f"{name}-{split}.jsonl", rows_of(f"{name}-{split}"))
    for name in ("sst2", "trec"):
        for prompt in load_task(name, path=tmp_path, n=10):
            assert prompt.query.startswith(f"{name}-test ")
            assert all(d.text.startswith(f"{name}-train ") for d in prompt.demonstrations)
    with pytest.raises(
        InputError, match=r"one file for the split 'train' of 'agnews'.*'sst2-train\.jsonl', 'tr"
    ):
        load_task("agnews", path=tmp_path)


def test_shards_are_read_together(tmp_path):
    for i, kind in enumerate(KINDS):
        write(tmp_path / f"train-0000{i}-of-00003.jsonl", rows_of("train", [kind]))
    write(tmp_path / "test-00000-of-00001.jsonl", rows_of("test"))
    prompts = TextTask("mine", tmp_path, classes="all").prompts(10)
    assert {kind_of(d.text) for d in prompts[0].demonstrations} == set(KINDS)


def test_datasets_that_cannot_be_used_are_refused(folder, tmp_path):
    def refused(complaint, labels=None, **arguments):
        with pytest.raises(InputError, match=complaint):
            TextTask("mine", **{"path": folder} | arguments).prompts(5, labels=labels)

    refused(
        "split 'dev' of 'mine', such as 'dev.jsonl', got 'test.jsonl', 'train.jsonl'", split="dev"
    )
    refused("no file .*nowhere", path=tmp_path / "nowhere")
    refused(
        "2 demonstration texts each beside the half .*1 of class 'DESC'",
        path=write(tmp_path / "few.jsonl", rows_of("x", n_of_each=2)),
    )
    refused("got 0 queries", max_words=1)
    refused("must be 3 different words", classes="all", labels=["foo", "bar"])
    many = write(tmp_path / "many.jsonl", rows_of("one", [f"K{i}" for i in range(20)], n_of_each=4))
    assert len(TextTask("many", many, classes="all").prompts(1)[0].labels) == 20
    refused("must be 20 different words", path=many, classes="all", labels=["foo", "bar"])
    write(folder / "test.jsonl", [*rows_of("test"), {"text": "a new class", "label": "LOC"}])
    refused("0 of class 'LOC'")


# Rows that align


def layouts(prompts, model, template):
    batch = tokenize(model, prompts, template=template)
    return {
        (*row, end)
        for row, end in zip(batch.label_positions.tolist(), batch.last.tolist(), strict=True)
    }


@pytest.mark.parametrize("prefix", ["", " "])
@pytest.mark.parametrize("options", [{}, {"layout": "order"}, {"layout": "imbalanced"}])
def test_rows_of_one_length_align(tmp_path, options, prefix):
    """With this tokenizer, most words have as many tokens as letters."""
    model, template = model_of("byte"), Template(prefix=prefix)
    four = {
        "color": ["blue", "pink", "gold", "gray"],
        "fruit": ["pear", "plum", "lime", "kiwi", "date"],
    }
    of_other_lengths = {"color": ["cyan-like", "red"], "fruit": ["fig", "banana", "apple"]}
    path = tmp_path / "words.json"
    path.write_text(
        json.dumps({"categories": {name: [*four[name], *of_other_lengths[name]] for name in four}})
    )
    options = {"n": 12, "path": path, **options}
    assert len(layouts(load_task("color-fruit", **options), model, template)) > 1
    aligned = load_task("color-fruit", **options, same_length_for=model, template=template)
    assert len(aligned) == 12
    assert len(layouts(aligned, model, template)) == 1
    texts = demonstrated_texts(aligned) | {prompt.query for prompt in aligned}
    for before in ("", " "):
        assert len({len(model.tokenizer(f"{before}{text}")["input_ids"]) for text in texts}) == 1


@pytest.mark.parametrize("classes", ["binary", "all"])
def test_sentences_of_one_length_align(tmp_path, classes):
    model = model_of("word")
    texts = [
        "one",
        "two",
        "love like",
        "happy sad",
        "nine three",
        "eight one",
        "one two",
        "the one two",
    ]
    rows = [{"text": f"love {text}", "label": "p"} for text in texts]
    rows += [{"text": f"sad {text}", "label": "q"} for text in texts]
    path = write(tmp_path / "rows.jsonl", rows)
    task, options = TextTask("mine", path, classes=classes), {"n": 6, "labels": ["foo", "bar"]}
    assert len(layouts(task.prompts(**options), model, Template())) > 1
    aligned = task.prompts(**options, same_length_for=model)
    assert layouts(aligned, model, Template()) == {(4, 9, 14, 19, 23)}


def test_rows_that_cannot_align_are_refused(words):
    options = {
        "path": words,
        "layout": "last",
        "demonstrations": 1,
        "n": 4,
        "same_length_for": model_of("byte"),
    }
    load_task("color-fruit", **options)
    with pytest.raises(InputError, match=r"same number of tokens.*prompt 1"):
        load_task("color-fruit", **options, labels=["foo", "zzzz"])


def test_a_seed_gives_the_prompts_that_it_has_always_given():
    """Published numbers were measured on these prompts, so they must not change."""
    stored = load_task("animal-country", n=2, layout="random", seed=3, demonstrations=4)
    assert [str(prompt) for prompt in stored] == [
        "elephant : bar raven : bar Chile : foo Norway : foo Lebanon : foo seal : bar owl : bar Qatar : foo Germany :",
        "Singapore : foo Panama : foo Chile : foo hawk : bar chicken : bar cod : bar Iran : foo frog : bar calf :",
    ]


def test_prompts_of_a_task_print_as_a_summary():
    prompts = load_task("sentiment-number", n=5)
    lines = repr(prompts).splitlines()
    n_queries = len({prompt.query for prompt in prompts})
    assert (
        lines[0]
        == f"5 prompts of sentiment-number, 4 demonstrations each, {n_queries} different queries"
    )
    assert lines[1].startswith("classes: 'number' (")
    answers = Counter(prompt.answer for prompt in prompts)
    assert lines[2] == f"labels: 'bar' ({answers['bar']} answers), 'foo' ({answers['foo']} answers)"
    assert lines[3] == f"first: {prompts[0]}"
    assert repr(prompts[:1]).startswith(
        "1 prompt of sentiment-number, 4 demonstrations each, 1 query\n"
    )
    assert repr(prompts[:0]) == "0 prompts of sentiment-number"
    assert "classes" not in repr(load_task("animal-country", n=2, labels=("animal", "country")))


def test_prompts_of_a_task_are_a_list(tmp_path):
    prompts = load_task("sentiment-number")
    assert len(prompts) == N_PROMPTS
    assert prompts == list(prompts)
    assert isinstance(prompts[0], Prompt)
    for copied in (pickle.loads(pickle.dumps(prompts)), deepcopy(prompts)):
        assert (copied, repr(copied)) == (prompts, repr(prompts))
    long = tmp_path / "long.csv"
    long.write_text(
        "text,label\n" + "".join(f"{'word ' * 50}{i},{'ab'[i % 2]}\n" for i in range(20))
    )
    assert len(repr(load_task("long", long, n=1))) < 900
