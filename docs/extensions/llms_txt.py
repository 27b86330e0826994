"""Write `llms.txt` next to the built pages: what the package is, the cheat sheet, and a link to every page.

The format is that of https://llmstxt.org. Everything comes from the pages themselves: the description and the lists of
pages from `index.md`, the cheat sheet from the file that `icl-lens --examples` prints, titles and summaries from pages.
"""

import json
import re
from pathlib import Path
from typing import Any

from icl_lens.cli.examples import cheat_sheet

DOCS = Path(__file__).parent.parent
NAME = "llms.txt"


def text(docs: Path = DOCS) -> str:
    """Return the contents of the file."""
    index = (docs / "index.md").read_text(encoding="utf-8")
    title, description, *_ = index.split("\n\n")
    sheet = re.sub("^## ", "### ", cheat_sheet().strip(), flags=re.MULTILINE)
    parts = [title, f"> {_one_line(description)}", "## Cheat sheet", sheet]
    for caption, pages in toctrees(docs):
        parts += [f"## {caption}", "\n".join(_link(page, docs) for page in pages)]
    return "\n\n".join(parts) + "\n"


def toctrees(docs: Path) -> list[tuple[str, list[Path]]]:
    """Return the captions of the site's lists of pages, and the files of each, in order."""
    index = (docs / "index.md").read_text(encoding="utf-8")
    found = []
    for options, entries in re.findall(r"```\{toctree\}\n((?::[^\n]*\n)*)\n(.*?)\n```", index, re.DOTALL):
        caption = re.search(r":caption: (.*)", options)[1]
        names = entries.split()
        if ":glob:" in options:
            pages = [path for name in names for path in sorted(docs.glob(name))]
        else:
            pages = [docs / f"{name}.md" for name in names]
        found.append((caption, pages))
    return found


def _link(page: Path, docs: Path) -> str:
    """Return a page's title, its address in the site, and the first sentence or, if it begins without, its sections."""
    source = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        source = "".join(json.loads(source)["cells"][0]["source"])
    title, first, *_ = re.sub("^# ", "", source).split("\n\n")
    if re.match("#|```", first):
        summary = "; ".join(re.findall("^## (.*)", source, re.MULTILINE))
    else:
        summary = re.split(r"(?<=[.?!])\s", _one_line(first))[0]
    address = page.relative_to(docs).with_suffix(".html").as_posix()
    return f"- [{title}]({address}): {summary.rstrip('.:')}."


def _one_line(paragraph: str) -> str:
    """Return a paragraph in one line, without emphasis and links."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return plain.replace("**", "").replace("*", "")


def write(app: Any, error: Exception | None = None) -> None:
    """Write the file into a site that has been built, and report pages that it links to but the site lacks."""
    if error is not None or app.builder.format != "html":
        return
    root, contents = Path(app.outdir), text()
    missing = [target for target in re.findall(r"\]\((\S+\.html)\)", contents) if not (root / target).exists()]
    if missing:
        raise FileNotFoundError(f"{NAME} links to {', '.join(missing)}, which the site does not have")
    (root / NAME).write_text(contents, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", write, priority=400)  # before local links are checked
    return {"parallel_read_safe": True, "parallel_write_safe": True}
