"""After the build: every local link, anchor, picture, script and style of the pages must exist in the site."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging

logger = logging.getLogger(__name__)


class _Page(HTMLParser):
    """Collects what a page points to and the anchors it offers."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag in ("a", "link") and "href" in values:
            self.targets.append(values["href"])
        if tag in ("img", "script", "source", "iframe") and "src" in values:
            self.targets.append(values["src"])
            self.fetched.append(values["src"])
        if tag == "link" and values.get("rel") == "stylesheet":
            self.fetched.append(values["href"])


def check(root: Path) -> tuple[list[str], int]:
    """Lines naming what is broken in the site under `root`, and the number of local links that were followed."""
    pages = {}
    for path in sorted(root.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        pages[path] = page
    broken, followed = [], 0
    for path, page in pages.items():
        here = path.relative_to(root)
        broken += [f"{here}: fetches {url} from the network" for url in page.fetched if urlsplit(url).netloc]
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            followed += 1
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                broken.append(f"{here}: {target} is not there")
            elif url.fragment and file in pages and unquote(url.fragment) not in pages[file].anchors:
                broken.append(f"{here}: {target} names no anchor of that page")
    return broken, followed


def _after(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    broken, followed = check(Path(app.outdir).resolve())
    if broken:
        raise ExtensionError("broken links in the site:\n  " + "\n  ".join(broken))
    logger.info("%d local links checked, none is broken", followed)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _after)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
