"""Function vectors (Todd et al. 2023): mean outputs of chosen heads, added where no demonstration is shown.

With "foo" and "bar" as labels a prompt without demonstrations has nothing to know: words belong to either label as the
vector says, and both assignments are tried. What comes back is the assignment, or nothing. With the categories' own
names as labels the model may know the answer by itself, and what comes back is told beside.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.queries import labels_shuffled, relabelled
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.intervals import Resample, clusters_of, resample
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, cannot_tell, told, verdict
from icl_lens.digest import json_digest
from icl_lens.prompts.tasks import Asked
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE
from icl_lens.report.plots import PAGE

LEAST = 0.3
"""Of the log-odds that demonstrations give: the smallest share given back that is worth the claim."""
ASKED: tuple[Asked, Asked] = ("true", "false")
VECTORS = ("effect", "located")
BESIDE = {"effect": "random, effect", "located": "random, located"}
LABELS = "label words"
ROWS = 512
"""Short rows in a pass, of several vectors together."""


@dataclass(frozen=True)
class FunctionVectorsConfig:
    """Heads in a vector (at most one in eight), random sets for each, and prompts that means and effects are over."""

    heads: int = 6
    random_sets: int = 5
    prompts: int = 48


Labels = tuple[str, str]
"""The true class's label, and the false one's."""


@dataclass(frozen=True)
class _Words:
    """Words without any demonstration, once each: their class, and whether layers are chosen on them."""

    texts: tuple[str, ...]
    true: np.ndarray
    choosing: np.ndarray

    @classmethod
    def of(cls, study: Study) -> "_Words":
        """True words as the study's halves have them; of false ones, every second in order of appearance."""
        true = [list(dict.fromkeys(study.prompts(FOO)[row].query for row in half.tolist())) for half in study.halves]
        false = list(dict.fromkeys(prompt.query for prompt in study.prompts(Variant(asked="false"))))
        texts = [*true[0], *true[1], *false]
        count = len(true[0]) + len(true[1])
        choosing = [*[True] * len(true[0]), *[False] * len(true[1]), *(i % 2 == 0 for i in range(len(false)))]
        return cls(tuple(texts), np.arange(len(texts)) < count, np.array(choosing))


def table(study: Study, config: FunctionVectorsConfig) -> pd.DataFrame:
    """labels, group, name, true_label, layer, prompt (a word), query, true, odds, log_prob (nats), right, first.

    One row for each word that layers are not chosen on, and label of the true class. `labels`: "foo/bar" or "names";
    `true`: the word is of the true class. `group`: "none", "demonstrations", "effect", "located", BESIDE's random sets,
    and LABELS. `odds` are the answer's log-odds without demonstrations (group "demonstrations": with them, mean over
    the test prompts that ask the word), `right` whether they are above 0, `first` whether the answer is the likeliest
    token of all (0–1).
    """
    words = _Words.of(study)
    sets = _head_sets(study, config)
    kinds: dict[str, list[Labels]] = {"foo/bar": [("foo", "bar"), ("bar", "foo")]}
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
    false, dash, true = study.settings.task.partition("-")
    if not dash:
        return None
    try:
        tokens = _label_tokens(study, (true, false))
    except il.InputError:
        return None
    unknown = getattr(study.model.tokenizer, "unk_token_id", None)
    return None if unknown in tokens or len({*tokens}) < 2 else (true, false)


def _head_sets(study: Study, config: FunctionVectorsConfig) -> dict[tuple[str, str], list[il.Head]]:
    """The heads of each vector, by group and name: of largest mean indirect effect, located, and random beside each."""
    count = study.few(config.heads)
    effect = _indirect_effects(study, config).mean(0)
    order = effect.flatten().argsort(descending=True)[:count]
    chosen = {
        "effect": [il.Head.at(index, effect.shape[1]) for index in order.tolist()],
        "located": located_for_both(study, count)[:count],
    }
    sets = {(group, group): heads for group, heads in chosen.items()}
    for group, heads in chosen.items():
        for i, drawn in enumerate(study.controls(heads, config.random_sets)):
            sets[BESIDE[group], f"set {i}"] = drawn
    return sets


def _indirect_effects(study: Study, config: FunctionVectorsConfig) -> Float[Tensor, "row layer head"]:
    """Indirect effects on prompts whose labels are shuffled, of the choosing half: both labels, both classes asked.

    Means put in place are over good prompts of the same labels, which ask for either class: a mean that says one label
    gives to one class what it takes from the other.
    """
    rows = study.halves[0][: config.prompts].tolist()
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
    study: Study, config: FunctionVectorsConfig, sets: Mapping[tuple[str, str], Sequence[il.Head]], labels: Labels
) -> dict[tuple[str, str], Float[Tensor, " d_model"]]:
    """The vector of each set of heads: the sum of their mean outputs over the choosing half's prompts, both classes."""
    rows = study.halves[0][: config.prompts].tolist()
    prompts = [study.prompts(Variant(asked=asked))[row] for asked in ASKED for row in rows]
    batch = il.tokenize(study.model, relabelled(prompts, labels), labels=labels)
    pieces = study.pieces(batch)
    wanted = list(sets.values())

    def summed(i: int) -> Tensors:
        acts = il.capture(study.model, pieces[i])
        layers = sorted({head.layer for heads in wanted for head in heads})
        outputs = {layer: acts.head_outputs(layer).double().sum(0) for layer in layers}
        sums = [torch.stack([outputs[head.layer][head.head] for head in heads]).sum(0) for heads in wanted]
        return {"value": torch.stack(sums)[None]}

    sums = joined(study.passes.run("mean outputs of heads", [len(piece) for piece in pieces], summed))["value"].sum(0)
    return {key: (total / len(batch)).float() for key, total in zip(sets, sums, strict=True)}


def _add_label_words(study: Study, vectors: Sequence[dict[tuple[str, str], Tensor]], labels: Labels) -> None:
    """Adds the label words' own vector, the same for each assignment of the labels: as long as that of "effect"."""
    own = label_direction(study, _label_tokens(study, labels))
    length = torch.stack([one["effect", "effect"].norm() for one in vectors]).mean()
    for one in vectors:
        one[LABELS, LABELS] = own / own.norm() * length


def _label_tokens(study: Study, labels: Labels) -> list[int]:
    """The token that each label is scored by."""
    return il.tokenize(study.model, relabelled(study.prompts(FOO)[:1], labels), labels=labels).label_tokens.tolist()


def label_direction(study: Study, tokens: Sequence[int]) -> Float[Tensor, " d_model"]:
    """What raises these tokens' logits above all others': the mean of their columns of W_U, less that of all.

    With the final norm's gain.
    """
    W_U = study.model.W_U.detach().float().cpu()
    direction = W_U[:, list(tokens)].mean(1) - W_U.mean(1)
    gain = study.view.readout(torch.ones(1, study.view.d_model)).gain
    return direction if gain is None else direction * gain.float().cpu()


def _without_demonstrations(
    study: Study, words: _Words, vectors: Sequence[Mapping[tuple[str, str], Tensor]], assignments: Sequence[Labels]
) -> pd.DataFrame:
    """Every word without demonstrations, with nothing and with each vector added, behind the layer that is best for it.

    Best by the answer's log-odds on the words that layers are chosen on, both classes and all assignments of the labels
    alike: with a layer for each assignment, any vector that moves the log-odds could be made to seem right.
    """
    cases: list[tuple[tuple[str, str], int]] = [(("none", "none"), -1)]
    cases += [(key, layer) for layer in range(study.view.n_layers) for key in vectors[0]]
    said = [_said(study, words, cases, *pair) for pair in zip(vectors, assignments, strict=True)]
    odds = np.mean([one["odds"] for one in said], axis=0)
    best: dict[tuple[str, str], tuple[float, int]] = {}
    for place, (key, _) in enumerate(cases):
        score = np.mean([odds[words.choosing & (words.true == kind), place].mean() for kind in (True, False)])
        best[key] = max(best.get(key, (-np.inf, -1)), (float(score), place))
    tested = np.flatnonzero(~words.choosing)
    frames = []
    for one, labels in zip(said, assignments, strict=True):
        for (group, name), (_, place) in best.items():
            columns = {value: found[tested, place] for value, found in one.items()}
            frame = _rows(words, tested, columns).assign(group=group, name=name, layer=cases[place][1])
            frames.append(frame.assign(true_label=labels[0]))
    return stack(*frames)


def _said(
    study: Study,
    words: _Words,
    cases: Sequence[tuple[tuple[str, str], int]],
    vectors: Mapping[tuple[str, str], Tensor],
    labels: Labels,
) -> dict[str, Float[np.ndarray, "word case"]]:
    """odds, log_prob, first (see `table`) of every word without demonstrations, with each vector behind its layer."""
    texts = [il.Template().query.replace("{text}", text) for text in words.texts]
    pieces = study.pieces(il.tokenize_text(study.model, texts))
    tokens = _label_tokens(study, labels)

    def scored(i: int) -> Tensors:
        piece = pieces[i]
        count = max(1, ROWS // len(piece))
        columns = []
        for layer, together in groupby(range(len(cases)), key=lambda place: cases[place][1]):
            places = list(together)
            for start in range(0, len(places), count):
                keys = [cases[place][0] for place in places[start : start + count]]
                several = piece[list(range(len(piece))) * len(keys)]
                added: AbstractContextManager[None] = nullcontext()
                if layer >= 0:
                    vector = torch.stack([vectors[key] for key in keys]).repeat_interleave(len(piece), dim=0)
                    added = il.add_vector(study.model, vector, layer, several)
                with added:
                    log_probs = il.last_log_probs(study.model, several)
                found = torch.cat([log_probs[:, tokens], log_probs.amax(-1, keepdim=True)], dim=-1)
                columns += found.unflatten(0, (len(keys), -1)).unbind(0)
        return {"value": torch.stack(columns, dim=1)}

    sizes = [len(cases) * len(piece) for piece in pieces]
    found = joined(study.passes.run("vectors added", sizes, scored))["value"].double().numpy()
    first, second, top = np.moveaxis(found, -1, 0)
    true = words.true[:, None]
    own, other = np.where(true, first, second), np.where(true, second, first)
    return {"odds": own - other, "log_prob": own, "first": (own >= top).astype(float)}


def _with_demonstrations(study: Study, words: _Words, labels: Labels) -> pd.DataFrame:
    """The same words with the study's test prompts' demonstrations: means over the prompts that ask each word."""
    place = {(text, bool(true)): i for i, (text, true) in enumerate(zip(words.texts, words.true, strict=True))}
    sums = np.zeros((len(words.texts), 3))
    counts = np.zeros(len(words.texts))
    for asked in ASKED:
        prompts = [study.prompts(Variant(asked=asked))[row] for row in study.test.tolist()]
        batch = il.tokenize(study.model, relabelled(prompts, labels), labels=labels)
        pieces = study.pieces(batch)

        def scored(i: int, pieces: list[il.PromptBatch] = pieces) -> Tensors:
            log_probs = il.last_log_probs(study.model, pieces[i])
            both = log_probs[:, pieces[i].label_tokens]
            return {"value": torch.cat([both, log_probs.amax(-1, keepdim=True)], dim=-1)}

        key = f"shown-{json_digest([labels, asked, study.test.tolist()])}"
        found = joined(study.passes.run("with demonstrations", [len(piece) for piece in pieces], scored, key=key))[
            "value"
        ]
        own, other = (found[:, i].double() for i in ((0, 1) if asked == "true" else (1, 0)))
        values = torch.stack([own - other, own, (own >= found[:, 2]).double()], dim=-1).numpy()
        at = [place[prompt.query, asked == "true"] for prompt in prompts]
        np.add.at(sums, at, values)
        np.add.at(counts, at, 1)
    tested = np.flatnonzero(~words.choosing & (counts > 0))
    odds, log_prob, first = (sums[tested] / counts[tested, None]).T
    columns = {"odds": odds, "log_prob": log_prob, "first": first}
    return _rows(words, tested, columns).assign(group="demonstrations", name="demonstrations", layer=-1)


def _rows(words: _Words, tested: np.ndarray, columns: Mapping[str, np.ndarray]) -> pd.DataFrame:
    frame = pd.DataFrame({"prompt": tested, "query": tested, "true": words.true[tested], **columns})
    return frame.assign(right=(frame["odds"] > 0).astype(float))


def claim(table: pd.DataFrame) -> Verdict:
    """Both vectors give back enough of what demonstrations give, more than random heads' and than label words."""
    unit = "of what demonstrations give"
    own = where(table, labels="foo/bar")
    balance = _Balance.of(own)
    whole = balance.mean(own, "demonstrations")
    if balance.drawn.estimate(whole).low <= 0:
        return cannot_tell("demonstrations give the answer no log-odds", unit=unit)
    labels = balance.mean(own, LABELS) / whole
    parts = []
    for group in VECTORS:
        share, random = balance.mean(own, group) / whole, balance.mean(own, BESIDE[group]) / whole
        what = f"log-odds given back by the {group} heads' vector"
        parts += [
            verdict(balance.drawn.estimate(share), least=LEAST, unit=unit, what=what),
            verdict(balance.drawn.estimate(share - random), least=0.0, unit=unit, what="the same minus random heads'"),
            verdict(balance.drawn.estimate(share - labels), least=0.0, unit=unit, what="the same minus label words'"),
        ]
    return told(all_of(*parts), *_notes(table))


@dataclass(frozen=True)
class _Balance:
    """Means in which both classes of words count alike, with one set of bootstrap draws for all groups."""

    drawn: Resample
    prompts: pd.Index

    @classmethod
    def of(cls, table: pd.DataFrame) -> "_Balance":
        index = by_prompt(where(table, group="demonstrations"), "odds").index
        return cls(resample(clusters_of(index)), index)

    def mean(self, table: pd.DataFrame, group: str, value: str = "odds") -> Float[np.ndarray, " draw"]:
        """A column's mean over labels and sets, then words, then classes; words not asked with demonstrations apart."""
        classes = []
        for true in (True, False):
            values = by_prompt(table, value, group=group, true=true).reindex(self.prompts)
            classes.append(self.drawn.mean(values.to_numpy()))
        return np.mean(classes, axis=0)


def _notes(table: pd.DataFrame) -> list[str]:
    """What is told beside: accuracies and log-probability, also where labels are the categories' names."""
    notes = []
    for kind, part in table.groupby("labels", sort=False):
        balance = _Balance.of(part)
        said = []
        for group, name in GROUPS.items():
            first, right, log_prob = (balance.mean(part, group, value)[0] for value in ("first", "right", "log_prob"))
            said.append(f"{name} {first:.0%} ({right:.0%}, {log_prob:.2g})")
        what = "accuracy over the vocabulary (between the labels, log p(answer) in nats)"
        notes.append(f"with {kind} as labels, {what}: {', '.join(said)}")
    return notes


GROUPS = {
    "demonstrations": "demonstrations",
    "none": "nothing added",
    "effect": "effect heads",
    "random, effect": "random for these",
    "located": "located heads",
    "random, located": "random for those",
    LABELS: "label words",
}


def figure(table: pd.DataFrame) -> Figure:
    """The answer's log-odds and log-probability without demonstrations by what is added; 95 % intervals over words."""
    drawn = Figure(figsize=(PAGE, 2.7), layout="constrained")
    axes = drawn.subplots(1, 2)
    kinds = list(dict.fromkeys(table["labels"]))
    hues = {"demonstrations": GREEN, "effect": ORANGE, "located": BLUE}
    titles = {
        "odds": "Answer's log-odds against\nthe other label (nats)",
        "log_prob": "Answer's log-probability\n(nats)",
    }
    for ax, (value, title) in zip(axes, titles.items(), strict=True):
        bars = []
        for i, kind in enumerate(kinds):
            samples = [by_prompt(where(table, labels=kind), value, group=group) for group in GROUPS]
            at = np.arange(len(GROUPS)) + (0.8 / len(kinds)) * (i - 0.5 * (len(kinds) - 1))
            colors = [hues.get(group, GREY) for group in GROUPS]
            ax.bar(at, means(samples), width=0.8 / len(kinds), color=colors, alpha=1.0 if i == 0 else 0.5)
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            bars += zip(at, means(samples), strict=True)
        ax.axhline(0, color="0.3", linewidth=0.4)
        mark_zeros(ax, *zip(*bars, strict=True))
        ax.set_xticks(range(len(GROUPS)), list(GROUPS.values()), rotation=40, ha="right", rotation_mode="anchor")
        ax.set_ylabel(title)
    for i, kind in enumerate(kinds):
        said = "foo and bar, either way" if kind == "foo/bar" else "the categories' names"
        axes[0].bar([0], [0], color=GREY, alpha=1.0 if i == 0 else 0.5, label=f"labels: {said}")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="function-vectors",
    title="Function vectors",
    source="Todd et al. 2023 (arXiv 2310.15213)",
    claim="The mean outputs of a few heads add up to a vector that carries the task to prompts without demonstrations.",
    criterion=(
        "Added to prompts without demonstrations, behind the layer that is best on other words, the sum of the mean "
        "outputs of the heads of largest indirect effect, and that of located heads, each give back "
        f"{LEAST:.0%} of the log-odds that demonstrations give, more than random heads of the same layers and more "
        "than the label words themselves. Both labels are the answer in turn and both classes count alike, so that a "
        "vector "
        'that only says a label gives nothing; without demonstrations a word belongs to neither "foo" nor "bar".'
    ),
    paper=None,
    chosen=(
        "After a trial on icl-mini with 100 prompts of sentiment-number, a vector's layer came to be chosen for both "
        "assignments of the labels together, and no longer for each, which had let label words seem to know the class."
    ),
    departs=(
        "Not a claim of the paper, but of a neighbouring one, on tasks with known answers. Labels without meaning "
        "leave a prompt without demonstrations nothing to know, so both assignments of the labels are tried and "
        "classes count alike, beside this paper's located heads."
    ),
    config=FunctionVectorsConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
