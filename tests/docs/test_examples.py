"""Examples' outputs, refreshed: changed ones are rewritten, comparisons that become false reported;
README numbers.
"""

import examples  # pyright: ignore[reportMissingImports]
import pytest

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
    lines = (
        ("\n3\n", "\n5\n"),
        ("        3\n        4\n", "        5\n        6\n"),
        ("(3, True)", "(5, True)"),
    )
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


README = """# Title

```bash
icl-lens locate -t animal-country \\
    --separator '\\n' -n 4
```

```text
old first line
old second line
```

```bash
icl-lens explain
```
"""


def test_the_readmes_outputs_are_the_beginnings_of_what_its_commands_print():
    commands = []

    def run(words):
        commands.append(words)
        return "\nfirst  \nsecond\nthird\n"

    text = examples.readme_with_outputs(README, run)
    assert commands == [["locate", "-t", "animal-country", "--separator", "\\n", "-n", "4"]]
    assert text == README.replace("old first line", "first").replace("old second line", "second")


def test_a_readme_without_outputs_is_an_error():
    with pytest.raises(SystemExit, match="output below it"):
        examples.readme_with_outputs("# Title", lambda words: "")
