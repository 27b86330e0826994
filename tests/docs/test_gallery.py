"""The gallery: stored figures are what the page's code draws, and fit for a paper."""

import re
from itertools import combinations
from pathlib import Path

import gallery_page  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest
from examples import code_blocks  # pyright: ignore[reportMissingImports]
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from icl_lens.report import palette, plots
from icl_lens.report.notebook_figure import NotebookFigure

PAGE = gallery_page.PAGE.read_text(encoding="utf-8")
SAVED = re.findall(r'figure\.savefig\("gallery/(\S+)"\)', PAGE)
SETUP, *BLOCKS = code_blocks(PAGE, "python")
POINTS = 72
"""Points per inch."""

# Color vision without one kind of cone, in linear RGB: Machado, Oliveira and Fernandes 2009,
# severity 1.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.072175],
        [0.0193339, 0.119192, 0.9503041],
    ]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color, vision):
    """Return CIELAB coordinates of a color as a vision sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    t = XYZ @ np.clip(np.array(VISIONS[vision]) @ linear, 0, 1) / WHITE
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def smallest_distance(colors, vision):
    return min(np.linalg.norm(lab(a, vision) - lab(b, vision)) for a, b in combinations(colors, 2))


def test_distances_of_colors_are_those_of_the_standard():
    assert lab("white", "normal") == pytest.approx([100, 0, 0], abs=0.01)
    assert lab("red", "normal") == pytest.approx([53.24, 80.09, 67.20], abs=0.01)
    assert (
        smallest_distance(["red", "#7F7F00"], "deuteranopia")
        < 35
        < smallest_distance(["red", "#7F7F00"], "normal")
    )


@pytest.mark.parametrize("vision", VISIONS)
def test_colors_are_distinct_with_color_blindness(vision):
    """A distance of 2.3 is just noticeable."""
    assert smallest_distance(palette.LINES[:5], vision) > 24
    assert smallest_distance(palette.LINES, vision) > 17
    assert smallest_distance(palette.FILLS, vision) > 24
    assert (
        smallest_distance([palette.BLUE, palette.ORANGE, palette.GRAY], vision) > 37
    )  # signs, and controls


def test_bars_are_distinct_in_gray():
    lightness = sorted(lab(color, "normal")[0] for color in palette.FILLS[:3])
    assert np.diff(lightness).min() > 20


def test_every_figure_is_saved_and_shown_once():
    on_page = re.findall(r"^!\[.{20,}\]\(gallery/(\S+)\)", PAGE, re.MULTILINE)
    assert on_page == SAVED
    assert sorted(SAVED) == sorted(path.name for path in gallery_page.FIGURES.glob("*.svg"))
    assert len(SAVED) == len(BLOCKS) == 7
    for block in BLOCKS:
        assert block.rstrip().count("\n") < 8, "a figure needs about five lines"
        assert max(map(len, block.splitlines())) <= 84, "the page cuts longer lines"


def test_stored_figures_are_of_the_pages_code():
    assert gallery_page.CODE.read_text().strip() == gallery_page.digest(PAGE), (
        "run python docs/refresh.py gallery"
    )
    changed = PAGE.replace("k=8", "k=9")
    assert (
        gallery_page.digest(changed)
        != gallery_page.digest(PAGE)
        == gallery_page.digest(PAGE + "\nOther words.\n")
    )


@pytest.mark.parametrize("name", SAVED)
def test_stored_figures_are_shapes_as_wide_as_a_column(name):
    svg = (gallery_page.FIGURES / name).read_text(encoding="utf-8")
    assert "<image" not in svg, "pixels"
    assert "<text" not in svg, "text that needs a font"
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])
    assert width == pytest.approx(POINTS * (plots.PAGE if name == "circuit.svg" else plots.COLUMN))


def numbers_and_rest(svg):
    """Return the numbers of an SVG file, and everything else; names made from its contents are left
    out.
    """
    svg = re.sub(r'(id|href|clip-path)="[^"]*"', "", svg)
    number = r"(?<![\w#])-?\d+\.?\d*(?:e-?\d+)?(?!\w)"
    return np.array(re.findall(number, svg), dtype=float), re.sub(number, "N", svg)


@pytest.mark.slow
def test_the_pages_code_draws_the_stored_figures(tmp_path, monkeypatch):
    """Also: no text is small, cut off, or over another."""
    (tmp_path / "gallery").mkdir()
    figures, save = {}, NotebookFigure.savefig

    def savefig(figure, path):
        figures[Path(path).name] = figure
        save(figure, path)

    monkeypatch.setattr(NotebookFigure, "savefig", savefig)
    gallery_page.run(PAGE, tmp_path)
    assert sorted(path.name for path in (tmp_path / "gallery").iterdir()) == sorted(SAVED)
    for name, figure in figures.items():
        drawn, stored = (
            numbers_and_rest((folder / name).read_text(encoding="utf-8"))
            for folder in (tmp_path / "gallery", gallery_page.FIGURES)
        )
        assert drawn[1] == stored[1], f"run python docs/refresh.py gallery: {name} differs"
        np.testing.assert_allclose(drawn[0], stored[0], atol=0.05, err_msg=name)  # points
        faults = badly_placed_text(figure)
        assert faults == [], f"{name}: {faults}"


def badly_placed_text(figure):
    """Return texts below 6 points, outside the figure, or over another, as far as they are
    drawn.
    """
    drawn, draw = [], Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Text, "draw", lambda self, renderer: (drawn.append(self), draw(self, renderer))[1]
        )
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    drawn = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()).padded(-0.5))
        for text in drawn
    ]
    small = [f"{text.get_text()!r} is small" for text in drawn if text.get_fontsize() < 6]
    cut = [name for name, box in boxes if min(box.min) < 0 or (box.max > figure.bbox.max).any()]
    over = [
        f"{a!r} and {b!r}"
        for (a, first_box), (b, second_box) in combinations(boxes, 2)
        if first_box.overlaps(second_box)
    ]
    return [*small, *(f"{name!r} is cut off" for name in cut), *over]


def test_badly_placed_text_is_named():
    figure = plots.head_heatmap(np.eye(3), label="contrast (nats)")
    assert badly_placed_text(figure) == []
    figure.text(0.5, 0.5, "one", fontsize=5)
    figure.text(0.51, 0.5, "two", fontsize=7)
    figure.text(0.99, 0.8, "three", fontsize=7)
    assert badly_placed_text(figure) == ["'one' is small", "'three' is cut off", "'one' and 'two'"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_saved_figures_embed_fonts_and_have_the_same_bytes(kind, tmp_path):
    for name in ("one", "two"):
        plots.head_heatmap(np.eye(3), label="contrast (nats)").savefig(tmp_path / f"{name}.{kind}")
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert first == second
    if kind == "pdf":
        assert b"/FontFile2" in first  # TrueType
        assert b"/Type3" not in first
        assert b"/CreationDate" not in first
        assert b"/Subtype /Image" not in first
    else:
        assert b"<text" not in first
        assert b"<image" not in first
    plots.head_heatmap(np.eye(3)).savefig(tmp_path / "named.pdf", metadata={"Title": "Heads"})
    assert b"Heads" in (tmp_path / "named.pdf").read_bytes()
