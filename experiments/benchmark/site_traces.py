"""How much CPU time does a map by layer and position take, beside TransformerLens' own?

`python -m experiments.benchmark.site_traces --model icl-mini --out site_traces.csv`

Both exchange the residual stream before every layer at every position of the same texts for that of
donors whose query is of the other class, and read the same log-odds. TransformerLens' loop runs one
whole pass for each (`transformer_lens.patching`).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformer_lens.patching import get_act_patch_resid_pre

import icl_lens as il
from experiments.benchmark.timing import write_table

N_TEXTS = 8


def texts_and_donors(model: Any) -> tuple[list[il.Text], list[il.Text]]:
    """Return prompts as plain texts, and the same with a query of the other class; all have as many
    tokens.
    """
    prompts = il.load_task("sentiment-number", n=60)
    donors = il.donor_prompts(prompts)["query"]
    batch, donor_batch = il.tokenize(model, prompts), il.tokenize(model, donors)
    n_tokens = int(batch.last[0])
    texts, donor_texts = [], []
    for row, prompt in enumerate(prompts):
        if {int(batch.last[row]), int(donor_batch.last[row])} == {n_tokens}:
            (rival,) = [label for label in prompt.labels if label != prompt.answer]
            answer = {"answer": f" {prompt.answer}", "against": f" {rival}"}
            texts.append(il.Text(batch.texts[row], **answer))
            donor_texts.append(il.Text(donor_batch.texts[row], **answer))
    return texts[:N_TEXTS], donor_texts[:N_TEXTS]


def transformer_lens_map(model: Any, batch: il.PromptBatch, donors: il.PromptBatch) -> np.ndarray:
    """Return the mean log-odds lost [pos layer], from one pass for each exchange."""
    answers = batch.answer_tokens
    assert batch.against is not None
    rivals = batch.against[:, 0]

    def log_odds(logits: Tensor) -> Tensor:
        rows = torch.arange(len(logits))
        last = logits[:, -1].log_softmax(-1)
        return (last[rows, answers] - last[rows, rivals]).mean()

    with torch.no_grad():
        _, cache = model.run_with_cache(donors.tokens)
        intact = log_odds(model(batch.tokens, return_type="logits"))
        patched = get_act_patch_resid_pre(model, batch.tokens, cache, log_odds)
    return (intact - patched).T.float().numpy()


def measure(model: Any, name: str) -> pd.DataFrame:
    """Return a row for each way: CPU seconds, their ratio to TransformerLens' loop, and the largest
    difference from its numbers.
    """
    texts, donor_texts = texts_and_donors(model)
    batch, donors = il.tokenize(model, texts), il.tokenize(model, donor_texts)
    layers = range(model.cfg.n_layers)

    def traced(**options: Any) -> np.ndarray:
        return il.trace(model, batch, donors, layers=layers, **options).lost[:, 0].mean(0)

    ways: dict[str, Callable[[], np.ndarray]] = {
        "transformer_lens.patching": lambda: transformer_lens_map(model, batch, donors),
        "il.trace": traced,
        "il.trace, estimates alone": lambda: traced(method="gradient", n_checked=0),
    }
    maps: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    for way, call in ways.items():
        start = time.process_time()
        maps[way] = call()
        seconds[way] = time.process_time() - start
    rows = []
    first = next(iter(ways))
    for way in ways:
        rows.append(
            {
                "model": name,
                "texts × tokens": f"{len(batch)} × {batch.tokens.shape[1]}",
                "exchanges per text": maps[way].size,
                "way": way,
                "CPU seconds": seconds[way],
                "ratio": seconds[way] / seconds[first],
                "largest difference, nats": float(np.abs(maps[way] - maps[first]).max()),
                "correlation": float(np.corrcoef(maps[way].flat, maps[first].flat)[0, 1]),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="icl-mini")
    parser.add_argument("--out", type=Path, default=Path("site_traces.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    write_table(measure(il.load_model(options.model), options.model), options.out)


if __name__ == "__main__":
    main()
