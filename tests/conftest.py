"""Load the fixtures of `shared`, except in the process that hands out tests, whose start others await."""

import gc

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        gc.disable()  # until all tests are collected
        config.pluginmanager.import_plugin("shared")
