"""Colors of figures, pages and terminal output.

The Okabe-Ito palette is safe for color-vision deficiency. Some of its colors, such as blue and
orange, have nearly the same lightness: where gray prints must tell them apart, lines also differ in
their markers and bars have `FILLS`. `html/colors.css` defines the same colors, with lighter
variants for dark themes.
"""

BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"
"""Colors of bars and lines; for signed values, blue is above zero and orange below."""

SKY, AMBER, PINK, YELLOW = "#56B4E9", "#E69F00", "#CC79A7", "#F0E442"
"""Lighter colors, for dark terminals and additional series of a figure."""

PALE, INK = "#F7F5F2", "#1B1B1A"
"""Center of the diverging scale; color of text and error bars."""

LINES = (BLUE, ORANGE, GREEN, SKY, INK, PINK, AMBER)
"""Colors of lines and points in a figure, ordered so that the first ones differ most in every
vision.
"""

FILLS = (BLUE, AMBER, INK, SKY)
"""Colors of bars in a figure; the first three also differ in gray."""
