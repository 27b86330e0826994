"""Functions and commands share their defaults: one number for each idea (`icl_lens.foundation.defaults`)."""

import inspect

import pytest
import typer

import icl_lens as il
from icl_lens.cli import app
from icl_lens.foundation import defaults

N_LOCATED_IF_NONE = None
"""`k` is `N_LOCATED`, or the number of heads of a smaller model."""

DEFAULTS = {
    "n_random": {
        "ablate_with_controls": defaults.N_RANDOM_SETS_PER_GROUP,
        "explain": defaults.N_RANDOM_SETS,
        "head_atlas": defaults.N_RANDOM_SETS_PER_GROUP,
        "locate": defaults.N_RANDOM_SETS,
        "locate_circuit": defaults.N_RANDOM_SETS,
        "random_head_sets": defaults.N_RANDOM_SETS,
        "two_towers": defaults.N_RANDOM_SETS,
    },
    "k": {
        "explain": defaults.N_DESCRIBED,
        "head_atlas": N_LOCATED_IF_NONE,
        "locate": N_LOCATED_IF_NONE,
        "metrics.agreement": defaults.N_TOP,
        "plots.head_scatter": 5,  # names of heads, which would cover each other
        "plots.top_head_bars": defaults.N_TOP,
        "top_heads": defaults.N_TOP,
        "top_subheads": defaults.N_TOP,
        "two_towers": defaults.N_LOCATED,
    },
}
"""Default of each public function that has the parameter."""

OPTIONS = {
    ("ablate", "random_sets"): ("ablate_with_controls", "n_random"),
    ("circuit", "edges"): ("locate_circuit", "n_edges"),
    ("circuit", "random_sets"): ("locate_circuit", "n_random"),
    ("explain", "k"): ("explain", "k"),
    ("explain", "n_ablated"): ("explain", "n_ablated"),
    ("locate", "random_sets"): ("locate", "n_random"),
    ("towers", "random_sets"): ("two_towers", "n_random"),
    ("atlas", "edited"): ("head_atlas", "n_edited"),
    ("atlas", "sequences"): ("head_atlas", "n_sequences"),
}
"""Options of commands, and the parameters of functions that they set."""


def default_of(name, parameter):
    """The default of a public function's parameter."""
    function = il
    for step in name.split("."):
        function = getattr(function, step)
    return inspect.signature(function).parameters[parameter].default


def functions_with(parameter):
    """Names of public functions that have a default for a parameter."""
    names = [*dir(il), *(f"metrics.{name}" for name in dir(il.metrics))]
    names += [f"plots.{name}" for name in dir(il.plots)]
    with_parameter = set()
    for name in names:
        function = il
        for step in name.split("."):
            function = getattr(function, step)
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters
        if parameter in parameters and parameters[parameter].default is not inspect.Parameter.empty:
            with_parameter.add(name)
    return with_parameter


def option(command, name):
    """An option of a command."""
    parameters = typer.main.get_command(app).commands[command].params
    return next(parameter for parameter in parameters if parameter.name == name)


@pytest.mark.parametrize("parameter", DEFAULTS)
def test_public_functions_have_the_shared_defaults(parameter):
    assert functions_with(parameter) == set(DEFAULTS[parameter])
    for name, expected in DEFAULTS[parameter].items():
        assert default_of(name, parameter) == expected, name


@pytest.mark.parametrize(("command", "name"), OPTIONS)
def test_commands_have_the_defaults_of_functions(command, name):
    function, parameter = OPTIONS[command, name]
    assert option(command, name).default == default_of(function, parameter)


@pytest.mark.parametrize("command", ["ablate", "circuit", "locate", "towers", "atlas"])
def test_help_names_the_number_of_heads_that_is_located(command):
    assert str(defaults.N_LOCATED) in option(command, "k").show_default


def test_a_command_that_measures_random_sets_is_compared_with_its_function():
    with_random_sets = set()
    for command, parsed in typer.main.get_command(app).commands.items():
        if any(parameter.name == "random_sets" for parameter in parsed.params):
            with_random_sets.add((command, "random_sets"))
    assert with_random_sets <= set(OPTIONS)
