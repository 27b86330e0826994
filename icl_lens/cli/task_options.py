"""Options of commands that run on a task: the task, its prompts, and what the model does on it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from rich.console import Console
from rich.text import Text
from typer import Option

from icl_lens.cli.console import progress, with_duration
from icl_lens.cli.option_groups import reject_options
from icl_lens.cli.options import ModelOptions, TokenOptions, preview
from icl_lens.errors import InputError
from icl_lens.foundation.files import parse_json

if TYPE_CHECKING:
    from icl_lens.analyses.explanation.result import Explanation
    from icl_lens.analyses.pair_check import PairCheck
    from icl_lens.analyses.task_check import TaskCheck
    from icl_lens.measures.controlled_ablation_result import ControlledAblation
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.class_labels import Labels
    from icl_lens.prompts.prompt import Prompt
    from icl_lens.prompts.tasks import Task
    from icl_lens.runs.run import Run

Layout = Literal["random", "last", "first", "order", "reorder", "imbalanced"]
Classes = Literal["binary", "all"]

DemonstrationsOption = Annotated[int, Option(min=1, help="Demonstrations per class, or pairs.")]
PathOption = Annotated[Path | None, Option(help="Sentences, pairs or word list: file.csv.")]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """A task, and how its prompts are sampled and arranged."""

    panel: ClassVar[str] = "Task"

    task: Annotated[
        str | None,
        Option(
            "--task",
            "-t",
            help="Task, e.g. animal-country or antonyms.",
            show_default="name of --path",
        ),
    ] = None
    classes: Annotated[Classes, Option(help="Two per prompt, or all.")] = "binary"
    layout: Annotated[
        Layout, Option(help="Order: balanced (random, last, first) or the paper's.")
    ] = "random"
    demonstrations: DemonstrationsOption = 2
    path: PathOption = None
    pairs: Annotated[bool, Option("--pairs", help="Read pairs of a text and its answer.")] = False
    columns: Annotated[
        str | None,
        Option(
            help="Columns of --path, e.g. message,topic.",
            show_default=False,
        ),
    ] = None
    split: Annotated[str, Option(help="Split to draw queries from.")] = "test"
    max_words: Annotated[int | None, Option(min=1, help="Skip texts with more words.")] = None
    labels: Annotated[
        str | None,
        Option(
            help="Label words: a,b or class=a,class=b.",
            show_default="those of --path; foo,bar",
        ),
    ] = None
    check: Annotated[
        bool, Option("--check/--no-check", help="First report what the model does on the task.")
    ] = True

    @property
    def name(self) -> str | None:
        """The task's name; by default the stem of `path`."""
        return self.path.stem if self.task is None and self.path is not None else self.task

    @property
    def has_pairs(self) -> bool:
        """Whether the task's prompts are pairs."""
        from icl_lens.prompts.pair_task import PairTask

        return self.name is not None and isinstance(self.find_task(), PairTask)

    def check_no_task(self) -> None:
        """Raise InputError for task options without a task."""
        reject_options(self, *vars(self), reason="it requires --task or --path")

    def sample_prompts(
        self, n: int, *, seed: int, conflicting: "Sequence[str | None]"
    ) -> "list[Prompt]":
        """Return `n` prompts of the task, or no prompts if no task is selected.

        Raise InputError for a task together with `conflicting` options, such as a prompt, and for
        task options without a task.
        """
        if self.name is None:
            self.check_no_task()
            return []
        if any(value is not None for value in conflicting):
            raise InputError(
                "a prompt, --answer and --text have no effect with a task; remove them, or --task "
                "and --path"
            )
        return self.prompts(n=n, seed=seed)

    def start(
        self,
        console: Console,
        model: ModelOptions,
        tokens: TokenOptions,
        *,
        n: int,
        seed: int,
        device: Any = None,
    ) -> "tuple[Any, PromptBatch]":
        """Load the model, on `device` unless the user selects one, and tokenize the prompts; print
        what there is to say about the user's data and words, and the first prompt.
        """
        prompts = self.prompts(n=n, seed=seed)
        self.describe_data(console, prompts, tokens)
        loaded = model.load(default_device=device)
        batch = tokens.tokenize(loaded, prompts)
        model.warn_of_words(console, prompts)
        console.print(preview(batch))
        return loaded, batch

    def describe_data(
        self, console: Console, prompts: "Sequence[Prompt]", tokens: TokenOptions
    ) -> None:
        """Print which rows and label words of the user's file are used, and that a newline
        separates demonstrations, unless the user chose a separator or a chat.
        """
        from icl_lens.cli.own_data import data_sentences, separator_sentence

        if self.name is None:
            return
        sentences = data_sentences(self.find_task(), prompts)
        separator = None
        if tokens.separator is None and not tokens.chat:
            separator = separator_sentence(prompts)
        if separator is not None:
            sentences.append(separator)
        for sentence in sentences:
            console.print(sentence, soft_wrap=True)

    def print_behavior(
        self,
        console: Console,
        model: Any,
        tokens: TokenOptions,
        *,
        n: int,
        seed: int,
        measured: "Sequence[Prompt] | None" = None,
    ) -> "TaskCheck | PairCheck | None":
        """Print one sentence about what the model does on the task; return its numbers.

        `measured` are the prompts of the numbers below it: a sentence says if they are others.

        The check is one that an earlier command has stored, or is made on at most `n` prompts. If
        these are too few, print how to check instead. Without a task or with --no-check, print
        nothing. Then return None.
        """
        from icl_lens.analyses.task_check import MIN_PROMPTS, N_PROMPTS

        if self.name is None or not self.check:
            return None
        size = min(n, N_PROMPTS)
        sizes = [N_PROMPTS, size] if size >= MIN_PROMPTS else [N_PROMPTS]
        behavior = self.behavior(
            console, model, tokens, sizes=sizes, seed=seed, only_stored=size < MIN_PROMPTS
        )
        if behavior is None:
            unchecked = (
                f"The task was not checked, because there are fewer than {MIN_PROMPTS} prompts"
            )
            console.print(Text(f"{unchecked}; icl-lens check draws more.\n", "dim"))
            return None
        console.print(str(behavior))
        if measured is not None:
            checked = replace(self, layout="random").prompts(n=behavior.n_prompts, seed=seed)
            if set(measured) != set(checked):
                console.print("The numbers below are of another sample of the task's prompts.")
        console.print()
        return behavior

    def measured_prompts(self, n: int, seed: int) -> "list[Prompt]":
        """Return the prompts that a command measures with `-n`."""
        return self.prompts(n=n, seed=seed)

    def print_more_queries(
        self,
        console: Console,
        measured: "Sequence[Prompt]",
        *,
        n: int,
        seed: int,
        is_undecided: bool,
    ) -> None:
        """Print how many queries the measured prompts have, and what gives more, if a result of
        them is undecided; without a task, print nothing.
        """
        from icl_lens.cli.more_queries import more_queries_sentence

        if not is_undecided or self.name is None:
            return

        def draw(n: int) -> "list[Prompt]":
            return self.measured_prompts(n, seed)

        console.print(more_queries_sentence(self.find_task(), measured, draw, n=n))

    def behavior(
        self,
        console: Console,
        model: Any,
        tokens: TokenOptions,
        *,
        sizes: Sequence[int],
        seed: int,
        only_stored: bool = False,
        is_asked_for: bool = False,
        run: "Run | None" = None,
    ) -> "TaskCheck | PairCheck | None":
        """Return what the model does on the task: the result of a check that an earlier command has
        stored, or of a new check, which is stored.

        `sizes` are numbers of prompts: a stored check is looked for with each of them in turn. A
        new check is made on the last number of prompts; for `only_stored`, none is made, and None
        is returned. The prompts are in balanced random order regardless of --layout. A check that
        takes long is announced with its duration, on standard error; `is_asked_for` if it is all
        that a command does.
        """
        from icl_lens.analyses.task_check import task_check
        from icl_lens.cli.stored_checks import check_digest, store_check, stored_check
        from icl_lens.runs.run import Run

        run = Run() if run is None else run
        tokenized = tokens.tokenize_arguments(model)
        prompts: list[Prompt] = []
        digest = ""
        for size in sizes:
            prompts = replace(self, layout="random").prompts(n=size, seed=seed)
            digest = check_digest(model, prompts, seed=seed, tokenized=tokenized)
            # The main process alone reads the cache, so that all processes agree on what is
            # computed.
            earlier_check = run.distributed.run_on_main(partial(stored_check, digest))
            if earlier_check is not None:
                return earlier_check
        if only_stored:
            return None
        with progress(hidden=console.quiet, announces=False) as report:
            if not console.quiet:
                report = with_duration(report, is_asked_for=is_asked_for)
            run_with_report = replace(run, progress=report)
            behavior = task_check(model, prompts, seed=seed, run=run_with_report, **tokenized)
        if run.distributed.is_main:
            store_check(digest, behavior)
        return behavior

    def prompts(self, *, n: int, seed: int) -> "list[Prompt]":
        """Return `n` prompts of the task.

        Raise InputError like the task, if no task is selected, and for options that have no effect.
        """
        task = self.find_task()
        labels = None if self.labels is None else parse_labels(self.labels)
        return task.prompts(
            n, seed=seed, layout=self.layout, demonstrations=self.demonstrations, labels=labels
        )

    def other_tasks(self, names: str, *, n: int, seed: int) -> "list[list[Prompt]]":
        """Return prompts of each task of `--mean-over`, with as many demonstrations as here; raise
        InputError if it names none.
        """
        from icl_lens.prompts.tasks import named_task

        tasks = [name.strip() for name in names.split(",") if name.strip()]
        if not tasks:
            raise InputError(
                f"--mean-over must name tasks, got {names!r}; e.g. --mean-over "
                "antonyms,present-past"
            )
        prompts = []
        for name in tasks:
            task = named_task(name)
            prompts.append(task.prompts(n, seed=seed, demonstrations=self.demonstrations))
        return prompts

    def find_task(self) -> "Task":
        """Return the task that the options describe.

        Raise InputError if no task is selected, and for options that have no effect.
        """
        from icl_lens.prompts.pair_task import PAIR_COLUMNS, PairTask
        from icl_lens.prompts.tasks import named_task
        from icl_lens.prompts.text_task import TextTask

        if self.name is None:
            raise InputError(
                "pass --task, e.g. --task sentiment-number, or your own sentences with --path"
            )
        columns = None
        if self.columns is not None:
            text, _, label = self.columns.partition(",")
            if not (text and label) or "," in label:
                raise InputError(
                    "--columns must name a text and a label column, e.g. review,stars, got "
                    f"{self.columns!r}"
                )
            columns = text.strip(), label.strip()
        named = named_task(self.name, self.path)
        name, path = named.name, named.path
        if self.pairs or isinstance(named, PairTask):
            reason = "pairs have no classes and a single split"
            reject_options(self, "split", "max_words", "classes", "labels", "layout", reason=reason)
            if path is None:
                reject_options(self, "columns", reason="bundled pairs have no columns")
            return PairTask(name, path, columns=columns or PAIR_COLUMNS)
        if isinstance(named, TextTask):
            if path is None:
                reject_options(self, "columns", reason="the columns of Hub datasets are known")
            elif Path(path).is_file():
                reject_options(self, "split", reason="a single file has no splits")
            return TextTask(
                name,
                path,
                columns=columns or TextTask.columns,
                split=self.split,
                max_words=self.max_words,
                classes=self.classes,
            )
        if path is not None:
            named.digest()  # report an unreadable file first
        reject_options(
            self,
            "columns",
            "split",
            "max_words",
            "classes",
            reason="it does not apply to word tasks",
        )
        return named


def parse_labels(text: str) -> "Labels":
    """Return the labels of `--labels`: words "a,b", "class=word,class=word", or the latter as a
    JSON object.

    Several words of a class are separated by "|". Raise InputError if only some words have a class.
    """
    if text.lstrip().startswith("{"):
        try:
            return parse_json(text)
        except ValueError as error:
            raise InputError(
                f"--labels must be a JSON object from classes to words, got {text!r} ({error})"
            ) from None
    pieces = [piece.strip() for piece in text.split(",")]
    words_of: dict[str, list[str]] = {}
    n_pairs = 0
    for piece in pieces:
        if re.search(r".=.", piece):
            name, words = re.split(r"\s*=\s*", piece, maxsplit=1)
            words_of[name] = [word.strip() for word in words.split("|")]
            n_pairs += 1
    if not n_pairs:
        return pieces
    if n_pairs < len(pieces):
        raise InputError(
            f"--labels must have a class for every word or for none, got {text!r}; write "
            "class=word,…"
        )
    return words_of


MIN_QUERIES = 16
"""Tasks with fewer different queries are not split by query: the halves would have too few queries
each.
"""


@dataclass(frozen=True, kw_only=True)
class SplitTask(TaskOptions):
    """A task whose prompts are split: heads are located on some and tested on others."""

    n: Annotated[
        int,
        Option(
            "--n",
            "-n",
            min=1,
            help="Test prompts; n others (in fours) locate the heads.",
        ),
    ] = 200

    def split_prompts(self, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Return prompts to locate heads on and `n` prompts to test them on, with other queries if
        there are enough.
        """
        from icl_lens.prompts.tasks import halves_by_query

        half = self.n + -self.n % 4  # a multiple of four, in which classes and labels are balanced
        prompts = self.prompts(n=4 * half, seed=seed)  # enough to fill both halves
        if len({prompt.query for prompt in prompts}) >= min(2 * self.n, MIN_QUERIES):
            locating, testing = (
                halves_by_query(prompts, half)[0],
                halves_by_query(prompts, self.n)[1],
            )
            if (len(locating), len(testing)) == (half, self.n):
                return locating, testing
        return prompts[:half], prompts[half:][: self.n]

    def measured_prompts(self, n: int, seed: int) -> "list[Prompt]":
        """Return the test prompts."""
        return replace(self, n=n).split_prompts(seed)[1]


def shared_queries_remedy(task: SplitTask, seed: int) -> str:
    """Return what to do so that the prompts that locate heads and those that test them have no
    query in common: a half, quarter and so on of the prompts, if that is enough, or more texts.
    """
    n = task.n // 2
    while n >= 4:
        locating, testing = replace(task, n=n).split_prompts(seed)
        queries = {prompt.query for prompt in locating}
        if queries.isdisjoint(prompt.query for prompt in testing):
            return f"With -n {n}, or with more different texts, no query is in both halves."
        n //= 2
    return "With more different texts, no query is in both halves."


def print_what_heads_carry(
    console: Console,
    behavior: "TaskCheck | PairCheck | None",
    removal: "ControlledAblation | Explanation | None",
) -> None:
    """Print what heads that matter carry, if the model is not shown to learn on the task; nothing
    if it is, if the heads are not shown to matter, or if one of both is not known.
    """
    if behavior is None or removal is None or not removal.shows_that_heads_matter:
        return
    if reading := behavior.on_heads_that_matter():
        console.print(reading)
