"""What a command says where an interval includes zero, or is missing: how many queries it is over,
and what gives more.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from icl_lens.prompts.tasks import Task

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt

TIMES_MORE = 4
"""Of how many times more prompts the queries are counted: half the width of an interval."""


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
        n_available = len({prompt.query for prompt in draw(TIMES_MORE * n)})
    different = "different query" if n_queries == 1 else "different queries"
    have = (
        f"These {len(prompts)} prompts have {n_queries} {different}; intervals over more are "
        "narrower"
    )
    with_larger_n = f"-n {TIMES_MORE * n} has {n_available}" if n_available > n_queries else ""
    if task.path is None:
        return (
            f"{have}: {with_larger_n}." if with_larger_n else f"{have}, but the task has no more."
        )
    with_rows = f"rows with other texts in {task.path} give more"
    if with_larger_n:
        return f"{have}: {with_larger_n}, and {with_rows}."
    return f"{have}. A larger -n has no more; {with_rows}."
