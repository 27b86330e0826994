"""Explanations of any size, for drawing: their numbers are invented, and depend on the arguments only."""

import io
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, RenderableType

from icl_lens.explanation import Explanation
from icl_lens.models.head import Head
from icl_lens.prompts.prompt import Demonstration, Prompt, Template
from icl_lens.report.findings import AblationReport, ExplainOptions, HeadReport, SubheadReport
from icl_lens.report.terminal import render

PAPER = "love : bar like : bar eight : foo two : foo one :"
SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
HOSTILE = [SCRIPT, IMAGE, "\"'><svg onload=alert(1)>", "<!--", "]]>", "&lt;b&gt;", "`${alert(1)}`"]
"""Strings that would run, or turn into something else, if a page took them for HTML or script."""


def terminal_text(explanation: Explanation, width: int = 4000) -> str:
    """Return what a terminal of this width shows, without colors."""
    return shown_text(render(explanation), width)


def shown_text(shown: RenderableType, width: int = 4000) -> str:
    """Return a result as a terminal of this width shows it, without colors."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(shown)
    return console.file.getvalue()


def made(
    prompt: Prompt | str = PAPER,
    *,
    answer: str | None = "foo",
    layers: int = 6,
    heads: int = 4,
    k: int = 5,
    tokens: Sequence[str] | None = None,
    words: Sequence[str] = ("one", "two", "three"),
    model: str = "tiny",
    seed: int = 0,
) -> Explanation:
    """An explanation of a prompt of one-word texts and labels, with invented numbers.

    `tokens` replace the prompt's own words as tokens; labels stay at positions 2, 5, 8, …
    """
    if isinstance(prompt, str):
        prompt = Prompt.parse(prompt, answer=answer)
    rng = random.Random(seed)
    text = Template().render(prompt).text
    n = len(tokens or text.split())
    tokens = tuple(tokens or text.split())
    positions = tuple(3 * i + 2 for i in range(len(prompt.demonstrations)))
    index = tuple(prompt.labels.index(shown.label) for shown in prompt.demonstrations)
    increases = tuple(
        tuple(rng.gauss(0, 0.05) + (2.0 if rng.random() < 0.02 else 0) for _ in range(heads)) for _ in range(layers)
    )
    ranked = sorted(
        (Head(layer, head) for layer in range(layers) for head in range(heads)),
        key=lambda head: -increases[head.layer][head.head],
    )
    rows = {}
    for layer in range(layers):
        for head in range(heads):
            raw = [rng.random() ** 4 for _ in range(n)]
            rows[layer, head] = tuple(x / sum(raw) for x in raw)

    def scores() -> tuple[float, ...]:
        raw = [rng.gauss(0, 1) for _ in prompt.labels]
        total = math.log(sum(map(math.exp, raw)) + 0.1)
        return tuple(x - total for x in raw)

    scored = scores()
    target = prompt.answer or max(zip(scored, prompt.labels, strict=True))[1]
    return Explanation(
        model=model,
        prompt=prompt,
        template=Template(),
        settings=replace(ExplainOptions(), k=k, by="increase"),
        tokens=tokens,
        labels=prompt.labels,
        label_positions=positions,
        label_ranges=tuple((position, position + 1) for position in positions),
        demonstration_labels=index,
        label_log_probs=scored,
        target=target,
        target_token=target,
        next_tokens=tuple((word, 0.1) for word in (*prompt.labels, *words)[:5]),
        layer_attn=tuple(rng.gauss(0.2, 0.5) for _ in range(layers)),
        layer_ffn=tuple(rng.gauss(0.1, 0.3) for _ in range(layers)),
        head_increases=increases,
        label_attention=tuple(
            tuple(tuple(rows[layer, head][p] for p in positions) for head in range(heads)) for layer in range(layers)
        ),
        heads=tuple(
            HeadReport(
                head=head,
                increase=increases[head.layer][head.head],
                attention=rows[head],
                position_increases=tuple(rng.gauss(0, 0.1) for _ in range(n)),
                value_words=tuple(tuple(words) for _ in positions),
                value_ranks=tuple(range(1, len(positions) + 1)),
                key_words=tuple(tuple(words) for _ in positions),
                query_words=tuple(words),
                ablated=scores(),
            )
            for head in ranked[:k]
        ),
        subheads=tuple(SubheadReport(head, i % n, tokens[i % n], 0.5 - 0.01 * i) for i, head in enumerate(ranked[:10])),
        n_parts=layers * heads * n,
        n_exact=21,
        certified=True,
        ablation=AblationReport(tuple(ranked[:4]), scores(), tuple(scores() for _ in range(20))),
        versions=(("icl-lens", "0.1.0"), ("torch", "2.13.0")),
    )


def long_prompt() -> Prompt:
    """Return a prompt of 200 words: 66 demonstrations of one-word texts, and the query."""
    rng = random.Random(0)
    words = ["river", "seven", "quiet", "nine", "brave", "eleven", "bitter", "forty"]
    shown = [Demonstration(rng.choice(words), rng.choice(["foo", "bar"])) for _ in range(66)]
    return Prompt(shown, "twelve", answer="foo", labels=("bar", "foo"))


def large() -> Explanation:
    """An explanation of the size GPT-2 large gives for 200 tokens: 36 layers of 20 heads."""
    return made(long_prompt(), layers=36, heads=20, k=10, words=[f"word{i}" for i in range(10)])


def free(text: str = "When Mary and John went to", *, target: str = "␣Mary", other: str = "␣John") -> Explanation:
    """An explanation of a text without demonstrations, with invented numbers: `target` against `other`."""
    base, words = made(), tuple(text.split())
    names = tuple(word if i == 0 else f"␣{word}" for i, word in enumerate(words))
    n = len(words)
    positions = tuple(range(min(n, 5)))
    heads = tuple(
        replace(
            report,
            attention=report.attention[:n],
            position_increases=report.position_increases[:n],
            position_contrasts=tuple(-x for x in report.position_increases[:n]),
            contrast=report.increase * (1.0 if i % 2 else 0.25),
            value_words=report.value_words[:1] * len(positions),
            value_ranks=tuple(1 for _ in positions),
            key_words=(),
            positions=positions,
        )
        for i, report in enumerate(base.heads)
    )
    return replace(
        base,
        prompt=None,
        text=text,
        settings=replace(base.settings, target=target.replace("␣", " "), against=(other.replace("␣", " "),)),
        tokens=words,
        token_names=names,
        labels=(target, other),
        target=target,
        target_token=target.replace("␣", " "),
        compared_with=(other,),
        contrast_adds_up=True,
        label_positions=(),
        label_ranges=(),
        demonstration_labels=(),
        label_attention=(),
        heads=heads,
        head_contrasts=base.head_increases,
        layer_attn_contrast=base.layer_attn,
        layer_ffn_contrast=base.layer_ffn,
        attended_positions=tuple(range(n)),
        attended_attention=tuple(tuple(heads[0].attention for _ in row) for row in base.head_increases),
        label_token_names=((target,), (other,)),
        subheads=tuple(replace(part, position=part.position % n, contrast=0.125) for part in base.subheads),
    )
