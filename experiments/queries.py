"""The same demonstrations with a query of the other class."""

from dataclasses import replace

import icl_lens as il
from experiments.study import Study, Variant


def other_queries(study: Study, variant: Variant) -> list[il.Prompt]:
    """Each prompt of a variant, asked about a text of its false class that it does not show, and so answered otherwise.

    The text is another prompt's false demonstration, of the same class where classes are fixed, as in word tasks.
    """
    prompts = study.prompts(variant)
    swapped = []
    for i, prompt in enumerate(prompts):
        shown = {demonstration.text for demonstration in prompt.demonstrations} | {prompt.query}
        answer = next(label for label in prompt.labels if label != prompt.answer)
        texts = (
            demonstration.text
            for step in range(1, len(prompts))
            for demonstration in prompts[(i + step) % len(prompts)].demonstrations
            if demonstration.label == answer and demonstration.text not in shown
        )
        swapped.append(il.Prompt(prompt.demonstrations, next(texts), answer, prompt.labels))
    return swapped


def texts_exchanged(prompt: il.Prompt) -> il.Prompt:
    """True texts where false ones stood and the other way round, labels in place; the answer is the other label."""
    by_label: dict[str, list[str]] = {}
    for demonstration in prompt.demonstrations:
        by_label.setdefault(demonstration.label, []).append(demonstration.text)
    other = {label: next(name for name in by_label if name != label) for label in by_label}
    left = {label: list(by_label[other[label]]) for label in by_label}
    shown = [replace(demonstration, text=left[demonstration.label].pop(0)) for demonstration in prompt.demonstrations]
    answer = next(label for label in prompt.labels if label != prompt.answer)
    return il.Prompt(shown, prompt.query, answer, prompt.labels)
