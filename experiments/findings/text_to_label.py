"""Through which heads does a text reach the keys that the query is compared with? The two towers, hop by hop.

1. The comparing heads are the first two of the scan of `two-towers`: their query alone matters most.
2. Heads are ranked by the first-order effect of what they write, at the labels, to the comparing heads' keys: the
   movers. Heads that write to the movers' values at other tokens (separators) are the collectors; those that write to
   the comparing heads' queries at the last token are on the query's side.
3. On held-out prompts, edges and chains of edges are removed exactly, joint and one head at a time. In the control, the
   heads that were ranked are replaced by random heads of the same layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

import icl_lens as il
from experiments.findings.two_towers import scanned_heads
from experiments.framework import markdown
from experiments.framework.estimate import compare
from experiments.framework.finding import Finding, Measure, Measured, Row
from experiments.framework.plotting import condition_dots
from experiments.framework.sentences import TITLES, extent, number, real_rows
from experiments.framework.study import Study, clusters_of, thin_out
from icl_lens.activations.writers import writer_names
from icl_lens.attribution.writer_groups import layer_of
from icl_lens.edits.edges import writer_means
from icl_lens.edits.edit import PARTS, Part
from icl_lens.intervals import top_places, weights_with_data
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.prompts.roles import EDGE_ROLES, EdgeRole

N_PROMPTS, N_RANDOM = 24, 5
"""Minimum number of prompts of each half, and number of random sets of heads."""
N_COMPARING, N_MOVERS, N_COLLECTORS, N_QUERY = 2, 4, 8, 4
"""Number of heads of each kind, if the model has enough."""
UNIT = "log-odds lost by the answer, nats"
MOVERS, COLLECTORS, QUERY = "movers", "collectors", "query heads"
"""The ranked heads: at labels, at other tokens of the demonstrations, and at the last token."""

KEYS = "the comparing heads' keys at labels"
ALL, VALUES = "all", "values"
AS_MOVERS, AS_COLLECTORS = "random heads as movers", "random heads as collectors"
AS_READERS = "the same in random heads"
HOPS = (
    (MOVERS, f"without what the movers write to {KEYS}", AS_MOVERS, "movers → keys"),
    (ALL, f"without everything in {KEYS}", AS_READERS, "everything → keys"),
    ("heads", f"without what heads write to {KEYS}", AS_READERS, "all heads → keys"),
    ("FFNs", f"without what FFNs write to {KEYS}", AS_READERS, "FFNs → keys"),
    ("embeddings", f"without embeddings in {KEYS}", AS_READERS, "embeddings → keys"),
    ("texts", "without what the movers' values read at texts", AS_MOVERS, "texts → movers"),
    ("between", "without what the movers' values read at separators", AS_MOVERS, "separators → movers"),
    ("labels", "without what the movers' values read at labels", AS_MOVERS, "labels → movers"),
    ("aim", "without the inputs of the movers' queries and keys", AS_MOVERS, "movers' attention"),
    (COLLECTORS, "without what the collectors write to the movers' values", AS_COLLECTORS, "collectors → movers"),
    ("collected", "without the texts in the collectors' values", AS_COLLECTORS, "texts → collectors"),
    (
        QUERY,
        "without what the query heads write to the comparing heads' queries",
        "random heads",
        "query heads → queries",
    ),
    ("query text", "without the query's text in the query heads' values", "random heads", "query text → query heads"),
    (VALUES, "without the label words in the located heads' values", "random heads", "label words → values"),
)
"""What is removed: its key, its heading, that of its control, and its name in the figure."""
MEASURES = tuple(Measure(name, removed, control, UNIT) for name, removed, control, _ in HOPS)
SHOWN = {name: shown for name, _, _, shown in HOPS}
AIMS: Sequence[tuple[Part, EdgeRole]] = (("q", "label"), ("k", "text"), ("k", "other"), ("k", "label"))

Heads = Sequence[il.Head]


@dataclass(frozen=True)
class Ranked:
    """Heads of one kind, the strongest first, and how often each is among them over resampled queries."""

    heads: list[il.Head]
    selected: list[float]
    by_chance: float
    """How often a random head would be among them."""


@dataclass
class Hops:
    """The heads of each hop on some prompts, and the edges that lead through them."""

    study: Study
    ranking: il.PromptBatch

    @cached_property
    def comparing(self) -> list[il.Head]:
        heads = [head for head in scanned_heads(self.study) if head.layer][:N_COMPARING]
        if not heads:
            raise il.InputError("the heads that compare are in the first layer, so no head writes to their keys")
        return heads

    @cached_property
    def means(self) -> torch.Tensor:
        return writer_means(self.study.model, self.ranking)

    @cached_property
    def ranked(self) -> dict[str, Ranked]:
        """Movers, collectors and query heads."""
        found = {
            MOVERS: self.rank(self.comparing, "k", "label", "last", N_MOVERS),
            QUERY: self.rank(self.comparing, "q", "last", "last", N_QUERY),
        }
        found[COLLECTORS] = self.rank(found[MOVERS].heads, "v", "other", "label", N_COLLECTORS)
        return found

    def rank(self, readers: Heads, part: Part, role: EdgeRole, reader_at: EdgeRole, n: int) -> Ranked:
        """Return the heads whose edges into the readers have the largest first-order effects, summed over readers."""
        effects = estimate_effects(self.study.model, self.ranking, readers, self.means, reader_at)
        total = dict[str, Any]()
        for reader, of_reader in effects.items():
            values = of_reader[:, PARTS.index(part), EDGE_ROLES.index(role)].double().cpu().numpy()
            for index, name in enumerate(self.writers(reader)):
                if "H" in name:
                    total[name] = total.get(name, 0) + values[:, index]
        if not total:
            return Ranked([], [], 0.0)
        names, n = list(total), min(n, max(1, len(total) // 2))
        drawn = weights_with_data(clusters_of(self.ranking)) @ np.stack([total[name] for name in names], axis=1)
        first = np.argsort(-drawn[0], kind="stable")[:n]
        heads = [self.study.view.check_head(names[index]) for index in first]
        return Ranked(heads, top_places(drawn[1:], n).mean(0)[first].tolist(), n / len(names))

    def writers(self, reader: il.Head) -> tuple[str, ...]:
        return tuple(writer_names(self.study.view, reader.layer)[:-1])

    # Edges. A chain is an edge whose writer is edges into one head.

    def inputs(
        self, head: il.Head, read: Sequence[tuple[Part, EdgeRole]], at: EdgeRole = "last", kind: str = ""
    ) -> tuple[il.Edge, ...]:
        """Return what a head reads from tokens of some roles, from all writers or those with `kind` in their name."""
        names = [name for name in self.writers(head) if kind in name]
        return tuple(il.Edge(head, part, name, role, at) for part, role in read for name in names)

    def keys(self, movers: Heads, moved: Callable[[il.Head], Any] = str) -> list[il.Edge]:
        """Return the edges from movers into the comparing heads' keys; `moved` returns what of a mover is removed."""
        pairs = [(one, mover) for one in self.comparing for mover in movers if mover.layer < one.layer]
        return [il.Edge(one, "k", part, "label") for one, mover in pairs if (part := moved(mover))]

    def collected(self, collectors: Heads, of_collector: Callable[[il.Head], Any] = str) -> list[il.Edge]:
        """Return the chains from collectors over the movers' values; `of_collector` returns what is removed of one."""

        def moved(mover: il.Head) -> tuple[il.Edge, ...]:
            earlier = [one for one in collectors if one.layer < mover.layer]
            return tuple(il.Edge(mover, "v", of_collector(one), "other", "label") for one in earlier)

        return self.keys(self.ranked[MOVERS].heads, moved)

    def queries(self, heads: Heads, written: Callable[[il.Head], Any] = str) -> list[il.Edge]:
        """Return the edges from heads into the comparing heads' queries; `written` returns what of one is removed."""
        pairs = [(one, head) for one in self.comparing for head in heads if head.layer < one.layer]
        return [il.Edge(one, "q", written(head)) for one, head in pairs]

    def groups(self) -> dict[str, tuple[Heads, Callable[[Heads], list[il.Edge]]]]:
        """Return for each measure the heads that random ones replace, and the edges as a function of them."""
        movers, collectors, at_end = (self.ranked[name].heads for name in (MOVERS, COLLECTORS, QUERY))

        def moved(*read: tuple[Part, EdgeRole]) -> Callable[[Heads], list[il.Edge]]:
            return lambda heads: self.keys(heads, lambda mover: self.inputs(mover, read, "label"))

        def values(heads: Heads) -> list[il.Edge]:
            pairs = [(head, name) for head in heads for name in self.writers(head) if layer_of(name) <= 0]
            return [il.Edge(head, "v", name, "label") for head, name in pairs]

        def keys_from(kind: str) -> Callable[[Heads], list[il.Edge]]:
            return lambda heads: [edge for one in heads for edge in self.inputs(one, [("k", "label")], kind=kind)]

        return {
            ALL: (self.comparing, keys_from("")),
            "heads": (self.comparing, keys_from("H")),
            "FFNs": (self.comparing, keys_from("F")),
            "embeddings": (self.comparing, keys_from("embed")),
            MOVERS: (movers, self.keys),
            "texts": (movers, moved(("v", "text"))),
            "between": (movers, moved(("v", "other"))),
            "labels": (movers, moved(("v", "label"))),
            "aim": (movers, moved(*AIMS)),
            COLLECTORS: (collectors, self.collected),
            "collected": (
                collectors,
                lambda heads: self.collected(heads, lambda one: self.inputs(one, [("v", "text")], "other")),
            ),
            QUERY: (at_end, self.queries),
            "query text": (
                at_end,
                lambda heads: self.queries(heads, lambda one: self.inputs(one, [("v", "query")])),
            ),
            VALUES: (self.study.located, values),
        }


def measure(study: Study) -> Measured:
    """Measure what the answer loses without each hop, next to random heads, and without single heads."""
    ranking, testing = (thin_out(half, N_PROMPTS) for half in study.halves())
    hops, clusters = Hops(study, ranking), clusters_of(testing)
    groups = hops.groups()
    sets = {
        (name, number): make(some)
        for name, (heads, make) in groups.items()
        for number, some in enumerate([heads, *study.random_sets(heads, N_RANDOM)])
    }
    single = {MOVERS: hops.keys, COLLECTORS: hops.collected, QUERY: hops.queries}
    sets |= {(name, head): single[name]([head]) for name in single for head in hops.ranked[name].heads}
    lost = lost_without(study, testing, ranking, sets)
    rows, details = [], []
    for one in MEASURES:
        heads, _ = groups[one.name]
        if not sets[one.name, 0]:
            rows.append(Row(one.name, note="there are no such edges"))
            continue
        control = np.mean([lost[one.name, number] for number in range(1, N_RANDOM + 1)], axis=0)
        found = replace(compare(lost[one.name, 0], control, clusters), n_heads=len(heads))
        rows.append(Row.from_result(one.name, found, note=" ".join(map(str, heads))))
        details.append({"hop": one.name, "head": "", **_numbers(found)})
    for name in single:
        ranked = hops.ranked[name]
        for head, selected in zip(ranked.heads, ranked.selected, strict=True):
            numbers = _numbers(compare(lost[name, head], 0.0, clusters))
            shares = {"selected": selected, "selected_by_chance": ranked.by_chance}
            details.append({"hop": name, "head": str(head), **numbers, **shares})
    return Measured(rows, pd.DataFrame(details))


def _numbers(found: Any) -> dict[str, float]:
    return {name: value for name, value in asdict(found).items() if name in ("quantity", "control", "low", "high")}


def lost_without(
    study: Study, batch: il.PromptBatch, reference: il.PromptBatch, sets: dict[Any, list[il.Edge]]
) -> dict[Any, Float[np.ndarray, " row"]]:
    """Return the log-odds (nats) that each prompt's answer loses without each set of edges."""
    edits = [[il.WithoutEdges(edges, reference=reference)] if edges else [] for edges in sets.values()]
    odds = study.scores(batch, lambda rows: [[], *edits]).odds
    return dict(zip(sets, (odds[:, :1] - odds[:, 1:]).T, strict=True))


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in a few sentences."""
    rows = {name: [row for _, row in real_rows(cells, name)] for name in (MOVERS, ALL, "texts", "between", COLLECTORS)}
    if not rows[MOVERS]:
        return "Not measured on a real model."

    def lost(name: str) -> str:
        quantity, control = (extent([getattr(row, field) for row in rows[name]]) for field in ("quantity", "control"))
        return f"{quantity} nats (random heads: {control})"

    models = " and ".join(dict.fromkeys(TITLES[cell.model] for cell, _ in real_rows(cells, MOVERS)))
    everything = extent([row.quantity for row in rows[ALL]])
    return (
        f"In {models}, the answer loses {lost(MOVERS)} without what {N_MOVERS} heads write at the labels to the keys "
        f"of {N_COMPARING} comparing heads, and {everything} without all that is written there. The values of these "
        f"{N_MOVERS} heads carry {lost('between')} from the separators around texts, where {N_COLLECTORS} heads have "
        f"written {lost(COLLECTORS)}, and {lost('texts')} from the texts' own tokens."
    )


def tables(cells: Sequence[Any]) -> str:
    """Return the heads of each hop with their own effects: a line for each task of the real models."""
    rows, chance = [], list[float]()
    for cell, everything in real_rows(cells, ALL):
        lists = []
        for hop in (MOVERS, COLLECTORS, QUERY):
            part = cell.details[(cell.details["hop"] == hop) & (cell.details["head"] != "")]
            lists.append(
                "<br>".join(
                    f"{one.head}: {number(one.quantity)} [{number(one.low)}, {number(one.high)}], {one.selected:.0%}"
                    for one in part.itertuples(index=False)
                )
            )
            chance += part["selected_by_chance"].tolist()
        task = f"{TITLES[cell.model]}, {cell.task}"
        rows.append([task, everything.note.replace(" ", "<br>"), *lists])
    if not rows:
        return ""
    heading = ["", "comparing heads", *(f"{hop}: lost alone, selected" for hop in (MOVERS, COLLECTORS, QUERY))]
    return (
        "Movers write at labels to the keys of the comparing heads, collectors at separators to the movers' values, "
        "query heads at the last token to the comparing heads' queries. For each head: log-odds lost without what it "
        "alone writes there, nats [95%], and how often it is among the first of its kind over resampled queries "
        f"(a random head: {extent(chance, scale=100.0, digits=0)}%).\n\n{markdown.table(heading, rows, align='lllll')}"
    )


def draw(details: pd.DataFrame) -> Any:
    """Draw what is lost without each hop, and with random heads instead."""
    hops: Any = details[details["head"] == ""].replace({"hop": SHOWN})
    return condition_dots(hops, "hop", label="log-odds lost, nats", names=("heads of the hop", "random heads"))


FINDING = Finding(
    id="text-to-label",
    title="Through which heads does a text reach the key that it is compared by?",
    question="Two heads compare the query with what their keys hold at labels. Which heads write it there, from which "
    "tokens do these take it, and does the answer need them more than random heads of the same layers?",
    answer=answer,
    claim="In shallow layers, the features of demonstrations are merged into their labels; in deep layers, in-context "
    "heads move label information to the last token. The paper takes the first step from Wang et al. (2023) and leaves "
    "it as an open question.",
    covers="the paper's hypothesis (Figure 1), open question 1, and Wang et al. 2023 (label words are anchors)",
    measures=MEASURES,
    measure=measure,
    tables=tables,
    look_for="Log-odds lost without each hop (dots, bars: 95%), and with random heads of the same layers in it "
    "(circles).",
    method=f"The comparing heads are the first {N_COMPARING} of the scan of `two-towers`. Movers are the {N_MOVERS} "
    "heads with the largest first-order effect of what they write, at labels, to the comparing heads' keys; collectors "
    f"the {N_COLLECTORS} heads with the largest effect of what they write, at tokens that are neither texts nor labels "
    f"(separators such as colons and line breaks), to the movers' values; query heads the {N_QUERY} heads that write "
    "most to the comparing heads' queries at the last token. Half of the prompts rank heads; on the others, edges are "
    "removed exactly. To remove an edge is to replace what a writer adds to a head's query, keys or values by its mean "
    "over tokens of the same role, with norms recomputed. In a chain, the writer is a head as it depends on some of "
    "its own inputs: only this is removed, and what else the head writes stays. “Values” removes "
    "embeddings and the first layer from the values of the located heads at labels.",
    caveats=(
        "Movers and collectors matter here only through the keys of the comparing heads. What they write for other "
        "heads stays.",
        "The parts of what movers read do not add up to the whole: their attention and values act together.",
        "First-order effects rank heads; a head whose effect is far from linear can be missed.",
        "A model that copies the last label, or prefers one, loses as much with random heads.",
    ),
    post_hoc="The numbers of heads, and separators as a group of their own, were chosen after an exact ranking on "
    "SmolLM2 (animal-country, A/B) had been seen. Qwen, the other tasks and the small models had not been looked at.",
    draw=draw,
)
