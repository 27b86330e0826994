"""Examples' outputs, refreshed: changed ones are rewritten, comparisons that become false reported; README numbers."""

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
        >>> for i in range(2):
        ...     print(i + size)
        3
        4
        >>> size, size > 2
        (3, True)
    """
'''


def test_outputs_are_written_in_place():
    assert examples.refreshed(SOURCE, {"size": 3}) == (SOURCE, [])
    text, faults = examples.refreshed(SOURCE, {"size": 5})
    assert faults == []
    lines = ("\n3\n", "\n5\n"), ("        3\n        4\n", "        5\n        6\n"), ("(3, True)", "(5, True)")
    expected = SOURCE
    for old, new in lines:
        expected = expected.replace(old, new)
    assert text == expected
    assert examples.refreshed(text, {"size": 5}) == (text, [])


def test_what_denies_itself_or_raises_is_told_and_left():
    text, faults = examples.refreshed(SOURCE, {"size": 1}, "thing.py")
    assert "(3, True)" in text
    assert faults == ["thing.py: size, size > 2 gives (1, False), not (3, True)"]
    text, faults = examples.refreshed(SOURCE, {})
    assert text == SOURCE
    assert all("raises name 'size' is not defined" in fault for fault in faults)
    assert len(faults) == 3


def test_the_readme_quotes_the_table_of_tasks():
    rows = map(json.loads, (examples.ROOT / "experiments" / "task_table.jsonl").read_text().splitlines())
    accuracy = {
        (row["demonstrations"], row["layout"]): round(100 * row["accuracy"])
        for row in rows
        if (row["model"], row["task"], row["template"]) == ("smollm2-135m", "animal-country, foo/bar", "lines")
    }
    text = examples.README.read_text(encoding="utf-8").partition("Does the model learn")[2]
    quoted = [int(number) for number in re.findall(r"(\d+)%", text.partition("The command above")[0])]
    places = ((4, "order"), (4, "reorder"), (4, "random"), (1, "random"), (16, "random"))
    assert quoted == [accuracy[place] for place in places]
