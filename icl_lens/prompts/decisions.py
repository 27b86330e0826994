"""Whole labels, and the decisions between them that the rows of a batch end at."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError


@dataclass(frozen=True, eq=False)
class Decisions:
    """The whole labels that the columns of a batch stand for, and the decision that each row ends
    at (`PromptBatch.decisions`).

    Labels may begin with the same tokens. They share a column up to the token at which they part,
    and a prompt has one row for each decision between them (see `tokenize`). If no labels begin
    alike, each label has a column and each prompt a row. Source: docs/howto/own_dataset.md.

    Example:
        >>> batch.decisions.whole_labels, batch.decisions.groups
        (('bar', 'foo'), (('bar',), ('foo',)))
    """

    whole_labels: tuple[str, ...]
    """The labels as they are written; none for texts without demonstrations."""
    groups: tuple[tuple[str, ...], ...]
    """The whole labels that each of `PromptBatch.labels` stands for: several if their tokens are
    the same up to a decision.
    """
    n_appended: Int[Tensor, " batch"]
    """How many label tokens were appended to the prompt to make each row: those that its labels
    begin with alike.
    """
    prompt_index: Int[Tensor, " batch"] | None = None
    """The index of each row's prompt, if prompts have several rows; None if each has one."""

    @classmethod
    def without_labels(cls, n_rows: int) -> "Decisions":
        """Return those of rows that have no labels."""
        return cls((), (), torch.zeros(n_rows, dtype=torch.long))

    @property
    def begin_alike(self) -> bool:
        """Whether labels begin with the same tokens, so that a column stands for several or a
        prompt has several rows.
        """
        return self.prompt_index is not None or any(len(group) > 1 for group in self.groups)

    def whole_scores(
        self, scores: Float[Tensor, "batch label"], choices: Bool[Tensor, "batch label"]
    ) -> Float[Tensor, "prompt whole_label"]:
        """Return each whole label's score: the sum over its decisions; one row per prompt, columns
        `whole_labels`.

        `choices` is `PromptBatch.label_mask`. Sums of log-probabilities (`il.score`) are exact up
        to a label's tokens after its last decision, which are not scored: nothing else could
        follow. Labels that no row of a prompt offers have −∞. Tokenize prompts without answers to
        have the decisions of all labels; with an answer, those of other labels that agree with each
        other are missing.
        Raise InputError for rows without labels.

        Example:
            >>> scores = il.score(model, batch)
            >>> bool((batch.decisions.whole_scores(scores, batch.label_mask) == scores).all())
            True
        """
        if not self.whole_labels:
            raise InputError(
                "the prompts are plain text, so there is no label to score; score the answer of an "
                "il.Text instead"
            )
        scores, choices = scores.as_subclass(Tensor), choices.to(scores.device)
        stands_for = torch.zeros(len(self.groups), len(self.whole_labels)).to(scores)
        for column, group in enumerate(self.groups):
            stands_for[column, [self.whole_labels.index(label) for label in group]] = 1
        offered_scores = scores.masked_fill(~choices, 0.0) @ stands_for
        n_offered = choices.to(scores) @ stands_for
        if self.prompt_index is None:
            prompt_of_row = torch.arange(len(self.n_appended))
        else:
            prompt_of_row = self.prompt_index.cpu()
        _, prompt_of_row = prompt_of_row.unique(return_inverse=True)
        by_row = torch.stack([offered_scores, n_offered], dim=-1)
        by_prompt = by_row.new_zeros(int(prompt_of_row.max()) + 1, *by_row.shape[1:])
        by_prompt = by_prompt.index_add(0, prompt_of_row.to(scores.device), by_row)
        total, n_choices = by_prompt.unbind(-1)
        return total.masked_fill(n_choices == 0, -torch.inf)

    def select(self, rows: list[int]) -> "Decisions":
        """Return those of the selected rows."""
        index = None if self.prompt_index is None else self.prompt_index[rows]
        return replace(self, n_appended=self.n_appended[rows], prompt_index=index)

    def to(self, device: torch.device | str) -> "Decisions":
        """Return a copy with its tensors on `device`."""
        index = None if self.prompt_index is None else self.prompt_index.to(device)
        return replace(self, n_appended=self.n_appended.to(device), prompt_index=index)
