"""Open question: queries, keys and values of located heads exchanged one by one between prompts; what moves?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.queries import texts_exchanged
from experiments.lab.controls import Comparison
from experiments.lab.drawing import WHISKERS, legend_below, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases, is_true_label
from experiments.lab.study import Need, Study
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.interventions.patching import What
from icl_lens.metrics import label_log_odds
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

SWAPS: dict[str, tuple[What, str, bool]] = {
    "Q, other input": ("q", "query", True),
    "K, texts exchanged": ("k", "texts", True),
    "V, labels exchanged": ("v", "labels", True),
    "K, labels exchanged": ("k", "labels", False),
    "V, texts exchanged": ("v", "texts", False),
}
"""What is patched, from which prompt, and whether two towers predict that the answer loses."""


@dataclass(frozen=True)
class TwoTowerConfig:
    """Heads located for each label (at most one in eight), sets of random heads, and prompts in a pass."""

    heads: int = 6
    draws: int = 5
    rows: int = 64


@dataclass(frozen=True)
class Separation:
    """Chance that a true label's attention exceeds a false one's (AUROC), in each head; ½ is chance."""

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head"]:
        layers, indices = [head.layer for head in self.heads], [head.head for head in self.heads]
        # Attention orders positions as q·k does: softmax is increasing.
        attention = il.attention_to_labels(acts)[:, layers, indices].float()
        real = (acts.batch.label_index >= 0).to(attention.device)
        true = is_true_label(acts.batch).to(attention.device)
        pairs = (true[:, :, None] & (real & ~true)[:, None, :])[:, None]
        gap = attention[..., :, None] - attention[..., None, :]
        wins = (gap > 0).float() + 0.5 * (gap == 0).float()
        return (wins * pairs).sum((-1, -2)) / pairs.sum((-1, -2))


def table(study: Study, config: TwoTowerConfig) -> pd.DataFrame:
    """measure ("auroc" | a swap of SWAPS), group, name (for "auroc"), prompt, value.

    "auroc": 0–1, for each head, mean of both orders. Swaps: by how many nats the answer's log-odds fall when all heads
    of the group get what they have on the other prompt. Prompts whose parts do not lie in the same places are left out.
    """
    heads = located_for_both(study, study.few(config.heads))
    return stack(*_separations(study, heads, config), *_swaps(study, heads, config))


def _separations(study: Study, heads: list[il.Head], config: TwoTowerConfig) -> Iterator[pd.DataFrame]:
    """The rows "auroc", head by head."""
    compared = Comparison.of(study, heads, config.draws)
    reduction = Separation(compared.heads)
    # Both orders, so that a head of near labels is not taken for one of true labels.
    orders = (FOO, replace(FOO, layout="reorder"))
    both = [study.reduce(reduction, variant, study.test, what=f"q·k by class, {variant}") for variant in orders]
    separation = torch.stack(both).mean(0).numpy()
    column = {head: separation[:, i] for i, head in enumerate(compared.heads)}
    for head, group, values in compared.groups(column.__getitem__):
        frame = pd.DataFrame({"prompt": study.test.tolist(), "value": values})
        yield frame.assign(measure="auroc", group=group, name=str(head))


def _swaps(study: Study, heads: list[il.Head], config: TwoTowerConfig) -> Iterator[pd.DataFrame]:
    """The rows of SWAPS, all heads of a group together."""
    rows = study.test.tolist()
    prompts, asked = study.prompts(FOO), study.prompts(replace(FOO, asked="false"))
    sources = {
        "query": [asked[row] for row in rows],
        "texts": [texts_exchanged(prompts[row]) for row in rows],
        "labels": [study.prompts(BAR)[row] for row in rows],
    }
    own = study.batch(FOO)[study.test]
    groups = {"located": [heads], "random": study.controls(heads, config.draws)}
    for measure, (what, source, _) in SWAPS.items():
        other = il.tokenize(study.model, sources[source], labels=("foo", "bar"))
        fits = _aligned(own, other, only_last=what == "q")
        for group, sets in groups.items():
            falls = [_falls(study, own[fits], other[fits], members, what, size=config.rows) for members in sets]
            frame = pd.DataFrame({"prompt": study.test[fits].tolist(), "value": np.mean(falls, axis=0)})
            yield frame.assign(measure=measure, group=group, name="")


def _aligned(own: il.PromptBatch, other: il.PromptBatch, *, only_last: bool) -> Int[Tensor, " fit"]:
    """Indices of prompts whose labels and ends lie in the same places as the other prompt's."""
    same = torch.ones(len(own), dtype=torch.bool, device=own.last.device)
    if not only_last:
        same = (own.label_positions == other.label_positions).all(-1) & (own.last == other.last)
    if not bool(same.any()):
        raise il.InputError("no two prompts of this task have their parts in the same places; use a word task")
    return same.nonzero().flatten()


def _falls(
    study: Study, own: il.PromptBatch, other: il.PromptBatch, heads: list[il.Head], what: What, *, size: int
) -> Float[np.ndarray, " prompt"]:
    """Nats by which the answer's log-odds fall."""

    def log_odds(batch: il.PromptBatch) -> Float[Tensor, " batch"]:
        return label_log_odds(il.label_log_probs(study.model, batch), batch.answer, choices=batch.label_mask)

    pairs = list(zip(own.split(size), other.split(size), strict=True))

    def fall(i: int) -> Tensors:
        mine, theirs = pairs[i]
        before = log_odds(mine)
        with il.patch_heads(study.model, heads, theirs, what=what, positions="last" if what == "q" else "all"):
            return {"value": before - log_odds(mine)}

    found = study.passes.run(f"{what} exchanged", [2 * len(mine) for mine, _ in pairs], fall)
    return joined(found)["value"].double().numpy()


def claim(table: pd.DataFrame) -> Verdict:
    """Swaps and separation as two towers say.

    The three swaps lower the answer as predicted, more than in random heads, and more than the two idle swaps; q·k is
    larger for true labels than for false ones, and more often so than in random heads.
    """

    def fall(measure: str, group: str = "located") -> Float[np.ndarray, " prompt"]:
        return by_prompt(table, "value", measure=measure, group=group)

    active = [name for name, (_, _, predicted) in SWAPS.items() if predicted]
    agree = [judge(fall(name) > 0, least=0.75, unit="of prompts", what=f"share that falls ({name})") for name in active]
    beyond = [
        judge(fall(name) - fall(name, "random"), least=0.0, unit="nats", what=f"fall beyond random heads ({name})")
        for name in active
    ]
    gaps = (("K, texts exchanged", "K, labels exchanged"), ("V, labels exchanged", "V, texts exchanged"))
    idle = [
        judge(_shared(table, first) - _shared(table, second), least=0.0, unit="nats", what=f"{first} over {second}")
        for first, second in gaps
    ]
    auroc, others = (by_prompt(table, "value", measure="auroc", group=group) for group in ("located", "random"))
    towers = [
        judge(auroc, least=0.5, unit="AUROC", what="q·k, true above false labels"),
        judge(auroc - others, least=0.0, unit="AUROC", what="the same beyond random heads"),
    ]
    return all_of(*agree, *beyond, *idle, *towers)


def _shared(table: pd.DataFrame, measure: str) -> Float[np.ndarray, " prompt"]:
    """Falls of a swap in located heads, on the prompts that the exchange of texts leaves."""
    part = where(table, measure=measure, group="located")
    kept = array(where(table, measure="K, texts exchanged", group="located"), "prompt")
    return by_prompt(part.loc[np.isin(array(part, "prompt"), kept)], "value")


def figure(table: pd.DataFrame) -> Figure:
    """Left: AUROC of attention, true against false labels, by head. Right: fall of log-odds by swap, and how often."""
    drawn = Figure(figsize=(PAGE, 2.7), layout="constrained")
    left, right = drawn.subplots(1, 2)
    names = list(dict.fromkeys(where(table, measure="auroc")["name"]))
    for group, hue, shift in (("located", ORANGE, -0.18), ("random", GREY, 0.18)):
        samples = [by_prompt(table, "value", measure="auroc", group=group, name=name) for name in names]
        at = np.arange(len(names)) + shift
        left.bar(at, [sample.mean() for sample in samples], width=0.36, color=hue, label=f"{group} heads")
        left.errorbar(at, [sample.mean() for sample in samples], yerr=whiskers(samples), **WHISKERS)
        falls = [by_prompt(table, "value", measure=measure, group=group) for measure in SWAPS]
        at = np.arange(len(SWAPS)) + shift
        right.barh(at, [sample.mean() for sample in falls], height=0.36, color=hue)
        right.errorbar([sample.mean() for sample in falls], at, xerr=whiskers(falls), **WHISKERS)
        if group == "located":
            for y, sample in zip(at, falls, strict=True):
                text = f" {np.mean(sample > 0):.0%}"
                right.text(max(sample.mean(), 0), y - 0.22, text, va="bottom", fontsize=6, color=BLUE)
    left.axhline(0.5, color="0.3", linewidth=0.6, linestyle=":")
    left.set(ylabel="q·k, true above false labels\n(AUROC, 0–1)", ylim=(0, 1))
    name_heads(left, names)
    left.set_xlabel("Located heads, best first")
    right.set_yticks(range(len(SWAPS)), list(SWAPS))
    right.invert_yaxis()
    right.axvline(0, color="0.3", linewidth=0.6)
    right.set_xlabel("Fall of the answer's log-odds (nats);\nblue: share of prompts in which it falls")
    legend_below(drawn, left)
    return drawn


EXPERIMENT = Experiment(
    id="two-tower",
    title="Two towers, taken apart",
    source="Open (direct evidence for the hypothesis)",
    claim="Queries and keys measure likeness of texts, values carry labels: each swapped alone moves what it should.",
    criterion=(
        "The answer loses in 3 of 4 prompts when Q, K (texts) or V (labels) alone comes from a prompt with the other "
        "answer, by more than in random heads; K by texts above K by labels, V by labels above V by texts; and q·k, "
        "over both orders, is more often larger for true labels than for false ones, also than in random heads."
    ),
    paper=None,
    config=TwoTowerConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
