"""What the joint removal of lists of heads costs, beside random heads of the same layers.

1. `remove_lists` scores every prompt without removal, with the heads of each list zeroed together at
   the last position, and with each of its random sets zeroed. All lists share a prompt's prefix.
2. `ListRemoval` keeps what the answer loses, with intervals over queries and random sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.foundation.intervals import Interval
from icl_lens.measures.answer_scores import score_answers
from icl_lens.measures.controlled_ablation import columns_of_sets, conditions_of_sets
from icl_lens.measures.controlled_ablation_result import ConditionName, ControlledAblation
from icl_lens.measures.head_findings import heads_matter
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start


@dataclass(frozen=True)
class ListRemoval:
    """What the answer loses if the heads of a list are zeroed together at the last position.

    The unit is nats of the answer's log-odds or, for prompts without other labels, the share of
    prompts whose answer is the top token.
    """

    heads: tuple[Head, ...]
    intact: float
    """The log-odds, or the share, without removal."""
    lost: Interval
    """What is lost without the heads."""
    lost_by_random: Interval
    """What is lost without as many random heads of the same layers, mean over sets."""
    difference: Interval
    """How much more is lost without the heads than without random ones."""
    unit: str
    """"nats" or "share"."""

    @classmethod
    def from_ablation(cls, ablation: ControlledAblation) -> "ListRemoval":
        """Return the losses of an ablation that has random heads of the same layers."""
        measure = ablation.finding_measure
        return cls(
            ablation.heads,
            intact=float(ablation.per_prompt("no ablation", measure).mean()),
            lost=ablation.difference("no ablation", "heads", measure),
            lost_by_random=ablation.difference("no ablation", "same layers", measure),
            difference=ablation.difference("same layers", "heads", measure),
            unit="nats" if measure == "log_odds" else "share",
        )

    @property
    def shows_that_heads_matter(self) -> bool:
        """Whether the answer loses something, and is shown to lose more than without random heads."""
        return heads_matter(self.lost.value, self.difference)


def remove_lists(
    view: ModelView,
    batch: PromptBatch,
    lists: Mapping[str, Sequence[Head]],
    *,
    n_random: int,
    seed: int,
    run: Run | None = None,
) -> dict[str, ListRemoval]:
    """Return what the answer loses without each list of heads, by the name of the list.

    `n_random` sets of random heads from the layers of each list are its control.
    """
    head_sets_of_lists: dict[str, dict[ConditionName, list[list[Head]]]] = {}
    edits = [Ablate([], positions="last")]
    for name, heads in lists.items():
        drawn = random_head_sets(view.model, heads, n_random=n_random, seed=seed)
        head_sets_of_lists[name] = {"heads": [list(heads)], "same layers": drawn}
        edits += [replace(edits[0], heads=head_set) for head_set in ([*heads], *drawn)]
    edits = Ablate.prepare(view, edits, None)

    def compute(rows: list[int]) -> dict[str, Tensor]:
        return columns_of_sets(score_answers(view, batch[rows], [[edit] for edit in edits]))

    options = {
        "lists": {name: list(map(str, heads)) for name, heads in lists.items()},
        "n_random_sets": n_random,
        "seed": seed,
    }
    plan = plan_in_order(batch, run, n_tokens=PASS_TOKENS // len(edits))
    with start(run, view.model, batch, "removal", options, plan=plan) as stream:
        columns = stream.map("heads of each score removed", compute)
    removals: dict[str, ListRemoval] = {}
    first = 1
    for name, head_sets in head_sets_of_lists.items():
        n_sets = 1 + n_random
        places = [0, *range(first, first + n_sets)]
        first += n_sets
        ablation = ControlledAblation(
            heads=tuple(lists[name]),
            conditions=conditions_of_sets(
                batch,
                {"no ablation": [[]], **head_sets},
                columns["scores"][:, places],
                columns["top1"][:, places],
            ),
            queries=batch.queries,
            labels=tuple(batch.labels),
            positions="last",
        )
        removals[name] = ListRemoval.from_ablation(ablation)
    return removals
