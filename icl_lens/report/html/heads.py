"""Head sections: the map of all heads, the table of located heads, and a panel for each."""

import math
from collections.abc import Collection, Sequence

from icl_lens.models.head import Head
from icl_lens.report.findings import Findings, HeadReport
from icl_lens.report.html.escaping import chip, isolated, json_script, label_class, safe, signed, table, visible
from icl_lens.report.html.similarity import matrix
from icl_lens.report.html.token_strips import attention_strip, label_legend, scale_legend, value_strip
from icl_lens.report.number_format import percent

# Rows of words shown without a scrollbar.
LONG = 12
# Maximum number of demonstrations in the similarity panel.
MOST_COMPARED = 16


def explorer(explanation: Findings) -> str:
    """Return the map of all heads, with the selected head below it."""
    located = {report.head: rank for rank, report in enumerate(explanation.heads, 1)}
    panels = "".join(panel(explanation, report, rank) for rank, report in enumerate(explanation.heads, 1))
    positions, labels = explanation.label_positions, explanation.demonstration_labels
    attention, tokens = explanation.label_attention, explanation.shown_tokens
    if explanation.is_plain_text:
        positions, attention = explanation.attended_positions, explanation.attended_attention
        labels = (-1,) * len(positions)  # no label's color
    data = {
        "labels": [visible(label) for label in explanation.labels],
        "demos": [
            {"token": visible(tokens[position]).strip(), "position": position, "label": label}
            for position, label in zip(positions, labels, strict=True)
        ],
        "attention": [[[round(x, 4) for x in head] for head in layer] for layer in attention],
        "k": len(explanation.heads),
    }
    return (
        f'<div class="explorer">{heatmap(explanation.head_increases, located=located)}'
        f'<script type="application/json" class="data">{json_script(data)}</script>'
        f'<div class="panels">{panels}<article class="panel other" hidden></article></div></div>'
    )


def heatmap(increases: Sequence[Sequence[float]], *, located: Collection[Head], caption: str = "increase, nats") -> str:
    """Return buttons by layer and head, colored by value; `located` heads are ringed."""
    n_heads = max(map(len, increases))
    reach = max((abs(x) for row in increases for x in row), default=0.0) or 1.0
    cells = ['<span class="corner">head</span>', *[f'<span class="hh">{head}</span>' for head in range(n_heads)]]
    for layer, row in enumerate(increases):
        cells.append(f'<span class="hl">{layer}</span>')
        for index, value in enumerate(row):
            head = Head(layer, index)
            kind = ("p" if value >= 0 else "n") + (" top" if head in located else "")
            note = ", located" if head in located else ""
            cells.append(
                f'<button type="button" class="{kind}" style="--v:{min(100.0, 100 * abs(value) / reach):.1f}%" '
                f'data-head="{head}" data-value="{value:.5g}" tabindex="-1" '
                f'aria-label="{head}, {signed(value)} nats{note}"></button>'
            )
    return (
        f'<div class="map"><p class="maphead"><span class="readout" aria-live="polite"></span></p><div class="scroll">'
        f'<div class="cells" role="group" aria-label="{safe(caption)} by layer and head" '
        f'style="--layers:{len(increases)};--heads:{n_heads}">{"".join(cells)}</div></div>{scale_legend(reach)}</div>'
    )


def located_table(explanation: Findings) -> str:
    """Return a table with one row per located head: increase, contrast, attention, and the effect of zeroing it alone.

    Attention is summed by label; for plain text, the most attended tokens are listed.
    """
    target = explanation.labels.index(explanation.target)
    before = explanation.label_log_probs[target]
    reach = max((abs(report.increase) for report in explanation.heads), default=0.0) or 1.0
    shown = [i for i, label in enumerate(explanation.labels) if i in explanation.demonstration_labels or i == target]
    shown = [] if explanation.is_plain_text else shown
    tallest = max((abs(report.contrast or 0.0) for report in explanation.heads), default=0.0) or 1.0
    rows = []
    for report in explanation.heads:
        sums = dict.fromkeys(shown, 0.0)
        weights = report.label_attention(explanation.label_positions)
        for label, weight in zip(explanation.demonstration_labels, weights, strict=True):
            sums[label] += weight
        after = report.ablated[target]
        contrast = []
        if report.contrast is not None:
            contrast = [
                f"{bar(report.contrast / tallest, 'p' if report.contrast >= 0 else 'n')}{signed(report.contrast)}"
            ]
        rows.append(
            [
                f'<button type="button" class="link" data-show="{report.head}">{report.head}</button>',
                f"{bar(report.increase / reach, 'p' if report.increase >= 0 else 'n')}{signed(report.increase)}",
                *contrast,
                *[f"{bar(sums[i], label_class(i))}{sums[i]:.2f}" for i in shown],
                *([_attended(explanation, report)] if explanation.is_plain_text else []),
                percent(math.exp(after)),
                signed(after - before),
            ]
        )
    names = [f"#to {chip(explanation.labels[i], i)}" for i in shown]
    target_name = chip(explanation.target, target)
    more = [f"#{contrast_name(explanation)}, nats"] if explanation.compared_with else []
    names += ["attends most to"] if explanation.is_plain_text else []
    head = ["head", "#increase, nats", *more, *names, f"#p({target_name}) with head zeroed", "#change of log p, nats"]
    verdict = f'<p class="key">{safe(explanation.verdict)}</p>' if explanation.compared_with else ""
    return table(head, rows, kind="located") + verdict


def _attended(explanation: Findings, report: HeadReport) -> str:
    """Return the most attended tokens with their attention."""
    return " ".join(
        f"{chip(explanation.shown_tokens[position])}\u00a0{weight:.2f}" for position, weight in report.top_attended(3)
    )


def contrast_name(explanation: Findings) -> str:
    """Return the name of the contrast column, as HTML."""
    if not explanation.is_plain_text:
        return "contrast"
    return "against " + ", ".join(chip(name, explanation.labels.index(name)) for name in explanation.compared_with)


def panel(explanation: Findings, report: HeadReport, rank: int) -> str:
    """Return the panel of one located head."""
    positions, labels = explanation.label_positions, explanation.demonstration_labels
    name, tokens = str(report.head), explanation.shown_tokens
    reach = max(map(abs, report.position_increases), default=0.0)
    legend = "" if explanation.is_plain_text else label_legend(explanation.labels)
    contrast = ""
    if explanation.is_plain_text and report.position_contrasts:
        farthest = max(map(abs, report.position_contrasts))
        strip = value_strip(tokens, report.position_contrasts, f"{name} {_plain_contrast(explanation)}", reach=farthest)
        contrast = f"<h4>Contrast by position, {contrast_name(explanation)}</h4>{strip}{scale_legend(farthest)}"
    added = value_strip(
        tokens,
        report.position_increases,
        name,
        reach=reach,
        label_positions=positions,
        labels=labels,
    )
    return (
        f'<article class="panel" data-head="{name}" aria-label="Head {name}" hidden>'
        f"<header><h3>{name}</h3><p>rank {rank} of {sum(map(len, explanation.head_increases))}, "
        f"{signed(report.increase)} nats</p></header>"
        f'<div class="two"><section><h4>Attention from the last token</h4>'
        f"{legend}"
        f"{attention_strip(tokens, report.attention, positions, labels, name)}"
        f'<div class="weights"></div></section>'
        f"<section><h4>Increase of log p({chip(explanation.target)}) by position</h4>"
        f"{added}{scale_legend(reach)}{contrast}"
        f"<h4>With this head zeroed</h4>{_without(explanation, report)}</section></div>"
        f"<h4>Top words</h4>{words(explanation, report)}{similarity_panel(explanation, report)}</article>"
    )


def similarity_panel(explanation: Findings, report: HeadReport) -> str:
    """Return the head's attention scores between each prediction position and each label, or "" if unavailable.

    Omitted for fewer than two labels. Scores are centered by row, because softmax is invariant to a constant added to
    all scores of a query. A demonstration's own label is excluded from the means.
    """
    count = len(explanation.label_positions)
    if explanation.prompt is None or not report.similarity or count < 2:
        return ""
    shown = range(max(0, count - MOST_COMPARED), count)
    labels, row_labels = explanation.demonstration_labels, explanation.query_labels
    centered = {row: _centered(report.similarity[row], row) for row in (*shown, count)}
    texts = [*(one.text for one in explanation.prompt.demonstrations), explanation.prompt.query]
    name = f"Attention scores of {report.head} without positions"
    table = matrix(
        [[centered[row][column] for column in shown] for row in (*shown, count)],
        [_cut(texts[row]) for row in (*shown, count)],
        [_cut(texts[column]) for column in shown],
        ([row_labels[row] for row in (*shown, count)], [labels[column] for column in shown]),
        unit="score",
        name=name,
    )
    means = []
    for which, same in (("the same label", True), ("another label", False)):
        found = [
            centered[row][column]
            for row in (*shown, count)
            for column in shown
            if row != column and row_labels[row] >= 0 and (labels[column] == row_labels[row]) == same
        ]
        means += [f"{signed(sum(found) / len(found), 2)} with {which}"] if found else []
    average = f" Average: {', '.join(means)}, excluding each text’s own label." if means else ""
    subset = "" if len(shown) == count else f" The last {len(shown)} of {count} demonstrations are shown."
    return (
        '<h4>Attention scores without positions</h4><p class="key">Each row is a position where a label is predicted '
        "(last row: after the query), each column a demonstration’s label; both are named by their text. Values are "
        "attention scores minus the row’s mean. Position terms and the causal mask are omitted, so labels after a "
        f"row’s position are scored too.{average}{subset}</p>{table}"
    )


def _centered(row: Sequence[float], own: int) -> list[float]:
    """Subtract the mean of the scores with other texts' labels."""
    others = [score for column, score in enumerate(row) if column != own]
    return [score - sum(others) / len(others) for score in row]


def _cut(text: str) -> str:
    """Truncate a text to one short line."""
    text = " ".join(text.split())
    return text if len(text) <= 24 else f"{text[:22].rstrip()} …"


def _without(explanation: Findings, report: HeadReport) -> str:
    rows = [
        [chip(label, i), percent(math.exp(before)), percent(math.exp(after)), signed(after - before)]
        for i, (label, before, after) in enumerate(
            zip(explanation.labels, explanation.label_log_probs, report.ablated, strict=True)
        )
    ]
    name = "token" if explanation.is_plain_text else "label"
    return table([name, "#no ablation", "#head zeroed", "#change of log p, nats"], rows)


def _plain_contrast(explanation: Findings) -> str:
    return "against " + ", ".join(explanation.compared_with)


def words(explanation: Findings, report: HeadReport) -> str:
    """Return the top words of the head's values and keys at the labels, and of its query at the last token.

    For plain text: of its values at the tokens it attends to most, in text order.
    """
    if explanation.is_plain_text:
        return _free_words(explanation, report)
    rows = [
        [
            chip(explanation.tokens[position], label),
            str(position),
            listed(values),
            str(rank),
            listed(keys),
        ]
        for position, label, values, rank, keys in zip(
            explanation.label_positions,
            explanation.demonstration_labels,
            report.value_words,
            report.value_ranks,
            report.key_words,
            strict=True,
        )
    ]
    query = _query(explanation, report)
    shown = table(["token", "#position", "value", "#rank of own label", "key"], rows, kind="words")
    if len(rows) > LONG:
        shown = f'<div class="long" tabindex="0" role="region" aria-label="Words of {report.head}">{shown}</div>'
    return shown + query


def _free_words(explanation: Findings, report: HeadReport) -> str:
    rows = [
        [chip(explanation.shown_tokens[position]), str(position), listed(values), str(rank)]
        for position, values, rank in zip(report.positions, report.value_words, report.value_ranks, strict=True)
    ]
    shown = table(["token", "#position", "value", "#rank of own token"], rows, kind="words")
    return shown + _query(explanation, report)


def _query(explanation: Findings, report: HeadReport) -> str:
    last = len(explanation.tokens) - 1
    return (
        f'<p class="query"><b>Query</b> at {chip(explanation.shown_tokens[last])} (position {last}): '
        f"{listed(report.query_words)}</p>"
    )


def listed(words: Sequence[str]) -> str:
    """Return a list of words as HTML."""
    return ", ".join(isolated(word.strip() or word) for word in words) or "–"


def bar(share: float, kind: str) -> str:
    """Return a small bar that fills `share` of the column's width."""
    return f'<span class="bar {kind}" style="--v:{min(100.0, 100 * abs(share)):.1f}%" aria-hidden="true"></span>'
