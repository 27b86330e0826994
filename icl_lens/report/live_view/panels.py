"""Compute what a live view shows of a state, with the library's public functions.

1. `Scene` is one prompt on the model: its tokens, one captured pass, and the panels that were
   computed.
2. `PANELS` lists the panels in the order in which they are needed: the answer, the scores of all
   heads, what changing the chosen heads does beside random sets, where the last of them attends and
   why, what each demonstration adds, and last the scores that take a row per head. `compute` yields
   those of a state.
3. A panel that cannot be computed holds the reason (`left_out`); the others are complete.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit import Edit
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.edits.patch import HeadActivation, Patch
from icl_lens.edits.read import read_labels
from icl_lens.edits.score import score, score_sets
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_DESCRIBED, N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import Score
from icl_lens.measures.demonstration_effects import BEGINS_TEXT, demonstration_effects
from icl_lens.measures.effects import head_effects
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.metrics import label_log_odds
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, with_answers
from icl_lens.prompts.decision_rows import first_decisions, with_own_labels
from icl_lens.prompts.donors import (
    exchange_labels,
    exchange_texts,
    other_queries,
    partner_label,
    with_query,
)
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.prompts.token_ids import name_tokens
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import head_log_prob_increase
from icl_lens.reading.multi_token_labels import whole_label_log_probs
from icl_lens.reading.reasons import attention_reasons
from icl_lens.reading.scored_tokens import default_comparison
from icl_lens.reading.similarity import compared_positions
from icl_lens.report.live_view.state import Change, LiveState

Panel = dict[str, Any]
"""Numbers, words and lists of them, as JSON has them."""

SEED = 0
"""Seed of the random sets of heads from the same layers, beside which a change is shown."""
N_TOKENS = 5
"""Most probable tokens named in the answer."""
ACTIVATIONS: dict[Change, HeadActivation] = {"query": "q", "keys": "k", "values": "v"}
"""What is patched for each exchange."""


@dataclass
class Scene:
    """One prompt on a model; what is computed of it is kept."""

    model: Any
    shown: Prompt
    template: Template
    prepend_bos: bool | None = None
    check: bool = True
    """Whether `capture` checks that the parts it keeps sum to the model's own; once per model is
    enough.
    """
    panels: dict[Any, Panel] = field(default_factory=dict)

    @cached_property
    def view(self) -> ModelView:
        return ModelView.of(self.model)

    def tokenize(self, prompt: Prompt) -> PromptBatch:
        """Return the row in which the answer is decided: the last one, if its label begins like
        another.
        """
        rows = tokenize(self.model, prompt, template=self.template, prepend_bos=self.prepend_bos)
        if rows.decisions.prompt_index is None:
            return rows
        if prompt.answer is None:
            # Which decision is explained depends on the label that is predicted.
            likely = whole_label_log_probs(self.model, first_decisions(rows))[0]
            return self.tokenize(
                _answered(prompt, rows.decisions.whole_labels[int(likely.argmax())])
            )
        return with_own_labels(rows[len(rows) - 1])

    @cached_property
    def acts(self) -> Activations:
        """One pass; without an answer, the prompt's answer is the label that it predicts."""
        acts = capture(self.model, self.tokenize(self.shown), check=self.check)
        if int(acts.batch.answer[0]) >= 0:
            return acts
        return replace(
            acts, batch=with_answers(acts.batch, acts.predicted.to(acts.batch.answer.device))
        )

    @cached_property
    def batch(self) -> PromptBatch:
        """The tokens of the pass, kept when its activations are not."""
        return self.acts.batch

    @property
    def prompt(self) -> Prompt:
        """The prompt with its answer."""
        return self.batch.prompts[0]

    @cached_property
    def written(self) -> Activations:
        """A pass that also keeps what earlier components wrote at labels and at the last token."""
        return capture(self.model, self.batch, writers=compared_positions(self.batch))

    @cached_property
    def rows(self) -> PrefixCache | None:
        """The prompt's keys and values, so that removing heads costs one token per set; None if it
        is unsupported.
        """
        try:
            return PrefixCache.of(self.view, self.batch)
        except (PrefixCacheUnsupported, InputError, RuntimeError):
            return None

    @property
    def n_appended(self) -> int:
        """Number of tokens in which labels agree, and which are appended to the prompt."""
        return int(self.batch.decisions.n_appended[0])

    @property
    def has_others(self) -> bool:
        """Whether there is a label to compare the answer with."""
        return int(self.batch.label_mask[0].sum()) > 1

    def outcomes(self, log_probs: Float[Tensor, "set label"]) -> list[float]:
        """Return the answer's log-odds for each set; its log-probability if there is nothing to
        compare with.
        """
        n_sets, batch = len(log_probs), self.batch
        if not self.has_others:
            return log_probs[:, int(batch.answer[0])].tolist()
        answer = batch.answer.expand(n_sets).cpu()
        choices = batch.label_mask.expand(n_sets, -1).cpu()
        log_odds = label_log_odds(log_probs.as_subclass(Tensor).cpu(), answer, choices=choices)
        return log_odds.tolist()

    def source(self, change: Change) -> Prompt:
        """Return the prompt from which heads take queries, keys or values; raise InputError if
        there is none.

        If labels begin alike, it keeps the answer, and thus ends at the same decision.
        """
        prompt, batch = self.prompt, self.batch
        if change == "query":
            donor = with_query(prompt, other_queries([prompt])[0].other, partner_label(prompt))
        else:
            donor = exchange_texts(prompt) if change == "keys" else exchange_labels(prompt)
        return replace(donor, answer=prompt.answer) if batch.decisions.begin_alike else donor

    def edit(self, change: Change) -> Callable[[Sequence[Head]], Edit]:
        """Return what makes the edit of a set of heads; raise InputError if the prompt has nothing
        to exchange.
        """
        if change == "removed":
            return lambda heads: Ablate(heads, positions="last")
        source = self.tokenize(self.source(change))
        align = "positions" if change == "query" else "labels"
        return lambda heads: Patch(
            heads, source, activation=ACTIVATIONS[change], positions="last", align=align
        )


def _answered(prompt: Prompt, answer: str) -> Prompt:
    return Prompt(
        prompt.demonstrations, prompt.query, answer, prompt.labels, separator=prompt.separator
    )


@dataclass(frozen=True)
class PanelKind:
    """A panel of the live view: when it is computed, and by what."""

    name: str
    words: str
    """What is computed, while it is computed."""
    compute: Callable[[Scene, Sequence[Head], Change], Panel]
    depends_on: tuple[Literal["heads", "change"], ...] = ()
    """What it depends on beside the prompt: the chosen heads, and what is done to them."""
    by: Score | Literal[""] = ""
    """The score by which heads must be ranked for the panel to be needed; empty for any."""
    is_required: bool = False
    """Whether there is nothing to show if it cannot be computed."""

    @property
    def is_of_choice(self) -> bool:
        """Whether it depends on the chosen heads, so that there is none without."""
        return bool(self.depends_on)


def compute(
    scene: Scene, state: LiveState, *, starts: Callable[[str], None] = lambda words: None
) -> Iterator[tuple[str, Panel]]:
    """Yield the name and the content of each panel, the quickest first; `starts` is called with
    what is computed next, in words.

    Raise InputError for a prompt that the model cannot read, and heads that it does not have.
    """
    heads = tuple(scene.view.check_heads(state.heads))
    for kind in PANELS:
        if (kind.is_of_choice and not heads) or kind.by not in ("", state.by):
            continue
        choices = {"heads": heads, "change": state.change}
        key = (kind.name, *(choices[choice] for choice in kind.depends_on))
        if key not in scene.panels:
            starts(kind.words)
            try:
                scene.panels[key] = kind.compute(scene, heads, state.change)
            except InputError as error:
                if kind.is_required:
                    raise
                scene.panels[key] = {"left_out": str(error)}
        yield kind.name, scene.panels[key]
    if not heads:
        _ = scene.rows  # so that the first click is as fast as the next


def answer(scene: Scene) -> Panel:
    """Return the labels' probabilities, the answer's log-odds (nats), and the most probable tokens."""
    batch, acts = scene.batch, scene.acts
    best = acts.readout.log_probs(acts.resid_final)[0].exp().topk(N_TOKENS)
    labels = acts.label_log_probs
    target, n = int(batch.answer[0]), int(batch.last[0]) + 1
    names = batch.token_names[0]
    return {
        "labels": list(batch.labels),
        "choices": batch.label_mask[0].tolist(),
        "appended": "".join(names[n - scene.n_appended : n]),
        "whole_probs": whole_probs(scene),
        "log_probs": labels[0].tolist(),
        "probs": labels[0].exp().tolist(),
        "target": target,
        "outcome": scene.outcomes(labels)[0],
        "has_others": scene.has_others,
        "tokens": name_tokens(scene.model.tokenizer, [best.indices.tolist()])[0],
        "token_probs": best.values.tolist(),
        "n_tokens": n,
    }


def whole_probs(scene: Scene) -> dict[str, float]:
    """Return the probability of each whole label; empty if every label is one token."""
    batch = scene.batch
    if not scene.n_appended and batch.all_label_positions.shape[-1] == 1:
        return {}
    probabilities = whole_label_log_probs(scene.model, batch)[0].exp()
    return dict(zip(batch.decisions.whole_labels, probabilities.tolist(), strict=True))


def all_heads(scene: Scene) -> Panel:
    """Return every head's contrast and increase, nats."""
    batch, acts = scene.batch, scene.acts
    targets = batch.answer_tokens
    panel = head_map("increase", head_log_prob_increase(acts, targets)[0])
    if scene.has_others:
        against = batch.other_label_tokens
        panel |= head_map("contrast", head_log_prob_increase(acts, targets, against=against)[0])
    return panel


def changed(scene: Scene, heads: Sequence[Head], change: Change) -> Panel:
    """Return the answer after a change of some heads at the last position, and after that of each
    random set.
    """
    batch, make = scene.batch, scene.edit(change)
    head_sets = [list(heads), *random_sets(scene, heads)]
    edits = [[], *([make(head_set)] for head_set in head_sets)]
    cached = scene.rows if change == "removed" else None
    log_probs = score_sets(scene.view, batch, edits, read_labels(batch), cached=cached)[0][0]
    before, after, *draws = scene.outcomes(log_probs)
    return {
        "heads": [str(head) for head in heads],
        "change": change,
        "source": "" if change == "removed" else scene.template.render(scene.source(change)).text,
        "before": before,
        "after": after,
        "draws": draws,
        "controls": controls(scene.view, heads, head_sets[1:]),
        "labels_total": float(log_probs[1, batch.label_mask[0].to(log_probs.device)].exp().sum()),
        "probs": log_probs[1].exp().tolist(),
        "log_probs": log_probs[1].tolist(),
    }


def controls(view: ModelView, heads: Sequence[Head], sets: Sequence[Sequence[Head]]) -> str:
    """Return in words with which random sets chosen heads are compared."""
    n_different = len(set(map(frozenset, sets)))
    in_same_layers = all(layers(random_heads) == layers(heads) for random_heads in sets)
    if len(heads) == 1 and in_same_layers:
        if n_different == view.n_heads - 1:
            return f"the {n_different} other heads of its layer"
        return f"{n_different} random heads of its layer"
    where = "same layers" if in_same_layers else "same or the nearest layers"
    words = f"{len(sets)} random sets of the {where}"
    return f"{words} ({n_different} different)" if n_different < len(sets) else words


def layers(heads: Sequence[Head]) -> list[int]:
    """Return the layers of heads, in order."""
    return sorted(head.layer for head in heads)


def random_sets(scene: Scene, heads: Sequence[Head]) -> list[list[Head]]:
    """Return the random sets of the same layers: those of `ablate_with_controls` with the same
    seed.
    """
    return random_head_sets(scene.view.model, heads, n_random=N_RANDOM_SETS, seed=SEED)


def attention(scene: Scene, heads: Sequence[Head]) -> Panel:
    """Return each head's attention from the last token to the labels; where the last head attends,
    and why.
    """
    head, batch = heads[-1], scene.batch
    n = int(batch.last[0]) + 1
    to_labels = scene.acts.attention_to_labels()[0]
    ranges = zip(batch.label_ranges[0].tolist(), batch.label_index[0].tolist(), strict=True)
    panel: Panel = {
        "heads": list(map(str, heads)),
        "to_labels": [to_labels[chosen_head].tolist() for chosen_head in heads],
        "head": str(head),
        "tokens": list(batch.token_names[0][:n]),
        "weights": scene.acts.pattern[0, head.layer, head.head, :n].tolist(),
        "label_ranges": [[*tokens, label] for tokens, label in ranges if label >= 0],
    }
    try:
        panel["why"] = reasons(scene, head)
    except InputError as error:
        panel["why"] = {"left_out": str(error)}
    return panel


def reasons(scene: Scene, head: Head) -> Panel:
    """Return why a head attends to the answer's labels rather than others; raise InputError if that
    is undefined.
    """
    batch = scene.batch
    target = int(batch.answer[0])
    of_target = batch.label_index[0] == target
    more, less = (
        batch.label_positions[0, mask & (batch.label_positions[0] >= 0)].tolist()
        for mask in (of_target, ~of_target)
    )
    if not more or not less:
        raise InputError(
            "the prompt must show the answer and another label to tell why a head prefers one"
        )
    targets = batch.answer_tokens
    why, _ = attention_reasons(
        scene.written, head, more, less, targets, default_comparison(batch, targets)
    )
    return {
        "difference": why.score_difference,
        "query": list(map(list, why.query)),
        "key": list(map(list, why.key)),
        "because": why.because,
    }


def demonstrations(scene: Scene) -> Panel:
    """Return what the answer loses without each demonstration, and without all, in each way (nats)."""
    lost = demonstration_effects(scene.model, scene.batch)
    by_demonstration, whole = lost.of()
    return {
        "without_all": scene.outcomes(scene.acts.label_log_probs)[0] - float(whole[0, 0]),
        "ways": list(lost.ways),
        "effects": by_demonstration[0].tolist(),
        "whole": whole[0].tolist(),
        "note": f"{BEGINS_TEXT}." if lost.begins_text else "",
    }


def effects(scene: Scene) -> Panel:
    """Return what the answer loses without each head at the last position (nats)."""
    lost = head_effects(scene.model, scene.batch)
    return head_map("effect", (lost.log_odds if scene.has_others else lost.log_prob)[0])


def query_exchanges(scene: Scene) -> Panel:
    """Return what the answer's log-odds lose if each head's query is that of the prompt with the
    other query (nats).
    """
    make = scene.edit("query")
    heads = scene.view.heads()
    log_probs = score(scene.model, scene.batch, [[], *([make([head])] for head in heads)])[0]
    before, *after = scene.outcomes(log_probs)
    lost = before - torch.tensor(after, dtype=torch.float64)
    panel = head_map("exchange", lost.unflatten(0, (scene.view.n_layers, scene.view.n_heads)))
    return panel | {"other_query": scene.source("query").query}


def head_map(by: Score, values: Float[Tensor, "layer head"]) -> Panel:
    """Return a score of all heads as lists, [layer][head], and the names of the heads with the
    largest.
    """
    values = values.double().cpu()
    best = values.flatten().argsort(descending=True)[:N_DESCRIBED].tolist()
    return {
        by: values.tolist(),
        f"{by}_located": [str(Head.from_index(index, values.shape[1])) for index in best],
    }


PANELS = (
    PanelKind("answer", "probabilities", lambda scene, *_: answer(scene), is_required=True),
    PanelKind(
        "heads", "contrasts of all heads", lambda scene, *_: all_heads(scene), is_required=True
    ),
    PanelKind("change", "chosen and random heads", changed, depends_on=("heads", "change")),
    PanelKind(
        "attention",
        "attention",
        lambda scene, heads, _: attention(scene, heads),
        depends_on=("heads",),
    ),
    PanelKind("demonstrations", "demonstrations", lambda scene, *_: demonstrations(scene)),
    PanelKind("effect", "effects of all heads", lambda scene, *_: effects(scene)),
    PanelKind(
        "exchange",
        "exchanged queries of all heads",
        lambda scene, *_: query_exchanges(scene),
        by="exchange",
    ),
)
"""The panels in the order in which they are computed, the quickest first."""
