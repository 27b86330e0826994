"""Data, word lists, manifests, results and chunks that are wrong: one sentence, or read as written; never a guess."""

import contextlib
import json

import faults
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import icl_lens as il
from icl_lens.locate.run_folder import CorruptChunk, RunFolder
from icl_lens.prompts.datasets import read_files
from icl_lens.prompts.tasks import load_task, named_task

GOOD = "".join(json.dumps({"text": f"{kind} text {i}", "label": kind}) + "\n" for kind in "ab" for i in range(8))
CSV = "text,label\n" + "".join(f"{kind} text {i},{kind}\n" for kind in "ab" for i in range(8))
DEEP = "[" * 100_000 + "]" * 100_000


def lines(*labels, text="text"):
    """Eight rows of each label."""
    rows = [{"text": f"{text} {i} of {label!r}", "label": label} for label in labels for i in range(8)]
    return "".join(json.dumps(row) + "\n" for row in rows)


BAD_FILES = [
    (".jsonl", "null\nnull\n", "line 1 is not a JSON object"),
    (".jsonl", GOOD + "null\n", "line 17 is not a JSON object"),
    (".jsonl", "1\n", "is not a JSON object"),
    (".jsonl", '"x"\n', "is not a JSON object"),
    (".jsonl", "[]\n[]\n", "is not a JSON object"),
    (".jsonl", "{}\n", "has no column"),
    (".jsonl", "{", "line 1 is not valid JSON"),
    (".jsonl", GOOD + "{\n", "line 17 is not valid JSON"),
    (".jsonl", DEEP, "as .jsonl"),
    (".jsonl", '{"text": ' + DEEP + ', "label": "a"}', "as .jsonl"),
    (".jsonl", "", "got 0 queries"),
    (".jsonl", "\n\n", "got 0 queries"),
    (".jsonl", b"\xff\xfe\x00", "as .jsonl"),
    (".jsonl", b'{"text": "\xff", "label": "a"}', "as .jsonl"),
    (".jsonl", '{"text": "x"}\n', "no column 'label'"),
    (".jsonl", GOOD + '{"text": "x"}\n', "row 17 has no column 'label'"),
    (".jsonl", GOOD + '{"text": ["x"], "label": "a"}\n', "row 17 has a list in column 'text'"),
    (".jsonl", GOOD + '{"text": "x", "label": ["a"]}\n', "row 17 has a list in column 'label'"),
    (".jsonl", GOOD + '{"text": "x", "label": {"a": 1}}\n', "row 17 has an object in column 'label'"),
    (".jsonl", GOOD + '{"text": {"a": 1}, "label": "a"}\n', "row 17 has an object in column 'text'"),
    (".jsonl", GOOD + '{"text": NaN, "label": "a"}\n', "row 17 has nan in column 'text'"),
    (".jsonl", GOOD + '{"text": "x", "label": NaN}\n', "row 17 has nan in column 'label'"),
    (".jsonl", GOOD + '{"text": "x", "label": Infinity}\n', "row 17 has inf in column 'label'"),
    (".jsonl", GOOD + '{"text": "x", "label": -Infinity}\n', "row 17 has -inf"),
    (".jsonl", GOOD + '{"text": "x \\ud800", "label": "a"}\n', "row 17 has an unpaired surrogate '\\ud800'"),
    (".jsonl", GOOD + '{"text": "x", "label": "\\udcff"}\n', "in column 'label'; re-encode"),
    (".json", '{"categories": {"mine": ["a\\ud800"]}}', "must contain words"),
    (".jsonl", lines(1, 2) + lines("1", text="other"), "is a number in some rows and the string '1' in others"),
    (".jsonl", lines("1", "2") + lines(1, text="other"), "is a number in some rows"),
    (".jsonl", lines("a"), "two classes with"),
    (".jsonl", lines(None), "got 0 queries"),
    (".jsonl", lines("", "a"), "two classes with"),
    (".csv", "", "as .csv"),
    (".csv", "text\n", "got 0 queries"),
    (".csv", "text,label\n", "got 0 queries"),
    (".csv", "text,text,label\nx,y,a\n", "different names"),
    (".csv", CSV + "x,y,z\n", "line 18 has 3 cells and the header 2"),
    (".csv", CSV + "x\n", "line 18 has 1 cells"),
    (".csv", CSV + '"x,a\n', "as .csv"),
    (".csv", "txt,label\nx,a\n", "no column 'text'"),
    (".csv", b"text,label\n\xff,a\n", "as .csv"),
    (".csv", "text;label\nx;a\n", "no column 'text', 'label', only 'text;label'"),
    (".parquet", "", "as .parquet"),
    (".parquet", "PAR1", "as .parquet"),
    (".parquet", b"PAR1" + b"\xff" * 100 + b"PAR1", "as .parquet"),
    (".txt", "x", "of type '.jsonl'"),
    ("", "x", "of type '.jsonl'"),
    (".json", "", "is not a word list"),
    (".json", "null", "is not a word list"),
    (".json", "[]", "is not a word list"),
    (".json", "3", "is not a word list"),
    (".json", DEEP, "is not a word list"),
    (".json", b"\xff\xfe", "is not a word list"),
    (".json", "{}", "is not a word list"),
    (".json", '{"categories": null}', "categories must be an object"),
    (".json", '{"categories": []}', "categories must be an object"),
    (".json", '{"categories": "x"}', "categories must be an object"),
    (".json", '{"categories": {"mine": null}}', "'mine' must be a list"),
    (".json", '{"categories": {"mine": "abc"}}', "'mine' must be a list"),
    (".json", '{"categories": {"mine": {"a": 1}}}', "'mine' must be a list"),
    (".json", '{"categories": {"mine": [1, 2]}}', "must contain words, got 1"),
    (".json", '{"categories": {"mine": [null]}}', "must contain words, got None"),
    (".json", '{"categories": {"mine": [["a"]]}}', "must contain words"),
    (".json", '{"categories": {"mine": [""]}}', "must contain words, got ''"),
    (".json", '{"categories": {"mine": [" "]}}', "must contain words"),
    (".json", '{"categories": {}}', "unknown task"),
    (".json", '{"categories": {"mine": [], "yours": []}}', "got 0;"),
    (".json", '{"categories": {"mine": ["a", "b"], "yours": ["a", "b"]}}', "got 0;"),
    (".json", '{"categories": {"mine": ["a", "b"], "yours": ["c", "c", "c", "c"]}}', "got 1;"),
]


@pytest.mark.parametrize(("suffix", "content", "words"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files(tmp_path, suffix, content, words):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(il.InputError) as caught:
        load_task("mine-yours" if suffix == ".json" else "mine", path=path, n=2)
    faults.assert_sentence(str(caught.value), words)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([b"a", b"b"] * 8), "has bytes in column 'label'"),
        (pa.array([["a"], ["b"]] * 8), "has a list"),
        (pa.array([float("nan"), 1.0] * 8), "has nan in column 'label'"),
        (pa.array([{"x": 1}] * 16), "has an object"),
        (pa.array([None] * 16, pa.string()), "got 0 queries"),
    ],
)
def test_bad_columns_of_parquet(tmp_path, column, words):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(16)], "label": column}), path)
    with pytest.raises(il.InputError) as caught:
        load_task("mine", path=path, n=2)
    faults.assert_sentence(str(caught.value), words)


@pytest.mark.parametrize(
    "kinds", [("None", "NA"), ("null", "nan"), ("01", "1"), ("0", "00"), ("True", "true"), ("", "x")]
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_classes_are_read_as_written(tmp_path, kinds, suffix):
    """Nothing that looks like a missing value, or like the same number, is dropped or merged; only "" is missing."""
    rows = [(f"{i}000", kind) for i, kind in enumerate(kinds * 8)]
    path = tmp_path / f"data{suffix}"
    if suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{text},{kind}\n" for text, kind in rows))
    else:
        path.write_text("".join(json.dumps({"text": text, "label": kind}) + "\n" for text, kind in rows))
    read = [(row["text"], row["label"] or "") for row in read_files([path]).rows]
    assert read == rows
    if "" in kinds:
        with pytest.raises(il.InputError, match="two classes with"):
            load_task("mine", path=path, n=2)
        return
    shown = load_task("mine", path=path, n=8, labels=("foo", "bar"))
    texts = {text for prompt in shown for text in (prompt.query, *(one.text for one in prompt.demonstrations))}
    assert texts <= {text for text, _ in rows}
    assert any(text.startswith("0") for text in texts)


def test_the_digest_follows_the_content(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD)
    before = named_task("mine", path).digest()
    assert named_task("mine", path).digest() == before
    path.write_text(GOOD.replace("a text 3", "another text"))
    assert named_task("mine", path).digest() != before


# What a run left behind


@pytest.mark.parametrize("text", ["", "null", "[]", "3", DEEP, '"x"', b"\xff\xfe"], ids=range(7))
def test_bad_manifests(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(il.InputError) as caught:
        RunFolder(tmp_path, {"a": 1}).initialize()
    faults.assert_sentence(str(caught.value), "choose another folder")


def chunk(folder):
    run = RunFolder(folder, {"a": 1, "b": "x"})
    run.write("part-00000.parquet", {"prompt": [0, 0, 1, 1], "increase": [0.5, -1.0, 2.0, 3.0]})
    return run, folder / "part-00000.parquet"


def test_a_chunk_is_the_same_bytes_every_time(tmp_path):
    _, path = chunk(tmp_path)
    first = path.read_bytes()
    run, path = chunk(tmp_path)
    assert path.read_bytes() == first
    assert run.read(path.name).column("increase").to_pylist() == [0.5, -1.0, 2.0, 3.0]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_is_damage(tmp_path, place, flip):
    """Of the pages, which hold the numbers; and nothing but damage is ever raised."""
    run, path = chunk(tmp_path)
    whole = run.read(path.name)
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= flip
    path.write_bytes(data)
    footer = len(data) - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    with contextlib.suppress(CorruptChunk):
        assert run.read(path.name).equals(whole) or at >= footer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), cut=st.floats(0, 1))
def test_any_bytes_are_damage(tmp_path, data, cut):
    run, path = chunk(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))] + data)
    if path.read_bytes() != whole:
        with pytest.raises(CorruptChunk):
            run.read(path.name)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), suffix=st.sampled_from([".jsonl", ".csv", ".parquet", ".json"]))
def test_any_file_is_read_or_refused(tmp_path, content, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    with pytest.raises(il.InputError) as caught:
        load_task("mine-yours", path=path, n=2)
    assert "\n" not in str(caught.value)
