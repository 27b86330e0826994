"""Where a bundled model's located heads are, what they attend to, and how much accuracy zeroing them costs.

Heads are located on half of the query words and measured on the other half, so that heads that rank high only by chance
do not look important. Half of the prompts have the true demonstrations last, half have them first, and each label is
the true one equally often, so attention to the nearest label is not mistaken for attention to the true one.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from experiments.bundled_models.architectures import NAMES, Arch
from experiments.bundled_models.episodes import Episode, Vocabulary, load_words
from experiments.bundled_models.metrics import ORDER, REORDER, answers, head_values, word_tasks
from experiments.framework import markdown
from experiments.framework.locating import best_heads
from icl_lens import Head, ablate_heads, load_model
from icl_lens.errors import InputError

N_LOCATED = 4
N_DRAWS = 20
MIN_PROMPTS = 32
Points = Float[np.ndarray, "2"]
"""Percent, or points of accuracy: between the two labels, and over the whole vocabulary."""


@dataclass(frozen=True)
class Ranking:
    """Heads located by one measure on half of the queries, and what they do on the other half."""

    by: str
    """"increase" (of the answer), or "contrast": that minus the increase of the other label."""
    heads: tuple[str, ...]
    """The largest mean first."""
    layers: tuple[int, ...]
    deeper_share: float
    """Share of the deeper half of the layers in the sum of all positive means."""
    on_labels: float
    """Attention from the last token to all labels, mean over the heads."""
    true_share: float
    """Share of that attention on true labels; one half if true and false labels get the same."""
    cost: tuple[float, ...]
    """Points of accuracy lost when the heads are zeroed at every position."""
    random_cost: tuple[float, ...]
    """The same for random other heads of the same number, mean over draws."""
    random_sd: tuple[float, ...]
    near_cost: tuple[float, ...]
    """The same for random other heads of the same layers (or the nearest layers, if these have too few)."""


@dataclass(frozen=True)
class HeadLocations:
    """One model, measured by `measure_locations`."""

    arch: Arch
    seed: int
    steps: int
    n_layers: int
    n_chosen: int
    """Prompts on which heads were located."""
    n_tested: int
    n_draws: int
    accuracy: tuple[float, ...]
    """Accuracy on the tested prompts (%)."""
    rankings: tuple[Ranking, ...]

    @property
    def name(self) -> str:
        """Such as "icl-mini, seed 0"."""
        return f"{NAMES[self.arch]}, seed {self.seed}"


def word_episodes(words: Vocabulary, n: int) -> list[Episode]:
    """Return about `n` prompts of both word tasks: each category queried, each label true, both orders equally."""
    sets = [task.episodes(words, sides, -(-n // 16)) for sides in (ORDER, REORDER) for task in word_tasks()]
    return [episode for some in zip(*sets, strict=True) for episode in some]


def halves(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """Return the episodes in two parts that share no query: each category's queries are dealt out at random."""
    queries: dict[str, set[tuple[str, ...]]] = {}
    for episode in episodes:
        queries.setdefault(episode.query_category, set()).add(episode.items[-1].text)
    part_of: dict[tuple[str, ...], int] = {}
    for category in sorted(queries):
        order = sorted(queries[category])
        random.Random(f"0 {category}").shuffle(order)
        part_of |= {query: i % 2 for i, query in enumerate(order)}
    parts: tuple[list[Episode], list[Episode]] = ([], [])
    for episode in episodes:
        parts[part_of[episode.items[-1].text]].append(episode)
    return parts


def nearby_controls(rng: random.Random, located: Sequence[Head], others: Sequence[Head]) -> list[Head]:
    """Return another head for each located one, each at most once: of its layer, or of the nearest that has any."""
    left, chosen = list(others), []
    for layer, _ in located:
        rng.shuffle(left)
        left.sort(key=lambda head: abs(head[0] - layer))
        chosen.append(left.pop(0))
    return chosen


def accuracy(model: Any, episodes: Sequence[Episode], heads: Sequence[Head] = ()) -> Points:
    """Return the accuracy in percent without `heads`, zeroed at every position."""
    with ablate_heads(model, heads):
        return 100 * answers(model, episodes)[["label", "word"]].mean().to_numpy()


def deeper_share(values: Float[Tensor, "layer head"]) -> float:
    """Return the share of the deeper half of the layers in the sum of positive values; 0 if there are none."""
    above = values.clamp(min=0).sum(1)
    return float(above[-(-len(above) // 2) :].sum() / above.sum()) if above.sum() > 0 else 0.0


def measure_locations(
    model: Any, run: dict[str, Any], words: Vocabulary, *, n: int = 320, n_draws: int = N_DRAWS
) -> HeadLocations:
    """Locate heads by increase and by contrast on half of about `n` prompts, and measure them on the other half.

    `run` is the record of the training. Raise InputError for too few prompts, or a model of too few heads.
    """
    chosen, tested = chosen_and_tested(words, n)
    found, held_out = head_values(model, chosen)[1], head_values(model, tested)[1]
    n_layers, n_heads = found["increase"].shape[1:]
    if n_layers * n_heads < 2 * N_LOCATED:
        raise InputError(
            f"the model has {n_layers * n_heads} heads, too few for {N_LOCATED} located and as many random ones"
        )
    intact, means = accuracy(model, tested), {name: values.mean(0) for name, values in held_out.items()}

    def lost(heads: Sequence[Head]) -> Points:
        return intact - accuracy(model, tested, heads)

    return HeadLocations(
        arch=run["arch"],
        seed=run["seed"],
        steps=run["done"],
        n_layers=n_layers,
        n_chosen=len(chosen),
        n_tested=len(tested),
        n_draws=n_draws,
        accuracy=tuple(intact.tolist()),
        rankings=tuple(
            rank(by, best_heads(found[by], n_layers * n_heads), means, lost, n_draws) for by in ("increase", "contrast")
        ),
    )


def chosen_and_tested(words: Vocabulary, n: int) -> tuple[list[Episode], list[Episode]]:
    """Return about `n` prompts in two halves, for locating heads and for testing; raise InputError for too few."""
    if n < MIN_PROMPTS:
        raise InputError(f"n must be at least {MIN_PROMPTS} prompts, for two halves of queries, got {n}")
    return halves(word_episodes(words, n))


def rank(
    by: str,
    ranked: Sequence[Head],
    means: dict[str, Float[Tensor, "layer head"]],
    lost: Callable[[Sequence[Head]], Points],
    n_draws: int,
) -> Ranking:
    """Return the first of the `ranked` heads, with their `means` on other queries and what zeroing costs (`lost`)."""
    rng = random.Random(0)
    located, others = ranked[:N_LOCATED], sorted(ranked[N_LOCATED:])  # both rankings draw from one order
    anywhere = np.stack([lost(rng.sample(others, N_LOCATED)) for _ in range(n_draws)])
    near = np.stack([lost(nearby_controls(rng, located, others)) for _ in range(n_draws)])
    true, false = (sum(float(means[name][head]) for head in located) for name in ("on_true", "on_false"))
    return Ranking(
        by=by,
        heads=tuple(map(str, located)),
        layers=tuple(head.layer for head in located),
        deeper_share=deeper_share(means[by]),
        on_labels=(true + false) / N_LOCATED,
        true_share=true / (true + false) if true + false > 0 else 0.0,
        cost=tuple(lost(located).tolist()),
        random_cost=tuple(anywhere.mean(0).tolist()),
        random_sd=tuple(anywhere.std(0, ddof=1).tolist()),
        near_cost=tuple(near.mean(0).tolist()),
    )


def locations_in(folder: Path, *, n: int = 320) -> HeadLocations:
    """Return `measure_locations` of the model in a trained folder; raise InputError if it holds none."""
    return measure_locations(load_model(str(folder)), training_record(folder), load_words(), n=n)


def training_record(folder: Path) -> dict[str, Any]:
    """Return what `train` wrote of the run next to the model; raise InputError if it is not there."""
    try:
        return json.loads((folder / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the folder {str(folder)!r} holds no model trained here: training.json cannot be read "
            f"({type(error).__name__}); pass one that `train` wrote"
        ) from error


PLACES = (
    "model",
    "by",
    "located heads",
    "in deeper half",
    "share of deeper half (%)",
    "attention to labels (%)",
    "of it to true ones (%)",
)
COSTS = ("model", "by", "intact (%)", "located", "random", "sd", "of same layers")


def place_rows(models: Iterable[HeadLocations]) -> list[list[str]]:
    """Return cells under `PLACES`, a row for each model and ranking."""
    rows = []
    for model in models:
        for one in model.rankings:
            n_deep = sum(2 * layer >= model.n_layers for layer in one.layers)
            shares = [f"{100 * share:.0f}" for share in (one.deeper_share, one.on_labels, one.true_share)]
            name = f"{model.name} ({model.steps:,} steps)"
            rows.append([name, one.by, " ".join(one.heads), f"{n_deep} of {len(one.heads)}", *shares])
    return rows


def cost_rows(models: Iterable[HeadLocations]) -> list[list[str]]:
    """Return cells under `COSTS`: accuracy and points of it lost, between the labels / over all words."""
    rows = []
    for model in models:
        for one in model.rankings:
            points = (model.accuracy, one.cost, one.random_cost, one.random_sd, one.near_cost)
            rows.append([model.name, one.by, *(f"{label:.1f} / {word:.1f}" for label, word in points)])
    return rows


def locations_markdown(models: Sequence[HeadLocations]) -> str:
    """Return both tables with explanations, for a card."""
    first = models[0]
    return (
        f"The {N_LOCATED} heads with the largest mean (increase of the answer, or contrast: that minus the increase of"
        f" the other label) on {first.n_chosen} prompts of both word tasks, measured on {first.n_tested} prompts with"
        " other queries. In half of the prompts, the true demonstrations come first, and each label is the true one"
        f" equally often. The deeper half is layers {-(-first.n_layers // 2)} to {first.n_layers - 1}; its share is"
        " that of the sum of all positive means. Attention is from the last token; half of the labels are true."
        f"\n\n{markdown.table(PLACES, place_rows(models))}\n\n"
        f"Points of accuracy lost (between the two labels / over the vocabulary) when the {N_LOCATED} heads are zeroed"
        f" at every position, and when {N_LOCATED} random others are: of any layer (mean and sd of"
        f" {first.n_draws} draws), and of the same layers (mean)."
        f"\n\n{markdown.table(COSTS, cost_rows(models))}"
    )
