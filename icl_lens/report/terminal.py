"""Render an explanation for the terminal with rich."""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from icl_lens.attribution.reasons import Side
from icl_lens.models.readout import MIN_STANDOUT
from icl_lens.report.findings import Findings, HeadReport, is_noise
from icl_lens.report.number_format import percent
from icl_lens.report.palette import AMBER, GREEN, ORANGE, PINK, SKY, YELLOW

BAR_WIDTH = 22
# Characters available for label attention next to the increases in an 80-column terminal.
ATTENTION_WIDTH = 44
LABEL_STYLES = tuple(f"bold {color}" for color in (SKY, AMBER, GREEN, PINK, YELLOW, ORANGE))
GAIN, LOSS, QUIET = SKY, AMBER, "dim"
WRITTEN: dict[Side, str] = {"query": "at the last token", "key": "at the keys", "value": "in the values"}


def render(explanation: Findings) -> Group:
    """Return the output of `icl-lens explain`."""
    return Group(
        _title(explanation),
        _answer(explanation),
        _layers(explanation),
        _heads(explanation),
        _subheads(explanation),
        _words(explanation),
        *_why(explanation),
        _ablation(explanation),
    )


def _label_style(index: int) -> str:
    return LABEL_STYLES[index % len(LABEL_STYLES)] if index >= 0 else ""


def _title(explanation: Findings) -> RenderableType:
    text = _prompt(explanation)
    settings = explanation.settings
    note = f"{settings.final_norm} final norm, {'with' if settings.bias else 'without'} bias"
    title = Text(explanation.model, "bold")
    return Panel(text, title=title, subtitle=note, title_align="left", subtitle_align="right")


def _prompt(explanation: Findings) -> Text:
    """Return the text the model continues, with labels in their colors."""
    if explanation.prompt is None:
        return Text(explanation.text, overflow="fold")
    rendered = explanation.template.render(explanation.prompt)
    text = Text(rendered.text, overflow="fold")
    for (start, stop), demonstration in zip(rendered.label_spans, explanation.prompt.demonstrations, strict=True):
        text.stylize(_label_style(explanation.labels.index(demonstration.label)), start, stop)
    return text


def _answer(explanation: Findings) -> RenderableType:
    free, several = explanation.is_plain_text, bool(explanation.whole_label_log_probs)
    more = ["scored token", "full label" if not free else "all tokens"] if several else []
    unit = "token" if free else "label"
    table = _table(
        explanation.headline, unit, *(("p", "log p") if several else ("probability", "log-prob (nats)")), *more, ""
    )
    for column in table.columns[:-1]:
        column.no_wrap = True  # narrow terminals wrap the notes, not the numbers
    for i, label in enumerate(explanation.labels):
        notes = {"predicted": None if free else explanation.predicted, "explained": explanation.target}
        table.add_row(
            Text(label, _label_style(i)),
            percent(math.exp(explanation.label_log_probs[i])),
            f"{explanation.label_log_probs[i]:.2f}",
            *(_whole(explanation, i) if several else []),
            ", ".join(note for note, which in notes.items() if which == label),
        )
    token, probability = explanation.next_tokens[0]
    remarks = [Text(remark) for remark in explanation.remarks]
    return Group(table, Text(f"Most probable token: {token} ({percent(probability)})", QUIET), *remarks)


def _whole(explanation: Findings, i: int) -> list[Text | str]:
    spelling = explanation.label_token_names[i]
    of = "" if len(spelling) == 1 else f" of {len(spelling)}"
    return [Text(f"{spelling[explanation.n_shared_tokens]!r}{of}"), f"{explanation.whole_label_log_probs[i]:.2f}"]


def _layers(explanation: Findings) -> RenderableType:
    reach = max(map(abs, (*explanation.layer_attn, *explanation.layer_ffn)))
    table = _table(f"What each layer adds to log p({explanation.target}), nats", "layer", "attention", "", "FFN", "")
    for layer, (attn, ffn) in enumerate(zip(explanation.layer_attn, explanation.layer_ffn, strict=True)):
        table.add_row(str(layer), f"{attn:+.2f}", _bar(attn, reach), f"{ffn:+.2f}", _bar(ffn, reach))
    return table


def _bar(value: float, reach: float) -> Text:
    """Return a bar scaled to `reach`, in eighths of a character."""
    eighths = round(abs(value) / reach * BAR_WIDTH * 8) if reach else 0
    blocks = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    return Text(blocks or "·", GAIN if value >= 0 else LOSS)


def _heads(explanation: Findings) -> RenderableType:
    if explanation.is_plain_text:
        return _free_heads(explanation)
    names = [
        Text(f"→ {explanation.labels[label]}@{position}", _label_style(label))
        for position, label in zip(explanation.label_positions, explanation.demonstration_labels, strict=True)
    ]
    if sum(len(name) + 3 for name in names) > ATTENTION_WIDTH:
        return _many_labels(explanation, [str(name).removeprefix("→ ") for name in names])
    table = _table(_heads_title(explanation), *_columns(explanation), *names)
    for report in explanation.heads:
        weights = report.label_attention(explanation.label_positions)
        table.add_row(*_increases(report), *[_weight(weight) for weight in weights])
    return Group(table, *_verdict(explanation))


def _many_labels(explanation: Findings, names: Sequence[str]) -> RenderableType:
    """Return the located heads with the labels they attend to most, for prompts with many demonstrations."""
    table = _table(_heads_title(explanation), *_columns(explanation), "labels attended to most")
    for report in explanation.heads:
        weights = report.label_attention(explanation.label_positions)
        most = sorted(range(len(names)), key=lambda i: -weights[i])[:3]
        table.add_row(*_increases(report), Text("  ".join(f"{names[i]} {weights[i]:.2f}" for i in most)))
    return Group(table, *_verdict(explanation))


def _free_heads(explanation: Findings) -> RenderableType:
    table = _table(_heads_title(explanation), *_columns(explanation), "attends most to")
    for report in explanation.heads:
        attended = [
            f"{explanation.shown_tokens[position]}@{position} {weight:.2f}"
            for position, weight in report.top_attended(3)
        ]
        table.add_row(*_increases(report), Text("  ".join(attended)))
    return Group(table, *_verdict(explanation))


def _heads_title(explanation: Findings) -> str:
    return f"Heads by {explanation.settings.by}, nats, with attention from the last token"


def _columns(explanation: Findings) -> list[str]:
    contrast = [contrast_column(explanation)] if explanation.compared_with else []
    return ["head", "increase", *contrast, *(["effect"] if explanation.head_effects else [])]


def contrast_column(explanation: Findings) -> str:
    """Return the name of the contrast column."""
    return f"against {', '.join(explanation.compared_with)}" if explanation.is_plain_text else "contrast"


def _increases(report: HeadReport) -> list[str]:
    return [str(report.head), *(f"{score:+.3f}" for score in report.scores.values())]


def _verdict(explanation: Findings) -> list[Text]:
    return [Text(explanation.verdict)] if explanation.compared_with else []


def _weight(weight: float) -> Text:
    return Text(f"{weight:.2f}", "bold" if weight >= 0.25 else "" if weight >= 0.05 else QUIET)


def _subheads(explanation: Findings) -> RenderableType:
    more = [contrast_column(explanation)] if explanation.compared_with else []
    by = "contrast" if explanation.settings.by == "contrast" else "increase"
    table = _table(f"(Head, position) parts by {by}, nats", "head", "position", "token", "increase", *more)
    by_position = dict(zip(explanation.label_positions, explanation.demonstration_labels, strict=True))
    for part in explanation.subheads[: explanation.settings.k]:
        style = _label_style(by_position.get(part.position, -1))
        contrast = [] if part.contrast is None else [f"{part.contrast:+.3f}"]
        table.add_row(str(part.head), str(part.position), Text(part.token, style), f"{part.increase:+.3f}", *contrast)
    note = (
        f"{explanation.n_exact} of {explanation.n_parts} parts evaluated; the result is exact and certified"
        if explanation.certified
        else f"all {explanation.n_parts} parts evaluated; the result is exact"
    )
    return Group(table, Text(note, QUIET))


def _words(explanation: Findings) -> RenderableType:
    report = explanation.heads[0]
    table = _table(f"Top words of {report.head}", "position", "token", "part", "standout", "top words")
    by_position = dict(zip(explanation.label_positions, explanation.demonstration_labels, strict=True))
    for position, kind, words, standout, _ in explanation.words_of(report):
        token = Text(explanation.shown_tokens[position], _label_style(by_position.get(position, -1)))
        listed = Text(", ".join(word.strip() for word in words), QUIET if is_noise(standout) else "")
        table.add_row(str(position), token, kind, "" if standout is None else f"{standout:.1f}", listed)
    note = (
        "standout: how far the first word's score exceeds that of random directions, in standard deviations. Below "
        f"{MIN_STANDOUT:.0f}, the words are no better than those of random directions."
    )
    return Group(table, Text(note, QUIET))


def _why(explanation: Findings) -> list[RenderableType]:
    """Return the writers that contribute most to one head's attention and to what its values carry."""
    chosen = [one for one in explanation.heads if str(one.head) == explanation.settings.why] or explanation.heads[:1]
    why = chosen[0].why
    if why is None:
        return []
    report = chosen[0]
    more, less = explanation.keys_name(why.more), explanation.keys_name(why.less)
    # Keys and values can be those of the answer's label although the head attends to the others.
    verb = "attends to" if why.score_difference >= 0 else "does not attend to"
    columns = ["at the last token", "score", "at the keys", "score", *(["value", "nats"] if why.value else [])]
    table = _table(f"Why {report.head} {verb} {more} rather than {less}", *columns)
    for row in zip_longest(why.query, why.key, why.value, fillvalue=None):
        cells = [cell for one in row[: len(columns) // 2] for cell in (("", "") if one is None else _writer(one))]
        table.add_row(*cells)
    pairs = ", ".join(f"{one} × {other} {value:+.2f}" for one, other, value in why.pairs[:3])
    note = (
        f"Each score column sums to the difference {why.score_difference:+.2f} over all {why.n_writers} writers (L: "
        f"heads, F: FFNs). Largest pairs of query and key writers shown: {pairs}."
    )
    if why.value:
        note += f" Values: {'exact' if why.value_is_exact else 'first-order'} parts."
    words = _table("Contributions of these writers, in words", "", "writer", "standout", "top words")
    for side, name in WRITTEN.items():
        for writer, (found, standout) in why.words(side).items():
            listed = Text(", ".join(word.strip() for word in found[:6]), QUIET if is_noise(standout) else "")
            words.add_row(name, writer, f"{standout:.1f}", listed)
            name = ""
    in_words = [words] if words.row_count else []
    return [Group(table, Text(explanation.why_sentence(report)), Text(note, QUIET), *in_words)]


def _writer(one: tuple[str, float]) -> tuple[str, str]:
    return one[0], f"{one[1]:+.3f}"


def _ablation(explanation: Findings) -> RenderableType:
    ablation = explanation.ablation
    names = ", ".join(map(str, ablation.heads))
    table = _table(
        f"Zeroing {names}",
        "token" if explanation.is_plain_text else "label",
        "no ablation",
        "located heads zeroed",
        f"{len(ablation.heads)} random heads zeroed",
    )
    for i, label in enumerate(explanation.labels):
        draws = [math.exp(draw[i]) for draw in ablation.random]
        spread = f"{percent(_mean(draws))} ({percent(min(draws))}–{percent(max(draws))})"
        table.add_row(
            Text(label, _label_style(i)),
            percent(math.exp(explanation.label_log_probs[i])),
            percent(math.exp(ablation.located[i])),
            spread,
        )
    note = (
        f"random: mean (range) over {len(ablation.random)} sets. "
        "Increases are not additive: parts need not sum to the whole."
    )
    return Group(table, Text(note, QUIET))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _table(title: str, *columns: str | Text) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    words = (
        "label",
        "head",
        "token",
        "part",
        "top words",
        "scored token",
        "attends most to",
        "labels attended to most",
        "at the keys",
        "value",
        "writer",
        "",
    )
    for i, column in enumerate(columns):
        numeric = str(column) not in words and i > 0
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table
