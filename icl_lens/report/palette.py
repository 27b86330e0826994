"""The colors of everything that is drawn: figures, pages, the terminal.

They are Okabe and Ito's, which can be told apart with any color vision, also printed in gray. `html/page.css` names
the same ones, with lighter ones for dark screens.
"""

BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"
"""Of bars and lines. Where a sign is shown, blue is above zero and orange below."""

SKY, AMBER, PINK, YELLOW = "#56B4E9", "#E69F00", "#CC79A7", "#F0E442"
"""Lighter ones: seen on a dark terminal too, and further series of a figure."""

PALE, INK = "#F7F5F2", "#1B1B1A"
"""The middle of a scale of signed values; text and whiskers."""
