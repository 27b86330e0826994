"""How in-context heads form: accuracy, heads and their attention at a training run's snapshots.

Heads are located in the trained model, on half of the queries; everything else is measured on the other half, at each
snapshot. Induction and previous-token scores are measured on sequences of random tokens shown twice, in which neither
words nor labels help.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from experiments.bundled_models.episodes import load_words
from experiments.bundled_models.head_locations import N_LOCATED, chosen_and_tested
from experiments.bundled_models.metrics import head_values
from experiments.framework.estimate import Comparison, compare
from experiments.framework.locating import best_heads
from icl_lens import Head, load_model
from icl_lens.errors import InputError

N_REPEATED, N_SEQUENCES = 32, 24
"""Number of distinct tokens per sequence, and of sequences. Each sequence is shown twice."""
RANKINGS = ("increase", "contrast")
MAIN_RANKING = "contrast"
"""The ranking whose heads the figure and the summary show."""


@dataclass(frozen=True)
class Emergence:
    """Tables of one training run, by snapshot.

    `prompts`: step, prompt, query, correct. `heads`: step, prompt, query, name, layer, increase, contrast (nats),
    on_true, on_false (attention of the last token). `scores`: step, sequence, name, layer, induction, previous (in
    multiples of evenly spread attention). `located`: by ranking, the names of the located heads.
    """

    prompts: pd.DataFrame
    heads: pd.DataFrame
    scores: pd.DataFrame
    located: dict[str, list[str]]


def snapshots(folder: Path) -> dict[int, Path]:
    """Return a run's snapshots of weights by step; raise InputError for fewer than two."""
    found = {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.safetensors"))}
    if len(found) < 2:
        raise InputError(
            f"{str(folder)!r} holds {len(found)} snapshots (step-*.safetensors); pass the folder of checkpoints"
            " that `train` wrote"
        )
    return found


def load_snapshot(folder: Path, path: Path) -> PreTrainedModel:
    """Return the model in `folder` with the weights of a snapshot; raise InputError if they are of another model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    own = dict(model.named_parameters())
    stored = load_file(path)
    if {name: tensor.shape for name, tensor in stored.items()} != {name: p.shape for name, p in own.items()}:
        raise InputError(
            f"the snapshot {str(path)!r} is not of the model in {str(folder)!r}; pass the run's own folder"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)
    return model.eval()


def head_names(n_layers: int, n_heads: int) -> list[str]:
    """Return all heads' names, layer by layer."""
    return [str(Head(layer, head)) for layer in range(n_layers) for head in range(n_heads)]


def repeated_tokens(tokenizer: Any) -> Int[Tensor, "sequence pos"]:
    """Draw sequences of distinct random tokens; each is shown twice."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.tensor([i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids])
    drawn = [ordinary[torch.randperm(len(ordinary), generator=generator)[:N_REPEATED]] for _ in range(N_SEQUENCES)]
    return torch.stack([torch.cat([tokens, tokens]) for tokens in drawn])


@torch.no_grad()
def repeat_scores(model: Any, tokens: Int[Tensor, "sequence pos"]) -> dict[str, Float[Tensor, "seq head"]]:
    """Return attention from repeated tokens to the token after their first occurrence, and to the token before them.

    These are "induction" and "previous", in multiples of evenly spread attention, averaged over the repetition.
    """
    n = tokens.shape[1] // 2
    query = torch.arange(n, 2 * n)
    patterns = torch.stack(model(input_ids=tokens, output_attentions=True).attentions, dim=1)  # seq layer head q k
    times = (query + 1).float()
    return {
        name: (patterns[..., query, query - back] * times).mean(-1).flatten(1)
        for name, back in (("induction", n - 1), ("previous", 1))
    }


def measure(checkpoints: Path, folder: Path, *, n: int = 320) -> Emergence:
    """Measure a run's snapshots on half of about `n` prompts; heads are located in `folder` on the other half.

    Raise InputError for too few prompts or snapshots, and for snapshots of another model.
    """
    paths = snapshots(checkpoints)
    chosen, tested = chosen_and_tested(load_words(), n)
    _, final = head_values(load_model(str(folder), device="cpu"), chosen)
    names = head_names(*final["increase"].shape[1:])
    located = {by: list(map(str, best_heads(final[by], N_LOCATED))) for by in RANKINGS}
    queries = [" ".join(episode.items[-1].text) for episode in tested]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sequences = repeated_tokens(tokenizer)
    prompts, heads, scores = [], [], []
    for step, path in paths.items():
        hf_model = load_snapshot(folder, path)
        found = repeat_scores(hf_model, sequences)
        scores.append(_table(found, names, step, sequence=range(len(sequences))))
        model = load_model(str(folder), device="cpu", hf_model=hf_model, tokenizer=tokenizer)
        correct, values = head_values(model, tested)
        rows = pd.DataFrame({"step": step, "prompt": range(len(tested)), "query": queries, "correct": correct})
        prompts.append(rows)
        heads.append(_table(values, names, step, prompt=range(len(tested))).merge(rows, on=["step", "prompt"]))
    prompts, heads, scores = (pd.concat(tables, ignore_index=True) for tables in (prompts, heads, scores))
    return Emergence(prompts, heads, scores, located)


def _table(values: dict[str, Tensor], names: list[str], step: int, **rows: Sequence[int]) -> pd.DataFrame:
    """Return a table with one row for each row and head: step, name, layer, and a column for each value."""
    table = pd.MultiIndex.from_product([*rows.values(), names], names=[*rows, "name"]).to_frame(index=False)
    columns = {column: value.detach().numpy().reshape(-1) for column, value in values.items()}
    return table.assign(**columns, step=step, layer=[Head.parse(name).layer for name in table["name"]])


def steepest(accuracy: pd.Series) -> tuple[int, int]:
    """Return the two neighboring steps between which accuracy rises most; the first pair if several do."""
    after = int(np.argmax(np.diff(accuracy.to_numpy()))) + 1
    return int(accuracy.index[after - 1]), int(accuracy.index[after])


def summarize(run: Emergence) -> dict[str, Any]:
    """Return the steepest rise of accuracy between two neighboring snapshots, and what rises with it.

    `attention`: the rise of attention to true minus false labels in located heads, compared with the other heads of
    their layers, as a share of the located heads' final attention to labels. `induction`: the best head's induction
    score up to then, compared with 1 (evenly spread attention), on sequences that were not used to choose the head.
    """
    accuracy: Any = run.prompts.groupby("step")["correct"].mean()
    before, after = steepest(accuracy)
    head, step, induction = _best_induction(run.scores, after)
    return {
        "before": before,
        "after": after,
        "accuracy_before": float(accuracy[before]),
        "accuracy_after": float(accuracy[after]),
        "attention": asdict(_attention_rise(run, before, after)),
        "induction_head": head,
        "induction_step": step,
        "induction": asdict(induction),
    }


def _attention_rise(run: Emergence, before: int, after: int) -> Comparison:
    heads: Any = run.heads.assign(
        true_minus_false=run.heads["on_true"] - run.heads["on_false"],
        on_labels=run.heads["on_true"] + run.heads["on_false"],
    )
    is_located = heads["name"].isin(run.located[MAIN_RANKING])
    in_same_layers = heads["layer"].isin(set(heads["layer"][is_located]))
    final = float(heads[is_located & (heads["step"] == heads["step"].max())]["on_labels"].mean())

    def rise(chosen: Any) -> pd.Series:
        means = heads[chosen].groupby(["step", "prompt", "query"])["true_minus_false"].mean()
        return (means[after] - means[before]) / final

    located, others = rise(is_located), rise(in_same_layers & ~is_located)
    queries = pd.factorize(located.index.get_level_values("query"))[0]
    return compare(located.to_numpy(), others.to_numpy(), queries)


def _best_induction(scores: pd.DataFrame, last_step: int) -> tuple[str, int, Comparison]:
    """Return the head and step with the largest induction score up to `last_step`, chosen on half of the sequences."""
    early: Any = scores[scores["step"] <= last_step]
    chosen = early[early["sequence"] % 2 == 0].groupby(["step", "name"])["induction"].mean()
    step, name = chosen.idxmax()
    held_out = early[(early["sequence"] % 2 == 1) & (early["step"] == step) & (early["name"] == name)]["induction"]
    return str(name), int(step), compare(held_out.to_numpy(), 1.0, np.arange(len(held_out)))


def head_onsets(run: Emergence) -> pd.DataFrame:
    """Return by, name, final (nats) and step, the first snapshot at which a located head has half of its final value.

    The step is missing if the final value is not above zero.
    """
    rows = []
    for by, names in run.located.items():
        for name in names:
            means: Any = run.heads[run.heads["name"] == name].groupby("step")[by].mean()
            final = float(means.iloc[-1])
            reached = means.index[means >= final / 2] if final > 0 else []
            rows.append({"by": by, "name": name, "final": final, "step": int(reached[0]) if len(reached) else None})
    return pd.DataFrame(rows).astype({"step": "Int64"})


def trajectory(run: Emergence) -> pd.DataFrame:
    """Return one row per step: accuracy, means over the heads of each ranking, and the largest repetition scores."""
    heads: Any = run.heads
    columns: dict[str, Any] = {"accuracy": run.prompts.groupby("step")["correct"].mean()}
    for by in RANKINGS:
        located = heads[heads["name"].isin(run.located[by])].groupby("step")
        columns |= {f"{by} of located": located[by].mean()}
        columns |= {f"{by}: attention to {kind}": located[f"on_{kind}"].mean() for kind in ("true", "false")}
    for score in ("induction", "previous"):
        of_heads: Any = run.scores.groupby(["step", "name"])[score].mean()
        columns[score] = of_heads.groupby("step").max()
    return pd.DataFrame(columns)
