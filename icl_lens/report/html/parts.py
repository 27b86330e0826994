"""What pages are made of, as plain data: templates draw it as HTML, `str` gives the same numbers as text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from icl_lens.models.head import Head
from icl_lens.report.html.templating import visible, visible_token
from icl_lens.report.number_format import signed
from icl_lens.report.palette import BLUE, GRAY, ORANGE

N_LABEL_COLORS = 6
# Number of largest values listed under tokens and maps; most columns for which a static map shows numbers.
NAMED, NUMBERED = 5, 16
_WORD_JOINER = "\u2060"


def label_color(label: int | None) -> str:
    """Return the color class of a label, or "" for no label; colors repeat after six labels."""
    return "" if label is None or label < 0 else f"l{label % N_LABEL_COLORS}"


def sign_color(value: float) -> str:
    """Return the color class of a signed value: blue above zero, orange below."""
    return "p" if value >= 0 else "n"


def largest(*rows: Sequence[float]) -> float:
    """Return the largest magnitude, or 1 if there is none."""
    return max((abs(value) for row in rows for value in row), default=0.0) or 1.0


# Inside a line or a table cell


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

    def __str__(self) -> str:
        return visible_token(self.text)


@dataclass(frozen=True)
class Bar:
    """A number beside a bar that fills `share` of its column's width."""

    kind: ClassVar = "bar"
    text: str
    share: float
    color: str

    @classmethod
    def signed(cls, value: float, reach: float) -> "Bar":
        """Return the bar of a signed value on a scale up to `reach`."""
        return cls(signed(value), abs(value) / reach, sign_color(value))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Words:
    """A list of words, isolated so that right-to-left words do not reorder their neighbors."""

    kind: ClassVar = "words"
    words: Sequence[str]

    def __str__(self) -> str:
        return ", ".join(visible(word.strip() or word) for word in self.words) or "–"


@dataclass(frozen=True)
class Link:
    """A head's name; selecting it shows the head."""

    kind: ClassVar = "link"
    head: Head

    def __str__(self) -> str:
        return str(self.head)


@dataclass(frozen=True)
class Dots:
    """Probabilities on a line from 0 to 1: before and after an ablation, and after each random one."""

    kind: ClassVar = "dots"
    before: float
    after: float
    draws: Sequence[float]

    def __str__(self) -> str:
        return ""


Run = str | Chip | Bar | Words | Link | Dots
Cell = Run | list[Run]


def runs(cell: Cell) -> list[Run]:
    """Return the runs of a cell."""
    return cell if isinstance(cell, list) else [cell]


def text(cell: Cell) -> str:
    """Return a cell as text."""
    return "".join(map(str, runs(cell)))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


# Blocks: kinds are macros in templates/macros.html.j2


@dataclass(frozen=True)
class Name:
    """The name of what follows."""

    kind: ClassVar = "name"
    text: str

    def __str__(self) -> str:
        return visible(self.text)


@dataclass(frozen=True)
class Table:
    """A table by column name; names that start with `#` are of columns of numbers. `style` is its CSS class."""

    kind: ClassVar = "table"
    columns: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    style: str = ""

    @property
    def heads(self) -> list[tuple[list[Run], str, bool]]:
        """Each column's name, the same as text, and whether it holds numbers."""
        found: list[tuple[list[Run], str, bool]] = []
        for column in self.columns:
            first, *rest = runs(column)
            number = str(first).startswith("#")
            name = [str(first)[1:], *rest] if number else [first, *rest]
            found.append((name, text(name), number))
        return found

    @property
    def cells(self) -> list[list[list[Run]]]:
        """The runs of every cell."""
        return [list(map(runs, row)) for row in self.rows]

    def __str__(self) -> str:
        return _aligned([[plain for _, plain, _ in self.heads], *(list(map(text, row)) for row in self.rows)])


@dataclass(frozen=True)
class Grid:
    """Signed values by row and column, blue above zero and orange below; `titles` appear over cells without numbers."""

    kind: ClassVar = "grid"
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

    def __str__(self) -> str:
        rows = [[str(name), *(signed(x, 2) if self.numbered else "" for x in values)] for name, values in self.rows]
        return _aligned([[self.corner, *map(str, self.columns)], *rows])


@dataclass(frozen=True)
class HeadMap:
    """Values (nats) by layer and head; `located` heads are ringed. `name` is that of the values."""

    kind: ClassVar = "head_map"
    values: Sequence[Sequence[float]]
    located: Collection[Head] = ()
    name: str = "increase, nats"

    @property
    def scale(self) -> "Scale":
        """Color scale of the values."""
        return Scale(largest(*self.values))

    @property
    def n_heads(self) -> int:
        """Number of heads in a layer."""
        return len(self.values[0])

    @property
    def cells(self) -> list[list[tuple[Head, float, str]]]:
        """Head, value and CSS class of each cell, by layer."""
        return [
            [
                (Head(layer, head), value, sign_color(value) + " top" * (Head(layer, head) in self.located))
                for head, value in enumerate(row)
            ]
            for layer, row in enumerate(self.values)
        ]

    @property
    def grid(self) -> Grid:
        """The same with heads as rows and layers as columns, as the map lies on a wide screen."""
        layers, heads = range(len(self.values)), range(self.n_heads)
        return Grid(
            "Increase by layer and head",
            "head \\ layer",
            [Chip(str(layer)) for layer in layers],
            [(Chip(str(head)), [self.values[layer][head] for layer in layers]) for head in heads],
            len(layers) <= NUMBERED,
            [[f"L{layer}H{head}: {signed(self.values[layer][head])}" for layer in layers] for head in heads],
        )

    @property
    def largest(self) -> str:
        """The heads with the largest values."""
        flat = sorted((cell for row in self.cells for cell in row), key=lambda cell: -abs(cell[1]))
        return ", ".join(f"{head} {signed(value)}" for head, value, _ in flat[:NAMED])

    def __str__(self) -> str:
        return f"{self.grid}\nLargest: {self.largest}."


@dataclass(frozen=True)
class Explorer:
    """A map of all heads, with the selected head's panel below it. `data` is what the script needs of the others."""

    kind: ClassVar = "explorer"
    head_map: HeadMap
    panels: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]

    def __str__(self) -> str:
        return str(self.head_map)


@dataclass(frozen=True)
class Strip:
    """Tokens colored by circuitsvis: by signed value on a scale up to `reach`, or by `attention`.

    `marks` are label tokens, by position. They are underlined in their color; under attention, their color also fills
    them, and all other tokens are gray and dimmed.
    """

    kind: ClassVar = "strip"
    name: str
    tokens: Sequence[str]
    values: Sequence[float]
    reach: float
    marks: Mapping[int, int]
    attention: bool = False

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws it from."""
        positive, negative = (GRAY, GRAY) if self.attention else (BLUE, ORANGE)
        marks = [
            (position, label, round(self.values[position] / self.reach, 3) if self.attention else None)
            for position, label in self.marks.items()
        ]
        props = {
            "tokens": [for_circuitsvis(token) for token in self.tokens],
            "values": list(self.values),
            "minValue": -self.reach,
            "maxValue": self.reach,
            "positiveColor": positive,
            "negativeColor": negative,
            "paddingBottom": 0,
        }
        return {"props": props, "marks": marks, "dim": self.attention and bool(marks)}

    @property
    def tinted(self) -> list[tuple[str, str, float]]:
        """Each token with the color class and intensity of its tint."""
        colors = [
            label_color(self.marks.get(i)) if self.attention else sign_color(value)
            for i, value in enumerate(self.values)
        ]
        shares = [0.8 * min(1.0, abs(value) / self.reach) for value in self.values]
        return list(zip(self.tokens, colors, shares, strict=True))

    @property
    def largest(self) -> str:
        """The tokens with the largest values."""
        order = sorted(range(len(self.values)), key=lambda i: -abs(self.values[i]))[:NAMED]
        written = "{:.3f}".format if self.attention else signed
        named = [f"“{self.tokens[i]}” at {i} {written(self.values[i])}" for i in order if self.values[i]]
        return ", ".join(named) or "none"

    def __str__(self) -> str:
        return f"{self.name}\n{visible(' '.join(self.tokens))}\nLargest: {visible(self.largest)}."


@dataclass(frozen=True)
class Patterns:
    """Full attention patterns drawn by circuitsvis, with each head's last row as a strip where it cannot draw."""

    kind: ClassVar = "patterns"
    name: str
    data: Mapping[str, Any]
    strips: Sequence[Strip]

    def __str__(self) -> str:
        return "\n".join([self.name, *map(str, self.strips)])


@dataclass(frozen=True)
class WordsTable:
    """Words of a head by position, and its query's at `position`. `scrolls` if the table is long."""

    kind: ClassVar = "words_table"
    head: Head
    table: Table
    last: Chip
    position: int
    query: Words
    scrolls: bool

    def __str__(self) -> str:
        return f"{self.table}\nQuery at {self.last} (position {self.position}): {self.query}"


@dataclass(frozen=True)
class Legend:
    """The labels in their colors."""

    kind: ClassVar = "legend"
    labels: Sequence[str]

    @property
    def chips(self) -> list[Chip]:
        """The labels in their colors."""
        return [Chip(label, i) for i, label in enumerate(self.labels)]

    def __str__(self) -> str:
        return " ".join(["Labels", *map(str, self.chips)])


@dataclass(frozen=True)
class Scale:
    """The signed color scale; text needs none."""

    kind: ClassVar = "scale"
    reach: float
    unit: str = "nats"

    def __str__(self) -> str:
        return ""


Block = Name | Table | Grid | HeadMap | Explorer | Strip | Patterns | WordsTable | Legend | Scale


def for_circuitsvis(token: str) -> str:
    """Return a token for circuitsvis, which inserts tokens as HTML in one place and as text in another.

    An invisible word joiner after every `<` and `&` makes both show the same characters, because no tag or entity can
    start with it.
    """
    shown = visible(token) or "∅"
    return shown.replace("<", "<" + _WORD_JOINER).replace("&", "&" + _WORD_JOINER)
