"""How a tokenizer's chat template writes the turns of a conversation.

1. Conversations of made-up words are rendered, and the texts are cut at these words.
2. What is left between the words is what the template writes before, between and after turns. It
   must be the same in all turns, so that demonstrations can be written by one format.
"""

import re
from typing import Any, NamedTuple

from icl_lens.errors import InputError
from icl_lens.prompts.chat_template import render_conversations

N_TURNS = 7
"""Turns of the longest conversation: three demonstrations and the query."""


class ChatFormat(NamedTuple):
    """The fields of a `Template` that write demonstrations as turns of a chat."""

    demonstration: str
    query: str
    prefix: str


def chat_format(tokenizer: Any, *, text: str, label: str, system: str | None) -> ChatFormat:
    """Return the format of demonstrations in a tokenizer's chat template.

    The user says `text`, with {text} in it, and the model answers `label`, with {label} in it.
    Raise InputError for a template that leaves messages out, repeats them, or writes turns
    differently by their place.
    """
    words = [f"icl{number}lens" for number in range(N_TURNS)]
    messages = []
    for number, word in enumerate(words):
        if number % 2 == 0:
            messages.append({"role": "user", "content": text.replace("{text}", word)})
        else:
            messages.append({"role": "assistant", "content": label.replace("{label}", word)})
    first = [] if system is None else [{"role": "system", "content": system}]
    conversations = []
    for n_turns in (N_TURNS, 2, 1):
        ends_with_user = n_turns % 2 == 1  # then the model's turn is begun
        conversations.append(([*first, *messages[:n_turns]], ends_with_user))
    any_word = "|".join(words)
    all_turns, two_turns, one_turn = (
        re.split(any_word, rendered) for rendered in render_conversations(tokenizer, conversations)
    )
    if [len(all_turns), len(two_turns), len(one_turn)] != [N_TURNS + 1, 3, 2]:
        raise InputError(
            "the chat template must write each message once, but it leaves some out or repeats "
            "them; write the turns as an il.Template of your own"
        )
    prefix, to_label, to_text, *later_turns, end = all_turns
    closing = two_turns[-1]  # of the model's turn
    opening = to_text.removeprefix(closing)  # of the user's turn
    query = (end + label.partition("{label}")[0]).rstrip(" ")
    are_alike = (
        later_turns == [to_label, to_text] * 2
        and one_turn == [prefix, end]
        and to_text.startswith(closing)
        and prefix.endswith(opening)
        and to_label.rstrip(" ") == query
    )
    if not are_alike:
        raise InputError(
            "the chat template must write all turns alike, but they differ by their place; "
            "write them out as an il.Template of your own"
        )
    return ChatFormat(
        demonstration=f"{opening}{{text}}{to_label}{{label}}{closing}",
        query=f"{opening}{{text}}{query}",
        prefix=prefix.removesuffix(opening),
    )
