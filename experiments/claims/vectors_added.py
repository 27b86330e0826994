"""Sums of heads' mean outputs added to prompts without demonstrations, word by word: what the model says then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il
from experiments.claims.queries import labels_shuffled, relabelled
from experiments.claims.shots import classes_of, names_of
from experiments.lab.editing import BAR, FOO, PIECE, ROW, located_for_both
from experiments.lab.frames import of_ranking, stack
from experiments.lab.passes import Tensors, joined
from experiments.lab.study import ASKED, RANKINGS, Ranking, Study, Variant
from experiments.lab.work import MOST_LAYERS
from icl_lens.digest import json_digest
from icl_lens.interventions.function_vectors import read_with_vectors

VECTORS = ("effect", "located")
BESIDE = {"effect": "random, effect", "located": "random, located"}
SHUFFLED = {"effect": "shuffled, effect", "located": "shuffled, located"}
"""The same heads' means over prompts whose labels say nothing about the class."""
LABELS = "label words"
ROUNDING = 1e-5
"""Nats between layers that are as good as one another."""
OWN = "study"
"""The kind of labels that verdicts are about."""


@dataclass(frozen=True)
class FunctionVectorsConfig:
    """Heads in a vector (at most one in eight), random sets for each, and prompts that means and effects are over."""

    heads: int = 6
    random_sets: int = 5
    prompts: int = 48


Labels = tuple[str, str]
"""The true class's label, and the false one's."""


class Added(NamedTuple):
    """What a vector is of: its group, its name, and the ranking that its heads are located by (None: any)."""

    group: str
    name: str
    ranking: Ranking | None = None


Heads = Mapping[Added, Sequence[il.Head]]
Vectors = Mapping[Added, Float[Tensor, " d_model"]]
Case = tuple[Added, int]
"""A vector, and the layer behind which it is added."""
NOTHING = Added("none", "none"), -1


@dataclass(frozen=True)
class _Words:
    """Words without any demonstration, once each: their class, and whether layers are chosen on them."""

    texts: tuple[str, ...]
    true: np.ndarray
    choosing: np.ndarray

    @classmethod
    def of(cls, study: Study) -> "_Words":
        """The texts of either class that prompts of the study's halves ask about."""
        found = [
            (text, asked == "true", half == 0)
            for asked in ASKED
            for half, rows in enumerate(study.apart)
            for text in dict.fromkeys(study.prompts(Variant(asked=asked))[row].query for row in rows.tolist())
        ]
        texts, true, choosing = zip(*found, strict=True)
        return cls(texts, np.array(true), np.array(choosing))


def table(study: Study, config: FunctionVectorsConfig) -> pd.DataFrame:
    """labels, group, name, true_label, layer, prompt (a word), query, true, odds, log_prob (nats), right, first.

    One row for each word that layers are not chosen on, and label of the true class. `labels`: "study" (its own two) or
    "names"; `true`: the word is of the true class. `group`: "none", "demonstrations", "effect", "located", BESIDE's
    random sets, SHUFFLED's, and LABELS. `odds` are the answer's log-odds without demonstrations (group
    "demonstrations": with them, mean over the test prompts that ask the word), `right` whether they are above 0,
    `first` whether the answer is the likeliest token of all (0–1).
    """
    # By either ranking most vectors are the same, and all of them are run together.
    return of_ranking(study.once("vectors added", lambda: _table(study, config)), study.ranking)


def _table(study: Study, config: FunctionVectorsConfig) -> pd.DataFrame:
    """The table by every ranking; `ranking` is None where it makes no difference."""
    words = _Words.of(study)
    sets = _head_sets(study, config)
    own, other = study.labels
    kinds: dict[str, list[Labels]] = {OWN: [(own, other), (other, own)]}
    if (names := _names(study)) is not None:
        kinds["names"] = [names]
    frames = []
    for kind, assignments in kinds.items():
        vectors = [_vectors(study, config, sets, labels) for labels in assignments]
        _add_label_words(study, vectors, assignments[0])
        frames.append(_without_demonstrations(study, words, vectors, assignments).assign(labels=kind))
        for labels in assignments:
            shown = _with_demonstrations(study, words, labels)
            frames.append(shown.assign(labels=kind, true_label=labels[0]))
    return stack(*frames)


def _names(study: Study) -> Labels | None:
    """The two categories' names as labels, true first; None for sentences, and where the model cannot tell them."""
    try:
        classes = classes_of(study.settings.task, study.settings.path, 2)
    except il.InputError:
        return None
    names = names_of(study, classes)
    return None if names is None else (names[1], names[0])


def _head_sets(study: Study, config: FunctionVectorsConfig) -> dict[Added, list[il.Head]]:
    """The heads of each vector: of largest mean indirect effect, located, and random ones beside each."""
    count = study.few(config.heads)
    effect = _indirect_effects(study, config).mean(0)
    order = effect.flatten().argsort(descending=True)[:count]
    chosen = {Added("effect", "effect"): [il.Head.at(index, effect.shape[1]) for index in order.tolist()]}
    for ranking in RANKINGS:
        heads = located_for_both(study.ranked_by(ranking), count)[:count]
        chosen[Added("located", "located", ranking)] = heads
    sets = dict(chosen)
    for of, heads in chosen.items():
        for i, drawn in enumerate(study.controls(heads, config.random_sets)):
            sets[Added(BESIDE[of.group], f"set {i}", of.ranking)] = drawn
    return sets


def _indirect_effects(study: Study, config: FunctionVectorsConfig) -> Float[Tensor, "row layer head"]:
    """Indirect effects on prompts whose labels are shuffled, of the choosing half: both labels, both classes asked.

    Means put in place are over good prompts of the same labels, which ask for either class: a mean that says one label
    gives to one class what it takes from the other.
    """
    rows = study.apart[0][: config.prompts].tolist()
    pieces = []
    for variant in (FOO, BAR):
        asked = [Variant(swapped=variant.swapped, asked=one) for one in ASKED]
        clean = [study.batch(one)[rows] for one in asked]
        for one in asked:
            prompts = [labels_shuffled(study.prompts(one)[row], row) for row in rows]
            shuffled = study.tokenize(prompts)
            pieces += [(piece, clean) for piece in shuffled.split(64)]

    def effects(i: int) -> Tensors:
        return {"value": il.indirect_effects(study.model, *pieces[i]).float()}

    # A row of one token for each head takes about as long as ten prompts.
    sizes, key = [10 * len(piece) for piece, _ in pieces], f"indirect-{json_digest(rows)}"
    return joined(study.passes.run("indirect effects", sizes, effects, key=key))["value"]


def _vectors(
    study: Study, config: FunctionVectorsConfig, sets: Heads, labels: Labels
) -> dict[Added, Float[Tensor, " d_model"]]:
    """The vector of each set of heads: the sum of their mean outputs over the choosing half's prompts, both classes.

    Of VECTORS' own heads the same over prompts whose labels are shuffled, too (SHUFFLED).
    """
    rows = study.apart[0][: config.prompts].tolist()
    prompts = [(study.prompts(Variant(asked=asked))[row], row) for asked in ASKED for row in rows]
    own = {of: heads for of, heads in sets.items() if of.group in VECTORS}
    found = _summed_means(study, sets, [prompt for prompt, _ in prompts], labels)
    shuffled = _summed_means(study, own, [labels_shuffled(prompt, row) for prompt, row in prompts], labels)
    for of, vector in shuffled.items():
        found[Added(SHUFFLED[of.group], SHUFFLED[of.group], of.ranking)] = vector
    return found


def _summed_means(
    study: Study, sets: Heads, prompts: Sequence[il.Prompt], labels: Labels
) -> dict[Added, Float[Tensor, " d_model"]]:
    """Of each set, the sum of its heads' mean outputs over these prompts with these labels."""
    batch = _relabelled(study, prompts, labels)
    pieces = study.pieces(batch)
    wanted = list(sets.values())

    def summed(i: int) -> Tensors:
        acts = il.capture(study.model, pieces[i])
        layers = sorted({head.layer for heads in wanted for head in heads})
        outputs = {layer: acts.head_outputs(layer).double().sum(0) for layer in layers}
        sums = [torch.stack([outputs[head.layer][head.head] for head in heads]).sum(0) for heads in wanted]
        return {"value": torch.stack(sums)[None]}

    sums = joined(study.passes.run("mean outputs of heads", [len(piece) for piece in pieces], summed))["value"].sum(0)
    return {of: (total / len(batch)).float() for of, total in zip(sets, sums, strict=True)}


def _add_label_words(study: Study, vectors: Sequence[dict[Added, Tensor]], labels: Labels) -> None:
    """Adds the label words' own vector, the same for each assignment of the labels: as long as that of "effect"."""
    own = label_direction(study, _label_tokens(study, labels))
    length = torch.stack([one[Added("effect", "effect")].norm() for one in vectors]).mean()
    for one in vectors:
        one[Added(LABELS, LABELS)] = own / own.norm() * length


def _label_tokens(study: Study, labels: Labels) -> list[int]:
    """The token that each label is scored by."""
    return _relabelled(study, study.prompts(FOO)[:1], labels).label_tokens.tolist()


def _relabelled(study: Study, prompts: Sequence[il.Prompt], labels: Labels) -> il.PromptBatch:
    """Prompts of the study with other labels, written by its template."""
    return il.tokenize(study.model, relabelled(prompts, labels), template=study.settings.template, labels=labels)


def label_direction(study: Study, tokens: Sequence[int]) -> Float[Tensor, " d_model"]:
    """What raises these tokens' logits above all others': the mean of their columns of W_U, less that of all.

    With the final norm's gain.
    """
    W_U = study.model.W_U.detach().float().cpu()
    direction = W_U[:, list(tokens)].mean(1) - W_U.mean(1)
    gain = study.view.readout(torch.ones(1, study.view.d_model)).gain
    return direction if gain is None else direction * gain.float().cpu()


def _without_demonstrations(
    study: Study, words: _Words, vectors: Sequence[Vectors], assignments: Sequence[Labels]
) -> pd.DataFrame:
    """Every word without demonstrations, with nothing and with each vector added, behind the layer that is best for it.

    Best by the answer's log-odds on the words that layers are chosen on, both classes and all assignments of the labels
    alike: with a layer for each assignment, any vector that moves the log-odds could be made to seem right. Of layers
    that are as good, as all are for a vector that gives nothing, the first.
    """
    pairs = list(zip(vectors, assignments, strict=True))
    cases = [(of, layer) for layer in layers_tried(study.view.n_layers) for of in vectors[0]]
    chosen_on, tested = np.flatnonzero(words.choosing), np.flatnonzero(~words.choosing)
    odds = np.mean([_said(study, words, chosen_on, cases, *pair)["odds"] for pair in pairs], axis=0)
    is_true = words.true[chosen_on]
    best: dict[Added, tuple[float, int]] = {}
    for place, (of, layer) in enumerate(cases):
        score = float(np.mean([odds[is_true == kind, place].mean() for kind in (True, False)]))
        if score > best.get(of, (-np.inf, -1))[0] + ROUNDING:
            best[of] = score, layer
    asked = [NOTHING, *((of, layer) for of, (_, layer) in best.items())]
    frames = []
    for pair in pairs:
        said = _said(study, words, tested, asked, *pair)
        for place, (of, layer) in enumerate(asked):
            frame = _rows(words, tested, {value: found[:, place] for value, found in said.items()})
            about = {"group": of.group, "name": of.name, "ranking": of.ranking, "layer": layer}
            frames.append(frame.assign(**about, true_label=pair[1][0]))
    return stack(*frames)


def layers_tried(n_layers: int) -> list[int]:
    """The layers that a vector is tried behind: all, or `MOST_LAYERS` at equal distances, the last among them."""
    count = min(n_layers, MOST_LAYERS)
    return [(i + 1) * n_layers // count - 1 for i in range(count)]


def _said(
    study: Study,
    words: _Words,
    rows: Int[np.ndarray, " word"],
    cases: Sequence[Case],
    vectors: Vectors,
    labels: Labels,
) -> dict[str, Float[np.ndarray, "word case"]]:
    """odds, log_prob, first (see `table`) of some words without demonstrations, with each vector behind its layer."""
    tokens = _label_tokens(study, labels)
    cost = ROW * len(cases) / 2  # a row goes through half of the layers
    most = max(1, int(PIECE / cost))
    whole = study.alone([words.texts[row] for row in rows])
    pieces = [some for piece in study.pieces(whole) for some in piece.split(most)]
    added = [(of, layer) for of, layer in cases if layer >= 0]

    def read(log_probs: Tensor, some: il.PromptBatch) -> Tensor:
        return torch.cat([log_probs[..., tokens], log_probs.amax(-1, keepdim=True)], dim=-1)

    def scored(i: int) -> Tensors:
        piece, found = pieces[i], []
        if len(added) < len(cases):
            found.append(read(il.last_log_probs(study.model, piece)[:, None], piece))
        directions = torch.stack([vectors[of] for of, _ in added])
        found.append(read_with_vectors(study.model, piece, directions, [layer for _, layer in added], read))
        return {"value": torch.cat(found, dim=1)}

    sizes = [max(1, round(cost * len(piece))) for piece in pieces]
    found = joined(study.passes.run("vectors added", sizes, scored))["value"].double().numpy()
    first, second, top = np.moveaxis(found, -1, 0)
    true = words.true[rows][:, None]
    own, other = np.where(true, first, second), np.where(true, second, first)
    return {"odds": own - other, "log_prob": own, "first": (own >= top).astype(float)}


def _with_demonstrations(study: Study, words: _Words, labels: Labels) -> pd.DataFrame:
    """The same words with the study's test prompts' demonstrations: means over the prompts that ask each word."""
    place = {(text, bool(true)): i for i, (text, true) in enumerate(zip(words.texts, words.true, strict=True))}
    sums = np.zeros((len(words.texts), 3))
    counts = np.zeros(len(words.texts))
    tested = study.apart[1].tolist()
    for asked in ASKED:
        prompts = [study.prompts(Variant(asked=asked))[row] for row in tested]
        batch = _relabelled(study, prompts, labels)
        pieces = study.pieces(batch)

        def scored(i: int, pieces: list[il.PromptBatch] = pieces) -> Tensors:
            log_probs = il.last_log_probs(study.model, pieces[i])
            both = log_probs[:, pieces[i].label_tokens]
            return {"value": torch.cat([both, log_probs.amax(-1, keepdim=True)], dim=-1)}

        key = f"shown-{json_digest([labels, asked, tested])}"
        found = joined(study.passes.run("with demonstrations", [len(piece) for piece in pieces], scored, key=key))[
            "value"
        ]
        own, other = (found[:, i].double() for i in ((0, 1) if asked == "true" else (1, 0)))
        values = torch.stack([own - other, own, (own >= found[:, 2]).double()], dim=-1).numpy()
        at = [place[prompt.query, asked == "true"] for prompt in prompts]
        np.add.at(sums, at, values)
        np.add.at(counts, at, 1)
    shown = np.flatnonzero(counts)
    odds, log_prob, first = (sums[shown] / counts[shown, None]).T
    columns = {"odds": odds, "log_prob": log_prob, "first": first}
    return _rows(words, shown, columns).assign(group="demonstrations", name="demonstrations", layer=-1)


def _rows(words: _Words, tested: np.ndarray, columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
    frame = pd.DataFrame({"prompt": tested, "query": tested, "true": words.true[tested], **columns})
    return frame.assign(right=(frame["odds"] > 0).astype(float))
