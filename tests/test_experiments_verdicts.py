"""Every claim on made-up tables: supported, not supported, undecided; and the gate for incapable models."""

import math

import numpy as np
import pandas as pd
import pytest
import test_experiments_published as published

from experiments.catalogue import IDS, find
from experiments.claims import (
    accuracy,
    attention_vs_increase,
    best_head,
    causal_location,
    common_heads,
    ffn,
    head_overlap,
    imbalance,
    label_attention,
    label_rank,
    layers,
    neighbours,
    order,
    top_heads,
    vocabulary,
)
from experiments.lab.competence import Competence, gated
from experiments.lab.frames import long, stack
from experiments.lab.verdict import Verdict, adjusted, all_of, any_of, judge
from icl_lens.errors import InputError

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
        common = {"layer": layer, "depth": depth}
        own = long(located * values, "increase", prompt=range(N)).assign(group="located", name=f"a{rank}", rank=rank)
        other = long(noisy(control), "increase", prompt=range(N)).assign(group="random", name=f"b{rank}", rank=0)
        parts += [own.assign(**common), other.assign(**common)]
    everything = long(np.full(N, 1.2 * located), "increase", prompt=range(N))
    return stack(*parts, everything.assign(group="all", name="", rank=0, layer=-1, depth=np.nan))


def overlap_table(shared: float, spread: float, layers: float = 0.2) -> pd.DataFrame:
    values = np.concatenate([[shared], noisy(shared, spread)])
    columns = {"pair": "a / b", "draw": range(N + 1), "shared": values, "chance": 0.1, "layers": layers, "clusters": 50}
    return stack(*(pd.DataFrame(columns).assign(cases=cases) for cases in ("all", "correct")))


def heads(**values: np.ndarray) -> pd.DataFrame:
    """A column for each keyword [group prompt …]: a located head and one of the same layer, by prompt."""
    parts = []
    for i, (group, name) in enumerate((("located", "L1H0"), ("random", "L1H1"))):
        columns = {column: array[i].reshape(N, -1).mean(1) for column, array in values.items()}
        parts.append(pd.DataFrame({"prompt": range(N), **columns}).assign(group=group, layer=1, name=name))
    return stack(*parts)


def rank_table(located: float, control: float, spread: float = 0.005) -> pd.DataFrame:
    """Mean log2 ranks."""
    bits = np.stack([noisy(located, spread), noisy(control, spread, seed=1)])
    table = heads(bits=bits, mrr=2.0**-bits)
    return stack(*(table.assign(label=label) for label in ("true", "false")))


def layout_table(
    layouts: tuple[str, str], means: dict[tuple[str, str, str], float], spread: float = 0.02, even: float = 0.1
) -> pd.DataFrame:
    """Attention by (layout, group, label), 0.1 where nothing is said."""
    parts = []
    for layout in layouts:
        for label in ("true", "false"):
            found = [
                noisy(means.get((layout, group, label), 0.1), spread, seed=len(parts) + i)
                for i, group in enumerate(("located", "random"))
            ]
            parts.append(heads(attention=np.stack(found)).assign(layout=layout, label=label, even=even))
    return stack(*parts)


def scatter_table(slope: float, noise: float, other: float = 3.0) -> pd.DataFrame:
    """Two located heads, and one of the same layer with this much noise."""
    random = np.random.default_rng(0)
    parts = []
    for group, name, much in (("located", "L1H0", noise), ("located", "L1H1", noise), ("random", "L1H2", other)):
        attention = random.uniform(size=(N, 2))
        increase = slope * attention**2 + much * random.normal(size=attention.shape)
        part = long(attention, "attention", prompt=range(N), demo=[2, 3]).assign(increase=increase.reshape(-1))
        parts.append(part.assign(group=group, layer=1, name=name, answer="foo"))
    return stack(*parts)


def words_table(value: float, key: float, query: float, spread: float = 0.05) -> pd.DataFrame:
    wins = np.stack([noisy(mean, spread) for mean in (value, key, query)], axis=-1)
    axes = {"prompts": ["task"], "name": ["L1H0"], "prompt": range(N), "kind": ["value", "key", "query"]}
    return long(wins[None, None], "wins", **axes)


def neurons_table(located: float, control: float, spread: float = 0.01, any_neuron: float = 0.0) -> pd.DataFrame:
    """Share driven of the best neurons by located and other heads; `any_neuron`: of random ones, by located heads."""
    best = heads(value=np.stack([noisy(located, spread), noisy(control, spread, seed=1)])).assign(kind="best")
    other = heads(value=np.stack([noisy(any_neuron), noisy(0, seed=1)])).assign(kind="random")
    return stack(best, other)


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


def common_table(moved: float, ranks: float = 1.0, spread: float = 0.02) -> pd.DataFrame:
    """Attention on true labels falls by so much of 0.6, and that on false ones rises, in either layout; log2 ranks."""
    layouts = ("order", "imbalanced", "reorder")
    means = {("order", "located", "true"): 0.6, ("order", "located", "false"): 0.1}
    for layout in layouts[1:]:
        means |= {(layout, "located", "true"): 0.6 - moved, (layout, "located", "false"): 0.1 + moved}
    attention = stack(layout_table(layouts[:2], means, spread), layout_table(layouts[2:], means, spread))
    table = stack(attention.assign(measure="attention"), rank_table(ranks, 5).assign(measure="rank"))
    return table.assign(tasks=4, on=4)


def best_table(true: float, ranks: float = 1.0, spread: float = 0.02) -> pd.DataFrame:
    """The best head's attention on true labels, 0.1 on false ones; log2 ranks, and 5 in the other head of the layer."""
    attention = attended(true, 0.1, true, 0.1, spread).assign(measure="attention")
    removal = long(np.full((4, 2, N), 0.5), "odds", case=range(4), answer=["foo", "bar"], prompt=range(N))
    cases = [("none", ""), ("located", "removed"), ("second", "removed"), ("located", "kept")]
    removal = removal.assign(
        group=[cases[case][0] for case in removal["case"]],
        edit=[cases[case][1] for case in removal["case"]],
        measure="removal",
        correct=0.5,
        layer=1,
        name="L1H0",
    )
    return stack(attention, rank_table(ranks, 5).assign(measure="rank"), removal)


def neighbours_table(own: float, adjacent: float, far: float, spread: float = 0.02) -> pd.DataFrame:
    """Changes of scores by the own text, the one before and the one before that; alike for labels and the query."""
    parts = []
    for i, what in enumerate(("label", "query")):
        found = [
            np.stack([noisy(mean, spread, 9 * i + 3 * j + k) for k in range(2)])
            for j, mean in enumerate((own, adjacent, far))
        ]
        parts.append(heads(own=found[0], adjacent=found[1], far=found[2]).assign(what=what))
    return stack(*parts)


def causal_table(vocabulary: float, shared: float, layers: float = 0.2, spread: float = 0.05) -> pd.DataFrame:
    """Ablation's table, and how many heads are located both ways."""
    values = np.concatenate([[shared], noisy(shared, spread)])
    overlap = pd.DataFrame({"draw": range(N + 1), "shared": values, "layers": layers, "clusters": 50, "spearman": 0.5})
    removal = published.ablation_table(vocabulary).assign(measure="removal").drop(columns="query")
    return stack(removal, overlap.assign(measure="overlap", prompt=-1))


CASES = {
    "best-head": (best_head, best_table(0.6), best_table(0.1), best_table(0.21, spread=0.3)),
    "neighbours": (
        neighbours,
        neighbours_table(0.8, 0.2, 0.05),
        neighbours_table(0.5, 0.5, 0.4),
        neighbours_table(0.8, 0.2, 0.19, spread=0.2),
    ),
    "causal-location": (
        causal_location,
        causal_table(0.2, 0.9),
        causal_table(0.2, 0.2),
        causal_table(0.2, 0.46, spread=0.1),
    ),
    "common-heads": (common_heads, common_table(0.2), common_table(0.0), common_table(0.07, spread=0.1)),
    "layers": (layers, layers_table(0.95), layers_table(0.3), layers_table(0.9, spread=0.05)),
    "accuracy": (accuracy, accuracy_table(0.9, 0.9), accuracy_table(0.4, 0.4), accuracy_table(0.55, 0.6)),
    "top-heads": (top_heads, top_heads_table(0.95), top_heads_table(0.2), top_heads_table(0.9, spread=0.05)),
    "head-overlap": (head_overlap, overlap_table(0.7, 0.05), overlap_table(0.1, 0.05), overlap_table(0.36, 0.1)),
    "label-rank": (label_rank, rank_table(1, 5), rank_table(3, 3), rank_table(3, 4, 1.0)),
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
    "imbalance": (imbalance, unbalanced(0.3, 0.3), unbalanced(0.42, 0.18), unbalanced(0.399, 0.3, spread=0.05)),
    "order": (
        order,
        attended(0.6, 0.1, 0.4, 0.1),
        attended(0.6, 0.1, 0.6, 0.1),
        attended(0.6, 0.1, 0.53, 0.1, spread=0.1),
    ),
    "vocabulary": (
        vocabulary,
        words_table(0.95, 0.9, 0.8),
        words_table(0.95, 0.5, 0.8),
        words_table(0.95, 0.9, 0.605, spread=0.2),
    ),
    "ffn": (ffn, neurons_table(0.1, 0.02), neurons_table(0.02, 0.02), neurons_table(0.031, 0.02, spread=0.1)),
}


def asked(table: pd.DataFrame) -> pd.DataFrame:
    """Four prompts ask about each word."""
    return table.assign(query=table["prompt"] % 50) if "prompt" in table else table


@pytest.mark.parametrize("experiment", CASES)
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_claim(experiment: str, outcome: str) -> None:
    module, *tables = CASES[experiment]
    verdict = module.claim(asked(tables[OUTCOMES.index(outcome)]))
    assert verdict.outcome == outcome, verdict.reason
    assert (verdict.p < 0.05) == (outcome != "undecided")


@pytest.mark.parametrize("experiment", sorted({*CASES} - {"head-overlap"}))
def test_a_table_that_does_not_say_what_was_asked_is_refused(experiment: str) -> None:
    module, table, *_ = CASES[experiment]
    with pytest.raises(InputError, match="share a query"):
        module.claim(table)


# The others also draw an example prompt, neurons or both orders; test_experiments_runner.py draws them.
@pytest.mark.parametrize("experiment", sorted({*CASES} - {"layers", "vocabulary", "ffn", "accuracy"}))
def test_figures_of_made_up_tables_are_drawn(experiment: str) -> None:
    module, table, *_ = CASES[experiment]
    assert module.figure(asked(table)).axes


def test_one_answer_right_and_the_other_wrong_is_no_classification() -> None:
    """Always saying "foo"."""
    assert accuracy.claim(asked(accuracy_table(1.0, 0.0))).outcome == "not supported"


def test_saying_the_nearest_label_is_no_classification() -> None:
    near = accuracy_table(1.0, 1.0)
    far = accuracy_table(0.0, 0.0).assign(layout="reorder")
    assert accuracy.claim(asked(stack(near, far))).outcome == "not supported"


def test_located_heads_no_better_than_random_ones_are_not_supported() -> None:
    assert top_heads.claim(asked(top_heads_table(0.95, located=1.0, control=0.5))).outcome != "supported"
    assert top_heads.claim(asked(top_heads_table(0.95, located=1.0, control=0.9))).outcome == "not supported"


def test_attention_that_only_follows_the_order_is_not_supported() -> None:
    """True labels get more when they are nearest, and less when they are not: recency, not similarity."""
    assert label_attention.claim(asked(attended(0.6, 0.1, 0.1, 0.6))).outcome == "not supported"


def test_where_attention_never_changes_nothing_rises_with_it() -> None:
    once = np.ones((1, 4))
    assert attention_vs_increase.rises(np.array([1.0, 2, 3, 4]), np.array([1.0, 4, 9, 16]), once) == pytest.approx(1)
    assert attention_vs_increase.rises(np.ones(4), np.arange(4.0), once) == 0


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
    """An interval of no width below the threshold; as sure as there are prompts."""
    judged = judge([0.0] * 20, least=0.01, unit="nats", what="effect")
    assert (judged.outcome, judged.p) == ("not supported", pytest.approx(2**-19))
    assert judge([0.0] * 20, least=0.0, unit="nats", what="effect").outcome == "undecided"
    assert judge([0.0] * 3, least=0.01, unit="nats", what="effect").outcome == "undecided"


def made(outcome: str, p: float = 0.001, effect: float = 1.0) -> Verdict:
    return Verdict(outcome, effect, 0.9, 1.1, "nats", f"{outcome} {effect:g}", p)  # type: ignore[arg-type]


YES, NO, OPEN = ("supported", 0.001), ("not supported", 0.001), ("undecided", 0.3)


@pytest.mark.parametrize(
    ("parts", "outcome", "p", "decides"),
    [
        ([YES, ("supported", 0.04)], "supported", 0.04, 1),  # as sure as the least sure one, whose effect it shows
        ([YES, OPEN], "undecided", 0.3, 1),
        ([YES, OPEN, NO], "not supported", 0.003, 2),  # three chances to fail
        ([YES, YES, ("not supported", 0.03)], "undecided", 0.09, 2),  # allowed for, it is no failure
    ],
)
def test_all_of(parts: list[tuple[str, float]], outcome: str, p: float, decides: int) -> None:
    joined = all_of(*(made(*part, effect=float(i)) for i, part in enumerate(parts)))
    assert (joined.outcome, joined.p, joined.effect) == (outcome, pytest.approx(p), decides)
    assert joined.reason.startswith(f"{parts[decides][0]} {decides}")
    assert joined.reason.count(";") == len(parts) - 1


@pytest.mark.parametrize(
    ("parts", "outcome", "p", "decides"),
    [
        ([NO, YES], "supported", 0.002, 1),
        ([NO, ("not supported", 0.04)], "not supported", 0.04, 1),
        ([NO, OPEN], "undecided", 0.3, 1),
        ([NO, ("supported", 0.03)], "undecided", 0.06, 1),
    ],
)
def test_any_of(parts: list[tuple[str, float]], outcome: str, p: float, decides: int) -> None:
    joined = any_of(*(made(*part, effect=float(i)) for i, part in enumerate(parts)))
    assert (joined.outcome, joined.p, joined.effect) == (outcome, pytest.approx(p), decides)


def test_many_verdicts_are_allowed_for() -> None:
    """By hand: 0.001 · 3, 0.02 · 2, 0.03 · 1; the last takes over the one before."""
    left = adjusted([made("supported", 0.02), made("not supported", 0.001), made("supported", 0.03)])
    assert left == [
        ("supported", pytest.approx(0.04)),
        ("not supported", pytest.approx(0.003)),
        ("supported", pytest.approx(0.04)),
    ]
    assert adjusted([made("supported", 0.03), made("supported", 0.04)])[0] == ("undecided", pytest.approx(0.06))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_gate(outcome: str) -> None:
    able, unable = Competence(0.9, 0.88, 0.92, 0.5), Competence(0.56, 0.54, 0.58, 0.5)
    assert gated(made(outcome), able) == made(outcome)
    assert gated(made(outcome), unable).outcome == "undecided"
    assert gated(made(outcome), unable).p == 1
    assert "does not do the task" in gated(made(outcome), unable).reason


@pytest.mark.parametrize("name", IDS)
def test_every_experiment_says_what_it_claims(name: str) -> None:
    experiment = find(name)
    assert experiment.id == name
    assert all((experiment.title, experiment.source, experiment.claim, experiment.criterion, experiment.about))
    assert not {"model", "task", "n", "seed", "path", "weights"} & set(vars(experiment.config))
