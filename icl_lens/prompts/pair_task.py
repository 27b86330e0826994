"""Pairs: prompts whose demonstrations and query have answers of their own, such as country and
capital.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError, quoted_list, short_repr
from icl_lens.foundation.digest import json_digest
from icl_lens.prompts.class_labels import Labels
from icl_lens.prompts.datasets import PAIR_COLUMNS, check_columns, read_files, two_cells
from icl_lens.prompts.draw import N_PROMPTS, check_sampling, own_separator, spelling_key
from icl_lens.prompts.labeled_task import Layout
from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, SPACE, Prompt, Template, check_unicode
from icl_lens.prompts.prompt_list import PromptList
from icl_lens.prompts.row_counts import WITH_EMPTY_CELL, RowCounts, check_path, warn_of_empty_cells
from icl_lens.prompts.same_length import pairs_of_one_length

Pairs = list[tuple[str, str]]
"""Inputs and their outputs."""

MAX_SHUFFLED = 1000
"""Up to this many pairs, each prompt shuffles all of them, as those of published numbers did."""


@dataclass(frozen=True)
class PairTask:
    """A task of pairs of an input and its own output.

    Without `path`, `name` is one of the bundled tasks: "antonyms", "country-capital",
    "present-past", "singular-plural", "english-french", "english-spanish", "next-item",
    "country-language", "capitalization", "verb-gerund", "adjective-comparative" and "animal-class".
    `path` is a .json file with [{"input": …, "output": …}], {"input": [...], "output": [...]},
    {"France": "Paris"} or [["France", "Paris"]], or a .jsonl, .csv, .tsv or .parquet file with two
    `columns`, the first line of a .csv or .tsv being their names. White space is collapsed;
    duplicates and rows with an empty cell are skipped; `row_counts` says how many.

    Every prompt shows different inputs. If the outputs are mostly words of their own (at least half
    as many different outputs as pairs), no demonstration contains the query or the answer, also not
    in another case or Unicode form; otherwise, as for classes, it may contain the answer.

    Raise InputError for invalid settings. Source: docs/howto/own_dataset.md.

    Example:
        >>> print(il.PairTask("antonyms").prompts(1)[0])
        male : female strong : weak friend :
        >>> columns = ("country", "capital")
        >>> capitals = il.PairTask("capitals", "capitals.csv", columns=columns)  # doctest: +SKIP
        >>> prompts = capitals.prompts(100, demonstrations=10)  # doctest: +SKIP
    """

    name: str
    path: str | Path | None = None
    _: KW_ONLY
    columns: tuple[str, str] = PAIR_COLUMNS

    def __post_init__(self) -> None:
        check_unicode(self.name, what="name")
        check_path(self.path)
        check_columns(self.columns, "inputs and outputs")
        if self.path is None and self.name not in bundled_pairs():
            raise InputError(
                f"name must be one of {quoted_list([*bundled_pairs()])}, got {self.name!r}; or "
                "pass path="
            )

    def digest(self) -> str:
        """Return a 16-digit hexadecimal digest of the pairs."""
        return json_digest(self.pairs())

    def pairs(self) -> Pairs:
        """Return the usable pairs in the order of the file; raise InputError if it cannot be
        read.
        """
        if self.path is None:
            return [*bundled_pairs()[self.name].items()]
        skipped: Counter[str] = Counter()
        pairs = [*self._usable_pairs(skipped)]
        warn_of_empty_cells(self.path, RowCounts({"pairs": len(pairs)}, skipped))
        return pairs

    def row_counts(self) -> RowCounts:
        """Return how many rows the task uses and skips; raise InputError if they cannot be read."""
        skipped: Counter[str] = Counter()
        if self.path is None:
            n_pairs = len(bundled_pairs()[self.name])
        else:
            n_pairs = len(self._usable_pairs(skipped))
        return RowCounts({"pairs": n_pairs}, skipped)

    def _usable_pairs(self, skipped: Counter[str]) -> dict[tuple[str, str], None]:
        """Return the different pairs of the file; `skipped` counts its other rows by the reason."""
        assert self.path is not None
        pairs: dict[tuple[str, str], None] = {}
        for number, row in enumerate(read_files([Path(self.path)]).rows, 1):
            cells = two_cells(row, number, self.columns)
            source, target = map(_collapsed, cells)
            if not source or not target:
                skipped[WITH_EMPTY_CELL] += 1
            elif (source, target) in pairs:
                skipped["duplicate"] += 1
            else:
                pairs[source, target] = None
        return pairs

    def prompts(
        self,
        n: int = N_PROMPTS,
        *,
        seed: int = 0,
        layout: Layout = "random",
        demonstrations: int = 2,
        labels: Labels | None = None,
        same_length_for: Any = None,
        template: Template = DEFAULT_TEMPLATE,
    ) -> list[Prompt]:
        """Return `n` prompts, each with `demonstrations` pairs in random order and another pair as
        query and answer.

        A prompt's `labels` are the outputs it shows and its answer. `same_length_for`, a model,
        keeps only pairs with the most frequent numbers of tokens, for which `template` is used.
        `layout` and `labels` are for tasks with classes and must have their default. Raise
        InputError for other values, if the file cannot be read, and if it has too few pairs.
        """
        n, seed, demonstrations = check_sampling(n, seed, demonstrations)
        for name, value, default in (("layout", layout, "random"), ("labels", labels, None)):
            if value != default:
                raise InputError(
                    f"{name} must be {default!r} for pairs, which have no classes, got "
                    f"{short_repr(value)}; "
                    "omit it"
                )
        keep = None
        if same_length_for is not None:
            keep = partial(pairs_of_one_length, same_length_for, template)
        prompts = self._prompts(demonstrations, random.Random(seed), keep)
        return PromptList(islice(prompts, n), self.name)

    def _prompts(
        self, demonstrations: int, rng: random.Random, keep: Callable[[Pairs, str], Pairs] | None
    ) -> Iterator[Prompt]:
        """Yield endless prompts; after all queries have been used, they are reused with other
        demonstrations.

        `keep` filters the pairs. Raise InputError if the file cannot be read or has too few pairs.
        """
        pairs = self.pairs()
        separator = SPACE if self.path is None else own_separator(chain.from_iterable(pairs))
        if keep is not None and pairs:
            pairs = keep(pairs, separator)
        outputs = {target for _, target in pairs}
        outputs_are_own = 2 * len(outputs) >= len(pairs)
        while True:
            for query, answer in _in_random_order(pairs, rng) if pairs else [("", "")]:
                hidden = (query, answer) if outputs_are_own else (query,)
                hidden_keys = set(map(spelling_key, hidden))
                demonstrated: dict[str, str] = {}
                for source, target in _in_random_order(pairs, rng):
                    if len(demonstrated) == demonstrations:
                        break
                    words = (source, target) if outputs_are_own else (source,)
                    if hidden_keys.isdisjoint(map(spelling_key, words)):
                        demonstrated.setdefault(source, target)
                if len(demonstrated) < demonstrations:
                    raise InputError(
                        f"the data must have at least {demonstrations} pairs with other words than "
                        f"each query, got {len(demonstrated)} for the query {query!r} among "
                        f"{len(pairs)} pairs; add pairs or use fewer demonstrations"
                    )
                labels = in_order([*demonstrated.values(), answer])
                shown_pairs = list(demonstrated.items())
                yield Prompt(shown_pairs, query, answer, labels, separator=separator)


def _collapsed(cell: Any) -> str:
    """Return a cell's text with its white space collapsed; empty for an empty cell."""
    return "" if cell is None else " ".join(str(cell).split())


def _in_random_order(pairs: Pairs, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield all pairs, each once; of more than `MAX_SHUFFLED`, only those are drawn that the caller
    asks for.
    """
    if len(pairs) <= MAX_SHUFFLED:
        yield from rng.sample(pairs, len(pairs))
        return
    # Place -> index of the pair that took this place when another was drawn from it.
    moved: dict[int, int] = {}
    for n_left in range(len(pairs), 0, -1):
        place = rng.randrange(n_left)
        yield pairs[moved.get(place, place)]
        moved[place] = moved.get(n_left - 1, n_left - 1)


@cache
def bundled_pairs() -> dict[str, dict[str, str]]:
    """Return the bundled pair tasks: by name, outputs by input.

    Example:
        >>> from icl_lens.prompts.pair_task import bundled_pairs
        >>> bundled_pairs()["antonyms"]["hot"]
        'cold'
    """
    return json.loads((files("icl_lens") / "bundled" / "pairs.json").read_text(encoding="utf-8"))
