"""Four arrangements of a prompt's demonstrations, in which what a model does by each label has a
sign of its own.

1. Two classes are compared: that of the query, and its *partner*, whose label is the next one that
   is demonstrated (see `prompts.donors.partner_label`). Both get as many demonstrations; what one of them
   has more is left out.
2. The query's class comes last. In half of the prompts, all of its demonstrations are last and all
   of its partner's are first; the others also begin with the query's class, and are in random order
   between. In the mirrored order, each demonstration of one of the two classes is where one of the
   other was.
3. Both orders run with the original labels, and with the labels of the two classes exchanged,
   also in the answer.

A model that sees only which labels stand where answers the same after both steps as before:
mirroring the order and exchanging the labels undo each other. One that goes by the texts does not.
"""

import random
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from icl_lens.prompts.donors import exchange_labels, partner_label
from icl_lens.prompts.prompt import Prompt

Arrangement = Literal["last", "other", "last, exchanged", "other, exchanged"]
"""Whether a demonstration of the query's class or of its partner is last, and whether their labels
are exchanged.
"""


@dataclass(frozen=True)
class ArrangedPrompt:
    """A prompt in four arrangements."""

    prompts: dict[Arrangement, Prompt]
    answer: str
    """The prompt's answer, before labels are exchanged."""
    partner: str
    """The label that the answer is exchanged with."""
    starts_as_it_ends: bool
    """Whether the first demonstration has the same label as the last one; otherwise, it has the
    other label.
    """


def arrange(prompt: Prompt, *, seed: int = 0) -> ArrangedPrompt:
    """Return the prompt's four arrangements; the order depends on the seed and the prompt, not on
    other prompts.

    If both classes have two demonstrations or more, about half of the prompts begin with the class
    that they end with.

    Raise InputError unless the prompt demonstrates its answer and another label.

    Example:
        >>> from icl_lens.analyses.arrangements import arrange
        >>> arranged = arrange(il.Prompt.parse("love : bar one : foo two :", answer="foo"))
        >>> for name, shown in arranged.prompts.items():
        ...     print(f"{name}: {shown} {shown.answer}")
        last: love : bar one : foo two : foo
        other: one : foo love : bar two : foo
        last, exchanged: love : foo one : bar two : bar
        other, exchanged: one : bar love : foo two : bar
    """
    answer, partner = str(prompt.answer), partner_label(prompt)
    rng = random.Random(f"{seed} {prompt}")
    places: dict[str, list[int]] = {label: [] for label in prompt.labels}
    for place, demonstration in enumerate(prompt.demonstrations):
        places[demonstration.label].append(place)
    rng.shuffle(places[answer])
    rng.shuffle(places[partner])
    n_each = min(len(places[answer]), len(places[partner]))
    of_answer, of_partner = places.pop(answer)[:n_each], places.pop(partner)[:n_each]

    of_third_labels = [*chain(*places.values())]
    rng.shuffle(of_third_labels)
    starts_as_it_ends = n_each > 1 and rng.random() < 0.5
    if starts_as_it_ends:
        between = [*of_answer[2:], *of_partner, *of_third_labels]
        rng.shuffle(between)
        order = [of_answer[1], *between, of_answer[0]]
    else:
        order = [*of_partner, *of_third_labels, *of_answer]
    mirror = dict(zip((*of_answer, *of_partner), (*of_partner, *of_answer), strict=True))
    mirrored = [mirror.get(place, place) for place in order]

    def ask(order: list[int]) -> Prompt:
        demonstrations = [prompt.demonstrations[place] for place in order]
        return Prompt(
            demonstrations, prompt.query, answer, prompt.labels, separator=prompt.separator
        )

    prompts: dict[Arrangement, Prompt] = {
        "last": ask(order),
        "other": ask(mirrored),
        "last, exchanged": exchange_labels(ask(order)),
        "other, exchanged": exchange_labels(ask(mirrored)),
    }
    return ArrangedPrompt(prompts, answer, partner, starts_as_it_ends)
