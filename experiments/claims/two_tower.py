"""Open question: queries, keys and values of located heads exchanged one by one between prompts; what moves?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.queries import texts_exchanged
from experiments.lab.controls import Comparison, beside
from experiments.lab.drawing import WHISKERS, by_name, legend_below, mark_zeros, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, PIECE, ROW, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, of_ranking, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases, is_true_label
from experiments.lab.study import RANKINGS, Need, Ranking, Study, Variant
from experiments.lab.verdict import CHANGE, SHARE, Verdict, all_of, judge, told, verdict
from icl_lens.interventions.patching import What
from icl_lens.metrics import label_log_odds
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

SWAPS: dict[str, tuple[What, str, bool]] = {
    "Q, other input": ("q", "query", True),
    "K, texts exchanged": ("k", "texts", True),
    "V, labels exchanged": ("v", "labels", True),
    "K, labels exchanged": ("k", "labels", False),
    "V, texts exchanged": ("v", "texts", False),
}
"""What is patched, from which prompt, and whether two towers predict that the answer loses."""

CELLS = tuple(
    Variant(layout, swapped, asked=asked)
    for layout in ("order", "reorder")
    for swapped in (False, True)
    for asked in ("true", "false")
)
"""Both orders, both labels, queries of both classes: a head that likes a label, or near labels, gains nothing."""

COLUMNS = ["prompt", "query", "measure", "group", "layer", "name", "value", "mass"]


@dataclass(frozen=True)
class TwoTowerConfig:
    """Heads located for each label (at most one in eight), the most controls of a layer, random sets to swap."""

    heads: int = 6
    controls: int = 20
    draws: int = 5
    rows: int = 64
    """Prompts in a pass."""


@dataclass(frozen=True)
class Separation:
    """Chance that a true label's attention exceeds a false one's (AUROC; chance is ½); attention on all labels."""

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head 2"]:
        layers, indices = [head.layer for head in self.heads], [head.head for head in self.heads]
        # Attention orders positions as q·k does: softmax is increasing.
        attention = il.attention_to_labels(acts)[:, layers, indices].float()
        real = (acts.batch.label_index >= 0).to(attention.device)
        true = is_true_label(acts.batch).to(attention.device)
        pairs = (true[:, :, None] & (real & ~true)[:, None, :])[:, None]
        gap = attention[..., :, None] - attention[..., None, :]
        wins = (gap > 0).float() + 0.5 * (gap == 0).float()
        auroc = (wins * pairs).sum((-1, -2)) / pairs.sum((-1, -2))
        return torch.stack([auroc, (attention * real[:, None]).sum(-1)], dim=-1)


def table(study: Study, config: TwoTowerConfig) -> pd.DataFrame:
    """measure ("auroc" | a swap of SWAPS), group, layer, name (of the head, or the set), prompt, query, value, mass
    (0–1).

    "auroc": 0–1, for each head, each prompt in every one of CELLS; `mass`: attention on all labels. Swaps: by how many
    nats the answer's log-odds fall when all heads of the group get what they have on the other prompt, at label
    positions and as the last query sees it; prompts take turns in CELLS.
    """
    heads = located_for_both(study, study.few(config.heads))
    # The heads of either ranking are patched side by side.
    swapped = of_ranking(study.once("swaps", lambda: _swaps(study, config)), study.ranking)
    return stack(*_separations(study, heads, config), swapped)


def _separations(study: Study, heads: list[il.Head], config: TwoTowerConfig) -> Iterator[pd.DataFrame]:
    """The rows "auroc", head by head."""
    compared = Comparison.of(study, heads, config.controls)
    either = [located_for_both(study.ranked_by(one), study.few(config.heads)) for one in RANKINGS]
    every = tuple(dict.fromkeys(head for some in either for head in Comparison.of(study, some, config.controls).heads))
    reduction, rows = Separation(every), study.test
    found = study.once(
        reduction, lambda: [study.reduce(reduction, cell, rows, what=f"q·k by class, {cell}") for cell in CELLS]
    )
    # Each question counts as a prompt of its own, with its own query; both halves of CELLS are balanced.
    parts = {
        asked: torch.stack([one for one, cell in zip(found, CELLS, strict=True) if cell.asked == asked]).mean(0).numpy()
        for asked in ("true", "false")
    }

    def frame(head: il.Head) -> pd.DataFrame:
        place = every.index(head)
        frames = [
            pd.DataFrame({**_identity(study, rows, asked), "value": part[:, place, 0], "mass": part[:, place, 1]})
            for asked, part in parts.items()
        ]
        return stack(*frames).assign(measure="auroc")

    for one in compared.rows(frame):
        yield one.loc[:, COLUMNS]


def _identity(study: Study, rows: Int[Tensor, " row"], asked: str) -> dict[str, Int[np.ndarray, " row"]]:
    """prompt and query: even and positive for one class's questions, odd and negative for the other's."""
    queries = study.queries(Variant(asked="true" if asked == "true" else "false"))[rows.numpy()]
    number = 2 * rows.numpy() + (asked == "false")
    return {"prompt": number, "query": queries if asked == "true" else -1 - queries}


def _swaps(study: Study, config: TwoTowerConfig) -> pd.DataFrame:
    """The rows of SWAPS by every ranking, all heads of a group together; prompts take turns in the cells."""
    sets: list[tuple[Ranking, str, str, list[il.Head]]] = []
    for ranking in RANKINGS:
        heads = located_for_both(study.ranked_by(ranking), study.few(config.heads))
        sets.append((ranking, "located", "located", heads))
        for i, drawn in enumerate(study.controls(heads, config.draws)):
            sets.append((ranking, "random", f"set {i}", drawn))
    parts = [(cell, study.test[place :: len(CELLS)]) for place, cell in enumerate(CELLS)]
    asked = [_Asked.of(study, cell, rows) for cell, rows in parts if len(rows)]
    own = study.tokenize([prompt for one in asked for prompt in one.prompts])
    other = {
        name: study.tokenize([prompt for one in asked for prompt in one.sources[name]]) for name in asked[0].sources
    }
    odds = _odds(study, own, config.rows)
    falls = {
        measure: odds[:, None] - _patched(study, own, other[source], [heads for *_, heads in sets], what, config.rows)
        for measure, (what, source, _) in SWAPS.items()
    }
    frames, start = [], 0
    for one in asked:
        rows = slice(start, start + len(one.rows))
        start = rows.stop
        for measure in SWAPS:
            for i, (ranking, group, name, _) in enumerate(sets):
                values = {**_identity(study, one.rows, one.cell.asked), "value": falls[measure][rows, i]}
                about = {"measure": measure, "group": group, "layer": -1, "name": name, "mass": np.nan}
                frames.append(pd.DataFrame(values).assign(**about).loc[:, COLUMNS].assign(ranking=ranking))
    return stack(*frames)


@dataclass(frozen=True)
class _Asked:
    """The prompts of a cell, and those that queries, texts and labels come from instead."""

    cell: Variant
    rows: Int[Tensor, " row"]
    prompts: list[il.Prompt]
    sources: dict[str, list[il.Prompt]]

    @classmethod
    def of(cls, study: Study, cell: Variant, rows: Int[Tensor, " row"]) -> "_Asked":
        prompts = study.prompts(cell)
        other_query = study.prompts(replace(cell, asked="false" if cell.asked == "true" else "true"))
        other_labels = study.prompts(replace(cell, swapped=not cell.swapped))
        sources = {
            "query": [other_query[row] for row in rows],
            "texts": [texts_exchanged(prompts[row]) for row in rows],
            "labels": [other_labels[row] for row in rows],
        }
        return cls(cell, rows, [prompts[row] for row in rows], sources)


def _odds(study: Study, own: il.PromptBatch, size: int) -> Float[np.ndarray, " prompt"]:
    """The answer's log-odds as they are, nats."""
    pieces = list(own.split(size))

    def said(i: int) -> Tensors:
        scores = il.label_log_probs(study.model, pieces[i])
        return {"value": label_log_odds(scores, pieces[i].answer, choices=pieces[i].label_mask)}

    found = study.passes.run("nothing exchanged", [len(piece) for piece in pieces], said)
    return joined(found)["value"].double().numpy()


def _patched(
    study: Study, own: il.PromptBatch, other: il.PromptBatch, sets: list[list[il.Head]], what: What, size: int
) -> Float[np.ndarray, "prompt set"]:
    """The answer's log-odds when the last query sees the other prompt's q, or labels' k or v, in each set of heads."""
    cost = 2 + ROW * len(sets)
    most = max(1, min(size, int(PIECE / cost)))
    pairs = list(zip(own.split(most), other.split(most), strict=True))

    def said(i: int) -> Tensors:
        mine, theirs = pairs[i]
        read: dict[str, Any] = {"positions": "last"} if what == "q" else {"align": "labels", "seen_by": "last"}
        after = il.label_log_probs_patched(study.model, mine, sets, theirs, what=what, **read)
        odds = [label_log_odds(one, mine.answer, choices=mine.label_mask) for one in after.unbind(1)]
        return {"value": torch.stack(odds, dim=1)}

    found = study.passes.run(f"{what} exchanged", [round(cost * len(mine)) for mine, _ in pairs], said)
    return joined(found)["value"].double().numpy()


def claim(table: pd.DataFrame) -> Verdict:
    """Swaps and separation as two towers say.

    The three swaps lower the answer as predicted, more than in random heads, and more than the two idle swaps; q·k is
    larger for true labels than for false ones, and more often so than in the other heads of the layers.
    """
    active = [name for name, (_, _, predicted) in SWAPS.items() if predicted]
    falls = {name: beside(table, "value", measure=name) for name in SWAPS}
    signs = table.assign(value=(table["value"] > 0).astype(float))
    agree = [
        judge(
            by_prompt(signs, "value", measure=name, group="located"),
            least=0.75,
            unit="of prompts",
            what=f"share that falls ({name})",
            bounds=SHARE,
        )
        for name in active
    ]
    beyond = [
        verdict(
            falls[name].drawn.estimate(falls[name].located - falls[name].random),
            least=0.0,
            unit="nats",
            what=f"fall beyond {falls[name].sets} ({name})",
        )
        for name in active
    ]
    gaps = (("K, texts exchanged", "K, labels exchanged"), ("V, labels exchanged", "V, texts exchanged"))
    idle = [
        verdict(
            falls[first].drawn.estimate(falls[first].located - falls[second].located),
            least=0.0,
            unit="nats",
            what=f"{first} over {second}",
        )
        for first, second in gaps
    ]
    auroc = beside(table, "value", measure="auroc")
    mass = beside(table, "mass", measure="auroc")
    towers = [
        verdict(
            auroc.drawn.estimate(auroc.located, bounds=SHARE),
            least=0.5,
            unit="AUROC",
            what="q·k, true above false labels",
        ),
        verdict(
            auroc.drawn.estimate(auroc.located - auroc.random, bounds=CHANGE),
            least=0.0,
            unit="AUROC",
            what=f"the same beyond {auroc.named} of the same layers",
        ),
    ]
    return told(
        all_of(*agree, *beyond, *idle, *towers),
        f"located heads give labels {mass.located[0]:.3g} of their attention, the others {mass.random[0]:.3g}",
    )


def figure(table: pd.DataFrame) -> Figure:
    """AUROC of attention, true against false labels, and attention on labels, by head; fall of log-odds by swap."""
    drawn = Figure(figsize=(PAGE, 3.0), layout="constrained")
    left, right = drawn.subplots(1, 2)
    heads = where(table, measure="auroc", group="located").drop_duplicates("name")
    names, layers = list(heads["name"]), list(heads["layer"])
    for group, hue, shift in (("located", ORANGE, -0.18), ("random", GREY, 0.18)):
        own = [
            by_prompt(
                table,
                "value",
                measure="auroc",
                group=group,
                layer=layer,
                **({"name": name} if group == "located" else {}),
            )
            for name, layer in zip(names, layers, strict=True)
        ]
        at = np.arange(len(names)) + shift
        shown = "located heads" if group == "located" else "other heads, same layer"
        left.bar(at, means(own), width=0.36, color=hue, label=shown)
        left.errorbar(at, means(own), yerr=whiskers(own), **WHISKERS)
        falls = [by_prompt(table, "value", measure=measure, group=group) for measure in SWAPS]
        at = np.arange(len(SWAPS)) + shift
        right.barh(at, means(falls), height=0.36, color=hue)
        right.errorbar(means(falls), at, xerr=whiskers(falls), **WHISKERS)
        mark_zeros(right, at, means(falls), across=True)
        if group == "located":
            for y, sample in zip(at, falls, strict=True):
                text = f" {np.mean(sample > 0):.0%}"
                right.text(max(sample.mean(), 0), y - 0.22, text, va="bottom", fontsize=6, color=BLUE)
    mass = by_name(where(table, measure="auroc", group="located"), "mass", names)
    left.plot(np.arange(len(names)) - 0.18, means(mass), "D", color="black", markersize=3, label="attention on labels")
    left.axhline(0.5, color="0.3", linewidth=0.6, linestyle=":")
    left.set(ylabel="q·k, true above false labels\n(AUROC, 0–1)", ylim=(0, 1.02))
    name_heads(left, names)
    left.set_xlabel("Located heads, best first")
    right.set_yticks(range(len(SWAPS)), list(SWAPS))
    right.invert_yaxis()
    right.axvline(0, color="0.3", linewidth=0.6)
    right.set_xlabel("Fall of the answer's log-odds (nats);\nblue: share of prompts in which it falls")
    legend_below(drawn, left)
    return drawn


EXPERIMENT = Experiment(
    id="two-tower",
    title="Two towers, taken apart",
    source="Open (direct evidence for the hypothesis)",
    claim="Queries and keys measure likeness of texts, values carry labels: each swapped alone moves what it should.",
    criterion=(
        "The answer loses in 3 of 4 prompts when Q, or labels' K (texts) or V (labels) as the last query sees them, "
        "alone "
        "comes from a prompt with the other answer, by more than in random heads; K by texts above K by labels, V by "
        "labels "
        "above V by texts; and q·k is more often larger for true labels than for false ones, more so than in the "
        "other heads "
        "of the layers. Both labels, both orders, queries of both classes."
    ),
    departs=(
        "The paper does not exchange anything: it infers the two towers from words that keys, values and queries "
        "rank high and from attention. Exchanging them one by one, and asking whether q·k orders labels, is ours."
    ),
    paper=None,
    config=TwoTowerConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
