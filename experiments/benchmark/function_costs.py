"""CPU time and peak memory of every public function that runs a model, by the length of prompts.

`python experiments/benchmark/function_costs.py` runs each function at each length in a process of
its own, with one thread, and adds a line to a file of results: the CPU time in units of one forward
pass over the same prompts, and the peak of memory above that of the loaded model. Memory is
anonymous resident memory, sampled every few milliseconds: the system takes pages of files, such as
those of the weights, back and brings them in again as it likes. Lines
that the file has already are not measured again. A call that takes more than `--limit` seconds of
CPU time is stopped; its time is then a lower bound, and so is its peak. A call that takes more than
`--max-forwards` passes, as many as at the next shorter length, is not run.

On a busy machine CPU times vary. `--operations` counts the floating-point operations of matrix
products instead, in units of those of one forward pass; they are the same on every machine.
`--table` writes the results as csv, the documentation's."""

import argparse
import gc
import json
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import icl_lens as il

LENGTHS = (100, 400, 1500)
"""Tokens per prompt."""
N_WORDS = 6
"""Words per text, so that longer prompts have more demonstrations, of about a dozen tokens."""
MIN_TOKENS = 40
"""Shorter prompts have texts of one word."""
N_COUNTED = 12
"""Demonstrations whose tokens are counted, so that longer prompts have a given length."""
SECONDS = 400.0
"""Limit of the CPU time of one call."""
SAMPLED_EVERY = 0.002
"""Seconds between two samples of memory."""


class OutOfTime(BaseException):
    """Raised in a call that takes longer than the limit."""


def prompts_of_length(model: Any, n: int, n_tokens: int, *, seed: int = 0) -> list[il.Prompt]:
    """Return prompts of about `n_tokens` tokens, with as many demonstrations as that allows.

    Texts name animals or countries; both labels are demonstrated, and both are answers.
    """
    words: dict[str, list[str]] = {}
    for prompt in il.load_task("animal-country", n=60, seed=seed):
        for demonstration in prompt.demonstrations:
            words.setdefault(demonstration.label, []).append(demonstration.text)
    rng = random.Random(seed)
    labels = sorted(words)

    def text(label: str) -> str:
        return " ".join(rng.sample(words[label], N_WORDS if n_tokens >= MIN_TOKENS else 1))

    def prompt_with(n_demonstrations: int, number: int) -> il.Prompt:
        in_turns = [labels[(place + number) % 2] for place in range(n_demonstrations)]
        demonstrations = [il.Demonstration(text(label), label) for label in in_turns]
        return il.Prompt(demonstrations, text(labels[number % 2]), labels[number % 2])

    lengths = il.tokenize(model, [prompt_with(N_COUNTED, number) for number in range(n)]).last + 1
    n_demonstrations = max(2, int(n_tokens * N_COUNTED / float(lengths.max()) - 1))
    return [prompt_with(n_demonstrations, number) for number in range(n)]


@dataclass
class Case:
    """A model with two prompts of a length, and what calls need of them."""

    model: Any
    n_tokens: int

    @cached_property
    def prompts(self) -> list[il.Prompt]:
        return prompts_of_length(self.model, 4, self.n_tokens)

    @cached_property
    def four(self) -> il.PromptBatch:
        return il.tokenize(self.model, self.prompts)

    @cached_property
    def batch(self) -> il.PromptBatch:
        return il.tokenize(self.model, self.prompts[:2])

    @cached_property
    def other(self) -> il.PromptBatch:
        return il.tokenize(self.model, self.prompts[2:])

    @cached_property
    def acts(self) -> il.Activations:
        return il.capture(self.model, self.batch)

    @cached_property
    def acts_with_writers(self) -> il.Activations:
        return il.capture(self.model, self.batch, writers=True)

    @cached_property
    def cache(self) -> Any:
        """TransformerLens's own cache, whose memory is the caller's."""
        mask = self.batch.attention_mask
        return self.model.run_with_cache(self.batch.tokens, attention_mask=mask)[1]

    @cached_property
    def heads(self) -> list[il.Head]:
        """One head each of three layers."""
        n_layers = self.model.cfg.n_layers
        layers = n_layers // 3, n_layers // 2, 2 * n_layers // 3
        return [il.Head(layer, head) for head, layer in enumerate(layers)]

    @property
    def reader(self) -> il.Head:
        return self.heads[-1]

    @property
    def sets(self) -> list[list[il.Edit]]:
        return [[il.Ablate([head])] for head in self.heads]

    def scored_in(self, *edits: il.Edit) -> Any:
        """Score the prompts in a block of edits."""
        with il.edited(self.model, *edits, batch=self.batch):
            return il.score(self.model, self.batch)

    def many(self, n: int) -> list[il.Prompt]:
        return prompts_of_length(self.model, n, self.n_tokens)


def _edges(case: Case) -> list[il.Edge]:
    before = str(case.heads[0])
    return [il.Edge(case.reader, "q", before), il.Edge(case.reader, "k", before, "label")]


def _blocked(case: Case) -> Any:
    n = case.batch.tokens.shape[1]
    blocked = torch.zeros(len(case.batch), n, n, dtype=torch.bool)
    blocked[:, -1, : n // 2] = True
    return case.scored_in(il.Block(case.heads, blocked))


def _reweighted(case: Case) -> Any:
    weights = torch.full(case.batch.label_positions.shape, 0.5)
    return case.scored_in(il.Reweight(case.heads, weights, renormalize=True))


CALLS: dict[str, Callable[[Case], Any]] = {
    "score, one forward pass": lambda c: il.score(c.model, c.batch[:1]),
    "score": lambda c: il.score(c.model, c.batch),
    "score, sets": lambda c: il.score(c.model, c.batch, c.sets),
    "tokenize": lambda c: il.tokenize(c.model, c.prompts),
    "Text": lambda c: il.tokenize(c.model, [il.Text(text) for text in c.batch.texts]),
    "capture": lambda c: il.capture(c.model, c.batch),
    "capture, writers": lambda c: il.capture(c.model, c.batch, writers=True),
    "Activations.from_cache": lambda c: il.Activations.from_cache(c.model, c.cache, c.batch),
    "whole_label_log_probs": lambda c: il.whole_label_log_probs(c.model, c.batch),
    "layer_log_prob_increase": lambda c: il.layer_log_prob_increase(c.acts),
    "head_log_prob_increase": lambda c: il.head_log_prob_increase(c.acts),
    "subhead_log_prob_increase": lambda c: il.subhead_log_prob_increase(
        c.acts, layers=[c.reader.layer]
    ),
    "neuron_log_prob_increase": lambda c: il.neuron_log_prob_increase(c.acts, c.reader.layer),
    "top_heads": lambda c: il.top_heads(c.acts),
    "top_heads, increase": lambda c: il.top_heads(c.acts, by="increase"),
    "top_subheads": lambda c: il.top_subheads(c.acts),
    "top_subheads, increase": lambda c: il.top_subheads(c.acts, by="increase"),
    "html.attention_to_labels": lambda c: il.html.attention_to_labels(c.acts, c.heads),
    "query_key_metric": lambda c: il.query_key_metric(c.model, c.reader),
    "label_similarity": lambda c: il.label_similarity(c.model, c.batch, c.heads),
    "attention_score_parts": lambda c: il.attention_score_parts(c.acts_with_writers, c.reader),
    "value_parts": lambda c: il.value_parts(c.acts_with_writers, c.reader),
    "head_copying": lambda c: il.head_copying(c.model, c.reader, c.batch.label_tokens),
    "repeated_token_scores": lambda c: il.repeated_token_scores(
        c.model, n=4, n_tokens=c.n_tokens // 2
    ),
    "explain": lambda c: il.explain(c.model, c.prompts[0]),
    "explain, effect": lambda c: il.explain(c.model, c.prompts[0], by="effect"),
    "explain, exchange": lambda c: il.explain(c.model, c.prompts[0], by="exchange"),
    "explain, text": lambda c: il.explain(
        c.model, il.Text(c.batch.texts[0], answer=" foo", against=" bar")
    ),
    "compare_models": lambda c: il.compare_models(c.model, c.model, c.prompts[:2]),
    "task_check": lambda c: il.task_check(c.model, c.many(20)),
    "ablate_heads": lambda c: c.scored_in(il.Ablate(c.heads)),
    "Ablate": lambda c: c.scored_in(il.Ablate(c.heads, mode="mean", reference=c.other)),
    "head_effects": lambda c: il.head_effects(c.model, c.batch),
    "head_effects, all": lambda c: il.head_effects(c.model, c.batch[:1], positions="all"),
    "head_effects, gradient": lambda c: il.head_effects(c.model, c.batch, method="gradient"),
    "demonstration_effects": lambda c: il.demonstration_effects(c.model, c.batch),
    "calibrated_scores": lambda c: il.calibrated_scores(c.model, c.batch),
    "generate": lambda c: il.generate(c.model, c.batch, max_new_tokens=4),
    "ablate_with_controls": lambda c: il.ablate_with_controls(
        c.model, c.batch, c.heads, n_random=4
    ),
    "ablate_with_controls, all": lambda c: il.ablate_with_controls(
        c.model, c.batch, c.heads, n_random=3, positions="all"
    ),
    "Block": _blocked,
    "Reweight": _reweighted,
    "RemovePosition": lambda c: c.scored_in(il.RemovePosition(c.heads)),
    "debias_edits": lambda c: c.scored_in(*il.debias_edits(c.batch, c.heads, majority=0.5)),
    "edited": lambda c: c.scored_in(il.Ablate(c.heads), il.RemovePosition(c.heads)),
    "patch_heads": lambda c: c.scored_in(
        il.Patch(c.heads, c.other, activation="q", positions="last")
    ),
    "Patch": lambda c: c.scored_in(il.Patch(c.heads, c.other, activation="v", align="labels")),
    "head_to_head_effects": lambda c: il.head_to_head_effects(
        c.model, c.batch, [c.reader], part="q"
    ),
    "head_to_head_effects, keys": lambda c: il.head_to_head_effects(
        c.model, c.batch, [c.reader], part="k", writers=[str(c.heads[0]), "embed"]
    ),
    "WithoutEdges": lambda c: il.score(c.model, c.batch, [[il.WithoutEdges(_edges(c))]]),
    "attention_saliency": lambda c: il.attention_saliency(c.model, c.batch[:1]),
    "saliency_flow": lambda c: il.saliency_flow(c.model, c.batch),
    "function_vector": lambda c: il.function_vector(c.model, c.batch, c.heads),
    "indirect_effects": lambda c: il.indirect_effects(c.model, c.batch, c.batch),
    "task_vectors": lambda c: il.task_vectors(c.model, c.batch),
    "vector_gains": lambda c: il.vector_gains(c.model, torch.ones(c.model.cfg.d_model), c.batch),
    "trace": lambda c: il.trace(c.model, c.batch, layers=[c.reader.layer]),
    "trace, gradient": lambda c: il.trace(
        c.model, c.batch, layers=[c.reader.layer], method="gradient"
    ),
    "AddVector": lambda c: c.scored_in(
        il.AddVector(torch.ones(len(c.batch), c.model.cfg.d_model), c.reader.layer)
    ),
    "AblateSite": lambda c: c.scored_in(il.AblateSite("mlp_out", c.reader.layer)),
    "PatchSite": lambda c: c.scored_in(
        il.PatchSite("resid_pre", c.reader.layer, c.other, positions="labels")
    ),
    "locate": lambda c: il.locate(c.model, c.four),
    "locate, contrast": lambda c: il.locate(c.model, c.four, by="contrast", other_scores=False),
    "mean_score_parts": lambda c: il.mean_score_parts(c.model, c.four, [c.reader]),
    "locate_circuit": lambda c: il.locate_circuit(
        c.model, c.batch, c.other, [c.reader], n_edges=3, n_random=3
    ),
    "two_towers": lambda c: il.two_towers(c.model, c.prompts, c.heads[:2], n_random=3),
    "locate, exchange": lambda c: il.locate(c.model, c.four, by="exchange"),
    "head_atlas": lambda c: il.head_atlas(c.model, c.batch, n_sequences=2),
}
"""Name → a call; what follows a comma tells calls of one function apart."""

N_PROMPTS = {
    "score, one forward pass": 1,
    "explain": 1,
    "head_effects, all": 1,
    "attention_saliency": 1,
    "task_check": 20,
}
N_PROMPTS |= dict.fromkeys(("locate", "locate, contrast", "locate, exchange"), 4)
N_PROMPTS |= dict.fromkeys(
    ("mean_score_parts", "locate_circuit", "two_towers", "repeated_token_scores", "tokenize"), 4
)


def n_prompts(name: str) -> int:
    """Return how many prompts a call runs on."""
    return N_PROMPTS.get(name, N_PROMPTS.get(name.split(",")[0], 2))


def resident_memory() -> tuple[float, float]:
    """Return this process's resident memory, and the part of it that belongs to no file, GiB."""
    _, n_resident, n_of_files, *_ = Path("/proc/self/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE") / 2**30
    return int(n_resident) * page, (int(n_resident) - int(n_of_files)) * page


class PeakMemory:
    """Samples the process's memory in a thread until `stop`."""

    def __init__(self) -> None:
        gc.collect()
        _, self.at_start = resident_memory()
        self.highest = self.at_start
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLED_EVERY):
            self._read()

    def _read(self) -> None:
        _, anonymous = resident_memory()
        self.highest = max(self.highest, anonymous)

    def stop(self) -> float:
        """End sampling; return the peak above the memory at the start, GiB."""
        self._is_over.set()
        self._thread.join()
        self._read()
        return self.highest - self.at_start


def read_weights(model: Any) -> None:
    """Run a short prompt, so that the weights count as the loaded model's memory."""
    il.score(model, il.tokenize(model, il.load_task("animal-country", n=1)))


class OperationCounter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products in the block.

    PyTorch's own `FlopCounterMode` also follows modules, by hooks that keep the graphs of gradients
    in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_operations = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = function._overloadpacket
        if operator not in flop_registry and function is not torch.ops.prim.device.default:
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if operator in flop_registry:
            self.n_operations += flop_registry[operator](*args, **kwargs, out_val=result)
        return result


def operations(call: Callable[[], Any]) -> float:
    """Return the floating-point operations of the matrix products of a call."""
    with OperationCounter() as counter:
        call()
    return counter.n_operations


def forward_cost(case: Case, *, counts_operations: bool) -> dict[str, float]:
    """Return the CPU time, or the operations, of one forward pass over one prompt, and its peak
    above the loaded model, GiB."""
    memory = PeakMemory()

    def forward() -> Any:
        return il.score(case.model, case.batch[:1])

    if counts_operations:
        forward()  # the first batch of a length also runs the Hugging Face model
        return {"forward_s": operations(forward), "forward_peak": memory.stop()}
    seconds = []
    for _ in range(3 if case.n_tokens < 1000 else 1):
        start = time.process_time()
        forward()
        seconds.append(time.process_time() - start)
    return {"forward_s": min(seconds), "forward_peak": memory.stop()}


def measure(
    case: Case, name: str, forward: float, limit: float, *, counts_operations: bool
) -> dict[str, Any]:
    """Return the cost of one call in this process, which first reads the weights.

    `forward` is that of one pass, in seconds or operations.
    """
    read_weights(case.model)
    if name == "Activations.from_cache":
        _ = case.cache
    memory = PeakMemory()
    if name.startswith(("layer", "head_log", "subhead", "neuron", "top", "html")):
        _ = case.acts
    if name in ("attention_score_parts", "value_parts"):
        _ = case.acts_with_writers

    def stop(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, stop)
    start, is_stopped, error = time.process_time(), False, ""
    counter = OperationCounter()
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        with counter if counts_operations else nullcontext():
            CALLS[name](case)
    except OutOfTime:
        is_stopped = True
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:200]
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    cost = counter.n_operations if counts_operations else seconds
    return {
        "forwards": cost / forward / n_prompts(name),
        "seconds": seconds,
        "peak": memory.stop(),
        "is_stopped": is_stopped,
        "error": error,
        "prompts": n_prompts(name),
    }


def table(path: Path) -> pd.DataFrame:
    """Return the results of a file: forwards per prompt, and GiB above the loaded model, by the
    number of tokens of the longest prompt.

    "≥" is before the costs of a call that was stopped. Of one that was not run, there are all the
    forwards that it would take, as many per prompt as at a shorter length."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [cost for cost in rows if not cost["error"]]
    forwards, memory = [], []
    for cost in rows:
        if not cost.get("is_run", True):
            forwards.append(f"not run: {cost['forwards'] * cost['prompts']:.0f} forwards")
            memory.append("")
            continue
        at_least = "≥ " if cost["is_stopped"] else ""
        forwards.append(f"{at_least}{cost['forwards']:.1f}")
        memory.append(f"{at_least}{cost['peak']:.2f}")
    costs, columns = pd.DataFrame(rows), {}
    for unit, texts in (("forwards", forwards), ("GiB", memory)):
        by_length = costs.assign(text=texts).pivot(index="name", columns="tokens", values="text")
        for n_tokens in by_length:
            columns[f"{unit}, {n_tokens:,} tokens"] = by_length[n_tokens]
    return (
        pd.DataFrame(columns)
        .reindex(list(dict.fromkeys(costs["name"])))
        .fillna("")
        .rename_axis("call")
    )


def run(
    path: Path,
    names: Sequence[str],
    lengths: Sequence[int],
    model: Any,
    limit: float,
    *,
    counts_operations: bool = False,
    max_forwards: float = math.inf,
) -> None:
    """Measure calls that the file lacks, each in a new process, and add them to it.

    A pass is timed just before each call, so that both run under the same load; operations of a
    pass are counted once. Calls that are expected to take more than `max_forwards` passes are not
    run."""
    lines = path.read_text().splitlines() if path.exists() else []
    costs = list(map(json.loads, lines))
    measured = {(cost["name"], cost["length"]) for cost in costs}
    for length in lengths:
        case = Case(model, length)
        _ = case.prompts, case.batch, case.other, case.four
        print(length, case.batch, flush=True)
        forward: dict[str, float] = {}
        for name in names:
            if (name, length) in measured:
                continue
            n_tokens = int(case.four.last.max()) + 1
            shorter = [c for c in costs if c["name"] == name and c["length"] < length]
            if shorter and shorter[-1]["forwards"] * n_prompts(name) > max_forwards:
                cost = {**shorter[-1], "length": length, "tokens": n_tokens, "is_run": False}
                _add_line(path, cost)
                continue
            if not (forward and counts_operations):
                forward = forward_cost(case, counts_operations=counts_operations)
            cost = {"name": name, "length": length, "tokens": n_tokens, **forward}
            cost |= in_child(
                case, name, forward["forward_s"], limit, counts_operations=counts_operations
            )
            _add_line(path, cost)
            costs.append(cost)
            print(
                name,
                length,
                f"{cost['forwards']:.1f} forwards, {cost['peak']:.2f} GiB",
                cost["error"],
                flush=True,
            )


def _add_line(path: Path, cost: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(cost) + "\n")


def in_child(
    case: Case, name: str, forward: float, limit: float, *, counts_operations: bool
) -> dict[str, Any]:
    """Return the cost of a call in a process that begins as a copy of this one, which has loaded
    the model."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(
                measure(case, name, forward, limit, counts_operations=counts_operations), pipe
            )
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    return {
        "error": f"ended with status {status}",
        "forwards": 0.0,
        "peak": 0.0,
        "is_stopped": False,
    }


def main() -> None:
    """Read the options; measure one call, or all and print their table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("function_costs.jsonl"), help="File of results."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--names", nargs="+", default=list(CALLS), help="Calls to measure.")
    parser.add_argument("--limit", type=float, default=SECONDS, help="CPU seconds of one call.")
    parser.add_argument(
        "--max-forwards", type=float, default=math.inf, help="Passes of one call, or not run."
    )
    parser.add_argument("--operations", action="store_true", help="Count operations, not seconds.")
    parser.add_argument("--table", type=Path, help="File of the table, csv.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = il.load_model(options.model)
    read_weights(model)
    run(
        options.out,
        options.names,
        options.lengths,
        model,
        options.limit,
        counts_operations=options.operations,
        max_forwards=options.max_forwards,
    )
    print(table(options.out).to_string())
    if options.table is not None:
        table(options.out).to_csv(options.table)


if __name__ == "__main__":
    main()
