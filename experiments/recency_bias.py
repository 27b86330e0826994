"""Does the model prefer the label shown last?

1. Each prompt, in balanced random order, is paired with one in which the last demonstration has
   changed places with one of the other label that is neither first nor last. The favored prompt of
   a pair ends in the answer's label.
2. The control does the same with the first demonstration, because any exchange may have an effect.
3. The published fix removes a share of the position term from the located heads' attention scores.
4. Attention to true labels is measured with the query's class last and with it first, next to the
   same without the heads' position term.
5. Located heads get the queries that they would have if one text were of the other class: that of
   the query, of the last demonstration, or of the one before it.

    python experiments/recency_bias.py --model icl-mini --task animal-country -n 200

The paper's section 5.2, Figures 9 and 11; section 4.2 of the published version.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from common import RANKINGS, Ranking, Study, Table, from_command_line, thinned
from label_bias import N_CHOOSING, Pairs, add_bias, add_fix, by_answer, draw
from majority_bias import attention_by_class

import icl_lens as il

ORDER = "accuracy with the query's class first"
ATTENTION = "change of attention to true labels when they are shown first instead of last"
NEIGHBOR = "effect of the last demonstration's text through the queries"


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure the bias by the last and by the first label, how much the fix removes, and two
    explanations."""
    study = Study.from_command_line(
        "recency-bias", "Does the model prefer the label shown last?", arguments
    )
    if study.demonstrations < 2:
        raise il.InputError(
            "demonstrations must be 2 or more, so that one is between first and last; got 1"
        )
    table = Table(study)
    locating, testing = list(study.locating.prompts), list(study.testing.prompts)
    last, first = (ordered_pairs(study, testing, place) for place in (-1, 0))
    add_bias(study, table, last, first, "recency", versus="answer's label first, minus not first")
    few = thinned(locating, N_CHOOSING)
    add_fix(study, table, "recency", ordered_pairs(study, few, -1), last)
    shown_last, shown_first = (study.halves(layout)[1] for layout in ("last", "first"))
    at_last, at_first = (
        study.scores(name, batch, lambda rows: [[]], {"what": "intact"}).correct[:, 0]
        for name, batch in (("class last", shown_last), ("class first", shown_first))
    )
    about = {"unit": "%", "versus": "shown last (the paper's order)"}
    table.add(ORDER, at_first, at_last, shown_last.queries, **about)
    for measure, add in ((ATTENTION, add_attention), (NEIGHBOR, add_neighbor)):
        try:
            add(study, table)
        except il.InputError as error:
            table.add_missing(measure, error)
    return table.write(draw(table.to_frame()))


def ordered_pairs(study: Study, prompts: Sequence[il.Prompt], place: int) -> Pairs:
    """Return each prompt with the answer's label at `place`, 0 or -1, and with another there."""
    rng = random.Random(study.seed)
    favored, unfavored = [], []
    for prompt in prompts:
        demonstrations = list(prompt.demonstrations)
        is_favored = demonstrations[place].label == prompt.answer
        between = range(1, len(demonstrations) - 1)
        at_place = demonstrations[place]
        partner = rng.choice([i for i in between if demonstrations[i].label != at_place.label])
        demonstrations[place] = demonstrations[partner]
        demonstrations[partner] = at_place
        reordered = il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels)
        favored.append(prompt if is_favored else reordered)
        unfavored.append(reordered if is_favored else prompt)
    return Pairs(study.tokenize(favored), study.tokenize(unfavored))


def add_attention(study: Study, table: Table) -> None:
    """Add the change of attention to true labels by order, also without the position term."""
    for ranking in RANKINGS:
        heads = study.located_heads(ranking)
        columns = []
        for is_free in (False, True):
            for layout in ("last", "first"):
                of_order = true_attention(study, layout, heads, ranking, without_position=is_free)
                columns.append(of_order)
        table.add_statistic(
            ATTENTION,
            np.stack(columns, axis=1),
            lambda draws: draws[:, 1].mean() / draws[:, 0].mean() - 1,
            lambda draws: draws[:, 3].mean() / draws[:, 2].mean() - 1,
            study.halves("last")[1].queries,
            ranking=ranking,
            unit="%",
            versus="without the heads' position term",
        )


def true_attention(
    study: Study, layout: str, heads: Sequence[il.Head], ranking: Ranking, *, without_position: bool
) -> np.ndarray:
    """Return the mean attention (0–1) of heads to labels of the answer, for each prompt."""
    batch = study.halves("last" if layout == "last" else "first")[1]
    edits = [il.RemovePosition(heads, positions="last")] if without_position else []
    part = f"{layout}, without position: {without_position}, {ranking}"
    with il.edited(study.model, *edits):
        attention = study.read(part, batch, attention_by_class, without_position=without_position)
    layers, indices = zip(*heads, strict=True)
    return attention[:, layers, indices, 0].mean(1)


def add_neighbor(study: Study, table: Table) -> None:
    """Add how much the texts next to the query change the answer through located heads' queries."""
    prompts = study.halves_with(study.demonstrations + 1, same_length=True)[1]
    intact, *donors = (study.tokenize(draws) for draws in exchanged_texts(prompts, study.seed))
    is_true = (intact.label_index[:, [-1, -2]] == intact.answer[:, None]).numpy()
    sign = np.concatenate([np.ones((len(intact), 1)), 2 * is_true - 1], axis=1)
    for ranking in RANKINGS:
        heads = study.located_heads(ranking)

        def edits_of(rows: list[int], heads: Sequence[il.Head] = heads) -> list[list[il.Patch]]:
            edits: list[list[il.Patch]] = [[]]
            for donor in donors:
                edits.append([il.Patch(heads, donor[rows], activation="q", positions="last")])
            return edits

        texts = [list(donor.texts) for donor in donors]
        options = {"heads": list(map(str, heads)), "donors": texts}
        log_odds = study.scores(f"neighbor, {ranking}", intact, edits_of, options).log_odds
        # of the query's text, the last one, and the one before
        effects = (log_odds[:, :1] - log_odds[:, 1:]) * sign
        table.add_statistic(
            NEIGHBOR,
            effects,
            lambda draws: draws[:, 1].mean() / draws[:, :2].sum(1).mean(),
            lambda draws: draws[:, 2].mean() / draws[:, :2].sum(1).mean(),
            intact.queries,
            ranking=ranking,
            unit="%",
            versus="effect of the text before it",
        )


def exchanged_texts(prompts: Sequence[il.Prompt], seed: int) -> list[list[il.Prompt]]:
    """Return the prompts intact; with another query; and with another text in the last
    demonstration or the one before.

    One random demonstration of each class is taken out of each prompt; its text replaces one of the
    other class."""
    rng = random.Random(seed)
    lists: list[list[il.Prompt]] = [[], [], [], []]
    for prompt in prompts:
        spare_true, spare_false = map(rng.choice, by_answer(prompt))
        demonstrations = list(prompt.demonstrations)
        demonstrations.remove(spare_true)
        demonstrations.remove(spare_false)
        asked: dict[str, Any] = {"answer": prompt.answer, "labels": prompt.labels}
        lists[0].append(il.Prompt(demonstrations, prompt.query, **asked))
        lists[1].append(il.Prompt(demonstrations, spare_false.text, **asked))
        for prompts_with, place in ((lists[2], -1), (lists[3], -2)):
            is_true = demonstrations[place].label == prompt.answer
            text = spare_false.text if is_true else spare_true.text
            exchanged = list(demonstrations)
            exchanged[place] = replace(demonstrations[place], text=text)
            prompts_with.append(il.Prompt(exchanged, prompt.query, **asked))
    return lists


if __name__ == "__main__":
    from_command_line(main)
