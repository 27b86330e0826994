"""Finding 8: forms and cosines against plain loops, made-up inputs with known answers, and heads without a metric."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import tiny_study

import icl_lens as il
from experiments.findings import metric as finding
from experiments.framework.estimate import auroc_of_rows, compare_same_heads
from experiments.framework.study import Study
from experiments.framework.tasks import PAPER_TASKS, Task


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
def test_forms_and_cosines_agree_with_loops(load_tiny: Any, tmp_path: Path, family: str) -> None:
    model = load_tiny(family)
    study = tiny_study(model, tmp_path, n=8)
    batch, head = study.held_out, study.located[0]
    found = finding.head_columns(study, batch)
    xs, ys = [], []
    for row in range(len(batch)):
        _, cache = model.run_with_cache(batch.tokens[row : row + 1, : int(batch.last[row]) + 1])
        x = cache[f"blocks.{head.layer}.hook_resid_pre"][0]
        x = x - x.mean(-1, keepdim=True) if family == "gpt2" else x
        x = x / (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()
        xs.append(x[-1])
        ys.append([x[position] for position in batch.label_positions[row]])
    matrix = il.query_key_metric(model, head).matrix
    x_mean, y_mean = torch.stack(xs).mean(0), torch.stack([y for some in ys for y in some]).mean(0)
    for row, prompt in enumerate(batch.prompts):
        same = torch.tensor([one.label == prompt.answer for one in prompt.demonstrations])
        scores: dict[str, list[torch.Tensor]] = {name: [] for name in ("form", "cosine", "raw_form", "raw_cosine")}
        for y in ys[row]:
            for prefix, a, b in (("", xs[row] - x_mean, y - y_mean), ("raw_", xs[row], y)):
                scores[f"{prefix}form"].append(a @ matrix @ b)
                scores[f"{prefix}cosine"].append(a @ b / (a.norm() * b.norm()))
        for name, values in scores.items():
            assert found[name][row, 0] == pytest.approx(il.metrics.auroc(torch.stack(values), same))
        for name in ("form", "cosine"):
            expected = il.metrics.precision_at_1(torch.stack(scores[name])[None], same[None])
            assert found[f"{name}_first"][row, 0] == pytest.approx(expected)


def inputs(noise: float, n: int = 60) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Queries and keys of two classes along the first axis, the rest noise, and a large common part in the second."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(n) % 2
    of_keys = torch.stack([kind, 1 - kind, kind, 1 - kind], dim=1)
    queries, keys = (torch.randn(*shape, 16, generator=generator) * noise for shape in ((n,), (n, 4)))
    queries[:, 0], keys[..., 0] = 2.0 * kind - 1, 2.0 * of_keys - 1
    queries[:, 1] += 20
    return queries, keys, (of_keys == kind[:, None]).numpy()


def form_of(model: Any, queries: list[int], keys: list[int]) -> il.QueryKeyMetric:
    """A form that compares some axes of queries with some of keys."""
    axes = torch.eye(16)
    return replace(il.query_key_metric(model, "L0H0"), query_side=axes[:, queries], key_side=axes[:, keys])


def auroc(scores: torch.Tensor, same: np.ndarray) -> float:
    return float(auroc_of_rows(scores.double().numpy(), same, ~same).mean())


def test_a_learned_form_exceeds_the_cosine_only_where_inputs_hold_more_than_the_class(gpt2: Any) -> None:
    quiet, noisy = inputs(0.1), inputs(2.0)
    learned = form_of(gpt2, [0], [0])
    for queries, keys, same in (quiet, noisy):
        assert auroc(finding.form(learned, *finding.center(queries, keys)), same) == 1
    assert auroc(finding.cosine(*finding.center(*quiet[:2])), quiet[2]) == 1  # a tie at the ceiling
    assert 0.5 < auroc(finding.cosine(*finding.center(*noisy[:2])), noisy[2]) < 0.8
    assert auroc(finding.form(form_of(gpt2, [0], [2]), *finding.center(*noisy[:2])), noisy[2]) == pytest.approx(
        0.5, abs=0.1
    )


def test_centering_removes_what_all_queries_add_to_a_label(gpt2: Any) -> None:
    """Every query has 20 along the second axis, which a form may compare with anything at a label."""
    queries, keys, same = inputs(1.0)
    biased = form_of(gpt2, [0, 1], [0, 5])
    assert auroc(finding.form(biased, queries, keys), same) < 0.7
    assert auroc(finding.form(biased, *finding.center(queries, keys)), same) > 0.75
    moved = finding.center(queries + torch.arange(16), keys - 7)
    torch.testing.assert_close(finding.form(biased, *moved), finding.form(biased, *finding.center(queries, keys)))
    torch.testing.assert_close(finding.cosine(*moved), finding.cosine(*finding.center(queries, keys)))


def test_the_same_numbers_are_a_tie() -> None:
    values = np.random.default_rng(0).random((40, 5))
    found = compare_same_heads(values, values, np.arange(40) // 2, bounds=(0, 1))
    assert found.low < 0 < found.high
    assert found.quantity == pytest.approx(found.control)


@pytest.mark.slow
def test_located_heads_tie_with_the_cosine_and_exceed_rotated_keys(icl_mini: Any) -> None:
    rows = {(row.measure, row.ranking): row for row in finding.measure(Study(icl_mini, PAPER_TASKS[1], 24)).rows}
    for name in ("auroc", "best"):
        assert rows[name, "contrast"].low <= 0 <= rows[name, "contrast"].high
    assert rows["rotated", "contrast"].low > 0


def test_it_does_not_apply_where_labels_name_the_classes(icl_mini: Any) -> None:
    task = Task("animal-country", "animal-country", ("animal", "country"))
    assert finding.FINDING.reason_not_applicable(Study(icl_mini, task, 8))
