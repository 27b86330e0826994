"""Arrows between the rooms point one way: a new import that breaks the order fails here."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "icl_lens"

# Low to high: a room may import rooms of lower levels only.
LEVELS = [
    {"errors"},
    {"files", "prompts", "readout", "decompose", "metrics", "hub"},
    {"models", "tokens", "rows", "parts", "processes"},
    {"activations", "tasks"},
    {"attribution", "attention", "circuits", "interventions"},
    {"location", "causal", "debias"},
    {"tables", "dataset"},
    {"explain"},
    {"plots", "html", "terminal"},
    {"cli"},
]
ALONE = {"prompts": {"errors"}, "readout": {"errors"}, "decompose": {"errors"}}
TRANSFORMER_LENS = {"models", "activations", "interventions"}


def rooms():
    """Each room (top module or subpackage) with the source files in it."""
    for path in sorted(PACKAGE.iterdir()):
        if path.suffix == ".py" and not path.name.startswith("__"):
            yield path.stem, [path]
        elif path.is_dir() and (path / "__init__.py").exists():
            yield path.name, sorted(path.rglob("*.py"))


def imports(path, *, at_import_time_only=False):
    """Module names a file imports; imports inside functions or TYPE_CHECKING do not run at import time."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if not at_import_time_only else tree.body
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "icl_lens":
                yield from (f"icl_lens.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def level(room):
    return next(i for i, rooms_here in enumerate(LEVELS) if room in rooms_here)


ROOMS = dict(rooms())


def test_every_room_has_a_level():
    assert set(ROOMS) == set().union(*LEVELS) & set(ROOMS), "give the new room a level in LEVELS"
    assert set(ROOMS) <= set().union(*LEVELS), f"no level for {set(ROOMS) - set().union(*LEVELS)}"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_arrows_point_down(room):
    for path in ROOMS[room]:
        # Drawing is looked up late, when someone asks for a picture: explain may know of plots and html so.
        late = room == "explain"
        for module in imports(path, at_import_time_only=late):
            parts = module.split(".")
            if parts[0] != "icl_lens" or len(parts) == 1 or parts[1] == room or parts[1] not in ROOMS:
                continue
            assert level(parts[1]) < level(room), f"{path.name} imports {module}: {parts[1]} is not below {room}"


@pytest.mark.parametrize("room", sorted(ALONE))
def test_the_lowest_rooms_stand_alone(room):
    for path in ROOMS[room]:
        for module in imports(path):
            if module.startswith("icl_lens."):
                assert module.split(".")[1] in ALONE[room] | {room}, f"{room} imports {module}"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_only_three_rooms_know_transformer_lens(room):
    for path in ROOMS[room]:
        if any(module.split(".")[0] == "transformer_lens" for module in imports(path)):
            assert room in TRANSFORMER_LENS, f"{path.name} imports transformer_lens"


def test_prompts_need_no_torch():
    assert not any(module.split(".")[0] == "torch" for path in ROOMS["prompts"] for module in imports(path))
