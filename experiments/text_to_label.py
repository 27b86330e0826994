"""Through which heads does a text reach the keys that the query is compared with? The two towers,
hop by hop.

1. The comparing heads are the first two of the scan of `two_towers.py`: their query alone matters
   most.
2. Heads are ranked, on one half of the prompts, by the first-order effect of what they write at
   labels to the comparing heads' keys: the movers. Heads that write to the movers' values at
   separators are the collectors; those that write to the comparing heads' queries at the last token
   are the query heads.
3. On the other half, edges and chains of edges are removed exactly, jointly and for one head at a
   time: what a writer adds to a head's query, keys or values is replaced by its mean over tokens of
   the same role, with norms recomputed. In a chain, the writer is a head as it depends on some of
   its inputs; what else it writes stays.
4. The control is the mean over 5 sets in which random heads of the same layers stand for the heads
   that were ranked.

    python experiments/text_to_label.py --model icl-mini --task animal-country -n 200

The paper's hypothesis (Figure 1) and open question 1; Wang et al. 2023 (label words are anchors).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from common import Study, Table, dots, from_command_line, thinned
from matplotlib.figure import Figure
from two_towers import N_SCANNED

import icl_lens as il

N_PROMPTS, N_RANDOM = 24, 5
"""Prompts of each half (to twice as many, or all of a half that has fewer), and random sets of
heads."""
N_COMPARING, N_MOVERS, N_COLLECTORS, N_QUERY_HEADS = 2, 4, 8, 4
"""Number of heads of each kind, if the model has enough."""

Heads = Sequence[il.Head]
Role = Literal["text", "label", "query", "last", "other"]
"""What a token is: "other" stands for separators."""
Read = tuple[Literal["q", "k", "v"], Role]
"""What a head reads, and from tokens of which role."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure what the answer loses without each hop, next to random heads, and without single
    heads."""
    study = Study.from_command_line(
        "text-to-label", "Through which heads does a text reach the keys?", arguments
    )
    table = Table(study)
    ranking, testing = thinned(study.locating, N_PROMPTS), thinned(study.testing, N_PROMPTS)
    hops = Hops(study, ranking)
    edge_sets: dict[tuple[str, Any], list[il.Edge]] = {}
    for hop, (heads, edges_of) in hops.groups().items():
        edge_sets[hop, "ranked"] = edges_of(heads)
        random_sets = il.random_head_sets(study.model, heads, n_random=N_RANDOM, seed=study.seed)
        for number, random_heads in enumerate(random_sets):
            edge_sets[hop, number] = edges_of(random_heads)
    for kind, (heads, edges_of) in hops.single().items():
        for head in heads:
            edge_sets[kind, head] = edges_of([head])
    lost = losses(study, testing, ranking, edge_sets)
    for hop, (heads, _) in hops.groups().items():
        if not edge_sets[hop, "ranked"]:
            table.add_missing(hop, "there are no such edges")
            continue
        control = np.stack([lost[hop, number] for number in range(N_RANDOM)], axis=1)
        about = {"versus": "the same with random heads", "note": " ".join(map(str, heads))}
        table.add(hop, lost[hop, "ranked"], control, testing.queries, **about)
    for kind, (heads, _) in hops.single().items():
        for head in heads:
            about = {"versus": "zero", "at": str(head)}
            table.add(f"{kind}, one head", lost[kind, head], 0.0, testing.queries, **about)
    return table.write(draw(table.to_frame()))


def losses(
    study: Study,
    testing: il.PromptBatch,
    reference: il.PromptBatch,
    edge_sets: dict[tuple[str, Any], list[il.Edge]],
) -> dict[tuple[str, Any], Any]:
    """Return the log-odds (nats) that each prompt's answer loses without each set of edges."""
    edits: list[list[Any]] = [[]]
    for edges in edge_sets.values():
        edits.append([il.WithoutEdges(edges, reference=reference)] if edges else [])
    names = {}
    for (hop, heads), edges in edge_sets.items():
        names[f"{hop}, {heads}"] = list(map(str, edges))
    options = {"edges": names}
    log_odds = study.scores("without edges", testing, lambda rows: edits, options).log_odds
    lost = log_odds[:, :1] - log_odds[:, 1:]
    return dict(zip(edge_sets, lost.T, strict=True))


class Hops:
    """The heads of each hop, ranked on some prompts, and the edges that lead through them."""

    def __init__(self, study: Study, ranking: il.PromptBatch) -> None:
        self.study, self.ranking = study, ranking
        scanned = thinned(study.locating, N_SCANNED)
        run = study.run("scan")
        located = il.locate(
            study.model, scanned, by="exchange", k=study.n_located, other_scores=False, run=run
        )
        scan = located.heads
        self.comparing = [head for head in scan if head.layer][:N_COMPARING]
        if not self.comparing:
            raise il.InputError(
                "the heads that compare are in the first layer, so no head writes to their keys"
            )
        self.movers = self.ranked(self.comparing, "k", "label", "last", N_MOVERS)
        self.query_heads = self.ranked(self.comparing, "q", "last", "last", N_QUERY_HEADS)
        self.collectors = self.ranked(self.movers, "v", "other", "label", N_COLLECTORS)

    def ranked(
        self, readers: Heads, part: Literal["q", "k", "v"], at: Role, reader_at: Role, n: int
    ) -> list[il.Head]:
        """Return the heads whose edges into the readers have the largest first-order effects,
        summed over readers."""
        if not any(reader.layer for reader in readers):
            return []
        edges: dict[str, Any] = {"part": part, "at": at, "reader_at": reader_at}
        means: dict[str, Any] = {"reference": self.ranking, "method": "gradient"}
        effects = il.head_to_head_effects(self.study.model, self.ranking, readers, **edges, **means)
        total = effects.log_odds.double().mean(0).sum(0)
        order = total.argsort(descending=True, stable=True)[: min(n, max(1, len(total) // 2))]
        return [il.Head.parse(effects.writers[index]) for index in order.tolist()]

    # Edges. A chain is an edge whose writer is edges into one head.

    def writers(self, layer: int, kind: str = "") -> list[str]:
        """Return the names of what writes before a layer, or of those that contain `kind`: "H", "F"
        or "embed"."""
        cfg = self.study.model.cfg
        names = ["embed"]
        if cfg.positional_embedding_type == "standard":
            names.append("pos_embed")
        for lower in range(layer):
            names += [f"L{lower}H{head}" for head in range(cfg.n_heads)] + [f"F{lower}"]
        return [name for name in names if kind in name]

    def inputs(
        self, head: il.Head, read: Sequence[Read], at: Role = "last", kind: str = ""
    ) -> tuple[il.Edge, ...]:
        """Return what a head reads from tokens of some roles, written by all or by a kind."""
        names = self.writers(head.layer, kind)
        return tuple(il.Edge(head, part, name, role, at) for part, role in read for name in names)

    def to_keys(self, movers: Heads, *read: Read) -> list[il.Edge]:
        """Return the edges from movers to the comparing heads' keys at labels: all of them, or what
        movers `read`."""
        edges = []
        for reader in self.comparing:
            for mover in movers:
                if mover.layer < reader.layer:
                    writer = self.inputs(mover, read, "label") if read else str(mover)
                    if writer:
                        edges.append(il.Edge(reader, "k", writer, "label"))
        return edges

    def to_movers(self, collectors: Heads, *read: Read) -> list[il.Edge]:
        """Return the chains from collectors over the movers' values to keys: all, or what
        collectors `read`."""
        edges = []
        for reader in self.comparing:
            for mover in self.movers:
                earlier = [collector for collector in collectors if collector.layer < mover.layer]
                values = []
                for collector in earlier:
                    writer = self.inputs(collector, read, "other") if read else str(collector)
                    values.append(il.Edge(mover, "v", writer, "other", "label"))
                if mover.layer < reader.layer and values:
                    edges.append(il.Edge(reader, "k", tuple(values), "label"))
        return edges

    def to_queries(self, heads: Heads, *read: Read) -> list[il.Edge]:
        """Return the edges from heads to the comparing heads' queries: all, or what the heads
        `read`."""
        edges = []
        for reader in self.comparing:
            for head in heads:
                if head.layer < reader.layer:
                    writer = self.inputs(head, read) if read else str(head)
                    edges.append(il.Edge(reader, "q", writer))
        return edges

    def into_keys(self, readers: Heads, kind: str) -> list[il.Edge]:
        """Return the edges into the keys at labels of some heads, from all writers or those of a
        kind."""
        edges: list[il.Edge] = []
        for reader in readers:
            edges += self.inputs(reader, [("k", "label")], kind=kind)
        return edges

    def label_words(self, readers: Heads) -> list[il.Edge]:
        """Return the edges from embeddings and the first layer into the values at labels of some
        heads."""
        edges = []
        for reader in readers:
            names = self.writers(min(1, reader.layer))
            edges += [il.Edge(reader, "v", name, "label") for name in names]
        return edges

    def groups(self) -> dict[str, tuple[Heads, Callable[[Heads], list[il.Edge]]]]:
        """Return for each hop the heads that random ones replace, and the edges as a function of
        them."""
        movers, collectors = self.movers, self.collectors
        query_heads, comparing = self.query_heads, self.comparing
        attention: list[Read] = [("q", "label"), ("k", "text"), ("k", "other"), ("k", "label")]
        return {
            "movers → keys": (movers, self.to_keys),
            "everything → keys": (comparing, lambda heads: self.into_keys(heads, "")),
            "all heads → keys": (comparing, lambda heads: self.into_keys(heads, "H")),
            "FFNs → keys": (comparing, lambda heads: self.into_keys(heads, "F")),
            "embeddings → keys": (comparing, lambda heads: self.into_keys(heads, "embed")),
            "texts → movers": (movers, lambda heads: self.to_keys(heads, ("v", "text"))),
            "separators → movers": (movers, lambda heads: self.to_keys(heads, ("v", "other"))),
            "labels → movers": (movers, lambda heads: self.to_keys(heads, ("v", "label"))),
            "movers' attention": (movers, lambda heads: self.to_keys(heads, *attention)),
            "collectors → movers": (collectors, self.to_movers),
            "texts → collectors": (collectors, lambda heads: self.to_movers(heads, ("v", "text"))),
            "query heads → queries": (query_heads, self.to_queries),
            "query text → query heads": (
                query_heads,
                lambda heads: self.to_queries(heads, ("v", "query")),
            ),
            "label words → values": (self.study.located_heads("contrast"), self.label_words),
        }

    def single(self) -> dict[str, tuple[Heads, Callable[[Heads], list[il.Edge]]]]:
        """Return the heads of each kind, and the edges that are removed for one of them alone."""
        return {
            "movers": (self.movers, self.to_keys),
            "collectors": (self.collectors, self.to_movers),
            "query heads": (self.query_heads, self.to_queries),
        }


def draw(table: pd.DataFrame) -> Figure:
    """Draw what is lost without each hop, and with random heads instead."""
    hops = table.query("not measure.str.endswith('one head')", engine="python")
    return dots(hops, label="log-odds lost, nats", names=("heads of the hop", "random heads"))


if __name__ == "__main__":
    from_command_line(main)
