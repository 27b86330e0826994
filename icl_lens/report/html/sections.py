"""Page sections that are not about single heads: prompt, answer, layers, ablation, parts, configuration."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.findings import Findings
from icl_lens.report.html.escaping import chip, label_class, safe, signed, table
from icl_lens.report.html.heads import bar, contrast_name
from icl_lens.report.number_format import percent


def section(ident: str, title: str, caption: str, body: str) -> str:
    """Return a titled section; `caption` explains how to read it. `caption` and `body` are HTML."""
    return f'<section id="{ident}"><h2>{safe(title)}</h2><p class="how">{caption}</p>{body}</section>'


def prompt_text(explanation: Findings) -> str:
    """Return the prompt as the model reads it, with labels highlighted in their colors."""
    if explanation.prompt is None:
        return _quoted(_prose(explanation.text))
    rendered = explanation.template.render(explanation.prompt)
    names, pieces, at = explanation.labels, [], 0
    for (start, stop), demonstration in zip(rendered.label_spans, explanation.prompt.demonstrations, strict=True):
        pieces.append(_prose(rendered.text[at:start]))
        color = label_class(names.index(demonstration.label))
        pieces.append(f'<mark class="{color}"><bdi>{_prose(rendered.text[start:stop])}</bdi></mark>')
        at = stop
    pieces.append(_prose(rendered.text[at:]))
    return _quoted("".join(pieces))


def _quoted(prose: str) -> str:
    caret = '<span class="caret" aria-hidden="true"></span>'
    return f'<blockquote class="prompt" dir="auto">{prose}{caret}</blockquote>'


def _prose(text: str) -> str:
    """Return running text with its line breaks."""
    return "\n".join(safe(line) for line in text.split("\n"))


def answer(explanation: Findings) -> str:
    """Return a table of label probabilities, and the most probable tokens of the vocabulary."""
    rows, several = [], bool(explanation.whole_label_log_probs)
    for i, (label, value) in enumerate(zip(explanation.labels, explanation.label_log_probs, strict=True)):
        notes = {
            "predicted": explanation.predicted == label and not explanation.is_plain_text,
            "correct answer": explanation.answer == label,
            "explained": explanation.target == label,
            "compared with": explanation.is_plain_text and label in explanation.compared_with,
        }
        rows.append(
            [
                chip(label, i),
                f"{bar(math.exp(value), label_class(i))}{percent(math.exp(value))}",
                f"{value:.3f}".replace("-", "−"),
                *(_whole(explanation, i) if several else []),
                ", ".join(note for note, holds in notes.items() if holds),
            ]
        )
    tokens = ", ".join(f"{chip(token)} {percent(value)}" for token, value in explanation.next_tokens)
    more = ["scored token", "#full label, log p, nats"] if several else []
    head = ["token" if explanation.is_plain_text else "label", "#probability", "#log p, nats", *more, "note"]
    remarks = "".join(f'<p class="key">{safe(remark)}</p>' for remark in explanation.remarks)
    return table(head, rows, kind="answer") + f'<p class="key">Most probable tokens: {tokens}</p>' + remarks


def _whole(explanation: Findings, i: int) -> list[str]:
    """Return the scored token of label i among its tokens, and the log-probability of the full label."""
    spelling = explanation.label_token_names[i]
    of = "" if len(spelling) == 1 else f" of {' '.join(chip(token) for token in spelling)}"
    return [
        f"{chip(spelling[explanation.n_shared_tokens])}{of}",
        f"{explanation.whole_label_log_probs[i]:.3f}".replace("-", "−"),
    ]


def layer_bars(attn: Sequence[float], ffn: Sequence[float], *, reach: tuple[float, float] | None = None) -> str:
    """Return bars by layer, attention above FFN, scaled to `reach` (lowest, highest) or to the values' own range."""
    low, high = reach or layer_reach(attn, ffn)
    step = math.ceil(len(attn) / 12)
    labels = "".join(f"<span>{i if i % step == 0 else ''}</span>" for i in range(len(attn)))
    charts = "".join(
        f'<div class="chart"><b>{name}</b>{_axis(low, high)}{_bars(values, name, low, high)}</div>'
        for name, values in (("attention", attn), ("FFN", ffn))
    )
    numbers = f'<div class="layers" aria-hidden="true">{labels}</div><figcaption>layer</figcaption>'
    return f'<figure class="bars" style="--layers:{len(attn)}">{charts}{numbers}</figure>'


def layer_reach(*values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest of all values and zero."""
    flat = [0.0, *(x for row in values for x in row)]
    low, high = min(flat), max(flat)
    return (low, high) if high > low else (0.0, 1.0)


def _axis(low: float, high: float) -> str:
    def tick(value: float) -> str:
        return (
            f'<span style="top:{100 * (high - value) / (high - low):.2f}%">{signed(value, 2) if value else "0"}</span>'
        )

    # A tick too close to zero would overlap it.
    ends = [value for value in (low, high) if abs(value) > 0.12 * (high - low)]
    return f'<div class="axis" aria-hidden="true">{"".join(map(tick, [0.0, *ends]))}</div>'


def _bars(values: Sequence[float], name: str, low: float, high: float) -> str:
    width, zero = 100 / len(values), 100 * high / (high - low)
    rects = []
    for i, value in enumerate(values):
        height = 100 * abs(value) / (high - low)
        top = zero - height if value >= 0 else zero
        rects.append(
            f'<rect class="{"p" if value >= 0 else "n"}" x="{i * width + 0.14 * width:.2f}%" y="{top:.2f}%" '
            f'width="{0.72 * width:.2f}%" height="{max(height, 0.4):.2f}%">'
            f"<title>layer {i}, {name}: {signed(value)} nats</title></rect>"
        )
    line = f'<line x1="0" x2="100%" y1="{zero:.2f}%" y2="{zero:.2f}%"></line>'
    return f'<svg role="img" aria-label="Increase by layer, {name}">{"".join(rects)}{line}</svg>'


def layers(explanation: Findings) -> str:
    """Return layer bars and a table of their values."""
    columns = {"attention": explanation.layer_attn, "FFN": explanation.layer_ffn}
    if explanation.compared_with:
        against = contrast_name(explanation)
        columns[f"attention {against}"] = explanation.layer_attn_contrast
        columns[f"FFN {against}"] = explanation.layer_ffn_contrast
    rows = [[str(i), *map(signed, row)] for i, row in enumerate(zip(*columns.values(), strict=True))]
    numbers = table(["#layer", *[f"#{name}, nats" for name in columns]], rows)
    return (
        layer_bars(explanation.layer_attn, explanation.layer_ffn)
        + f"<details><summary>Values</summary>{numbers}</details>"
    )


def removal(explanation: Findings) -> str:
    """Return label probabilities with the located heads zeroed, compared with each set of random heads."""
    ablation, rows = explanation.ablation, []
    for i, label in enumerate(explanation.labels):
        before, after = math.exp(explanation.label_log_probs[i]), math.exp(ablation.located[i])
        draws = [math.exp(draw[i]) for draw in ablation.random]
        spread = f"{percent(fmean(draws))} ({percent(min(draws))}–{percent(max(draws))})" if draws else "–"
        rows.append([chip(label, i), percent(before), percent(after), spread, _dots(before, after, draws)])
    n = len(ablation.heads)
    head = [
        "token" if explanation.is_plain_text else "label",
        "#no ablation",
        "#located zeroed",
        f"#{n} random zeroed",
        "0 – 100%",
    ]
    key = (
        '<p class="key"><i class="dot was"></i> no ablation <i class="dot now"></i> located heads zeroed '
        f'<i class="dot draw"></i> a random set of {n} other heads ({len(ablation.random)} sets: mean and range)</p>'
    )
    return table(head, rows, kind="removal") + key


def _dots(before: float, after: float, draws: Sequence[float]) -> str:
    ticks = "".join(
        f'<line class="draw" x1="{100 * x:.2f}%" x2="{100 * x:.2f}%" y1="25%" y2="75%"></line>' for x in draws
    )
    return (
        f'<svg class="dots" role="img" aria-label="{percent(before)} before, {percent(after)} after, random '
        f'{percent(min(draws, default=0))} to {percent(max(draws, default=0))}">'
        f'<line class="base" x1="0" x2="100%" y1="50%" y2="50%"></line>{ticks}'
        f'<circle class="was" cx="{100 * before:.2f}%" cy="50%" r="5"></circle>'
        f'<circle class="now" cx="{100 * after:.2f}%" cy="50%" r="5"></circle></svg>'
    )


def parts(explanation: Findings) -> str:
    """Return a table of the (head, position) parts with the largest increase."""
    label_at = dict(zip(explanation.label_positions, explanation.demonstration_labels, strict=True))
    reach = max((abs(part.increase) for part in explanation.subheads), default=0.0) or 1.0
    shown = [
        explanation.shown_tokens[part.position] if explanation.is_plain_text else part.token
        for part in explanation.subheads
    ]
    rows = [
        [
            str(part.head),
            str(part.position),
            chip(token, label_at.get(part.position)),
            f"{bar(part.increase / reach, 'p' if part.increase >= 0 else 'n')}{signed(part.increase)}",
            *([] if part.contrast is None else [signed(part.contrast)]),
        ]
        for part, token in zip(explanation.subheads, shown, strict=True)
    ]
    caption = (
        f"Exact and certified: {explanation.n_exact} of {explanation.n_parts} parts were evaluated."
        if explanation.certified
        else f"Exact: all {explanation.n_parts} parts were evaluated."
    )
    more = [f"#{contrast_name(explanation)}, nats"] if explanation.compared_with else []
    return table(["head", "#position", "token", "#increase, nats", *more], rows) + f'<p class="key">{caption}</p>'


def configuration(explanation: Findings) -> str:
    """Return the settings, versions and the command behind the numbers."""
    settings = explanation.settings
    bos = {None: "the tokenizer’s default", True: "forced", False: "omitted"}[settings.prepend_bos]
    template, free = explanation.template, explanation.is_plain_text
    others = ", ".join(map(repr if free else str, explanation.compared_with))
    caption = "additive over parts" if explanation.contrast_adds_up else "not additive over parts"
    named = repr(explanation.labels[0])
    entries = {
        "model": explanation.model,
        "weights": f"{settings.dtype}, dequantized from {explanation.quantization}"
        if explanation.quantization
        else settings.dtype,
        "explained": f"log p of the token {named}"
        if free
        else f"log p of the token {explanation.target_token!r}, for the label {explanation.target}",
        "contrast": f"log p of that token − log Σ p of {others}; {caption}" if others else "",
        "tokens": f"{len(explanation.tokens)}; beginning-of-sequence token: {bos}",
        "template": f"{template.demonstration!r}, then {template.query!r}, joined by {template.separator!r}"
        + (f", after {template.prefix!r}" if template.prefix else "")
        + (
            f"; then the {explanation.n_shared_tokens} tokens that all labels share"
            if explanation.n_shared_tokens
            else ""
        )
        if not free
        else "",
        "readout": f"final norm {settings.final_norm}, {'with' if settings.bias else 'without'} bias",
        "heads": f"{settings.k} described; {settings.n_ablated} zeroed",
        "random heads": f"{settings.n_random} sets of {settings.n_ablated}, seed {settings.seed}",
        "versions": ", ".join(f"{name} {number}" for name, number in explanation.versions),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{safe(text)}</dd>" for name, text in entries.items() if text)
    return f'<dl>{rows}</dl><pre tabindex="0"><code>{safe_lines(command(explanation))}</code></pre>'


def safe_lines(text: str) -> str:
    """Return lines of text as HTML for a `pre`."""
    return "\n".join(safe(line) for line in text.split("\n"))


def command(explanation: Findings) -> str:
    """Return the shell command that reproduces the explanation, or Python code if the CLI cannot express it."""
    explanation = replace(explanation, model=explanation.source or explanation.model)  # a folder's path, not its name
    settings, prompt = explanation.settings, explanation.prompt
    if _typed(explanation):
        if prompt is None:
            words = ["icl-lens", "explain", "--text", explanation.text, "--model", explanation.model]
            words += [] if settings.target is None else ["--target", str(settings.target)]
        else:
            words = ["icl-lens", "explain", str(prompt), "--model", explanation.model]
            words += ["--answer", prompt.answer] if prompt.answer is not None else []
        words += [word for other in settings.against or () for word in ("--against", str(other))]
        words += ["--shared-prefix", settings.shared_prefix] if settings.shared_prefix != "error" else []
        words += ["--top", str(settings.k), "--ablate", str(settings.n_ablated), "--seed", str(settings.seed)]
        words += ["--final-norm", settings.final_norm, "--bias" if settings.bias else "--no-bias"]
        words += [] if settings.prepend_bos is None else ["--bos" if settings.prepend_bos else "--no-bos"]
        words += ["--dtype", settings.dtype]
        return shlex.join(words)
    against = "" if settings.against is None else f"    against={list(settings.against)!r},\n"
    what = _free_python(explanation) if prompt is None else _prompt_python(explanation, prompt)
    return (
        "import icl_lens as il\n"
        "import torch\n"
        f"model = il.load_model({explanation.model!r}, dtype=torch.{settings.dtype})\n"
        f"il.explain(\n    model,\n{what}{'' if prompt is None else against}"
        f"    final_norm={settings.final_norm!r},\n    bias={settings.bias},\n    k={settings.k},\n"
        f"    n_ablated={settings.n_ablated},\n    n_random={settings.n_random},\n    seed={settings.seed},\n)"
    )


def _prompt_python(explanation: Findings, prompt: Prompt) -> str:
    demonstrations = ",\n         ".join(
        f"il.Demonstration({shown.text!r}, {shown.label!r})" for shown in prompt.demonstrations
    )
    template, shared = explanation.template, explanation.settings.shared_prefix
    parts = (template.demonstration, template.query, template.separator, template.prefix)
    return (
        f"    il.Prompt(\n        [{demonstrations}],\n        query={prompt.query!r},\n"
        f"        answer={prompt.answer!r},\n        labels={list(prompt.labels)!r},\n    ),\n"
        f"    template=il.Template({', '.join(map(repr, parts))}),\n"
        f"    labels={list(explanation.labels)!r},\n    prepend_bos={explanation.settings.prepend_bos},\n"
        + (f"    shared_prefix={shared!r},\n" if shared != "error" else "")
    )


def _free_python(explanation: Findings) -> str:
    settings = explanation.settings
    target = None if settings.target is None else [settings.target]
    against = None if settings.against is None else [list(settings.against)]
    return (
        f"    il.tokenize_text(\n        model,\n        [{explanation.text!r}],\n        targets={target!r},\n"
        f"        against={against!r},\n        prepend_bos={settings.prepend_bos},\n    ),\n"
    )


def _typed(explanation: Findings) -> bool:
    """Whether the command line can express all settings."""
    settings = explanation.settings
    if settings.n_random != 20:
        return False
    if explanation.prompt is not None:
        return explanation.template == Template() and _reads_back(explanation.prompt, explanation.labels)
    words = [settings.target, *(settings.against or ())]
    return not any(isinstance(word, int) or "\n" in (word or "") for word in [*words, explanation.text])


def _reads_back(prompt: Prompt, labels: Sequence[str]) -> bool:
    """Whether the command line parses the same prompt, with the same labels, from its text."""
    try:
        same = Prompt.parse(str(prompt), answer=prompt.answer) == prompt
    except InputError:
        return False
    return same and set(labels) == set(prompt.labels) and "\n" not in str(prompt)
