"""Your own data: label words, near-duplicates, balance, what is skipped, and large files."""

import csv
import io
import json
import random
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import icl_lens as il
from icl_lens.analyses.arrangements import arrange
from icl_lens.cli import app
from icl_lens.cli.console import PlainConsole, with_duration
from icl_lens.cli.head_options import head_names
from icl_lens.cli.options import TokenOptions
from icl_lens.cli.own_data import HALVES_SENTENCE, unknown_words_warning
from icl_lens.cli.program import check_no_data
from icl_lens.cli.spelling import shell_spelling
from icl_lens.cli.task_options import TaskOptions
from icl_lens.prompts import donors, pair_task
from icl_lens.prompts.draw import TextPool, spelling_key
from icl_lens.prompts.word_task import WordTask


def write(path, rows, columns=("text", "label")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def test_the_labels_of_the_file_are_the_label_words(tmp_path):
    rows = []
    for i in range(12):
        rows += [(f"sofa {i}", "indoor"), (f"river {i}", "outdoor")]
    path = write(tmp_path / "places.csv", rows)
    prompts = il.load_task(str(path), n=12)
    for prompt in prompts:
        assert prompt.labels == ("indoor", "outdoor")
        demonstrated = [
            (demonstration.text, demonstration.label) for demonstration in prompt.demonstrations
        ]
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
    """The first class has 90 % of the rows; each constant answer and the last label are right in
    about 1/K prompts.
    """
    rows = [
        (f"text {i}", names[0] if i % 10 else names[1 + i // 10 % (len(names) - 1)])
        for i in range(900)
    ]
    task = il.TextTask("mail", write(tmp_path / "mail.csv", rows), classes=classes)
    words = (
        None
        if labels is None
        else ("foo", "bar", "baz")[: 2 if classes == "binary" else len(names)]
    )
    prompts = task.prompts(600, labels=words)
    for label in set().union(*(prompt.labels for prompt in prompts)):
        with_label = [prompt for prompt in prompts if label in prompt.labels]
        share = sum(prompt.answer == label for prompt in with_label) / len(with_label)
        chance = 1 / len(prompts[0].labels)
        assert share == pytest.approx(
            chance, abs=0.08 if len(names) > 2 and classes == "binary" else 0.01
        )
    last = sum(prompt.demonstrations[-1].label == prompt.answer for prompt in prompts) / len(
        prompts
    )
    assert last == pytest.approx(1 / len(prompts[0].labels), abs=0.07)


SENTENCES = []
for number in ("one", "two", "three", "four", "five", "six", "seven", "eight"):
    SENTENCES += [(f"a sad love {number}", "foo"), (f"like {number}", "bar")]


def test_own_texts_of_several_words_are_separated_by_a_newline(tmp_path, icl_mini):
    rows = {
        "sentences": SENTENCES,
        "words": [(f"word{number}", "ab"[number % 2]) for number in range(24)],
        "labels": [(f"word{number}", ("a b", "c")[number % 2]) for number in range(24)],
    }
    prompts_of = {
        name: il.load_task(write(tmp_path / f"{name}.csv", rows[name]), n=2) for name in rows
    }
    pairs = [("India", "New Delhi"), ("Peru", "Lima"), ("Haiti", "Jacmel"), ("Cuba", "Havana")]
    path = write(tmp_path / "pairs.csv", pairs, ("input", "output"))
    prompts_of |= {
        "pairs": il.load_task(path, n=2),
        "built-in": il.load_task("country-capital", n=80),
    }
    assert " " in "".join(prompt.answer for prompt in prompts_of["built-in"]), (
        "some have several words"
    )
    separators = {"sentences": "\n", "words": " ", "labels": "\n", "pairs": "\n", "built-in": " "}
    for name, prompts in prompts_of.items():
        demonstration = prompts[0].demonstrations[0]
        assert str(prompts[0]).startswith(
            f"{demonstration.text} : {demonstration.label}{separators[name]}"
        ), name
        assert il.Template().for_prompts(prompts).separator == separators[name]
    batch = il.tokenize(icl_mini, prompts_of["sentences"])
    assert batch.texts[0] == str(prompts_of["sentences"][0])
    spaced = il.tokenize(icl_mini, prompts_of["sentences"], template=il.Template(separator=" "))
    assert spaced.texts[0] == batch.texts[0].replace("\n", " ") != batch.texts[0]


def test_prompts_made_from_others_keep_their_separator(tmp_path):
    prompts = il.load_task(str(write(tmp_path / "places.csv", SENTENCES)), n=20)
    arranged = arrange(prompts[0], seed=0).prompts.values()
    exchanged = donors.donor_prompts(prompts)
    changed = [prompts[0].with_other_query(), replace(prompts[0], answer=None), *arranged]
    for several in exchanged.values():
        changed += several
    assert len(changed) > 20
    assert {prompt.separator for prompt in changed} == {"\n"}


@pytest.mark.parametrize(
    ("tokens", "is_said"), [({}, True), ({"separator": " "}, False), ({"chat": True}, False)]
)
def test_commands_say_which_separator_own_texts_get(tmp_path, tokens, is_said):
    path = write(tmp_path / "places.csv", SENTENCES)
    console = PlainConsole(record=True, file=io.StringIO())
    TaskOptions(path=path).describe_data(console, il.load_task(path, n=20), TokenOptions(**tokens))
    text = console.export_text()
    assert (
        "Demonstrations are separated by a newline; --separator ' ' for a space." in text
    ) == is_said
    assert "16 rows used" in text


def test_spellings_that_differ_in_case_or_unicode_form_are_alike():
    assert spelling_key("CAF\u00c9") == spelling_key("cafe\u0301") != spelling_key("cafe")
    assert spelling_key("\uff28ot") == spelling_key("hot")
    assert spelling_key("Stra\u00dfe") == spelling_key("STRASSE")


def test_near_duplicates_of_a_query_are_no_demonstrations(tmp_path):
    spellings = (str.lower, str.upper, lambda text: text.replace("e", "\uff45"))
    rows = []
    for i in range(40):
        rows += [(spell(f"the text {i}"), ("up", "down")[i % 2]) for spell in spellings]
    texts = il.TextTask("texts", write(tmp_path / "texts.csv", rows)).prompts(
        60, labels=("foo", "bar")
    )
    pairs = []
    for i in range(8):
        pairs += [(f"in {i}", f"out {i}"), (f"IN {i}", f"out {i}")]
    paired = il.load_task(str(write(tmp_path / "pairs.csv", pairs, ("input", "output"))), n=40)
    lists = {
        "tree": ["Oak", "oak", "elm", "ELM", "ash", "fir"],
        "metal": ["iron", "IRON", "tin", "zinc", "Ash", "lead"],
    }
    (tmp_path / "words.json").write_text(json.dumps({"categories": lists}))
    words = WordTask("tree-metal", tmp_path / "words.json").prompts(40)
    for prompt in [*texts, *paired, *words]:
        demonstrated_keys = {
            spelling_key(demonstration.text) for demonstration in prompt.demonstrations
        }
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
        assert pool.unused([text.upper() for text in used], str(seed)) == random.Random(
            str(seed)
        ).choice(unused)
    assert pool.unused(texts, "0") is None


@pytest.mark.parametrize(
    "content",
    [
        '{"France": "Paris", "Peru": "Lima", "Haiti": 7}',
        '[["France", "Paris"], ["Peru", "Lima"], ["Haiti", 7]]',
    ],
)
def test_json_pairs_without_columns_are_pairs(tmp_path, content):
    path = tmp_path / "capitals.json"
    path.write_text(content)
    assert il.PairTask("capitals", path).pairs() == [
        ("France", "Paris"),
        ("Peru", "Lima"),
        ("Haiti", "7"),
    ]
    assert {prompt.query for prompt in il.load_task(str(path), n=3)} == {"France", "Peru", "Haiti"}


def test_rows_are_counted_by_what_becomes_of_them(tmp_path):
    rows = [
        ("a b", "up"),
        ("c", "down"),
        ("c", "down"),
        ("", "up"),
        ("d", ""),
        ("e f g", "up"),
        ("h", "up"),
    ]
    path = write(tmp_path / "rows.csv", rows)
    counts = il.TextTask("rows", path, max_words=2).row_counts()
    assert counts.used == {"up": 2, "down": 1}
    assert counts.skipped == {
        "duplicate": 1,
        "without text or label": 2,
        "with more than 2 words": 1,
    }
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
    firsts = Counter(
        next(pair_task._in_random_order(pairs, random.Random(seed))) for seed in range(3000)
    )
    assert len(firsts) == 60
    assert max(firsts.values()) < 100


class CountedPairs(list):
    """Pairs that count how often one is read."""

    n_read = 0

    def __getitem__(self, place):
        self.n_read += 1
        return super().__getitem__(place)


def test_prompts_of_large_files_read_few_pairs(monkeypatch):
    """A prompt with four demonstrations reads its query and about as many pairs, not all of
    them.
    """
    pairs = CountedPairs((f"in {i}", f"out {i}") for i in range(5000))
    monkeypatch.setattr(il.PairTask, "pairs", lambda task: pairs)
    prompts = il.PairTask("antonyms").prompts(500, demonstrations=4)
    assert len({prompt.query for prompt in prompts}) == 500
    assert 2500 <= pairs.n_read < 3100


MANY_PROMPTS = """
import resource, sys

resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
import icl_lens as il

prompts = il.PairTask("words", sys.argv[1]).prompts(1000, demonstrations=4)
assert len({prompt.query for prompt in prompts}) == 1000
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
"""Prints the largest resident memory, KiB, which unlike `ru_maxrss` is not that of the process that
started it; ends after 60 seconds of CPU time.
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
def test_a_million_rows_give_a_thousand_prompts_within_a_minute_and_a_gigabyte(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        file.write("input,output\n")
        file.writelines(f"in {number},out {number}\n" for number in range(1_000_000))
    process = subprocess.run(
        [sys.executable, "-c", MANY_PROMPTS, str(path)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) * 1024 < 1e9


@pytest.mark.slow
def test_commands_say_first_which_rows_and_label_words_they_use(run, tiny, tmp_path):
    rows = []
    for word in ("cat", "dog", "red"):
        rows += [(f"one {word}", "yes"), (f"two {word}", "no")]
    path = write(tmp_path / "rows.csv", [*rows, *rows[:2], ("", "yes")])
    options = (
        "locate",
        "--path",
        path,
        "--demonstrations",
        1,
        "-n",
        20,
        "-m",
        tiny,
        "--no-check",
        "--by",
        "increase",
    )
    for labels, words in (
        ((), "Label words: 'no', 'yes', the names of the classes."),
        (
            ("--labels", "foo,bar"),
            "Label words: 'bar', 'foo'. They change classes from prompt to prompt.",
        ),
        (
            ("--labels", "yes=foo,no=bar"),
            "Label words: 'bar' for class 'no', 'foo' for class 'yes'.",
        ),
    ):
        code, out, err = run(*options, *labels)
        assert code == 0, err
        assert out.splitlines()[0] == (
            f"{path}: 6 rows used, in 2 classes ('yes' 3, 'no' 3); 3 skipped (2 duplicate, 1 without text or label)."
        )
        drawn = "40 prompts are drawn from them, with 2 different queries."
        assert out.splitlines()[1:4] == [drawn, HALVES_SENTENCE, words]


def test_a_bundled_model_is_said_to_know_only_its_own_words():
    known = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :")
    assert unknown_words_warning("icl-mini", [known]) is None
    unknown = il.Prompt.parse("love : bar movie : foo one :")
    assert unknown_words_warning("gpt2", [unknown]) is None
    warning = unknown_words_warning("icl-mini", [known, unknown])
    assert "1 of the 8 different words of these prompts are others, such as 'movie'" in warning


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("semicolons.csv", lambda text: text.replace(",", ";").encode()),
        ("tabs.csv", lambda text: text.replace(",", "\t").encode()),
        ("windows.CSV", lambda text: text.replace("\n", "\r\n").encode("utf-8-sig")),
        ("old.csv", lambda text: text.replace("\n", "\r").encode()),
    ],
)
def test_files_as_spreadsheets_write_them_are_read_alike(name, spelled, tmp_path):
    rows = [
        (f"was it {'night' if number % 2 else 'day'} {number}", "ab"[number % 2])
        for number in range(16)
    ]
    plain = write(tmp_path / "plain.csv", rows)
    (tmp_path / name).write_bytes(spelled(plain.read_text()))
    assert il.load_task(str(tmp_path / name), n=8) == il.load_task(plain, n=8)


def test_a_file_that_is_named_without_path_need_not_have_a_known_ending(tmp_path):
    (tmp_path / "data.xlsx").write_text("PK")
    with pytest.raises(il.InputError, match=r"got '.*data.xlsx'; save a table as .csv"):
        il.load_task(str(tmp_path / "data.xlsx"))
    with pytest.raises(il.InputError, match=r"there is no file 'data\.xls'"):
        il.load_task("data.xls")


def test_wrong_columns_are_answered_with_those_of_the_file(tmp_path):
    rows = [
        (number, f"I was charged {number} times", "refund" if number % 2 else "praise")
        for number in range(12)
    ]
    path = write(tmp_path / "tickets.csv", rows, ("id", "message", "topic"))
    with pytest.raises(il.InputError) as error:
        il.load_task(path)
    assert (
        "pass columns=('message', 'topic') (--columns 'message,topic'), or, if outputs are"
        in str(error.value)
    )
    assert (
        "pass --columns 'message,topic', or, if outputs are words of their own, pass --pairs"
        in shell_spelling(str(error.value))
    )
    assert il.load_task(path, columns=("message", "topic"), n=1)[0].labels == ("praise", "refund")
    with pytest.raises(
        il.InputError, match=r"no column 'label', only .*; pass columns=\('text', 'kind'\)"
    ):
        il.load_task(write(tmp_path / "kinds.csv", [("a", "b"), ("c", "d")], ("text", "kind")))


def test_pairs_that_are_read_as_classes_are_recognized(tmp_path):
    capitals = [(f"Capital of country {number}?", f"Town{number}") for number in range(20)]
    path = write(tmp_path / "capitals.csv", capitals)
    with pytest.raises(
        il.InputError,
        match=r"most of the 20 labels have a single text, .* read pairs with pairs=True \(--pairs\)",
    ):
        il.load_task(path)
    assert "which --pairs reads" in str(il.TextTask("capitals", path).row_counts())
    assert il.load_task(path, columns=("text", "label"), pairs=True, n=1)[0].has_own_answer
    few = write(tmp_path / "few.csv", SENTENCES[:4])
    with pytest.raises(il.InputError, match="add rows, or use a larger max_words"):
        il.load_task(few, demonstrations=9)


def test_a_label_for_each_of_three_classes_is_answered_with_both_ways(tmp_path):
    rows = [(f"text {number}", ("ham", "spam", "eggs")[number % 3]) for number in range(36)]
    path = write(tmp_path / "mail.csv", rows)
    with pytest.raises(il.InputError) as error:
        il.load_task(path, labels=("A", "B", "C"))
    assert (
        "shows 2 of the 3 classes, got 'A', 'B', 'C'; to show all classes, pass classes='all'"
        in str(error.value)
    )
    assert "--labels 'eggs=A,ham=B,spam=C'" in shell_spelling(str(error.value))
    assert il.load_task(path, labels=("A", "B", "C"), classes="all", n=1)[0].labels == (
        "A",
        "B",
        "C",
    )
    assert (
        len(il.load_task(path, labels={"eggs": "A", "ham": "B", "spam": "C"}, n=1)[0].labels) == 2
    )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "sentiment-number",
            {"classes": "all"},
            "classes must be 'binary' for the task 'sentiment-number'",
        ),
        (
            "antonyms",
            {"classes": "all"},
            "classes must be 'binary' for the task 'antonyms' of pairs",
        ),
        (
            "sentiment-number",
            {"pairs": True},
            "pairs must be False for the task 'sentiment-number', which has classes",
        ),
    ],
)
def test_settings_of_other_tasks_are_refused(name, settings, words):
    with pytest.raises(il.InputError, match=words):
        il.load_task(name, n=1, **settings)


def test_rows_with_an_empty_cell_are_warned_of(tmp_path):
    rows = [*SENTENCES, ("", "foo"), ("a text", "")]
    with pytest.warns(
        UserWarning, match=r"rows.csv: rows with an empty cell are skipped: 16 rows used.*2 skipped"
    ):
        il.load_task(write(tmp_path / "rows.csv", rows), n=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        il.load_task(write(tmp_path / "whole.csv", [*SENTENCES, SENTENCES[0]]), n=1)


def test_too_few_prompts_for_two_lists_are_warned_of():
    prompts = il.load_task("sentiment-number", n=30)
    with pytest.warns(
        UserWarning, match=r"the lists have \d+ and \d+ prompts instead of 20: 30 prompts with"
    ):
        il.split_by_query(prompts, 20)
    first, second, third = il.load_task("sentiment-number", n=3)
    with pytest.warns(
        UserWarning, match="30 prompts with 3 queries are too few; draw more than 30,"
    ) as caught:
        il.split_by_query([first, second, third, third] + [first, second] * 13, 10)
    assert "draw at least" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        il.split_by_query(il.load_task("sentiment-number", n=60), 20)


def test_prompts_whose_queries_all_differ_fill_both_lists(tmp_path):
    """Lists are as long as asked for, with every label equally often."""
    rows = [(f"good news number {number}", "praise") for number in range(90)]
    rows += [(f"bad news number {number}", "blame") for number in range(90)]
    task = write(tmp_path / "news.csv", rows)
    prompts = il.load_task(task, n=60, labels=("foo", "bar"), layout="random")
    assert len({prompt.query for prompt in prompts}) == len(prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halves = il.split_by_query(prompts, 20)
    for half in halves:
        assert Counter(prompt.answer for prompt in half) == {"foo": 10, "bar": 10}
    assert not {prompt.query for prompt in halves[0]} & {prompt.query for prompt in halves[1]}


def test_a_label_with_the_space_of_the_template_is_refused(icl_mini):
    demonstrations = [("love", " foo"), ("two", " bar")]
    with pytest.raises(
        il.InputError, match=r"label ' bar' begins with a space, which the template .* write 'bar'"
    ):
        il.tokenize(icl_mini, il.Prompt(demonstrations, "one"))
    spaced = il.tokenize(
        icl_mini, il.Prompt(demonstrations, "one"), template=il.Template("{text} :{label}")
    )
    assert spaced.texts[0] == "love : foo two : bar one :"
    with pytest.raises(il.InputError, match="label ' baz' begins with a space"):
        il.tokenize(icl_mini, "love : foo two : bar one :", labels=["foo", "bar", " baz"])
    with pytest.raises(il.InputError, match="label ' bar' begins with a space"):
        il.tokenize(icl_mini, il.load_task("sentiment-number", n=1, labels=["foo", " bar"]))


def test_a_file_in_place_of_a_prompt_is_answered_with_the_option(tmp_path):
    path = str(write(tmp_path / "messages.csv", SENTENCES))
    with pytest.raises(
        il.InputError, match=f"is a file of data.*write icl-lens locate --path {path}"
    ):
        check_no_data(["locate", path])
    check_no_data(["locate", "--path", path])
    check_no_data(["explain", "no-such-file.csv"])


def test_a_task_in_place_of_a_prompt_is_answered_with_the_option():
    for name in ("sentiment-number", "antonyms", "sst2"):
        with pytest.raises(il.InputError, match=f"write icl-lens explain -t {name}"):
            check_no_data(["explain", name])
    check_no_data(["explain", "-t", "sentiment-number"])
    check_no_data(["models", "show", "no-task"])


def test_check_prints_the_rows_and_has_no_option_to_omit_itself(capsys):
    assert "--no-check" not in CliRunner().invoke(app, ["check", "--help"]).stdout
    assert CliRunner().invoke(app, ["check", "--no-check"]).exit_code == 2
    for is_asked_for, words in ((True, "Checking what"), (False, "First checking what")):
        times = iter([0.0, 20.0])
        report = with_duration(
            lambda *_: None, is_asked_for=is_asked_for, clock=lambda times=times: next(times)
        )
        report("check", 1, 4)
        messages = capsys.readouterr().err
        assert words in messages
        assert ("--no-check" in messages) != is_asked_for


def test_heads_are_read_from_the_table_of_locate(tmp_path):
    table = tmp_path / "heads.csv"
    table.write_text("rank,name,value\n1,L3H1,0.5\n2,L0H2,0.4\n")
    assert head_names(str(table)) == head_names("L3H1, L0H2 L3H1") == ["L3H1", "L0H2"]
    table.write_text("head,value\n1,0.5\n")
    with pytest.raises(il.InputError, match="must have the column 'name' with heads such as L1H2"):
        head_names(str(table))
    with pytest.raises(il.InputError, match="there is no file"):
        head_names(str(tmp_path / "missing.csv"))


def test_the_query_is_the_text_of_the_row_that_is_asked_for(tmp_path):
    task = il.TextTask("places", write(tmp_path / "places.csv", [*SENTENCES, ("", "foo")]))
    for row, (text, label) in enumerate(SENTENCES, 1):
        prompt = task.prompt_of_row(row)
        assert (prompt.query, prompt.answer, prompt.separator) == (text, label, "\n")
        assert text not in [demonstration.text for demonstration in prompt.demonstrations]
        assert label in [demonstration.label for demonstration in prompt.demonstrations]
    for row in (17, 18):
        with pytest.raises(il.InputError, match=f"row {row} of .* must have a text and a label"):
            task.prompt_of_row(row)
    with pytest.raises(il.InputError, match="row requires a single file of your own texts"):
        il.TextTask("sst2").prompt_of_row(1)
