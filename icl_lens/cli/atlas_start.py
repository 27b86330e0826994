"""What `icl-lens atlas` says before it measures: how long it takes, and which kinds lack queries."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from icl_lens.cli.console import LONG, duration_in_words, report_error
from icl_lens.cli.task_options import SplitTask

if TYPE_CHECKING:
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt


def warn_of_few_queries(
    console: Console,
    task: SplitTask,
    prompts: "Sequence[Prompt]",
    *,
    seed: int,
    n_edited: int,
    n_heads: int,
) -> None:
    """Warn, on standard error, of kinds that cannot be tested (`few_queries_warning`)."""
    warning = few_queries_warning(task, prompts, seed=seed, n_edited=n_edited, n_heads=n_heads)
    if warning and not console.quiet:
        report_error("icl-lens", warning)


def print_duration(
    console: Console, model: Any, batch: "PromptBatch | None", counts: dict[str, int]
) -> None:
    """Print how long the atlas takes, if it takes long; `counts` are those of `duration_sentence`."""
    if console.quiet:
        return
    if sentence := duration_sentence(model, batch, **counts):
        console.print(sentence, soft_wrap=True)


def few_queries_warning(
    task: SplitTask, prompts: "Sequence[Prompt]", *, seed: int, n_edited: int, n_heads: int
) -> str:
    """Return which kinds cannot be tested because the prompts have too few different queries, and
    what gives more; empty if they have enough.
    """
    from icl_lens.analyses.atlas.definitions import EDITING_SCORES
    from icl_lens.analyses.atlas.kinds import MIN_QUERIES, PROMPT_KINDS, queries_needed
    from icl_lens.result.number_format import joined

    n_needed = queries_needed(n_heads)
    queries = [prompt.query for prompt in prompts]
    n_queries = len(set(queries))
    if n_queries < n_needed:
        which, untested = f"the {len(prompts)} prompts", list(PROMPT_KINDS.values())
        larger_n = _enough_prompts(task, seed, n_heads)
        more = f"-n {larger_n} has enough" if larger_n else "more rows with other texts give more"
    else:
        n_queries = len(set(queries[:n_edited]))
        if n_queries >= n_needed:
            return ""
        which = f"the first {min(n_edited, len(prompts))} prompts, on which heads are edited,"
        untested = [kind for name, kind in PROMPT_KINDS.items() if name in EDITING_SCORES]
        more = f"--edited {prompts_with_enough_queries(queries, n_heads)} has enough"
    lack = "no head will" if n_queries < MIN_QUERIES else "a single head cannot"
    return (
        f"{lack} have these kinds: {joined(untested)}. They need {n_needed} prompts "
        f"with different queries, and {which} have {n_queries}; {more}."
    )


def prompts_with_enough_queries(queries: Sequence[str], n_heads: int) -> int:
    """Return how many of the first prompts have as many different queries as kinds need in a model
    of `n_heads` heads; 0 if all have fewer.
    """
    from icl_lens.analyses.atlas.kinds import queries_needed

    n_needed = queries_needed(n_heads)
    seen: set[str] = set()
    for number, query in enumerate(queries, start=1):
        seen.add(query)
        if len(seen) == n_needed:
            return number
    return 0


def duration_sentence(model: Any, batch: "PromptBatch | None", **counts: int) -> str:
    """Return how long the atlas is expected to take, and how much less with fewer edited prompts;
    empty for less than ten seconds. `counts` are n_sequences, n_edited and n_held_out.
    """
    from icl_lens.analyses.atlas.duration import expected_seconds, seconds_per_token
    from icl_lens.models.view import ModelView

    per_token = seconds_per_token(model, batch)
    seconds = expected_seconds(model, batch, per_token, **counts)
    if seconds < LONG:
        return ""
    sentence = f"This takes about {duration_in_words(seconds)} on this machine"
    n_heads = len(ModelView.of(model).heads())
    least = 0 if batch is None else prompts_with_enough_queries(batch.queries, n_heads)
    if 0 < least < counts["n_edited"]:
        fewer = counts | {"n_edited": least, "n_held_out": min(least, counts["n_held_out"])}
        shorter = duration_in_words(expected_seconds(model, batch, per_token, **fewer))
        sentence += f"; with --edited {least}, {shorter}, and kinds are surer with more"
    return f"{sentence}."


def _enough_prompts(task: SplitTask, seed: int, n_heads: int) -> int:
    """Return a number of prompts of the task that have enough different queries; 0 if a few times
    as many still have too few.
    """
    for times in (2, 4, 8):
        queries = [prompt.query for prompt in task.prompts(n=times * task.n, seed=seed)]
        if prompts_with_enough_queries(queries, n_heads):
            return times * task.n
    return 0
