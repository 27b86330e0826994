"""Contents of page sections that are not about single heads: prompt, answer, layers, ablation,
configuration.
"""

import math
from collections.abc import Sequence
from typing import Any

from icl_lens.analyses.explanation import tables
from icl_lens.analyses.explanation.command import command
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.explanation.sentences import answer_notes
from icl_lens.report.html.elements import Bar, Chip, Inline, PageCell, PageDots, PageTable
from icl_lens.report.html.templating import label_color
from icl_lens.result.number_format import decimal, mean_and_range, percent, signed
from icl_lens.result.view import Label


def label_chips(e: Explanation) -> dict[str, Chip]:
    """Return each label, or scored token, in its color."""
    return {label: Chip(label, i) for i, label in enumerate(e.labels)}


def unit_name(e: Explanation) -> str:
    """Return what a row of a probability table is about: a token for plain text, else a label."""
    return "token" if e.is_plain_text else "label"


def contrast_runs(e: Explanation) -> list[Inline]:
    """Return the name of the contrast in runs: texts, and tokens in the colors of labels."""
    if not e.is_plain_text:
        return ["contrast"]
    chips = label_chips(e)
    return ["against ", *join_runs([chips[name] for name in e.scores.compared_with])]


def join_runs(chips: Sequence[Inline], by: str = ", ") -> list[Inline]:
    """Return runs with a separator between them."""
    runs: list[Inline] = []
    for chip in chips:
        runs += [by, chip]
    return runs[1:]


def prompt(e: Explanation) -> dict[str, Any]:
    """Return the text that the model continues, in pieces."""
    return {"pieces": prompt_pieces(e)}


def prompt_pieces(e: Explanation) -> list[tuple[str, Chip | None]]:
    """Return the text the model continues in pieces, each with its chip if it is a label."""
    pieces: list[tuple[str, Chip | None]] = []
    for piece in tables.prompt_pieces(e):
        is_label = isinstance(piece, Label)
        pieces.append((str(piece), Chip(piece.text, piece.index) if is_label else None))
    return pieces


def answer(e: Explanation) -> dict[str, Any]:
    """Return the label probabilities, the next tokens and remarks.

    For labels of several tokens, the table also has the scored token and the full label's log p.
    """
    has_long_labels = bool(e.scores.whole_log_probs)
    rows: list[list[PageCell]] = []
    for index, label in enumerate(e.labels):
        log_prob = e.scores.log_probs[index]
        share = math.exp(log_prob)
        row: list[PageCell] = [Chip(label, index), Bar(percent(share), share, label_color(index))]
        row.append(decimal(log_prob))
        if has_long_labels:
            row += [_scored_token(e, index), decimal(e.scores.whole_log_probs[index])]
        row.append(", ".join(answer_notes(e, label)))
        rows.append(row)
    columns = [unit_name(e), "#probability", "#log p, nats"]
    columns += ["scored token", "#full label, log p, nats"] if has_long_labels else []
    return {
        "table": PageTable([*columns, "note"], rows, "answer"),
        "next_tokens": [(Chip(token), probability) for token, probability in e.scores.next_tokens],
        "remarks": e.remarks,
    }


def _scored_token(e: Explanation, label: int) -> PageCell:
    """Return the token that scores a label and, if it has several, all its tokens."""
    spelling = list(map(Chip, e.scores.spellings[label]))
    token = e.scores.scored_tokens[label]
    return [token, " of ", *join_runs(spelling, " ")] if len(spelling) > 1 else [token]


def layers(e: Explanation) -> dict[str, Any]:
    """Return the bars by layer, and their values."""
    return {"charts": layer_charts(e), "table": layers_table(e)}


def layer_charts(e: Explanation) -> list[dict[str, Any]]:
    """Return bars by layer, attention above FFN, on one scale."""
    values = [0.0, *e.layers.attn, *e.layers.ffn]
    low, high = min(values), max(values)
    high = high if high > low else 1.0
    span = high - low
    # Omit ends of the scale whose labels would overlap that of zero.
    ticks = [0.0, *(value for value in (low, high) if abs(value) > 0.12 * span)]
    scale = {"high": high, "span": span, "ticks": ticks}
    return [
        {"name": "attention", "bars": e.layers.attn} | scale,
        {"name": "FFN", "bars": e.layers.ffn} | scale,
    ]


def layers_table(e: Explanation) -> PageTable:
    """Return the values of the layers' bars and, where something is compared, their contrasts."""
    columns: list[PageCell] = ["#layer", "#attention, nats", "#FFN, nats"]
    values = [e.layers.attn, e.layers.ffn]
    if e.scores.compared_with:
        columns += [[f"#{name} ", *contrast_runs(e), ", nats"] for name in ("attention", "FFN")]
        values += [e.layers.attn_contrast, e.layers.ffn_contrast]
    rows = [[str(i), *map(signed, row)] for i, row in enumerate(zip(*values, strict=True))]
    return PageTable(columns, rows)


def removal(e: Explanation) -> dict[str, Any]:
    """Return label probabilities with the located heads zeroed, compared with each set of random
    heads.
    """
    rows: list[list[PageCell]] = []
    for i, label in enumerate(e.labels):
        before, after = math.exp(e.scores.log_probs[i]), math.exp(e.ablation.located[i])
        draws = [math.exp(draw[i]) for draw in e.ablation.random]
        dots = PageDots(before, after, draws)
        rows.append([Chip(label, i), percent(before), percent(after), mean_and_range(draws), dots])
    columns = [
        "#no ablation",
        "#located zeroed",
        f"#{len(e.ablation.heads)} random zeroed",
        "0 – 100%",
    ]
    return {"table": PageTable([unit_name(e), *columns], rows, "removal")}


def configuration(e: Explanation) -> dict[str, Any]:
    """Return the settings that the numbers depend on, and the command that reproduces them."""
    return {"settings": settings(e), "command": command(e)}


def settings(e: Explanation) -> dict[str, str]:
    """Return the settings and versions that the numbers depend on."""
    options = e.settings
    bos = {None: "the tokenizer’s default", True: "forced", False: "omitted"}[options.prepend_bos]
    compared_with = ", ".join(e.scores.compared_with)
    additive = "additive over parts" if e.scores.contrast_adds_up else "not additive over parts"
    quantized = f", dequantized from {options.quantization}" if options.quantization else ""
    bias = "with" if options.bias else "without"
    entries = {
        "model": e.model,
        "weights": f"{options.dtype}{quantized}",
        "explained": f"log p of the token {_explained_token(e)}",
        "contrast": f"log p of that token − log Σ p of {compared_with}; {additive}",
        "tokens": f"{len(e.input.tokens)}; beginning-of-sequence token: {bos}",
        "template": _layout(e),
        "readout": f"final norm {options.final_norm}, {bias} bias",
        "heads": f"{options.k} described, by {options.by}; {options.n_ablated} zeroed",
        "random heads": f"{options.n_random} sets of {options.n_ablated}, seed {options.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in options.versions),
    }
    if not compared_with:
        del entries["contrast"]
    return {name: text for name, text in entries.items() if text}


def _explained_token(e: Explanation) -> str:
    """Return the token whose log p is explained and, if it scores a label, the label."""
    if e.is_plain_text:
        return e.target
    tokens = (*e.scores.scored_tokens, *e.labels)
    return f"{tokens[e.labels.index(e.target)]}, for the label {e.target}"


def _layout(e: Explanation) -> str:
    """Return how the prompt is made of its demonstrations and query; empty for plain text."""
    if e.is_plain_text:
        return ""
    template = e.input.template
    layout = f"{template.demonstration!r}, then {template.query!r}"
    layout += f", joined by {template.separator!r}"
    layout += f", after {template.prefix!r}" if template.prefix else ""
    if e.input.n_shared_tokens:
        layout += f"; then the {e.input.n_shared_tokens} tokens that the compared labels share"
    return layout
