"""Results with a page, and the page of one explanation, which templates/explanation.html.j2 draws."""

from pathlib import Path
from typing import Any, overload

from icl_lens.files import write_text
from icl_lens.report.command import command
from icl_lens.report.findings import Findings
from icl_lens.report.html import heads, sections
from icl_lens.report.html.parts import Chip
from icl_lens.report.html.templating import render_notebook, render_page


class HasPage:
    """A result that displays itself as a page in notebooks; `_page` returns the page's template and its contents."""

    def _page(self) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return a self-contained page, or write it to `path` atomically."""
        template, content = self._page()
        page = render_page(template, **content)
        if path is None:
            return page
        write_text(path, page)
        return None

    def _repr_html_(self) -> str:
        template, content = self._page()
        return render_notebook(template, height=720, **content)


def content(e: Findings) -> dict[str, Any]:
    """Return what the page shows of an explanation."""
    chips, next_token = sections.label_chips(e), e.next_tokens[0][0]
    return {
        "title": f"{e.model}: {e.target} explained",
        "e": e,
        "target": chips[e.target],
        "predicted": chips[e.predicted],
        "correct": Chip(e.answer or ""),
        "continuation": chips.get(next_token, Chip(next_token)),
        "compared_with": [chips[name] for name in e.compared_with],
        "prompt": sections.prompt_pieces(e),
        "answer": sections.answer(e),
        "layer_charts": sections.layer_charts(e),
        "layers": sections.layers_table(e),
        "located": heads.located_table(e),
        "explorer": heads.explorer(e),
        "removal": sections.removal_table(e),
        "parts": sections.parts_table(e),
        "settings": sections.configuration(e),
        "command": command(e),
    }
