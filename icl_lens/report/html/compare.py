"""A page that compares two explanations."""

import math
from collections.abc import Sequence

from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.report.findings import Findings
from icl_lens.report.html.assets import document
from icl_lens.report.html.escaping import chip, label_class, safe, signed, table
from icl_lens.report.html.heads import bar, heatmap
from icl_lens.report.html.sections import answer, command, layer_bars, layer_reach, prompt_text, safe_lines, section
from icl_lens.report.html.token_strips import label_legend
from icl_lens.report.number_format import percent

N_CHANGED = 12


def compare_page(a: Findings, b: Findings) -> str:
    """Return a self-contained page that compares two prompts or two models.

    The page shows label probabilities, layer bars on a shared scale, and attention to labels. If both models have the
    same number of layers and heads, it also shows the heads whose increase changed most and the change of every head;
    otherwise, the best heads of each. Increases refer to each explanation's own target; the page notes where the
    targets differ.
    """
    return document("Two explanations compared", f"<main>{compare_body(a, b)}</main>", circuitsvis=False)


def compare_body(a: Findings, b: Findings) -> str:
    """Return the content of the comparison page, without scripts and styles."""
    same_heads = _shape(a) == _shape(b)
    plain_text = a.is_plain_text or b.is_plain_text
    return (
        _headline(a, b)
        + section(
            "prompts",
            "Prompts",
            "The two prompts." if plain_text else "The two prompts, with labels highlighted in their colors.",
            _pair(a, b, prompt_text),
        )
        + section(
            "answers",
            "Answers",
            f"Probability of each {'scored' if plain_text else 'label’s'} token after each prompt.",
            _answers(a, b),
        )
        + section(
            "layers",
            "Layers",
            f"What each layer adds to the log-probability of the explained {'token' if plain_text else 'label'}, on a "
            "shared scale. Increases are not additive.",
            _layers(a, b),
        )
        + (_changed(a, b) if same_heads else _own_best(a, b))
        + (
            ""
            if plain_text  # no labels to attend to
            else section("attention", "Attention to labels", _ATTENTION_HOW, _attention(a, b, same_heads))
        )
        + section("configuration", "Configuration", "The commands that reproduce A and B.", _pair(a, b, _command))
    )


_ATTENTION_HOW = "Attention from the last token, summed over the positions of each label, for the heads listed above."


def _shape(explanation: Findings) -> tuple[int, int]:
    return len(explanation.head_increases), len(explanation.head_increases[0])


def _headline(a: Findings, b: Findings) -> str:
    same_prompt = a.prompt == b.prompt and a.text == b.text
    if a.model == b.model and same_prompt:
        what = "The same model and prompt"
    elif a.model == b.model:
        what = f"Two prompts, {safe(a.model)}"
    elif same_prompt:
        what = f"One prompt, {safe(a.model)} and {safe(b.model)}"
    else:
        what = f"{safe(a.model)} and {safe(b.model)}, on different prompts"
    words = [x.next_tokens[0][0] if x.is_plain_text else x.predicted for x in (a, b)]
    chips = [
        chip(word, x.labels.index(word) if word in x.labels else None) for word, x in zip(words, (a, b), strict=True)
    ]
    change = f"Both predict {chips[0]}" if words[0] == words[1] else f"A predicts {chips[0]}, B predicts {chips[1]}"
    note = "" if a.target == b.target else f" A explains {chip(a.target)}, B explains {chip(b.target)}."
    return (
        f'<header class="top"><p class="eyebrow">icl-lens · A and B</p><h1>{change}</h1><p>{what}.{note}</p></header>'
    )


def _pair(a: Findings, b: Findings, draw) -> str:
    sides = "".join(
        f"<div><h3>{name} · {safe(side.model)}</h3>{draw(side)}</div>" for name, side in (("A", a), ("B", b))
    )
    return f'<div class="pair">{sides}</div>'


def _answers(a: Findings, b: Findings) -> str:
    if set(a.labels) != set(b.labels):
        return _pair(a, b, answer)
    rows = []
    for i, label in enumerate(a.labels):
        before, after = a.label_log_probs[i], b.label_log_probs[b.labels.index(label)]
        rows.append([chip(label, i), percent(math.exp(before)), percent(math.exp(after)), signed(after - before)])
    return table(["token" if a.is_plain_text else "label", "#A", "#B", "#change of log p, nats"], rows)


def _layers(a: Findings, b: Findings) -> str:
    reach = layer_reach(a.layer_attn, a.layer_ffn, b.layer_attn, b.layer_ffn)
    return _pair(a, b, lambda side: layer_bars(side.layer_attn, side.layer_ffn, reach=reach))


def most_changed(a: Findings, b: Findings) -> list[Head]:
    """Return the heads whose increase differs most between two explanations, largest change first.

    Raises InputError if the models have different numbers of layers or heads.
    """
    if _shape(a) != _shape(b):
        raise InputError(
            f"models must have the same (layers, heads), got {_shape(a)} for {a.model} and {_shape(b)} for {b.model}; "
            "compare models of the same shape"
        )
    n_layers, n_heads = _shape(a)
    heads = [Head.from_index(index, n_heads) for index in range(n_layers * n_heads)]
    heads.sort(key=lambda head: -abs(_increase(b, head) - _increase(a, head)))
    return heads[:N_CHANGED]


def _increase(explanation: Findings, head: Head) -> float:
    return explanation.head_increases[head.layer][head.head]


def _changed(a: Findings, b: Findings) -> str:
    heads = most_changed(a, b)
    changes = [_increase(b, head) - _increase(a, head) for head in heads]
    reach = max(map(abs, changes)) or 1.0
    rows = [
        [
            str(head),
            signed(_increase(a, head)),
            signed(_increase(b, head)),
            f"{bar(change / reach, 'p' if change >= 0 else 'n')}{signed(change)}",
        ]
        for head, change in zip(heads, changes, strict=True)
    ]
    difference = [
        [y - x for x, y in zip(row_a, row_b, strict=True)]
        for row_a, row_b in zip(a.head_increases, b.head_increases, strict=True)
    ]
    change_map = heatmap(difference, located=set(heads), caption="change of increase, B minus A, nats")
    return section(
        "changed",
        "Heads that changed most",
        "Each head’s increase in A and B, and the change: blue if it is larger in B, orange if it is smaller.",
        table(["head", "#A, nats", "#B, nats", "#change, nats"], rows),
    ) + section(
        "changes",
        "Every head’s change",
        "B minus A, by layer and head. The heads of the table above are ringed.",
        change_map,
    )


def _own_best(a: Findings, b: Findings) -> str:
    def best(side: Findings) -> str:
        reach = max((abs(report.increase) for report in side.heads), default=0.0) or 1.0
        rows = [
            [
                str(report.head),
                f"{bar(report.increase / reach, 'p' if report.increase >= 0 else 'n')}{signed(report.increase)}",
            ]
            for report in side.heads
        ]
        return table(["head", "#increase, nats"], rows)

    return section(
        "best",
        "Best heads of each",
        "The models have different numbers of layers or heads, so their heads do not correspond.",
        _pair(a, b, best),
    )


def _attention(a: Findings, b: Findings, same_heads: bool) -> str:
    if not same_heads:
        return _pair(a, b, lambda side: _sums_table(side, [report.head for report in side.heads]))
    heads = most_changed(a, b)
    names = list(dict.fromkeys([*a.labels, *b.labels]))
    rows = []
    for head in heads:
        cells = [str(head)]
        for i, name in enumerate(names):
            for side in (a, b):
                value = _label_sum(side, head, name)
                cells.append("–" if value is None else f"{bar(value, label_class(i))}{value:.2f}")
        rows.append(cells)
    columns = [f"#{side} to {chip(name, i)}" for i, name in enumerate(names) for side in "AB"]
    return label_legend(names) + table(["head", *columns], rows, kind="located")


def _label_sum(side: Findings, head: Head, label: str) -> float | None:
    """Return the attention summed over a label's positions, or None if the prompt does not have the label."""
    if label not in side.labels:
        return None
    index = side.labels.index(label)
    weights = side.label_attention[head.layer][head.head]
    return sum(w for w, i in zip(weights, side.demonstration_labels, strict=True) if i == index)


def _sums_table(side: Findings, heads: Sequence[Head]) -> str:
    rows = [
        [
            str(head),
            *[
                f"{bar(_label_sum(side, head, name) or 0.0, label_class(i))}{_label_sum(side, head, name):.2f}"
                for i, name in enumerate(side.labels)
            ],
        ]
        for head in heads
    ]
    return table(["head", *[f"#to {chip(name, i)}" for i, name in enumerate(side.labels)]], rows, kind="located")


def _command(side: Findings) -> str:
    return f'<pre tabindex="0"><code>{safe_lines(command(side))}</code></pre>'
