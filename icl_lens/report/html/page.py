"""The page of one explanation."""

from pathlib import Path

from icl_lens.files import write_text
from icl_lens.report.findings import Findings
from icl_lens.report.html import sections
from icl_lens.report.html.element import frame
from icl_lens.report.html.heads import explorer, located_table
from icl_lens.report.html.script import document
from icl_lens.report.html.sections import section
from icl_lens.report.html.strips import label_legend
from icl_lens.report.html.text import chip, percent, safe


def explanation_page(explanation: Findings) -> str:
    """The explanation as one self-contained HTML document, which fetches nothing."""
    return document(title(explanation), f"<main>{body(explanation)}</main>", circuitsvis=True)


def explanation_inline(explanation: Findings) -> str:
    """The same page as an inline frame for notebooks, with a static twin for where frames are stripped."""
    return frame("Explanation", explanation_page(explanation), body(explanation), height=720)


def write_page(page: str, path: str | Path) -> None:
    """Writes a page beside `path`, then moves it there; raises InputError where the folder does not allow it."""
    write_text(path, page)


def title(explanation: Findings) -> str:
    """The page's title, escaped."""
    return f"{safe(explanation.model)}: {safe(explanation.target)} explained"


def headline(explanation: Findings) -> str:
    """What the model says, as a heading and a line of facts."""
    index = explanation.labels.index(explanation.predicted)
    right = explanation.prompt.answer
    verdict = "" if right is None else (", rightly" if right == explanation.predicted else f", not {chip(right)}")
    probability = percent(explanation.label_probs[explanation.predicted])
    n_layers, n_heads = len(explanation.head_increases), len(explanation.head_increases[0])
    return (
        f'<header class="top"><p class="eyebrow">icl-lens · {safe(explanation.model)}</p>'
        f"<h1>The model says {chip(explanation.predicted, index)}{verdict}</h1>"
        f"<p>With probability {probability}, after {len(explanation.prompt.demonstrations)} demonstrations in "
        f"{len(explanation.tokens)} tokens. {n_layers} layers of {n_heads} heads.</p></header>"
    )


def body(explanation: Findings) -> str:
    """Everything on the page, without scripts and styles."""
    target = chip(explanation.target, explanation.labels.index(explanation.target))
    removed = ", ".join(map(str, explanation.ablation.heads))
    n_described = len(explanation.heads)
    return "".join(
        [
            headline(explanation),
            section(
                "prompt",
                "Prompt",
                "The text the model continues; each demonstration’s label is marked in its colour.",
                sections.prompt_text(explanation) + label_legend(explanation.labels),
            ),
            section(
                "answer",
                "Answer",
                "Probability of each label’s token as the next token, among the whole vocabulary.",
                sections.answer(explanation),
            ),
            section(
                "layers",
                "Layers",
                f"How much each layer’s attention and FFN raise the log-probability of {target} when added to what "
                "comes before it; the increases of heads and positions do not add up to their layer’s.",
                sections.layers(explanation),
            ),
            section(
                "located",
                "Located heads",
                f"The {n_described} heads that raise {target} most, how much of their attention from the last token "
                f"falls on each label, and the probability of {target} with one of them zeroed.",
                located_table(explanation),
            ),
            section(
                "heads",
                "All heads",
                "One cell a head, blue where it raises the log-probability and orange where it lowers it; the "
                "located ones are ringed, and choosing a cell shows that head below.",
                explorer(explanation),
            ),
            section(
                "removal",
                "Removing the located heads",
                f"Label probabilities with {removed} zeroed together: the located heads matter if the probability "
                "moves further than with as many random heads.",
                sections.removal(explanation),
            ),
            section(
                "parts",
                "Largest parts",
                f"The single (head, position) pairs that raise {target} most; the parts of a head need not sum to its "
                "increase.",
                sections.parts(explanation),
            ),
            section(
                "configuration",
                "Configuration",
                "The conventions behind every number above, and the command that computes them again.",
                sections.configuration(explanation),
            ),
        ]
    )
