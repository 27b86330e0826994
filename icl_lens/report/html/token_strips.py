"""Token strips colored by circuitsvis, and their color legends."""

from collections.abc import Sequence

from icl_lens.report.html.element import circuitsvis_mount
from icl_lens.report.html.escaping import for_circuitsvis, label_class, safe, signed
from icl_lens.report.palette import BLUE, GRAY, ORANGE

POSITIVE, NEGATIVE, NEUTRAL = BLUE, ORANGE, GRAY


def attention_strip(
    tokens: Sequence[str],
    weights: Sequence[float],
    label_positions: Sequence[int],
    labels: Sequence[int],
    name: str,
) -> str:
    """Return the last token's attention over the prompt, label tokens in color, others gray and dimmed.

    Without labels, all tokens are gray.
    """
    reach = max(weights, default=0.0) or 1.0
    marks = [
        (position, label, round(weights[position] / reach, 3))
        for position, label in zip(label_positions, labels, strict=True)
    ]
    props = {
        "tokens": [for_circuitsvis(token) for token in tokens],
        "values": list(weights),
        "minValue": -reach,
        "maxValue": reach,
        "positiveColor": NEUTRAL,
        "negativeColor": NEUTRAL,
        "paddingBottom": 0,
    }
    strip = circuitsvis_mount(
        "ColoredTokens", props, f"Attention of {name} from the last token", marks=marks, dim=bool(marks)
    )
    return f'{strip}<p class="key">Attention probability; full color is {reach:.2f}, the head’s largest weight.</p>'


def value_strip(
    tokens: Sequence[str],
    values: Sequence[float],
    name: str,
    *,
    reach: float,
    unit: str = "nats",
    label_positions: Sequence[int] = (),
    labels: Sequence[int] = (),
) -> str:
    """Return signed values over tokens, blue above zero and orange below, with label tokens underlined in color."""
    marks = [(position, label, None) for position, label in zip(label_positions, labels, strict=True)]
    reach = reach or 1.0
    props = {
        "tokens": [for_circuitsvis(token) for token in tokens],
        "values": list(values),
        "minValue": -reach,
        "maxValue": reach,
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "paddingBottom": 0,
    }
    return circuitsvis_mount("ColoredTokens", props, f"{name}, {unit} by token", marks=marks)


def label_legend(labels: Sequence[str]) -> str:
    """Return a legend of the label colors."""
    names = "".join(
        f'<span class="tok {label_class(i)}"><bdi>{safe(label)}</bdi></span>' for i, label in enumerate(labels)
    )
    return f'<p class="legend">Labels {names}</p>'


def scale_legend(reach: float, unit: str = "nats") -> str:
    """Return a legend of the signed color scale."""
    low, high = signed(-reach, 2), signed(reach, 2)
    return f'<p class="legend scale"><span>{low}</span><i aria-hidden="true"></i><span>{high} {safe(unit)}</span></p>'
