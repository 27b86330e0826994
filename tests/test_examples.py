"""Examples' outputs and the README's tables, made anew: what changed is written, what denies itself is told."""

import json
import re

import examples  # pyright: ignore[reportMissingImports]

SOURCE = '''"""Module.

>>> size
3
"""


class Thing:
    """A thing.

    Example:
        >>> print("a", size)
        a 3
        >>> for i in range(2):
        ...     print(i + size)
        3
        4
        >>> "still"
        'still'
    """

    def method(self):
        """Has one too.

        >>> size, size > 2
        (3, True)
        """
'''


def test_outputs_are_written_in_place():
    assert examples.refreshed(SOURCE, {"size": 3}) == (SOURCE, [])
    text, faults = examples.refreshed(SOURCE, {"size": 5})
    assert faults == []
    assert text == SOURCE.replace("\n3\n", "\n5\n").replace("a 3", "a 5").replace(
        "        3\n        4\n", "        5\n        6\n"
    ).replace("(3, True)", "(5, True)")
    assert examples.refreshed(text, {"size": 5}) == (text, [])


def test_what_denies_itself_or_raises_is_told_and_left():
    text, faults = examples.refreshed(SOURCE, {"size": 1}, "thing.py")
    assert "(3, True)" in text
    assert faults == ["thing.py: size, size > 2 gives (1, False), not (3, True)"]
    text, faults = examples.refreshed(SOURCE, {})
    assert text == SOURCE
    assert all("raises name 'size' is not defined" in fault for fault in faults)
    assert len(faults) == 4


EXPLAINED = """Answer
 head    increase   contrast   → foo@11
 ─────────────────────────────────────
 L5H3     +0.9       +0.8         0.50   
 L4H2     +0.7       +0.6         0.51
 L0H0     +0.1       +0.0         0.00

 label   no ablation   located heads zeroed
 ──────────────────────────────────────────
 bar           11.5%                   2.8%
 foo           52.4%                  32.1%
"""
LOCATED = """ rank   head   mean contrast (nats)
 ──────────────────────────────────
    1   L5H3                 0.9000
    2   L4H2                 0.7000
    3   L0H0                 0.1000
"""
WORDS = """ head   part    position   token   top words
 ───────────────────────────────────────────
 L5H3   value          3   bar     bar, baz"""


def test_the_readmes_tables_and_what_names_their_heads():
    text = examples.readme_with(examples.README.read_text(encoding="utf-8"), EXPLAINED, LOCATED, WORDS)
    assert "L5H3` is head 3 of layer 5" in text
    assert "four heads such as L5H3\n" in text
    assert " L5H3     +0.9       +0.8         0.50\n L4H2" in text
    assert "0.7000\n```" in text
    assert "32.1%\n```" in text
    assert "bar, baz\n```" in text
    assert examples.readme_with(text, EXPLAINED, LOCATED, WORDS) == text


def test_the_readme_quotes_the_table_of_tasks():
    rows = map(json.loads, (examples.ROOT / "experiments" / "task_table.jsonl").read_text().splitlines())
    accuracy = {
        (row["demonstrations"], row["layout"]): round(100 * row["accuracy"])
        for row in rows
        if (row["task"], row["template"]) == ("animal-country, foo/bar", "lines")
    }
    text = examples.README.read_text(encoding="utf-8").partition("Does the model learn")[2]
    quoted = [int(number) for number in re.findall(r"(\d+) %", text.partition("The command above")[0])]
    places = ((4, "order"), (4, "reorder"), (4, "random"), (1, "random"), (16, "random"))
    assert quoted == [accuracy[place] for place in places]
