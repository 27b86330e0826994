"""Prompts with the same query and texts in other arrangements, so that two of them differ in one thing only."""

import random
from collections.abc import Sequence

import icl_lens as il


def prompts_by_frequency(prompts: Sequence[il.Prompt], shown: int, seed: int) -> dict[str, list[il.Prompt]]:
    """Return four lists of prompts: the answer's label is on most, few, half and half of their demonstrations.

    Of 2 · `shown` demonstrations, the rarer label has shown // 2, but at least one. The last demonstration has the
    answer's label in every other row of all four lists. "majority balanced" and "minority balanced" have the prompts of
    "majority" and "minority", with some demonstrations of the frequent label, but not the first or last, replaced by
    ones of the other label.
    """
    rng = random.Random(seed)
    few = max(1, shown // 2)
    found: dict[str, list[il.Prompt]] = {}
    for row, prompt in enumerate(prompts):
        for name, n_own in (("majority", 2 * shown - few), ("minority", few)):
            is_own = [True] * n_own + [False] * (2 * shown - n_own)
            is_own.remove(row % 2 == 0)
            rng.shuffle(is_own)
            is_own.append(row % 2 == 0)
            found.setdefault(name, []).append(_with_demonstrations(prompt, is_own))
            many = [place for place in range(1, 2 * shown - 1) if is_own[place] == (name == "majority")]
            for place in rng.sample(many, shown - few):
                is_own[place] = not is_own[place]
            found.setdefault(f"{name} balanced", []).append(_with_demonstrations(prompt, is_own))
    return found


def _with_demonstrations(prompt: il.Prompt, is_own: Sequence[bool]) -> il.Prompt:
    """Return the prompt with some of its demonstrations: the next one with (True) or without the answer's label."""
    kinds = {
        own: iter([one for one in prompt.demonstrations if (one.label == prompt.answer) == own]) for own in {*is_own}
    }
    return il.Prompt([next(kinds[own]) for own in is_own], prompt.query, prompt.answer, prompt.labels)


def without_last_true(prompt: il.Prompt) -> il.Prompt:
    """Return the prompt without its last demonstration that has the answer's label."""
    shown = list(prompt.demonstrations)
    del shown[max(i for i, one in enumerate(shown) if one.label == prompt.answer)]
    return il.Prompt(shown, prompt.query, prompt.answer, prompt.labels)


def orders_by_label(prompts: Sequence[il.Prompt], place: int, seed: int) -> tuple[list[il.Prompt], list[il.Prompt]]:
    """Return each prompt in two orders: with the answer's label at `place`, 0 or -1, and with another label there.

    One of the two is the prompt itself. In the other one, the demonstration at `place` and a random one with another
    label, which is neither first nor last, have been exchanged.
    """
    rng = random.Random(seed)
    favored, unfavored = [], []
    for prompt in prompts:
        shown = list(prompt.demonstrations)
        is_favored = shown[place].label == prompt.answer
        partner = rng.choice([i for i in range(1, len(shown) - 1) if shown[i].label != shown[place].label])
        shown[place], shown[partner] = shown[partner], shown[place]
        other = il.Prompt(shown, prompt.query, prompt.answer, prompt.labels)
        favored.append(prompt if is_favored else other)
        unfavored.append(other if is_favored else prompt)
    return favored, unfavored
