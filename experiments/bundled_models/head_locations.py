"""Where a model does it: in which layers the heads that carry the word tasks are, what they attend to, what they cost.

Heads are located on half of the query words and measured on the other half, so that heads which only chance put first
show it. Half of the prompts have the true demonstrations last, half have them first, and either label is the true one
in turn: attention to the nearest label is not mistaken for attention to the true one.
"""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from rich import box
from rich.table import Table
from torch import Tensor

from experiments.bundled_models.architectures import NAMES
from experiments.bundled_models.episodes import Episode, Vocabulary, load_words
from experiments.bundled_models.metrics import (
    ORDER,
    REORDER,
    HeadMeans,
    answers,
    head_means,
    markdown,
    ranked_heads,
    word_tasks,
)
from icl_lens import Head, ablate_heads, load_model
from icl_lens.errors import InputError

N_LOCATED = 4
N_DRAWS = 20
LEAST_PROMPTS = 32
Points = tuple[float, float]
"""Per cent, or points of accuracy: between the two labels, and over the whole vocabulary."""


@dataclass(frozen=True)
class Ranking:
    """Heads located by one measure on half of the queries, and what they do on the other half."""

    by: str
    """"increase" (of the answer), or "contrast": that less the increase of the other label."""
    heads: tuple[str, ...]
    """The largest mean first."""
    layers: tuple[int, ...]
    values: tuple[float, ...]
    """Their means (nats)."""
    deeper_share: float
    """What the deeper half of the layers has of the sum of all heads' means above zero."""
    on_labels: float
    """Attention from the last token to all labels, mean over the heads."""
    true_share: float
    """Of that, the share on true labels; one half if true and false ones are alike."""
    cost: Points
    """Accuracy lost when the heads are zeroed at every position."""
    random_cost: Points
    """The same for as many random other heads, mean over draws."""
    random_sd: Points
    near_cost: Points
    """The same for as many random other heads of the same layers (the nearest, where one has too few)."""


@dataclass(frozen=True)
class HeadLocations:
    """One model, measured by `measure_where`."""

    arch: str
    seed: int
    steps: int
    n_layers: int
    n_heads: int
    n_chosen: int
    """Prompts on which heads were located."""
    n_tested: int
    n_draws: int
    accuracy: Points
    """Per cent right of the tested prompts."""
    rankings: tuple[Ranking, ...]

    @property
    def name(self) -> str:
        """Such as "icl-mini, seed 0"."""
        return f"{NAMES[self.arch]}, seed {self.seed}"  # pyright: ignore[reportArgumentType]

    def n_deep(self, ranking: Ranking) -> int:
        """How many of the located heads are in the deeper half of the layers."""
        return sum(2 * layer >= self.n_layers for layer in ranking.layers)


def word_episodes(words: Vocabulary, n: int) -> list[Episode]:
    """About `n` prompts of both word tasks: each category asked, each label true, both orders, equally often."""
    sets = [task.episodes(words, sides, -(-n // 16)) for sides in (ORDER, REORDER) for task in word_tasks()]
    return [episode for some in zip(*sets, strict=True) for episode in some]


def halves(episodes: Sequence[Episode], *, seed: int = 0) -> tuple[list[Episode], list[Episode]]:
    """The episodes in two parts that share no query: each category's queries are dealt out at random."""
    parts: tuple[list[Episode], list[Episode]] = ([], [])
    of_query: dict[tuple[str, ...], int] = {}
    for category in sorted({_asked(episode) for episode in episodes}):
        queries = sorted({episode.items[-1].text for episode in episodes if _asked(episode) == category})
        random.Random(f"{seed} {category}").shuffle(queries)
        of_query |= {query: i % 2 for i, query in enumerate(queries)}
    for episode in episodes:
        parts[of_query[episode.items[-1].text]].append(episode)
    return parts


def _asked(episode: Episode) -> str:
    return episode.categories[episode.items[-1].side]


def nearby_controls(
    rng: random.Random, located: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """For each located head one of the `others`, each at most once: of its layer, or of the nearest that has any."""
    left, chosen = list(others), []
    for layer, _ in located:
        rng.shuffle(left)
        left.sort(key=lambda head: abs(head[0] - layer))
        chosen.append(left.pop(0))
    return chosen


def accuracy(model: Any, episodes: Sequence[Episode], heads: Sequence[tuple[int, int]] = ()) -> Points:
    """Per cent right without `heads`, zeroed at every position."""
    if not heads:
        found = answers(model, episodes)
    else:
        with ablate_heads(model, [Head(*head) for head in heads]):
            found = answers(model, episodes)
    return 100 * statistics.fmean(found.label), 100 * statistics.fmean(found.word)


def deeper_share(values: Float[Tensor, "layer head"]) -> float:
    """Share of the deeper half of the layers in the sum of what is above zero; 0 if nothing is."""
    above = values.clamp(min=0).sum(1)
    return float(above[-(-len(above) // 2) :].sum() / above.sum()) if above.sum() > 0 else 0.0


def measure_where(
    model: Any,
    run: dict[str, Any],
    words: Vocabulary,
    *,
    n: int = 320,
    n_draws: int = N_DRAWS,
    n_located: int = N_LOCATED,
) -> HeadLocations:
    """Locate heads by increase and by contrast on half of about `n` prompts, and measure them on the other half.

    `run` is the record of the training. Raises InputError for too few prompts, or a model of too few heads.
    """
    if n < LEAST_PROMPTS:
        raise InputError(f"n={n} prompts are too few for two halves of queries; ask for {LEAST_PROMPTS} or more")
    chosen, tested = halves(word_episodes(words, n))
    found, again = head_means(model, chosen), head_means(model, tested)
    n_layers, n_heads = found.increase.shape
    if n_layers * n_heads < 2 * n_located:
        raise InputError(
            f"the model has {n_layers * n_heads} heads, too few for {n_located} located and as many random ones"
        )
    intact = accuracy(model, tested)

    def lost(heads: Sequence[tuple[int, int]]) -> Points:
        left = accuracy(model, tested, heads)
        return intact[0] - left[0], intact[1] - left[1]

    return HeadLocations(
        arch=run["arch"],
        seed=run["seed"],
        steps=run["done"],
        n_layers=n_layers,
        n_heads=n_heads,
        n_chosen=len(chosen),
        n_tested=len(tested),
        n_draws=n_draws,
        accuracy=intact,
        rankings=tuple(
            _ranking(by, ranked_heads(getattr(found, by)), n_located, again, lost, n_draws)
            for by in ("increase", "contrast")
        ),
    )


def _ranking(
    by: str,
    ranked: Sequence[tuple[int, int]],
    n_located: int,
    again: HeadMeans,
    lost: Callable[[Sequence[tuple[int, int]]], Points],
    n_draws: int,
) -> Ranking:
    """The first of the `ranked` heads, with their means on other queries (`again`) and what zeroing costs (`lost`)."""
    rng = random.Random(0)
    located, others = ranked[:n_located], sorted(ranked[n_located:])  # both rankings draw from one order
    anywhere = [lost(rng.sample(others, n_located)) for _ in range(n_draws)]
    near = [lost(nearby_controls(rng, located, others)) for _ in range(n_draws)]
    values = getattr(again, by)
    true = sum(float(again.on_true[head]) for head in located)
    both = true + sum(float(again.on_false[head]) for head in located)
    return Ranking(
        by=by,
        heads=tuple(str(Head(*head)) for head in located),
        layers=tuple(layer for layer, _ in located),
        values=tuple(float(values[head]) for head in located),
        deeper_share=deeper_share(values),
        on_labels=both / n_located,
        true_share=true / both if both > 0 else 0.0,
        cost=lost(located),
        random_cost=_each(statistics.fmean, anywhere),
        random_sd=_each(statistics.stdev, anywhere),
        near_cost=_each(statistics.fmean, near),
    )


def _each(statistic: Callable[[Sequence[float]], float], points: Sequence[Points]) -> Points:
    label, word = zip(*points, strict=True)
    return statistic(label), statistic(word)


def where_of(folder: Path, *, n: int = 320) -> HeadLocations:
    """`measure_where` of the model in a trained folder; raises InputError if it holds none."""
    return measure_where(load_model(str(folder)), training_record(folder), load_words(), n=n)


def training_record(folder: Path) -> dict[str, Any]:
    """What `train` wrote of the run beside the model; raises InputError if it is not there."""
    try:
        return json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the folder {str(folder)!r} holds no model trained here: training.json cannot be read "
            f"({type(error).__name__}); give one that `train` wrote"
        ) from error


PLACES = (
    "model",
    "by",
    "located heads",
    "in deeper half",
    "share of deeper half (%)",
    "attention on labels (%)",
    "of it on true ones (%)",
)
COSTS = ("model", "by", "intact (%)", "located", "random", "sd", "of same layers")
Row = tuple[str, ...]


def place_rows(wheres: Sequence[HeadLocations]) -> list[Row]:
    """Cells under `PLACES`, a row for each model and ranking."""
    return [
        (
            f"{where.name} ({where.steps:,} steps)",
            ranking.by,
            " ".join(ranking.heads),
            f"{where.n_deep(ranking)} of {len(ranking.heads)}",
            f"{100 * ranking.deeper_share:.0f}",
            f"{100 * ranking.on_labels:.0f}",
            f"{100 * ranking.true_share:.0f}",
        )
        for where in wheres
        for ranking in where.rankings
    ]


def cost_rows(wheres: Sequence[HeadLocations]) -> list[Row]:
    """Cells under `COSTS`: accuracy and points of it lost, between the labels / over all words."""
    return [
        (
            where.name,
            ranking.by,
            *(
                f"{label:.1f} / {word:.1f}"
                for label, word in (
                    where.accuracy,
                    ranking.cost,
                    ranking.random_cost,
                    ranking.random_sd,
                    ranking.near_cost,
                )
            ),
        )
        for where in wheres
        for ranking in where.rankings
    ]


def where_markdown(wheres: Sequence[HeadLocations]) -> str:
    """Both tables with what is in them, for a card."""
    first = wheres[0]
    n_located = len(first.rankings[0].heads)

    def table(header: Row, rows: Sequence[Row]) -> str:
        return markdown(" | ".join(header), [" | ".join(row) for row in rows])

    return (
        f"The {n_located} heads of largest mean (increase of the answer, or contrast: that less the increase of the"
        f" other label) on {first.n_chosen} prompts of both word tasks, measured on {first.n_tested} prompts with other"
        " queries; in half of the prompts the true demonstrations come first, and either label is the true one in turn."
        f" The deeper half is layers {-(-first.n_layers // 2)} to {first.n_layers - 1}; its share is that of the sum of"
        " all heads' means above zero. Attention is from the last token; as many labels are true as false."
        f"\n\n{table(PLACES, place_rows(wheres))}\n\n"
        f"Points of accuracy lost (between the two labels / over the vocabulary) when the {n_located} heads are zeroed"
        f" at every position, and when {n_located} random others are: of any layer (mean and sd of"
        f" {first.n_draws} draws), and of the same layers (mean)."
        f"\n\n{table(COSTS, cost_rows(wheres))}"
    )


def where_tables(wheres: Sequence[HeadLocations]) -> list[Table]:
    """The same for a terminal."""
    tables = []
    for title, header, rows in (
        ("where the located heads are, and what they attend to", PLACES, place_rows(wheres)),
        ("points of accuracy lost without them: between the labels / over all words", COSTS, cost_rows(wheres)),
    ):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for name in header:
            words = name in ("model", "by", "located heads")
            table.add_column(name, overflow="fold", justify="left" if words else "right")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def where_json(wheres: Sequence[HeadLocations]) -> str:
    """All numbers as JSON."""
    return json.dumps([asdict(where) for where in wheres], indent=2) + "\n"
