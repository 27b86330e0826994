"""Finding 8: forms and cosines against plain loops, and models with known answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_study import tiny_study

import icl_lens as il
from experiments.findings import metric as finding
from experiments.framework.estimate import compare_same_heads
from experiments.framework.study import Study
from experiments.framework.tasks import PAPER_TASKS, Task


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
def test_forms_and_cosines_agree_with_loops(load_tiny: Any, tmp_path: Path, family: str) -> None:
    model = load_tiny(family)
    study = tiny_study(model, tmp_path, n=24)
    study.n_heads = 6
    batch = study.held_out
    found = finding.head_columns(study, batch)
    columns = [(column, head) for column, head in enumerate(study.located) if head.layer]
    for column, head in columns:  # in the first layer, every prompt has the same input at its last position
        matrix = il.query_key_metric(model, head).matrix
        xs, ys = [], []
        for row in range(len(batch)):
            _, cache = model.run_with_cache(batch.tokens[row : row + 1, : int(batch.last[row]) + 1])
            x = cache[f"blocks.{head.layer}.hook_resid_pre"][0]
            x = x - x.mean(-1, keepdim=True) if family == "gpt2" else x
            x = x / (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()
            xs.append(x[-1])
            ys.append([x[position] for position in batch.label_positions[row]])
        x_mean, y_mean = torch.stack(xs).mean(0), torch.stack([y for some in ys for y in some]).mean(0)
        for row, prompt in enumerate(batch.prompts):
            same = torch.tensor([one.label == prompt.answer for one in prompt.demonstrations])
            scores: dict[str, list[torch.Tensor]] = {name: [] for name in ("form", "cosine", "raw_form", "raw_cosine")}
            for y in ys[row]:
                for prefix, a, b in (("", xs[row] - x_mean, y - y_mean), ("raw_", xs[row], y)):
                    scores[f"{prefix}form"].append(a @ matrix @ b)
                    scores[f"{prefix}cosine"].append(a @ b / (a.norm() * b.norm()))
            for name, values in scores.items():
                assert found[name][row, column] == pytest.approx(il.metrics.auroc(torch.stack(values), same)), name
            for name in ("form", "cosine"):
                expected = il.metrics.precision_at_1(torch.stack(scores[name])[None], same[None])
                assert found[f"{name}_first"][row, column] == pytest.approx(expected)


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
