"""Every claim on made-up tables: supported, not supported, undecided; and the gate for incapable models."""

import math

import numpy as np
import pandas as pd
import pytest

from experiments.catalogue import IDS, find
from experiments.claims import (
    accuracy,
    attention_vs_increase,
    ffn,
    head_overlap,
    imbalance,
    label_attention,
    label_rank,
    layers,
    order,
    top_heads,
    vocabulary,
)
from experiments.lab.competence import Competence, gated
from experiments.lab.frames import long, stack
from experiments.lab.verdict import Verdict, all_of, judge

N = 200
OUTCOMES = ["supported", "not supported", "undecided"]


def noisy(mean: float, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """N values whose mean is exactly `mean`."""
    values = np.random.default_rng(seed).normal(0, spread, N)
    return mean + values - values.mean()


def layers_table(share: float, spread: float = 0.02) -> pd.DataFrame:
    """Four layers; deep attention holds `share` of each prompt's increases, shallow FFN the rest."""
    values = np.zeros((N, 4, 2))
    values[:, 3, 0] = noisy(share, spread)
    values[:, 0, 1] = 1 - values[:, 3, 0]
    values[:, 1, 0] = -5  # losses do not count
    axes = {"prompts": ["task"], "prompt": range(N), "layer": range(4), "component": layers.COMPONENTS}
    return long(values[None], "increase", **axes)


def accuracy_table(foo: float, bar: float) -> pd.DataFrame:
    """One task, one order: exactly these shares of right answers."""
    right = np.stack([np.arange(N) < round(share * N) for share in (foo, bar)]).astype(float)
    axes = {"task": ["sentiment-number"], "answer": ["foo", "bar"], "layout": ["order"], "prompt": range(N)}
    return long(right[None, :, None], "correct", **axes)


def top_heads_table(deep: float, located: float = 1.0, control: float = 0.1, spread: float = 0.02) -> pd.DataFrame:
    """Two located heads, a deep one with that share of their increases; all heads add 1.2 times what both add."""
    first = noisy(deep, spread)
    parts = []
    for rank, (layer, depth, values) in enumerate(((3, 1.0, first), (0, 0.0, 1 - first)), start=1):
        common = {"rank": rank, "layer": layer, "depth": depth}
        parts.append(
            long(located * values, "increase", prompt=range(N)).assign(kind="located", name=f"a{rank}", **common)
        )
        parts.append(long(noisy(control), "increase", prompt=range(N)).assign(kind="random", name=f"b{rank}", **common))
    everything = long(np.full(N, 1.2 * located), "increase", prompt=range(N))
    return stack(*parts, everything.assign(kind="all", name="", rank=0, layer=-1, depth=np.nan))


def overlap_table(shared: float, spread: float) -> pd.DataFrame:
    values = np.concatenate([[shared], noisy(shared, spread)])
    return pd.DataFrame({"pair": "a / b", "draw": range(N + 1), "shared": values, "chance": 0.1})


def rank_table(located: float, control: float, spread: float = 0.005) -> pd.DataFrame:
    values = np.stack([noisy(located, spread), noisy(control, spread, seed=1)])
    values = np.stack([values, values], axis=-1)
    axes = {"group": ["located", "random"], "name": ["L1H0"], "prompt": range(N), "label": ["true", "false"]}
    return long(values[:, None], "mrr", **axes)


def layout_table(
    layouts: tuple[str, str], means: dict[tuple[str, str, str], float], spread: float = 0.02
) -> pd.DataFrame:
    """Attention by (layout, group, label), 0.1 where nothing is said."""
    parts = []
    for layout in layouts:
        for group in ("located", "random"):
            for label in ("true", "false"):
                values = noisy(means.get((layout, group, label), 0.1), spread, seed=len(parts))
                axes = {"layout": [layout], "group": [group], "name": ["L1H0"], "prompt": range(N), "label": [label]}
                parts.append(long(values[None, None, None, :, None], "attention", **axes))
    return stack(*parts)


def scatter_table(slope: float, noise: float) -> pd.DataFrame:
    random = np.random.default_rng(0)
    attention = random.uniform(size=(N, 2, 2))
    axes = {"prompt": range(N), "name": ["L1H0", "L1H1"], "demo": [2, 3]}
    increase = slope * attention**2 + noise * random.normal(size=attention.shape)
    return long(attention, "attention", **axes).assign(increase=increase.reshape(-1))


def words_table(value: float, key: float, query: float, spread: float = 0.05) -> pd.DataFrame:
    wins = np.stack([noisy(mean, spread) for mean in (value, key, query)], axis=-1)
    axes = {"prompts": ["task"], "name": ["L1H0"], "prompt": range(N), "kind": ["value", "key", "query"]}
    return long(wins[None, None], "wins", **axes)


def neurons_table(located: float, control: float, spread: float = 0.01) -> pd.DataFrame:
    values = np.stack([noisy(located, spread), noisy(control, spread, seed=1)])
    axes = {"kind": ["located", "random"], "neuron": ["L1N3"], "name": ["L1H0"], "prompt": range(N)}
    return long(values[:, None, None], "value", **axes)


def attended(true: float, false: float, far_true: float, far_false: float, spread: float = 0.02) -> pd.DataFrame:
    means = {
        ("order", "located", "true"): true,
        ("order", "located", "false"): false,
        ("reorder", "located", "true"): far_true,
        ("reorder", "located", "false"): far_false,
    }
    return layout_table(("order", "reorder"), means, spread)


def unbalanced(true: float, false: float, spread: float = 0.02) -> pd.DataFrame:
    means = {("order", "located", "true"): 0.4, ("order", "located", "false"): 0.2}
    means |= {("imbalanced", "located", "true"): true, ("imbalanced", "located", "false"): false}
    return layout_table(("order", "imbalanced"), means, spread)


CASES = {
    "layers": (layers, layers_table(0.8), layers_table(0.3), layers_table(0.505, spread=0.2)),
    "accuracy": (accuracy, accuracy_table(0.9, 0.9), accuracy_table(0.4, 0.4), accuracy_table(0.55, 0.6)),
    "top-heads": (top_heads, top_heads_table(0.9), top_heads_table(0.2), top_heads_table(0.505, spread=0.2)),
    "head-overlap": (head_overlap, overlap_table(0.7, 0.05), overlap_table(0.1, 0.05), overlap_table(0.36, 0.1)),
    "label-rank": (label_rank, rank_table(0.5, 0.01), rank_table(0.02, 0.02), rank_table(0.021, 0.01, 0.05)),
    "label-attention": (
        label_attention,
        attended(0.6, 0.1, 0.5, 0.1),
        attended(0.2, 0.2, 0.2, 0.2),
        attended(0.6, 0.1, 0.101, 0.1, spread=0.1),
    ),
    "attention-vs-increase": (
        attention_vs_increase,
        scatter_table(5, 0.1),
        scatter_table(0, 1),
        scatter_table(1, 0.5),
    ),
    "imbalance": (imbalance, unbalanced(0.3, 0.3), unbalanced(0.4, 0.2), unbalanced(0.378, 0.3, spread=0.05)),
    "order": (
        order,
        attended(0.6, 0.1, 0.4, 0.1),
        attended(0.6, 0.1, 0.6, 0.1),
        attended(0.6, 0.1, 0.578, 0.1, spread=0.1),
    ),
    "vocabulary": (
        vocabulary,
        words_table(0.95, 0.9, 0.8),
        words_table(0.95, 0.5, 0.8),
        words_table(0.95, 0.9, 0.605, spread=0.2),
    ),
    "ffn": (ffn, neurons_table(0.1, 0.02), neurons_table(0.02, 0.02), neurons_table(0.031, 0.02, spread=0.1)),
}


@pytest.mark.parametrize("experiment", CASES)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_claim(experiment: str, outcome: str) -> None:
    module, *tables = CASES[experiment]
    verdict = module.claim(tables[OUTCOMES.index(outcome)])
    assert verdict.outcome == outcome, verdict.reason


# The others also draw an example prompt, neurons or both orders; test_experiments_runner.py draws them.
@pytest.mark.parametrize("experiment", sorted({*CASES} - {"layers", "vocabulary", "ffn", "accuracy"}))
def test_figures_of_made_up_tables_are_drawn(experiment: str) -> None:
    module, table, *_ = CASES[experiment]
    assert module.figure(table).axes


def test_one_answer_right_and_the_other_wrong_is_no_classification() -> None:
    """Always saying "foo"."""
    assert accuracy.claim(accuracy_table(1.0, 0.0)).outcome == "not supported"


def test_saying_the_nearest_label_is_no_classification() -> None:
    near = accuracy_table(1.0, 1.0)
    far = accuracy_table(0.0, 0.0).assign(layout="reorder")
    assert accuracy.claim(stack(near, far)).outcome == "not supported"


def test_located_heads_no_better_than_random_ones_are_not_supported() -> None:
    assert top_heads.claim(top_heads_table(0.9, located=1.0, control=0.5)).outcome != "supported"
    assert top_heads.claim(top_heads_table(0.9, located=1.0, control=0.9)).outcome == "not supported"


def test_attention_that_only_follows_the_order_is_not_supported() -> None:
    """True labels get more when they are nearest, and less when they are not: recency, not similarity."""
    assert label_attention.claim(attended(0.6, 0.1, 0.1, 0.6)).outcome == "not supported"


def test_where_attention_never_changes_nothing_rises_with_it() -> None:
    assert attention_vs_increase.rises(np.array([1.0, 2, 3, 4]), np.array([1.0, 4, 9, 16])) == pytest.approx(1)
    assert attention_vs_increase.rises(np.ones(4), np.arange(4.0)) == 0


@pytest.mark.parametrize(("mean", "outcome"), [(0.8, "supported"), (0.2, "not supported"), (0.5, "undecided")])
def test_judge(mean: float, outcome: str) -> None:
    verdict = judge(noisy(mean, 0.1), least=0.5, unit="nats", what="effect")
    assert verdict.outcome == outcome
    assert verdict.effect == pytest.approx(mean)
    assert verdict.low < mean < verdict.high


@pytest.mark.parametrize("values", [[], [1.0], [math.nan, 1.0], [math.nan] * 5])
def test_too_few_values_are_undecided(values: list[float]) -> None:
    assert judge(values, least=0.0, unit="nats", what="effect").outcome == "undecided"


def test_no_effect_measured_exactly_is_not_supported() -> None:
    """An interval of no width below the threshold."""
    assert judge([0.0] * 20, least=0.01, unit="nats", what="effect").outcome == "not supported"
    assert judge([0.0] * 20, least=0.0, unit="nats", what="effect").outcome == "undecided"


def made(outcome: str) -> Verdict:
    return Verdict(outcome, 1.0, 0.9, 1.1, "nats", outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "undecided"], "undecided"),
        (["supported", "undecided", "not supported"], "not supported"),
    ],
)
def test_all_of(parts: list[str], outcome: str) -> None:
    joined = all_of(*map(made, parts))
    assert joined.outcome == outcome
    assert joined.reason == "; ".join(parts)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_gate(outcome: str) -> None:
    able, unable = Competence(0.9, 0.88, 0.92, 0.5), Competence(0.56, 0.54, 0.58, 0.5)
    assert gated(made(outcome), able) == made(outcome)
    assert gated(made(outcome), unable).outcome == "undecided"
    assert "does not do the task" in gated(made(outcome), unable).reason


@pytest.mark.parametrize("name", IDS)
def test_every_experiment_says_what_it_claims(name: str) -> None:
    experiment = find(name)
    assert experiment.id == name
    assert all((experiment.title, experiment.source, experiment.claim, experiment.criterion))
    assert not {"model", "task", "n", "seed", "path", "weights"} & set(vars(experiment.config))
