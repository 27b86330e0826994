"""Option groups shared by several commands; each group is a panel of the help page."""

import re
import tempfile
import time
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from rich.console import Console
from rich.text import Text
from typer import Option

from icl_lens.cli.console import PlainConsole, progress, report_error, with_duration
from icl_lens.cli.option_groups import reject_options
from icl_lens.errors import InputError
from icl_lens.files import parse_json
from icl_lens.head_scores import LOCATING_SCORE, Score

if TYPE_CHECKING:
    import torch

    from icl_lens.analyses.explanation import Explanation
    from icl_lens.analyses.pair_behavior import PairCheck
    from icl_lens.analyses.task_behavior import TaskCheck
    from icl_lens.measures.controlled_ablation import ControlledAblation
    from icl_lens.models.head import Head
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.class_labels import Labels
    from icl_lens.prompts.prompt import Prompt, Template
    from icl_lens.prompts.tasks import Task
    from icl_lens.runs.run import Run


Layout = Literal["random", "last", "first", "order", "reorder", "imbalanced"]
Classes = Literal["binary", "all"]
FinalNorm = Literal["frozen", "own"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Positions = Literal["last", "all"]
ReaderAt = Literal["last", "label", "text", "query", "other"]

PAPER_PROMPT, PAPER_ANSWER = "love : bar like : bar eight : foo two : foo one :", "foo"

SeedOption = Annotated[int, Option(help="Seed for prompts and random heads.")]
DemonstrationsOption = Annotated[int, Option(min=1, help="Demonstrations per class, or pairs.")]
ByOption = Annotated[
    Score | None,
    Option(help="Score that ranks heads.", show_default="contrast; increase without other labels"),
]
LocatingByOption = Annotated[
    Score | None, Option(help="Score that locates heads.", show_default=LOCATING_SCORE)
]
PathOption = Annotated[Path | None, Option(help="Sentences, pairs or word list: file.csv.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its device and precision."""

    panel: ClassVar[str] = "Model"

    model: Annotated[
        str, Option("--model", "-m", help="Bundled model, folder, GGUF file or Hub name.")
    ] = "icl-mini"
    device: Annotated[
        str | None,
        Option(help="Device, e.g. cpu, cuda or cuda:1.", show_default="GPU if available"),
    ] = None
    dtype: Annotated[
        Dtype, Option(help="Precision of the weights; the readout uses at least float32.")
    ] = "float32"
    revision: Annotated[str | None, Option(help="Hub revision: branch, tag or commit.")] = None

    def load(self, *, default_device: "torch.device | None" = None) -> Any:
        """Load the model, on `default_device` unless the user selects a device."""
        import torch

        from icl_lens import load_model

        console = PlainConsole(stderr=True, highlight=False)
        if console.is_terminal:
            console.print(f"loading {self.model} …", style="dim")
        device = default_device if self.device is None else self.device
        return load_model(
            self.model, device=device, dtype=getattr(torch, self.dtype), revision=self.revision
        )

    def warn_of_words(self, console: Console, prompts: "Sequence[Prompt]") -> None:
        """Warn, on standard error, if a bundled model does not know the words of prompts that it
        has read.
        """
        from icl_lens.cli.own_data import unknown_words_warning

        warning = unknown_words_warning(self.model, prompts)
        if warning is not None and not console.quiet:
            report_error("icl-lens", warning)


ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def unescape(text: str) -> str:
    r"""Replace the escapes `\n`, `\t` and `\\` by a line break, a tab and a backslash."""
    return re.sub(r"\\[nt\\]", lambda escape: ESCAPES[escape[0]], text)


def parse_prompt(text: str, answer: str | None) -> "Prompt":
    """Parse a prompt of the command line, with the escapes of `--separator` and `--template`.

    Raise InputError like `Prompt.parse`.
    """
    from icl_lens.prompts.prompt import Prompt

    return Prompt.parse(unescape(text), answer=answer)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How prompts are formatted and tokenized."""

    panel: ClassVar[str] = "Prompt format"

    template: Annotated[str, Option(help="Format of a demonstration; \\n and \\t are escapes.")] = (
        "{text} : {label}"
    )
    separator: Annotated[
        str | None,
        Option(
            help="Separator between demonstrations.",
            show_default="space or newline",
        ),
    ] = None
    prefix: Annotated[str, Option(help="Text before the first demonstration.")] = ""
    chat: Annotated[
        bool, Option("--chat", help="Write demonstrations as turns of the model's chat.")
    ] = False
    system: Annotated[
        str | None,
        Option(help="With --chat: system message.", show_default="the chat template's own"),
    ] = None
    bos: Annotated[
        bool | None,
        Option(
            "--bos/--no-bos",
            help="Add or omit a beginning-of-sequence token.",
            show_default="tokenizer's default",
        ),
    ] = None

    def prompt_template(self, model: Any = None) -> "Template":
        """Return the template of prompts, in which the query has the format of a demonstration up
        to the label.

        That of a chat is the model's. Raise InputError for an invalid template, or for one that
        ends in white space unless a separator is given: the default separator would be added to it.
        """
        from icl_lens.prompts.prompt import Template

        if self.chat:
            reject_options(
                self, "template", "separator", "prefix", reason="--chat has the chat template's own"
            )
            return Template.chat(model, system=self.system)
        reject_options(self, "system", reason="only --chat has a system message")
        demonstration = unescape(self.template)
        before, _, after = demonstration.partition("{label}")
        if "{label}" in demonstration and "{text}" in after:
            raise InputError(
                f"--template must have {{text}} before {{label}}, got {_quoted(demonstration)}; in "
                "Python, il.Template(demonstration, query) takes labels before texts"
            )
        gap = after[len(after.rstrip()) :]
        if self.separator is None and gap:
            raise InputError(
                "--template must not end in white space without --separator, got "
                f"{_quoted(demonstration)}; use --template {_quoted(demonstration.rstrip())} "
                f"--separator {_quoted(gap)}"
            )
        separator = None if self.separator is None else unescape(self.separator)
        return Template(demonstration, before.rstrip(" "), separator, unescape(self.prefix))

    def tokenize_arguments(self, model: Any) -> dict[str, Any]:
        """Return the keyword arguments of `il.tokenize`."""
        return {"template": self.prompt_template(model), "prepend_bos": self.bos}

    def tokenize(self, model: Any, prompts: "Sequence[Prompt]") -> "PromptBatch":
        """Format and tokenize prompts."""
        from icl_lens.prompts.tokenize import tokenize

        return tokenize(model, prompts, **self.tokenize_arguments(model))


def _quoted(text: str) -> str:
    """Return text as it is written in a shell: escaped, in single quotes."""
    for escape, character in reversed(ESCAPES.items()):
        text = text.replace(character, escape)
    return f"'{text}'"


def preview(batch: "PromptBatch", *, n: int | None = None, demonstrations: str = "") -> Text:
    """Return the first of n prompts (by default those of the batch) as the model reads it, to print
    before a run; `demonstrations` says how many they have.
    """
    what = batch.count_summary if n is None else f"{n:,} prompts"
    if demonstrations:
        what += f", {demonstrations}"
    return Text(f"First of {what}:\n{batch.texts[0]}\n", "dim")


@dataclass(frozen=True, kw_only=True)
class ReadoutOptions(TokenOptions):
    """How prompts are formatted and tokenized, and how vectors are read out."""

    panel: ClassVar[str] = "Prompt format and readout"

    final_norm: Annotated[
        FinalNorm, Option(help="Final norm's scale: frozen at the final residual, or recomputed.")
    ] = "frozen"
    bias: Annotated[
        bool, Option("--bias/--no-bias", help="Include the final norm's shift and b_U.")
    ] = True

    def readout_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments `final_norm` and `bias`."""
        return {"final_norm": self.final_norm, "bias": self.bias}


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """The results page: its path, and whether to open it."""

    panel: ClassVar[str] = "Output"

    html: Annotated[Path | None, Option(help="Write a self-contained page.")] = None
    open_page: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False

    def check(self) -> None:
        """Raise InputError if an output file cannot be written."""
        from icl_lens.files import check_writable

        check_writable(*(path for name, path in vars(self).items() if name != "open_page"))

    def write(self, page: Callable[[], str]) -> Path | None:
        """Write the page to `--html` or, for `--open` alone, to a temporary file that is not
        deleted.

        Return None if neither is given. Raise InputError if the folder is not writable.
        """
        from icl_lens.files import write_text

        if self.html is None and not self.open_page:
            return None
        path = self.html or Path(tempfile.mkdtemp(prefix="icl-lens-")) / "page.html"
        write_text(path, page())
        return path

    def show(self, path: Path | None, console: Console) -> None:
        """Print the path of a page that was written and, with `--open`, open it in the browser."""
        if path is not None:
            console.print(f"Page: {path}", soft_wrap=True)
        if path is not None and self.open_page and not webbrowser.open(path.resolve().as_uri()):
            console.print("No browser could be started; open the page manually.")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(PageOptions):
    """The results page and the JSON file."""

    json_file: Annotated[Path | None, Option("--json", help="Write all numbers as JSON.")] = None

    def write_json(self, text: Callable[[], str]) -> None:
        """Write the text to `--json`, if given."""
        from icl_lens.files import write_text

        if self.json_file is not None:
            write_text(self.json_file, text())

    def show(self, path: Path | None, console: Console) -> None:
        """Also print the path of the JSON file."""
        if self.json_file is not None:
            console.print(f"JSON: {self.json_file}", soft_wrap=True)
        super().show(path, console)


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
        """Load the model, on `device` unless the user selects one; tokenize the prompts, and print
        the first.
        """
        prompts = self.prompts(n=n, seed=seed)
        self.print_data(console, prompts, tokens)
        loaded = model.load(default_device=device)
        batch = tokens.tokenize(loaded, prompts)
        model.warn_of_words(console, prompts)
        console.print(preview(batch))
        return loaded, batch

    def print_data(
        self, console: Console, prompts: "Sequence[Prompt]", tokens: TokenOptions
    ) -> None:
        """Print what is used of the user's file, and the separator that its texts call for."""
        from icl_lens.cli.own_data import data_sentences, separator_sentence

        if self.name is None:
            return
        sentences = data_sentences(self.find_task(), prompts)
        if tokens.separator is None and not tokens.chat:
            sentences += separator_sentence(prompts)
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

        The check is one that an earlier command has kept, or is made on at most `n` prompts. If
        these are too few, print how to check instead. Without a task or with --no-check, print
        nothing. Then return None.
        """
        from icl_lens.analyses.task_behavior import MIN_PROMPTS, N_PROMPTS

        if self.name is None or not self.check:
            return None
        size = min(n, N_PROMPTS)
        sizes = [N_PROMPTS, size] if size >= MIN_PROMPTS else [N_PROMPTS]
        behavior = self.behavior(
            console, model, tokens, sizes=sizes, seed=seed, only_kept=size < MIN_PROMPTS
        )
        if behavior is None:
            console.print(Text("icl-lens check says what the model does on this task.\n", "dim"))
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
        only_kept: bool = False,
        is_asked_for: bool = False,
        run: "Run | None" = None,
    ) -> "TaskCheck | PairCheck | None":
        """Return what the model does on the task, for the first number of prompts in `sizes` whose
        check is kept.

        If none is, check it on the last number of prompts and keep the result, or return None for
        `only_kept`. The prompts are in balanced random order regardless of --layout. A check that
        takes long is announced with its duration, on standard error; `is_asked_for` if it is all
        that a command does.
        """
        from icl_lens.analyses.task_behavior import task_check
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
        if only_kept:
            return None
        with progress(hidden=console.quiet, announces=False) as report:
            timed = report
            if not console.quiet:
                timed = with_duration(report, is_asked_for=is_asked_for)
            reported = replace(run, progress=timed)
            behavior = task_check(model, prompts, seed=seed, run=reported, **tokenized)
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
        int, Option("--n", "-n", min=1, help="Number of test prompts; n others locate the heads.")
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
            return f"With -n {n}, or with more different texts to ask for, none are shared."
        n //= 2
    return "With more different texts to ask for, none are shared."


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


def located_on(locating: "PromptBatch", testing: "PromptBatch") -> str:
    """Return the end of a sentence about located heads: on how many prompts, and how many queries
    also occur here.
    """
    located = {prompt.query for prompt in locating.prompts}
    n_shared = len(located.intersection(prompt.query for prompt in testing.prompts))
    queries = "with other queries"
    if n_shared:
        queries = f"{n_shared} of their {len(located)} queries also occur here"
    return f" on {len(locating)} other prompts ({queries})"


def head_names(text: str) -> list[str]:
    """Return the heads of an option: names such as "L1H2,L3H0", or the column `name` of a table
    that `icl-lens locate --out` has written.

    Raise InputError for a file that is missing or has no such column.
    """
    if not text.endswith((".csv", ".parquet")):
        return list(dict.fromkeys(text.replace(",", " ").split()))
    from icl_lens.prompts.datasets import read_files

    rows = list(read_files([Path(text)]).rows)
    if not all("name" in row for row in rows):
        raise InputError(
            f"{text!r} must have the column 'name' with heads such as L1H2; pass heads.csv of the "
            "folder that icl-lens locate --out has written"
        )
    return list(dict.fromkeys(str(row["name"]) for row in rows))


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """Heads that the user names, or how many to locate."""

    panel: ClassVar[str] = "Heads"

    heads: Annotated[
        str | None,
        Option(help="Heads to test: L1H2,L3H0 or heads.csv.", show_default="located heads"),
    ] = None
    k: Annotated[
        int | None,
        Option(
            "--top",
            "-k",
            min=1,
            help="Number of heads to locate.",
            show_default="12, at most half of all",
        ),
    ] = None

    def choose(
        self, model: Any, prompts: "PromptBatch", *, by: Score | None = None
    ) -> "tuple[list[Head], str]":
        """Return the heads named by the options or located on the prompts, and how they were
        chosen.
        """
        from icl_lens.measures.locate import N_LOCATED, locate, with_predicted_answers
        from icl_lens.models.view import ModelView
        from icl_lens.runs.run import Run

        if self.heads is not None:
            if by is not None:
                raise InputError("pass either --heads, or --by to locate them, not both")
            names = head_names(self.heads)
            if not names:
                raise InputError(
                    "--heads must name at least one head, e.g. L1H2,L3H0; omit it to locate heads"
                )
            return [ModelView.of(model).check_head(name) for name in names], "named in --heads"
        by = by or LOCATING_SCORE
        k = self.k or min(N_LOCATED, len(ModelView.of(model).heads()) // 2)
        with progress() as report:
            answered = with_predicted_answers(model, prompts)
            run = Run(progress=report)
            located = locate(model, answered, by=by, k=k, other_scores=False, run=run)
        return located.heads, f"located by {by}"


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """The output folder of a resumable run."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None,
        Option("--out", "-o", help="Output folder; an interrupted run resumes from it."),
    ] = None

    @contextmanager
    def running(self) -> Iterator[tuple["Run", PlainConsole]]:
        """Yield the run with this folder, and a console that is quiet except in the main process.

        Warnings are printed. On Ctrl-C, end the run with a line that explains how to resume it.
        Most errors occur in all processes and should be reported once. The other processes
        therefore wait five seconds before they report an error: if the main process reports it,
        too, the launcher ends them before that.
        """
        from icl_lens.runs.folder import CorruptChunk
        from icl_lens.runs.run import Run

        distributed = Run().distributed
        is_main = distributed.is_main
        console = PlainConsole(stderr=True, quiet=not is_main, soft_wrap=True, highlight=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", CorruptChunk)
                warnings.showwarning = lambda message, *_, **__: console.print(
                    f"icl-lens: {message}"
                )
                yield Run(self.out), PlainConsole(quiet=not is_main)
        except InputError as error:
            if is_main:
                raise
            time.sleep(5)
            raise InputError(f"process {distributed.rank} of {distributed.size}: {error}") from None
        except KeyboardInterrupt:
            hint = (
                ""
                if self.out is None
                else f"; rerun the same command to resume from {str(self.out)!r}"
            )
            console.print(f"icl-lens: interrupted{hint}")
            raise SystemExit(130) from None

    def about(
        self,
        task: TaskOptions,
        model: ModelOptions,
        tokens: TokenOptions,
        *,
        prompts: "Sequence[Prompt]",
        n: int,
        seed: int,
    ) -> dict[str, Any]:
        """Return what the folder's manifest says about the model and the prompts."""
        template = replace(
            tokens, chat=False, system=None
        ).prompt_template()  # that of a chat is the model's
        template = template.for_prompts([] if tokens.chat else prompts)
        return {
            "model": model.model,
            "revision": model.revision,
            "dtype": model.dtype,
            "task": task.name or "",
            "n": n,
            "seed": seed,
            "layout": task.layout,
            "demonstrations": task.demonstrations,
            "path": None if task.path is None else str(task.path),
            "columns": None if task.columns is None else task.columns.replace(" ", ""),
            "split": task.split,
            "max_words": task.max_words,
            "classes": task.classes,
            "template": template.demonstration,
            "separator": template.separator,
            "prefix": template.prefix,
            "prepend_bos": tokens.bos,
            # Stored only if they differ from the default, so that older folders stay valid.
            **({"chat": tokens.system or True} if tokens.chat else {}),
            **({"pairs": True} if task.has_pairs else {}),
        }
