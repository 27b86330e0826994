"""Explanations of any size, for drawing: their numbers are invented, and depend on the arguments
only.
"""

import io
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from rich.console import Console

from icl_lens.analyses.explanation.reports import (
    AblationReport,
    AllHeadsReport,
    HeadReport,
    InputReport,
    LayerReport,
    ScoreReport,
    Settings,
    SubheadReport,
    SubheadsReport,
)
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.models.head import Head
from icl_lens.prompts.prompt import Demonstration, Prompt, Template

PAPER = "love : bar like : bar eight : foo two : foo one :"
SCRIPT = "</script><script>alert(1)</script>"
IMAGE = "<img src=x onerror=alert(1)>"
HOSTILE = [SCRIPT, IMAGE, "\"'><svg onload=alert(1)>", "<!--", "]]>", "&lt;b&gt;", "`${alert(1)}`"]
"""Strings that would run, or turn into something else, if a page took them for HTML or script."""


def terminal_text(explanation: Explanation, width: int = 4000) -> str:
    """Return what a terminal of this width shows, without colors."""
    return shown_text(explanation, width)


def shown_text(printable: Any, width: int = 4000) -> str:
    """Return a result as a terminal of this width shows it, without colors."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(printable)
    return console.file.getvalue()


def changed(explanation: Explanation, **values: Any) -> Explanation:
    """Return an explanation with other values of fields, each in the section that has it."""
    section_of = {}
    # `target` is the one of scores
    for section in ("settings", "input", "scores", "layers", "all_heads", "subheads"):
        for section_field in fields(getattr(explanation, section)):
            section_of[section_field.name] = section
    by_section: dict[str, dict[str, Any]] = defaultdict(dict)
    top_values = {}
    for name, value in values.items():
        if name in section_of:
            by_section[section_of[name]][name] = value
        else:
            top_values[name] = value
    for section, section_values in by_section.items():
        top_values[section] = replace(getattr(explanation, section), **section_values)
    return replace(explanation, **top_values)


class Inventor:
    """Invents numbers that depend on the seed only."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def normal(self, n: int, mean: float = 0.0, deviation: float = 1.0) -> tuple[float, ...]:
        return tuple(self.rng.gauss(mean, deviation) for _ in range(n))

    def increases(self, n: int) -> tuple[float, ...]:
        """Increases of heads, of which one in fifty is large."""
        values = []
        for _ in range(n):
            increase = self.rng.gauss(0, 0.05)
            if self.rng.random() < 0.02:
                increase += 2.0
            values.append(increase)
        return tuple(values)

    def attention(self, n: int) -> tuple[float, ...]:
        """Attention to n tokens, most of it to a few; its sum is 1."""
        raw = [self.rng.random() ** 4 for _ in range(n)]
        return tuple(x / sum(raw) for x in raw)

    def log_probs(self, n: int) -> tuple[float, ...]:
        """Log-probabilities of n labels, whose probabilities add up to less than 1."""
        raw = self.normal(n)
        total = math.log(sum(map(math.exp, raw)) + 0.1)
        return tuple(x - total for x in raw)


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
    invent, n_labels = Inventor(seed), len(prompt.labels)
    tokens = tuple(tokens or Template().render(prompt).text.split())
    n, n_demonstrations = len(tokens), len(prompt.demonstrations)
    positions = tuple(range(2, 3 * n_demonstrations, 3))
    increases = tuple(invent.increases(heads) for _ in range(layers))
    ranked = [Head(layer, head) for layer in range(layers) for head in range(heads)]
    ranked.sort(key=lambda head: -increases[head.layer][head.head])
    attention = {Head(*place): invent.attention(n) for place in np.ndindex(layers, heads)}
    log_probs = invent.log_probs(n_labels)
    target = prompt.answer or max(zip(log_probs, prompt.labels, strict=True))[1]
    layer_report = LayerReport(invent.normal(layers, 0.2, 0.5), invent.normal(layers, 0.1, 0.3))
    return Explanation(
        model=model,
        input=InputReport(
            prompt=prompt,
            template=Template(),
            text="",
            tokens=tokens,
            token_names=tokens,
            label_positions=positions,
            label_ranges=tuple((position, position + 1) for position in positions),
            demonstration_labels=tuple(
                prompt.labels.index(demonstration.label) for demonstration in prompt.demonstrations
            ),
        ),
        scores=ScoreReport(
            labels=prompt.labels,
            log_probs=log_probs,
            target=target,
            target_token=target,
            next_tokens=tuple((word, 0.1) for word in (*prompt.labels, *words)[:5]),
        ),
        layers=layer_report,
        all_heads=AllHeadsReport(
            increase=increases,
            contrast=(),
            effect=(),
            exchange=(),
            other_query="",
            attention=_attention_to(positions, attention, layers),
        ),
        heads=tuple(
            HeadReport(
                head=head,
                increase=increases[head.layer][head.head],
                attention=attention[head],
                position_increases=invent.normal(n, 0, 0.1),
                value_words=(tuple(words),) * n_demonstrations,
                value_ranks=tuple(range(1, n_demonstrations + 1)),
                key_words=(tuple(words),) * n_demonstrations,
                query_words=tuple(words),
                ablated=invent.log_probs(n_labels),
            )
            for head in ranked[:k]
        ),
        subheads=SubheadsReport(
            tuple(
                SubheadReport(head, i % n, tokens[i % n], 0.5 - 0.01 * i)
                for i, head in enumerate(ranked[:10])
            ),
            n_parts=layers * heads * n,
            n_exact=21,
            certified=True,
        ),
        ablation=AblationReport(
            tuple(ranked[:4]),
            invent.log_probs(n_labels),
            tuple(invent.log_probs(n_labels) for _ in range(20)),
        ),
        settings=Settings(
            k=k, by="increase", versions=(("icl-lens", "0.1.0"), ("torch", "2.13.0"))
        ),
    )


def _attention_to(
    positions: Sequence[int], attention: dict[Head, tuple[float, ...]], layers: int
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return attention to some positions, layer by layer and head by head."""
    by_layer: list[list[tuple[float, ...]]] = [[] for _ in range(layers)]
    for head, of_head in attention.items():
        by_layer[head.layer].append(tuple(of_head[position] for position in positions))
    return tuple(map(tuple, by_layer))


def long_prompt() -> Prompt:
    """Return a prompt of 200 words: 66 demonstrations of one-word texts, and the query."""
    rng = random.Random(0)
    words = ["river", "seven", "quiet", "nine", "brave", "eleven", "bitter", "forty"]
    demonstrations = [
        Demonstration(rng.choice(words), rng.choice(["foo", "bar"])) for _ in range(66)
    ]
    return Prompt(demonstrations, "twelve", answer="foo", labels=("bar", "foo"))


def large() -> Explanation:
    """An explanation of the size GPT-2 large gives for 200 tokens: 36 layers of 20 heads."""
    return made(long_prompt(), layers=36, heads=20, k=10, words=[f"word{i}" for i in range(10)])


def free(
    text: str = "When Mary and John went to", *, target: str = "␣Mary", other: str = "␣John"
) -> Explanation:
    """An explanation of a text without demonstrations, with invented numbers: `target` against
    `other`.
    """
    base, words = made(), tuple(text.split())
    names = tuple(word if i == 0 else f"␣{word}" for i, word in enumerate(words))
    n = len(words)
    positions = tuple(range(min(n, 5)))
    heads = []
    for i, report in enumerate(base.heads):
        head = replace(
            report,
            attention=report.attention[:n],
            position_increases=report.position_increases[:n],
            position_contrasts=tuple(-x for x in report.position_increases[:n]),
            contrast=report.increase * (1.0 if i % 2 else 0.25),
            value_words=report.value_words[:1] * len(positions),
            value_ranks=(1,) * len(positions),
            key_words=(),
            positions=positions,
        )
        heads.append(head)
    return changed(
        base,
        prompt=None,
        text=text,
        tokens=words,
        token_names=names,
        label_positions=(),
        label_ranges=(),
        demonstration_labels=(),
        settings=replace(
            base.settings, target=target.replace("␣", " "), against=(other.replace("␣", " "),)
        ),
        scores=replace(
            base.scores,
            labels=(target, other),
            target=target,
            target_token=target.replace("␣", " "),
            compared_with=(other,),
            contrast_adds_up=True,
            spellings=((target,), (other,)),
            scored_tokens=(target, other),
        ),
        heads=tuple(heads),
        contrast=base.all_heads.increase,
        attn_contrast=base.layers.attn,
        ffn_contrast=base.layers.ffn,
        positions=tuple(range(n)),
        attention=tuple((heads[0].attention,) * len(row) for row in base.all_heads.increase),
        largest=tuple(
            replace(part, position=part.position % n, contrast=0.125)
            for part in base.subheads.largest
        ),
    )
