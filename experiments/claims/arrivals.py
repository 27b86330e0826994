"""What arrives at heads on another task: queries, labels of all prompts as keys, and how well one finds the other."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import icl_lens as il
from experiments.claims.two_tower import CELLS
from experiments.lab.passes import Tensors
from experiments.lab.reductions import correct
from experiments.lab.study import Study
from icl_lens.digest import json_digest


class Retrieved(NamedTuple):
    """By query: chance that a key of its class scores above one of the other; and that the best key is of its class."""

    auroc: Float[Tensor, " query"]
    first: Float[Tensor, " query"]


@dataclass(frozen=True)
class Arrivals:
    """What arrives on a task's prompts: queries, and the labels of all prompts as keys; classes and words of both."""

    task: str
    layers: tuple[int, ...]
    queries: Float[Tensor, "query layer d_model"]
    keys: Float[Tensor, "key layer d_model"]
    query_class: Bool[Tensor, " query"]
    key_class: Bool[Tensor, " key"]
    query_words: list[str]
    key_words: list[str]
    seen: list[tuple[str, ...]]
    """The words that a key has before it, its own among them."""
    stratum: Int[Tensor, " key"]
    """Keys of one stratum stand at the same demonstration, bear the same label, and their texts have as many tokens."""
    distance: int
    """From a label to the end of its prompt: the median."""
    right: Float[Tensor, " query"]
    """1 where the model's answer is right."""

    home: torch.device
    """Where the model is."""

    def at(self, layer: int) -> tuple[Float[Tensor, "query d_model"], Float[Tensor, "key d_model"]]:
        """Queries' and keys' residual streams that enter a layer, where the model is."""
        place = self.layers.index(layer)
        return self.queries[:, place].to(self.home), self.keys[:, place].to(self.home)

    @cached_property
    def other_word(self) -> Bool[Tensor, "query key"]:
        """Which keys have other words before them than the query's: its own would be found by its letters."""
        behind: dict[str, set[int]] = {}
        for key, words in enumerate(self.seen):
            for word in words:
                behind.setdefault(word, set()).add(key)
        allowed = torch.ones(len(self.query_words), len(self.seen), dtype=torch.bool)
        for row, word in enumerate(self.query_words):
            allowed[row, sorted(behind.get(word, ()))] = False
        return allowed

    @cached_property
    def strata(self) -> list[Int[Tensor, " key_of_one"]]:
        """The keys of each stratum."""
        return [(self.stratum == one).nonzero()[:, 0] for one in self.stratum.unique()]

    def retrieved(self, similarity: Float[Tensor, "query key"], *, pooled: bool = False) -> Retrieved:
        """Both yardsticks, the mean over strata; `pooled`: among the keys of all strata together."""
        same, allowed = self.query_class[:, None] == self.key_class, self.other_word
        if pooled:
            return retrieved(similarity, same, allowed)
        found = [torch.stack(retrieved(similarity[:, keys], same[:, keys], allowed[:, keys])) for keys in self.strata]
        return Retrieved(*torch.stack(found).nanmean(0))


def retrieved(
    similarity: Float[Tensor, "query key"], same: Bool[Tensor, "query key"], allowed: Bool[Tensor, "query key"]
) -> Retrieved:
    """Both yardsticks for each query, ties by their share; NaN for a query without keys of either kind."""
    similarity = similarity.double()
    right, wrong = same & allowed, ~same & allowed
    below = similarity.masked_fill(~wrong, torch.inf).sort(1).values
    wins = (torch.searchsorted(below, similarity) + torch.searchsorted(below, similarity, right=True)).double() / 2
    auroc = (wins * right).sum(1) / (right.sum(1) * wrong.sum(1))
    best = similarity.masked_fill(~allowed, -torch.inf)
    tied = best == best.max(1, keepdim=True).values
    first = (tied & right).sum(1) / tied.sum(1)
    return Retrieved(auroc, first.double().masked_fill(auroc.isnan(), torch.nan))


def _arriving(study: Study, batch: il.PromptBatch, layers: tuple[int, ...]) -> Tensors:
    """streams [prompt layer place d_model] that enter these layers, at the last position (first) and at each label.

    right [prompt]: whether the answer is.
    """
    acts, some = il.capture(study.model, batch), list(layers)
    streams = torch.cat([acts.resid_pre[:, some, None], acts.label_resid_pre[:, some]], dim=2)
    return {"streams": streams.float().cpu(), "right": correct(acts)}


def arrivals(study: Study, task: str, layers: tuple[int, ...], prompts: int) -> Arrivals:
    """One pass over this many prompts of the task, which take turns in two-tower's cells.

    Both orders, both labels as the true one, queries of both classes.
    """
    rows = torch.arange(min(prompts, study.settings.n))
    streams, right, distances, strata = [], [], [], []
    query_class, key_class, query_words, key_words, seen = [], [], [], [], []
    for place, cell in enumerate(CELLS):
        cell, own = replace(cell, task=task), rows[place :: len(CELLS)]
        if not len(own):
            continue
        key = f"arrivals-{json_digest([repr(cell), layers, own.tolist()])[:12]}"
        found = study.over(
            cell, own, lambda some: _arriving(study, some, layers), what=f"what arrives, {cell}", key=key
        )
        streams.append(found["streams"])
        right.append(found["right"])
        batch = study.batch(cell)[own]
        label = batch.label_index.cpu()
        query_class += [cell.asked == "true"] * len(own)
        key_class.append(((label == 0) != cell.swapped).flatten())
        # Classes differ in how long their words are: a head that compares lengths would rank them.
        length = (batch.text_ranges[..., 1] - batch.text_ranges[..., 0]).cpu()
        strata.append((2 * (label.shape[1] * length + torch.arange(label.shape[1])) + label).flatten())
        query_words += [prompt.query for prompt in batch.prompts]
        texts = [[shown.text for shown in prompt.demonstrations] for prompt in batch.prompts]
        key_words += [text for some in texts for text in some]
        seen += [tuple(some[: place + 1]) for some in texts for place in range(len(some))]
        distances.append((batch.last[:, None] - batch.label_positions).flatten().cpu())
    x = torch.cat(streams)
    return Arrivals(
        task=task,
        layers=layers,
        queries=x[:, :, 0],
        keys=x[:, :, 1:].transpose(1, 2).flatten(0, 1),
        query_class=torch.tensor(query_class),
        key_class=torch.cat(key_class),
        query_words=query_words,
        key_words=key_words,
        seen=seen,
        stratum=torch.cat(strata),
        distance=int(torch.cat(distances).median()),
        right=torch.cat(right).cpu(),
        home=study.view.home,
    )
