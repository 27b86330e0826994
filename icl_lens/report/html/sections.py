"""Contents of page sections that are not about single heads: prompt, answer, layers, ablation, parts, configuration."""

import math
from collections.abc import Sequence
from typing import Any

from icl_lens.analyses.explanation import Explanation
from icl_lens.report.html.parts import Bar, Cell, Chip, Dots, Run, Table, largest
from icl_lens.report.html.templating import label_color
from icl_lens.result.number_format import mean_and_range, percent, signed
from icl_lens.result.view import Label


def label_chips(e: Explanation) -> dict[str, Chip]:
    """Return each label, or scored token, in its color."""
    return {label: Chip(label, i) for i, label in enumerate(e.labels)}


def unit_name(e: Explanation) -> str:
    """Return what a row of a probability table is about: a token for plain text, else a label."""
    return "token" if e.is_plain_text else "label"


def contrast_name(e: Explanation) -> list[Run]:
    """Return the name of the contrast."""
    if not e.is_plain_text:
        return ["contrast"]
    chips = label_chips(e)
    return ["against ", *join_runs([chips[name] for name in e.scores.compared_with])]


def join_runs(chips: Sequence[Run], by: str = ", ") -> list[Run]:
    """Return runs with a separator between them."""
    return [run for chip in chips for run in (by, chip)][1:]


def prompt_pieces(e: Explanation) -> list[tuple[str, Chip | None]]:
    """Return the text the model continues in pieces, each with its chip if it is a label."""
    pieces: list[tuple[str, Chip | None]] = []
    for piece in e.prompt_pieces:
        is_label = isinstance(piece, Label)
        pieces.append((str(piece), Chip(piece.text, piece.index) if is_label else None))
    return pieces


def answer(e: Explanation) -> dict[str, Any]:
    """Return the label probabilities, the next tokens and remarks.

    For labels of several tokens, the table also has the scored token and the full label's log p.
    """
    rows: list[list[Cell]] = []
    has_long_labels = bool(e.scores.whole_log_probs)
    for i, (label, value) in enumerate(zip(e.labels, e.scores.log_probs, strict=True)):
        notes = {
            "predicted" if e.scores.predicts_label else "most probable label": e.predicted == label
            and not e.is_plain_text,
            "correct answer": e.answer == label,
            "explained": e.target == label,
            "compared with": e.is_plain_text and label in e.scores.compared_with,
            "no choice here": label in e.shown_only,
        }
        whole: list[Cell] = []
        if has_long_labels:
            spelling = list(map(Chip, e.scores.spellings[i]))
            among = [" of ", *join_runs(spelling, " ")] if len(spelling) > 1 else []
            whole = [[e.scores.scored_tokens[i], *among], _log_prob_text(e.scores.whole_log_probs[i])]
        rows.append(
            [
                Chip(label, i),
                Bar(percent(math.exp(value)), math.exp(value), label_color(i)),
                _log_prob_text(value),
                *whole,
                ", ".join(note for note, holds in notes.items() if holds),
            ]
        )
    more = ["scored token", "#full label, log p, nats"] if has_long_labels else []
    return {
        "table": Table([unit_name(e), "#probability", "#log p, nats", *more, "note"], rows, "answer"),
        "next_tokens": [(Chip(token), probability) for token, probability in e.scores.next_tokens],
        "remarks": e.remarks,
    }


def demonstrations_table(e: Explanation) -> Table | None:
    """Return what the explained label loses without each demonstration; None if it is not known."""
    if e.demonstrations is None:
        return None
    shown = e.shown_demonstrations
    reach = largest([row["hidden"] for row in shown])
    rows: list[list[Cell]] = [
        [
            row["text"],
            Chip(row["label"], e.input.demonstration_labels[row["place"] - 1]) if row["label"] else "",
            Bar.signed(row["hidden"], reach),
            signed(row["keys"]),
            signed(row["values"]),
        ]
        for row in shown
    ]
    return Table(["demonstration", "label", "#hidden, nats", "#keys", "#values"], rows, "answer")


def _log_prob_text(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def layer_charts(e: Explanation, *others: Explanation) -> list[dict[str, Any]]:
    """Return bars by layer, attention above FFN, on a scale shared with other explanations."""
    values = [0.0, *(value for side in (e, *others) for value in (*side.layers.attn, *side.layers.ffn))]
    low, high = min(values), max(values)
    high = high if high > low else 1.0
    span = high - low
    # Omit ends of the scale whose labels would overlap that of zero.
    ticks = [0.0, *(value for value in (low, high) if abs(value) > 0.12 * span)]
    charts = {"attention": e.layers.attn, "FFN": e.layers.ffn}
    return [{"name": name, "bars": bars, "high": high, "span": span, "ticks": ticks} for name, bars in charts.items()]


def layers_table(e: Explanation) -> Table:
    """Return the values of the layers' bars, with their contrasts."""
    columns: list[Cell] = ["#layer", "#attention, nats", "#FFN, nats"]
    values = [e.layers.attn, e.layers.ffn]
    if e.scores.compared_with:
        columns += [[f"#{name} ", *contrast_name(e), ", nats"] for name in ("attention", "FFN")]
        values += [e.layers.attn_contrast, e.layers.ffn_contrast]
    rows = [[str(i), *map(signed, row)] for i, row in enumerate(zip(*values, strict=True))]
    return Table(columns, rows)


def removal_table(e: Explanation) -> Table:
    """Return label probabilities with the located heads zeroed, compared with each set of random heads."""
    rows: list[list[Cell]] = []
    for i, label in enumerate(e.labels):
        before, after = math.exp(e.scores.log_probs[i]), math.exp(e.ablation.located[i])
        draws = [math.exp(draw[i]) for draw in e.ablation.random]
        dots = Dots(before, after, draws)
        rows.append([Chip(label, i), percent(before), percent(after), mean_and_range(draws), dots])
    columns = ["#no ablation", "#located zeroed", f"#{len(e.ablation.heads)} random zeroed", "0 – 100%"]
    return Table([unit_name(e), *columns], rows, "removal")


def parts_table(e: Explanation) -> Table:
    """Return the (head, position) parts with the largest contrast, or increase if heads are ranked by it."""
    reach = largest([part.increase for part in e.subheads.largest])
    rows = [
        [
            str(part.head),
            str(part.position),
            Chip(part.token, e.input.label_at.get(part.position)),
            Bar.signed(part.increase, reach),
            *([] if part.contrast is None else [signed(part.contrast)]),
        ]
        for part in e.subheads.largest
    ]
    more = [["#", *contrast_name(e), ", nats"]] if e.scores.compared_with else []
    return Table(["head", "#position", "token", "#increase, nats", *more], rows)


def configuration(e: Explanation) -> dict[str, str]:
    """Return the settings and versions that the numbers depend on."""
    settings, template = e.settings, e.input.template
    bos = {None: "the tokenizer’s default", True: "forced", False: "omitted"}[settings.prepend_bos]
    others = ", ".join(e.scores.compared_with)
    additive = "additive over parts" if e.scores.contrast_adds_up else "not additive over parts"
    layout = f"{template.demonstration!r}, then {template.query!r}, joined by {template.separator!r}"
    layout += f", after {template.prefix!r}" if template.prefix else ""
    layout += (
        f"; then the {e.input.n_shared_tokens} tokens that the compared labels share" if e.input.n_shared_tokens else ""
    )
    explained = (
        e.target
        if e.is_plain_text
        else f"{(*e.scores.scored_tokens, *e.labels)[e.labels.index(e.target)]}, for the label {e.target}"
    )
    entries = {
        "model": e.model,
        "weights": settings.dtype + (f", dequantized from {settings.quantization}" if settings.quantization else ""),
        "explained": f"log p of the token {explained}",
        "contrast": f"log p of that token − log Σ p of {others}; {additive}" if others else "",
        "tokens": f"{len(e.input.tokens)}; beginning-of-sequence token: {bos}",
        "template": "" if e.is_plain_text else layout,
        "readout": f"final norm {settings.final_norm}, {'with' if settings.bias else 'without'} bias",
        "heads": f"{settings.k} described, by {settings.by}; {settings.n_ablated} zeroed",
        "random heads": f"{settings.n_random} sets of {settings.n_ablated}, seed {settings.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in settings.versions),
    }
    return {name: text for name, text in entries.items() if text}
