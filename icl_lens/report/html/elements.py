"""Elements of pages, as data that the macros in templates/macros.html.j2 render."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from icl_lens.models.head import Head
from icl_lens.report.html.templating import label_color, visible
from icl_lens.report.palette import GRAY
from icl_lens.result.number_format import signed

# Number of largest values listed under tokens and maps; largest number of columns with which a
# static map has numbers.
N_NAMED, MAX_NUMBERED_COLUMNS = 5, 16
_WORD_JOINER = "\u2060"


def sign_color(value: float) -> str:
    """Return the color class of a signed value: blue above zero, orange below."""
    return "p" if value >= 0 else "n"


def largest(*rows: Sequence[float]) -> float:
    """Return the largest finite magnitude, or 1 if there is none."""
    sizes = [abs(value) for value in chain(*rows) if math.isfinite(value)]
    return max(sizes, default=0.0) or 1.0


# A table cell is a run or a list of runs; `kind` is the macro that draws a run.


@dataclass(frozen=True)
class Chip:
    """A token or label, in its label's color if it belongs to a label."""

    kind: ClassVar = "chip"
    text: str
    label: int | None = None

    @property
    def color(self) -> str:
        """Color class."""
        return label_color(self.label)


@dataclass(frozen=True)
class Bar:
    """A number next to a bar that fills `share` of its column's width."""

    kind: ClassVar = "bar"
    text: str
    share: float
    color: str

    @classmethod
    def signed(cls, value: float, reach: float) -> "Bar":
        """Return the bar of a signed value on a scale up to `reach`."""
        return cls(signed(value), abs(value) / reach, sign_color(value))


@dataclass(frozen=True)
class Words:
    """A list of words, isolated so that right-to-left words do not reorder their neighbors."""

    kind: ClassVar = "words"
    words: Sequence[str]
    noise: bool = False
    """Whether the words stand out no more than those of random directions; they are gray then."""


@dataclass(frozen=True)
class Link:
    """A head's name; selecting it shows the head."""

    kind: ClassVar = "link"
    head: str


@dataclass(frozen=True)
class PageDots:
    """Probabilities or accuracies on a line from 0 to 1: before and after an ablation, and after
    each random one.
    """

    kind: ClassVar = "dots"
    before: float
    after: float
    draws: Sequence[float]


Inline = str | Chip | Bar | Words | Link | PageDots
PageCell = Inline | list[Inline]


def runs(cell: PageCell) -> list[Inline]:
    """Return the runs of a cell."""
    return cell if isinstance(cell, list) else [cell]


@dataclass(frozen=True)
class PageTable:
    """A table; the names of columns of numbers start with `#`. `style` is the table's CSS class."""

    columns: Sequence[PageCell]
    rows: Sequence[Sequence[PageCell]]
    style: str = ""

    @property
    def names(self) -> list[tuple[list[Inline], bool]]:
        """Each column's name, and whether it holds numbers."""
        names: list[tuple[list[Inline], bool]] = []
        for name in map(runs, self.columns):
            is_number = str(name[0]).startswith("#")
            names.append(([str(name[0])[1:], *name[1:]] if is_number else name, is_number))
        return names

    @property
    def cells(self) -> list[list[list[Inline]]]:
        """The runs of every cell."""
        return [list(map(runs, row)) for row in self.rows]


@dataclass(frozen=True)
class ValueGrid:
    """Signed values by row and column, blue above zero and orange below.

    In the static version, cells show numbers if `numbered`, and `titles` on hover.
    """

    name: str
    corner: str
    columns: Sequence[Chip]
    rows: Sequence[tuple[Chip, Sequence[float]]]
    numbered: bool = True
    titles: Sequence[Sequence[str]] = ()

    @property
    def reach(self) -> float:
        """Largest magnitude."""
        return largest(*(values for _, values in self.rows))


@dataclass(frozen=True)
class HeadMap:
    """Values by layer and head; `located` heads are ringed; `name` says what the values are."""

    values: Sequence[Sequence[float]]
    located: Collection[Head] = ()
    name: str = "values"
    unit: str = "nats"
    """Unit shown after each value; empty if `name` has it, or if there is none."""

    @property
    def reach(self) -> float:
        """Largest magnitude."""
        return largest(*self.values)

    @property
    def cells(self) -> list[list[tuple[Head, float, str]]]:
        """Head, value and CSS class of each cell, by layer."""
        layers = []
        for layer, values in enumerate(self.values):
            cells = []
            for index, value in enumerate(values):
                head = Head(layer, index)
                ring = " top" if head in self.located else ""
                cells.append((head, value, sign_color(value) + ring))
            layers.append(cells)
        return layers

    @property
    def grid(self) -> ValueGrid:
        """The values with heads as rows and layers as columns, the orientation of the map on a wide
        screen.
        """
        by_head = list(zip(*self.values, strict=True))
        titles = []
        for cells in zip(*self.cells, strict=True):
            titles.append([f"{head}: {signed(value)}" for head, value, _ in cells])
        rows = [(Chip(str(head)), values) for head, values in enumerate(by_head)]
        layers = [Chip(str(layer)) for layer in range(len(self.values))]
        return ValueGrid(
            self.name, "head \\ layer", layers, rows, len(layers) <= MAX_NUMBERED_COLUMNS, titles
        )

    @property
    def largest(self) -> str:
        """The heads with the largest magnitudes, with their values."""
        cells = sorted(chain(*self.cells), key=lambda cell: -abs(cell[1]))
        return ", ".join(f"{head} {signed(value)}" for head, value, _ in cells[:N_NAMED])


@dataclass(frozen=True)
class Strip:
    """Tokens colored by signed value on a scale up to `reach`, or by `attention`.

    `marks` are label tokens, by position. They are underlined in their color; under attention,
    their color also fills them, and all other tokens are gray and dimmed.
    """

    name: str
    tokens: Sequence[str]
    values: Sequence[float]
    reach: float
    marks: Mapping[int, int]
    attention: bool = False

    @property
    def data(self) -> dict[str, Any]:
        """The data from which circuitsvis' colored_tokens draws attention."""
        props = {
            "tokens": list(map(for_circuitsvis, self.tokens)),
            "values": list(self.values),
            "minValue": -self.reach,
            "maxValue": self.reach,
            "positiveColor": GRAY,
            "negativeColor": GRAY,
            "paddingBottom": 0,
        }
        marks = [
            (position, label, round(self._share(position), 3))
            for position, label in self.marks.items()
        ]
        return {"props": props, "marks": marks, "dim": bool(marks)}

    @property
    def spans(self) -> list[tuple[str, str, float, str]]:
        """Each token as shown, the color classes of its fill and underline, its share of full
        color, and its value.
        """
        spans = []
        for position, token in enumerate(self.tokens):
            sign = "" if self.attention else sign_color(self.values[position])
            colors = " ".join(filter(None, (sign, label_color(self.marks.get(position)))))
            share, value = self._share(position), self._written(position)
            spans.append((visible(token) or "∅", colors, share, value))
        return spans

    @property
    def tinted(self) -> list[tuple[str, str, float]]:
        """Each token with the color class and intensity of its tint."""
        tinted = []
        for position, token in enumerate(self.tokens):
            color = sign_color(self.values[position])
            if self.attention:
                color = label_color(self.marks.get(position))
            tinted.append((token, color, 0.8 * self._share(position)))
        return tinted

    @property
    def largest(self) -> str:
        """The tokens with the largest magnitudes, with their values."""
        order = sorted(range(len(self.values)), key=lambda i: -abs(self.values[i]))[:N_NAMED]
        named = [f"“{self.tokens[i]}” at {i} {self._written(i)}" for i in order if self.values[i]]
        return ", ".join(named) or "none"

    def _share(self, position: int) -> float:
        """Return a value's share of full color, 0 for one that is not a number."""
        value = self.values[position]
        return 0.0 if math.isnan(value) else min(1.0, abs(value) / self.reach)

    def _written(self, position: int) -> str:
        return f"{self.values[position]:.3f}" if self.attention else signed(self.values[position])


def for_circuitsvis(token: str) -> str:
    """Return a token for circuitsvis, which inserts tokens as HTML in one place and as text in
    another.

    An invisible word joiner after every `<` and `&` makes both show the same characters, because no
    tag or entity can start with it.
    """
    text = visible(token) or "∅"
    return text.replace("<", "<" + _WORD_JOINER).replace("&", "&" + _WORD_JOINER)
