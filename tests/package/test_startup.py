"""`import icl_lens` and the command line's help load nothing heavy; types and completion see every
public name.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import icl_lens as il

ROOT = Path(il.__file__).parent.parent
HEAVY = (
    "torch",
    "transformers",
    "transformer_lens",
    "pandas",
    "matplotlib",
    "pyarrow",
    "datasets",
    "numpy",
)


COMMAND = "sys.argv = ['icl-lens', *{}]\nfrom icl_lens.cli import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import icl_lens, icl_lens.cli; dir(icl_lens)", ""),
        (COMMAND.format(["locate", "--help"]), "Usage: icl-lens locate"),
        (COMMAND.format(["--version"]), f"icl-lens {il.__version__}"),
        (COMMAND.format(["--examples"]), "il.load_model("),
    ],
    ids=["imports", "help", "version", "examples"],
)
def test_nothing_heavy_is_imported(code, printed):
    code = f"import sys\n{code}\nprint('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert printed in done.stdout
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"]


def test_completion_sees_every_public_name():
    stub = (ROOT / "icl_lens" / "__init__.pyi").read_text()
    promised = {line.split(" as ")[1] for line in stub.splitlines() if " as " in line}
    assert len(promised) > 50
    assert promised <= set(dir(il))
    assert promised == set(il.__all__)
    namespace = {}
    exec("from icl_lens import *", namespace)
    assert promised <= set(namespace)
