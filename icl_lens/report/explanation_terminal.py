"""Render an explanation for the terminal with rich."""

import math
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from icl_lens.analyses.explanation import Explanation, is_noise
from icl_lens.attribution.reasons import SIDES, WRITER_NAMES
from icl_lens.models.readout import MIN_STANDOUT
from icl_lens.report.html.sections import prompt_pieces
from icl_lens.report.palette import AMBER, GREEN, ORANGE, PINK, SKY, YELLOW
from icl_lens.report.terminal import new_table
from icl_lens.result.number_format import mean_and_range, percent

BAR_WIDTH = 22
# Characters available for label attention next to the increases in an 80-column terminal.
ATTENTION_WIDTH = 41
LABEL_STYLES = tuple(f"bold {color}" for color in (SKY, AMBER, GREEN, PINK, YELLOW, ORANGE))
GAIN, LOSS, QUIET = SKY, AMBER, "dim"


def terminal(explanation: Explanation) -> Group:
    """Return the output of `icl-lens explain`."""
    return Group(
        _prompt(explanation),
        *([Text(explanation.edits_note, "bold")] if explanation.edits else []),
        _answer(explanation),
        Text(explanation.finding, "bold"),
        _layers(explanation),
        _heads(explanation),
        _subheads(explanation),
        _words(explanation),
        *_why(explanation),
        *[Text(str(one), QUIET) for one in explanation.left_out],
        *_demonstrations(explanation),
        _ablation(explanation),
    )


def _label_style(index: int | None) -> str:
    return "" if index is None else LABEL_STYLES[index % len(LABEL_STYLES)]


def _prompt(explanation: Explanation) -> Panel:
    """Return the text the model continues, with labels in their colors."""
    settings = explanation.settings
    text = Text(overflow="fold")
    for piece, chip in prompt_pieces(explanation):
        text.append(piece, None if chip is None else _label_style(chip.label))
    note = f"{settings.final_norm} final norm, {'with' if settings.bias else 'without'} bias"
    title = Text(explanation.model, "bold")
    return Panel(text, title=title, subtitle=note, title_align="left", subtitle_align="right")


def _answer(explanation: Explanation) -> RenderableType:
    is_plain, has_long_labels = explanation.is_plain_text, bool(explanation.scores.whole_log_probs)
    scores = ["probability", "log-prob (nats)"]
    if has_long_labels:
        scores = ["p", "log p", "scored token", "all tokens" if is_plain else "full label"]
    columns = ["token" if is_plain else "label", *scores, ""]
    table = new_table(*columns, left=(0, 3, 5) if has_long_labels else (0, 3), title=explanation.headline)
    for column in table.columns[:-1]:
        column.no_wrap = True  # narrow terminals wrap the notes, not the numbers
    for i, label in enumerate(explanation.labels):
        long_label_cells: list[Text | str] = []
        if has_long_labels:
            tokens = explanation.scores.spellings[i]
            of_tokens = "" if len(tokens) == 1 else f" of {len(tokens)}"
            long_label_cells = [Text(f"{explanation.scores.scored_tokens[i]!r}{of_tokens}")]
            long_label_cells += [f"{explanation.scores.whole_log_probs[i]:.2f}"]
        predicted = "predicted" if explanation.scores.predicts_label else "most probable label"
        notes = {
            predicted: label == explanation.predicted and not is_plain,
            "explained": label == explanation.target,
            "no choice here": label in explanation.shown_only,
        }
        table.add_row(
            Text(label, _label_style(i)),
            percent(math.exp(explanation.scores.log_probs[i])),
            f"{explanation.scores.log_probs[i]:.2f}",
            *long_label_cells,
            ", ".join(note for note, is_so in notes.items() if is_so),
        )
    token, probability = explanation.scores.next_tokens[0]
    remarks = [Text(remark) for remark in explanation.remarks]
    return Group(table, Text(f"Most probable token: {token} ({percent(probability)})", QUIET), *remarks)


def _demonstrations(explanation: Explanation) -> list[RenderableType]:
    if explanation.demonstrations is None:
        return []
    what = "log-odds" if explanation.scores.compared_with else "log p"
    title = f"{what} of {explanation.target} lost without each demonstration, nats"
    table = new_table("demonstration", "label", "hidden", "keys", "values", left=(0, 1), title=title)
    for row in explanation.shown_demonstrations:
        style = _label_style(explanation.input.demonstration_labels[row["place"] - 1]) if row["label"] else ""
        text = Text(row["text"], overflow="ellipsis", no_wrap=True)
        table.add_row(text, Text(row["label"], style), *(f"{row[way]:+z.2f}" for way in ("hidden", "keys", "values")))
    return [Group(table, Text(explanation.demonstrations_note, QUIET))]


def _layers(explanation: Explanation) -> RenderableType:
    reach = max(map(abs, (*explanation.layers.attn, *explanation.layers.ffn)))
    title = f"What each layer adds to log p({explanation.target}), nats"
    table = new_table("layer", "attention", "", "FFN", "", left=(0, 2, 4), title=title)
    for layer, (attn, ffn) in enumerate(zip(explanation.layers.attn, explanation.layers.ffn, strict=True)):
        table.add_row(str(layer), f"{attn:+z.2f}", _bar(attn, reach), f"{ffn:+z.2f}", _bar(ffn, reach))
    return table


def _bar(value: float, reach: float) -> Text:
    """Return a bar scaled to `reach`, in eighths of a character."""
    eighths = round(abs(value) / reach * BAR_WIDTH * 8) if reach else 0
    blocks = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return Text(blocks or "·", GAIN if value >= 0 else LOSS)


def _heads(explanation: Explanation) -> RenderableType:
    """Return the located heads with their attention to each label.

    If these columns are too wide, or there are no labels, show the three labels or tokens that each head attends to
    most.
    """
    names = {position: explanation.key_name(position) for position in explanation.input.label_positions}
    columns: list[str | Text] = ["head", *_contrast_column(explanation), "increase"]
    measured = [by for by in ("effect", "towers") if explanation.all_heads.by(by)]
    columns += measured or [explanation.lost_name]
    n_scores = len(columns)
    labels_fit = sum(len(name) + 5 for name in names.values()) <= ATTENTION_WIDTH
    if names and labels_fit:
        columns += [Text(f"→ {name}", _label_style(explanation.input.label_at[at])) for at, name in names.items()]
    else:
        columns += ["labels attended to most" if names else "attends most to"]
    title = f"Heads by {explanation.settings.by}, nats, with attention from the last token"
    table = new_table(*columns, left=(0,) if names and labels_fit else (0, n_scores), title=title)
    for report in explanation.heads:
        weights = list(zip(names.values(), report.attention_to(explanation.input.label_ranges), strict=True))
        if names and labels_fit:
            attention = [
                Text(f"{weight:.2f}", "bold" if weight >= 0.25 else "" if weight >= 0.05 else QUIET)
                for _, weight in weights
            ]
        else:
            top = sorted(weights, key=lambda one: -one[1])[:3]
            top = top or [
                (f"{explanation.input.token_names[at]}@{at}", weight) for at, weight in report.top_attended(3)
            ]
            attention = [Text("  ".join(f"{name} {weight:.2f}" for name, weight in top))]
        scores = list(report.scores.values())
        scores += [] if measured else [explanation.lost(report.ablated)]
        table.add_row(str(report.head), *(f"{score:+z.3f}" for score in scores), *attention)
    what = (
        f"the log-odds of {explanation.target}" if explanation.scores.compared_with else f"log p({explanation.target})"
    )
    notes = []
    if not measured:
        lost = f"{explanation.lost_name}: {what} lost with this head alone zeroed at the last position"
        notes.append(f"{lost}; positive: the head was needed")
    notes += [explanation.towers_note] if explanation.all_heads.towers else []
    return Group(
        table,
        *(Text(note, QUIET) for note in notes),
        *([Text(explanation.verdict)] if explanation.scores.compared_with else []),
    )


def _contrast_column(explanation: Explanation) -> list[str]:
    """Return the name of the contrast column; none without tokens to compare with."""
    others = ", ".join(explanation.scores.compared_with)
    return [f"against {others}" if explanation.is_plain_text else "contrast"] if others else []


def _subheads(explanation: Explanation) -> RenderableType:
    by = explanation.part_score
    columns = ["head", "position", "token", "increase", *_contrast_column(explanation)]
    table = new_table(*columns, left=(0, 2), title=f"(Head, position) parts by {by}, nats")
    for part in explanation.subheads.largest[: explanation.settings.k]:
        token = Text(part.token, _label_style(explanation.input.label_at.get(part.position)))
        contrast = [] if part.contrast is None else [f"{part.contrast:+z.3f}"]
        table.add_row(str(part.head), str(part.position), token, f"{part.increase:+z.3f}", *contrast)
    found = explanation.subheads
    note = (
        f"{found.n_exact} of {found.n_parts} parts evaluated; the result is exact and certified"
        if found.certified
        else f"all {found.n_parts} parts evaluated; the result is exact"
    )
    return Group(table, Text(note, QUIET))


def _words(explanation: Explanation) -> RenderableType:
    report = explanation.heads[0]
    columns = ("position", "token", "part", "standout", "top words")
    table = new_table(*columns, left=(0, 1, 2, 4), title=f"Top words of {report.head}")
    for position, kind, words, standout, _ in explanation.words_of(report):
        token = Text(explanation.input.token_names[position], _label_style(explanation.input.label_at.get(position)))
        listed = Text(", ".join(word.strip() for word in words), QUIET if is_noise(standout) else "")
        table.add_row(str(position), token, kind, "" if standout is None else f"{standout:.1f}", listed)
    note = (
        "standout: how far the first word's score exceeds that of random directions, in standard deviations. Below "
        f"{MIN_STANDOUT:.0f}, the words are no better than those of random directions."
    )
    return Group(table, Text(note, QUIET))


def _why(explanation: Explanation) -> list[RenderableType]:
    """Return the writers that contribute most to one head's attention and to what its values carry."""
    chosen = [one for one in explanation.heads if str(one.head) == explanation.settings.why]
    report = (chosen or explanation.heads)[0]
    why = report.why
    if why is None:
        return []
    more, less = explanation.keys_name(why.more), explanation.keys_name(why.less)
    # With labels, `more` are the answer's, even if the head attends more to the others.
    verb = "attends to" if why.score_difference >= 0 else "does not attend to"
    columns = ["at the last token", "score", "at the keys", "score", *(["value", "nats"] if why.value else [])]
    table = new_table(*columns, left=(0, 2, 4), title=f"Why {report.head} {verb} {more} rather than {less}")
    for row in zip_longest(why.query, why.key, *([why.value] if why.value else [])):
        table.add_row(*(cell for one in row for cell in (("", "") if one is None else (one[0], f"{one[1]:+z.3f}"))))
    pairs = ", ".join(f"{one} × {other} {value:+z.2f}" for one, other, value in why.pairs[:3])
    note = (
        f"Each score column sums to the difference {why.score_difference:+z.2f} over all {why.n_writers} writers "
        f"({WRITER_NAMES}). Largest pairs of query and key writers shown: {pairs}."
    )
    if why.value:
        note += f" Values: {'exact' if why.value_is_exact else 'first-order'} parts."
    title = "Contributions of these writers, in words"
    words = new_table("", "writer", "standout", "top words", left=(0, 1, 3), title=title)
    for side, name in SIDES.items():
        for writer, (found, standout) in why.words(side).items():
            listed = Text(", ".join(word.strip() for word in found[:6]), QUIET if is_noise(standout) else "")
            words.add_row(name, writer, f"{standout:.1f}", listed)
            name = ""  # the side is named only in its first row
    in_words = [words] if words.row_count else []
    return [Group(table, Text(explanation.why_sentence(report)), Text(note, QUIET), *in_words)]


def _ablation(explanation: Explanation) -> RenderableType:
    ablation = explanation.ablation
    unit = "token" if explanation.is_plain_text else "label"
    columns = ("no ablation", "located heads zeroed", f"{len(ablation.heads)} random heads zeroed")
    table = new_table(unit, *columns, title=f"Zeroing {', '.join(map(str, ablation.heads))} at the last position")
    for i, label in enumerate(explanation.labels):
        table.add_row(
            Text(label, _label_style(i)),
            percent(math.exp(explanation.scores.log_probs[i])),
            percent(math.exp(ablation.located[i])),
            mean_and_range([math.exp(draw[i]) for draw in ablation.random]),
        )
    note = (
        f"random: mean (range) over {len(ablation.random)} sets. "
        "Increases are not additive: parts need not sum to the whole."
    )
    return Group(table, Text(note, QUIET))
