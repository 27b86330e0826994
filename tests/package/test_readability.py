"""Readability of the code: names that say what a value is, few nested comprehensions, short
functions and lines.

The limits of a folder are at most its figures on the day they were last lowered: they may fall,
never rise.
"""

import ast
import inspect
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

import icl_lens as il

ROOT = Path(__file__).parents[2]

WIDTH = 100
MAX_BRANCHES = 15

NAMES_WITHOUT_CONTENT = set(
    "one found own some each rest given shown every both other others of said like chosen kept".split()
)
"""They say that a value was found or given, not what it is."""

COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
BRANCHES = (
    *(ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp),
    *(ast.BoolOp, ast.comprehension, ast.Assert, ast.With),
)


class Figures(NamedTuple):
    """How densely the code of a folder is packed."""

    names_without_content: float
    """Functions that use such a name, in percent."""
    nested_comprehensions: float
    """Comprehensions with two loops, or within another, in 1,000 lines."""
    wide_lines: float
    """Lines over `WIDTH` columns, in percent."""
    long_functions: int
    """Functions with more than `MAX_BRANCHES` branches."""


READABLE = Figures(
    names_without_content=1.5, nested_comprehensions=1.3, wide_lines=1, long_functions=0
)

# `tests` are its files without those of `tests/support`, `icl_lens` its modules at the top.
LIMITS = {
    "icl_lens": Figures(1.5, 0, 1.2, 0),
    "icl_lens/analyses": READABLE,
    "icl_lens/analyses/atlas": READABLE,
    "icl_lens/reading": READABLE,
    "icl_lens/cli": READABLE,
    "icl_lens/foundation": READABLE,
    "icl_lens/edits": READABLE,
    "icl_lens/measures": READABLE,
    "icl_lens/models": READABLE,
    "icl_lens/prompts": READABLE,
    "icl_lens/report": READABLE,
    "icl_lens/result": READABLE,
    "icl_lens/runs": READABLE,
    "experiments": Figures(2, 1.3, 1, 0),
    "tests": Figures(1.4, 1.4, 0.3, 0),
    "tests/support": Figures(0.4, 2.6, 0.8, 0),
}


class Contents(NamedTuple):
    """What a piece of code contains."""

    names: set[str]
    """Names of variables and arguments."""
    n_branches: int
    n_loops: int
    """Loops of comprehensions."""


class Code:
    """The functions and comprehensions of Python files, which are counted in one pass."""

    def __init__(self, texts: list[str]) -> None:
        self.functions: list[Contents] = []
        self.comprehensions: list[Contents] = []
        for text in texts:
            self.read(ast.parse(text))

    def read(self, node: ast.AST) -> Contents:
        """Return what a node contains, and note the functions and comprehensions among it."""
        names = set()
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        n_branches = int(isinstance(node, BRANCHES))
        n_loops = int(isinstance(node, ast.comprehension))
        for child in ast.iter_child_nodes(node):
            contents = self.read(child)
            names |= contents.names
            n_branches += contents.n_branches
            n_loops += contents.n_loops
        contents = Contents(names, n_branches, n_loops)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append(contents)
        elif isinstance(node, COMPREHENSIONS):
            self.comprehensions.append(contents)
        return contents


def figures_of(texts: list[str]) -> Figures:
    """Return the figures of Python files."""
    lines = [line for line in "\n".join(texts).splitlines() if line.strip()]
    n_wide = sum(len(line) > WIDTH for line in lines)
    code = Code(texts)
    without_content = [
        function for function in code.functions if function.names & NAMES_WITHOUT_CONTENT
    ]
    nested = [comprehension for comprehension in code.comprehensions if comprehension.n_loops > 1]
    return Figures(
        names_without_content=100 * len(without_content) / max(len(code.functions), 1),
        nested_comprehensions=1000 * len(nested) / max(len(lines), 1),
        wide_lines=100 * n_wide / max(len(lines), 1),
        long_functions=sum(1 + function.n_branches > MAX_BRANCHES for function in code.functions),
    )


def texts_in(folder: str) -> list[str]:
    """Return the Python files of a folder, without those of folders that have limits of their
    own.
    """
    texts = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        folders = [
            str(parent.relative_to(ROOT)) for parent in path.parents if parent.is_relative_to(ROOT)
        ]
        with_limits = [parent for parent in folders if parent in LIMITS]
        if with_limits[0] == folder:
            texts.append(path.read_text(encoding="utf-8"))
    return texts


@pytest.mark.parametrize("folder", LIMITS)
def test_code_is_at_most_as_dense_as_it_was(folder: str) -> None:
    figures = figures_of(texts_in(folder))
    for name, value, limit in zip(Figures._fields, figures, LIMITS[folder], strict=True):
        assert value <= limit, f"{folder}: {name} are {value:.1f}, more than {limit}"


def test_each_figure_counts_what_it_is_named_after() -> None:
    clear = "def total(prices):\n    return sum(price for price in prices)\n"
    assert figures_of([clear]) == Figures(0, 0, 0, 0)
    assert figures_of([clear.replace("prices", "given")]) == Figures(100, 0, 0, 0)
    assert (
        figures_of(
            [clear.replace("price for", "[cent for cent in price] for")]
        ).nested_comprehensions
        == 500
    )
    assert (
        figures_of(
            [clear.replace("in prices", "in prices for cent in price")]
        ).nested_comprehensions
        == 500
    )
    assert figures_of([clear + "#" * 101 + "\n"]).wide_lines == pytest.approx(100 / 3)
    assert figures_of([clear + "    if prices:\n        pass\n" * MAX_BRANCHES]).long_functions == 1
    assert (
        figures_of([clear + "    if prices:\n        pass\n" * (MAX_BRANCHES - 2)]).long_functions
        == 0
    )


PUBLIC_ATTRIBUTES = {il.PromptBatch: 36, il.Activations: 32}
"""The most fields and members, of both together, that a class has; it may fall, never rise."""


def public_attributes(kind: type) -> set[str]:
    """Return the names of the fields, properties and methods that a class defines."""
    names = {*inspect.get_annotations(kind), *vars(kind)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("kind", PUBLIC_ATTRIBUTES)
def test_classes_have_at_most_as_many_public_attributes_as_they_had(kind: type) -> None:
    assert len(public_attributes(kind)) <= PUBLIC_ATTRIBUTES[kind]


def test_fields_and_members_are_counted_once() -> None:
    class Basket:
        apples: int
        pears: int = 0
        _owner: str = ""

        @property
        def weight(self) -> float:
            return 0.2 * self.apples

        @classmethod
        def empty(cls) -> "Basket":
            return cls()

    assert public_attributes(Basket) == {"apples", "pears", "weight", "empty"}


DEFINED_TWICE = {
    # Commands list the choices of the library, which they import only when they run.
    *("FinalNorm", "Layout", "Positions"),
    # What is exchanged or split: the two sides of a score, and the value beside them.
    "Side",
    # A component by its name, and one with what it writes.
    "Writer",
}


def names_of_types(text: str) -> list[str]:
    """Return the names of public classes and type aliases that a module defines at its top."""
    names = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.append(node.targets[0].id)
    return [name for name in names if name[0].isupper() and not name.isupper()]


def test_each_type_has_a_name_of_its_own() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "icl_lens").rglob("*.py")]
    counts = Counter(chain.from_iterable(map(names_of_types, texts)))
    assert {name for name, count in counts.items() if count > 1} == DEFINED_TWICE
    twice = "Kind = str\nclass Kind: pass\nclass _Stop: pass\nLIMIT = 3\n"
    assert names_of_types(twice) == ["Kind", "Kind"]
