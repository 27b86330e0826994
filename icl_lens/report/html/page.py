"""The page of one explanation."""

from pathlib import Path

from icl_lens.files import write_text
from icl_lens.report.findings import Findings
from icl_lens.report.html import sections
from icl_lens.report.html.assets import document
from icl_lens.report.html.element import frame
from icl_lens.report.html.escaping import chip, safe
from icl_lens.report.html.heads import explorer, located_table
from icl_lens.report.html.sections import section
from icl_lens.report.html.token_strips import label_legend
from icl_lens.report.number_format import percent


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


def _free_headline(explanation: Findings, sizes: str) -> str:
    token, probability = explanation.next_tokens[0]
    index = explanation.labels.index(token) if token in explanation.labels else None
    target = f"{chip(explanation.target, 0)} ({percent(explanation.label_probs[explanation.target])})"
    others = [
        f"{chip(name, explanation.labels.index(name))} ({percent(explanation.label_probs[name])})"
        for name in explanation.compared_with
    ]
    against = f" against {', '.join(others)}" if others else ""
    return (
        f"<h1>The model continues with {chip(token, index)}</h1>"
        f"<p>With probability {percent(probability)}, after {len(explanation.tokens)} tokens. Explained here: "
        f"{target}{against}. {sizes}</p></header>"
    )


def headline(explanation: Findings) -> str:
    """What the model says, as a heading and a line of facts."""
    n_layers, n_heads = len(explanation.head_increases), len(explanation.head_increases[0])
    top = f'<header class="top"><p class="eyebrow">icl-lens · {safe(explanation.model)}</p>'
    if explanation.prompt is None:
        return top + _free_headline(explanation, f"{n_layers} layers of {n_heads} heads.")
    index = explanation.labels.index(explanation.predicted)
    right = explanation.prompt.answer
    verdict = "" if right is None else (", rightly" if right == explanation.predicted else f", not {chip(right)}")
    probability = percent(explanation.label_probs[explanation.predicted])
    says = "Among its labels the model prefers" if explanation.has_multi_token_labels else "The model says"
    return (
        f"{top}<h1>{says} {chip(explanation.predicted, index)}{verdict}</h1>"
        f"<p>With probability {probability}, after {len(explanation.prompt.demonstrations)} demonstrations in "
        f"{len(explanation.tokens)} tokens. {n_layers} layers of {n_heads} heads.</p></header>"
    )


def body(explanation: Findings) -> str:
    """Everything on the page, without scripts and styles."""
    target = chip(explanation.target, explanation.labels.index(explanation.target))
    removed = ", ".join(map(str, explanation.ablation.heads))
    n_described, free = len(explanation.heads), explanation.is_plain_text
    return "".join(
        [
            headline(explanation),
            section(
                "prompt",
                "Prompt",
                "The text the model continues"
                + ("." if free else "; each demonstration’s label is marked in its color."),
                sections.prompt_text(explanation) + ("" if free else label_legend(explanation.labels)),
            ),
            section(
                "answer",
                "Next token" if free else "Answer",
                "Probability of the explained token"
                + (" and of those it is compared with" if explanation.compared_with else "")
                + ", among the whole vocabulary."
                if free
                else "Probability of each label’s token as the next token, among the whole vocabulary.",
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
                (
                    f"The {n_described} heads that raise {target} most, the tokens they attend to most from the last "
                    f"one, and the probability of {target} with one of them zeroed."
                    if free
                    else f"The {n_described} heads that raise {target} most, how much of their attention from the last "
                    f"token falls on each label, and the probability of {target} with one of them zeroed."
                ),
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
                f"{'Token' if free else 'Label'} probabilities with {removed} zeroed together: the located heads "
                "matter if the probability moves further than with as many random heads.",
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
