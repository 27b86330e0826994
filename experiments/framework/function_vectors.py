"""Function vectors of sets of heads, for tasks whose labels have no meaning of their own (Todd et al. 2023).

A function vector is the sum of heads' mean outputs at the last position over prompts of a task. With arbitrary labels,
a task is one assignment of labels to classes, and its vector should restore the assignment when it is added to prompts
whose labels say nothing. Both assignments are tried on the same texts, so a vector that favors one label gains nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il
from experiments.framework.study import Study, clusters_of
from icl_lens.interventions.function_vectors import read_with_vectors

MAX_PROMPTS = 100
"""Maximum number of prompts of each assignment for function vectors and indirect effects."""
N_VECTOR_SETS = 5
"""Number of random sets of heads whose vectors are added."""
MAX_LAYERS = 8
"""Maximum number of layers after which adding a vector is tried."""


@dataclass(frozen=True)
class Assignment:
    """Prompts with one assignment of labels to classes, and prompts whose labels are unrelated to the class."""

    reference: il.PromptBatch
    """Locating half, with the right labels: what outputs are averaged over."""
    locating: il.PromptBatch
    """The same prompts with shuffled labels; the answer is still that of the assignment."""
    held_out: il.PromptBatch
    """Held-out prompts, with shuffled labels as well."""


def assignments(study: Study) -> Iterator[Assignment]:
    """Return both assignments of labels to classes, on the same texts; natural labels have one."""
    n = min(study.n, MAX_PROMPTS)
    for exchanged in (False,) if study.task.natural else (False, True):
        prompts = study.task.prompts(3 * n, seed=study.seed, exchanged=exchanged, fixed=True)
        locating, held_out = il.split_by_query(prompts, n)
        shuffled = [
            study.tokenize([shuffle_labels(prompt, row) for row, prompt in enumerate(half)])
            for half in (locating, held_out)
        ]
        yield Assignment(study.tokenize(locating), *shuffled)


def shuffle_labels(prompt: il.Prompt, seed: int) -> il.Prompt:
    """Return the prompt with the labels of each class alternating, so that they carry no information about it."""
    count: dict[str, int] = {}
    shown = []
    for one in prompt.demonstrations:
        count[one.label] = count.get(one.label, seed % 2) + 1
        shown.append(replace(one, label=prompt.labels[count[one.label] % 2]))
    return il.Prompt(shown, prompt.query, prompt.answer, prompt.labels)


@dataclass(frozen=True)
class IndirectEffects:
    """What each head's mean output, in place of its own at the last position, restores in held-out prompts."""

    probability: Float[Tensor, "row layer head"]
    """Effects on the answer's probability, as in Todd et al.; heads that raise both labels equally count as well."""
    log_odds: Float[Tensor, "row layer head"]
    """Effects on the answer's log-odds against the other label, nats."""
    clusters: Int[np.ndarray, " row"]


def indirect_effects(study: Study, tasks: Sequence[Assignment]) -> IndirectEffects:
    """Measure every head's indirect effect on the held-out prompts of all assignments."""
    probability, log_odds = [], []
    for task in tasks:
        lost = il.head_effects(study.model, task.held_out, positions="last", mode="mean", reference=task.reference)
        own = il.last_log_probs(study.model, task.held_out).gather(1, task.held_out.answer_tokens[:, None])[..., None]
        probability.append(((own - lost.log_prob).exp() - own.exp()).cpu())
        log_odds.append(-lost.log_odds.cpu())
    clusters = np.concatenate([clusters_of(task.held_out) for task in tasks])
    return IndirectEffects(torch.cat(probability), torch.cat(log_odds), clusters)


def without_demonstrations(study: Study, batch: il.PromptBatch) -> il.PromptBatch:
    """Return the batch's queries alone, written by the task's template."""
    template = study.task.template
    queries = [template.prefix + template.query.replace("{text}", prompt.query) for prompt in batch.prompts]
    return il.tokenize_text(study.model, queries, targets=batch.answer_tokens)


def steered(
    study: Study, tasks: Sequence[Assignment], *, zero_shot: bool
) -> tuple[Float[np.ndarray, "row set"], Int[np.ndarray, " row"]]:
    """Return whether each held-out prompt is answered as its assignment says, with each set's vector, and clusters.

    The sets are the empty one (nothing added), the located heads, and random sets. Labels are shuffled, or with
    `zero_shot` there are no demonstrations. Each set's vector is added after the layer where the answer's log-odds on
    the locating prompts are largest, the same layer for all assignments.
    """
    sets = [[], study.located, *study.random_sets(study.located, N_VECTOR_SETS)]
    vectors = [_vectors(study, task.reference, sets) for task in tasks]
    locating, held_out = (
        torch.cat([_log_odds(study, batch, own, zero_shot) for batch, own in zip(half, vectors, strict=True)])
        for half in ([task.locating for task in tasks], [task.held_out for task in tasks])
    )
    layer = locating.mean(0).argmax(-1)
    odds = held_out[:, torch.arange(len(sets)), layer]
    return (odds > 0).double().numpy(), np.concatenate([clusters_of(task.held_out) for task in tasks])


def _vectors(
    study: Study, reference: il.PromptBatch, sets: Sequence[Sequence[il.Head]]
) -> Float[Tensor, "set d_model"]:
    """Return the function vector of each set, as `il.function_vector` does, from one pass for all sets."""
    mean = study.map(reference, lambda acts: acts.scaled_z).double().mean(0)
    W_O = [study.view.W_O(layer).double().cpu() for layer in range(study.view.n_layers)]
    nothing = torch.zeros(study.view.d_model, dtype=torch.double)
    return torch.stack([sum((mean[head] @ W_O[head.layer][head.head] for head in one), nothing) for one in sets])


def _log_odds(
    study: Study, batch: il.PromptBatch, vectors: Float[Tensor, "set d_model"], zero_shot: bool
) -> Float[Tensor, "row set layer"]:
    """Return the answer's log-odds against the other label with each vector added after each layer tried, nats."""
    n, count = study.view.n_layers, min(study.view.n_layers, MAX_LAYERS)
    layers = [(i + 1) * n // count - 1 for i in range(count)]  # evenly spaced, including the last layer
    cases = vectors.float().to(study.view.unembed_device).repeat_interleave(count, dim=0)
    tokens = batch.label_tokens
    pieces = [
        read_with_vectors(
            study.model, piece, cases, layers * len(vectors), lambda log_probs, some: log_probs[..., tokens]
        ).cpu()
        for piece in study.pieces(without_demonstrations(study, batch) if zero_shot else batch)
    ]
    of_label = torch.cat(pieces).double().unflatten(1, (len(vectors), count))
    own = torch.nn.functional.one_hot(batch.answer.cpu(), len(tokens)).bool()[:, None, None]
    return of_label.masked_fill(~own, 0).sum(-1) - of_label.masked_fill(own, -torch.inf).logsumexp(-1)
