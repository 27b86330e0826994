"""Load the fixtures of `shared`, except in a process that only hands out tests to others: imports take it seconds."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        config.pluginmanager.import_plugin("shared")
