"""Docs: public names are explained, with shapes and examples that run; links lead somewhere; prose
quotes no result.
"""

import dataclasses
import doctest
import inspect
import json
import re
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import families
import families_table
import pytest
from cases import slow_except
from torch import Tensor

import icl_lens as il
from icl_lens.analyses.explanation import reports
from icl_lens.analyses.explanation.tables import TableName

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.ipynb"))


def pinned(package: str) -> str:
    """Return the version of a package in constraints.txt."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return re.findall(rf"^{package}==(.*)$", constraints, flags=re.MULTILINE)[0]


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]
API = (DOCS / "api.md").read_text(encoding="utf-8")

# Public names that are not modules (modules such as `il.plots` have their own sections in the
# reference).
NAMES = [name for name in il.__all__ if not inspect.ismodule(getattr(il, name))]
NAMES += [f"results.{name}" for name in il.results.__all__]

# Axes in prose, such as [batch demo], where an annotation cannot hold them.
AXES = re.compile(r"\[[a-z_]+( [a-z_]+)*\]")


def cells(notebook: Path, kind: str) -> list[str]:
    """The source of a notebook's cells of one kind."""
    loaded = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in loaded if cell["cell_type"] == kind]


def annotations(public: Any) -> list[Any]:
    """Return the annotations of a function's parameters and return value, or of a class's
    fields.
    """
    if inspect.isclass(public):
        return list(inspect.get_annotations(public).values())
    signature = inspect.signature(public)
    return [
        *(parameter.annotation for parameter in signature.parameters.values()),
        signature.return_annotation,
    ]


def bare_tensor(annotation: Any) -> bool:
    """Whether a tensor without axes is somewhere in the annotation."""
    return annotation is Tensor or any(bare_tensor(part) for part in get_args(annotation))


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_explained(name: str) -> None:
    public = attrgetter(name)(il)
    doc = inspect.getdoc(public) or ""
    summary = " ".join(doc.partition("\n\n")[0].split())
    assert re.fullmatch(r"[A-Z`\[].{10,}[.:?!`]", summary), (
        f"{name} has no summary line: {summary!r}"
    )
    assert not summary.startswith(f"{name}("), f"{name} has no docstring of its own"
    assert "Example:\n    >>> " in doc, f"the docstring of {name} has no example"
    if any(map(bare_tensor, annotations(public))):
        assert AXES.search(doc), (
            f"{name} takes, holds or returns a tensor whose axes are nowhere said"
        )


@pytest.mark.parametrize("name", NAMES)
def test_public_names_are_in_the_reference(name: str) -> None:
    directive = rf"\.\. auto(function|class|exception):: (icl_lens\.)?(\w+\.)?{name}\n"
    assert re.search(directive, API), (
        f"docs/api.md has no entry for {name}; add one to the section it belongs to"
    )


LONG = {
    *("Run", "compare", "head_atlas", "locate_circuit", "task_check"),
    *("results.Circuit", "results.Comparison", "results.Explanation", "results.HeadAtlas"),
    *("results.LocatedHeads", "results.TaskCheck", "results.TwoTowers"),
}
"""Names whose examples take a second or more."""


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the setup code at the top of the reference; return its names, which examples use."""
    setup = re.search(r"```\{code-block\} python\n:name: setup\n\n(.*?)```", API, re.DOTALL)
    assert setup is not None
    namespace: dict[str, Any] = {}
    exec(setup.group(1), namespace)
    return namespace


def test_the_reference_has_every_class_of_an_explanations_sections() -> None:
    fields = dataclasses.fields(reports.ExplanationReports)
    texts = " ".join(str(field.type) for field in fields)
    classes = set(re.findall(r"\w+Report|Settings|LeftOut", texts))
    assert {"HeadReport", "DemonstrationsReport", "LeftOut"} <= classes
    for name in classes:
        assert f".. autoclass:: {name}\n" in API, f"add {name} to docs/api.md"


@pytest.mark.parametrize("name", slow_except(set(NAMES) - LONG, NAMES))
def test_examples_run(name: str, names: dict[str, Any]) -> None:
    public = attrgetter(name)(il)
    # Examples of a class's fields and methods are found as well.
    tests = doctest.DocTestFinder().find(public, name, module=False, globs=names)
    assert any(test.examples for test in tests)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    images = re.findall(r"```\{image\} (\S+)", page.read_text(encoding="utf-8"))
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *images]:
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), (
                f"{page.name} links to {target}, which is not there"
            )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "changelog" not in page.name], ids=lambda page: page.name
)
def test_python_in_pages_uses_names_that_exist(page: Path) -> None:
    for name in set(re.findall(r"\bil\.([A-Za-z_]\w*)", page.read_text(encoding="utf-8"))):
        assert hasattr(il, name), f"{page.name} speaks of il.{name}, which is not there"


def test_the_diagram_is_drawn_from_the_contracts() -> None:
    import architecture_diagram

    assert (
        architecture_diagram.PICTURE.read_text(encoding="utf-8") == architecture_diagram.drawing()
    ), "run python docs/architecture_diagram.py"
    assert architecture_diagram.circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [
        ["a", "b", "c"]
    ]


def test_every_table_of_an_explanation_is_named() -> None:
    """In the docstring of `to_frame`, and in the line of the guide that lists the tables."""
    guide = (DOCS / "guide.md").read_text(encoding="utf-8")
    (guide_line,) = re.findall(r"^explanation\.to_frame\(.*$", guide, flags=re.MULTILINE)
    docstring = inspect.getdoc(il.results.Explanation.to_frame) or ""
    for name in get_args(TableName):
        assert f'"{name}"' in docstring, f"add {name} to the docstring of Explanation.to_frame"
        assert f'"{name}"' in guide_line, f"add {name} to {guide_line!r} in docs/guide.md"


@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
def test_prose_of_tutorials_quotes_no_result(notebook: Path) -> None:
    """Results are printed by code. Only the paper's own numbers may be written, in a sentence that
    says so.
    """
    for cell in cells(notebook, "markdown"):
        for sentence in re.split(
            r"(?<=[.:?!])\s", re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", cell, flags=re.DOTALL)
        ):
            if re.search(r"\d+\.\d+(?!\d*\])|\d\s?%", sentence):
                assert "paper" in sentence or "arXiv" in sentence, (
                    f"{notebook.name}: a result in prose: {sentence!r}"
                )


@pytest.mark.parametrize("notebook", TUTORIALS, ids=lambda path: path.stem)
def test_stored_tutorials_ran_without_error(notebook: Path) -> None:
    """Outputs are stored, in order, from one run; nothing in them asks the network for anything."""
    code = [
        cell
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", (
                f"a warning in {notebook.name}: {''.join(output['text'])}"
            )
            html = "".join(output.get("data", {}).get("text/html", ""))
            assert not re.search(r"(src|href)=(&quot;|[\"'])https?://", html)


@pytest.mark.skipif(
    version("typer") != pinned("typer"), reason="other versions of typer write other pages"
)
def test_the_command_lines_page_is_current() -> None:
    import cli_page  # pyright: ignore[reportMissingImports]

    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page(), (
        "run `python docs/cli_page.py`"
    )


def test_the_readmes_links_hold_on_a_package_index() -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    import hatch_build

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.findall(r"\]\((?!https?://)[^)]*\)", readme)
    assert len(relative) > 10
    for source, expected_link in (
        (None, "(`docs/guide.md`)"),
        ("https://a.b/c/", "(https://a.b/c/blob/main/docs/guide.md)"),
    ):
        text = hatch_build.for_index(readme, source)
        assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
        assert expected_link in text
        assert text.count("https://arxiv.org") == readme.count("https://arxiv.org")
    assert "https://a.b/c/raw/main/docs/images/explain.png" in hatch_build.for_index(
        readme, "https://a.b/c"
    )
    assert "explain.png" not in hatch_build.for_index(readme, None)


def test_the_page_is_up_to_date():
    text = families_table.PAGE.read_text()
    assert families_table.page(text) == text, "run python docs/families_table.py"


def test_every_family_has_a_row():
    assert set(families_table.NAMES) == set(families.CONFIGS)
    assert families_table.table().count("\n") == len(families.CONFIGS) + 1
