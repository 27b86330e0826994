"""Function and task vectors in place of demonstrations: what they add to the answer, beside their
controls.

`python experiments/vectors.py --model smollm2-135m` measures the table in docs/howto/vectors.md.
Pairs are split in two: heads, means and
layers come from one part, gains from the other. Rows are stored task by task.

1. Heads are those with the largest indirect effects, averaged over prompts with shuffled labels and
   over the tasks.
2. The function vector is the sum of their mean outputs on clean prompts of a task. It is added to
   the residual stream after the layer that gains most on zero-shot prompts of the first part.
3. Controls: random vectors of the same norm, the same heads' outputs on prompts with shuffled
   labels, and what each vector adds to the answers of the other queries.

Source: Todd et al., "Function vectors in large language models", arXiv 2310.15213.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from location import best_heads
from markdown_table import table as markdown_table
from torch import Tensor

import icl_lens as il

ROWS = Path(__file__).with_suffix(".jsonl")
ARROWS = il.Template("{text} -> {label}", "{text} ->", "\n")
TASKS = ("antonyms", "country-capital", "present-past")
N_TRAIN = 30
"""Pairs of a task from which heads, means and layers are taken."""
SHOTS = 10
N_CLEAN, N_SHUFFLED = 50, 25
"""Prompts for means, half as many as published, and prompts with shuffled labels for indirect
effects, as published."""
N_HEADS = 10
"""As published for GPT-J."""
N_RANDOM = 10
PASS_PROMPTS = 20


@dataclass(frozen=True)
class Drawn:
    """The prompts of a task; those of the test have queries and pairs of their own."""

    clean: list[il.Prompt]
    shuffled: list[il.Prompt]
    more_shuffled: list[il.Prompt]
    """As many as `clean`, for means."""
    asked: list[il.Prompt]
    """The pairs of the first part, without demonstrations, by which the layer is chosen."""
    test: list[il.Prompt]
    """The pairs of the second part, without demonstrations."""
    test_shown: list[il.Prompt]
    """Queries of the second part after demonstrations of the second part."""


def draw(task: str) -> Drawn:
    """Return the prompts of a task, the same in every run."""
    pairs = il.PairTask(task).pairs()
    random.Random(0).shuffle(pairs)
    train, test = pairs[:N_TRAIN], pairs[N_TRAIN:]
    return Drawn(
        clean=_prompts(train, N_CLEAN, 0),
        shuffled=[
            shuffled(prompt, seed) for seed, prompt in enumerate(_prompts(train, N_SHUFFLED, 1))
        ],
        more_shuffled=[
            shuffled(prompt, seed) for seed, prompt in enumerate(_prompts(train, N_CLEAN, 2))
        ],
        asked=[il.Prompt([], *pair, labels=[pair[1]]) for pair in train],
        test=[il.Prompt([], *pair, labels=[pair[1]]) for pair in test],
        test_shown=_prompts(test, len(test), 3),
    )


def _prompts(pairs: Sequence[tuple[str, str]], n: int, seed: int) -> list[il.Prompt]:
    """Return prompts that show and ask only these pairs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.json")
        path.write_text(
            json.dumps([{"input": source, "output": target} for source, target in pairs])
        )
        return il.PairTask("pairs", path).prompts(n, seed=seed, demonstrations=SHOTS)


def shuffled(prompt: il.Prompt, seed: int) -> il.Prompt:
    """Return the prompt with its demonstrations' labels in random order."""
    labels = [shown.label for shown in prompt.demonstrations]
    random.Random(seed).shuffle(labels)
    shown = [
        il.Demonstration(one.text, label)
        for one, label in zip(prompt.demonstrations, labels, strict=True)
    ]
    return il.Prompt(shown, prompt.query, prompt.answer, prompt.labels)


def tokenized(model: Any, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
    return il.tokenize(model, prompts, template=ARROWS)


def indirect_effects(model: Any, task: Drawn) -> Tensor:
    """Return the indirect effect of each head on each prompt with shuffled labels [prompt layer
    head]."""
    clean = tokenized(model, task.clean).split(PASS_PROMPTS)
    return il.indirect_effects(model, tokenized(model, task.shuffled), clean)


def measure(model: Any, name: str, task: Drawn, heads: Sequence[il.Head]) -> list[dict[str, Any]]:
    """Return the rows of a task's table: without a vector, with vectors of each kind, and with
    demonstrations."""
    clean, shuffled = (
        [*tokenized(model, some).split(PASS_PROMPTS)] for some in (task.clean, task.more_shuffled)
    )
    asked, test = tokenized(model, task.asked), tokenized(model, task.test)
    vector, streams = il.function_vector(model, clean, heads), il.task_vectors(model, clean)
    layer = il.vector_gains(model, vector, asked).best
    other = il.vector_gains(model, streams, asked, replace=True).best
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(N_RANDOM, len(vector), generator=generator).to(vector)
    norms = vector.norm(), (streams[other]).norm()
    added, written = (drawn / drawn.norm(dim=1, keepdim=True) * norm for norm in norms)
    kinds: dict[str, list[il.AddVector]] = {
        "function vector": [il.AddVector(vector, layer)],
        "same heads, shuffled labels": [
            il.AddVector(il.function_vector(model, shuffled, heads), layer)
        ],
        "random vectors, added": [il.AddVector(one, layer) for one in added],
        "task vector": [il.AddVector(streams[other], other, replace=True)],
        "task vector, shuffled labels": [
            il.AddVector(il.task_vectors(model, shuffled)[other], other, replace=True)
        ],
        "random vectors, in place": [il.AddVector(one, other, replace=True) for one in written],
    }
    answers = test.answer_tokens

    def read(log_probs: Tensor, prompts: Tensor) -> Tensor:
        """Return log p of every query's answer, and whether it is the most probable token."""
        return torch.cat([log_probs[:, answers], _top_of(test)(log_probs, prompts)[:, None]], dim=1)

    edits = [edit for some in kinds.values() for edit in some]
    found = (
        il.score(model, test, [[], *([edit] for edit in edits)], read=read).double().cpu().numpy()
    )
    log_probs, is_top = found[..., :-1], found[..., -1]
    same = (answers[:, None] == answers).cpu().numpy()
    own = np.stack([log_probs[i, :, i] for i in range(len(log_probs))])
    others = np.nanmean(np.where(same[:, None], np.nan, log_probs), axis=-1)
    with_shown = tokenized(model, task.test_shown)
    shown = il.score(model, with_shown, read=_top_of(with_shown))
    common = {"task": name, "n": len(test)}
    rows: list[dict[str, Any]] = [
        common | {"what": "nothing"} | _interval("accuracy", is_top[:, 0], test.queries),
        common
        | {"what": "ten demonstrations"}
        | _interval("accuracy", shown.double().cpu().numpy(), with_shown.queries),
    ]
    start = 1
    for kind, some in kinds.items():
        at = slice(start, start := start + len(some))
        gain, others_gain = (x[:, at].mean(1) - x[:, 0] for x in (own, others))
        rows.append(
            common
            | {"what": kind, "layer": some[0].layer, "n_vectors": len(some)}
            | _interval("gain", gain, test.queries)
            | _interval("own_minus_others", gain - others_gain, test.queries)
            | _interval("accuracy", is_top[:, at].mean(1), test.queries)
        )
    return rows


def _top_of(batch: il.PromptBatch) -> Callable[[Tensor, Tensor], Tensor]:
    answers = batch.answer_tokens
    return lambda log_probs, prompts: (
        log_probs.argmax(1) == answers.to(prompts.device)[prompts]
    ).to(log_probs)


def _interval(name: str, values: np.ndarray, queries: Sequence[str]) -> dict[str, float]:
    mean, low, high = il.metrics.bootstrap_interval(values, clusters=list(queries))
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def run(model: Any, path: Path, report: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure every task and write its rows to `path`."""
    drawn = {name: draw(name) for name in TASKS}
    effects = {}
    for name, task in drawn.items():
        effects[name] = indirect_effects(model, task).double().cpu()
        report(f"{name}: mean indirect effects up to {effects[name].mean(0).max():+.4f}")
    every = torch.stack([one.mean(0) for one in effects.values()]).mean(0)
    heads = best_heads(every[None].numpy(), N_HEADS)
    rows: list[dict[str, Any]] = []
    for name, task in drawn.items():
        at = [head.layer * every.shape[1] + head.head for head in heads]
        of_heads = effects[name].flatten(1)[:, at].numpy()
        queries = [prompt.query for prompt in task.shuffled]
        intervals = [
            il.metrics.bootstrap_interval(values, clusters=queries) for values in of_heads.T
        ]
        named = [[str(head), *interval] for head, interval in zip(heads, intervals, strict=True)]
        rows.append({"task": name, "what": "indirect effects", "effects": named})
        rows += measure(model, name, task, heads)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        report(f"{name}: measured")
    return rows


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of the how-to: the heads' indirect effects by task, and a line per task and
    vector."""
    effects = {row["task"]: row["effects"] for row in rows if row["what"] == "indirect effects"}
    # The heads are the same in every task, in one order.
    lines = [
        [of_head[0][0], *(_shown(values, "{:+.3f}") for _, *values in of_head)]
        for of_head in zip(*effects.values(), strict=True)
    ]
    vectors = [
        [
            row["task"],
            row["what"] + (f" × {row['n_vectors']}" if row.get("n_vectors", 1) > 1 else ""),
            str(row.get("layer", "")),
            *(
                _shown([scale * row[key] for key in (name, f"{name}_low", f"{name}_high")], form)
                if name in row
                else ""
                for name, form, scale in (
                    ("gain", "{:+.2f}", 1),
                    ("own_minus_others", "{:+.2f}", 1),
                    ("accuracy", "{:.0f}", 100),
                )
            ),
        ]
        for row in rows
        if "accuracy" in row
    ]
    columns = [
        "task",
        "at the last token",
        "after layer",
        "gain",
        "gain − others' gain",
        "top token, %",
    ]
    return f"""\
{markdown_table(["head", *effects], lines)}

{markdown_table(columns, vectors, align="ll")}
"""


def _shown(values: Sequence[float], form: str) -> str:
    """Return a mean with its interval."""
    mean, low, high = (form.format(value).replace("-", "−") for value in values)
    return f"{mean} ({low}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{high})"


def main() -> None:
    """Measure the rows, and write them and the tables of the how-to."""
    parser = argparse.ArgumentParser(
        description="What function vectors add without demonstrations, beside controls."
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="model name, path or Hub repository"
    )
    parser.add_argument(
        "--rows", type=Path, default=ROWS, help="file of rows; the tables are written next to it"
    )
    options = parser.parse_args()
    rows = run(il.load_model(options.model), options.rows)
    options.rows.with_suffix(".md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
