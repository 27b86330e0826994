"""Measure what each demonstration adds to the answer.

1. `HideDemonstration` hides one demonstration from the last position: its weights, its values, or
   both.
2. `demonstration_effects` scores every prompt with each demonstration hidden, and with all of them
   hidden. Only the last position changes, so that each costs one token. On request, it also leaves
   out each demonstration's text.
3. `DemonstrationEffects` has the effects per prompt, and their means by place and label over a
   task.

Demonstrations keep what later tokens have read of them, unless their text is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from icl_lens.activations.passes import log_probs_in_passes
from icl_lens.attribution.scored_tokens import Against, CheckedAgainst
from icl_lens.edits.edit import Attention, Edit, Stage, of_prompts
from icl_lens.edits.kv_cache import HiddenKeys, LayerRows, per_kv_head
from icl_lens.edits.pattern import without_keys
from icl_lens.engine.prefix_cache import PrefixCache
from icl_lens.engine.score import score_sets
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.intervals import mean_intervals
from icl_lens.measures.effects import OUTCOMES, Outcome, answer_outcomes, outcome_tokens
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.locking import reserves_model
from icl_lens.models.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch
from icl_lens.prompts.prompt import quoted_list
from icl_lens.prompts.tokenize import tokenizer_like
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, interval_texts, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch

Way = Literal["hidden", "keys", "values", "removed"]
WAYS: tuple[Way, ...] = get_args(Way)
BEGINS_TEXT = (
    "The first one begins the text: its effect includes that of the first token, to which many "
    "heads attend by default"
)


@dataclass(frozen=True, eq=False)
class HideDemonstration(Edit):
    """One demonstration, or all of them, hidden from the last position of all heads of the model.

    "hidden": the last position does not attend to its tokens; other tokens get its share of
    attention (attention knockout). This is the sum of two changes of a head's z: "keys" gives its
    share of attention to the other tokens and keeps its values at their weights, "values" omits its
    values and keeps the other tokens' weights.
    """

    demonstration: int | None
    """Its place in the prompt; None for all demonstrations."""
    way: Way = "hidden"
    _tokens: Bool[Tensor, "prompt pos"] | None = None
    heads = ()

    def __post_init__(self) -> None:
        """All heads of the model are edited (`by_layer`)."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage.pattern,)

    @property
    def what(self) -> str:
        return "without a demonstration"

    @property
    def needs_batch(self) -> bool:
        return True

    def is_only_last(self, batch: PromptBatch) -> bool:
        return True

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        tokens = demonstration_tokens(batch)
        every = tokens.any(1)
        return [
            replace(
                edit, _tokens=every if edit.demonstration is None else tokens[:, edit.demonstration]
            )
            for edit in edits
        ]

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        heads = [*range(view.n_heads)]
        return dict.fromkeys(range(view.n_layers), heads)

    @property
    def flags(self) -> tuple[bool, bool]:
        """Whether weights and values are hidden."""
        return self.way != "values", self.way != "keys"

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        assert self._tokens is not None
        pattern, device = attention.pattern, attention.pattern.device
        row, last = attention.last_queries
        indices = torch.tensor(attention.indices_of(heads), device=device)
        at = row[:, None], indices, last[:, None]
        intact = pattern[at]  # row head key
        tokens = of_prompts(self._tokens.to(device), attention.prompt)[:, : pattern.shape[-1]]
        keys = functional.pad(tokens, (0, pattern.shape[-1] - tokens.shape[1]))[:, None]
        flags = (torch.tensor(flag, device=device) for flag in self.flags)
        without = without_keys(intact, keys, has_sink=attention.has_sink)
        pattern[at] = HiddenKeys(keys, *flags).change(intact, without)

    @staticmethod
    def write_rows(
        z: Float[Tensor, "batch row head d_head"],
        members: Sequence[tuple[int, "HideDemonstration", list[int]]],
        layer: int,
        rows: LayerRows,
    ) -> None:
        """Write z of all rows with a hidden demonstration; they attend together."""
        cache, own = rows.cache, [row for row, _, _ in members]
        tokens = torch.stack(
            [of_prompts(_tokens(one), rows.prompt) for _, one, _ in members], dim=1
        )
        flags = torch.tensor([one.flags for _, one, _ in members], device=z.device).T
        hidden = HiddenKeys(tokens[..., : cache.k.shape[2]].to(z.device), *flags)
        k, v = (per_kv_head(x, cache.k.shape[1])[:, own] for x in (rows.k, rows.v))
        z[:, own] = cache.attend(rows.q[:, own], k, v, hidden).to(z)


def _tokens(edit: HideDemonstration) -> Bool[Tensor, "prompt pos"]:
    assert edit._tokens is not None
    return edit._tokens


def demonstration_tokens(batch: PromptBatch) -> Bool[Tensor, "batch demo pos"]:
    """Return which tokens belong to each demonstration."""
    start, end = batch.demonstration_ranges[..., :1], batch.demonstration_ranges[..., 1:]
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (position >= start) & (position < end) & (start >= 0)


@dataclass(frozen=True, repr=False)
class DemonstrationEffects(Result):
    """What the answer loses without each demonstration, nats; positive where the demonstration
    helps.

    `log_odds` is the drop in log p(target) − log Σ p(against), `log_prob` that in log p(target).
    `ways` says how demonstrations are left out: "hidden", "keys" and "values" from what the last
    position reads, "removed" from the text (see `demonstration_effects`). NaN where a prompt has
    fewer demonstrations, or nothing to compare with.

    Example:
        >>> effects = il.demonstration_effects(model, batch)
        >>> effects.log_odds.shape, effects.ways
        (torch.Size([1, 4, 3]), ('hidden', 'keys', 'values'))
        >>> effects.to_frame().columns[:4].tolist()
        ['text', 'label', 'hidden', 'keys']
    """

    log_odds: Float[Tensor, "batch demo way"]
    log_prob: Float[Tensor, "batch demo way"]
    whole_log_odds: Float[Tensor, "batch way"]
    """Drop without all demonstrations at once, which need not be the sum over them; NaN for
    "removed".
    """
    whole_log_prob: Float[Tensor, "batch way"]
    ways: tuple[Way, ...]
    texts: tuple[tuple[str, ...], ...]
    """The text of each demonstration."""
    labels: tuple[tuple[str, ...], ...]
    answers: tuple[str, ...]
    """The answer of each prompt; "" if it has none."""
    queries: tuple[str, ...]
    """The query of each prompt; intervals resample them."""
    begins_text: bool = False
    """Whether the first demonstration begins a text, with the token that heads attend to when they
    look for nothing.
    """
    fallback_reason: str = ""
    """Why whole passes were run instead of one token per demonstration; empty if they were not."""
    edits: tuple[str, ...] = ()
    """What else edited the model throughout: open `with` blocks, and other hooks."""

    def of(self, outcome: Outcome | None = None) -> tuple[Tensor, Tensor]:
        """Return effects of demonstrations [batch demo way] and of all at once [batch way] on an
        outcome, nats.

        By default, it is the log-odds, or log p if no prompt has them.
        """
        has_odds = not bool(self.log_odds.isnan().all())
        if (outcome or "log_odds") == "log_odds" and has_odds:
            return self.log_odds, self.whole_log_odds
        if outcome == "log_odds":
            raise InputError("outcome='log_odds' requires tokens to compare with; pass against=")
        return self.log_prob, self.whole_log_prob

    def to_frame(self, *, outcome: Outcome | None = None) -> pd.DataFrame:
        """Return one row per prompt and demonstration: text, label, the effect in each way (nats),
        prompt and place.
        """
        effects, _ = self.of(outcome)
        rows = [
            {
                "text": text,
                "label": label,
                "prompt": prompt,
                "place": place,
                "is_answer": label == self.answers[prompt],
            }
            | dict(zip(self.ways, effects[prompt, place].tolist(), strict=True))
            for prompt, (texts, labels) in enumerate(zip(self.texts, self.labels, strict=True))
            for place, (text, label) in enumerate(zip(texts, labels, strict=True))
        ]
        return columns_first(pd.DataFrame(rows), "text", "label", *self.ways)

    def by_place(self, *, outcome: Outcome | None = None) -> pd.DataFrame:
        """Return the mean over prompts at each place, for demonstrations of the answer's class and
        of others.

        One row per place, class ("answer", "other", "both"; "other" alone if no answer is shown)
        and way: mean, low and high (95% bootstrap interval over queries, NaN for a single one) and
        n, the number of prompts. Places differ where order matters. Below them, the rows of place
        "sum" and "all at once" add all demonstrations up, and leave all out together.
        """
        effects, whole = (one.double().cpu() for one in self.of(outcome))
        exists = ~effects.isnan().all(-1)
        is_answer = torch.zeros_like(exists)
        for row, (labels, answer) in enumerate(zip(self.labels, self.answers, strict=True)):
            is_answer[row, : len(labels)] = torch.tensor([label == answer for label in labels])
        rows = []
        for place in range(effects.shape[1]):
            kinds = {
                "answer": is_answer[:, place],
                "other": ~is_answer[:, place],
                "both": exists[:, place],
            }
            if not bool(is_answer.any()):  # answers of their own, such as capitals
                kinds = {"other": exists[:, place]}
            for kind, chosen in kinds.items():
                rows += self._means(
                    effects[:, place],
                    chosen & exists[:, place],
                    place=place + 1,
                    demonstrations=kind,
                )
        is_defined = exists.any(1)  # a prompt without anything to compare with has no log-odds
        for place, values in (("sum", effects.nansum(1)), ("all at once", whole)):
            rows += self._means(values, is_defined, place=place, demonstrations="both")
        return pd.DataFrame(rows)

    def _means(
        self, values: Float[Tensor, "batch way"], chosen: Bool[Tensor, " batch"], **about: Any
    ) -> list[Any]:
        chosen = chosen & ~values.isnan().all(-1)
        if not bool(chosen.any()):
            return []
        queries = [
            query
            for query, is_chosen in zip(self.queries, chosen.tolist(), strict=True)
            if is_chosen
        ]
        mean, low, high = mean_intervals(values[chosen].numpy(), queries)
        return [
            {
                **about,
                "way": way,
                "mean": mean[i],
                "low": low[i],
                "high": high[i],
                "n": len(queries),
            }
            for i, way in enumerate(self.ways)
            if mean[i] == mean[i]
        ]

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        outcome = "log p" if self.of()[0] is self.log_prob else "log-odds"
        lost = f"nats of {outcome} that the answer loses without each demonstration"
        title = f"DemonstrationEffects, {lost}{edits_suffix(self.edits)}"
        title += f"\n{BEGINS_TEXT}" * (self.begins_text and self.ways != ("values",))
        if len(self.queries) > 1:
            table = self.by_place()
            table = pd.DataFrame(table[table["way"] == self.ways[0]])
            columns: dict[str, list[Any]] = {
                "place": table["place"].astype(str).tolist(),
                "class": table["demonstrations"].tolist(),
                "lost": list(map(signed, table["mean"])),
                "95% interval": interval_texts(table),
                "prompts": table["n"].tolist(),
            }
            title += f"\nMean over {plural_prompts(len(self.queries))}, {self.ways[0]}"
            title += " (by_place() has all ways):" if len(self.ways) > 1 else ":"
            return table_view(title, columns, len(table))
        table, (effects, whole) = self.to_frame(), self.of()
        strongest = table[self.ways[0]].abs().argsort().iloc[::-1][: SHOWN_ROWS - 2].sort_values()
        shown = table.iloc[strongest]
        columns = {
            name: [*shown[name], *last]
            for name, last in (("text", ["sum", "all at once"]), ("label", ["", ""]))
        }
        for i, way in enumerate(self.ways):
            columns[way] = [
                *map(signed, [*shown[way], float(effects[0, :, i].nansum()), float(whole[0, i])])
            ]
        return table_view(title, columns, len(table) + 2)


@reserves_model
def demonstration_effects(
    model: Any,
    batch: PromptBatch,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    against: Against = None,
    ways: Sequence[Way] = ("hidden", "keys", "values"),
    pass_tokens: int = PASS_TOKENS,
    progress: bool | None = None,
) -> DemonstrationEffects:
    """Return what the answer loses without each demonstration, exactly.

    `ways` are how it is left out. The first three change what the last position reads, in all heads
    and layers:

    - "hidden": no attention to the demonstration's tokens; the others get its share (attention
      knockout).
    - "keys": the others get its share of attention, but its values are still read. This is what a
      demonstration does by attracting attention.
    - "values": its values are not read, and the others keep their weights. This is what it does by
      what it says.
    - "removed": the prompt is run without the demonstration's text, so that positions shift.

    In each head, "keys" and "values" add up to "hidden"; through later layers, they need not. A
    demonstration is all its tokens up to the next one, or the query. Later demonstrations keep what
    they have read of it, unless its text is removed. `targets` and `against` are those of
    `head_effects`.

    Heads that look for nothing attend to the first token of the text. Begin the text with something
    else than a demonstration (`Template(prefix=…)`, `prepend_bos=True`), or the first demonstration
    has the effect of this token.

    The first three ways cost one pass over the prompts, and each a token per demonstration;
    "removed" costs a pass per demonstration. If this takes longer than two seconds, a terminal or
    notebook shows a progress bar, unless `progress` is False. Raise InputError for prompts without
    demonstrations, unknown ways, and invalid targets.

    Example:
        >>> effects = il.demonstration_effects(model, batch)
        >>> effects.to_frame()[["text", "label"]].values.tolist()[:2]
        [['love', 'bar'], ['like', 'bar']]
        >>> il.demonstration_effects(model, batch, ways=["removed"]).log_odds.shape
        torch.Size([1, 4, 1])
    """
    with progress_switch(progress):
        return effects_of_demonstrations(
            model, batch, targets, against=against, ways=ways, pass_tokens=pass_tokens
        )


def effects_of_demonstrations(
    model: Any,
    batch: PromptBatch,
    targets: Int[Tensor, " batch"] | None,
    *,
    against: Against,
    ways: Sequence[Way] = ("hidden", "keys", "values"),
    pass_tokens: int = PASS_TOKENS,
    cached: PrefixCache | None = None,
) -> DemonstrationEffects:
    """Return `demonstration_effects`, from a cache of the batch if there is one already."""
    view = ModelView.of(model)
    check_batch(batch)
    batch.require_demonstrations(
        "demonstration to leave out", "pass prompts with demonstrations (il.tokenize)"
    )
    if isinstance(ways, str) or not ways:
        raise InputError(f"ways must be a list of {quoted_list(WAYS)}, got {short_repr(ways)}")
    for way in ways:
        check_choice("ways", way, WAYS)
    chosen: tuple[Way, ...] = tuple(way for way in WAYS if way in ways)
    targets, others = outcome_tokens(view, batch, targets, against)
    hiding: list[Way] = [way for way in chosen if way != "removed"]
    n = batch.label_positions.shape[1]
    edits = [HideDemonstration(place, way) for place in [*range(n), None] for way in hiding]
    found, reason = score_sets(
        view,
        batch,
        [[], *([edit] for edit in edits)],
        lambda log_probs, prompts: answer_outcomes(log_probs, targets, others, prompts),
        pass_tokens=pass_tokens,
        cached=cached,
    )
    without = found[:, 1:].reshape(
        len(batch), n + 1, len(hiding), len(OUTCOMES)
    )  # the last: all at once
    if "removed" in chosen:
        texts = _removed_texts(model, batch, targets, others).to(found)
        without = torch.cat(
            [without, functional.pad(texts, (0, 0, 0, 1), value=torch.nan)[:, :, None]], dim=2
        )
    missing = (batch.demonstration_ranges[..., 0] < 0).to(found.device)
    drops = found[:, :1, None] - without
    effects, whole = drops[:, :-1].masked_fill(missing[..., None, None], torch.nan), drops[:, -1]
    return DemonstrationEffects(
        log_odds=effects[..., 1],
        log_prob=effects[..., 0],
        whole_log_odds=whole[..., 1],
        whole_log_prob=whole[..., 0],
        ways=chosen,
        texts=tuple(tuple(one.text for one in prompt.demonstrations) for prompt in batch.prompts),
        labels=tuple(tuple(one.label for one in prompt.demonstrations) for prompt in batch.prompts),
        answers=tuple(prompt.answer or "" for prompt in batch.prompts),
        queries=batch.queries,
        fallback_reason=reason,
        begins_text=bool((batch.demonstration_ranges[:, 0, 0] == 0).any()),
        edits=active_edits(view),
    )


def _removed_texts(
    model: Any, batch: PromptBatch, targets: Int[Tensor, " batch"], against: CheckedAgainst
) -> Float[Tensor, "batch demo outcome"]:
    """Return the outcomes of the prompts without the text of each demonstration; NaN where there is
    none.
    """
    tokenized = tokenizer_like(model, batch)
    found = torch.full(
        (*batch.label_positions.shape, len(OUTCOMES)), torch.nan, dtype=torch.float64
    )
    for place in range(batch.label_positions.shape[1]):
        rows = [
            row for row, prompt in enumerate(batch.prompts) if place < len(prompt.demonstrations)
        ]
        shown = [batch.prompts[row].demonstrations for row in rows]
        prompts = [
            replace(batch.prompts[row], demonstrations=own[:place] + own[place + 1 :])
            for row, own in zip(rows, shown, strict=True)
        ]
        log_probs = log_probs_in_passes(model, tokenized(prompts, rows))
        found[rows, place] = answer_outcomes(log_probs, targets, against, torch.tensor(rows)).to(
            found
        )
    return found
