"""Does the model prefer the label that more demonstrations have?

1. Each query is in two prompts, with demonstrations in random order: in the favored one, three
   quarters of them have the answer's label; in the unfavored one, one quarter. The last
   demonstration has the answer's label in half of the prompts of either kind, so copying the last
   label gives no difference.
2. The control is the same pair of prompts with some demonstrations, but not the first or last,
   replaced by ones of the other class, so that both labels are equally frequent.
3. The published fix divides the located heads' attention to each label by (its frequency / mean
   frequency)^strength.
4. When the last demonstration of the answer's class is dropped, how does attention to labels
   change, beside what softmax alone predicts: its tokens removed from the intact prompt's
   attention, and the rest divided by its sum?

    python experiments/majority_bias.py --model icl-mini --task animal-country -n 200

The paper's section 5.1, Figures 8 and 10; section 4.1 of the published version.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RANKINGS, Layout, Study, Table, from_command_line, thinned
from label_bias import N_CHOOSING, Pairs, add_accuracy, add_bias, add_fix, answered, by_answer, draw

import icl_lens as il

ORDERS: dict[Layout, str] = {"random": "balanced random order", "last": "the paper's order"}


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure the bias, what the fix does to it, and how attention changes without one
    demonstration."""
    study = Study.from_command_line(
        "majority-bias", "Does the model prefer the majority label?", arguments
    )
    n_per_class = study.demonstrations
    if n_per_class < 2:
        raise il.InputError(
            "demonstrations must be at least 2, so that the rarer label is shown, got 1; use more"
        )
    table = Table(study)
    locating, testing = study.halves_with(2 * n_per_class - max(1, n_per_class // 2))
    groups = {
        name: study.tokenize(prompts)
        for name, prompts in by_frequency(testing, n_per_class, study.seed).items()
    }
    tested = Pairs(groups["majority"], groups["minority"])
    even = Pairs(groups["majority balanced"], groups["minority balanced"])
    versus = "equally frequent labels, same first and last label"
    add_bias(study, table, tested, even, "majority", versus=versus)
    scores = answered(study, "control", even, "majority")
    add_accuracy(table, "equally frequent labels", scores, 0, even.favored.queries)
    choosing_groups = by_frequency(thinned(locating, N_CHOOSING), n_per_class, study.seed)
    pair = (choosing_groups["majority"], choosing_groups["minority"])
    choosing = Pairs(*map(study.tokenize, pair))
    add_fix(study, table, "majority", choosing, tested)
    add_attention(study, table)
    return table.write(draw(table.to_frame()))


def by_frequency(
    prompts: Sequence[il.Prompt], n_per_class: int, seed: int
) -> dict[str, list[il.Prompt]]:
    """Return four lists of prompts: the answer's label is on most, few, half and half of their
    demonstrations.

    Of 2 · `shown` demonstrations, the rarer label has shown // 2, but at least one. The last
    demonstration has the answer's label in every other row of all four lists. "majority balanced"
    and "minority balanced" are the prompts of "majority" and "minority" with some demonstrations of
    the frequent label, but not the first or last, replaced."""
    rng = random.Random(seed)
    few = max(1, n_per_class // 2)
    names = ("majority", "minority", "majority balanced", "minority balanced")
    groups: dict[str, list[il.Prompt]] = {name: [] for name in names}
    for row, prompt in enumerate(prompts):
        for name, n_of_answer in (("majority", 2 * n_per_class - few), ("minority", few)):
            of_answer = [True] * n_of_answer + [False] * (2 * n_per_class - n_of_answer)
            of_answer.remove(row % 2 == 0)
            rng.shuffle(of_answer)
            of_answer.append(row % 2 == 0)
            groups[name].append(with_demonstrations(prompt, of_answer))
            is_frequent, between = name == "majority", range(1, 2 * n_per_class - 1)
            frequent = [place for place in between if of_answer[place] == is_frequent]
            for place in rng.sample(frequent, n_per_class - few):
                of_answer[place] = not of_answer[place]
            groups[f"{name} balanced"].append(with_demonstrations(prompt, of_answer))
    return groups


def with_demonstrations(prompt: il.Prompt, of_answer: Sequence[bool]) -> il.Prompt:
    """Return the prompt with some of its demonstrations: the next one with (True) or without the
    answer's label."""
    matching, different = map(iter, by_answer(prompt))
    demonstrations = [next(matching if has_answer else different) for has_answer in of_answer]
    return il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels)


def add_attention(study: Study, table: Table) -> None:
    """Add how attention changes without the last true demonstration, beside softmax alone."""
    for layout, words in ORDERS.items():
        intact = study.halves(layout)[1]
        fewer = study.tokenize([without_last_true(prompt) for prompt in intact.prompts])
        before = study.read(f"{layout}, intact", intact, attention_by_class, what="attention")
        predicted = study.read(
            f"{layout}, softmax", intact, renormalized_attention, what="without last true"
        )
        after = study.read(f"{layout}, fewer", fewer, attention_by_class, what="attention")
        for ranking in RANKINGS:
            layers, heads = zip(*study.located_heads(ranking), strict=True)
            of_located = [values[:, layers, heads].mean(1) for values in (before, after, predicted)]
            about: dict[str, Any] = {"at": words, "ranking": ranking, "unit": "%"}
            for place, kind in enumerate(("true", "false")):
                table.add_statistic(
                    f"change of attention to {kind} labels without the last true demonstration",
                    np.stack([values[:, place] for values in of_located], axis=1),
                    lambda draws: draws[:, 1].mean() / draws[:, 0].mean() - 1,
                    lambda draws: draws[:, 2].mean() / draws[:, 0].mean() - 1,
                    intact.queries,
                    versus="predicted by softmax alone",
                    **about,
                )


def without_last_true(prompt: il.Prompt) -> il.Prompt:
    """Return the prompt without its last demonstration that has the answer's label."""
    demonstrations = list(prompt.demonstrations)
    places = range(len(demonstrations))
    last_true = max(place for place in places if demonstrations[place].label == prompt.answer)
    del demonstrations[last_true]
    return il.Prompt(demonstrations, prompt.query, prompt.answer, prompt.labels)


def attention_by_class(acts: il.Activations) -> torch.Tensor:
    """Return the last position's attention to labels of the answer, and to others, [prompt layer
    head 2]."""
    attention = acts.attention_to_labels().float()
    true = (acts.batch.label_index == acts.batch.answer[:, None])[:, None, None]
    return torch.stack([(attention * true).sum(-1), (attention * ~true).sum(-1)], dim=-1)


def renormalized_attention(acts: il.Activations) -> torch.Tensor:
    """Return `attention_by_class` as softmax has it without the tokens of the last true
    demonstration."""
    removed = last_true_tokens(acts.batch)[:, None, None]
    pattern = acts.pattern.float().masked_fill(removed, 0.0)
    return attention_by_class(replace(acts, pattern=pattern / pattern.sum(-1, keepdim=True)))


def last_true_tokens(batch: il.PromptBatch) -> torch.Tensor:
    """Return the tokens of each prompt's last true demonstration, those after the label before it,
    [prompt pos]."""
    true = batch.label_index == batch.answer[:, None]
    last = (true * torch.arange(1, true.shape[1] + 1)).argmax(1, keepdim=True)
    ends = batch.label_ranges[..., 1]
    stop = ends.gather(1, last)
    start = torch.where(last > 0, ends.gather(1, (last - 1).clamp(min=0)), 0)
    place = torch.arange(batch.tokens.shape[1])
    return (place >= start) & (place < stop)


if __name__ == "__main__":
    from_command_line(main)
