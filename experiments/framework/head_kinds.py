"""Heads located on several kinds of tasks: how many they share, and what removing those of one kind costs another.

1. Every task that the model does has a list of the k heads of largest mean contrast on its locating prompts.
2. Two kinds share the mean overlap of their lists, over all pairs of different tasks. Random lists have as many heads
   in each layer.
3. A kind's heads cost another kind what the answers of its held-out prompts lose, on average over pairs of different
   tasks, if the heads of a task of the first kind are set to zero at the last position. Random heads are of the same
   layers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.framework.estimate import Comparison, compare, compare_drawn
from experiments.framework.overlap import Lists, expected_overlap, most_shared_by_chance, overlap
from experiments.framework.study import Study, compared_tokens
from icl_lens.errors import InputError

Kind = Literal["arbitrary labels", "natural labels", "chat", "pairs", "copying"]
LABEL_KINDS: tuple[Kind, ...] = ("arbitrary labels", "natural labels", "chat", "pairs")
KINDS: tuple[Kind, ...] = (*LABEL_KINDS, "copying")
"""Heads of copying tasks are removed, but their answers are not tested: they are a control."""
DRAWS = 2000
"""Draws of random lists, of all tasks jointly."""
RANDOM_SETS = 10
"""Random sets of heads of a kind of tasks, divided among its tasks, and at least one for each."""
N_TESTED = 20
"""Held-out prompts of a task on which heads are removed."""

Lost = Float[np.ndarray, "row set unit"]
"""What answers lose, nats: log-odds against what they are compared with, and log p."""
UNITS = ("log_odds", "log_prob")


@dataclass(frozen=True)
class Located:
    """A task that the model does, and the heads located on it."""

    heads: Sequence[il.Head]
    """Best first."""
    lists: Lists
    """The same heads, in the data and in each bootstrap draw."""
    accuracy: Comparison
    """On the prompts that heads are located on, next to guessing."""
    last: Lists | None = None
    """As many heads, those that write the output shown last; None if no outputs are shown."""
    kind: Kind | None = None
    """None for tasks that are compared with the study's own only."""
    tested: il.PromptBatch | None = None
    """Held-out prompts on which heads are removed; None for tasks of which only the heads are used."""

    @property
    def note(self) -> str:
        right, chance = (f"{100 * share:.0f}%" for share in (self.accuracy.quantity, self.accuracy.control))
        return f"{right} of the answers are right (guessing: {chance})"


Tasks = Mapping[str, Located]


def of_kind(tasks: Tasks, kind: Kind) -> dict[str, Located]:
    """Return the tasks of a kind."""
    return {name: one for name, one in tasks.items() if one.kind == kind}


def shared(tasks: Tasks, first: Kind, second: Kind) -> Comparison:
    """Compare the overlap of two kinds' lists with that of random lists; raise InputError without two tasks."""
    names = _pairs(of_kind(tasks, first), of_kind(tasks, second))
    pairs = [(tasks[a], tasks[b]) for a, b in names if first != second or a < b]
    return mean_overlap([(one.lists, other.lists) for one, other in pairs], [one for pair in pairs for one in pair])


def shared_with_last(tasks: Tasks, kind: Kind) -> Comparison:
    """Compare the overlap of located heads and heads that write the output shown last with that of random lists."""
    found = [one for one in of_kind(tasks, kind).values() if one.last is not None]
    if not found:
        raise InputError(NO_TASK)
    return mean_overlap([(one.lists, one.last) for one in found if one.last is not None], found)


NO_TASK = "the model does no two different tasks of these kinds"


def mean_overlap(lists: Sequence[tuple[Lists, Lists]], tasks: Sequence[Located]) -> Comparison:
    """Compare the mean overlap of pairs of lists with that of random lists, both in each bootstrap draw."""
    found = np.mean([overlap(*pair) for pair in lists], axis=0)
    random = np.mean([expected_overlap(*pair) for pair in lists], axis=0)
    n_clusters = min(one.accuracy.n_clusters for one in tasks)
    return compare_drawn(found, random, 0, n_clusters, n_heads=int(lists[0][0][0].sum()), bounds=(0, 1))


def _pairs(first: Tasks, second: Tasks) -> list[tuple[str, str]]:
    """Return all pairs of a task of the first and a different one of the second kind; raise InputError without any."""
    found = [(a, b) for a in first for b in second if a != b]
    if not found:
        raise InputError(NO_TASK)
    return found


def most_shared(tasks: Tasks) -> Iterator[dict[str, Any]]:
    """Yield every head with the number of lists it is on, next to the largest number of any head in all draws."""
    tasks = {name: one for name, one in tasks.items() if one.kind != "copying"}
    by_chance = int(most_shared_by_chance(np.stack([one.lists[0] for one in tasks.values()]), DRAWS, seed=0).max())
    kinds = {kind: of_kind(tasks, kind) for kind in LABEL_KINDS}
    on_lists = Counter(head for one in tasks.values() for head in one.heads)
    for head, count in sorted(on_lists.items(), key=lambda pair: (-pair[1], pair[0])):
        by_kind = {kind: sum(head in one.heads for one in some.values()) for kind, some in kinds.items()}
        yield {
            "what": "head",
            "first": str(head),
            "quantity": count,
            "control": by_chance,
            "high": len(tasks),
            "text": ", ".join(f"{kind} {n}/{len(kinds[kind])}" for kind, n in by_kind.items()),
        }


class Removals:
    """What the answers of each task lose without the located heads of every task, and without random heads."""

    def __init__(self, study: Study, tasks: Tasks) -> None:
        self.tasks = tasks
        self.lost: dict[tuple[str, str], Float[np.ndarray, "row unit"]] = {}
        self.random: dict[tuple[str, str], Float[np.ndarray, "row unit"]] = {}
        sets = {name: [one.heads, *self._random_sets(study, one)] for name, one in tasks.items()}
        every = [heads for some in sets.values() for heads in some]
        for target, one in tasks.items():
            if one.tested is None:
                continue
            lost, start = losses(study, one.tested, every), 0
            for source, some in sets.items():
                of_source = lost[:, start : start + len(some)]
                self.lost[source, target], self.random[source, target] = of_source[:, 0], of_source[:, 1:].mean(1)
                start += len(some)

    def _random_sets(self, study: Study, one: Located) -> list[list[il.Head]]:
        n_tasks = sum(other.kind == one.kind for other in self.tasks.values())
        return study.random_sets(one.heads, max(1, -(-RANDOM_SETS // n_tasks)))

    def cost(self, source: Kind | None, target: Kind, unit: str = "log_odds") -> Comparison:
        """Compare what the target kind's answers lose without the source kind's heads and without random heads.

        Without a source, the heads are those located on each target task itself. The interval resamples queries.
        """
        targets = {name: one for name, one in of_kind(self.tasks, target).items() if one.tested is not None}
        sources = targets if source is None else of_kind(self.tasks, source)
        pairs = [(name, name) for name in targets] if source is None else _pairs(sources, targets)
        if not pairs:
            raise InputError(NO_TASK)
        place = UNITS.index(unit)
        lost, random, queries = [], [], list[str]()
        for name, one in targets.items():
            own = [pair for pair in pairs if pair[1] == name]
            if own and one.tested is not None:
                lost.append(np.mean([self.lost[pair][:, place] for pair in own], axis=0))
                random.append(np.mean([self.random[pair][:, place] for pair in own], axis=0))
                queries += [prompt.query for prompt in one.tested.prompts]
        clusters = np.unique(queries, return_inverse=True)[1]
        return compare(np.concatenate(lost), np.concatenate(random), clusters)

    def means(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield (heads of, answers of, lost log-odds, lost without random heads) for all pairs of tasks."""
        for (source, target), lost in self.lost.items():
            yield source, target, float(lost[:, 0].mean()), float(self.random[source, target][:, 0].mean())


def losses(study: Study, batch: il.PromptBatch, sets: Sequence[Sequence[il.Head]]) -> Lost:
    """Return what each prompt's answer loses without each set of heads, which are set to zero at the last position."""
    found = []
    for piece in study.pieces(batch):
        edits = [[], *([il.Ablate(heads, positions="last")] for heads in sets)]
        scores = il.score(study.model, piece, edits, read=AnswerScores(piece)).cpu().double()
        found.append((scores[:, :1] - scores[:, 1:]).numpy())
    return np.concatenate(found)


class AnswerScores:
    """Reads the answer's log-odds against all that it is compared with, and its log p."""

    def __init__(self, batch: il.PromptBatch) -> None:
        self.answers, self.others = batch.answer_tokens.cpu(), compared_tokens(batch).cpu()

    def __call__(self, log_probs: Float[Tensor, "row vocab"], prompt: Tensor) -> Float[Tensor, "row unit"]:
        device = log_probs.device
        answers, others = self.answers[prompt].to(device), self.others[prompt].to(device)
        own = log_probs.gather(1, answers[:, None])[:, 0]
        rivals = log_probs.gather(1, others.clamp(min=0)).masked_fill(others < 0, -torch.inf).logsumexp(1)
        return torch.stack([own - rivals, own], dim=1)
