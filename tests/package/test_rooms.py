"""The docstring of each package says what every module in it is for, by name."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "icl_lens"
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/**/__init__.py"))


def modules(room: Path) -> set[str]:
    """The names of the modules and packages in a package."""
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in room.glob("*/__init__.py")}


def unnamed(room: Path) -> set[str]:
    """The modules of a package that its docstring does not name in backticks."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    return modules(room) - set(re.findall(r"`(\w+)`", docstring or ""))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(PACKAGE).as_posix())
def test_a_package_says_what_every_module_in_it_is_for(room: Path) -> None:
    assert not unnamed(room), f"name them in the docstring of {room.name}/__init__.py"


def test_a_module_that_its_package_does_not_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('"""`load` loads; sizes are in bytes."""\n')
    for name in ("load", "sizes"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "__init__.py").touch()
    assert unnamed(tmp_path) == {"sizes", "tables"}
