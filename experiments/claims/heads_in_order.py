"""All heads in order by each way of finding them, and the answer's log-odds with the first of them kept or removed."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.claims.head_atlas import repeated
from experiments.lab.competence import VARIANTS
from experiments.lab.editing import BAR, FOO, PIECE, REFERENCE, ROW, Sets, side_by_side
from experiments.lab.frames import stack
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_contrasts, head_increases
from experiments.lab.study import Study, Variant
from experiments.lab.work import SHARED, WHOLE
from icl_lens.interventions.ablation import every_head, mean_z
from icl_lens.interventions.choice import Positions
from icl_lens.interventions.head_sets import answers_without
from icl_lens.metrics import label_log_odds
from icl_lens.report.palette import AMBER, BLUE, GREEN, INK, ORANGE, PINK, SKY

METHODS = {
    "increase": (BLUE, "o-"),
    "logit difference": (SKY, "o--"),
    "effect, last": (ORANGE, "^-"),
    "effect, all": (AMBER, "^--"),
    "gradient": (PINK, "v-"),
    "attention": (GREEN, "s-"),
    "induction": (INK, "s--"),
}
"""The ways of ranking, chance aside, and how they are drawn."""
PAPERS, RIVAL, AT_ALL, CHANCE = "increase", "attention", "effect, all", "random"
SETTINGS: tuple[tuple[Positions, Literal["zero", "mean"]], ...] = (("last", "zero"), ("last", "mean"), ("all", "zero"))
"""Where heads are removed, and what stands in their place. The first decides."""
FEWEST = 2
"""Prompts that an interval takes."""
Order = list[il.Head]


@dataclass(frozen=True)
class LocationMethodsConfig:
    """Prompts to rank on and to judge on, each in eight cells; those judged with heads edited at all positions; orders.

    Cells are both labels as the answer, both orders of the demonstrations, queries of both classes.
    """

    ranked: int = 24
    judged: int = 40
    judged_at_all: int = 8
    controls: int = 4
    """Random orders beside each method's, with its layers in the same places."""
    draws: int = 6
    """Random orders of all heads."""
    timed: int = 16
    """Prompts on which the methods' times are measured."""


def table(study: Study, config: LocationMethodsConfig) -> pd.DataFrame:
    """positions, mode, method, group, name (of the order), layer, edit, count, share (of all heads), prompt, odds.

    `odds`: the answer's log-odds, nats, over the prompt's cells. Group "located" is a method's own order, "random" one
    of random heads: beside a method, with its layers in the same places. `edit`: only the first `count` heads "kept",
    or these "removed". Method "model": nothing removed ("all") or everything ("none"). Of models
    with many heads fewer prompts are edited (`SHARED`), and positions "all" is left out (`WHOLE`).
    """
    ranked = max(1, _most(study, min(config.ranked, len(study.apart[0])), SHARED))
    scores = rankings(study, study.apart[0][:ranked])
    orders = list(_orders(study, scores, config))
    fair = [one for one in orders if one[1] == "located" or one[0] == CHANCE]
    frames = []
    for positions, mode in SETTINGS:
        if positions == "last":
            judged = max(FEWEST, _most(study, min(config.judged, len(study.apart[1])), SHARED))
        else:
            judged = _most(study, config.judged_at_all, WHOLE)
            if judged < min(FEWEST, config.judged_at_all):
                continue
        rows = study.apart[1][:judged]
        frames.append(_curves(study, rows, orders if (positions, mode) == SETTINGS[0] else fair, positions, mode))
    return stack(*frames)


def _most(study: Study, prompts: int, heads: int) -> int:
    """How many of the prompts are edited, where a model of so many heads is edited on all (`WHOLE`, `SHARED`)."""
    return min(prompts, prompts * heads // len(study.view.heads()))


def rankings(study: Study, rows: Int[Tensor, " row"]) -> dict[str, Float[Tensor, "layer head"]]:
    """The mean score of every head by each method, over prompts in all cells; the best is the largest."""
    whole, cells = rows[: _most(study, len(rows), WHOLE)], VARIANTS
    if not len(whole):  # one prompt, and not in all cells, but with either label as the answer
        places = max(2, _most(study, len(rows) * len(VARIANTS), WHOLE))
        in_turn = sorted(VARIANTS, key=lambda cell: (cell.layout, cell.asked == "false", cell.swapped))
        whole, cells = rows[:1], in_turn[:places]
    others = [name for name in SCORES if name != AT_ALL]
    # A head costs half a pass at all positions, and half a row at the last one.
    half = len(study.view.heads()) / 2
    what = "effects at all positions"
    scored = {
        **_in_cells(study, rows, lambda some: _scores(study, some, others), what="heads ranked", cost=ROW * half),
        **_in_cells(study, whole, lambda some: _scores(study, some, [AT_ALL]), cells, what=what, cost=half),
    }
    found = {name: values.double().mean((0, 1)) for name, values in scored.items()}
    shuffled = study.passes.run(
        "tokens shuffled and repeated", [2] * len(rows), lambda i: repeated(study, int(rows[i]))
    )
    found["induction"] = joined(shuffled)["induction"].double().mean(0)
    return {name: found[name] for name in METHODS}


def _in_cells(
    study: Study,
    rows: Int[Tensor, " row"],
    compute: Callable[[il.PromptBatch], Tensors],
    cells: Sequence[Variant] = VARIANTS,
    *,
    what: str,
    cost: float,
) -> dict[str, Shaped[Tensor, "cell row ..."]]:
    """A pass over some rows in every cell, all in the same batches; `cost`: of a prompt, in prompts."""
    most = max(1, int(PIECE / cost))
    pieces = [some for piece in study.pieces(_prompts(study, rows, cells)) for some in piece.split(most)]
    sizes = [max(1, round(cost * len(piece))) for piece in pieces]
    found = joined(study.passes.run(what, sizes, lambda i: compute(pieces[i])))
    return {name: values.unflatten(0, (len(cells), len(rows))) for name, values in found.items()}


def _prompts(study: Study, rows: Int[Tensor, " row"], cells: Sequence[Variant]) -> il.PromptBatch:
    """Some rows in every cell, cell by cell."""
    return study.tokenize([study.prompts(cell)[row] for cell in cells for row in rows.tolist()])


def _scores(study: Study, batch: il.PromptBatch, methods: Sequence[str]) -> Tensors:
    """[prompt layer head] by methods that score prompts; the first batch that is scored is timed."""
    found = {}
    for name in methods:
        start = time.perf_counter()
        found[name] = SCORES[name](study, batch)
        seconds = (time.perf_counter() - start) * 100 / len(batch)
        study.once(_time_of(name), lambda seconds=seconds: seconds)
    return found


def _time_of(method: str) -> tuple[str, str]:
    """The name of a method's seconds for 100 prompts, which a run that was killed and goes on may not have."""
    return "seconds for 100 prompts", method


def _effects(study: Study, batch: il.PromptBatch, positions: str) -> Float[Tensor, "prompt layer head"]:
    """By how much the answer's log-odds fall without each head, measured."""
    return il.head_effects(study.model, batch, positions="last" if positions == "last" else "all").log_odds.float()


def _estimates(study: Study, batch: il.PromptBatch) -> Float[Tensor, "prompt layer head"]:
    """The same at the last position, to first order."""
    against = batch.other_label_tokens
    found = il.head_effects(study.model, batch, positions="last", method="gradient", against=against).log_diff
    assert found is not None
    return found.float()


SCORES = {
    "increase": lambda study, batch: head_increases(il.capture(study.model, batch)).float(),
    "logit difference": lambda study, batch: head_contrasts(il.capture(study.model, batch)).float(),
    "effect, last": lambda study, batch: _effects(study, batch, "last"),
    AT_ALL: lambda study, batch: _effects(study, batch, "all"),
    "gradient": _estimates,
    "attention": lambda study, batch: il.attention_to_labels(il.capture(study.model, batch)).sum(-1).float(),
}
"""How each method scores heads, prompt by prompt."""


def timed(study: Study, config: LocationMethodsConfig) -> dict[str, float]:
    """Seconds that every method takes for 100 prompts, one of few batches at a time."""
    every = study.apart[0][: config.timed]

    def measured(name: str) -> float:
        rows = every[: max(1, _most(study, len(every), WHOLE))] if name == AT_ALL else every
        start = time.perf_counter()
        if name in SCORES:
            for batch in study.batches(FOO, rows):
                SCORES[name](study, batch)
        else:
            for row in rows.tolist():
                repeated(study, row)
        return (time.perf_counter() - start) * 100 / len(rows)

    # Timed while they ranked, unless this process found the rankings done.
    return {name: study.once(_time_of(name), lambda name=name: measured(name)) for name in METHODS}


def _orders(
    study: Study, scores: Mapping[str, Float[Tensor, "layer head"]], config: LocationMethodsConfig
) -> Iterator[tuple[str, str, str, Order]]:
    """Method, group, name and order of all heads, best first."""
    rng = random.Random(study.settings.seed)
    for method, score in scores.items():
        best = [il.Head.at(i, score.shape[1]) for i in score.flatten().argsort(descending=True, stable=True).tolist()]
        yield method, "located", "own", best
        for i in range(config.controls):
            yield method, "random", f"set {i}", same_layers(best, rng)
    for i in range(config.draws):
        everything = study.view.heads()
        yield CHANCE, "random", f"set {i}", rng.sample(everything, len(everything))


def same_layers(order: Sequence[il.Head], rng: random.Random) -> Order:
    """The heads of every layer exchanged at random among the places that the layer has in an order."""
    left: dict[int, Order] = {}
    for head in order:
        left.setdefault(head.layer, []).append(head)
    for heads in left.values():
        rng.shuffle(heads)
    return [left[head.layer].pop() for head in order]


def counts_of(n: int) -> list[int]:
    """1, 2, 4, … heads, fewer than all."""
    return [2**i for i in range(n.bit_length()) if 2**i < n]


def _curves(
    study: Study,
    rows: Int[Tensor, " row"],
    orders: Sequence[tuple[str, str, str, Order]],
    positions: Positions,
    mode: Literal["zero", "mean"],
) -> pd.DataFrame:
    """The table's rows of one setting. Equal sets of heads are removed once."""
    everything = frozenset(study.view.heads())
    place: dict[frozenset[il.Head], int] = {frozenset(): 0, everything: 1}
    asked: list[tuple[dict[str, object], int]] = []
    for edit, removed in (("all", frozenset()), ("none", everything)):
        asked.append(({"method": "model", "group": "", "name": "", "edit": edit, "count": 0}, place[removed]))
    for method, group, name, order in orders:
        for count in counts_of(len(order)):
            for edit, heads in (("kept", order[count:]), ("removed", order[:count])):
                at = place.setdefault(frozenset(heads), len(place))
                asked.append(({"method": method, "group": group, "name": name, "edit": edit, "count": count}, at))
    found = _odds(study, rows, [sorted(heads) for heads in place], positions, mode)
    common = {"positions": positions, "mode": mode, "layer": -1, "prompt": rows.tolist(), **study.both_queries(rows)}
    frames = [pd.DataFrame({**common, **columns, "odds": found[:, at]}) for columns, at in asked]
    return stack(*frames).assign(share=lambda made: made["count"] / len(everything))


def _odds(
    study: Study, rows: Int[Tensor, " row"], sets: list[Order], positions: Positions, mode: Literal["zero", "mean"]
) -> Float[np.ndarray, "row set"]:
    """The answer's log-odds without each set of heads, nats, over all cells."""
    variants = [Variant(swapped=one.swapped, asked=asked) for one in (FOO, BAR) for asked in ("true", "false")]
    reference = [study.batch(variant)[study.apart[0][:REFERENCE]] for variant in variants]

    def without(batch: il.PromptBatch, some: Sets) -> Tensors:
        averaged, means = None, None
        if mode == "mean":
            averaged, about = reference, ("means, all cells", positions)
            means = study.once(about, lambda: mean_z(study.view, every_head(study.view), reference, positions))
        found = answers_without(
            study.model, batch, some, positions=positions, mode=mode, reference=averaged, means=means
        )
        own = [label_log_odds(one.label_log_probs, one.answer, choices=one.label_mask) for one in found]
        return {"odds": torch.stack(own, dim=1).float()}

    what = f"heads kept and removed, {positions}, {mode}"
    pieces = study.pieces(_prompts(study, rows, VARIANTS))
    found = side_by_side(study, what, pieces, sets, without, cost=1.0 if positions == "all" else ROW)
    return found["odds"].unflatten(0, (len(VARIANTS), len(rows))).double().mean(0).numpy()
