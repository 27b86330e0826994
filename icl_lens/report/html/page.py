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
    """Return the explanation as one self-contained HTML document that loads no external resources."""
    return document(title(explanation), f"<main>{body(explanation)}</main>", circuitsvis=True)


def explanation_inline(explanation: Findings) -> str:
    """Return the page as an inline frame for notebooks, with a static fallback for viewers that strip frames."""
    return frame("Explanation", explanation_page(explanation), body(explanation), height=720)


def write_page(page: str, path: str | Path) -> None:
    """Write a page to `path` atomically. Raise InputError if the folder is not writable."""
    write_text(path, page)


def title(explanation: Findings) -> str:
    """Return the page's title, escaped."""
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
        f"<p>Probability {percent(probability)}, after {len(explanation.tokens)} tokens. Explained token: "
        f"{target}{against}. {sizes}</p></header>"
    )


def headline(explanation: Findings) -> str:
    """Return the model's prediction as a heading and a line of facts."""
    n_layers, n_heads = len(explanation.head_increases), len(explanation.head_increases[0])
    top = f'<header class="top"><p class="eyebrow">icl-lens · {safe(explanation.model)}</p>'
    if explanation.prompt is None:
        return top + _free_headline(explanation, f"{n_layers} layers of {n_heads} heads.")
    index = explanation.labels.index(explanation.predicted)
    right = explanation.prompt.answer
    verdict = "" if right is None else (", correctly" if right == explanation.predicted else f", not {chip(right)}")
    probability = percent(explanation.label_probs[explanation.predicted])
    says = "Among the labels, the model prefers" if explanation.has_multi_token_labels else "The model predicts"
    return (
        f"{top}<h1>{says} {chip(explanation.predicted, index)}{verdict}</h1>"
        f"<p>Probability {probability}, after {len(explanation.prompt.demonstrations)} demonstrations in "
        f"{len(explanation.tokens)} tokens. {n_layers} layers of {n_heads} heads.</p></header>"
    )


def body(explanation: Findings) -> str:
    """Return the content of the page, without scripts and styles."""
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
                + ("." if free else "; each demonstration’s label is highlighted in its color."),
                sections.prompt_text(explanation) + ("" if free else label_legend(explanation.labels)),
            ),
            section(
                "answer",
                "Next token" if free else "Answer",
                "Probability of the explained token"
                + (" and of the tokens it is compared with" if explanation.compared_with else "")
                + ", over the full vocabulary."
                if free
                else "Probability of each label’s token as the next token, over the full vocabulary.",
                sections.answer(explanation),
            ),
            section(
                "layers",
                "Layers",
                f"How much each layer’s attention and FFN outputs raise the log-probability of {target} when added to "
                "the residual stream before them. The increases of heads and positions do not sum to their layer’s.",
                sections.layers(explanation),
            ),
            section(
                "located",
                "Located heads",
                (
                    f"The {n_described} heads that raise {target} most, the tokens they attend to most from the last "
                    f"token, and the probability of {target} with that head alone zeroed."
                    if free
                    else f"The {n_described} heads that raise {target} most, their attention from the last token to "
                    f"each label, and the probability of {target} with that head alone zeroed."
                ),
                located_table(explanation),
            ),
            section(
                "heads",
                "All heads",
                "One cell per head: blue raises the log-probability, orange lowers it. Located heads are ringed. "
                "Select a cell to show its head below.",
                explorer(explanation),
            ),
            section(
                "removal",
                "Ablating the located heads",
                f"{'Token' if free else 'Label'} probabilities with {removed} zeroed jointly. The located heads matter "
                "if the probability changes more than with the same number of random heads.",
                sections.removal(explanation),
            ),
            section(
                "parts",
                "Largest parts",
                f"The (head, position) pairs that raise {target} most. The parts of a head need not sum to its "
                "increase.",
                sections.parts(explanation),
            ),
            section(
                "configuration",
                "Configuration",
                "The settings behind all numbers above, and the command that reproduces them.",
                sections.configuration(explanation),
            ),
        ]
    )
