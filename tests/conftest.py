"""Load the fixtures of `shared`, except in the process that hands out tests, whose start others
await.
"""

import gc
import zlib

import pytest

SWEEP_FOLDER = "sweep"
"""Its slow tests repeat a check on one more model family, as those marked `rotating` do on one more
model, seed or launcher.
"""
SAMPLE_SHARE = 16
"""A sample has one in so many of those tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep-sample",
        metavar="SEED",
        help=f"Run one in {SAMPLE_SHARE} of the slow tests that repeat a check on one more family or seed.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--sweep-sample")
    if seed is None:
        return
    sample: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        in_sweep = (
            item.path.parent.name == SWEEP_FOLDER and item.get_closest_marker("slow") is not None
        )
        is_repeated = in_sweep or item.get_closest_marker("rotating") is not None
        place = zlib.crc32(f"{seed} {item.nodeid}".encode()) % SAMPLE_SHARE
        is_left_out = is_repeated and place != 0
        (deselected if is_left_out else sample).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = sample


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        gc.disable()  # until all tests are collected
        config.pluginmanager.import_plugin("shared")
