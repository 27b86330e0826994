"""Donor prompts of an interchange intervention: what a prompt would be if one thing in it were
exchanged.

1. A prompt's *partner* is the label that its answer is exchanged with: with two labels, the other
   one.
2. Texts or labels of the answer and its partner change places within the prompt (`exchange_texts`,
   `exchange_labels`). Demonstrations of further labels stay as they are.
3. Another query of the partner's class, or of the same class, comes from the other prompts
   (`other_queries`).
4. One demonstration's text changes class, or those of all others (`with_own_text`,
   `with_other_texts`). The text of the other class that replaces it is one of the two queries,
   which no demonstration shows.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
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
    shown = {demonstration.label for demonstration in prompt.demonstrations}
    if prompt.answer not in shown or len(shown) < 2:
        raise InputError(
            "every prompt must demonstrate its answer and another label, got the answer "
            f"{prompt.answer!r} and the labels {sorted(shown)} with query {prompt.query!r}; add "
            "answers and demonstrations, or use prompts with classes: pairs, whose answers are "
            "words of their own, have nothing to exchange"
        )
    start = prompt.labels.index(prompt.answer)
    following = (*prompt.labels[start + 1 :], *prompt.labels[:start])
    return next(label for label in following if label in shown)


def exchange_texts(prompt: Prompt) -> Prompt:
    """Return the prompt with the texts of its answer and partner exchanged, in order; labels stay,
    the answer changes.

    If one label has more demonstrations than the other, the other's texts are repeated.
    """
    exchanged = _exchanged(prompt)
    texts = [
        _text(prompt, exchanged.get(index, index)) for index in range(len(prompt.demonstrations))
    ]
    return _with(prompt, texts=texts, answer=partner_label(prompt))


def exchange_labels(prompt: Prompt) -> Prompt:
    """Return the prompt with its answer and partner exchanged in all demonstrations, and as the
    answer; texts stay.
    """
    answer, partner = prompt.answer, partner_label(prompt)
    label = {answer: partner, partner: answer}
    shown = [
        Demonstration(one.text, label.get(one.label, one.label)) for one in prompt.demonstrations
    ]
    return Prompt(shown, prompt.query, partner, prompt.labels)


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

    They are queries or, if there are none, demonstration texts of the other prompts. The class of a
    text is that which a task gives to its label or, for prompts of one's own, the label itself. If
    prompts of one's own show the same text with different labels, as when labels are exchanged in
    half of the prompts, classes are derived from the texts that prompts share. If no other prompt
    has such a text, one of the prompt's own demonstrations is taken.
    """
    names = _class_names(prompts)
    queries: dict[str, list[str]] = {}
    texts: dict[str, list[str]] = {}
    for prompt, class_of in zip(prompts, names, strict=True):
        if (own := class_of.get(str(prompt.answer))) is not None:
            queries.setdefault(own, []).append(prompt.query)
        for shown in prompt.demonstrations:
            if shown.label in class_of:
                texts.setdefault(class_of[shown.label], []).append(shown.text)
    pools = [
        {name: list(dict.fromkeys(some)) for name, some in pool.items()}
        for pool in (queries, texts)
    ]
    found = []
    for prompt, class_of in zip(prompts, names, strict=True):
        rng = random.Random(f"{prompt}")
        labels = partner_label(prompt), str(prompt.answer)
        found.append(
            Queries(
                *(
                    rng.choice(_unshown(prompt, label, class_of.get(label), pools))
                    for label in labels
                )
            )
        )
    return found


def _unshown(
    prompt: Prompt, label: str, class_name: str | None, pools: Sequence[Mapping[str, Sequence[str]]]
) -> list[str]:
    """Return the texts of a class in the first pool with texts that the prompt does not show, else
    those of a label.
    """
    used = {prompt.query, *(shown.text for shown in prompt.demonstrations)}
    for pool in pools if class_name is not None else ():
        if some := [text for text in pool.get(str(class_name), ()) if text not in used]:
            return some
    return [shown.text for shown in prompt.demonstrations if shown.label == label]


def with_query(prompt: Prompt, query: str, answer: str | None) -> Prompt:
    """Return the prompt with another query and answer."""
    return Prompt(prompt.demonstrations, query, answer, prompt.labels)


def with_own_text(prompt: Prompt, index: int, queries: Queries) -> Prompt:
    """Return the prompt up to a demonstration whose text alone changes class; its label is not the
    last token.

    What follows is left out, because no key before it depends on it. Demonstrations of further
    labels do not change.
    """
    texts = [shown.text for shown in prompt.demonstrations]
    texts[index] = _spare(prompt, index, queries, same=False)
    return _up_to(_with(prompt, texts=texts, answer=prompt.answer), index)


def with_other_texts(prompt: Prompt, index: int, queries: Queries) -> Prompt:
    """Return the prompt up to a demonstration whose text alone does not change class; see
    `with_own_text`.
    """
    exchanged = _exchanged(prompt)
    texts = [
        _text(prompt, exchanged.get(other, other)) for other in range(len(prompt.demonstrations))
    ]
    for other, source in exchanged.items():
        if source == index:  # where the text that stays would be shown a second time
            texts[other] = _spare(prompt, index, queries, same=True)
    texts[index] = _text(prompt, index)
    return _up_to(_with(prompt, texts=texts, answer=prompt.answer), index)


def _spare(prompt: Prompt, index: int, queries: Queries, *, same: bool) -> str:
    """Return the query that is of the class of a demonstration or, if not `same`, of the class that
    it changes to.
    """
    label = prompt.demonstrations[index].label
    if label not in (prompt.answer, partner_label(prompt)):
        return _text(prompt, index)
    return prompt.query if (label == prompt.answer) == same else queries.other


def _exchanged(prompt: Prompt) -> dict[int, int]:
    """Return, for each demonstration of the answer or its partner, the one whose text it gets."""
    pair = str(prompt.answer), partner_label(prompt)
    own, other = (
        [i for i, shown in enumerate(prompt.demonstrations) if shown.label == label]
        for label in pair
    )
    sources: Iterator[int]
    found = {}
    for places, sources in ((own, cycle(other)), (other, cycle(own))):
        found |= dict(zip(places, sources, strict=False))
    return found


def _text(prompt: Prompt, index: int) -> str:
    return prompt.demonstrations[index].text


def _with(prompt: Prompt, *, texts: Sequence[str], answer: str | None) -> Prompt:
    """Return the prompt with other texts, in the order of its demonstrations."""
    shown = [
        Demonstration(text, one.label)
        for text, one in zip(texts, prompt.demonstrations, strict=True)
    ]
    return Prompt(shown, prompt.query, answer, prompt.labels)


def _up_to(prompt: Prompt, index: int) -> Prompt:
    """Return the prompt without the demonstrations after one."""
    return Prompt(prompt.demonstrations[: index + 1], prompt.query, None, prompt.labels)


def _class_names(prompts: Sequence[Prompt]) -> list[dict[str, str]]:
    """Return the class of each prompt's labels, as far as it is known; see `other_queries`."""
    if all(prompt.classes is not None for prompt in prompts):
        return [dict(prompt.classes or {}) for prompt in prompts]
    by_text: dict[str, set[str]] = {}
    for prompt in prompts:
        for text, label in _labeled(prompt):
            by_text.setdefault(text, set()).add(label)
    if all(len(labels) == 1 for labels in by_text.values()):
        return [{label: label for label in prompt.labels} for prompt in prompts]
    return _linked_classes(prompts)


def _linked_classes(prompts: Sequence[Prompt]) -> list[dict[str, str]]:
    """Return the class of each label of prompts with two labels that shared texts link to the first
    prompt.

    Return no class at all if a text would belong to both classes, or if some prompts are not
    linked.
    """
    unknown: list[dict[str, str]] = [{} for _ in prompts]
    pairs = {frozenset(label for _, label in _labeled(prompt)) for prompt in prompts}
    if len(pairs) != 1 or len(pair := sorted(next(iter(pairs)))) != 2:
        return unknown
    other = dict(zip(pair, pair[::-1], strict=True))
    prompts_of: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        for text, _ in _labeled(prompt):
            prompts_of.setdefault(text, []).append(row)
    is_exchanged: dict[int, bool] = {0: False}
    class_of: dict[str, str] = {}
    waiting = [0]
    while waiting:
        row = waiting.pop()
        for text, label in _labeled(prompts[row]):
            own = other[label] if is_exchanged[row] else label
            if class_of.setdefault(text, own) != own:
                return unknown
            for linked in prompts_of[text]:
                if linked not in is_exchanged:
                    is_exchanged[linked] = dict(_labeled(prompts[linked]))[text] != own
                    waiting.append(linked)
    if len(is_exchanged) < len(prompts):
        return unknown
    return [
        other if is_exchanged[row] else {label: label for label in pair}
        for row in range(len(prompts))
    ]


def _labeled(prompt: Prompt) -> list[tuple[str, str]]:
    """Return the prompt's texts with their labels, the query with the answer if it is known."""
    shown = [(one.text, one.label) for one in prompt.demonstrations]
    return shown if prompt.answer is None else [*shown, (prompt.query, prompt.answer)]
