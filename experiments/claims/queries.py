"""The same prompt with its texts exchanged."""

from dataclasses import replace

import icl_lens as il


def texts_exchanged(prompt: il.Prompt) -> il.Prompt:
    """True texts where false ones stood and false where true, labels in place; the answer is the other label."""
    by_label: dict[str, list[str]] = {}
    for demonstration in prompt.demonstrations:
        by_label.setdefault(demonstration.label, []).append(demonstration.text)
    other = {label: next(name for name in by_label if name != label) for label in by_label}
    left = {label: list(by_label[other[label]]) for label in by_label}
    shown = [replace(demonstration, text=left[demonstration.label].pop(0)) for demonstration in prompt.demonstrations]
    answer = next(label for label in prompt.labels if label != prompt.answer)
    return il.Prompt(shown, prompt.query, answer, prompt.labels)
