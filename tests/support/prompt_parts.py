"""Texts and labels of a prompt's demonstrations."""

from collections.abc import Iterable

import icl_lens as il


def texts_of(prompt: il.Prompt) -> list[str]:
    return [demonstration.text for demonstration in prompt.demonstrations]


def labels_of(prompt: il.Prompt) -> list[str]:
    return [demonstration.label for demonstration in prompt.demonstrations]


def pairs_of(prompt: il.Prompt) -> list[tuple[str, str]]:
    return list(zip(texts_of(prompt), labels_of(prompt), strict=True))


def demonstrated_texts(prompts: Iterable[il.Prompt]) -> set[str]:
    """The texts of all prompts' demonstrations."""
    texts: set[str] = set()
    for prompt in prompts:
        texts.update(texts_of(prompt))
    return texts
