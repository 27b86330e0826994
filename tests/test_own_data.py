"""Your own data: label words, near-duplicates, balance, what is skipped, and large files."""

import csv
import json
import random
from collections import Counter

import pytest

import icl_lens as il
from icl_lens.cli.own_data import unknown_words_warning
from icl_lens.prompts import pair_task
from icl_lens.prompts.draw import TextPool, spelling_key
from icl_lens.prompts.word_task import WordTask


def write(path, rows, columns=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def test_the_labels_of_the_file_are_the_label_words(tmp_path):
    rows = [(f"{text} {i}", label) for i in range(12) for text, label in (("sofa", "indoor"), ("river", "outdoor"))]
    path = write(tmp_path / "places.csv", rows)
    prompts = il.load_task(str(path), n=12)
    for prompt in prompts:
        assert prompt.labels == ("indoor", "outdoor")
        demonstrated = [(demonstration.text, demonstration.label) for demonstration in prompt.demonstrations]
        assert all(
            label == ("indoor" if "sofa" in text else "outdoor")
            for text, label in [*demonstrated, (prompt.query, prompt.answer)]
        )
    assert len({prompt.query for prompt in prompts}) == 12, "each query once before any again"
    asked_for = il.load_task(str(path), n=12, labels=("foo", "bar"))
    assert {prompt.labels for prompt in asked_for} == {("foo", "bar")}


@pytest.mark.parametrize("classes", ["binary", "all"])
@pytest.mark.parametrize("names", [("ham", "spam"), ("ham", "eggs", "spam")])
@pytest.mark.parametrize("labels", [None, "words"])
def test_a_constant_answer_is_right_by_chance_in_imbalanced_files(tmp_path, classes, names, labels):
    """The first class has 90 % of the rows; each constant answer and the last label are right in about 1/K prompts."""
    rows = [(f"text {i}", names[0] if i % 10 else names[1 + i // 10 % (len(names) - 1)]) for i in range(900)]
    task = il.TextTask("mail", write(tmp_path / "mail.csv", rows), classes=classes)
    words = None if labels is None else ("foo", "bar", "baz")[: 2 if classes == "binary" else len(names)]
    prompts = task.prompts(600, labels=words)
    for label in {label for prompt in prompts for label in prompt.labels}:
        with_label = [prompt for prompt in prompts if label in prompt.labels]
        share = sum(prompt.answer == label for prompt in with_label) / len(with_label)
        chance = 1 / len(prompts[0].labels)
        assert share == pytest.approx(chance, abs=0.08 if len(names) > 2 and classes == "binary" else 0.01)
    last = sum(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts) / len(prompts)
    assert last == pytest.approx(1 / len(prompts[0].labels), abs=0.07)


def test_spellings_that_differ_in_case_or_unicode_form_are_alike():
    assert spelling_key("CAF\u00c9") == spelling_key("cafe\u0301") != spelling_key("cafe")
    assert spelling_key("\uff28ot") == spelling_key("hot")
    assert spelling_key("Stra\u00dfe") == spelling_key("STRASSE")


def test_near_duplicates_of_a_query_are_no_demonstrations(tmp_path):
    spellings = (str.lower, str.upper, lambda text: text.replace("e", "\uff45"))
    rows = [(spell(f"the text {i}"), ("up", "down")[i % 2]) for i in range(40) for spell in spellings]
    texts = il.TextTask("texts", write(tmp_path / "texts.csv", rows)).prompts(60, labels=("foo", "bar"))
    pairs = [(spell(f"in {i}"), f"out {i}") for i in range(8) for spell in (str.lower, str.upper)]
    paired = il.load_task(str(write(tmp_path / "pairs.csv", pairs, ("input", "output"))), n=40)
    lists = {
        "tree": ["Oak", "oak", "elm", "ELM", "ash", "fir"],
        "metal": ["iron", "IRON", "tin", "zinc", "Ash", "lead"],
    }
    (tmp_path / "words.json").write_text(json.dumps({"categories": lists}))
    words = WordTask("tree-metal", tmp_path / "words.json").prompts(40)
    for prompt in [*texts, *paired, *words]:
        demonstrated_keys = {spelling_key(demonstration.text) for demonstration in prompt.demonstrations}
        assert spelling_key(prompt.query) not in demonstrated_keys
        if prompt.other_query is not None:
            assert spelling_key(prompt.other_query.text) not in demonstrated_keys


def test_an_unused_text_is_any_of_those_that_are_not_shown():
    """The choice is that among the unused texts in their order, as a list of them would give it."""
    texts = [f"text {i}" for i in range(9)]
    pool = TextPool(texts)
    for seed in range(50):
        used = random.Random(seed).sample(texts, seed % 9)
        unused = [text for text in texts if text not in used]
        assert pool.unused([text.upper() for text in used], str(seed)) == random.Random(str(seed)).choice(unused)
    assert pool.unused(texts, "0") is None


@pytest.mark.parametrize(
    "content",
    ['{"France": "Paris", "Peru": "Lima", "Haiti": 7}', '[["France", "Paris"], ["Peru", "Lima"], ["Haiti", 7]]'],
)
def test_json_pairs_without_columns_are_pairs(tmp_path, content):
    path = tmp_path / "capitals.json"
    path.write_text(content)
    assert il.PairTask("capitals", path).pairs() == [("France", "Paris"), ("Peru", "Lima"), ("Haiti", "7")]
    assert {prompt.query for prompt in il.load_task(str(path), n=3)} == {"France", "Peru", "Haiti"}


def test_rows_are_counted_by_what_becomes_of_them(tmp_path):
    rows = [("a b", "up"), ("c", "down"), ("c", "down"), ("", "up"), ("d", ""), ("e f g", "up"), ("h", "up")]
    path = write(tmp_path / "rows.csv", rows)
    counts = il.TextTask("rows", path, max_words=2).row_counts()
    assert counts.used == {"up": 2, "down": 1}
    assert counts.skipped == {"duplicate": 1, "without text or label": 2, "with more than 2 words": 1}
    assert str(counts) == (
        "3 rows used, in 2 classes ('up' 2, 'down' 1); 4 skipped (1 duplicate, 2 without text or label, 1 with more "
        "than 2 words)"
    )
    paired = il.PairTask("rows", path, columns=("text", "label")).row_counts()
    assert str(paired) == "4 pairs used; 3 skipped (1 duplicate, 2 with an empty cell)"


def test_only_the_pairs_that_a_prompt_needs_are_drawn(monkeypatch):
    """In the order of a whole shuffle, without one."""
    pairs = [(f"in {i}", f"out {i}") for i in range(60)]
    shuffled = list(pair_task._in_random_order(pairs, random.Random(0)))
    assert shuffled == random.Random(0).sample(pairs, 60)
    monkeypatch.setattr(pair_task, "MAX_SHUFFLED", 10)
    drawn = list(pair_task._in_random_order(pairs, random.Random(0)))
    assert sorted(drawn) == sorted(pairs)
    assert drawn != sorted(pairs)
    firsts = Counter(next(pair_task._in_random_order(pairs, random.Random(seed))) for seed in range(3000))
    assert len(firsts) == 60
    assert max(firsts.values()) < 100


class CountedPairs(list):
    """Pairs that count how often one is read."""

    n_read = 0

    def __getitem__(self, place):
        self.n_read += 1
        return super().__getitem__(place)


def test_prompts_of_large_files_read_few_pairs(monkeypatch):
    """A prompt with four demonstrations reads its query and about as many pairs, not all of them."""
    pairs = CountedPairs((f"in {i}", f"out {i}") for i in range(5000))
    monkeypatch.setattr(il.PairTask, "pairs", lambda task: pairs)
    prompts = il.PairTask("antonyms").prompts(500, demonstrations=4)
    assert len({prompt.query for prompt in prompts}) == 500
    assert 2500 <= pairs.n_read < 3100


def test_commands_say_first_which_rows_and_label_words_they_use(run, tiny, tmp_path):
    rows = [
        (f"{text} {word}", label) for word in ("cat", "dog", "red") for text, label in (("one", "yes"), ("two", "no"))
    ]
    path = write(tmp_path / "rows.csv", [*rows, *rows[:2], ("", "yes")])
    options = ("locate", "--path", path, "--demonstrations", 1, "-n", 20, "-m", tiny, "--no-check", "--by", "increase")
    for labels, words in (
        ((), "Label words: 'no', 'yes', the names of the classes."),
        (("--labels", "foo,bar"), "Label words: 'bar', 'foo'. They change classes from prompt to prompt."),
        (("--labels", "yes=foo,no=bar"), "Label words: 'bar' for class 'no', 'foo' for class 'yes'."),
    ):
        code, out, err = run(*options, *labels)
        assert code == 0, err
        assert out.splitlines()[0] == (
            f"{path}: 6 rows used, in 2 classes ('yes' 3, 'no' 3); 3 skipped (2 duplicate, 1 without text or label)."
        )
        assert out.splitlines()[1] == words


def test_a_bundled_model_is_said_to_know_only_its_own_words():
    known = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :")
    assert unknown_words_warning("icl-mini", [known]) is None
    unknown = il.Prompt.parse("love : bar movie : foo one :")
    assert unknown_words_warning("gpt2", [unknown]) is None
    warning = unknown_words_warning("icl-mini", [known, unknown])
    assert "1 of the 8 different words of these prompts are others, such as 'movie'" in warning
