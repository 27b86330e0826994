"""One palette: what is drawn by Python and what the page's style sheet draws have the same colors."""

import re
from pathlib import Path

from icl_lens.report import html, palette

CSS = (Path(html.__file__).parent / "page.css").read_text()


def color(name: str) -> str:
    """The style sheet's color of that name on a light screen, which is the first one."""
    match = re.search(rf"--{name}: (#[0-9a-f]{{6}})", CSS)
    assert match, name
    return match[1].upper()


def test_the_style_sheet_has_the_palettes_colors():
    assert (color("pos"), color("neg")) == (palette.BLUE, palette.ORANGE)
    labels = [color(f"l{i}") for i in range(6)]
    # The fifth, a yellow, is darker on white paper than the terminal's.
    assert labels[:4] + labels[5:] == [palette.SKY, palette.AMBER, palette.GREEN, palette.PINK, palette.ORANGE]
