"""Render an explanation for the terminal with rich."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from icl_lens.analyses.explanation import sections
from icl_lens.analyses.explanation.reports import HeadReport, first_report, is_noise, words_of
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.explanation.sentences import (
    answer_notes,
    contrast_name,
    demonstrations_note,
    keys_name,
    why_sentence,
)
from icl_lens.analyses.explanation.tables import (
    key_name,
    part_score,
    prompt_pieces,
    shown_demonstrations,
)
from icl_lens.models.active_edits import edits_note
from icl_lens.models.readout import MIN_STANDOUT
from icl_lens.reading.reasons import SIDES, SMALLEST_NAMED, WRITER_NAMES, AttentionReasons
from icl_lens.report.palette import AMBER, SKY
from icl_lens.report.terminal import new_table
from icl_lens.report.view_terminal import QUIET, SectionInTerminal, label_style
from icl_lens.result.number_format import decimal, joined, mean_and_range, percent, signed
from icl_lens.result.view import Label

BAR_WIDTH = 22
# Characters available for label attention next to the increases in an 80-column terminal.
ATTENTION_WIDTH = 41
GAIN, LOSS = SKY, AMBER


def terminal(explanation: Explanation) -> Group:
    """Return the output of `icl-lens explain`."""
    lines: list[RenderableType] = []
    for section in sections.SECTIONS:
        if section.name in SECTION_LINES:
            lines += SECTION_LINES[section.name](explanation)
            continue
        view = section.view(explanation)
        if view is not None:
            title = view.title or section.title_of(explanation)
            lines.append(SectionInTerminal(replace(view, title=title)))
    return Group(*lines)


def _prompt(explanation: Explanation) -> list[RenderableType]:
    """Return the text the model continues, with labels in their colors, and the model's edits."""
    settings = explanation.settings
    text = Text(overflow="fold")
    for piece in prompt_pieces(explanation):
        is_label = isinstance(piece, Label)
        text.append(str(piece), label_style(piece.index) if is_label else None)
    bias = "with" if settings.bias else "without"
    note = f"{settings.final_norm} final norm, {bias} bias"
    title = Text(explanation.model, "bold")
    panel = Panel(text, title=title, subtitle=note, title_align="left", subtitle_align="right")
    edits = [Text(edits_note(explanation.edits), "bold")] if explanation.edits else []
    return [panel, *edits]


def _answer(explanation: Explanation) -> list[RenderableType]:
    """Return the labels' probabilities, and what zeroing the located heads shows."""
    is_plain, has_long_labels = explanation.is_plain_text, bool(explanation.scores.whole_log_probs)
    scores = ["probability", "log-prob (nats)"]
    if has_long_labels:
        scores = ["p", "log p", "scored token", "all tokens" if is_plain else "full label"]
    columns = ["token" if is_plain else "label", *scores, ""]
    table = new_table(
        *columns, left=(0, 3, 5) if has_long_labels else (0, 3), title=explanation.headline
    )
    for column in table.columns[:-1]:
        column.no_wrap = True  # narrow terminals wrap the notes, not the numbers
    for index, label in enumerate(explanation.labels):
        log_prob = explanation.scores.log_probs[index]
        cells = [Text(label, label_style(index)), percent(math.exp(log_prob)), decimal(log_prob, 2)]
        if has_long_labels:
            cells += _whole_label_cells(explanation, index)
        cells.append(", ".join(answer_notes(explanation, label)))
        table.add_row(*cells)
    token, probability = explanation.scores.next_tokens[0]
    remarks = [Text(remark) for remark in explanation.remarks]
    most_probable = Text(f"Most probable token: {token} ({percent(probability)})", QUIET)
    return [table, most_probable, *remarks, Text(explanation.finding, "bold")]


def _whole_label_cells(explanation: Explanation, label: int) -> list[str | Text]:
    """Return the token that scores a label, and log p of the whole label."""
    scores = explanation.scores
    n_tokens = len(scores.spellings[label])
    among = "" if n_tokens == 1 else f" of {n_tokens}"
    return [
        Text(f"{scores.scored_tokens[label]!r}{among}"),
        decimal(scores.whole_log_probs[label], 2),
    ]


def _demonstrations(explanation: Explanation) -> list[RenderableType]:
    if explanation.demonstrations is None:
        return []
    measure = "log-odds" if explanation.scores.compared_with else "log p"
    title = f"{measure} of {explanation.target} lost without each demonstration, nats"
    columns = ("demonstration", "label", "hidden", "keys", "values")
    table = new_table(*columns, left=(0, 1), title=title)
    for lost in shown_demonstrations(explanation):
        style = ""
        if lost["label"]:
            style = label_style(explanation.input.demonstration_labels[lost["place"] - 1])
        text = Text(lost["text"], overflow="ellipsis", no_wrap=True)
        numbers = [signed(lost[way], 2) for way in ("hidden", "keys", "values")]
        table.add_row(text, Text(lost["label"], style), *numbers)
    return [Group(table, Text(demonstrations_note(explanation), QUIET))]


def _layers(explanation: Explanation) -> list[RenderableType]:
    reach = max(map(abs, (*explanation.layers.attn, *explanation.layers.ffn)))
    title = f"What each layer adds to log p({explanation.target}), nats"
    table = new_table("layer", "attention", "", "FFN", "", left=(0, 2, 4), title=title)
    for layer, attn in enumerate(explanation.layers.attn):
        ffn = explanation.layers.ffn[layer]
        cells = [signed(attn, 2), _bar(attn, reach), signed(ffn, 2), _bar(ffn, reach)]
        table.add_row(str(layer), *cells)
    return [table]


def _bar(value: float, reach: float) -> Text:
    """Return a bar scaled to `reach`, in eighths of a character."""
    eighths = round(abs(value) / reach * BAR_WIDTH * 8) if reach else 0
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return Text(bar or "·", GAIN if value >= 0 else LOSS)


def _located(explanation: Explanation) -> list[RenderableType]:
    """Return the located heads, one head's top words, and why it attends where it does."""
    return [_heads(explanation), _words(explanation), *_why(explanation)]


def _all_heads(explanation: Explanation) -> list[RenderableType]:
    """Return which sections are left out; the map of all heads is on the page."""
    return [Text(str(section), QUIET) for section in explanation.left_out]


def _heads(explanation: Explanation) -> RenderableType:
    """Return the located heads with their attention to each label.

    If these columns are too wide, or there are no labels, show the three labels or tokens that each
    head attends to most.
    """
    names = {place: key_name(explanation, place) for place in explanation.input.label_positions}
    width = sum(len(name) + 5 for name in names.values())
    numbers = sections.head_columns(explanation)
    has_column_each = bool(names) and width <= ATTENTION_WIDTH - 10 * max(0, len(numbers) - 3)
    columns: list[str | Text] = ["head"]
    columns += [column.name.replace(" lost", "\nlost") for column in numbers]
    left = (0,) if has_column_each else (0, len(columns))
    if has_column_each:
        for place, name in names.items():
            columns.append(Text(f"→{name}", label_style(explanation.input.label_at[place])))
    else:
        columns.append("labels attended to most" if names else "attends most to")
    title = f"Heads by {explanation.settings.by}, nats, with attention from the last token"
    table = new_table(*columns, left=left, title=title)
    for place, report in enumerate(explanation.heads):
        values = [signed(column.values[place]) for column in numbers]
        weights = report.attention_to(explanation.input.label_ranges)
        attention = [_attention_text(weight) for weight in weights]
        if not has_column_each:
            attention = [_most_attended_text(explanation, report, list(names.values()), weights)]
        table.add_row(str(report.head), *values, *attention)
    notes = [Text(note, QUIET) for note in sections.head_notes(explanation)]
    if explanation.scores.compared_with:
        notes.append(Text(explanation.verdict))
    return Group(table, *notes)


def _attention_text(weight: float) -> Text:
    """Return an attention weight, large ones bold and small ones dim."""
    style = "bold" if weight >= 0.25 else "" if weight >= 0.05 else QUIET
    return Text(f"{weight:.2f}", style)


def _most_attended_text(
    explanation: Explanation, report: HeadReport, names: Sequence[str], weights: Sequence[float]
) -> Text:
    """Return the three labels, or else tokens, that a head attends to most, with their weights."""
    attended = sorted(zip(names, weights, strict=True), key=lambda pair: -pair[1])[:3]
    if not attended:
        for place, weight in report.top_attended(3):
            attended.append((f"{explanation.input.token_names[place]}@{place}", weight))
    return Text("  ".join(f"{name} {weight:.2f}" for name, weight in attended))


def _contrast_column(explanation: Explanation) -> list[str]:
    """Return the name of the contrast column; none without tokens to compare with."""
    return [contrast_name(explanation)] if explanation.scores.compared_with else []


def _parts(explanation: Explanation) -> list[RenderableType]:
    by = part_score(explanation)
    columns = ["head", "position", "token", "increase", *_contrast_column(explanation)]
    table = new_table(*columns, left=(0, 2), title=f"(Head, position) parts by {by}, nats")
    for part in explanation.subheads.largest[: explanation.settings.k]:
        token = Text(part.token, label_style(explanation.input.label_at.get(part.position)))
        contrast = [] if part.contrast is None else [signed(part.contrast)]
        table.add_row(str(part.head), str(part.position), token, signed(part.increase), *contrast)
    parts = explanation.subheads
    note = f"all {parts.n_parts:,} parts evaluated; the result is exact"
    if parts.certified:
        evaluated = f"{parts.n_exact:,} of {parts.n_parts:,} parts evaluated"
        note = f"{evaluated}; the result is exact and certified"
    return [table, Text(note, QUIET)]


def _words(explanation: Explanation) -> RenderableType:
    report = first_report(explanation)
    columns = ("position", "token", "part", "standout", "top words")
    table = new_table(*columns, left=(0, 1, 2, 4), title=f"Top words of {report.head}")
    for position, kind, words, standout, _ in words_of(explanation.input, report):
        token = Text(
            explanation.input.token_names[position],
            label_style(explanation.input.label_at.get(position)),
        )
        listed = Text(
            ", ".join(word.strip() for word in words), QUIET if is_noise(standout) else ""
        )
        table.add_row(
            str(position), token, kind, "" if standout is None else decimal(standout, 1), listed
        )
    note = (
        "standout: how far the first word's score exceeds that of random directions, in standard deviations. Below "
        f"{MIN_STANDOUT:.0f}, the words are no better than those of random directions."
    )
    return Group(table, Text(note, QUIET))


def _why(explanation: Explanation) -> list[RenderableType]:
    """Return the writers that contribute most to one head's attention and to what its values carry."""
    report = first_report(explanation)
    why = report.why
    if why is None:
        return []
    more, less = keys_name(explanation, why.more), keys_name(explanation, why.less)
    # With labels, `more` are the answer's, even if the head scores the others higher.
    compared = "above" if why.score_difference >= 0 else "below"
    columns, sides = ["at the last token", "score", "at the keys", "score"], [why.query, why.key]
    if why.value:
        columns += ["value", "nats"]
        sides.append(why.value)
    title = f"Why {report.head} scores {more} {compared} {less}"
    table = new_table(*columns, left=(0, 2, 4), title=title)
    for writers in zip_longest(*sides):
        cells = []
        for writer in writers:
            cells += ["", ""] if writer is None else [writer[0], signed(writer[1])]
        table.add_row(*cells)
    sentence, note = Text(why_sentence(explanation, report)), Text(_why_note(why), QUIET)
    words = _writer_words(why)
    return [Group(table, sentence, note, *([words] if words.row_count else []))]


def _why_note(why: AttentionReasons) -> str:
    """Return how the columns of scores are to be read, and the largest pairs."""
    pairs = []
    for query_writer, key_writer, score in why.pairs[:3]:
        if abs(score) >= SMALLEST_NAMED:
            pairs.append(f"{query_writer} × {key_writer} {signed(score, 2)}")
    note = (
        f"Each score column sums to the difference {signed(why.score_difference, 2)} over all "
        f"{why.n_writers} writers ({WRITER_NAMES})."
    )
    if pairs:
        note += f" Largest pairs of query and key writers shown: {joined(pairs)}."
    if why.value:
        note += f" Values: {'exact' if why.value_is_exact else 'first-order'} parts."
    return note


def _writer_words(why: AttentionReasons) -> Table:
    """Return the top words of what writers wrote; a side is named in its first row only."""
    title = "Contributions of these writers, in words"
    table = new_table("", "writer", "standout", "top words", left=(0, 1, 3), title=title)
    for side, name in SIDES.items():
        side_name = name
        for writer, (words, standout) in why.words(side).items():
            style = QUIET if is_noise(standout) else ""
            top_words = Text(", ".join(word.strip() for word in words[:6]), style)
            table.add_row(side_name, writer, decimal(standout, 1), top_words)
            side_name = ""
    return table


def _removal(explanation: Explanation) -> list[RenderableType]:
    ablation = explanation.ablation
    unit = "token" if explanation.is_plain_text else "label"
    columns = ("no ablation", "located heads zeroed", f"{len(ablation.heads)} random heads zeroed")
    table = new_table(
        unit, *columns, title=f"Zeroing {', '.join(map(str, ablation.heads))} at the last position"
    )
    for i, label in enumerate(explanation.labels):
        table.add_row(
            Text(label, label_style(i)),
            percent(math.exp(explanation.scores.log_probs[i])),
            percent(math.exp(ablation.located[i])),
            mean_and_range([math.exp(draw[i]) for draw in ablation.random]),
        )
    note = (
        f"random: mean (range) over {len(ablation.random)} sets. "
        "Increases are not additive: parts need not sum to the whole."
    )
    return [table, Text(note, QUIET)]


SECTION_LINES: dict[str, Callable[[Explanation], list[RenderableType]]] = {
    "prompt": _prompt,
    "answer": _answer,
    "layers": _layers,
    "located": _located,
    "heads": _all_heads,
    "demonstrations": _demonstrations,
    "removal": _removal,
    "parts": _parts,
}
"""Sections that the terminal draws in a way of its own."""
