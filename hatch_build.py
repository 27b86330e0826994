"""The README as a package index shows it, where no file lies beside it."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def for_index(readme: str, source: str | None) -> str:
    """Links to files of the repository made absolute under `source`; without an address, words and the file's path."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if source is None:
            return "" if picture else f"{text} (`{path}`)" if text != path else f"`{path}`"
        return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, readme)


class ReadmeHook(MetadataHookInterface):
    """Sets `project.readme`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source)}
