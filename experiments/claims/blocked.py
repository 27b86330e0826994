"""Attention from labels to texts blocked in layers: the answer, and what located heads then attend to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.lab.editing import FOO
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import is_true_label
from experiments.lab.study import Study
from icl_lens.digest import json_digest
from icl_lens.interventions.restarted import Streams
from icl_lens.metrics import is_correct, label_log_odds

Case = tuple[tuple[int, int] | None, str]
"""The layers in which edges are blocked (first and first beyond; None: in none), and which edges: own or random."""


def label_to_text(batch: il.PromptBatch) -> Bool[Tensor, "batch query key"]:
    """Edges from each demonstration's label, and the tokens between, back to its text's tokens."""
    rows, width = batch.tokens.shape
    place = torch.arange(width, device=batch.tokens.device)
    edges = torch.zeros(rows, width, width, dtype=torch.bool, device=place.device)
    for demo in range(batch.label_positions.shape[1]):
        start, stop = batch.text_ranges[:, demo, :1], batch.text_ranges[:, demo, 1:]
        is_text = (place >= start) & (place < stop)
        after = (place >= stop) & (place <= batch.label_positions[:, demo, None]) & (start >= 0)
        edges |= after[:, :, None] & is_text[:, None, :]
    return edges


def random_edges(edges: Bool[Tensor, "batch query key"], rng: torch.Generator) -> Bool[Tensor, "batch query key"]:
    """For every query as many other edges, to earlier positions that it is not blocked from; fewer where there are
    fewer.

    A query's own position is never among them.
    """
    width = edges.shape[-1]
    earlier = torch.ones(width, width, dtype=torch.bool, device=edges.device).tril(-1)
    luck = torch.rand(edges.shape, generator=rng).to(edges.device).masked_fill(edges | ~earlier, -1.0)
    rank = luck.argsort(-1, descending=True).argsort(-1)
    return (rank < edges.sum(-1, keepdim=True)) & (luck >= 0)


def blocked(
    study: Study, rows: Int[Tensor, " row"], cases: Sequence[Case], heads: Sequence[il.Head]
) -> dict[str, Shaped[Tensor, "row case ..."]]:
    """In each case: odds (the answer's log-odds, nats), correct, gap [row case head].

    Passes begin where a window does.
    """
    batches = study.batches(FOO, rows)
    latest: dict[int, Clean] = {}  # of the batch that is worked on
    kinds: dict[tuple[int, int] | None, list[str]] = {}
    for window, kind in cases:
        kinds.setdefault(window, []).append(kind)
    windows = list(kinds)

    def clean(i: int) -> "Clean":
        if i not in latest:
            latest.clear()
            latest[i] = Clean.of(study, batches[i], {window[0] for window in windows if window is not None}, heads)
        return latest[i]

    def measured(number: int) -> Tensors:
        i, window = number // len(windows), windows[number % len(windows)]
        batch = batches[i]
        scores, attention = clean(i).scores[None], clean(i).attention[None]
        if window is not None:
            own = label_to_text(batch)
            # A seed for each batch: whether those before it are computed here makes no difference.
            rng = torch.Generator().manual_seed(1_000_003 * study.settings.seed + i)
            edges = [own if kind == "own" else random_edges(own, rng) for kind in kinds[window]]
            scores, attention = clean(i).blocked(study, window, torch.stack(edges), heads)
        true = is_true_label(batch).to(attention.device)[:, None]
        answer, choices = batch.answer, batch.label_mask
        found = {
            "odds": torch.stack([label_log_odds(one, answer, choices=choices) for one in scores]),
            "correct": torch.stack([is_correct(one, answer, choices=choices).float() for one in scores]),
            "gap": (attention * true).sum(-1) - (attention * ~true).sum(-1),
        }
        return {name: values.transpose(0, 1) for name, values in found.items()}

    sizes = [len(batch) * len(kinds[window]) for batch in batches for window in windows]
    key = f"blocked-{json_digest([list(cases), [str(head) for head in heads], rows.tolist()])[:12]}"
    found = study.passes.run("attention blocked in layers", sizes, measured, key=key)
    by_window = [joined(found[place :: len(windows)]) for place in range(len(windows))]
    place_of = [(windows.index(window), kinds[window].index(kind)) for window, kind in cases]
    return {name: torch.stack([by_window[i][name][:, j] for i, j in place_of], dim=1) for name in by_window[0]}


@dataclass(frozen=True)
class Clean:
    """What a batch leaves behind with nothing blocked."""

    streams: Streams
    scores: Float[Tensor, "batch label"]
    attention: Float[Tensor, "batch head demo"]
    """Of some heads, from the last position to each label."""

    @classmethod
    def of(cls, study: Study, batch: il.PromptBatch, begins: set[int], heads: Sequence[il.Head]) -> "Clean":
        with _attention_read(study, batch, heads) as seen:
            streams = Streams.of(study.view, batch, begins)
        attention = torch.stack([seen[head] for head in heads], dim=1)
        return cls(streams, _labels(streams.log_probs, batch), attention)

    def blocked(
        self,
        study: Study,
        window: tuple[int, int],
        edges: Bool[Tensor, "kind batch query key"],
        heads: Sequence[il.Head],
    ) -> tuple[Float[Tensor, "kind batch label"], Float[Tensor, "kind batch head demo"]]:
        """The same with edges blocked in a window of layers, below which nothing changes; all kinds in one pass."""
        n = len(edges)
        rows = list(range(len(self.streams.batch))) * n
        batch = self.streams.batch[rows]
        cut = [head for head in study.view.heads() if window[0] <= head.layer < window[1]]
        behind = [head for head in heads if head.layer >= window[0]]
        with (
            il.block_attention(study.model, cut, edges.flatten(0, 1)),
            _attention_read(study, batch, behind) as seen,
            self.streams.beginning(window[0], rows),
        ):
            scores = il.label_log_probs(study.model, batch)
        attention = self.attention.repeat(n, 1, 1)
        for head, found in seen.items():
            attention[:, heads.index(head)] = found
        return scores.unflatten(0, (n, -1)), attention.unflatten(0, (n, -1))


@contextmanager
def _attention_read(
    study: Study, batch: il.PromptBatch, heads: Sequence[il.Head]
) -> Iterator[dict[il.Head, Float[Tensor, "batch demo"]]]:
    """Of passes in the block over `batch`: each head's attention from the last position to each label."""
    seen: dict[il.Head, Tensor] = {}
    by_layer = {layer: [head for head in heads if head.layer == layer] for layer in {head.layer for head in heads}}

    def read(layer: int) -> Any:
        def hook_fn(pattern: Tensor, hook: Any) -> None:
            places, last = batch.label_positions.to(pattern.device), batch.last.to(pattern.device)
            every = torch.arange(len(pattern), device=pattern.device)
            for head in by_layer[layer]:
                own = pattern[every, head.head, last].float().gather(1, places.clamp(min=0))
                seen[head] = own.masked_fill(places < 0, 0.0)

        return hook_fn

    hooks = [(study.view.hook(layer, "attn.hook_pattern"), read(layer)) for layer in by_layer]
    with study.model.hooks(fwd_hooks=hooks):
        yield seen


def _labels(log_probs: Float[Tensor, "batch d_vocab"], batch: il.PromptBatch) -> Float[Tensor, "batch label"]:
    return log_probs[:, batch.label_tokens.to(log_probs.device)]
