"""Contents of head sections: the map of all heads, the table of located heads, and a panel for each."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from icl_lens.analyses.explanation import Explanation, is_noise
from icl_lens.analyses.sections import HeadReport
from icl_lens.attribution.reasons import SIDES, WRITER_NAMES, AttentionReasons, Side
from icl_lens.report.html.parts import Bar, Cell, Chip, Grid, HeadMap, Link, Run, Strip, Table, Words, largest
from icl_lens.report.html.sections import contrast_name, join_runs, unit_name
from icl_lens.report.html.templating import label_color, visible
from icl_lens.result.number_format import percent, signed

# Maximum number of rows of words without a scrollbar.
MAX_UNSCROLLED_ROWS = 12
# Maximum number of demonstrations in the similarity panel.
MAX_COMPARED = 16


def explorer(e: Explanation) -> dict[str, Any]:
    """Return the map of all heads, the panels of the located ones, and the data with which the script shows others."""
    positions, labels = e.input.label_positions, e.input.demonstration_labels
    names = ["".join(e.input.token_names[slice(*tokens)]) for tokens in e.input.label_ranges]
    if e.is_plain_text:
        positions = e.all_heads.positions
        names = [e.input.token_names[position] for position in positions]
        labels = (-1,) * len(positions)  # no label's color
    data = {
        "labels": list(map(visible, e.labels)),
        "demos": [
            {"token": visible(name).strip(), "position": position, "label": label}
            for name, position, label in zip(names, positions, labels, strict=True)
        ],
        "attention": [[[round(x, 4) for x in head] for head in layer] for layer in e.all_heads.attention],
        "k": len(e.heads),
        "by": e.score_name,
    }
    return {
        "why": _why(e, e.heads[0]),
        "map": HeadMap(e.all_heads.by(e.settings.by), {report.head for report in e.heads}, f"{e.score_name}, nats"),
        "panels": [_panel(e, report, rank) for rank, report in enumerate(e.heads, 1)],
        "data": data,
    }


def located_table(e: Explanation) -> Table:
    """Return one row per located head: its scores, attention, and what the target loses without this head alone.

    Attention is summed by label; for plain text, the most attended tokens are listed.
    """
    target = e.labels.index(e.target)
    names = {"increase": ["increase"], "contrast": contrast_name(e), "effect": ["effect"], "towers": ["towers"]}
    scores = {by: [one.scores[by] for one in e.heads] for by in e.heads[0].scores}
    bars = [[Bar.signed(score, largest(column)) for score in column] for column in scores.values()]
    shown = [i for i in range(len(e.labels)) if i in e.input.demonstration_labels or i == target]
    shown = [] if e.is_plain_text else shown
    rows: list[list[Cell]] = []
    for report, *values in zip(e.heads, *bars, strict=True):
        attended: list[Cell] = []
        for i in shown:
            attended.append(attention_bar(label_sum(e, report.attention_to(e.input.label_ranges), i), i))
        if e.is_plain_text:
            line: list[Run] = []
            for at, weight in report.top_attended(3):
                line += [" " if line else "", Chip(e.input.token_names[at]), f"\u00a0{weight:.2f}"]
            attended = [line]
        rows.append(
            [
                Link(str(report.head)),
                *values,
                *attended,
                percent(math.exp(report.ablated[target])),
                *([] if "effect" in scores else [signed(e.lost(report.ablated))]),
            ]
        )
    columns: list[Cell] = ["head", *(["#", *names[by], ", nats"] for by in scores)]
    columns += [["#to ", Chip(e.labels[i], i)] for i in shown]
    columns += ["attends most to"] if e.is_plain_text else []
    columns += [["#p(", Chip(e.target, target), ") with head zeroed"]]
    columns += [] if "effect" in scores else [f"#{e.lost_name}, nats"]
    return Table(columns, rows, "located")


def label_sum(e: Explanation, weights: Sequence[float], label: int) -> float:
    """Return the attention to demonstrations summed over those with a label."""
    shares = [weight for weight, i in zip(weights, e.input.demonstration_labels, strict=True) if i == label]
    return math.fsum(shares)


def attention_bar(value: float, label: int) -> Bar:
    """Return attention as a bar in a label's color."""
    return Bar(f"{value:.2f}", value, label_color(label))


def attention_strip(tokens: Sequence[str], weights: Sequence[float], marks: dict[int, int], name: str) -> Strip:
    """Return the last token's attention over the prompt; `marks` are the labels by position."""
    return Strip(f"Attention of {name} from the last token", tokens, weights, largest(weights), marks, attention=True)


def _panel(e: Explanation, report: HeadReport, rank: int) -> dict[str, Any]:
    """Return the contents of a located head's panel."""
    name, marks = str(report.head), e.input.label_at
    reach, farthest = largest(report.position_increases), largest(report.position_contrasts)
    contrast = None
    if e.is_plain_text and report.position_contrasts:
        title = f"{name} against {', '.join(e.scores.compared_with)}, nats by token"
        contrast = Strip(title, e.input.token_names, report.position_contrasts, farthest, {})
    zeroed: list[list[Cell]] = [
        [Chip(label, i), percent(math.exp(before)), percent(math.exp(after)), signed(before - after)]
        for i, (label, before, after) in enumerate(zip(e.labels, e.scores.log_probs, report.ablated, strict=True))
    ]
    return {
        "name": name,
        "rank": rank,
        "n_heads": sum(map(len, e.all_heads.increase)),
        "ranked_by": report.scores,
        "labels": () if e.is_plain_text else e.labels,
        "target": Chip(e.target),
        "attention": attention_strip(e.input.token_names, report.attention, marks, name),
        "increases": Strip(f"{name}, nats by token", e.input.token_names, report.position_increases, reach, marks),
        "reach": reach,
        "against": contrast_name(e),
        "contrast": contrast,
        "contrast_reach": farthest,
        "zeroed": Table([unit_name(e), "#no ablation", "#head zeroed", "#log p lost, nats"], zeroed),
        "words": words_table(e, report),
        "scores": _scores(e, report),
        "why": _why(e, report),
    }


def _why(e: Explanation, report: HeadReport) -> dict[str, Any] | None:
    """Return the writers that contribute most to the head's attention and values, and their pairs."""
    why = report.why
    if why is None:
        return None
    chips = [
        [Chip(e.key_name(position), e.input.label_at.get(position)) for position in positions]
        if len(positions) < 4
        else [Chip(e.keys_name(positions), e.input.label_at[positions[0]])]
        for positions in (why.more, why.less)
    ]
    strongest = largest([value for _, _, value in why.pairs])
    rows = {side: {name: row for row, (name, _) in enumerate(getattr(why, side))} for side in ("query", "key")}
    lines = [
        (rows["query"][one], rows["key"][other], one, other, value, abs(value) / strongest)
        for one, other, value in why.pairs
    ]
    reach = {side: largest([value for _, value in getattr(why, side)]) for side in ("query", "key", "value")}
    values: list[list[Cell]] = [[name, Bar.signed(value, reach["value"])] for name, value in why.value]
    written: list[list[Cell]] = [
        [where if i == 0 else "", writer, Words(words[:6], is_noise(standout))]
        for side, where in SIDES.items()
        for i, (writer, (words, standout)) in enumerate(why.words(side).items())
    ]
    pairs: list[list[Cell]] = [[one, other, signed(value)] for one, other, value in why.pairs]
    return {
        "more": join_runs(chips[0]),
        "less": join_runs(chips[1]),
        "why": why,
        "names": WRITER_NAMES,
        "lines": lines,
        "n_rows": max(len(why.query), len(why.key)),
        "sentence": e.why_sentence(report).replace("(-", "(\u2212"),
        "titles": {
            side: {
                writer: ("(no more than random directions) " if is_noise(standout) else "") + ", ".join(words[:6])
                for writer, (words, standout) in why.words(side).items()
            }
            for side in SIDES
        },
        "words": Table(["where", "writer", "top words"], written) if written else None,
        "pairs": Table(["query writer", "key writer", "#score"], pairs),
        "writers": _writers_table(why),
        "values": Table(["writer", "#nats"], values) if values else None,
    }


def _writers_table(why: AttentionReasons) -> Table:
    """Return the strongest writers of all sides in one table, for viewers without graphics."""
    sides: list[Side] = [side for side in SIDES if why.side(side)]
    columns: list[Cell] = [cell for side in sides for cell in (SIDES[side], "#nats" if side == "value" else "#score")]
    rows: list[list[Cell]] = []
    for row in zip_longest(*map(why.side, sides)):
        rows.append([cell for one in row for cell in (("", "") if one is None else (one[0], signed(one[1])))])
    return Table(columns, rows)


def words_table(e: Explanation, report: HeadReport) -> dict[str, Any]:
    """Return the top words of the head's values and keys at the labels, and of its query at the last token.

    For plain text, values are those at the tokens that the head attends to most, in text order; keys are omitted.
    """
    positions, labels = e.input.label_positions, e.input.demonstration_labels
    if e.is_plain_text:
        positions, labels = report.positions, (None,) * len(report.positions)
    columns = ["token", "#position", "value", f"#rank of own {unit_name(e)}", *([] if e.is_plain_text else ["key"])]
    found = [(kind, Words(words, is_noise(standout)), rank) for _, kind, words, standout, rank in e.words_of(report)]
    values, keys = ([(words, rank) for kind, words, rank in found if kind == one] for one in ("value", "key"))
    rows: list[list[Cell]] = [
        [Chip(e.input.token_names[position], label), str(position), words, str(rank)]
        for position, label, (words, rank) in zip(positions, labels, values, strict=True)
    ]
    if keys:
        rows = [[*row, words] for row, (words, _) in zip(rows, keys, strict=True)]
    last = len(e.input.tokens) - 1
    return {
        "head": str(report.head),
        "table": Table(columns, rows, "words"),
        "scrolls": len(rows) > MAX_UNSCROLLED_ROWS,
        "last": Chip(e.input.token_names[last]),
        "position": last,
        "query": found[-1][1] if found and found[-1][0] == "query" else None,
        "noise": any(words.noise for _, words, _ in found),
    }


def _scores(e: Explanation, report: HeadReport) -> dict[str, Any] | None:
    """Return the head's attention scores between each prediction position and each label; None if unavailable.

    None also for fewer than two demonstrations. Each row is centered on its mean over the labels of other texts, since
    softmax is invariant to a constant added to all scores of a query. `matching` is how much higher a column scores in
    rows of its own label than in rows of other labels, averaged over columns: a head that prefers one label in all
    rows has 0. A text's own label is left out.
    """
    count = len(e.input.label_positions)
    if e.input.prompt is None or not report.similarity or count < 2:
        return None
    rows, shown = np.arange(max(0, count - MAX_COMPARED), count + 1), slice(max(0, count - MAX_COMPARED), count)
    labels, row_labels = np.array(e.input.demonstration_labels)[shown], np.array(e.query_labels)[rows]
    scores = np.array(report.similarity)
    is_own = np.eye(count + 1, count, dtype=bool)
    centered = (scores - np.ma.array(scores, mask=is_own).mean(1, keepdims=True))[rows, shown].tolist()
    texts = [cut(text) for text in (*(one.text for one in e.input.prompt.demonstrations), e.input.prompt.query)]
    grid = Grid(
        f"Attention scores of {report.head} without positions",
        "query \\ key",
        list(map(Chip, texts[shown], labels.tolist())),
        list(zip(map(Chip, texts[rows[0] :], row_labels.tolist()), centered, strict=True)),
    )
    # Center on all shown columns: a mean without the text's own label would make a label preference differ by row.
    relative = scores[rows, shown] - scores[rows, shown].mean(1, keepdims=True)
    left_out = is_own[rows, shown] | (row_labels < 0)[:, None]
    is_same = row_labels[:, None] == labels
    same, other = (np.ma.array(relative, mask=left_out | mask).mean(0) for mask in (~is_same, is_same))
    matching = (same - other).compressed()
    mean = float(matching.mean()) if len(matching) else None
    return {"grid": grid, "matching": mean, "n_shown": len(labels), "n": count}


def cut(text: str) -> str:
    """Truncate a text to one short line."""
    text = " ".join(text.split())
    return text if len(text) <= 24 else f"{text[:22].rstrip()} …"
