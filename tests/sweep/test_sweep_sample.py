"""The sample of the family sweep: other seeds run other tests, and no quick test is left out."""

from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest


class Config:
    """A pytest configuration that records what is deselected."""

    def __init__(self, seed):
        self.seed = seed
        self.deselected = []
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.deselected.extend(items))

    def getoption(self, name):
        assert name == "--sweep-sample"
        return self.seed


class Test:
    """A collected test."""

    __test__ = False

    def __init__(self, file, number, *, slow):
        self.path = Path(file)
        self.nodeid = f"{file}::test[{number}]"
        self.is_slow = slow

    def get_closest_marker(self, name):
        return name if self.is_slow else None


def ids_run(seed, tests):
    config, items = Config(seed), list(tests)
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(config.deselected) == len(tests)
    return {item.nodeid for item in items}


@pytest.mark.parametrize(
    ("file", "slow"), [("tests/sweep/test_sweep_half.py", False), ("tests/models/test_gguf.py", True)]
)
def test_quick_tests_and_those_of_other_files_always_run(file, slow):
    tests = [Test(file, number, slow=slow) for number in range(40)]
    assert len(ids_run("a1b2c3d", tests)) == 40


def test_a_seed_runs_an_eighth_and_seeds_together_run_all():
    tests = [Test("tests/sweep/test_sweep_half.py", number, slow=True) for number in range(400)]
    samples = [ids_run(f"seed {number}", tests) for number in range(100)]
    assert all(25 < len(sample) < 80 for sample in samples)
    assert samples[0] != samples[1]
    assert ids_run("seed 0", tests) == samples[0]
    assert len(set().union(*samples)) == 400


def test_without_a_seed_every_test_runs():
    tests = [Test("tests/sweep/test_sweep_half.py", number, slow=True) for number in range(40)]
    assert len(ids_run(None, tests)) == 40
