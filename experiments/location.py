"""Which method finds the heads that matter, at what cost, and where are they?

1. Six methods rank all heads on the locating half. Three read them off one forward pass: the
   contrast and the increase (what a head adds to the answer's log-odds, or to its log p), and
   attention to labels. The gradient estimate takes five passes, counting a backward pass as two.
   Exact effects (zero one head) and causal tracing (restore one head in a run with exchanged
   labels) take one for each head.
2. The best heads of each method are set to zero at the last position of the testing half. The
   control is the mean over 20 random sets with as many heads of the same layers.
3. Depth: the share of the deeper half of the layers in all positive mean contributions; with an odd
   number of layers, the middle one counts half. Deep heads write more than shallow ones whatever
   the answer is, so the control is this share for contributions that say nothing about it:
   contrasts with a random sign for each query, or the increases of a random token. The same for
   attention and FFN layers instead of heads.

    python experiments/location.py --model icl-mini --task animal-country -n 200

The paper's Figures 2–4 and 12–15, section 6.2; the published version's causal tracing.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import (
    COLORS,
    N_RANDOM_SETS,
    RANKINGS,
    Study,
    Table,
    draw_beside_control,
    from_command_line,
    grid,
    legend_below,
)
from matplotlib.figure import Figure

import icl_lens as il

SHOWN_HEADS = 20
N_SIGNS = 200
"""Random assignments of signs to queries, over which the control of the contrast's depth is
averaged."""
VERSUS = "random heads of their layers"
LEGEND = ("without located heads (bar: 95%)", "without random heads")
NOTHING = (
    "located heads add nothing above zero on the testing half, so shares would be those of noise"
)
METHODS: dict[str, Callable[[int], int]] = {
    "contrast": lambda n_heads: 1,
    "increase": lambda n_heads: 1,
    "exact effects": lambda n_heads: 1 + n_heads,
    "gradient estimate": lambda n_heads: 5,
    "attention to labels": lambda n_heads: 1,
    "causal tracing": lambda n_heads: 2 + n_heads,
}
"""Method -> the number of forward passes per prompt, by the model's number of heads."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Compare what each method's heads cost, and measure how deep contributions come from."""
    study = Study.from_command_line(
        "location", "Which method finds the heads that matter?", arguments
    )
    table = Table(study)
    scores = {method: head_scores(study, method, study.locating) for method in METHODS}
    located = {method: best_heads(values, study.n_located) for method, values in scores.items()}
    add_losses(study, table, located)
    add_depths(study, table, scores)
    return table.write(draw(table.to_frame()))


# Methods: each returns one score per prompt and head, [prompt layer head]


def head_scores(study: Study, method: str, batch: il.PromptBatch) -> np.ndarray:
    """Return every head's score by a method on every prompt."""
    if method == "causal tracing":
        return traced(study, batch)
    if method in ("exact effects", "gradient estimate"):
        kind = "exact" if method == "exact effects" else "gradient"

        def effects(rows: list[int]) -> torch.Tensor:
            return il.head_effects(study.model, batch[rows], method=kind).log_odds.double()

        return il.map_prompts(
            study.model, batch, effects, options={"method": kind}, run=study.run(method)
        )
    measure = {
        "contrast": contrasts,
        "increase": increases,
        "attention to labels": attention_difference,
    }[method]
    half = "locating" if batch is study.locating else "testing"
    return study.read(f"{method}, {half}", batch, measure, method=method)


def contrasts(acts: il.Activations) -> torch.Tensor:
    """Return what every head adds to the answer's log-odds, nats."""
    return il.head_log_prob_increase(
        acts, acts.batch.answer_tokens, against=acts.batch.other_label_tokens
    )


def increases(acts: il.Activations) -> torch.Tensor:
    """Return what every head adds to the answer's log-probability, nats."""
    return il.head_log_prob_increase(acts, acts.batch.answer_tokens)


def attention_difference(acts: il.Activations) -> torch.Tensor:
    """Return attention from the last position to labels of the answer minus that to all other
    labels."""
    by_label = acts.attention_by_label()
    sign = 2 * torch.nn.functional.one_hot(acts.batch.answer, by_label.shape[-1]) - 1
    return (by_label * sign[:, None, None]).sum(-1)


def traced(study: Study, batch: il.PromptBatch) -> np.ndarray:
    """Return the log-odds (nats) that each head restores in a run of the same prompt with its
    labels exchanged.

    The head's output at the last position comes from the run with the right labels; the rest is
    unchanged."""
    exchanged = study.tokenize(il.donor_prompts(batch.prompts)["labels"])

    def edits_of(rows: list[int]) -> list[list[il.Patch]]:
        source = batch[rows]
        edits: list[list[il.Patch]] = [[]]
        for head in study.all_heads():
            edits.append([il.Patch([head], source, activation="z", positions="last")])
        return edits

    options = {"what": "one head restored"}
    # the answer of `batch` is the other label of `exchanged`
    log_odds = -study.scores("causal tracing", exchanged, edits_of, options).log_odds
    restored = log_odds[:, 1:] - log_odds[:, :1]
    return restored.reshape(len(batch), study.model.cfg.n_layers, study.model.cfg.n_heads)


def best_heads(values: np.ndarray, k: int) -> list[il.Head]:
    """Return the k heads of largest mean score."""
    order = np.argsort(-values.mean(0).flatten(), kind="stable")[:k]
    return [il.Head.from_index(int(index), values.shape[2]) for index in order]


def add_losses(study: Study, table: Table, located: dict[str, list[il.Head]]) -> None:
    """Add the log-odds lost without each method's heads, next to random heads of their layers."""
    for method, heads in located.items():
        random_sets = il.random_head_sets(
            study.model, heads, n_random=N_RANDOM_SETS, seed=study.seed
        )
        edits = [[]]
        for heads_removed in (heads, *random_sets):
            edits.append([il.Ablate(heads_removed, positions="last")])
        names = " ".join(map(str, heads))
        options = {"heads": names, "random sets": N_RANDOM_SETS, "seed": study.seed}
        part = f"without {method}"
        scores = study.scores(part, study.testing, lambda rows, edits=edits: edits, options)
        lost = scores.log_odds[:, :1] - scores.log_odds
        n_passes = METHODS[method](len(study.all_heads()))
        about: dict[str, Any] = {"at": n_passes, "versus": VERSUS, "note": names}
        table.add(f"log-odds lost without heads by {method}", lost[:, 1], lost[:, 2:], **about)


# Depth


def add_depths(study: Study, table: Table, scores: dict[str, np.ndarray]) -> None:
    """Add the deeper half's share of contributions by heads and by layers, and of exact effects."""
    testing = study.testing
    kinds = "contrast, increase, random token"
    layers = study.read("layers", testing, layer_contributions, what=kinds)
    for place, ranking in enumerate(RANKINGS):
        of_heads = head_scores(study, ranking, testing)
        located = study.located_heads(ranking)
        total = np.sum([of_heads[:, head.layer, head.head] for head in located], axis=0)
        unrelated, unrelated_layers = None, None
        if ranking == "increase":
            method = "increase of a random token"
            unrelated = study.read("random token", testing, random_increases, method=method)
            unrelated_layers = layers[:, 2]
        measures = {
            "share of the deeper half, heads": (of_heads, unrelated, slice(None)),
            "share of deep attention layers": (layers[:, place], unrelated_layers, slice(0, 1)),
            "share of deep FFN layers": (layers[:, place], unrelated_layers, slice(1, 2)),
        }
        is_above_zero = il.metrics.bootstrap_interval(total, clusters=testing.queries).low > 0
        for measure, (values, control, counted) in measures.items():
            if is_above_zero:
                add_share(table, measure, values, control, counted, testing.queries, ranking)
            else:
                table.add_missing(measure, NOTHING)
        add_contributions(table, of_heads, layers[:, place], ranking)
    measure, effects = "share of the deeper half, exact effects", scores["exact effects"]
    add_share(table, measure, effects, None, slice(None), study.locating.queries, "")


def layer_contributions(acts: il.Activations) -> torch.Tensor:
    """Return what each layer adds, nats, [prompt kind layer component].

    Kinds are the answer's contrast, its increase, and the increase of a random token; components
    attention and FFN."""
    tokens, other_labels = acts.batch.answer_tokens, acts.batch.other_label_tokens
    of_kinds = (
        il.layer_log_prob_increase(acts, tokens, against=other_labels),
        il.layer_log_prob_increase(acts, tokens),
        il.layer_log_prob_increase(acts, random_tokens(acts)),
    )
    return torch.stack([torch.stack([added.attn, added.ffn], dim=-1) for added in of_kinds], dim=1)


def random_increases(acts: il.Activations) -> torch.Tensor:
    """Return what each head adds to the log-probability of a random token, nats."""
    return il.head_log_prob_increase(acts, random_tokens(acts))


def random_tokens(acts: il.Activations) -> torch.Tensor:
    """Return one random token per prompt, the same for the same prompt in every batch."""
    n_tokens = acts.readout.W_U.shape[1]
    tokens = []
    for prompt in acts.batch.prompts:
        seed = f"{prompt.query} {prompt.demonstrations}"
        tokens.append(random.Random(seed).randrange(n_tokens))
    return torch.tensor(tokens)


def add_share(
    table: Table,
    measure: str,
    values: np.ndarray,
    unrelated: np.ndarray | None,
    counted: slice,
    queries: tuple[str, ...],
    ranking: str,
) -> None:
    """Add the deeper half's share of positive means of `values` [prompt layer part], in the parts
    that are counted.

    The control is the same share of `unrelated` or, without these, of `values` with random signs.
    """
    n, shape = len(values), values.shape[1:]
    size = values[0].size
    if unrelated is None:
        _, query_number = np.unique(queries, return_inverse=True)
        shape_of_signs = (query_number.max() + 1, N_SIGNS)
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=shape_of_signs)
        rows = np.concatenate([values.reshape(n, -1), signs[query_number]], axis=1)
        versus = "the same with random signs"
    else:
        rows = np.concatenate([values.reshape(n, -1), unrelated.reshape(n, -1)], axis=1)
        versus = "the same for a random token"

    def share(means: np.ndarray) -> float:
        positive = np.clip(means.reshape(-1, *shape), 0, None)
        depth = 0.5 + 0.5 * np.sign(np.arange(shape[0]) - (shape[0] - 1) / 2)
        deep = positive[..., counted].sum(-1) @ depth
        return float((deep / positive.sum((1, 2))).mean())

    def control(draws: np.ndarray) -> float:
        if unrelated is not None:
            return share(draws[:, size:].mean(0))
        return share(draws[:, size:].T @ draws[:, :size] / len(draws))

    def quantity(draws: np.ndarray) -> float:
        return share(draws[:, :size].mean(0))

    about: dict[str, Any] = {"unit": "%", "versus": versus, "ranking": ranking}
    table.add_statistic(measure, rows, quantity, control, queries, **about)


def add_contributions(
    table: Table, of_heads: np.ndarray, of_layers: np.ndarray, ranking: str
) -> None:
    """Add what each layer adds on average, and the heads that add most, without controls."""
    about = {"ranking": ranking, "unit": "nats"}
    means = of_layers.mean(0)
    for component, name in enumerate(("attention", "FFN")):
        for layer, value in enumerate(means[:, component]):
            table.add_row(f"added by {name}", at=layer, quantity=value, **about)
    for head in best_heads(of_heads, min(SHOWN_HEADS, of_heads[0].size)):
        value = of_heads[:, head.layer, head.head].mean()
        table.add_row("added by one head", at=str(head), quantity=value, **about)


def draw(table: pd.DataFrame) -> Figure:
    """Draw each method's loss next to its control, and what layers add: a row of panels per model
    and task."""
    figure, rows_of_panels = grid(table, 2, width_ratios=(3, 2))
    for (left, right), title, rows in rows_of_panels:
        losses = rows.query("measure.str.startswith('log-odds lost')", engine="python")
        names = []
        for measure, passes in zip(losses["measure"], losses["at"], strict=True):
            method = measure.removeprefix("log-odds lost without heads by ")
            names.append(f"{method}\npasses: {passes}")
        draw_beside_control(left, losses, names, LEGEND)
        left.tick_params(axis="y", labelsize=7)
        left.set_title(title, fontsize=8)
        for color, name in zip(COLORS[2:], ("attention", "FFN"), strict=False):
            of_name = rows.query("measure == @measure", local_dict={"measure": f"added by {name}"})
            of_layers = of_name.query("ranking == 'contrast'")
            layers = of_layers["at"].astype(int)
            right.plot(layers, of_layers["quantity"], "o-", ms=3, color=color, label=name)
        right.axhline(0, color="#bbbbbb", lw=0.8)
        right.set_title("contrast by layer, nats", fontsize=8)
    (left, right), _, _ = rows_of_panels[-1]
    left.set_xlabel("log-odds lost by the answer, nats")
    right.set_xlabel("layer")
    legend_below(figure, left, right)
    return figure


if __name__ == "__main__":
    from_command_line(main)
