"""Heads: the map of all of them, the table of the located ones, and what each of those says."""

import math
from collections.abc import Collection, Sequence

from icl_lens.models.head import Head
from icl_lens.report.findings import Findings, HeadReport
from icl_lens.report.html.escaping import chip, isolated, json_script, label_class, safe, signed, table, visible
from icl_lens.report.html.similarity import matrix
from icl_lens.report.html.token_strips import attention_strip, label_legend, scale_legend, value_strip
from icl_lens.report.number_format import percent

# Rows of words shown without a scroll bar.
LONG = 12
# Demonstrations whose labels and queries are compared with one another on the page.
MOST_COMPARED = 16


def explorer(explanation: Findings) -> str:
    """The map of all heads with the shown head below it: a click on a cell shows that head."""
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
    """Buttons by layer and head, colored by value; `located` heads are ringed."""
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
    """The located heads in a row each: increase, contrast, attention, and what zeroing one alone does.

    Attention is summed by label; of a free prompt, the tokens that get most are named.
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
    head = ["head", "#increase, nats", *more, *names, f"#p({target_name}) without it", "#change of log p, nats"]
    verdict = f'<p class="key">{safe(explanation.verdict)}</p>' if explanation.compared_with else ""
    return table(head, rows, kind="located") + verdict


def _attended(explanation: Findings, report: HeadReport) -> str:
    """The tokens that get most attention, with it."""
    return " ".join(
        f"{chip(explanation.shown_tokens[position])}\u00a0{weight:.2f}" for position, weight in report.top_attended(3)
    )


def contrast_name(explanation: Findings) -> str:
    """What the column of contrasts is called, as HTML."""
    if not explanation.is_plain_text:
        return "tells labels apart"
    return "against " + ", ".join(chip(name, explanation.labels.index(name)) for name in explanation.compared_with)


def panel(explanation: Findings, report: HeadReport, rank: int) -> str:
    """Everything about one located head."""
    positions, labels = explanation.label_positions, explanation.demonstration_labels
    name, tokens = str(report.head), explanation.shown_tokens
    reach = max(map(abs, report.position_increases), default=0.0)
    legend = "" if explanation.is_plain_text else label_legend(explanation.labels)
    apart = ""
    if explanation.is_plain_text and report.position_contrasts:
        farthest = max(map(abs, report.position_contrasts))
        strip = value_strip(tokens, report.position_contrasts, f"{name} {_plain_contrast(explanation)}", reach=farthest)
        apart = f"<h4>What each position adds {contrast_name(explanation)}</h4>{strip}{scale_legend(farthest)}"
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
        f'<div class="two"><section><h4>Where it looks</h4>'
        f"{legend}"
        f"{attention_strip(tokens, report.attention, positions, labels, name)}"
        f'<div class="weights"></div></section>'
        f"<section><h4>What each position adds to log p({chip(explanation.target)})</h4>"
        f"{added}{scale_legend(reach)}{apart}"
        f"<h4>Without this head</h4>{_without(explanation, report)}</section></div>"
        f"<h4>In words</h4>{words(explanation, report)}{similarity_panel(explanation, report)}</article>"
    )


def similarity_panel(explanation: Findings, report: HeadReport) -> str:
    """What the head's metric makes of each place where a label comes next and of each label.

    Nothing where it is not known, or where there is only one label to look at. Scores are shown less their row's mean:
    what a query adds to all its scores alike, softmax takes out. A text's own label is in no mean.
    """
    count = len(explanation.label_positions)
    if explanation.prompt is None or not report.similarity or count < 2:
        return ""
    shown = range(max(0, count - MOST_COMPARED), count)
    labels, asked = explanation.demonstration_labels, explanation.query_labels
    centered = {row: _centered(report.similarity[row], row) for row in (*shown, count)}
    texts = [*(one.text for one in explanation.prompt.demonstrations), explanation.prompt.query]
    name = f"What {report.head} compares"
    table = matrix(
        [[centered[row][column] for column in shown] for row in (*shown, count)],
        [_cut(texts[row]) for row in (*shown, count)],
        [_cut(texts[column]) for column in shown],
        ([asked[row] for row in (*shown, count)], [labels[column] for column in shown]),
        unit="score",
        name=name,
    )
    means = []
    for which, same in (("the same label", True), ("another label", False)):
        found = [
            centered[row][column]
            for row in (*shown, count)
            for column in shown
            if row != column and asked[row] >= 0 and (labels[column] == asked[row]) == same
        ]
        means += [f"{signed(sum(found) / len(found), 2)} with {which}"] if found else []
    said = f" On average {', '.join(means)}, a text’s own label left out." if means else ""
    some = "" if len(shown) == count else f" The last {len(shown)} of {count} demonstrations are shown."
    return (
        '<h4>What it compares</h4><p class="key">Each row is a place where a label comes next (the last row: after the '
        "text that is asked about), each column a label that is given, both under the name of their text. Numbers are "
        "attention scores, less the row’s mean; positions are left out, so labels behind a row’s place are scored as "
        f"well.{said}{some}</p>{table}"
    )


def _centered(row: Sequence[float], own: int) -> list[float]:
    """Scores less the mean of those with other texts' labels."""
    others = [score for column, score in enumerate(row) if column != own]
    return [score - sum(others) / len(others) for score in row]


def _cut(text: str) -> str:
    """A text's first characters, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= 24 else f"{text[:22].rstrip()} …"


def _without(explanation: Findings, report: HeadReport) -> str:
    rows = [
        [chip(label, i), percent(math.exp(before)), percent(math.exp(after)), signed(after - before)]
        for i, (label, before, after) in enumerate(
            zip(explanation.labels, explanation.label_log_probs, report.ablated, strict=True)
        )
    ]
    return table(
        ["token" if explanation.is_plain_text else "label", "#as it is", "#head zeroed", "#change of log p, nats"], rows
    )


def _plain_contrast(explanation: Findings) -> str:
    return "against " + ", ".join(explanation.compared_with)


def words(explanation: Findings, report: HeadReport) -> str:
    """The head's values and keys at the labels, and its last query, as the words nearest to them.

    Of a free prompt: its values at the tokens it attends to most, in the order of the text.
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
    shown = table(["at", "#position", "value", "#own label’s rank", "key"], rows, kind="words")
    if len(rows) > LONG:
        shown = f'<div class="long" tabindex="0" role="region" aria-label="Words of {report.head}">{shown}</div>'
    return shown + query


def _free_words(explanation: Findings, report: HeadReport) -> str:
    rows = [
        [chip(explanation.shown_tokens[position]), str(position), listed(values), str(rank)]
        for position, values, rank in zip(report.positions, report.value_words, report.value_ranks, strict=True)
    ]
    return table(["at", "#position", "value", "#own token’s rank"], rows, kind="words") + _query(explanation, report)


def _query(explanation: Findings, report: HeadReport) -> str:
    last = len(explanation.tokens) - 1
    return (
        f'<p class="query"><b>Query</b> at {chip(explanation.shown_tokens[last])} (position {last}): '
        f"{listed(report.query_words)}</p>"
    )


def listed(words: Sequence[str]) -> str:
    """Words in order, as HTML."""
    return ", ".join(isolated(word.strip() or word) for word in words) or "–"


def bar(share: float, kind: str) -> str:
    """A small bar, as long as `share` of the column's width."""
    return f'<span class="bar {kind}" style="--v:{min(100.0, 100 * abs(share)):.1f}%" aria-hidden="true"></span>'
