"""The architecture: imports between packages point down, and none form a cycle.

The contracts are in pyproject.toml ([tool.importlinter]); import-linter reads every import,
including those inside functions and those for type checkers only. The tests check the contracts,
and that violations on purpose are reported.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}


def lint(folder):
    """Exit code and report of `lint-imports` on the packages in a folder."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as run; run()",
            "--no-cache",
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the sources, for breaking."""
    folder = tmp_path_factory.mktemp("house")
    for package in ("icl_lens", "experiments"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_every_contract_is_kept():
    code, report = lint(ROOT)
    assert code == 0, report
    assert len(re.findall(r" KEPT", report)) == len(CONTRACTS), report


def imports_by_name(source):
    """The names of modules that a source passes to `import_module` or `__import__`; "?" where it is
    not a constant.
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if function in ("import_module", "__import__"):
                names.append(getattr(node.args[0], "value", "?"))
    return names


def test_no_module_of_the_project_is_imported_by_name():
    """Such an import is seen by no contract."""
    for path in (ROOT / "icl_lens").rglob("*.py"):
        for name in imports_by_name(path.read_text(encoding="utf-8")):
            assert name.startswith("transformers."), (path, name)
    source = "import_module('icl_lens.report')\nimportlib.import_module(name)"
    assert imports_by_name(source) == ["icl_lens.report", "?"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("icl_lens/result/base.py", "from icl_lens.report import renderers", "rooms"),
        ("icl_lens/result/view.py", "import rich", "views"),
        ("icl_lens/models/head.py", "def late():\n    import icl_lens.cli", "rooms"),
        ("icl_lens/models/passes/locking.py", "import icl_lens.models.loading.load", "models"),
        ("icl_lens/foundation/digest.py", "import icl_lens.foundation.files", "foundation"),
        ("icl_lens/analyses/atlas/kinds.py", "import icl_lens.analyses.trace", "analyses"),
        ("icl_lens/errors.py", "import icl_lens.foundation.files", "rooms"),
        ("icl_lens/brand_new_room.py", "", "rooms"),
        ("icl_lens/reading/increases.py", "import icl_lens.reading.search", "circles"),
        (
            "icl_lens/report/html/elements.py",
            "import icl_lens.report.html.explanation_page",
            "circles",
        ),
        ("experiments/small_models/world.py", "import experiments.benchmark.timing", "experiments"),
        ("icl_lens/metrics.py", "import experiments.common", "library"),
        ("icl_lens/report/plots.py", "import transformer_lens", "transformer-lens"),
        ("icl_lens/prompts/prompt.py", "import torch", "text"),
    ],
)
def test_a_new_arrow_that_points_up_or_closes_a_circle_is_named(copy, module, line, contract):
    path = copy / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        code, report = lint(copy)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert code == 1, report
    assert f"{CONTRACTS[contract]['name']} BROKEN" in report
