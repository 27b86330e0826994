"""Claims of the published version and of the open questions on made-up tables: supported, not supported, undecided."""

import numpy as np
import pandas as pd
import pytest
import torch

import icl_lens as il
from experiments.claims import (
    ablation,
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
from experiments.claims.queries import texts_exchanged

N = 200
OUTCOMES = ["supported", "not supported", "undecided"]


def values(mean: float, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """N values whose mean is exactly `mean`."""
    noise = np.random.default_rng(seed).normal(0, spread, N)
    return mean + noise - noise.mean()


def rows(column: str, **axes) -> pd.DataFrame:
    return pd.DataFrame({"prompt": range(N), column: axes.pop("values")}).assign(**axes)


def ablation_table(located: float, random: float = 0.9, spread: float = 0.02) -> pd.DataFrame:
    parts = {"none": values(0.95), "located": values(located, spread, 1), "random": values(random)}
    return pd.concat(
        rows("vocabulary", values=said, removed=removed, answer=answer, heads="L0H0 L1H1", correct=0.5)
        for removed, said in parts.items()
        for answer in ("foo", "bar")
    )


def label_features_table(foo: float, control: float = 0.0, spread: float = 0.1) -> pd.DataFrame:
    return pd.concat(
        rows("difference", values=sign * values(size, spread, seed), group=group, name="L0H0", label=label).assign(
            follows=(values(size, spread, seed) > 0).astype(float)
        )
        for group, size in (("located", foo), ("random", control))
        for seed, (label, sign) in enumerate((("foo", 1), ("bar", -1)))
    )


def prediction_shift_table(shift: float, spread: float = 0.01) -> pd.DataFrame:
    parts = []
    for group, moved in (("located", shift), ("random", 0.0)):
        for label, sign in (("foo", -1), ("bar", 1)):
            before = values(0.3)
            common = {"group": group, "label": label, "flipped": True}
            parts.append(rows("attention", values=before, input="first", **common))
            after = before + sign * values(moved, spread, len(parts))
            parts.append(rows("attention", values=after, input="exchanged", **common))
    return pd.concat(parts)


def bias_table(after: float, before: float = 1.0, spread: float = 0.1, loss: float = 0.0) -> pd.DataFrame:
    parts = []
    for fixed, bias, accuracy in (("none", before, 0.9), ("random", before, 0.9), ("located", after, 0.9 - loss)):
        frame = rows("favoured", values=values(bias, spread), fixed=fixed, answer="foo", strength=1.0)
        parts.append(frame.assign(against=0.0, accuracy=values(accuracy)))
    return pd.concat(parts)


def two_tower_table(fall: float, idle: float = 0.0, spread: float = 0.1, auroc: float = 0.7) -> pd.DataFrame:
    parts = []
    for i, (measure, (_, _, predicted)) in enumerate(two_tower.SWAPS.items()):
        for group in ("located", "random"):
            mean = (fall if predicted else idle) if group == "located" else 0.0
            parts.append(rows("value", values=values(mean, spread, i), measure=measure, group=group, name=""))
    for group, mean in (("located", auroc), ("random", 0.6)):
        parts.append(rows("value", values=values(mean), measure="auroc", group=group, name="L0H0"))
    return pd.concat(parts)


def head_count_table(kept: float, removed: float = 0.6, spread: float = 0.05) -> pd.DataFrame:
    parts = []
    for count in (0, 2, 8):
        accuracy = {"removed": removed if count else 0.95, "random removed": 0.9, "kept": kept if count else 0.5}
        for i, (edit, mean) in enumerate(accuracy.items()):
            frame = rows("correct", values=values(mean, spread, i), edit=edit, count=count, share=count / 16)
            parts.append(frame.assign(answer="foo"))
    return pd.concat(parts)


def shallow_flow_table(
    shallow: float, deep: float = 0.0, lost: float = 0.1, spread: float = 0.1, tested: bool = True
) -> pd.DataFrame:
    parts = []
    for name, start, middle, fall, gap in (
        ("none", -1, np.nan, 0, 0.3),
        ("0–1", 0, 0.1, shallow, 0.3 - lost),
        ("4–5", 4, 0.9, deep, 0.3),
    ):
        for half, sign in (("choose", 1), ("test", 1 if tested else -1)):
            frame = rows("fall", values=sign * values(fall, spread, start + 1), window=name, start=start, middle=middle)
            parts.append(frame.assign(gap=values(gap), correct=1.0, half=half))
    return pd.concat(parts)


def task_transfer_table(other: float, own: float = 2.0, random: float = 0.1, spread: float = 0.1) -> pd.DataFrame:
    falls = {"none": 0.0, "own": own, "other": other, "random": random}
    return pd.concat(
        rows(
            "odds", values=values(3 - fall, spread, i), removed=removed, answer="foo", located_on="x", shared=1
        ).assign(correct=0.9)
        for i, (removed, fall) in enumerate(falls.items())
    )


def head_atlas_table(induction: float, function: float = 0.5, spread: float = 0.1) -> pd.DataFrame:
    means = {"in-context": 1.0, "induction": induction, "previous": 0.0, "function": function}
    return pd.concat(
        rows(
            "value",
            values=values(mean if located else 0.0, spread, i),
            score=score,
            name=name,
            located=located,
            layer=0,
        )
        for i, (score, mean) in enumerate(means.items())
        for name, located in (("L0H0", True), ("L0H1", False))
    )


CASES = {
    ablation: [ablation_table(0.3), ablation_table(0.85), ablation_table(0.6, spread=1.0)],
    label_features: [label_features_table(1.0), label_features_table(-1.0), label_features_table(0.0675)],
    prediction_shift: [prediction_shift_table(0.1), prediction_shift_table(0.0), prediction_shift_table(0.02, 0.1)],
    majority_bias: [bias_table(0.5), bias_table(1.2), bias_table(1.0)],
    recency_bias: [bias_table(0.5), bias_table(0.5, loss=0.1), bias_table(1.0)],
    two_tower: [two_tower_table(1.0), two_tower_table(-1.0), two_tower_table(1.0, idle=1.0)],
    head_count: [head_count_table(0.93), head_count_table(0.7), head_count_table(0.905, spread=0.5)],
    shallow_flow: [shallow_flow_table(1.0), shallow_flow_table(0.5, deep=1.0), shallow_flow_table(1.0, deep=1.0)],
    task_transfer: [task_transfer_table(1.8), task_transfer_table(0.5), task_transfer_table(1.0)],
    head_atlas: [head_atlas_table(0.5), head_atlas_table(0.5, -0.5), head_atlas_table(0.0)],
}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.split(".")[-1])
def test_all_three_outcomes(module) -> None:
    assert [module.EXPERIMENT.verdict(table).outcome for table in CASES[module]] == OUTCOMES
    assert module.EXPERIMENT.figure(CASES[module][0]).axes


def test_the_effect_of_a_fix_is_the_share_of_the_bias_it_takes_away() -> None:
    verdict = majority_bias.EXPERIMENT.verdict(bias_table(0.7))
    assert verdict.effect == pytest.approx(0.3)
    assert "paper: 22%" in verdict.reason
    assert "paper: 17%" in recency_bias.EXPERIMENT.verdict(bias_table(0.7)).reason
    # A fix that turns the bias round is judged by what is left of it.
    assert recency_bias.EXPERIMENT.verdict(bias_table(-0.4)).effect == pytest.approx(0.6)


def test_no_usable_strength_is_not_a_fix() -> None:
    table = bias_table(1.0).assign(strength=0.0)
    verdict = recency_bias.EXPERIMENT.verdict(table)
    assert verdict.outcome == "not supported"
    assert "no strength tried" in verdict.reason


def test_random_heads_that_cost_as_much_refute_the_ablation() -> None:
    assert ablation.EXPERIMENT.verdict(ablation_table(0.1, random=0.7)).outcome == "not supported"


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
    edges = shallow_flow.label_to_text(batch)
    #  0 the, 1 cat, 2 :, 3 foo, 4 dog, 5 :, 6 bar
    assert {tuple(edge) for edge in edges[0].nonzero().tolist()} == {(2, 0), (2, 1), (3, 0), (3, 1), (5, 4), (6, 4)}
    assert {tuple(edge) for edge in edges[1].nonzero().tolist()} == {(1, 0), (2, 0)}


def test_labels_shuffled_say_nothing_about_the_class() -> None:
    prompt = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
    shown = [d.label for d in head_atlas._labels_shuffled(prompt, 0).demonstrations]
    assert sorted(shown[:2]) == sorted(shown[2:]) == ["bar", "foo"]


def test_separation_of_true_from_false_labels(gpt2) -> None:
    batch = il.tokenize(gpt2, [il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")])
    acts = il.capture(gpt2, batch)
    pattern = torch.zeros_like(acts.pattern)
    pattern[0, 0, 0, batch.label_positions[0]] = torch.tensor([0.1, 0.3, 0.2, 0.4])  # 3 of 4 pairs in order
    acts.pattern.copy_(pattern)
    found = two_tower.Separation((il.Head(0, 0), il.Head(1, 1)))(acts)
    assert found.tolist() == [[0.75, 0.5]]
