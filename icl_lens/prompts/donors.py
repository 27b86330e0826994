"""Donor prompts of an interchange intervention: what a prompt would be if one thing in it were
exchanged.

1. A prompt's *partner* is the label that its answer is exchanged with: with two labels, the other
   one.
2. Texts or labels of the answer and its partner change places within the prompt (`exchange_texts`,
   `exchange_labels`). Demonstrations of further labels stay as they are.
3. Another query of the partner's class, or of the same class, comes from the other prompts
   (`other_queries`).
4. The demonstrations' texts are replaced by others of the same class (`same_class_texts`).
5. One demonstration's text changes class, or those of all others (`with_own_text`,
   `with_other_texts`). The text of the other class that replaces it is one of the two queries,
   which no demonstration shows.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import Demonstration, Prompt


def donor_prompts(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Return each prompt with one thing exchanged: donors of interchange interventions, in the
    order of `prompts`.

    - "query": the same demonstrations with a query of another class, whose label, the partner, is
      the answer;
    - "same class": with another query of the same class;
    - "texts": the texts of the answer and its partner exchanged, so that the partner is the answer;
      labels stay;
    - "labels": the labels exchanged, so that the partner is the answer; texts stay.

    With two labels, the partner is the other one. Queries come from the other prompts. Raise
    InputError for prompts that do not demonstrate their answer and another label. Source:
    docs/howto/edits.md.

    Example:
        >>> prompts = il.load_task("animal-country", n=20)
        >>> print(prompts[0])
        Kenya : foo buffalo : bar crab : bar Scotland : foo Bolivia :
        >>> print(il.donor_prompts(prompts)["labels"][0])
        Kenya : bar buffalo : foo crab : foo Scotland : bar Bolivia :
    """
    queries = other_queries(prompts)
    donors: dict[str, list[Prompt]] = {"query": [], "same class": [], "texts": [], "labels": []}
    for prompt, texts in zip(prompts, queries, strict=True):
        donors["query"].append(with_query(prompt, texts.other, partner_label(prompt)))
        donors["same class"].append(with_query(prompt, texts.same, prompt.answer))
        donors["texts"].append(exchange_texts(prompt))
        donors["labels"].append(exchange_labels(prompt))
    return donors


def partner_label(prompt: Prompt) -> str:
    """Return the label that the answer is exchanged with: the next one that is demonstrated, in the
    order of `labels`.

    Raise InputError unless the prompt demonstrates its answer and another label.
    """
    demonstrated = {demonstration.label for demonstration in prompt.demonstrations}
    if prompt.answer not in demonstrated or len(demonstrated) < 2:
        raise InputError(
            "every prompt must demonstrate its answer and another label, got the answer "
            f"{prompt.answer!r} and the labels {sorted(demonstrated)} with query "
            f"{prompt.query!r}; add answers and demonstrations, or use prompts with classes: "
            "pairs, whose answers are words of their own, have nothing to exchange"
        )
    start = prompt.labels.index(prompt.answer)
    following = (*prompt.labels[start + 1 :], *prompt.labels[:start])
    return next(label for label in following if label in demonstrated)


def exchange_texts(prompt: Prompt) -> Prompt:
    """Return the prompt with the texts of its answer and partner exchanged, in order; labels stay,
    the answer changes.

    If one label has more demonstrations than the other, the other's texts are repeated.
    """
    return _with_texts(prompt, _exchanged_texts(prompt), answer=partner_label(prompt))


def exchange_labels(prompt: Prompt) -> Prompt:
    """Return the prompt with its answer and partner exchanged in all demonstrations, and as the
    answer; texts stay.
    """
    answer, partner = prompt.answer, partner_label(prompt)
    exchanged = {answer: partner, partner: answer}
    demonstrations = []
    for demonstration in prompt.demonstrations:
        label = exchanged.get(demonstration.label, demonstration.label)
        demonstrations.append(Demonstration(demonstration.text, label))
    return Prompt(demonstrations, prompt.query, partner, prompt.labels, separator=prompt.separator)


class Queries(NamedTuple):
    """Queries of a prompt's two classes, neither of which a demonstration shows, if there are such
    queries.
    """

    other: str
    """A text of the partner's class."""
    same: str
    """Another text of the answer's class."""


def other_queries(prompts: Sequence[Prompt]) -> list[Queries]:
    """Return, for each prompt, a query of its partner's class and another one of its own class.

    They are queries or, if there are none, demonstration texts of the other prompts. A task tells
    the class of its labels' texts; in your own prompts, the class of a text is its label. If your
    own prompts show the same text with different labels, as when labels are exchanged in half of
    the prompts, classes are derived from the texts that prompts share. If no other prompt has such
    a text, one of the prompt's own demonstrations is taken.
    """
    class_names = _class_names(prompts)
    pools = _pools(prompts, class_names)
    queries = []
    for prompt, class_of in zip(prompts, class_names, strict=True):
        rng = random.Random(f"{prompt}")
        answer, partner = str(prompt.answer), partner_label(prompt)
        of_partner = rng.choice(_unshown(prompt, partner, class_of.get(partner), pools))
        of_answer = rng.choice(_unshown(prompt, answer, class_of.get(answer), pools))
        queries.append(Queries(other=of_partner, same=of_answer))
    return queries


def same_class_texts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with other texts of the same classes in their demonstrations; labels,
    query and answer stay.

    Texts are those of the other prompts, each used once in a prompt if there are enough. A text
    whose class is unknown (see `other_queries`), or that has no other, stays.
    """
    class_names = _class_names(prompts)
    pools = list(reversed(_pools(prompts, class_names)))
    changed = []
    for prompt, class_of in zip(prompts, class_names, strict=True):
        rng = random.Random(f"same class {prompt}")
        texts: list[str] = []
        for demonstration in prompt.demonstrations:
            label = demonstration.label
            unused: list[str] = []
            if label in class_of:
                candidates = _unshown(prompt, label, class_of[label], pools)
                used = {prompt.query, *_texts(prompt), *texts}
                unused = [text for text in candidates if text not in used]
            texts.append(rng.choice(unused) if unused else demonstration.text)
        changed.append(_with_texts(prompt, texts, answer=prompt.answer))
    return changed


def _pools(
    prompts: Sequence[Prompt], class_names: Sequence[Mapping[str, str]]
) -> list[dict[str, list[str]]]:
    """Return the queries, and the demonstrations' texts, of each class."""
    queries_of: dict[str, list[str]] = {}
    texts_of: dict[str, list[str]] = {}
    for prompt, class_of in zip(prompts, class_names, strict=True):
        answer_class = class_of.get(str(prompt.answer))
        if answer_class is not None:
            queries_of.setdefault(answer_class, []).append(prompt.query)
        for demonstration in prompt.demonstrations:
            if demonstration.label in class_of:
                texts = texts_of.setdefault(class_of[demonstration.label], [])
                texts.append(demonstration.text)
    return [_without_repeats(queries_of), _without_repeats(texts_of)]


def _without_repeats(texts_of: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the different texts of each class, in their order."""
    return {name: list(dict.fromkeys(texts)) for name, texts in texts_of.items()}


def _unshown(
    prompt: Prompt, label: str, class_name: str | None, pools: Sequence[Mapping[str, Sequence[str]]]
) -> list[str]:
    """Return the texts of a class in the first pool with texts that the prompt does not show, else
    those of a label.
    """
    texts = [demonstration.text for demonstration in prompt.demonstrations]
    if class_name is not None:
        for pool in pools:
            unused = [
                text for text in pool.get(class_name, ()) if text not in {prompt.query, *texts}
            ]
            if unused:
                return unused
    return [
        demonstration.text
        for demonstration in prompt.demonstrations
        if demonstration.label == label
    ]


def with_query(prompt: Prompt, query: str, answer: str | None) -> Prompt:
    """Return the prompt with another query and answer."""
    return Prompt(prompt.demonstrations, query, answer, prompt.labels, separator=prompt.separator)


def with_own_text(prompt: Prompt, index: int, queries: Queries) -> Prompt:
    """Return the prompt up to a demonstration whose text alone changes class; its label is not the
    last token.

    What follows is left out, because no key before it depends on it. Demonstrations of further
    labels do not change.
    """
    texts = _texts(prompt)
    texts[index] = _spare(prompt, index, queries, same=False)
    return _up_to(_with_texts(prompt, texts, answer=prompt.answer), index)


def with_other_texts(prompt: Prompt, index: int, queries: Queries) -> Prompt:
    """Return the prompt up to a demonstration whose text alone does not change class; see
    `with_own_text`.
    """
    texts = _exchanged_texts(prompt)
    for place, source in _text_sources(prompt).items():
        if source == index:  # where the text that stays would be shown a second time
            texts[place] = _spare(prompt, index, queries, same=True)
    texts[index] = prompt.demonstrations[index].text
    return _up_to(_with_texts(prompt, texts, answer=prompt.answer), index)


def _spare(prompt: Prompt, index: int, queries: Queries, *, same: bool) -> str:
    """Return the query that is of the class of a demonstration or, if not `same`, of the class that
    it changes to.
    """
    demonstration = prompt.demonstrations[index]
    if demonstration.label not in (prompt.answer, partner_label(prompt)):
        return demonstration.text
    is_of_answer = demonstration.label == prompt.answer
    return prompt.query if is_of_answer == same else queries.other


def _text_sources(prompt: Prompt) -> dict[int, int]:
    """Return, for each demonstration of the answer or its partner, the index of the demonstration
    whose text it gets.
    """
    partner = partner_label(prompt)
    of_answer, of_partner = [], []
    for index, demonstration in enumerate(prompt.demonstrations):
        if demonstration.label == prompt.answer:
            of_answer.append(index)
        elif demonstration.label == partner:
            of_partner.append(index)
    sources = dict(zip(of_answer, cycle(of_partner), strict=False))
    return sources | dict(zip(of_partner, cycle(of_answer), strict=False))


def _exchanged_texts(prompt: Prompt) -> list[str]:
    """Return the demonstrations' texts, those of the answer and of its partner exchanged."""
    texts = _texts(prompt)
    exchanged = list(texts)
    for index, source in _text_sources(prompt).items():
        exchanged[index] = texts[source]
    return exchanged


def _texts(prompt: Prompt) -> list[str]:
    return [demonstration.text for demonstration in prompt.demonstrations]


def _with_texts(prompt: Prompt, texts: Sequence[str], *, answer: str | None) -> Prompt:
    """Return the prompt with other texts, in the order of its demonstrations."""
    demonstrations = []
    for text, demonstration in zip(texts, prompt.demonstrations, strict=True):
        demonstrations.append(Demonstration(text, demonstration.label))
    return Prompt(demonstrations, prompt.query, answer, prompt.labels, separator=prompt.separator)


def _up_to(prompt: Prompt, index: int) -> Prompt:
    """Return the prompt without the demonstrations after one."""
    return Prompt(
        prompt.demonstrations[: index + 1],
        prompt.query,
        None,
        prompt.labels,
        separator=prompt.separator,
    )


def _class_names(prompts: Sequence[Prompt]) -> list[dict[str, str]]:
    """Return the class of each prompt's labels, as far as it is known; see `other_queries`."""
    if all(prompt.classes is not None for prompt in prompts):
        return [dict(prompt.classes or {}) for prompt in prompts]
    labels_of: dict[str, set[str]] = {}
    for prompt in prompts:
        for text, label in _labeled(prompt):
            labels_of.setdefault(text, set()).add(label)
    if all(len(labels) == 1 for labels in labels_of.values()):
        return [dict(zip(prompt.labels, prompt.labels, strict=True)) for prompt in prompts]
    return _linked_classes(prompts)


def _linked_classes(prompts: Sequence[Prompt]) -> list[dict[str, str]]:
    """Return the class of each label of prompts with two labels that shared texts link to the first
    prompt.

    Return no class at all if a text would belong to both classes, or if some prompts are not
    linked.
    """
    unknown: list[dict[str, str]] = [{} for _ in prompts]
    pair = _label_pair(prompts)
    if pair is None:
        return unknown
    partner_of = dict(zip(pair, reversed(pair), strict=True))
    is_exchanged = _exchanged_prompts(prompts, partner_of)
    if is_exchanged is None or len(is_exchanged) < len(prompts):
        return unknown
    as_they_are = dict(zip(pair, pair, strict=True))
    return [partner_of if is_exchanged[row] else as_they_are for row in range(len(prompts))]


def _label_pair(prompts: Sequence[Prompt]) -> list[str] | None:
    """Return the two labels that all prompts show; None if they show others or more."""
    label_sets = set()
    for prompt in prompts:
        label_sets.add(frozenset(label for _, label in _labeled(prompt)))
    if len(label_sets) != 1:
        return None
    labels = sorted(label_sets.pop())
    return labels if len(labels) == 2 else None


def _exchanged_prompts(
    prompts: Sequence[Prompt], partner_of: Mapping[str, str]
) -> dict[int, bool] | None:
    """Return, for each prompt that shared texts link to the first, whether its labels are exchanged
    compared with those of the first; None if a text would belong to both classes.
    """
    rows_with: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        for text, _ in _labeled(prompt):
            rows_with.setdefault(text, []).append(row)
    is_exchanged: dict[int, bool] = {0: False}
    class_of: dict[str, str] = {}
    waiting = [0]
    while waiting:
        row = waiting.pop()
        for text, label in _labeled(prompts[row]):
            text_class = partner_of[label] if is_exchanged[row] else label
            if class_of.setdefault(text, text_class) != text_class:
                return None
            for linked in rows_with[text]:
                if linked not in is_exchanged:
                    is_exchanged[linked] = dict(_labeled(prompts[linked]))[text] != text_class
                    waiting.append(linked)
    return is_exchanged


def _labeled(prompt: Prompt) -> list[tuple[str, str]]:
    """Return the prompt's texts with their labels, the query with the answer if it is known."""
    pairs = [(demonstration.text, demonstration.label) for demonstration in prompt.demonstrations]
    if prompt.answer is not None:
        pairs.append((prompt.query, prompt.answer))
    return pairs
