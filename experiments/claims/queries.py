"""The same prompt with its texts exchanged, its labels shuffled, or other label words."""

from collections.abc import Iterable
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


def labels_shuffled(prompt: il.Prompt, seed: int) -> il.Prompt:
    """The same texts, each class with both labels in turn, so that labels say nothing about the class."""
    count: dict[str, int] = {}
    shown = []
    for demonstration in prompt.demonstrations:
        count[demonstration.label] = count.get(demonstration.label, seed % 2) + 1
        shown.append(replace(demonstration, label=prompt.labels[count[demonstration.label] % 2]))
    return il.Prompt(shown, prompt.query, prompt.answer, prompt.labels)


def relabelled(prompts: Iterable[il.Prompt], labels: tuple[str, str]) -> list[il.Prompt]:
    """The same prompts with other label words: `labels` in place of each prompt's two, in their order."""
    others = []
    for prompt in prompts:
        new = dict(zip(prompt.labels, labels, strict=True))
        shown = [replace(demonstration, label=new[demonstration.label]) for demonstration in prompt.demonstrations]
        others.append(il.Prompt(shown, prompt.query, None if prompt.answer is None else new[prompt.answer], labels))
    return others
