"""Claims of the published version and of the open questions on made-up tables: supported, not supported, undecided."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import icl_lens as il
from experiments.claims import (
    ablation,
    blocked,
    head_atlas,
    head_count,
    label_features,
    majority_bias,
    prediction_shift,
    recency_bias,
    shallow_flow,
    task_transfer,
    two_tower,
)
from experiments.claims.queries import labels_shuffled, texts_exchanged
from experiments.lab.drawing import name_dots

N = 200
OUTCOMES = ["supported", "not supported", "undecided"]


def values(mean: float, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """N values whose mean is exactly `mean`."""
    noise = np.random.default_rng(seed).normal(0, spread, N)
    return mean + noise - noise.mean()


def rows(column: str, **axes) -> pd.DataFrame:
    """N prompts, four about each word."""
    base = {"prompt": range(N), "query": np.arange(N) % 50, column: axes.pop("values")}
    return pd.DataFrame(base).assign(**axes)


def ablation_table(
    located: float, random: float = 0.9, spread: float = 0.02, labels: float = 0.5, odds: float = 0.0
) -> pd.DataFrame:
    """Accuracy over the vocabulary; `labels`, `odds`: between labels without located heads (with all: 0.95, 5 nats)."""
    cases = {("none", ""): (0.95, 0.95, 5.0)}
    for mode in ("zero", "mean"):
        cases |= {("located", mode): (located, labels, odds), ("random", mode): (random, 0.94, 4.9)}
    parts = []
    for (group, mode), (whole, correct, log_odds) in cases.items():
        for name in ("set 0", "set 1") if group == "random" else (group,):
            said = values(whole, spread if group == "located" else 0.02, len(parts))
            frame = rows("vocabulary", values=said, group=group, mode=mode, name=name, layer=-1)
            parts.append(
                frame.assign(correct=values(correct, 0.02, len(parts)), odds=values(log_odds, 0.1, len(parts)))
            )
    both = [frame.assign(answer=answer, heads="L0H0 L1H1", share=0.04) for frame in parts for answer in ("foo", "bar")]
    return pd.concat(both)


def label_features_table(foo: float, control: float = 0.0, spread: float = 0.1) -> pd.DataFrame:
    return pd.concat(
        rows(
            "difference", values=sign * values(size, spread, seed), group=group, name=group, layer=0, label=label
        ).assign(follows=(values(size, spread, seed) > 0).astype(float))
        for group, size in (("located", foo), ("random", control))
        for seed, (label, sign) in enumerate((("foo", 1), ("bar", -1)))
    )


def prediction_shift_table(shift: float, spread: float = 0.01, before: float = 0.3, other: float = 0.0) -> pd.DataFrame:
    """Attention on foo and on bar, `before` and after an input that flips the prediction; `other` heads' shift."""
    parts = []
    for group, moved in (("located", shift), ("random", other)):
        for label, sign in (("foo", -1), ("bar", 1)):
            first = values(before, 0.05 * before)
            common = {"group": group, "label": label, "flipped": True, "name": group, "layer": 0}
            parts.append(rows("attention", values=first, input="first", **common))
            after = first + sign * values(moved, spread, len(parts))
            parts.append(rows("attention", values=after, input="exchanged", **common))
    return pd.concat(parts)


def bias_table(
    after: float,
    before: float = 1.0,
    spread: float = 0.1,
    loss: float = 0.0,
    discriminates: tuple[float, float] = (4.0, 4.0),
    random: float | None = None,
    other_loss: float = 0.0,
) -> pd.DataFrame:
    """Tilts between layouts before and after; accuracy lost where the true class (`loss`) or the other is asked."""
    parts = []
    groups = {
        ("none", ""): (before, discriminates[0], 0.0, 0.0),
        ("located", "located"): (after, discriminates[1], loss, other_loss),
        **{
            ("random", f"set {i}"): (before if random is None else random, discriminates[0], 0.0, 0.0) for i in range(3)
        },
    }
    for (group, name), (bias, tells, lost, other) in groups.items():
        for layout, tilt in (("favoured", bias), ("against", 0.0)):
            for asked, sign, less in (("true", 1, lost), ("false", -1, other)):
                odds = values(tilt, spread, len(parts)) + sign * tells
                frame = rows("odds", values=odds, group=group, name=name, layer=-1, layout=layout, asked=asked)
                correct = values(0.9 - less, 0.02, len(parts))
                parts.append(frame.assign(answer="foo", strength=float(group != "none"), chosen=True, correct=correct))
    return pd.concat(parts).assign(other=lambda table: table["prompt"] % 40)


def two_tower_table(
    fall: float, idle: float = 0.0, spread: float = 0.1, auroc: float = 0.7, other: float = 0.6
) -> pd.DataFrame:
    parts = []
    for i, (measure, (_, _, predicted)) in enumerate(two_tower.SWAPS.items()):
        for group, name in (("located", "located"), ("random", "set 0"), ("random", "set 1")):
            mean = (fall if predicted else idle) if group == "located" else 0.0
            common = {"measure": measure, "group": group, "name": name, "layer": -1}
            parts.append(rows("value", values=values(mean, spread, i), **common))
    for group, mean in (("located", auroc), ("random", other)):
        shown = {"measure": "auroc", "group": group, "name": group, "layer": 0}
        parts.append(rows("value", values=values(mean, 0.05, len(parts)), **shown))
    return pd.concat(parts).assign(mass=0.4)


def head_count_table(
    kept: float, removed: float = 0.6, spread: float = 0.05, random_kept: float = 0.6, random_removed: float = 0.9
) -> pd.DataFrame:
    """2 and 8 of 16 heads."""
    parts = []
    for count in (0, 2, 8):
        accuracy = {
            ("removed", "located"): removed if count else 0.95,
            ("removed", "random"): random_removed if count else 0.95,
            ("kept", "located"): kept if count else 0.5,
            ("kept", "random"): random_kept if count else 0.5,
        }
        for i, ((edit, group), mean) in enumerate(accuracy.items()):
            for name in ("located",) if group == "located" else ("set 0", "set 1"):
                common = {"edit": edit, "group": group, "name": name, "layer": -1, "count": count, "share": count / 16}
                parts.append(rows("correct", values=values(mean, spread, i), **common).assign(answer="foo"))
    return pd.concat(parts)


def shallow_flow_table(
    shallow: float, deep: float = 0.0, lost: float = 0.1, spread: float = 0.1, tested: bool = True, random: float = 0.0
) -> pd.DataFrame:
    """`random`: fall with as many random edges blocked in the shallow window."""
    parts = []
    for name, edges, start, is_deep, fall, gap in (
        ("none", "own", -1, False, 0, 0.3),
        ("0–1", "own", 0, False, shallow, 0.3 - lost),
        ("0–1", "random", 0, False, random, 0.3),
        ("4–5", "own", 4, True, deep, 0.3),
        ("4–5", "random", 4, True, 0.0, 0.3),
    ):
        for half, sign in (("choose", 1), ("test", 1 if tested else -1)):
            common = {"window": name, "edges": edges, "start": start, "deep": is_deep, "half": half}
            frame = rows("fall", values=sign * values(fall, spread, start + 1), **common)
            parts.append(frame.assign(gap=values(gap), correct=1.0))
    return pd.concat(parts)


def task_transfer_table(
    other: float, own: float = 2.0, random: float = 0.1, spread: float = 0.1, apart: int = 3
) -> pd.DataFrame:
    falls = {("none", ""): 0.0, ("own", "own"): own, ("other", "other"): other}
    falls |= {("random", f"set {i}"): random for i in range(3)}
    return pd.concat(
        rows("odds", values=values(3 - fall, spread, i), group=group, name=name, answer="foo", layer=-1).assign(
            correct=0.9, located_on="x", shared=1, apart=apart
        )
        for i, ((group, name), fall) in enumerate(falls.items())
        if apart or group == "none"
    )


def head_atlas_table(induction: float, function: float = 0.5, spread: float = 0.1) -> pd.DataFrame:
    means = {"in-context": 1.0, "induction": induction, "previous": 0.0, "function": function}
    return pd.concat(
        rows(
            "value",
            values=values(mean if group == "located" else 0.0, spread, i),
            score=score,
            name=name,
            group=group,
            layer=0,
        )
        for i, (score, mean) in enumerate(means.items())
        for name, group in (("L0H0", "located"), ("L0H1", "random"))
    )


CASES = {
    ablation: [ablation_table(0.3), ablation_table(0.85), ablation_table(0.6, spread=1.0)],
    label_features: [label_features_table(1.0), label_features_table(-1.0), label_features_table(0.0675)],
    prediction_shift: [prediction_shift_table(0.1), prediction_shift_table(0.0), prediction_shift_table(0.06, 0.1)],
    majority_bias: [bias_table(0.5), bias_table(1.2), bias_table(0.9)],
    recency_bias: [bias_table(0.5), bias_table(0.5, loss=0.1), bias_table(0.9)],
    two_tower: [two_tower_table(1.0), two_tower_table(-1.0), two_tower_table(1.0, idle=1.0)],
    head_count: [head_count_table(0.93), head_count_table(0.7), head_count_table(0.905, spread=0.5)],
    shallow_flow: [shallow_flow_table(1.0), shallow_flow_table(0.5, deep=1.0), shallow_flow_table(1.0, deep=1.0)],
    task_transfer: [task_transfer_table(1.8), task_transfer_table(0.5), task_transfer_table(1.0)],
    head_atlas: [head_atlas_table(0.7), head_atlas_table(0.7, -0.5), head_atlas_table(0.7, 0.0)],
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.split(".")[-1])
def test_all_three_outcomes(module) -> None:
    assert [module.EXPERIMENT.verdict(table).outcome for table in CASES[module]] == OUTCOMES
    assert module.EXPERIMENT.figure(CASES[module][0]).axes


def test_the_effect_of_a_fix_is_the_share_of_the_bias_it_takes_away() -> None:
    verdict = majority_bias.EXPERIMENT.verdict(bias_table(0.7))
    assert "reduction (paper: 22%; random sets -0%) is 0.3 of the bias" in verdict.reason
    assert "paper: 17%" in recency_bias.EXPERIMENT.verdict(bias_table(0.7)).reason
    # A fix that turns the bias round is judged by what is left of it.
    assert "is 0.6 of the bias" in recency_bias.EXPERIMENT.verdict(bias_table(-0.4)).reason


def test_random_heads_that_cost_as_much_refute_the_ablation() -> None:
    assert ablation.EXPERIMENT.verdict(ablation_table(0.0, random=0.5)).outcome == "not supported"
    # What is no collapse may be more than nothing: in small models as many heads are many of all.
    assert ablation.EXPERIMENT.verdict(ablation_table(0.1, random=0.79)).outcome == "supported"


def test_heads_without_induction_say_nothing_of_induction_heads() -> None:
    """The best located head attends to what followed more than the others, and still is none."""
    verdict = head_atlas.EXPERIMENT.verdict(head_atlas_table(0.4))
    assert verdict.outcome == "undecided"
    assert "no head is an induction head: the best, L0H0, scores 0.4" in verdict.reason


def test_windows_are_judged_on_the_other_half() -> None:
    assert shallow_flow.EXPERIMENT.verdict(shallow_flow_table(1.0, tested=False)).outcome == "not supported"


def test_two_towers_need_queries_and_keys_that_tell_classes_apart() -> None:
    assert two_tower.EXPERIMENT.verdict(two_tower_table(1.0, auroc=0.3)).outcome == "not supported"
    assert two_tower.EXPERIMENT.verdict(two_tower_table(1.0, auroc=0.55)).outcome == "not supported"


def test_texts_are_exchanged_between_labels_that_stay() -> None:
    prompt = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
    other = texts_exchanged(prompt)
    assert str(other) == "eight : bar two : bar love : foo like : foo one :"
    assert other.answer == "bar"


def test_edges_from_labels_to_their_own_texts_only(gpt2) -> None:
    batch = il.tokenize(gpt2, [il.Prompt.parse("the cat : foo dog : bar one :"), il.Prompt.parse("love : foo two :")])
    edges = blocked.label_to_text(batch)
    #  0 the, 1 cat, 2 :, 3 foo, 4 dog, 5 :, 6 bar
    assert {tuple(edge) for edge in edges[0].nonzero().tolist()} == {(2, 0), (2, 1), (3, 0), (3, 1), (5, 4), (6, 4)}
    assert {tuple(edge) for edge in edges[1].nonzero().tolist()} == {(1, 0), (2, 0)}


def test_labels_shuffled_say_nothing_about_the_class() -> None:
    prompt = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
    shown = [d.label for d in labels_shuffled(prompt, 0).demonstrations]
    assert sorted(shown[:2]) == sorted(shown[2:]) == ["bar", "foo"]


def test_separation_of_true_from_false_labels(gpt2) -> None:
    batch = il.tokenize(gpt2, [il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")])
    acts = il.capture(gpt2, batch)
    pattern = torch.zeros_like(acts.pattern)
    pattern[0, 0, 0, batch.label_positions[0]] = torch.tensor([0.1, 0.3, 0.2, 0.4])  # 3 of 4 pairs in order
    acts.pattern.copy_(pattern)
    found = two_tower.Separation((il.Head(0, 0), il.Head(1, 1)))(acts)
    assert found[..., 0].tolist() == [[0.75, 0.5]]
    assert found[0, 0, 1] == pytest.approx(1.0)


def test_names_of_dots_that_lie_together_stand_apart() -> None:
    drawn = Figure(layout="constrained")
    ax = drawn.subplots()
    dots = {"L0H0": (0.5, 0.5), "L0H1": (0.5, 0.5), "L1H0": (0.51, 0.5), "L3H3": (1.0, 1.0)}
    ax.plot(*zip(*dots.values(), strict=True), "o")
    name_dots(drawn, ax, dots, ["L1H0", "L0H1", "L0H0"])
    drawn.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert [text.get_text() for text in ax.texts] == ["L1H0", "L0H1", "L0H0"]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_axes_say_what_heads_add_to() -> None:
    """By contrast heads add to log-odds, by increase to log-probability."""
    for by, said in (("increase", "log-probability"), ("contrast", "log-odds")):
        drawn = head_atlas.EXPERIMENT.figure(head_atlas_table(0.5).assign(by=by))
        assert all(said in ax.get_xlabel() for ax in drawn.axes)
