"""What a live view looks at, as a plain value."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.foundation.ranking_scores import SCORES, Score
from icl_lens.models.head import AnyHead, Head, as_head
from icl_lens.prompts.prompt import Demonstration, Prompt, check_unicode

Change = Literal["removed", "query", "keys", "values"]
"""What is done to the chosen heads at the last position: zeroed, or one thing exchanged (see
`two_towers`).
"""
CHANGES: tuple[Change, ...] = get_args(Change)


@dataclass(frozen=True)
class LiveState:
    """The prompt of a live view, the chosen heads with what is done to them, and the score that the
    map shows.

    Texts and labels may be incomplete while they are typed; `prompt` raises InputError until they
    make a prompt.

    Example:
        >>> state = il.results.LiveState.of(prompt, heads=["L5H0"])
        >>> state.prompt == prompt, state.heads, state.change
        (True, ('L5H0',), 'removed')
        >>> il.results.LiveState.from_dict(state.to_dict()) == state
        True
    """

    demonstrations: tuple[tuple[str, str], ...]
    """Text and label of each demonstration."""
    query: str
    answer: str | None = None
    """The label whose log-odds are shown; None for the label that the model predicts."""
    heads: tuple[str, ...] = ()
    """Chosen heads, such as "L5H0"; the last one is explained."""
    change: Change = "removed"
    by: Score = "contrast"
    """The score of all heads that the map shows."""
    labels: tuple[str, ...] = ()
    """Labels to choose from beside those of the demonstrations, such as an answer of its own."""

    @classmethod
    def of(cls, prompt: Prompt, *, heads: Sequence[AnyHead] = ()) -> "LiveState":
        """Return the state that shows a prompt with some heads chosen."""
        demonstrations = tuple((part.text, part.label) for part in prompt.demonstrations)
        demonstrated = {label for _, label in demonstrations}
        return cls(
            demonstrations,
            prompt.query,
            prompt.answer,
            heads=tuple(str(as_head(head)) for head in heads),
            labels=tuple(label for label in prompt.labels if label not in demonstrated),
        )

    @property
    def prompt(self) -> Prompt:
        """The prompt; raise InputError if its texts and labels do not make one."""
        if not self.demonstrations:
            raise InputError("the prompt has no demonstration; add a text with its label")
        demonstrations = [Demonstration(text, label) for text, label in self.demonstrations]
        if not self.query.strip():
            raise InputError("the query is empty; write the text whose label the model predicts")
        if not self.labels:
            return Prompt(demonstrations, self.query, self.answer)
        labels = dict.fromkeys([label for _, label in self.demonstrations])
        labels |= dict.fromkeys(self.labels)
        return Prompt(demonstrations, self.query, self.answer, tuple(labels))

    def with_prompt(self, prompt: Prompt) -> "LiveState":
        """Return the state with another prompt; what is chosen stays."""
        state = LiveState.of(prompt)
        return replace(state, heads=self.heads, change=self.change, by=self.by)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as lists and strings."""
        return asdict(self) | {"demonstrations": list(map(list, self.demonstrations))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LiveState":
        """Return the state of `to_dict`; raise InputError for anything else."""
        check_choice("change", values.get("change", "removed"), CHANGES)
        check_choice("by", values.get("by", "contrast"), SCORES)
        try:
            demonstrations = tuple((text, label) for text, label in values["demonstrations"])
            state = cls(
                demonstrations,
                values["query"],
                values.get("answer"),
                tuple(values.get("heads", ())),
                values.get("change", "removed"),
                values.get("by", "contrast"),
                tuple(values.get("labels", ())),
            )
            answer = () if state.answer is None else (state.answer,)
            texts = [state.query, *state.labels, *answer]
            for text, label in demonstrations:
                texts += [text, label]
            check_unicode(*texts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"state must be what LiveState.to_dict returns, got {short_repr(values)}: {error}"
            ) from None
        for head in state.heads:
            Head.parse(head)
        return state
