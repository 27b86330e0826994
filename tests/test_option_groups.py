"""Groups of options: what Typer reads of a command, what the command gets, and the panels of its help."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

import pytest
import typer
from typer import rich_utils
from typer.testing import CliRunner

from icl_lens.cli import app
from icl_lens.cli.ablate import ablate
from icl_lens.cli.circuit import circuit
from icl_lens.cli.compare import compare
from icl_lens.cli.explain import explain
from icl_lens.cli.locate import locate
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import ModelOptions, ReadoutOptions, TaskOptions


@dataclass(frozen=True, kw_only=True)
class Fruit:
    panel: ClassVar[str] = "Fruit"

    apples: Annotated[int, typer.Option(help="How many.")] = 1


@dataclass(frozen=True, kw_only=True)
class Basket(Fruit):
    weight: Annotated[float, typer.Option("--weight", "-w")] = 1.0


def test_a_command_gets_its_groups():
    got = []

    def shop(basket: Basket, name: str, loud: bool = False) -> None:
        """Buys
        fruit.

        All of it."""
        got.append((basket, name, loud))

    found = grouped(shop)
    assert list(inspect.signature(found).parameters) == ["name", "loud", "apples", "weight"]
    assert found.__doc__ == "Buys fruit.\n\nAll of it."
    found("me", weight=2.5)
    small = typer.Typer()
    small.command()(found)
    result = CliRunner().invoke(small, ["you", "-w", "3", "--apples", "4", "--loud"])
    assert result.exit_code == 0, result.output
    assert got == [(Basket(weight=2.5), "me", False), (Basket(weight=3.0, apples=4), "you", True)]
    with pytest.raises(TypeError, match="pears"):
        found("me", weight=1.0, pears=2)


PANELS = {
    "explain": ["Arguments", "Options", "Output", "Why a head attends", "Text", "Task", "Reading", "Model"],
    "ablate": ["Arguments", "Options", "Output", "Heads", "Task", "Reading", "Model"],
    "circuit": ["Options", "Output", "Heads", "Task", "Reading", "Model"],
    "compare": ["Arguments", "Options", "Output", "Task", "Reading", "Model"],
    "locate": ["Options", "Task", "Output", "Reading", "Model"],
}


@pytest.mark.parametrize("name", sorted(PANELS))
@pytest.mark.parametrize("width", [80, 120])
def test_help_shows_the_panels(name, width, monkeypatch):
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", width)  # read from the environment when typer is first imported
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    shown = [line.split("─ ")[1].split(" ─")[0] for line in result.output.splitlines() if line.startswith("╭─ ")]
    assert shown == PANELS[name]
    assert max(map(len, result.output.splitlines())) <= width


def test_shared_options_are_the_same_everywhere():
    """Declared once: names, defaults and help of the model's, the reading's and the task's options."""
    shared = (
        (ModelOptions, (explain, ablate, circuit, locate)),
        (ReadoutOptions, (explain, compare, locate)),
        (TaskOptions, (explain, compare, ablate, circuit, locate)),
    )
    for group, commands in shared:
        for field in fields(group):
            found = [inspect.signature(command).parameters[field.name] for command in commands]
            described = [(p.default, vars(p.annotation.__metadata__[0])) for p in found]
            assert described == described[:1] * len(commands)
