"""Contents of head sections: the map of all heads, the table of located heads, and a panel for
each.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from icl_lens.analyses.explanation.reports import (
    HeadReport,
    first_report,
    is_noise,
    n_largest,
    rank_of,
    words_of,
)
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.explanation.sections import HeadColumn, head_columns
from icl_lens.analyses.explanation.sentences import (
    exchange_note,
    keys_name,
    lost_name,
    score_name,
    why_sentence,
)
from icl_lens.analyses.explanation.tables import key_name, query_labels
from icl_lens.reading.reasons import SIDES, WRITER_NAMES, AttentionReasons, Side
from icl_lens.report.html.elements import (
    Bar,
    Chip,
    HeadMap,
    Inline,
    Link,
    PageCell,
    PageTable,
    Strip,
    ValueGrid,
    Words,
    largest,
)
from icl_lens.report.html.section_contents import contrast_runs, join_runs, unit_name
from icl_lens.report.html.templating import label_color, visible
from icl_lens.result.number_format import percent, signed

# Maximum number of rows of words without a scrollbar.
MAX_UNSCROLLED_ROWS = 12
# Maximum number of demonstrations in the similarity panel.
MAX_COMPARED = 16


def located(e: Explanation) -> dict[str, Any]:
    """Return the table of located heads, its notes, and why the first head attends where it does."""
    return {
        "table": located_table(e),
        "n_largest": n_largest(e),
        "other_head": e.heads[-1].head if n_largest(e) < len(e.heads) else None,
        "score_name": score_name(e),
        "lost_name": lost_name(e),
        "exchange_note": exchange_note(e),
        "why": _why(e, first_report(e)),
    }


def explorer(e: Explanation) -> dict[str, Any]:
    """Return the map of all heads, the panels of the located ones, and the data with which the
    script shows others.
    """
    panels = [_panel(e, report) for report in e.heads]
    marked = {report.head for report in e.heads}
    return {
        "score_name": score_name(e),
        "map": HeadMap(e.all_heads.by(e.settings.by), marked, f"{score_name(e)}, nats"),
        "panels": panels,
        "data": {
            "labels": list(map(visible, e.labels)),
            "demos": _attended_keys(e),
            "attention": _rounded_attention(e),
            "k": n_largest(e),
            "first": str(first_report(e).head),
            "by": score_name(e),
        },
    }


def _attended_keys(e: Explanation) -> list[dict[str, Any]]:
    """Return token, position and label (−1: none) of the keys to which all heads' attention is
    known.
    """
    keys = []
    if e.is_plain_text:
        for position in e.all_heads.positions:
            keys.append((e.input.token_names[position], position, -1))
    else:
        names = ["".join(e.input.token_names[slice(*tokens)]) for tokens in e.input.label_ranges]
        labels = e.input.demonstration_labels
        keys += zip(names, e.input.label_positions, labels, strict=True)
    described = []
    for name, position, label in keys:
        token = visible(name).strip()
        described.append({"token": token, "position": position, "label": label})
    return described


def _rounded_attention(e: Explanation) -> list[list[list[float]]]:
    """Return attention [layer][head][key] with four decimals."""
    layers = []
    for layer in e.all_heads.attention:
        heads = []
        for weights in layer:
            heads.append([round(weight, 4) for weight in weights])
        layers.append(heads)
    return layers


def located_table(e: Explanation) -> PageTable:
    """Return one row per located head: its scores, attention, and what the target loses without
    this head alone.

    Attention is summed by label; for plain text, the most attended tokens are listed.
    """
    target = e.labels.index(e.target)
    numbers = head_columns(e)
    labels = [] if e.is_plain_text else _labels_with_attention(e, target)
    rows: list[list[PageCell]] = []
    for place, report in enumerate(e.heads):
        row: list[PageCell] = [Link(str(report.head))]
        for column in numbers:
            if column.score is not None:
                row.append(Bar.signed(column.values[place], largest(column.values)))
        weights = report.attention_to(e.input.label_ranges)
        row += [attention_bar(label_sum(e, weights, label), label) for label in labels]
        if e.is_plain_text:
            row.append(_most_attended_tokens(e, report))
        row.append(percent(math.exp(report.ablated[target])))
        row += [signed(column.values[place]) for column in numbers if column.score is None]
        rows.append(row)
    return PageTable(_located_columns(e, numbers, labels), rows, "located")


def _located_columns(
    e: Explanation, numbers: Sequence[HeadColumn], labels: Sequence[int]
) -> list[PageCell]:
    """Return the names of the columns of the located heads; `labels` have a column each."""
    columns: list[PageCell] = ["head"]
    for column in numbers:
        if column.score is not None:
            name = contrast_runs(e) if column.score == "contrast" else [column.name]
            columns.append(["#", *name, ", nats"])
    columns += [["#to ", Chip(e.labels[label], label)] for label in labels]
    if e.is_plain_text:
        columns.append("attends most to")
    columns.append(["#p(", Chip(e.target, e.labels.index(e.target)), ") with head zeroed"])
    columns += [f"#{column.name}, nats" for column in numbers if column.score is None]
    return columns


def _labels_with_attention(e: Explanation, target: int) -> list[int]:
    """Return the labels that demonstrations have, and the target's."""
    demonstrated = {*e.input.demonstration_labels, target}
    return [label for label in range(len(e.labels)) if label in demonstrated]


def _most_attended_tokens(e: Explanation, report: HeadReport) -> list[Inline]:
    runs: list[Inline] = []
    for position, weight in report.top_attended(3):
        runs += [" " if runs else "", Chip(e.input.token_names[position]), f"\u00a0{weight:.2f}"]
    return runs


def label_sum(e: Explanation, weights: Sequence[float], label: int) -> float:
    """Return the attention to demonstrations summed over those with a label."""
    shares = []
    for weight, demonstration_label in zip(weights, e.input.demonstration_labels, strict=True):
        if demonstration_label == label:
            shares.append(weight)
    return math.fsum(shares)


def attention_bar(value: float, label: int) -> Bar:
    """Return attention as a bar in a label's color."""
    return Bar(f"{value:.2f}", value, label_color(label))


def attention_strip(
    tokens: Sequence[str], weights: Sequence[float], marks: dict[int, int], name: str
) -> Strip:
    """Return the last token's attention over the prompt; `marks` are the labels by position."""
    return Strip(
        f"Attention of {name} from the last token",
        tokens,
        weights,
        largest(weights),
        marks,
        attention=True,
    )


def _panel(e: Explanation, report: HeadReport) -> dict[str, Any]:
    """Return the contents of a located head's panel."""
    name, marks = str(report.head), e.input.label_at
    reach, farthest = largest(report.position_increases), largest(report.position_contrasts)
    contrast = None
    if e.is_plain_text and report.position_contrasts:
        title = f"{name} against {', '.join(e.scores.compared_with)}, nats by token"
        contrast = Strip(title, e.input.token_names, report.position_contrasts, farthest, {})
    return {
        "name": name,
        "rank": rank_of(e, report.head),
        "n_heads": sum(map(len, e.all_heads.increase)),
        "scores": {e.settings.by: report.scores[e.settings.by]} | report.scores,
        "labels": () if e.is_plain_text else e.labels,
        "target": Chip(e.target),
        "attention": attention_strip(e.input.token_names, report.attention, marks, name),
        "increases": Strip(
            f"{name}, nats by token", e.input.token_names, report.position_increases, reach, marks
        ),
        "reach": reach,
        "against": contrast_runs(e),
        "contrast": contrast,
        "contrast_reach": farthest,
        "zeroed": _zeroed_table(e, report),
        "words": words_table(e, report),
        "similarity": _similarity(e, report),
        "why": _why(e, report),
    }


def _zeroed_table(e: Explanation, report: HeadReport) -> PageTable:
    """Return each label's probability without ablation and with the head zeroed."""
    rows: list[list[PageCell]] = []
    for index, label in enumerate(e.labels):
        before, after = e.scores.log_probs[index], report.ablated[index]
        probabilities = [percent(math.exp(before)), percent(math.exp(after))]
        rows.append([Chip(label, index), *probabilities, signed(before - after)])
    return PageTable([unit_name(e), "#no ablation", "#head zeroed", "#log p lost, nats"], rows)


def _why(e: Explanation, report: HeadReport) -> dict[str, Any] | None:
    """Return the writers that contribute most to the head's attention and values, and their pairs."""
    why = report.why
    if why is None:
        return None
    written, values = _written_words_table(why), _writer_values_table(why)
    pairs: list[list[PageCell]] = []
    for query_writer, key_writer, score in why.pairs:
        pairs.append([query_writer, key_writer, signed(score)])
    return {
        "head": str(report.head),
        "more": _key_chips(e, why.more),
        "less": _key_chips(e, why.less),
        "why": why,
        "names": WRITER_NAMES,
        "lines": _pair_lines(why),
        "n_rows": max(len(why.query), len(why.key)),
        "sentence": why_sentence(e, report),
        "titles": {side: _writer_titles(why, side) for side in SIDES},
        "words": written if written.rows else None,
        "pairs": PageTable(["query writer", "key writer", "#score"], pairs),
        "writers": _writers_table(why),
        "values": values if values.rows else None,
    }


def _key_chips(e: Explanation, positions: Sequence[int]) -> list[Inline]:
    """Return the names of keys, or of four and more together."""
    if len(positions) >= 4:
        return [Chip(keys_name(e, positions), e.input.label_at[positions[0]])]
    chips: list[Inline] = []
    for position in positions:
        chips.append(Chip(key_name(e, position), e.input.label_at.get(position)))
    return join_runs(chips)


class PairLine(NamedTuple):
    """A line of the drawing, from a writer of the query on the left to one of the key on the right."""

    query_row: int
    key_row: int
    query_writer: str
    key_writer: str
    score: float
    share: float
    """Share of the largest score, 0 to 1, which sets the line's width."""


def _pair_lines(why: AttentionReasons) -> list[PairLine]:
    """Return the lines that are drawn between the writers of the strongest pairs."""
    scale = largest([score for _, _, score in why.pairs])
    query_rows = {name: row for row, (name, _) in enumerate(why.query)}
    key_rows = {name: row for row, (name, _) in enumerate(why.key)}
    lines = []
    for query_writer, key_writer, score in why.pairs:
        line = PairLine(
            query_rows[query_writer],
            key_rows[key_writer],
            query_writer,
            key_writer,
            score,
            abs(score) / scale,
        )
        lines.append(line)
    return lines


def _writer_titles(why: AttentionReasons, side: Side) -> dict[str, str]:
    """Return what is shown of each writer of a side on hover: its top words."""
    titles = {}
    for writer, (words, standout) in why.words(side).items():
        caution = "(no more than random directions) " if is_noise(standout) else ""
        titles[writer] = caution + ", ".join(words[:6])
    return titles


def _written_words_table(why: AttentionReasons) -> PageTable:
    """Return the top words of what writers wrote; the side is named in its first row."""
    rows: list[list[PageCell]] = []
    for side, where in SIDES.items():
        side_name = where
        for writer, (words, standout) in why.words(side).items():
            rows.append([side_name, writer, Words(words[:6], is_noise(standout))])
            side_name = ""
    return PageTable(["where", "writer", "top words"], rows)


def _writer_values_table(why: AttentionReasons) -> PageTable:
    """Return what each writer adds through the head's values."""
    scale = largest([value for _, value in why.value])
    rows: list[list[PageCell]] = [[name, Bar.signed(value, scale)] for name, value in why.value]
    return PageTable(["writer", "#nats"], rows)


def _writers_table(why: AttentionReasons) -> PageTable:
    """Return the strongest writers of all sides in one table, for viewers without graphics."""
    sides: list[Side] = [side for side in SIDES if why.side(side)]
    columns: list[PageCell] = []
    for side in sides:
        columns += [SIDES[side], "#nats" if side == "value" else "#score"]
    rows: list[list[PageCell]] = []
    for writers in zip_longest(*map(why.side, sides)):
        row: list[PageCell] = []
        for writer in writers:
            row += ["", ""] if writer is None else [writer[0], signed(writer[1])]
        rows.append(row)
    return PageTable(columns, rows)


def words_table(e: Explanation, report: HeadReport) -> dict[str, Any]:
    """Return the top words of the head's values and keys at the labels, and of its query at the
    last token.

    For plain text, values are those at the tokens that the head attends to most, in text order;
    keys are omitted.
    """
    positions, labels = e.input.label_positions, e.input.demonstration_labels
    if e.is_plain_text:
        positions, labels = report.positions, (None,) * len(report.positions)
    values, keys, query = [], [], None
    is_any_noise = False
    for _, kind, top_words, standout, rank in words_of(e.input, report):
        words = Words(top_words, is_noise(standout))
        is_any_noise = is_any_noise or words.noise
        if kind == "value":
            values.append((words, str(rank)))
        elif kind == "key":
            keys.append(words)
        else:
            query = words
    rows: list[list[PageCell]] = []
    for position, label, value in zip(positions, labels, values, strict=True):
        rows.append([Chip(e.input.token_names[position], label), str(position), *value])
    for row, words in zip(rows, keys, strict=False):
        row.append(words)
    columns: list[PageCell] = ["token", "#position", "value", f"#rank of own {unit_name(e)}"]
    if not e.is_plain_text:
        columns.append("key")
    last = len(e.input.tokens) - 1
    return {
        "head": str(report.head),
        "table": PageTable(columns, rows, "words"),
        "scrolls": len(rows) > MAX_UNSCROLLED_ROWS,
        "last": Chip(e.input.token_names[last]),
        "position": last,
        "query": query,
        "noise": is_any_noise,
    }


def _similarity(e: Explanation, report: HeadReport) -> dict[str, Any] | None:
    """Return the head's attention scores between each prediction position and each label; None if
    unavailable.

    None also for fewer than two demonstrations; a label that nothing precedes has no row. Each row is
    centered on its mean over the labels of other texts, since softmax is invariant to a constant
    added to all scores of a query. `matching` is how much higher a column scores in rows of its own
    label than in rows of other labels, averaged over columns: a head that prefers one label in all
    rows has 0. A text's own label is left out.
    """
    count = len(e.input.label_positions)
    if e.input.prompt is None or not report.similarity or count < 2:
        return None
    first = max(0, count - MAX_COMPARED)
    positions = np.array([*e.input.prediction_positions, len(e.input.tokens) - 1])
    rows, columns = np.arange(first, count + 1), slice(first, count)
    rows = rows[positions[rows] >= 0]
    labels = np.array(e.input.demonstration_labels)[columns]
    row_labels = np.array(query_labels(e))[rows]
    scores = np.array(report.similarity)
    is_own = np.eye(count + 1, count, dtype=bool)
    means_of_others = np.ma.array(scores, mask=is_own).mean(1, keepdims=True)
    centered = (scores - means_of_others)[rows, columns].tolist()
    texts = [cut(demonstration.text) for demonstration in e.input.prompt.demonstrations]
    texts.append(cut(e.input.prompt.query))
    row_texts = [texts[row] for row in rows]
    grid = ValueGrid(
        f"Attention scores of {report.head} without positions",
        "query \\ key",
        list(map(Chip, texts[columns], labels.tolist())),
        list(zip(map(Chip, row_texts, row_labels.tolist()), centered, strict=True)),
    )
    # Center on all columns of the grid: a mean without the text's own label would make a label
    # preference differ by row.
    relative = scores[rows, columns] - scores[rows, columns].mean(1, keepdims=True)
    left_out = is_own[rows, columns] | (row_labels < 0)[:, None]
    is_same = row_labels[:, None] == labels
    at_same_label = np.ma.array(relative, mask=left_out | ~is_same).mean(0)
    at_other_label = np.ma.array(relative, mask=left_out | is_same).mean(0)
    matching = (at_same_label - at_other_label).compressed()
    mean = float(matching.mean()) if len(matching) else None
    return {"grid": grid, "matching": mean, "n_shown": len(labels), "n": count}


def cut(text: str) -> str:
    """Truncate a text to one short line."""
    text = " ".join(text.split())
    return text if len(text) <= 24 else f"{text[:22].rstrip()} …"
