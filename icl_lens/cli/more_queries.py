"""What a command says where an interval includes zero, or is missing: how many queries it is over,
and what gives more.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from icl_lens.prompts.tasks import Task

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt

TIMES_MORE = (4, 2)
"""Of how many times more prompts the queries are counted; the first one halves an interval."""
WORTH_MORE = 1.5
"""How many times more queries are worth a larger number of prompts: 0.8 of an interval's width."""


def more_queries_sentence(
    task: Task,
    prompts: "Sequence[Prompt]",
    draw: "Callable[[int], Sequence[Prompt]]",
    *,
    n: int,
) -> str:
    """Return how many different queries prompts of a task have, and what gives more of them.

    `draw` returns the prompts that the command would measure for another `-n`, which was `n`.

    Example:
        >>> from icl_lens.cli.more_queries import more_queries_sentence
        >>> task = il.WordTask("animal-country")
        >>> more_queries_sentence(task, task.prompts(8), task.prompts, n=8)
        'These 8 prompts have 8 different queries; intervals over more are narrower: -n 32 has 30.'
    """
    n_queries = len({prompt.query for prompt in prompts})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the command has given them
        queries_by_n = {}
        for times in TIMES_MORE:
            queries_by_n[times * n] = len({prompt.query for prompt in draw(times * n)})
    larger_n = max(queries_by_n, key=lambda n: queries_by_n[n])
    n_available = queries_by_n[larger_n]
    different = "different query" if n_queries == 1 else "different queries"
    have = (
        f"These {len(prompts)} prompts have {n_queries} {different}; intervals over more are "
        "narrower"
    )
    with_larger_n = ""
    more = "no more"
    if n_available >= WORTH_MORE * n_queries:
        with_larger_n = f"-n {larger_n} has {n_available}"
    elif n_available > n_queries:
        more = "hardly more"
    if task.path is None:
        if with_larger_n:
            return f"{have}: {with_larger_n}."
        return f"{have}, but the task has {more}."
    with_rows = f"rows with other texts in {task.path} give more"
    if with_larger_n:
        return f"{have}: {with_larger_n}, and {with_rows}."
    return f"{have}. A larger -n has {more}; {with_rows}."
