"""A table of scores between queries and keys, with tinted cells."""

from collections.abc import Sequence

from icl_lens.report.html.escaping import label_class, safe, signed
from icl_lens.report.html.token_strips import scale_legend


def matrix(
    rows: Sequence[Sequence[float]],
    queries: Sequence[str],
    keys: Sequence[str],
    classes: tuple[Sequence[int], Sequence[int]],
    *,
    unit: str,
    name: str,
) -> str:
    """Return a table of scores, blue above zero and orange below; `classes` color the query and key names, -1 none."""
    reach = max((abs(x) for row in rows for x in row), default=0.0) or 1.0
    head = "".join(f'<th scope="col">{_named(key, which)}</th>' for key, which in zip(keys, classes[1], strict=True))
    body = "".join(
        f'<tr><th scope="row">{_named(query, which)}</th>{"".join(_cell(value, reach) for value in row)}</tr>'
        for query, which, row in zip(queries, classes[0], rows, strict=True)
    )
    table = (
        f'<table class="similarity"><thead><tr><th>query \\ key</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    # Wide tables scroll, also by keyboard.
    place = f'<div class="scroll" tabindex="0" role="region" aria-label="{safe(name)}">'
    return f"{place}{table}</div>{scale_legend(reach, unit)}"


def _named(name: str, which: int) -> str:
    inside = f"<bdi>{safe(name)}</bdi>"
    return inside if which < 0 else f'<span class="tok {label_class(which)}">{inside}</span>'


def _cell(value: float, reach: float) -> str:
    share = min(100.0, 100 * abs(value) / reach)
    return f'<td class="n {"p" if value >= 0 else "m"}" style="--v:{share:.0f}%">{signed(value, 2)}</td>'
