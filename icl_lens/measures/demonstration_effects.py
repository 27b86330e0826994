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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from icl_lens.edits.edit import Attention, Edit, Stage, of_prompts
from icl_lens.edits.one_token_rows.layer_attention import HiddenKeys, LayerRows, per_kv_head
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache
from icl_lens.edits.recomputed_patterns import without_keys
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError, check_choice, quoted_list, short_repr
from icl_lens.foundation.intervals import mean_intervals
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.passes.locking import reserves_model
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_demonstrations
from icl_lens.prompts.tokenize import tokenizer_like
from icl_lens.reading.last_logits import log_probs_in_passes
from icl_lens.reading.scored_tokens import OUTCOMES, Against, AnswerTokens, Outcome
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
    stages = (Stage.pattern,)
    positions = "last"
    description = "without a demonstration"
    needs_batch = True

    def __post_init__(self) -> None:
        """All heads of the model are edited (`by_layer`)."""

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        tokens_by_place = demonstration_tokens(batch)
        tokens_of_all = tokens_by_place.any(1)
        prepared = []
        for edit in edits:
            tokens = tokens_of_all
            if edit.demonstration is not None:
                tokens = tokens_by_place[:, edit.demonstration]
            prepared.append(replace(edit, _tokens=tokens))
        return prepared

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
        by_weight, by_value = torch.tensor(self.flags, device=device)
        without = without_keys(intact, keys, has_sink=attention.has_sink)
        pattern[at] = HiddenKeys(keys, by_weight, by_value).change(intact, without)

    @staticmethod
    def write_rows(
        z: Float[Tensor, "batch row head d_head"],
        members: Sequence[tuple[int, "HideDemonstration", list[int]]],
        layer: int,
        rows: LayerRows,
    ) -> None:
        """Write z of all rows with a hidden demonstration, whose attention is computed at once.

        `members` are the rows, their edits and the edited heads, which are all.
        """
        cache = rows.cache
        edited_rows = []
        tokens = []
        flags = []
        for row, edit, _ in members:
            edited_rows.append(row)
            tokens.append(of_prompts(_tokens(edit), rows.prompt))
            flags.append(edit.flags)
        hidden_tokens = torch.stack(tokens, dim=1)[..., : cache.k.shape[2]].to(z.device)
        by_weight, by_value = torch.tensor(flags, device=z.device).T
        hidden = HiddenKeys(hidden_tokens, by_weight, by_value)
        k, v = (per_kv_head(x, cache.k.shape[1])[:, edited_rows] for x in (rows.k, rows.v))
        z[:, edited_rows] = cache.attend(rows.q[:, edited_rows], k, v, hidden).to(z)


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
    """What the answer loses without each demonstration, nats; positive where it helps.

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
    """Drop without all demonstrations at once, not always the sum over them; NaN for "removed"."""
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
    """Whether the first demonstration begins a text.

    Heads attend to the first token of a text when they look for nothing.
    """
    fallback_reason: str = ""
    """Why whole passes were run instead of one token per demonstration; empty if they were not."""
    edits: tuple[str, ...] = ()
    """What else edited the model throughout: open `with` blocks, and other hooks."""

    def of(self, outcome: Outcome | None = None) -> tuple[Tensor, Tensor]:
        """Return what an outcome loses, nats: without each demonstration, and without all at once.

        The axes are [batch demo way] and [batch way].
        By default, it is the log-odds, or log p if no prompt has them.
        """
        has_odds = not bool(self.log_odds.isnan().all())
        if (outcome or "log_odds") == "log_odds" and has_odds:
            return self.log_odds, self.whole_log_odds
        if outcome == "log_odds":
            raise InputError("outcome='log_odds' requires tokens to compare with; pass against=")
        return self.log_prob, self.whole_log_prob

    def to_frame(self, *, outcome: Outcome | None = None) -> pd.DataFrame:
        """Return one row per prompt and demonstration.

        The columns are text, label, the effect in each way (nats), prompt, place (1 for the first
        demonstration, as in `by_place`) and is_answer.
        """
        effects, _ = self.of(outcome)
        rows = []
        for prompt, (texts, labels) in enumerate(zip(self.texts, self.labels, strict=True)):
            for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
                row = {"text": text, "label": label, "prompt": prompt, "place": index + 1}
                row["is_answer"] = label == self.answers[prompt]
                row |= dict(zip(self.ways, effects[prompt, index].tolist(), strict=True))
                rows.append(row)
        return columns_first(pd.DataFrame(rows), "text", "label", *self.ways)

    def by_place(self, *, outcome: Outcome | None = None) -> pd.DataFrame:
        """Return mean effects at each place, of demonstrations of the answer's class and others.

        One row per place, class ("answer", "other", "both"; "other" alone if no answer is shown)
        and way: mean, low and high (95% bootstrap interval over queries, NaN for a single one) and
        n, the number of prompts. Places differ where order matters. Below them, the rows of place
        "sum" and "all at once" add all demonstrations up, and leave all out together.
        """
        effects, whole = (values.double().cpu() for values in self.of(outcome))
        exists = ~effects.isnan().all(-1)
        is_answer = self._is_answer()
        rows = []
        for place in range(effects.shape[1]):
            classes = {"other": exists[:, place]}  # answers of their own, such as capitals
            if bool(is_answer.any()):
                classes = {
                    "answer": is_answer[:, place],
                    "other": ~is_answer[:, place],
                    "both": exists[:, place],
                }
            for name, in_class in classes.items():
                prompts = in_class & exists[:, place]
                means = self._means(effects[:, place], prompts)
                rows += [{"place": place + 1, "demonstrations": name} | row for row in means]
        is_defined = exists.any(1)  # a prompt without anything to compare with has no log-odds
        for name, values in (("sum", effects.nansum(1)), ("all at once", whole)):
            means = self._means(values, is_defined)
            rows += [{"place": name, "demonstrations": "both"} | row for row in means]
        return pd.DataFrame(rows)

    def _is_answer(self) -> Bool[Tensor, "batch demo"]:
        """Return which demonstrations have the label that is the prompt's answer."""
        is_answer = torch.zeros(self.log_prob.shape[:2], dtype=torch.bool)
        for row, (labels, answer) in enumerate(zip(self.labels, self.answers, strict=True)):
            is_answer[row, : len(labels)] = torch.tensor([label == answer for label in labels])
        return is_answer

    def _means(
        self, values: Float[Tensor, "batch way"], prompts: Bool[Tensor, " batch"]
    ) -> list[dict[str, Any]]:
        """Return the mean over some of the prompts in each way: way, mean, low, high and n."""
        prompts = prompts & ~values.isnan().all(-1)
        if not bool(prompts.any()):
            return []
        queries = list(compress(self.queries, prompts.tolist()))
        means, lows, highs = mean_intervals(values[prompts].numpy(), queries)
        rows = []
        for way, mean, low, high in zip(self.ways, means, lows, highs, strict=True):
            if not math.isnan(mean):
                rows.append({"way": way, "mean": mean, "low": low, "high": high, "n": len(queries)})
        return rows

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        outcome = "log p" if self.of()[0] is self.log_prob else "log-odds"
        lost = f"nats of {outcome} that the answer loses without each demonstration"
        title = f"DemonstrationEffects, {lost}{edits_suffix(self.edits)}"
        if self.begins_text and self.ways != ("values",):
            title += f"\n{BEGINS_TEXT}"
        if len(self.queries) > 1:
            return self._view_of_means(title)
        return self._view_of_prompt(title)

    def _view_of_means(self, title: str) -> View:
        """Return the table of means by place, in the first way."""
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
        return table_view(title, columns, len(table), full_table="by_place()")

    def _view_of_prompt(self, title: str) -> View:
        """Return the table of the only prompt's strongest demonstrations, in all ways."""
        table = self.to_frame()
        effects, whole = self.of()
        n_rows = SHOWN_ROWS - 2  # two rows are for the sum, and for all at once
        strongest_first = table[self.ways[0]].abs().argsort().iloc[::-1]
        strongest = table.iloc[strongest_first[:n_rows].sort_values()]
        columns: dict[str, list[Any]] = {
            "text": [*strongest["text"], "sum", "all at once"],
            "label": [*strongest["label"], "", ""],
        }
        for index, way in enumerate(self.ways):
            total, at_once = float(effects[0, :, index].nansum()), float(whole[0, index])
            columns[way] = list(map(signed, [*strongest[way], total, at_once]))
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
    require_demonstrations(
        batch, "demonstration to leave out", "pass prompts with demonstrations (il.tokenize)"
    )
    ordered_ways = _checked_ways(ways)
    tokens = AnswerTokens.from_batch(view, batch, targets, against)
    hiding: list[Way] = [way for way in ordered_ways if way != "removed"]
    n_demonstrations = batch.label_positions.shape[1]
    sets: list[list[HideDemonstration]] = [[]]
    for place in [*range(n_demonstrations), None]:  # the last: all at once
        sets += [[HideDemonstration(place, way)] for way in hiding]
    outcomes, reason = score_sets(
        view, batch, sets, tokens.outcomes, pass_tokens=pass_tokens, cached=cached
    )
    shape = len(batch), n_demonstrations + 1, len(hiding), len(OUTCOMES)
    without = outcomes[:, 1:].reshape(shape)
    if "removed" in ordered_ways:
        without_texts = _outcomes_without_texts(model, batch, tokens).to(outcomes)
        # No prompt is left without all its demonstrations.
        without_texts = functional.pad(without_texts, (0, 0, 0, 1), value=torch.nan)
        without = torch.cat([without, without_texts[:, :, None]], dim=2)
    is_missing = (batch.demonstration_ranges[..., 0] < 0).to(outcomes.device)
    lost = outcomes[:, :1, None] - without
    effects = lost[:, :-1].masked_fill(is_missing[..., None, None], torch.nan)
    log_prob, log_odds = effects.unbind(-1)
    whole_log_prob, whole_log_odds = lost[:, -1].unbind(-1)
    texts = []
    labels = []
    for prompt in batch.prompts:
        texts.append(tuple(demonstration.text for demonstration in prompt.demonstrations))
        labels.append(tuple(demonstration.label for demonstration in prompt.demonstrations))
    return DemonstrationEffects(
        log_odds=log_odds,
        log_prob=log_prob,
        whole_log_odds=whole_log_odds,
        whole_log_prob=whole_log_prob,
        ways=ordered_ways,
        texts=tuple(texts),
        labels=tuple(labels),
        answers=tuple(prompt.answer or "" for prompt in batch.prompts),
        queries=batch.queries,
        fallback_reason=reason,
        begins_text=bool((batch.demonstration_ranges[:, 0, 0] == 0).any()),
        edits=active_edits(view),
    )


def _checked_ways(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Return ways in the order of `WAYS`; raise InputError for unknown ones, or none."""
    if isinstance(ways, str) or not ways:
        raise InputError(f"ways must be a list of {quoted_list(WAYS)}, got {short_repr(ways)}")
    for way in ways:
        check_choice("ways", way, WAYS)
    return tuple(way for way in WAYS if way in ways)


def _outcomes_without_texts(
    model: Any, batch: PromptBatch, tokens: AnswerTokens
) -> Float[Tensor, "batch demo outcome"]:
    """Return the outcomes of the prompts without each demonstration's text; NaN without one."""
    tokenize_like_batch = tokenizer_like(model, batch)
    shape = *batch.label_positions.shape, len(OUTCOMES)
    outcomes = torch.full(shape, torch.nan, dtype=torch.float64)
    for place in range(batch.label_positions.shape[1]):
        rows = []
        shortened = []
        for row, prompt in enumerate(batch.prompts):
            if place < len(prompt.demonstrations):
                left = prompt.demonstrations[:place] + prompt.demonstrations[place + 1 :]
                rows.append(row)
                shortened.append(replace(prompt, demonstrations=left))
        log_probs = log_probs_in_passes(model, tokenize_like_batch(shortened, rows))
        outcomes[rows, place] = tokens.outcomes(log_probs, torch.tensor(rows)).to(outcomes)
    return outcomes
