"""The atlas of a model's heads: one row a head, one column a score."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.analyses.atlas.definitions import (
    DEFINITIONS,
    EDITING_SCORES,
    Samples,
    ScoreDefinition,
)
from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.analyses.atlas.kind_reasons import closest_kind, outranked, why_not
from icl_lens.analyses.atlas.kinds import (
    OTHER_HEADS_KINDS,
    PROMPT_KINDS,
    RATE,
    TURNED_KINDS,
)
from icl_lens.analyses.atlas.published import PublishedHeads
from icl_lens.analyses.atlas.stored_scores import GivenScores, given_scores, read_scores
from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.files import write_text
from icl_lens.foundation.intervals import MIN_CLUSTERS
from icl_lens.measures.controlled_ablation_result import nats_text, points_text
from icl_lens.measures.joint_removal import ListRemoval
from icl_lens.metrics import spearman
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import AnyHead, Head, as_head, head_tuple
from icl_lens.result.base import Result
from icl_lens.result.number_format import decimal, interval_text, joined, percent, signed
from icl_lens.result.tables import (
    columns_first,
    csv_text,
    json_records,
    long_frame,
    plural_prompts,
)
from icl_lens.result.view import Column, HeadValues, Section, View

N_FIRST = 3
"""Heads that a table shows of each score."""
HEADS_A_TABLE = 3
"""Heads whose scores fit side by side in a terminal."""
Q_VALUE = "q is the share of mistakes to expect if all heads with so small a p-value had the kind."
NO_HEADS = "heads must name at least one head, e.g. L1H2; omit it for an atlas of all heads"
N_PAIRS = 8
"""Pairs of scores that a table shows of those that agree most, and of those that agree least."""


@dataclass(frozen=True, repr=False)
class HeadAtlas(Result):
    """Scores of every head of a model, side by side; made by `il.head_atlas`.

    Example:
        >>> atlas = il.head_atlas(model, n_sequences=8)
        >>> list(atlas.scores)[:3], atlas.to_frame().shape[0]
        (['previous_token', 'duplicate_token', 'induction'], 48)
        >>> "contrast" in atlas.scores, atlas.left_out["contrast"]
        (False, 'it needs prompts of an in-context task')
    """

    model: str
    scores: dict[str, HeadScore]
    """By name, in the order of `definitions.DEFINITIONS`; those of files come last."""
    left_out: dict[str, str]
    """Scores that the model or the prompts cannot have, and why."""
    k: int
    """The number of heads that `selected` refers to."""
    untested: dict[str, str] = field(default_factory=dict)
    """Kinds whose score the atlas has, but which could not be tested, and why."""
    n_prompts: int = 0
    n_queries: int = 0
    """Number of distinct queries, which the intervals resample."""
    n_edited: int = 0
    """Number of prompts, the first ones, on which heads were edited one by one."""
    rate: float = RATE
    """The rate of false discoveries at which heads have a kind."""
    removals: dict[str, ListRemoval] = field(default_factory=dict)
    """What the answer loses without the first `k` heads by each score, on held-out prompts, beside
    random heads of the same layers; empty without held-out prompts.
    """
    n_held_out: int = 0
    """Number of held-out prompts."""
    n_shared_queries: int = 0
    """Number of queries of held-out prompts that the scores were measured on, too."""
    heads: tuple[Head, ...] = ()
    """The heads that were asked about: what is shown begins with them. Empty for all heads."""
    n_listed: int = N_FIRST
    """Heads that the table of first heads shows of each score."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks."""

    def __getitem__(self, name: str) -> HeadScore:
        """Return a score by its name; raise InputError for a score that the atlas does not have."""
        if name in self.scores:
            return self.scores[name]
        if name in self.left_out:
            raise InputError(f"the atlas has no score {name!r}: {self.left_out[name]}")
        raise InputError(
            f"score must be one of {', '.join(self.scores)}, got {short_repr(name)}; see "
            "docs/howto/atlas.md"
        )

    def __iter__(self) -> Iterator[HeadScore]:
        """Iterate over the scores."""
        return iter(self.scores.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of layers and of heads in a layer."""
        n_layers, n_heads = next(iter(self)).mean.shape
        return n_layers, n_heads

    @property
    def n_heads(self) -> int:
        """The number of heads of the model."""
        return math.prod(self.shape)

    @cached_property
    def kinds(self) -> dict[str, list[Head]]:
        """The heads of each kind that was tested, those with the largest scores first.

        Of the heads of a kind, at most the share `rate` is expected to have it by mistake.
        """
        return {
            score.kind: score.heads_of_kind(self.rate)
            for score in self
            if score.p_value is not None
        }

    @cached_property
    def kinds_by_head(self) -> dict[Head, list[str]]:
        """The kinds of each head that has any: heads with most kinds first, then those that stand
        higher among the heads of a kind.
        """
        kinds_of_head: dict[Head, list[str]] = {}
        best_place: dict[Head, int] = {}
        for kind, heads in self.kinds.items():
            for place, head in enumerate(heads):
                kinds_of_head.setdefault(head, []).append(kind)
                best_place[head] = min(place, best_place.get(head, place))

        def order(head: Head) -> tuple[int, int, Head]:
            return -len(kinds_of_head[head]), best_place[head], head

        return {head: kinds_of_head[head] for head in sorted(kinds_of_head, key=order)}

    def to_frame(self) -> pd.DataFrame:
        """Return one row a head, in the order of layers: name, kinds (joined by commas), one column
        for the mean of each score, layer and head. `atlas[name].to_frame()` has the intervals of a
        score.
        """
        first = next(iter(self))
        frame = long_frame(first.mean, ("layer", "head"), value=first.name)
        kinds_of_head, n_heads = self.kinds_by_head, self.shape[1]
        frame["kinds"] = [
            ", ".join(kinds_of_head.get(Head.from_index(row, n_heads), [])) for row in frame.index
        ]
        for score in self:
            frame[score.name] = score.mean.flatten().numpy()
        return columns_first(frame, "name", "kinds", *self.scores)

    def to_csv(self, path: str | Path) -> None:
        """Write `to_frame()` as csv, which `with_scores` reads. Raise InputError if the folder is
        not writable.
        """
        write_text(path, csv_text(self.to_frame()))

    def with_scores(self, scores: str | Path | GivenScores | PublishedHeads) -> "HeadAtlas":
        """Return the atlas with the scores of a file as further columns, such as published lists.

        The file is a csv table with the columns layer, head and scores, a JSON list of `[layer,
        head, score]` or of objects with these, or a JSON object from heads ("22-0") to scores or
        lists of scores; docs/howto/atlas.md lists whose files these are. Instead of a file, pass
        the scores by name, each as a tensor [layer head] or as rows (layer, head, score), or a list
        that `il.published_heads` returns.

        A name that the atlas has already gets the name of the file, or "given", in front. Heads
        that are not listed have NaN. Raise InputError if the atlas has that name, too, or has the
        published list already, for a file that has no such scores, and for heads that the model
        does not have.

        Example:
            >>> atlas = il.head_atlas(model, n_sequences=2)
            >>> joined = atlas.with_scores({"published": [(5, 0, 0.06), (2, 3, 0.05)]})
            >>> joined["published"].top(3)
            [L5H0, L2H3]
        """
        over: Samples
        if isinstance(scores, PublishedHeads):
            source, definition_text, over = scores.source, scores.definition, "published"
            prefix, columns = "", {scores.name: scores.scores}
        elif isinstance(scores, str | Path):
            source, definition_text, over = Path(scores).name, "Read from a file.", "file"
            prefix, columns = Path(scores).stem, read_scores(scores)
        else:
            source, definition_text, over = "given", "Not measured here.", "given"
            prefix, columns = "given", given_scores(scores)
        added: dict[str, HeadScore] = {}
        for name, numbers in columns.items():
            if name in self.scores and prefix:
                name = f"{prefix}_{name}"
            if name in self.scores or name in added:
                raise InputError(
                    f"the atlas has a score {name!r} already; pass these scores under another name"
                )
            definition = ScoreDefinition(
                name,
                name.replace("_", " "),
                definition_text,
                source,
                "",
                over,
                "none",
            )
            added[name] = HeadScore.of(definition, self._placed(numbers, source))
        return replace(self, scores=self.scores | added)

    def _placed(self, numbers: Mapping[Head, float], source: str) -> Float[Tensor, "layer head"]:
        """Return numbers of heads as a map; raise InputError for heads that the model does not have."""
        n_layers, n_heads = self.shape
        mean = torch.full(self.shape, torch.nan, dtype=torch.float64)
        for head, number in numbers.items():
            if not (0 <= head.layer < n_layers and 0 <= head.head < n_heads):
                raise InputError(
                    f"{source!r} must list heads of {self.model}, which has {n_layers} layers of "
                    f"{n_heads} heads, got {head}; pass scores of the same model"
                )
            mean[head] = number
        return mean

    def agreements(self) -> pd.DataFrame:
        """Return how far all pairs of scores agree: first, second, spearman (rank correlation over
        the heads that have both), shared (heads among the first `k` of both) and expected (shared
        by two random lists): one row a pair, the highest correlations first.

        Example:
            >>> il.head_atlas(model, n_sequences=2).agreements().columns.tolist()
            ['first', 'second', 'spearman', 'shared', 'expected']
        """
        rows = []
        for first, second in combinations(self, 2):
            has_both = ~(first.mean.isnan() | second.mean.isnan())
            correlation = spearman(first.mean[has_both].double(), second.mean[has_both].double())
            lists = [set(score.top(self.k)) for score in (first, second)]
            rows.append(
                {
                    "first": first.name,
                    "second": second.name,
                    "spearman": float(correlation),
                    "shared": len(lists[0] & lists[1]),
                    "expected": len(lists[0]) * len(lists[1]) / self.n_heads,
                }
            )
        columns = ["first", "second", "spearman", "shared", "expected"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.sort_values("spearman", ascending=False, kind="stable", ignore_index=True)

    def removal_frame(self) -> pd.DataFrame:
        """Return what the answer loses on held-out prompts without the first `k` heads by each score:
        score, lost, low, high (95% interval), random (lost without random heads of the same layers),
        random_low, random_high, difference, difference_low, difference_high, unit and heads, the
        largest losses first. Empty without held-out prompts.

        Example:
            >>> columns = il.head_atlas(model, n_sequences=2).removal_frame().columns.tolist()
            >>> columns[:5]
            ['score', 'lost', 'low', 'high', 'random']
        """
        rows = []
        for name, removal in self.removals.items():
            heads = " ".join(map(str, removal.heads))
            ends = (*removal.lost, *removal.lost_by_random, *removal.difference)
            rows.append((name, *ends, removal.unit, heads))
        columns = ["score", "lost", "low", "high", "random", "random_low", "random_high"]
        columns += ["difference", "difference_low", "difference_high", "unit", "heads"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.sort_values("lost", ascending=False, kind="stable", ignore_index=True)

    def row(self, head: AnyHead) -> dict[str, float]:
        """Return the scores of one head by name; raise InputError for an unknown head.

        Example:
            >>> list(il.head_atlas(model, n_sequences=2).row("L2H0"))[:2]
            ['previous_token', 'duplicate_token']
        """
        head = self._check_head(head)
        return {score.name: float(score.mean[head]) for score in self}

    def _check_head(self, head: AnyHead) -> Head:
        layer, index = as_head(head)
        n_layers, n_heads = self.shape
        if not (0 <= layer < n_layers and 0 <= index < n_heads):
            raise InputError(
                f"head must be in layers 0–{n_layers - 1} and heads 0–{n_heads - 1}, got "
                f"{Head(layer, index)}; atlas.to_frame() lists all heads"
            )
        return Head(layer, index)

    def for_heads(self, heads: Iterable[AnyHead]) -> "HeadAtlas":
        """Return the atlas as an answer about these heads: what is shown begins with their kinds,
        scores and ranks. Nothing is measured again.

        Raise InputError for an unknown head, and if there is none.

        Example:
            >>> atlas = il.head_atlas(model, n_sequences=8).for_heads(["L2H0", "L5H0"])
            >>> atlas.heads
            (L2H0, L5H0)
        """
        checked = tuple(dict.fromkeys(map(self._check_head, head_tuple(heads))))
        if not checked:
            raise InputError(NO_HEADS)
        return replace(self, heads=checked)

    def heads_frame(self) -> pd.DataFrame:
        """Return the scores of `heads`, by default of all: name, score, mean, low, high (95%
        interval), rank among all heads, selected, kind, p_value, q_value, has_kind and reason, why the
        head does not have a tested kind. One row a head and score.

        Example:
            >>> atlas = il.head_atlas(model, n_sequences=2, heads=["L2H0"])
            >>> atlas.heads_frame().columns.tolist()[:6]
            ['name', 'score', 'mean', 'low', 'high', 'rank']
        """
        n_heads = self.shape[1]
        heads = self.heads or tuple(
            Head.from_index(place, n_heads) for place in range(self.n_heads)
        )
        rows = [self._head_row(head, score) for head in heads for score in self]
        return pd.DataFrame(rows)

    def _head_row(self, head: Head, score: HeadScore) -> dict[str, Any]:
        """Return a head's row of a score in `heads_frame`."""
        row: dict[str, Any] = {"name": str(head), "score": score.name}
        for column in ("mean", "low", "high"):
            row[column] = float(getattr(score, column)[head])
        row |= {"rank": score.rank(head), "selected": float(score.selected[head])}
        row |= {"kind": score.kind, "p_value": math.nan, "q_value": math.nan}
        row |= {"has_kind": False, "reason": ""}
        if score.p_value is not None and score.q_value is not None:
            row |= {"p_value": float(score.p_value[head]), "q_value": float(score.q_value[head])}
            row["has_kind"] = head in self.kinds[score.kind]
            if not row["has_kind"]:
                row["reason"] = why_not(score, head, self.rate)
        return row

    @property
    def heads_finding(self) -> str:
        """Which of `heads` have kinds, and which; empty if no heads were asked about."""
        if not self.heads:
            return ""
        if not self.kinds:
            return f"The kinds of {joined(list(map(str, self.heads)))} were not tested."
        kinds_of_head = self.kinds_by_head
        kinds_in_words = {head: joined(kinds) for head, kinds in kinds_of_head.items()}
        with_kind = [head for head in self.heads if head in kinds_of_head]
        without_kind = [str(head) for head in self.heads if head not in kinds_of_head]
        if len(self.heads) == 1:
            (head,) = self.heads
            if not with_kind:
                return f"{head} has no kind."
            has = "has a kind" if len(kinds_of_head[head]) == 1 else "has kinds"
            return f"{head} {has}: {kinds_in_words[head]}."
        if not with_kind:
            return f"Of these {len(self.heads)} heads, none has a kind: {joined(without_kind)}."
        has = "has a kind" if len(with_kind) == 1 else "have a kind"
        clauses = [f"{head} {kinds_in_words[head]}" for head in with_kind]
        if without_kind:
            has_or_have = "has" if len(without_kind) == 1 else "have"
            clauses.append(f"{joined(without_kind)} {has_or_have} none")
        return f"Of these {len(self.heads)} heads, {len(with_kind)} {has}: {'; '.join(clauses)}."

    def notes_on(self, head: AnyHead) -> list[str]:
        """Return why a head lacks kinds, a sentence for each: if it has none at all, the kind that
        it comes closest to; and every other kind that this head does not have, although a head with
        a smaller score has it.

        Raise InputError for an unknown head.
        """
        head = self._check_head(head)
        notes = []
        closest = None
        if head not in self.kinds_by_head:
            closest = closest_kind(self, head, self.rate)
        if closest is not None:
            value = closest.format(float(closest.mean[head]))
            what = "" if closest.title == closest.kind else f"{closest.title} "
            notes.append(
                f"{head} is closest to {closest.kind} ({what}{value}, {closest.rank(head)} of "
                f"{self.n_heads:,}), but has no kind: {why_not(closest, head, self.rate)}."
            )
        for score in self:
            sentence = outranked(score, head, self.kinds.get(score.kind, ()))
            if sentence and score is not closest:
                notes.append(sentence)
        return notes

    @property
    def finding(self) -> str:
        """How many heads have a kind, and how many have each kind."""
        of_model = f"of {self.n_heads:,} heads of {self.model}"
        if not self.kinds:
            n_scores = f"{len(self.scores)} score{'s' * (len(self.scores) != 1)}"
            return f"{n_scores} {of_model}; none of them was tested for kinds."
        counts = []
        for kind, heads in self.kinds.items():
            if heads:
                counts.append(f"{kind} ({len(heads)})")
        if not counts:
            n_kinds = f"{len(self.kinds)} kind{'s' * (len(self.kinds) > 1)}"
            return f"None {of_model} stands out by any of {n_kinds}."
        has = "has" if len(self.kinds_by_head) == 1 else "have"
        return f"{len(self.kinds_by_head)} {of_model} {has} a kind: {joined(counts)}."

    @property
    def removal_finding(self) -> str:
        """By how many scores the first heads matter more than random heads, and by which one most;
        empty without held-out prompts.
        """
        if not self.removals:
            return ""
        queries = "with other queries"
        if self.n_shared_queries:
            queries = f"{self.n_shared_queries} of whose queries were used for the scores"
        where = f"Zeroed together on {self.n_held_out:,} held-out prompts ({queries})"
        n_heads = max(len(removal.heads) for removal in self.removals.values())
        first, verb = (
            ("the first head", "is") if n_heads == 1 else (f"the first {n_heads} heads", "are")
        )
        random = "random heads of the same layers"
        if any(math.isnan(removal.difference.low) for removal in self.removals.values()):
            reason = f"that needs prompts with at least {MIN_CLUSTERS} different queries"
            return f"{where}, {first} by each score {verb} not compared with {random}: {reason}."
        n_scores = len(self.removals)
        mattering: dict[str, ListRemoval] = {}
        for name, removal in self.removals.items():
            if removal.shows_that_heads_matter:
                mattering[name] = removal
        cost_more = f"{verb} shown to cost the answer more than {random} do"
        if not mattering:
            return f"{where}, {first} by none of {n_scores} scores {cost_more}."
        by_chance = f"by chance, {decimal(0.025 * n_scores, 1)} would be"
        name = max(mattering, key=lambda name: mattering[name].lost.value)
        return (
            f"{where}, {first} by {len(mattering)} of {n_scores} scores {cost_more} ({by_chance}). Of "
            f"these, most is lost without the first by {self[name].title}: "
            f"{_loss_beside_random(mattering[name])}."
        )

    def summary(self) -> str:
        """Return a few sentences on what the scores were measured on, and what is left out."""
        sentences = []
        if self.n_prompts:
            over = f"{plural_prompts(self.n_prompts)} with {self.n_queries:,} distinct queries"
            sentence = f"Scores of the task are means over {over}"
            edited = [score.title for score in self if score.name in EDITING_SCORES]
            if edited and self.n_edited < self.n_prompts:
                first = f"the first {self.n_edited:,}"
                sentence += f", those that edit single heads ({joined(edited)}) over {first}"
            sentences.append(f"{sentence}.")
        nulls = []
        if set(self.kinds) & set(TURNED_KINDS.values()):
            nulls.append(
                "copies of all heads whose queries are turned against their keys (attention to "
                "random tokens)"
            )
        if set(self.kinds) & set(OTHER_HEADS_KINDS.values()):
            nulls.append("the other heads and chance (copying)")
        if set(self.kinds) & set(PROMPT_KINDS.values()):
            nulls.append(
                "the mean absolute score of all heads on the same prompts (scores of the task)"
            )
        if nulls:
            sentences.append(
                f"A head has a kind where its score stands out against {joined(nulls, 'or')}; of "
                f"the heads of a kind, at most {percent(self.rate)} are expected to have it by "
                "mistake."
            )
        for what, reasons in (("Not tested", self.untested), ("Left out", self.left_out)):
            by_reason: dict[str, list[str]] = {}
            for name, reason in reasons.items():
                title = DEFINITIONS[name].title if name in DEFINITIONS else name  # or a kind
                by_reason.setdefault(reason, []).append(title)
            for reason, names in by_reason.items():
                sentences.append(f"{what}: {joined(names)}, because {reason}.")
        return " ".join(sentences)

    def to_view(self) -> View:
        """Return what is shown of the atlas: the first heads of each score, and a map of each."""
        sections = self._asked_heads()
        if self.kinds_by_head:
            sections.append(self._heads_with_kinds())
        sections.append(self._first_heads())
        if self.removals:
            sections.append(self._removals())
        for score in self:
            sections.append(_score_section(score))
        if len(self.scores) > 1:
            sections.append(self._agreements())
        sections.append(self._definitions())
        title = f"Atlas of heads{edits_suffix(self.edits)}"
        findings = (self.heads_finding, self.finding, self.removal_finding, self.summary())
        sentences = tuple(filter(None, findings))
        return View(title, sentences, tuple(sections), about=self.model)

    def _asked_heads(self) -> list[Section]:
        """Return what is shown of the heads that were asked about: their kinds, and their scores in
        tables of a few heads each.
        """
        if not self.heads:
            return []
        kinds_of_head, rows = self.kinds_by_head, []
        score_of_kind = {score.kind: score for score in self if score.kind}
        for head in self.heads:
            names = []
            for kind in kinds_of_head.get(head, ()):
                names.append(self._ranked(score_of_kind[kind], head, kind))
            sentences = self.notes_on(head)
            if names or not sentences:
                sentences.insert(0, f"{head}: {', '.join(names) or 'no kind'}.")
            rows += [(sentence,) for sentence in sentences]
        name = f"head: its kinds, each with the score (and the rank among {self.n_heads:,} heads)"
        has_q_value = any(" q = " in text for (text,) in rows)
        notes = (Q_VALUE,) if has_q_value else ()
        columns = (Column(name, is_number=False),)
        sections = [Section("Kinds of these heads", columns=columns, rows=tuple(rows), notes=notes)]
        for start in range(0, len(self.heads), HEADS_A_TABLE):
            sections.append(self._scores_of(self.heads[start : start + HEADS_A_TABLE]))
        return sections

    def _ranked(self, score: HeadScore, head: Head, what: str = "") -> str:
        """Return what is scored, a head's score and its rank, such as "induction 0.81 (3)"."""
        value = score.format(float(score.mean[head]))
        rank = score.rank(head)
        return f"{what} {value}".strip() + ("" if rank is None else f" ({rank})")

    def _scores_of(self, heads: Sequence[Head]) -> Section:
        """Return a table of all scores of a few heads, each with its rank."""
        kinds, rows = self.kinds, []
        for score in self:
            cells = []
            for head in heads:
                mark = "*" * (head in kinds.get(score.kind, ()))
                cells.append(self._ranked(score, head) + mark)
            rows.append((score.title, *cells))
        columns = [Column("score", is_number=False), *(Column(str(head)) for head in heads)]
        title = f"Their scores, with the rank among all {self.n_heads:,} heads (* has the kind)"
        return Section(title, columns=tuple(columns), rows=tuple(rows))

    def _heads_with_kinds(self) -> Section:
        """Return a table of the heads with kinds, and their scores by which they have them."""
        score_of_kind = {score.kind: score for score in self if score.kind}
        rows = []
        for head, kinds in self.kinds_by_head.items():
            names = []
            for kind in kinds:
                score = score_of_kind[kind]
                names.append(f"{kind} {score.format(float(score.mean[head]))}")
            rows.append((f"{head}: {', '.join(names)}",))
        columns = (Column("head: its kinds, each with the score", is_number=False),)
        tested_by = []
        for kind, score in score_of_kind.items():
            if self.kinds.get(kind) and kind != score.title:
                tested_by.append(f"“{kind}” is tested by {score.title}")
        notes = (f"{'; '.join(tested_by)}.",) if tested_by else ()
        return Section(
            "Heads with a kind",
            columns=columns,
            rows=tuple(rows),
            notes=notes,
            is_detail=bool(self.heads),
        )

    def _first_heads(self) -> Section:
        """Return a table of the first heads of each score."""
        rows = []
        for score in self:
            cells = []
            for head in score.top(self.n_listed):
                cells.append(f"{head} {score.format(float(score.mean[head]))}")
            what = score.title + f" ({score.unit})" * bool(score.unit)
            if self.n_listed > N_FIRST:
                rows.append((f"{what}: {', '.join(cells)}",))
            else:
                rows.append((what, *cells, *[""] * (self.n_listed - len(cells))))
        names = ["score", "first", "second", "third"][: 1 + self.n_listed]
        if self.n_listed > N_FIRST:
            names = [f"score: its first {self.n_listed} heads"]
        columns = [Column(name, is_number=False) for name in names]
        return Section(
            "First heads by each score",
            columns=tuple(columns),
            rows=tuple(rows),
            is_detail=bool(self.heads),
        )

    def _removals(self) -> Section:
        """Return a table of what removing the first heads by each score costs."""
        rows = []
        for name in self.removal_frame()["score"]:
            removal = self.removals[name]
            losses = (removal.lost, removal.lost_by_random, removal.difference)
            text = nats_text if removal.unit == "nats" else points_text
            rows.append((self[name].title, *map(text, losses)))
        unit = "nats" if next(iter(self.removals.values())).unit == "nats" else "points"
        names = (f"lost, {unit} (95%)", "lost without random heads (95%)", "difference (95%)")
        columns = (Column("first heads by", is_number=False), *map(Column, names))
        title = "What removing the first heads by each score costs"
        return Section(title, columns=columns, rows=tuple(rows))

    def _agreements(self) -> Section:
        """Return a table of the scores that agree most and least, which only a page shows."""
        frame = self.agreements()
        if len(frame) > 2 * N_PAIRS:
            frame = pd.concat([frame.head(N_PAIRS), frame.tail(N_PAIRS)])
        rows = []
        for first, second, correlation, n_shared, expected in frame.itertuples(index=False):
            titles = (self[first].title, self[second].title)
            rows.append((*titles, signed(correlation, 2), n_shared, decimal(expected, 1)))
        names = ("rank correlation", f"in both lists of the first {self.k}", "by chance")
        columns = (
            *(Column(name, is_number=False) for name in ("score", "and")),
            *map(Column, names),
        )
        title = "Scores that agree most and least"
        return Section(title, columns=columns, rows=tuple(rows), is_detail=True)

    def _definitions(self) -> Section:
        """Return a table of what the scores are, which only a page shows."""
        rows = []
        for score in self:
            rows.append((score.title, score.definition, score.source, score.samples, score.cost))
        names = ("score", "asks", "source", "measured on", "cost in forward passes")
        columns = tuple(Column(name, is_number=False) for name in names)
        return Section("What the scores are", columns=columns, rows=tuple(rows), is_detail=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding, the first heads by each score, and what is left out, for JSON."""
        first = {score.name: [str(head) for head in score.top(self.k)] for score in self}
        return {
            "finding": self.finding,
            "heads_finding": self.heads_finding,
            "heads": self._records_of_heads(),
            "model": self.model,
            "kinds": {kind: [str(head) for head in heads] for kind, heads in self.kinds.items()},
            "rate": self.rate,
            "first_heads": first,
            "left_out": self.left_out,
            "untested": self.untested,
            "n_prompts": self.n_prompts,
            "n_queries": self.n_queries,
            "n_edited": self.n_edited,
            "n_heads": self.n_heads,
            "removal_finding": self.removal_finding,
            "removals": json_records(self.removal_frame()),
            "n_held_out": self.n_held_out,
        }

    def _records_of_heads(self) -> list[dict[str, Any]]:
        """Return the heads that were asked about, with their kinds, notes and scores, for JSON."""
        if not self.heads:
            return []
        frame, kinds_by_head = self.heads_frame(), self.kinds_by_head
        records = []
        for head in self.heads:
            scores = pd.DataFrame(frame[frame["name"] == str(head)]).drop(columns="name")
            records.append(
                {
                    "name": str(head),
                    "kinds": kinds_by_head.get(head, []),
                    "notes": self.notes_on(head),
                    "scores": json_records(scores),
                }
            )
        return records


def _loss_beside_random(removal: ListRemoval) -> str:
    """Return in words what is lost without a list of heads and without random heads, and the
    log-odds or the share without removal; log-odds may be smaller than what is lost of them.
    """
    if removal.unit == "share":
        lost, by_random = points_text(removal.lost), points_text(removal.lost_by_random)
        what = "points of the share of prompts whose top token is right"
        intact = f"this share is {percent(removal.intact)}"
    else:
        lost, by_random = interval_text(*removal.lost), interval_text(*removal.lost_by_random)
        what = "nats of log-odds"
        intact = f"the log-odds are {signed(removal.intact, 2)}"
    return f"{lost} {what}; without random heads, {by_random}. Without removal, {intact}"


def _score_section(score: HeadScore) -> Section:
    """Return the map of a score, which only a page shows."""
    values = tuple(tuple(row) for row in score.mean.double().tolist())
    unit = f", {score.unit}" * bool(score.unit)
    marked = frozenset((head.layer, head.head) for head in score.top(N_FIRST))
    head_map = HeadValues(f"{score.title}{unit}", values, marked)
    return Section(score.title, score.definition, head_map=head_map, is_detail=True)


def ordered(scores: Mapping[str, HeadScore], names: Sequence[str]) -> dict[str, HeadScore]:
    """Return the scores in the order of `names`."""
    return {name: scores[name] for name in names if name in scores}
