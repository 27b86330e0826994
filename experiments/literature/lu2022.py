"""Does the order of the same demonstrations decide how well a model answers?

Lu et al. (arXiv 2104.08786): the order of the demonstrations "can make the difference between near
state-of-the-art and random guess performance".

1. Some sets of demonstrations are each shown in several random orders, with many queries.
2. On the queries of one half, the best and the worst order of each set are found; on the queries of
   the other half, they are compared. Of orders that differ by chance alone, the one that was best
   is not better on other queries. The best order must also be better than chance.

The authors compare the best and the worst of 24 orders on the same queries, on models of 117M to
175B parameters.

    python experiments/literature/lu2022.py --model icl-mini --task animal-country -n 40
"""

import random
from collections.abc import Sequence

import numpy as np
import pandas as pd
from claims import Scores, Study, Table, from_command_line, shown_after

import icl_lens as il

N_SETS, N_ORDERS = 3, 8
"""Sets of demonstrations, and orders of each."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure accuracy with the best and the worst order, chosen on other queries."""
    study = Study.from_command_line("lu2022", str(__doc__).splitlines()[0], arguments)
    table = Table(study)
    rng = random.Random(study.seed)
    best, worst, mean = [], [], []
    queries: list[str] = []
    for number in range(N_SETS):
        demonstrations = study.locating.prompts[number].demonstrations
        orders = [rng.sample(demonstrations, len(demonstrations)) for _ in range(N_ORDERS)]
        locating = answers(study, f"set {number}, locating", orders, study.locating.prompts)
        accuracy, log_odds = locating.correct.mean(0), locating.log_odds.mean(0)
        worst_first = np.lexsort((log_odds, accuracy))  # by log-odds where accuracy is equal
        testing = answers(study, f"set {number}, testing", orders, study.testing.prompts)
        best.append(testing.correct[:, worst_first[-1]])
        worst.append(testing.correct[:, worst_first[0]])
        mean.append(testing.correct.mean(1))
        queries += [prompt.query for prompt in shown_after(study, orders[0], study.testing.prompts)]
    about = {"at": f"{N_SETS} sets of demonstrations, {N_ORDERS} orders of each", "unit": "%"}
    measure = "accuracy with the best order, chosen on other queries"
    best_orders = np.concatenate(best)
    worst_orders, all_orders = np.concatenate(worst), np.concatenate(mean)
    chosen = "the worst order, chosen on other queries"
    table.add(measure, best_orders, worst_orders, queries, versus=chosen, **about)
    n_choices = len(study.labels) or study.demonstrations + 1
    table.add(measure, best_orders, 1 / n_choices, queries, versus="chance", **about)
    table.state("The order of the demonstrations decides how well the model answers", n_rows=2)
    table.add(measure, best_orders, all_orders, queries, versus="the mean over orders", **about)
    return table.write()


def answers(
    study: Study,
    part: str,
    orders: Sequence[Sequence[il.Demonstration]],
    prompts: Sequence[il.Prompt],
) -> Scores:
    """Return how the prompts' queries are answered after each order, [prompt order]."""
    ordered_prompts: list[il.Prompt] = []
    for order in orders:
        ordered_prompts += shown_after(study, order, prompts)
    batch = study.tokenize(ordered_prompts)
    scores = study.scores(part, batch, lambda rows: [[]], {})
    return Scores(*(values.reshape(len(orders), -1).T for values in scores))


if __name__ == "__main__":
    from_command_line(main)
