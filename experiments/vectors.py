"""Function and task vectors in place of demonstrations: what they add to the answer, beside their
controls.

`python experiments/vectors.py --model smollm2-135m` measures the table in docs/howto/vectors.md.
Pairs are split in two: heads, means and layers come from one part, gains from the other. Rows are
stored task by task.

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
class PairPrompts:
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


def draw(task: str) -> PairPrompts:
    """Return the prompts of a task, the same in every run."""
    pairs = il.PairTask(task).pairs()
    random.Random(0).shuffle(pairs)
    train, test = pairs[:N_TRAIN], pairs[N_TRAIN:]
    return PairPrompts(
        clean=with_demonstrations(train, N_CLEAN, 0),
        shuffled=with_shuffled_labels(with_demonstrations(train, N_SHUFFLED, 1)),
        more_shuffled=with_shuffled_labels(with_demonstrations(train, N_CLEAN, 2)),
        asked=[il.Prompt([], *pair, labels=[pair[1]]) for pair in train],
        test=[il.Prompt([], *pair, labels=[pair[1]]) for pair in test],
        test_shown=with_demonstrations(test, len(test), 3),
    )


def with_demonstrations(pairs: Sequence[tuple[str, str]], n: int, seed: int) -> list[il.Prompt]:
    """Return prompts that show and ask only these pairs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.json")
        rows = [{"input": source, "output": target} for source, target in pairs]
        path.write_text(json.dumps(rows), encoding="utf-8")
        return il.PairTask("pairs", path).prompts(n, seed=seed, demonstrations=SHOTS)


def with_shuffled_labels(prompts: Sequence[il.Prompt]) -> list[il.Prompt]:
    """Return the prompts, each with its demonstrations' labels in random order."""
    shuffled = []
    for seed, prompt in enumerate(prompts):
        labels = [demonstration.label for demonstration in prompt.demonstrations]
        random.Random(seed).shuffle(labels)
        texts = [demonstration.text for demonstration in prompt.demonstrations]
        pairs = list(zip(texts, labels, strict=True))
        shuffled.append(il.Prompt(pairs, prompt.query, prompt.answer, prompt.labels))
    return shuffled


def tokenized(model: Any, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
    return il.tokenize(model, prompts, template=ARROWS)


def in_passes(model: Any, prompts: Sequence[il.Prompt]) -> list[il.PromptBatch]:
    return list(tokenized(model, prompts).split(PASS_PROMPTS))


def indirect_effects(model: Any, task: PairPrompts) -> Tensor:
    """Return each head's indirect effect on prompts with shuffled labels, [prompt layer head]."""
    clean = in_passes(model, task.clean)
    return il.indirect_effects(model, tokenized(model, task.shuffled), clean)


def vectors_by_kind(
    model: Any, task: PairPrompts, heads: Sequence[il.Head]
) -> dict[str, list[il.AddVector]]:
    """Return the vectors of a task and their controls, each in the layer that gains most."""
    clean, shuffled = in_passes(model, task.clean), in_passes(model, task.more_shuffled)
    asked = tokenized(model, task.asked)
    vector, streams = il.function_vector(model, clean, heads), il.task_vectors(model, clean)
    layer = il.vector_gains(model, vector, asked).best
    stream_layer = il.vector_gains(model, streams, asked, replace=True).best
    stream = streams[stream_layer]
    of_shuffled = il.function_vector(model, shuffled, heads)
    stream_of_shuffled = il.task_vectors(model, shuffled)[stream_layer]
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(N_RANDOM, len(vector), generator=generator).to(vector)
    directions = directions / directions.norm(dim=1, keepdim=True)
    added = [il.AddVector(random_vector, layer) for random_vector in directions * vector.norm()]
    in_place = []
    for random_vector in directions * stream.norm():
        in_place.append(il.AddVector(random_vector, stream_layer, replace=True))
    return {
        "function vector": [il.AddVector(vector, layer)],
        "same heads, shuffled labels": [il.AddVector(of_shuffled, layer)],
        "random vectors, added": added,
        "task vector": [il.AddVector(stream, stream_layer, replace=True)],
        "task vector, shuffled labels": [
            il.AddVector(stream_of_shuffled, stream_layer, replace=True)
        ],
        "random vectors, in place": in_place,
    }


def measure(
    model: Any, name: str, task: PairPrompts, heads: Sequence[il.Head]
) -> list[dict[str, Any]]:
    """Return a task's rows: without a vector, with demonstrations, and with each kind of vector."""
    test, with_shown = tokenized(model, task.test), tokenized(model, task.test_shown)
    kinds = vectors_by_kind(model, task, heads)
    answers = test.answer_tokens
    is_answer = top_token_reader(test)

    def read(log_probs: Tensor, prompts: Tensor) -> Tensor:
        """Return log p of every query's answer, and whether it is the most probable token."""
        return torch.cat([log_probs[:, answers], is_answer(log_probs, prompts)[:, None]], dim=1)

    edit_sets: list[list[il.AddVector]] = [[]]
    for vectors in kinds.values():
        edit_sets += [[vector] for vector in vectors]
    scores = il.score(model, test, edit_sets, read=read).double().cpu().numpy()
    log_probs, is_top = scores[..., :-1], scores[..., -1]
    of_answer = np.stack([log_probs[row, :, row] for row in range(len(log_probs))])
    is_same = (answers[:, None] == answers).cpu().numpy()
    of_wrong = np.nanmean(np.where(is_same[:, None], np.nan, log_probs), axis=-1)
    is_top_shown = il.score(model, with_shown, read=top_token_reader(with_shown))
    about = {"task": name, "n": len(test)}
    without = interval("accuracy", is_top[:, 0], test.queries)
    after_shown = interval("accuracy", is_top_shown.double().cpu().numpy(), with_shown.queries)
    rows: list[dict[str, Any]] = [
        about | {"what": "nothing"} | without,
        about | {"what": "ten demonstrations"} | after_shown,
    ]
    first = 1
    for kind, vectors in kinds.items():
        places = slice(first, first + len(vectors))
        first += len(vectors)
        gain = of_answer[:, places].mean(1) - of_answer[:, 0]
        wrong_gain = of_wrong[:, places].mean(1) - of_wrong[:, 0]
        row = about | {"what": kind, "layer": vectors[0].layer, "n_vectors": len(vectors)}
        row |= interval("gain", gain, test.queries)
        row |= interval("own_minus_others", gain - wrong_gain, test.queries)
        row |= interval("accuracy", is_top[:, places].mean(1), test.queries)
        rows.append(row)
    return rows


def top_token_reader(batch: il.PromptBatch) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that says whether the most probable token is the prompt's answer."""
    answers = batch.answer_tokens

    def read(log_probs: Tensor, prompts: Tensor) -> Tensor:
        is_top = log_probs.argmax(1) == answers.to(prompts.device)[prompts]
        return is_top.to(log_probs)

    return read


def interval(name: str, values: np.ndarray, queries: Sequence[str]) -> dict[str, float]:
    mean, low, high = il.metrics.bootstrap_interval(values, clusters=list(queries))
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def run(model: Any, path: Path, report: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure every task and write its rows to `path`."""
    tasks = {name: draw(name) for name in TASKS}
    effects = {}
    for name, task in tasks.items():
        effects[name] = indirect_effects(model, task).double().cpu()
        report(f"{name}: mean indirect effects up to {effects[name].mean(0).max():+.4f}")
    mean_effects = torch.stack([of_task.mean(0) for of_task in effects.values()]).mean(0)
    heads = best_heads(mean_effects[None].numpy(), N_HEADS)
    rows: list[dict[str, Any]] = []
    for name, task in tasks.items():
        queries = [prompt.query for prompt in task.shuffled]
        of_heads = []
        for head in heads:
            values = effects[name][:, head.layer, head.head].numpy()
            mean, low, high = il.metrics.bootstrap_interval(values, clusters=queries)
            of_heads.append([str(head), mean, low, high])
        rows.append({"task": name, "what": "indirect effects", "effects": of_heads})
        rows += measure(model, name, task, heads)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        report(f"{name}: measured")
    return rows


COLUMNS = {
    "gain": ("gain", "{:+.2f}", 1),
    "own_minus_others": ("gain − others' gain", "{:+.2f}", 1),
    "accuracy": ("top token, %", "{:.0f}", 100),
}
"""Key of a row -> its column in the how-to, its form, and what it is multiplied by."""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the how-to's tables: the heads' indirect effects, and a line per task and vector."""
    effects = {row["task"]: row["effects"] for row in rows if row["what"] == "indirect effects"}
    head_lines = []
    for of_head in zip(*effects.values(), strict=True):  # the same heads in every task
        cells = [with_interval(values, "{:+.3f}") for _, *values in of_head]
        head_lines.append([of_head[0][0], *cells])
    vector_lines = []
    for row in rows:
        if "accuracy" not in row:
            continue
        times = f" × {row['n_vectors']}" if row.get("n_vectors", 1) > 1 else ""
        line = [row["task"], row["what"] + times, str(row.get("layer", ""))]
        for key, (_, form, scale) in COLUMNS.items():
            cell = ""
            if key in row:
                numbers = [scale * row[name] for name in (key, f"{key}_low", f"{key}_high")]
                cell = with_interval(numbers, form)
            line.append(cell)
        vector_lines.append(line)
    names = ["task", "at the last token", "after layer", *(name for name, _, _ in COLUMNS.values())]
    of_heads = markdown_table(["head", *effects], head_lines)
    of_vectors = markdown_table(names, vector_lines, align="ll")
    return f"{of_heads}\n\n{of_vectors}\n"


def with_interval(values: Sequence[float], form: str) -> str:
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
