"""Wrong data, word lists, manifests and chunks: refused in one sentence or read as written, never
guessed.
"""

import contextlib
import io
import itertools
import json

import faults
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompt_parts import demonstrated_texts

import icl_lens as il
from icl_lens.prompts.datasets import read_files
from icl_lens.prompts.tasks import load_task, named_task
from icl_lens.runs.folder import CorruptChunk, RunFolder

ROWS = [(f"{kind} text {i}", kind) for kind, i in itertools.product("ab", range(8))]
GOOD = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
CSV = "text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS)
DEEP = "[" * 100_000 + "]" * 100_000


def lines(*labels, text="text"):
    """Eight rows of each label."""
    rows = [
        {"text": f"{text} {i} of {label!r}", "label": label}
        for label, i in itertools.product(labels, range(8))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def labels_as_parquet(column):
    """Sixteen rows with these labels, as bytes of a file."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(16)], "label": column}), sink)
    return sink.getvalue()


BAD_FILES = [
    (".jsonl", GOOD + "null\n", "line 17 is not a JSON object"),
    (".jsonl", DEEP, "as .jsonl"),
    (
        ".jsonl",
        GOOD + '{"text": "x", "label": "a", "label": "b"}\n',
        "the key 'label' occurs twice in one object",
    ),
    (".jsonl", "\n\n", "got 0 queries"),
    (".jsonl", b'{"text": "\xff", "label": "a"}', "save it as UTF-8"),
    (".jsonl", GOOD + '{"text": "x"}\n', "row 17 has no column 'label'"),
    (".jsonl", GOOD + '{"text": ["x"], "label": "a"}\n', "row 17 has a list in column 'text'"),
    (
        ".jsonl",
        GOOD + '{"text": "x", "label": {"a": 1}}\n',
        "row 17 has an object in column 'label'",
    ),
    (".jsonl", GOOD + '{"text": NaN, "label": "a"}\n', "row 17 has nan in column 'text'"),
    (
        ".jsonl",
        GOOD + '{"text": "x \\ud800", "label": "a"}\n',
        "row 17 has an unpaired surrogate '\\ud800'",
    ),
    (
        ".jsonl",
        lines(1, 2) + lines("1", text="other"),
        "is a number in some rows and the string '1' in others",
    ),
    (".jsonl", lines("a"), "at least two classes, got only 'a'"),
    (
        ".csv",
        "the play was bad,sad\nthe song was good,glad\n",
        "seems to be a row, not the names of columns; add a line such as text,label",
    ),
    (".csv", "", "as .csv"),
    (".csv", "text,text,label\nx,y,a\n", "different names"),
    (".csv", CSV + "x,y,z\n", "line 18 has 3 cells and the header 2"),
    (".csv", CSV + '"x,a\n', "as .csv"),
    (".csv", b"text,label\n\xff,a\n", "save it as UTF-8"),
    (".csv", CSV.replace(",", ";") + "x;y;z\n", "quote cells that contain semicolons"),
    (".parquet", "PAR1", "as .parquet"),
    (".parquet", labels_as_parquet(pa.array([b"a", b"b"] * 8)), "has bytes in column 'label'"),
    (".parquet", labels_as_parquet(pa.array([float("nan"), 1.0] * 8)), "has nan in column 'label'"),
    (".parquet", labels_as_parquet(pa.array([None] * 16, pa.string())), "got 0 queries"),
    (".txt", "x", "of type '.jsonl'"),
    (".xlsx", "PK", "save a table as .csv"),
    (".json", DEEP, "is not a word list"),
    (
        ".json",
        '{"categories": {"mine": ["a"], "yours": ["b"], "mine": ["c"]}}',
        "the key 'mine' occurs twice",
    ),
    (".json", '{"categories": null}', "categories must be an object"),
    (".json", '{"categories": {"mine": "abc"}}', "'mine' must be a list"),
    (".json", '{"categories": {"mine": ["a\\ud800"]}}', "must contain words"),
    (".json", '{"categories": {"mine": ["a", "b"], "yours": ["a", "b"]}}', "got 0;"),
]


@pytest.mark.parametrize(("suffix", "content", "words"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_are_refused(tmp_path, suffix, content, words):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    faults.assert_refused(
        words, load_task, "mine-yours" if suffix == ".json" else "mine", path=path, n=2
    )


@pytest.mark.parametrize(
    "kinds",
    [("None", "NA"), ("null", "nan"), ("01", "1"), ("0", "00"), ("True", "true"), ("", "x")],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_classes_are_read_as_written(tmp_path, kinds, suffix):
    """Nothing that looks like a missing value, or like the same number, is dropped or merged; only
    "" is missing.
    """
    rows = [(f"{i}000", kind) for i, kind in enumerate(kinds * 8)]
    written = [json.dumps({"text": text, "label": kind}) for text, kind in rows]
    path = tmp_path / f"data{suffix}"
    path.write_text(
        "\n".join(["text,label", *map(",".join, rows)] if suffix == ".csv" else written)
    )
    assert [(row["text"], row["label"] or "") for row in read_files([path]).rows] == rows
    if "" not in kinds:
        prompts = load_task("mine", path=path, n=8, labels=("foo", "bar"))
        texts = demonstrated_texts(prompts) | {prompt.query for prompt in prompts}
        assert texts <= {text for text, _ in rows}


def test_the_digest_follows_the_content(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD)
    before = named_task("mine", path).digest()
    assert named_task("mine", path).digest() == before
    path.write_text(GOOD.replace("a text 3", "another text"))
    assert named_task("mine", path).digest() != before


@pytest.mark.parametrize("text", ["", "[]", DEEP, b"\xff\xfe"], ids=range(4))
def test_bad_manifests_are_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    faults.assert_refused("choose another folder", RunFolder(tmp_path, {"a": 1}).initialize)


def chunk(folder):
    run = RunFolder(folder, {"a": 1, "b": "x"})
    run.write(
        "part-00000.parquet", pa.table({"prompt": [0, 0, 1, 1], "increase": [0.5, -1.0, 2.0, 3.0]})
    )
    return run, folder / "part-00000.parquet"


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_never_changes_numbers_unnoticed(tmp_path, place, flip):
    """Before the footer, it raises CorruptChunk or changes no number; nowhere does it raise another
    error.
    """
    run, path = chunk(tmp_path)
    whole = run.read(path.name)
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= flip
    path.write_bytes(data)
    footer = len(data) - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    with contextlib.suppress(CorruptChunk):
        assert run.read(path.name).equals(whole) or at >= footer


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=300), cut=st.floats(0, 1))
def test_chunks_with_other_bytes_are_corrupt(tmp_path, data, cut):
    run, path = chunk(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))] + data)
    if path.read_bytes() != whole:
        with pytest.raises(CorruptChunk):
            run.read(path.name)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=200), suffix=st.sampled_from([".jsonl", ".csv", ".parquet", ".json"])
)
def test_files_of_random_bytes_are_refused_in_one_line(tmp_path, content, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    with pytest.raises(il.InputError) as caught:
        load_task("mine-yours", path=path, n=2)
    assert "\n" not in str(caught.value)
