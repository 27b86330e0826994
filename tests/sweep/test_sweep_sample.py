"""The sample of the family sweep: other seeds run other tests, and no quick test is left out."""

from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

SWEEP = "tests/sweep/test_sweep_half.py"


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

    def __init__(self, file, number, *marks):
        self.path = Path(file)
        self.nodeid = f"{file}::test[{number}]"
        self.marks = marks

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def ids_run(seed, tests):
    config, items = Config(seed), list(tests)
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(config.deselected) == len(tests)
    return {item.nodeid for item in items}


@pytest.mark.parametrize(("file", "marks"), [(SWEEP, []), ("tests/models/test_gguf.py", ["slow"])])
def test_quick_tests_and_those_of_other_files_always_run(file, marks):
    tests = [Test(file, number, *marks) for number in range(40)]
    assert len(ids_run("a1b2c3d", tests)) == 40


@pytest.mark.parametrize(
    ("file", "mark"), [(SWEEP, "slow"), ("tests/models/test_gguf.py", "rotating")]
)
def test_a_seed_runs_a_sixteenth_and_seeds_together_run_all(file, mark):
    tests = [Test(file, number, mark) for number in range(400)]
    samples = [ids_run(f"seed {number}", tests) for number in range(100)]
    assert all(8 < len(sample) < 50 for sample in samples)
    assert samples[0] != samples[1]
    assert ids_run("seed 0", tests) == samples[0]
    assert len(set().union(*samples)) == 400


def test_without_a_seed_every_test_runs():
    tests = [Test(SWEEP, number, "slow") for number in range(40)]
    assert len(ids_run(None, tests)) == 40
